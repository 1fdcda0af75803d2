#!/usr/bin/env bash
# Lesson 04: processes started by hand find each other (env, tcp, file or store).
#   bash scripts/lesson_04.sh [--init env|tcp|file|store] [--nproc RANKS] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 04
exec "$python" "$root/scripts/lockstep" lesson 04 "$@"
