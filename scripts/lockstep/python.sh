#!/usr/bin/env bash
# Prints the Python to use for what must run where the course may not be installed: the doctor, and
# the machines of a cluster. Nothing is installed. The first of these that starts:
#   LOCKSTEP_PYTHON; the active python3, if it has torch as pinned; .venv; the active python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
active=python3
python3 "$root/scripts/lockstep" environment --check doctor 2>/dev/null || active=$root/.venv/bin/python
for candidate in "${LOCKSTEP_PYTHON:-$active}" python3; do
    "$candidate" -c 'import sys; print(sys.executable)' 2>/dev/null && exit
    if [ -n "${LOCKSTEP_PYTHON:-}" ]; then
        echo "not ok   Python: LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON does not start: set it to another, or unset it" >&2
        exit 1
    fi
done
echo "not ok   Python: there is none: install Python 3.11, 3.12 or 3.13, then bash scripts/setup.sh" >&2
exit 1
