#!/usr/bin/env bash
# Lesson 20: ranks and their workers read one stream: each row once, in any number of workers.
#   bash scripts/lesson_20.sh [--nproc RANKS] [--workers N] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 20
exec "$python" "$root/scripts/lockstep" lesson 20 "$@"
