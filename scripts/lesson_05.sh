#!/usr/bin/env bash
# Lesson 05: one rank speaks for all; the loss that it logs is the loss of all rows.
#   bash scripts/lesson_05.sh [--nproc RANKS] [--output all|rank0] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 05
exec "$python" "$root/scripts/lockstep" lesson 05 "$@"
