#!/usr/bin/env bash
# Lesson 11: one process, DataParallel and DDP side by side; a cost model, fitted and tested.
#   bash scripts/lesson_11.sh [--nproc RANKS] [other flags; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 11
exec "$python" "$root/scripts/lockstep" lesson 11 "$@"
