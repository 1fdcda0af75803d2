#!/usr/bin/env bash
# Lesson 03: a script that starts its own processes with mp.spawn, and trains on real data.
#   bash scripts/lesson_03.sh [--nproc RANKS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 03
exec "$python" "$root/scripts/lockstep" lesson 03 "$@"
