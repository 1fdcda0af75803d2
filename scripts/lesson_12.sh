#!/usr/bin/env bash
# Lesson 12: the layers of one model on several ranks (pipeline parallelism).
#   bash scripts/lesson_12.sh [--nproc RANKS] [--micro-batches N] [--schedule naive|gpipe|1f1b] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 12
exec "$python" "$root/scripts/lockstep" lesson 12 "$@"
