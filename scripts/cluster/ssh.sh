#!/usr/bin/env bash
# A lesson, the doctor, or a training script of yours on several machines that you reach by ssh.
#   bash scripts/cluster/ssh.sh HOST,HOST doctor
#   bash scripts/cluster/ssh.sh HOST,HOST 02 [--nproc RANKS] [flags of the lesson]
#   bash scripts/cluster/ssh.sh HOST,HOST my_train.py [--nproc RANKS] --epochs 3
# HOST is what the machines call each other, and what ssh understands: a name or an address.
# docs/several_machines.md says what the machines need.
# Ctrl-C here ends the ranks on all machines; so does the end of this terminal.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(bash "$root/scripts/lockstep/python.sh")
exec "$python" "$root/scripts/lockstep" ssh "$@"
