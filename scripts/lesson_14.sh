#!/usr/bin/env bash
# Lesson 14: two launchers on this machine play two machines (torchrun with --nnodes=2).
#   bash scripts/lesson_14.sh [--nproc RANKS] [--rendezvous static|c10d|launch] [see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/lessons/lesson_14_several_machines.py" "$@"
