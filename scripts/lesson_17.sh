#!/usr/bin/env bash
# Lesson 17: DistributedDataParallel, written in about 90 lines, beside the library's.
#   bash scripts/lesson_17.sh [--nproc RANKS] [--bucket-mb MEBIBYTES] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 17
exec "$python" "$root/scripts/lockstep" lesson 17 "$@"
