#!/usr/bin/env bash
# What can this machine do, and do ranks meet on it?
#   bash scripts/doctor.sh [--nproc RANKS] [--json] [other flags; --help lists them]
# Nothing is installed: it looks at what is there, also where that is broken.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/python.sh")
exec "$python" "$root/scripts/doctor.py" "$@"
