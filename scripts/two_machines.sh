#!/usr/bin/env bash
# Runs a lesson on two machines that are one (network namespaces); --help says more.
#   sudo bash scripts/two_machines.sh 14 [--nproc RANKS] [--rate MBIT] [--cut SECONDS]
#   sudo bash scripts/two_machines.sh faults
set -euo pipefail
missing=
[ "$(uname)" = Linux ] || missing+=", Linux"
[ "$(id -u)" = 0 ] || missing+=", root (sudo)"
for tool in ip tc unshare nsenter mount hostname; do
    command -v "$tool" >/dev/null || missing+=", the program $tool"
done
if [ -n "$missing" ]; then
    echo "two_machines.sh: error: it needs ${missing#, }" >&2
    exit 2
fi
here=$(dirname "${BASH_SOURCE[0]}")
if [ -n "${SUDO_USER:-}" ] && [ -z "${LOCKSTEP_PYTHON:-}" ]; then # .venv must not belong to root
    if ! python3 "$here/lockstep" environment --check 14 2>/dev/null &&
        ! "$here/../.venv/bin/python" "$here/lockstep" environment --check 14 2>/dev/null; then
        echo "two_machines.sh: error: run this first, without sudo: bash scripts/setup.sh 14" >&2
        exit 2
    fi
fi
source "$here/setup.sh" 14
exec "$python" "$root/scripts/lockstep" two-machines "$@"
