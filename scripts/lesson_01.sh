#!/usr/bin/env bash
# Lesson 01: one process, several replicas (nn.DataParallel written out).
#   bash scripts/lesson_01.sh [--nproc REPLICAS] [other flags of the lesson; --help lists them]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_01_data_parallel.py" "$@"
