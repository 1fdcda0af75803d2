#!/usr/bin/env bash
# Lesson 18: who keeps what: sharding, in three stages (ZeRO, fully_shard).
#   bash scripts/lesson_18.sh [--nproc RANKS] [--stage 1|2|3] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 18
exec "$python" "$root/scripts/lockstep" lesson 18 "$@"
