#!/usr/bin/env bash
# Lesson 07: one process, several devices, one graph (TensorFlow's make_parallel).
#   bash scripts/lesson_07.sh [--nproc TOWERS] [other flags of the lesson; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_07_tf_make_parallel.py" "$@"
