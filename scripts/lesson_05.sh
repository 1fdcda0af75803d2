#!/usr/bin/env bash
# Lesson 05: one rank speaks for all; the loss that it logs is the loss of all rows.
#   bash scripts/lesson_05.sh [--nproc RANKS] [--output all|rank0] [other flags; see --help]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# With several ranks, torchrun would set the same value and print a warning about it.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec bash "$scripts/torchrun.sh" "$scripts/../lessons/lesson_05_rank_zero_output.py" "$@"
