#!/usr/bin/env bash
# Lesson 21: 16 bits instead of 32, on N ranks: autocast, loss scaling, gradients in half the bytes.
#   bash scripts/lesson_21.sh [--nproc RANKS] [--dtype float32|bfloat16|float16] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 21
exec "$python" "$root/scripts/lockstep" lesson 21 "$@"
