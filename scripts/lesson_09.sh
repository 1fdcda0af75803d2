#!/usr/bin/env bash
# Lesson 09: BatchNorm on parts of a batch, and synchronised BatchNorm.
#   bash scripts/lesson_09.sh [--nproc RANKS] [other flags of the lesson; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_09_batch_norm.py" "$@"
