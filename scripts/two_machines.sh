#!/usr/bin/env bash
# Runs a lesson, the doctor or a script of yours on two machines, or --machines N, that are one.
#   sudo bash scripts/two_machines.sh 14 [--nproc RANKS] [--rate MBIT]
#   sudo bash scripts/two_machines.sh my_train.py --epochs 3
#   sudo bash scripts/two_machines.sh faults                  the usual mistakes; --help says more
# Nothing is installed, so that nothing belongs to root: first, without sudo, bash scripts/setup.sh 14
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
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/lockstep/python.sh")
exec "$python" "$root/scripts/lockstep" two-machines "$@"
