"""Run something on two or more machines that are one: network namespaces, joined by cables.

    bash scripts/two_machines.sh WHAT [--machines N] [--nproc RANKS] [--rate MBIT] [flags of WHAT]
    bash scripts/two_machines.sh faults [NAME ...]

WHAT is a lesson's number (02, 03, 05, 06, 12, 13, 14, 16), "doctor", or the path of a training
script of yours. On each machine runs what runs on one of several real machines: `machine`
(machine.py). `faults` makes the usual mistakes, and shows what the job says. It needs Linux and
root.

--machines    how many (2); more than two have a cable each, to a switch
--nproc       ranks on all machines together (4, or one each); the first ones have the odd ones
--rate        each machine sends so many megabits per second, at most
"""

import sys

from lockstep import ending, machine, ssh
from lockstep.flags import Flags, split_at_dashes, whole
from lockstep.lessons import ROOT
from lockstep.two_machines import faults, slurm
from lockstep.two_machines.namespaces import ADDRESSES, PORT, Machines, TwoMachines


def main(arguments):
    """Run what is asked for; return the exit code."""
    what, *flags = arguments or ["--help"]
    if what in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if what == "faults":
            return faults.main(flags)
        if what == "slurm":  # cluster/try_slurm.sh
            return slurm.main(flags)
        return run(what, flags)
    except OSError as error:
        ending.say(f"two_machines.sh: error: {error}")
        return 1


def run(what, arguments):
    """Run a lesson, the doctor or a script on two or more machines; return the exit code."""
    parser = Flags("two_machines.sh", add_help=False)
    parser.add_argument("--machines", type=whole(2, len(ADDRESSES)), default=2)
    parser.add_argument("--nproc", type=whole(2, 64))
    parser.add_argument("--rate", type=whole(0, 10**6), default=0)
    ours, theirs = split_at_dashes(arguments)
    own, flags = parser.parse_known_args(ours)
    ranks = own.nproc or max(4, own.machines)
    if ranks < own.machines:
        parser.error(f"argument --nproc: {own.machines} machines need as many ranks, or more")
    machine.find_script(parser, what)  # leaves, before there is any machine, if there is none
    with TwoMachines() if own.machines == 2 else Machines(own.machines) as place:
        if own.rate:
            place.limit(own.rate)
        nodes = range(own.machines)
        return ssh.wait([start(place, node, ranks, what, flags + theirs) for node in nodes])


def start(place, node, ranks, what, flags):
    """Start `machine` on machine `node`; return the process."""
    count = len(place.machines)
    ranks_here = (ranks + count - 1 - node) // count
    nodes = ",".join(machine.address for machine in place.machines)
    command = [sys.executable, ROOT / "scripts" / "lockstep", "machine", what]
    command += [f"--nodes={nodes}", f"--node-rank={node}", f"--port={PORT}"]
    command += [f"--nproc={ranks_here}", "--", *flags]
    return place.machines[node].start(*command, env=place.environment())
