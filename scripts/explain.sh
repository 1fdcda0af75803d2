#!/usr/bin/env bash
# Reads the log of a job that has failed, and says which rank failed first, why, and what to do.
#   bash scripts/explain.sh [log.txt ...], or from a pipe. Nothing is installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/lockstep/python.sh")
exec "$python" "$root/scripts/lockstep" explain "$@"
