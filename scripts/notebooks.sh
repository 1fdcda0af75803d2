#!/usr/bin/env bash
# Opens JupyterLab on the notebooks, or executes them in place (--execute). Flags go to JupyterLab.
#   bash scripts/notebooks.sh [--no-browser]            bash scripts/notebooks.sh --execute [NOTEBOOK ...]
if [ "${1:-}" = --execute ]; then
    source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" all
    exec "$python" "$root/scripts/lockstep" execute "${@:2}"
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" notebooks
exec "$python" -m jupyterlab --notebook-dir="$root/notebooks" "$@"
