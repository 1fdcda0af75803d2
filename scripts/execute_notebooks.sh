#!/usr/bin/env bash
# Executes all notebooks in place, or those that are named, and stores their outputs.
#   bash scripts/execute_notebooks.sh [NOTEBOOK ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" "$root/scripts/execute_notebooks.py" "$@"
