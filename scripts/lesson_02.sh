#!/usr/bin/env bash
# Lesson 02: a launcher starts one process per replica (DistributedDataParallel).
#   bash scripts/lesson_02.sh [--nproc RANKS] [--launcher torchrun|launch] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 02
exec "$python" "$root/scripts/lockstep" lesson 02 "$@"
