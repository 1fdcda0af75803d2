#!/usr/bin/env bash
# Lesson 05: one rank speaks for all; the loss that it logs is the loss of all rows.
#   bash scripts/lesson_05.sh [--nproc RANKS] [--output all|rank0] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/scripts/torchrun.py" \
    "$root/lessons/lesson_05_rank_zero_output.py" "$@"
