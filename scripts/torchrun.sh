#!/usr/bin/env bash
# Runs a lesson under torch's launcher: one process per rank, on this machine.
#   bash scripts/torchrun.sh LESSON.py [--nproc RANKS] [--launcher torchrun|launch] [other flags]
# The launchers of some lessons call it. --nproc and --launcher stay here; the lesson gets the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
lesson=$1 && shift

fail() {
    echo "$(basename "$lesson"): error: argument $1" >&2
    exit 2
}

nproc=2 launcher=torchrun flags=()
while [ $# -gt 0 ]; do
    case $1 in
    --nproc=* | --launcher=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --nproc | --launcher)
        [ $# -ge 2 ] || fail "$1: expected one argument"
        if [ "$1" = --nproc ]; then nproc=$2; else launcher=$2; fi
        shift 2
        ;;
    -h | --help) exec "$python" "$lesson" --help ;;
    *) flags+=("$1") && shift ;;
    esac
done
[[ $nproc =~ ^[1-9][0-9]?$ ]] && [ "$nproc" -le 64 ] ||
    fail "--nproc: must be a whole number from 1 to 64, not '$nproc'"
case $launcher in
torchrun) module=torch.distributed.run ;; # the command `torchrun` runs this module
launch) module=torch.distributed.launch ;;
*) fail "--launcher: must be torchrun or launch, not '$launcher'" ;;
esac

# A bad value must stop us before any process starts. Without flags, and with no more ranks than the
# smallest default batch has rows for, there is nothing to check. (The odd form of the last argument
# is for the bash of macOS, where an empty array is an error.)
if [ "${flags[*]-}" != "" ] && [ "${flags[*]-}" != --json ] || [ "$nproc" -gt 8 ]; then
    RANK=0 WORLD_SIZE=$nproc "$python" "$lesson" --check ${flags[@]+"${flags[@]}"}
fi

# --standalone: one machine, and a free port that the operating system chooses.
# --local-addr: the ranks meet at this address; the host's name need not be known.
# --log-dir: no folder for logs that nobody asked for.
exec "$python" -m "$module" --standalone --local-addr=127.0.0.1 --log-dir=/dev/null \
    --nproc-per-node="$nproc" "$lesson" ${flags[@]+"${flags[@]}"}
