#!/usr/bin/env bash
# Lesson 06: checkpoints, from which a killed job goes on as if nothing had happened.
#   bash scripts/lesson_06.sh [--nproc RANKS] [--checkpoints FOLDER] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 06
exec "$python" "$root/scripts/lockstep" lesson 06 "$@"
