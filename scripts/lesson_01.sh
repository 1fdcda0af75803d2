#!/usr/bin/env bash
# Lesson 01: one process, several replicas (nn.DataParallel written out).
#   bash scripts/lesson_01.sh [--nproc REPLICAS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 01
exec "$python" "$root/scripts/lockstep" lesson 01 "$@"
