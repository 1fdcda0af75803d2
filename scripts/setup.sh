#!/usr/bin/env bash
# Finds a Python that has what is asked for, as pinned in requirements.txt; makes or completes .venv
# if there is none.
#   bash scripts/setup.sh [WHAT]         prepares it and says which Python is used
#   source scripts/setup.sh WHAT         what the launchers do: it sets $root and $python
# WHAT: a lesson's number; check; notebooks (all but TensorFlow, Paddle and JAX); all (default); or site, for
# what builds the web site: docs/requirements.txt and .venv.site.
# LOCKSTEP_PYTHON=/path/to/python uses that interpreter as it is: no version is checked, nothing is
# installed. (The launchers say which package a lesson lacks.)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() { # sets $python to the interpreter to use for $1
    local candidate place=$root/.venv
    if [ "$1" = site ]; then
        place=$root/.venv.site
    elif [ -n "${LOCKSTEP_PYTHON:-}" ]; then
        python=$("$LOCKSTEP_PYTHON" -c 'import sys; print(sys.executable)' 2>/dev/null) && [ -n "$python" ] && return
        echo "LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON is not a Python interpreter" >&2
        return 2
    fi
    # 1. One that has it all: the active environment, that of this folder, or the usual python3.
    for candidate in ${VIRTUAL_ENV:+python3} ${CONDA_PREFIX:+python3} "$place/bin/python" python3; do
        python=$("$candidate" "$root/scripts/lockstep" environment --check "$1" 2>/dev/null) && return
    done
    # 2. The environment of this folder, made or completed now.
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" "$root/scripts/lockstep" environment --make "$1" || return
            python=$place/bin/python
            return
        fi
    done
    echo "no Python 3.11, 3.12 or 3.13 with venv was found (on Debian and Ubuntu: apt install python3-venv)" >&2
    return 2
}

find_python "${1:-all}" || exit
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "ready: $python"
fi
