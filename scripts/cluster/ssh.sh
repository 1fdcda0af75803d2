#!/usr/bin/env bash
# A lesson, the doctor, or a training script of yours on several machines that you reach by ssh.
#   bash scripts/cluster/ssh.sh HOST,HOST doctor
#   bash scripts/cluster/ssh.sh HOST,HOST 02 [--nproc RANKS] [flags of the lesson]
#   bash scripts/cluster/ssh.sh HOST,HOST my_train.py [--nproc RANKS] --epochs 3
# HOST is what the machines call each other, and what ssh understands: a name or an address.
#
# What it needs:
# - `ssh HOST` without a password, to each of them (keys; see ssh-copy-id), also to the first;
# - this repository under the same path on each machine (a shared filesystem, or copies), and so
#   your script, which is started in the folder of the repository;
# - a Python with requirements.txt there: `bash scripts/setup.sh 02`, once on each;
# - machines that reach each other on all TCP ports;
# - for lessons 05 and 06, --log-dir or --checkpoints with a folder that all machines share.
# Ctrl-C here ends the ranks on all machines; so does the end of this terminal.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(bash "$root/scripts/lockstep/python.sh")
exec "$python" "$root/scripts/lockstep" ssh "$@"
