#!/usr/bin/env bash
# Lesson 13: one layer on several ranks (tensor parallelism), and replicas of that (hybrid).
#   bash scripts/lesson_13.sh [--nproc RANKS] [--data N --tensor M] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 13
exec "$python" "$root/scripts/lockstep" lesson 13 "$@"
