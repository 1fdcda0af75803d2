#!/usr/bin/env bash
# Lesson 12: the layers of one model on several ranks (pipeline parallelism).
#   bash scripts/lesson_12.sh [--nproc RANKS] [--micro-batches N] [--schedule naive|gpipe|1f1b] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/scripts/torchrun.py" \
    "$root/lessons/lesson_12_pipeline_parallel.py" "$@"
