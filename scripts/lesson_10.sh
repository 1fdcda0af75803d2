#!/usr/bin/env bash
# Lesson 10: N ranks and one process: each condition kept, then removed.
#   bash scripts/lesson_10.sh [--nproc RANKS] [other flags of the lesson; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_10_same_as_one_process.py" "$@"
