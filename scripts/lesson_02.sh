#!/usr/bin/env bash
# Lesson 02: a launcher starts one process per replica (DistributedDataParallel).
#   bash scripts/lesson_02.sh [--nproc RANKS] [--launcher torchrun|launch] [other flags; see --help]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$scripts/torchrun.sh" "$scripts/../lessons/lesson_02_launch_ddp.py" "$@"
