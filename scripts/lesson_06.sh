#!/usr/bin/env bash
# Lesson 06: checkpoints, from which a killed job goes on as if nothing had happened.
#   bash scripts/lesson_06.sh [--nproc RANKS] [--checkpoints FOLDER] [other flags; see --help]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set the same, and print a warning
exec bash "$scripts/torchrun.sh" "$scripts/../lessons/lesson_06_checkpoint_map_location.py" "$@"
