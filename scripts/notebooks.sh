#!/usr/bin/env bash
# Opens JupyterLab on the notebooks. Flags go to JupyterLab (for example --no-browser).
#   bash scripts/notebooks.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m jupyterlab --notebook-dir="$root/notebooks" "$@"
