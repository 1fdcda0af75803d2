#!/usr/bin/env bash
# Runs a training script of yours on CPU ranks, unchanged, and says what goes wrong in silence.
#   bash scripts/check.sh [--nproc 2] [--updates 50] [--json] train.py [its flags]; --help lists them
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" check
exec "$python" "$root/scripts/lockstep" check "$@"
