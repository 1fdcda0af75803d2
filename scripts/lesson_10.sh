#!/usr/bin/env bash
# Lesson 10: N ranks train as one process does: each condition kept, then removed.
#   bash scripts/lesson_10.sh [--nproc RANKS] [--micro-batches N] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 10
exec "$python" "$root/scripts/lockstep" lesson 10 "$@"
