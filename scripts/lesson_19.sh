#!/usr/bin/env bash
# Lesson 19: ten jobs that hang, and six tools that look for the guilty rank.
#   bash scripts/lesson_19.sh [--patient NAME|all] [--tool NAME] [--files FOLDER] [other flags; see --help]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" 19
exec "$python" "$root/scripts/lockstep" lesson 19 "$@"
