#!/usr/bin/env bash
# Finds a Python that has what is asked for, as pinned in requirements.txt; makes or completes .venv
# if there is none.
#   bash scripts/setup.sh [WHAT]         prepares it and says which Python is used
#   source scripts/setup.sh WHAT         what the launchers do: it sets $root and $python
# WHAT: a lesson's number; notebooks (all but TensorFlow and Paddle); all (default); or site, for
# what builds the web site: docs/requirements.txt and .venv.site.
# LOCKSTEP_PYTHON=/path/to/python uses that interpreter as it is: no version is checked, nothing is
# installed. (The launchers say which package a lesson lacks.)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

environment() { # environment PYTHON --check|--make WHAT
    "$1" "$root/scripts/lockstep" environment "${@:2}"
}

make_environment() { # a signal that reaches only this shell is handed on, so that no pip stays
    environment "$1" --make "$2" &
    local installer=$! code=0
    trap 'kill "$installer" 2>/dev/null || true; wait "$installer" || true' INT TERM HUP
    wait "$installer" || code=$?
    trap - INT TERM HUP
    return "$code"
}

find_python() { # sets $python to the interpreter to use for $1
    local candidate
    if [ -n "${LOCKSTEP_PYTHON:-}" ] && [ "$1" != site ]; then
        python=$("$LOCKSTEP_PYTHON" -c 'import sys; print(sys.executable)' 2>/dev/null) && return
        echo "LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON is not a Python interpreter" >&2
        return 2
    fi
    # 1. The active environment, if it has the requirements.
    if environment python3 --check "$1" 2>/dev/null; then
        python=$(python3 -c 'import sys; print(sys.executable)')
        return
    fi
    # 2. The .venv of this folder; `--make` returns at once when it is complete.
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip' 2>/dev/null || continue
            make_environment "$candidate" "$1" || return
            python=$root/.venv/bin/python
            [ "$1" != site ] || python=$root/.venv.site/bin/python
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
