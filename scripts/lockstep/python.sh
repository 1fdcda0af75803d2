#!/usr/bin/env bash
# Prints the Python to use for what must run where the course may not be installed: the doctor, and
# the machines of a cluster. Nothing is installed. LOCKSTEP_PYTHON; or the first of these that starts:
#   the active python3, if it has torch and numpy as pinned; .venv; the active python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

start() { # start PYTHON: prints its path, if it starts
    "$1" -c 'import sys; print(sys.executable)' 2>/dev/null
}

if [ -n "${LOCKSTEP_PYTHON:-}" ]; then
    start "$LOCKSTEP_PYTHON" && exit
    echo "not ok   Python: LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON does not start: set it to another, or unset it" >&2
    exit 1
fi
python3 "$root/scripts/lockstep" environment --check doctor 2>/dev/null && exit
start "$root/.venv/bin/python" || start python3 && exit
echo "not ok   Python: there is none: install Python 3.11, 3.12 or 3.13, then bash scripts/setup.sh" >&2
exit 1
