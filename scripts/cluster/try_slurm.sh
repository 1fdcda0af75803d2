#!/usr/bin/env bash
# Tries lesson.slurm under a real Slurm, which it starts itself: two nodes on this one machine.
#   bash scripts/cluster/try_slurm.sh [LESSON] [flags]        default: 02
# It needs slurmctld, slurmd, sbatch and munged, and root (Debian, Ubuntu:
# apt install slurmctld slurmd slurm-client munge). A Slurm that is already here is left alone: all
# files are in a private folder, all ports are free ones, and everything ends with this script, also
# after Ctrl-C. Slurm's own daemons listen on all addresses while it runs (some seconds), and take
# orders only from those who have the key, which is made anew each time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PATH=$PATH:/usr/sbin:/sbin

missing=""
for program in slurmctld slurmd sbatch scancel munged; do
    command -v "$program" >/dev/null || missing+=" $program"
done
[ "$(id -u)" = 0 ] || missing+=" root"
if [ -n "$missing" ]; then
    echo "needs:$missing (on Debian and Ubuntu, as root: apt install slurmctld slurmd slurm-client munge)" >&2
    exit 2
fi

python=$(bash "$root/scripts/lockstep/python.sh")
folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")

ours() { # all processes that have this Slurm's configuration in their environment, but this one
    local file pid
    for file in $(grep -lsz "^SLURM_CONF=$folder/" /proc/[0-9]*/environ); do
        pid=${file//[^0-9]/}
        [ "$pid" = $$ ] || echo "$pid"
    done
}

take_down() {
    local code=$?
    trap '' INT TERM HUP
    if [ -n "$(jobs -p)" ]; then
        scancel --quiet --user=root 2>/dev/null || true # ends the steps as well
        for _ in $(seq 100); do # until no job is left
            [ -n "$(squeue --noheader 2>/dev/null)" ] || break
            sleep 0.2
        done
        for pid in $(jobs -pr); do # those that still run: the number of another may be taken again
            kill "$pid" 2>/dev/null || true
        done
        wait
        for pid in $(ours); do # what did not hear of it
            kill -KILL "$pid" 2>/dev/null || true
        done
    fi
    rm -rf "$folder"
    exit "$code"
}
trap take_down EXIT
trap 'echo "interrupted: all that was started has ended" >&2; exit 130' INT
trap 'echo "terminated: all that was started has ended" >&2; exit 143' TERM HUP

read -r controller first second < <("$python" -c '
import socket
free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in free))')

host=$(hostname -s)
cores=$(nproc)
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=lockstep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=5
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=$cores
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=$cores
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
mkdir "$folder"/{state,spool-n1,spool-n2}
chmod 755 "$folder"
head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"

start() { # a daemon, in a session of its own: Ctrl-C is for this script, which then ends it
    setsid "$@" >>"$folder/daemons.log" 2>&1 &
}
start munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge.pid" --seed-file="$folder/munge.seed" --log-file="$folder/munge.log"
for _ in $(seq 100); do
    [ -S "$folder/munge.socket" ] && break
    sleep 0.1
done
start slurmctld -D
start slurmd -D -N n1
start slurmd -D -N n2
for _ in $(seq 150); do
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ] && break
    sleep 0.2
done
if [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" != 2 ]; then
    echo "Slurm did not start: its logs end with" >&2
    tail -n 3 "$folder"/*.log >&2
    exit 1
fi

cd "$root"
code=0
sbatch --wait --quiet --nodes=2 --output="$folder/job.out" scripts/cluster/lesson.slurm "${@:-02}" &
wait $! || code=$? # in the background, because a signal is only heard while this waits
cat "$folder/job.out"
exit "$code"
