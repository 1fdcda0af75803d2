#!/usr/bin/env bash
# Lesson 04: processes started by hand find each other (env, tcp, file or store).
#   bash scripts/lesson_04.sh [--init env|tcp|file|store] [--nproc RANKS] [other flags; see --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/start.py" "$root/lessons/lesson_04_init_methods.py" "$@"
