#!/usr/bin/env bash
# Lesson 07: one process, several devices, one graph (make_parallel, TensorFlow 1).
#   bash scripts/lesson_07.sh [--nproc TOWERS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 07
exec "$python" "$root/scripts/lockstep" lesson 07 "$@"
