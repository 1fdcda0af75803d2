#!/usr/bin/env bash
# Lesson 14: two launchers on this machine play two machines (torchrun with --nnodes=2).
#   bash scripts/lesson_14.sh [--nproc RANKS] [--launcher torchrun|launch] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 14
exec "$python" "$root/scripts/lockstep" lesson 14 "$@"
