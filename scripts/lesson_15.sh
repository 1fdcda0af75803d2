#!/usr/bin/env bash
# Lesson 15: one model in TensorFlow, Paddle, PyTorch and JAX, each in a process of its own.
#   bash scripts/lesson_15.sh [--nproc WORKERS] [other flags of the lesson; --help lists them]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 15
exec "$python" "$root/scripts/lockstep" lesson 15 "$@"
