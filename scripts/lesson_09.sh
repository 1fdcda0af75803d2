#!/usr/bin/env bash
# Lesson 09: BatchNorm on parts of a batch, and synchronised BatchNorm.
#   bash scripts/lesson_09.sh [--nproc RANKS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 09
exec "$python" "$root/scripts/lockstep" lesson 09 "$@"
