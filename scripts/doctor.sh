#!/usr/bin/env bash
# What can this machine do, and do ranks meet on it? Nothing is installed: it looks at what is there.
#   bash scripts/doctor.sh [--nproc RANKS] [--json] [other flags; --help lists them]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/lockstep/python.sh")
exec "$python" "$root/scripts/lockstep" doctor "$@"
