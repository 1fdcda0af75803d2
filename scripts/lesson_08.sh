#!/usr/bin/env bash
# Lesson 08: Paddle, one process with several places, then one process per place.
#   bash scripts/lesson_08.sh [--nproc PLACES] [other flags of the lesson; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_08_paddle_parallel_do.py" "$@"
