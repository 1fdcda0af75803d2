#!/usr/bin/env bash
# Lesson 06: checkpoints, from which a killed job goes on as if nothing had happened.
#   bash scripts/lesson_06.sh [--nproc RANKS] [--checkpoints FOLDER] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/run_lesson.py" "$root/scripts/torchrun.py" \
    "$root/lessons/lesson_06_checkpoint_map_location.py" "$@"
