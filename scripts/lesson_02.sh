#!/usr/bin/env bash
# Lesson 02: a launcher starts one process per replica (DistributedDataParallel).
#   bash scripts/lesson_02.sh [--nproc RANKS] [--launcher torchrun|launch] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/scripts/torchrun.py" \
    "$root/lessons/lesson_02_launch_ddp.py" "$@"
