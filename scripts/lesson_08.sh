#!/usr/bin/env bash
# Lesson 08: Paddle, one process with several places, then one process per place.
#   bash scripts/lesson_08.sh [--nproc PLACES] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 08
exec "$python" "$root/scripts/lockstep" lesson 08 "$@"
