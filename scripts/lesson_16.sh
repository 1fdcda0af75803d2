#!/usr/bin/env bash
# Lesson 16: an all-reduce by send and receive, in five ways.
#   bash scripts/lesson_16.sh [--nproc RANKS] [--algorithm NAME] [--megabytes M ...] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 16
exec "$python" "$root/scripts/lockstep" lesson 16 "$@"
