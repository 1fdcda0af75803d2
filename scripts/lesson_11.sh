#!/usr/bin/env bash
# Lesson 11: one process, DataParallel and DDP side by side; a cost model, fitted and tested.
#   bash scripts/lesson_11.sh [--nproc RANKS] [--report FILE.html] [other flags; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
program=lessons/lesson_11_how_fast.py
[[ " $* " != *" --report"* ]] || program=scripts/how_fast_report.py # it calls the lesson
exec "$python" "$root/scripts/start.py" "$root/$program" "$@"
