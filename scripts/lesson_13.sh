#!/usr/bin/env bash
# Lesson 13: one layer on several ranks (tensor parallelism), and replicas of that (hybrid).
#   bash scripts/lesson_13.sh [--nproc RANKS] [--data N --tensor M] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/scripts/torchrun.py" \
    "$root/lessons/lesson_13_tensor_and_hybrid.py" "$@"
