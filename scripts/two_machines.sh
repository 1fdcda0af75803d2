#!/usr/bin/env bash
# Runs a lesson, the doctor or a script of yours on two machines that are one (network namespaces).
#   sudo bash scripts/two_machines.sh 14 [--nproc RANKS] [--rate MBIT] [--cut SECONDS]
#   sudo bash scripts/two_machines.sh my_train.py --epochs 3
#   sudo bash scripts/two_machines.sh faults                  the usual mistakes; --help says more
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
what=${1:-}
[ "$what" != slurm ] || what=${2:-}
[[ $what =~ ^[0-9]+$ ]] || what=14 # nothing but torch
if [ -n "${SUDO_USER:-}" ] && [ -z "${LOCKSTEP_PYTHON:-}" ]; then # .venv must not belong to root
    if ! python3 "$here/lockstep" environment --check "$what" &>/dev/null &&
        ! "$here/../.venv/bin/python" "$here/lockstep" environment --check "$what" &>/dev/null; then
        echo "two_machines.sh: error: run this first, without sudo: bash scripts/setup.sh $what" >&2
        exit 2
    fi
fi
source "$here/setup.sh" "$what"
exec "$python" "$root/scripts/lockstep" two-machines "$@"
