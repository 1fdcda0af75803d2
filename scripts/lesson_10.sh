#!/usr/bin/env bash
# Lesson 10: N ranks and one process: each condition kept, then removed.
#   bash scripts/lesson_10.sh [--nproc RANKS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 10
exec "$python" "$root/scripts/lockstep" lesson 10 "$@"
