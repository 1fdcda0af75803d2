"""Run something on two machines that are one: two network namespaces, joined by a cable.

    bash scripts/two_machines.sh WHAT [--nproc RANKS] [--rate MBIT] [flags of WHAT]
    bash scripts/two_machines.sh faults [NAME ...]

WHAT is a lesson's number (02, 03, 05, 06, 12, 13, 14), "doctor", or the path of a training script
of yours. On each machine runs what runs on one of several real machines: `machine` (machine.py).
`faults` makes the usual mistakes, and shows what the job says. It needs Linux and root.

--nproc       ranks on both machines together (4); the first one has the odd one
--rate        the cable carries so many megabits per second
"""

import sys

from lockstep import machine, ssh
from lockstep.flags import Flags, split_at_dashes, whole
from lockstep.lessons import ROOT
from lockstep.two_machines import faults, slurm
from lockstep.two_machines.namespaces import ADDRESSES, PORT, TwoMachines


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
        print(f"two_machines.sh: error: {error}", file=sys.stderr)
        return 1


def run(what, arguments):
    """Run a lesson, the doctor or a script on two machines; return the exit code."""
    parser = Flags("two_machines.sh", add_help=False)
    parser.add_argument("--nproc", type=whole(2, 64), default=4)
    parser.add_argument("--rate", type=whole(0, 10**6), default=0)
    ours, theirs = split_at_dashes(arguments)
    own, flags = parser.parse_known_args(ours)
    machine.find_script(parser, what)  # leaves, before there is any machine, if there is none
    with TwoMachines() as two:
        if own.rate:
            two.limit(own.rate)
        return ssh.wait([start(two, node, own.nproc, what, flags + theirs) for node in (0, 1)])


def start(two, node, ranks, what, flags):
    """Start `machine` on machine `node`; return the process."""
    ranks_here = (ranks + 1 - node) // 2
    command = [sys.executable, ROOT / "scripts" / "lockstep", "machine", what]
    command += [f"--nodes={','.join(ADDRESSES)}", f"--node-rank={node}", f"--port={PORT}"]
    command += [f"--nproc={ranks_here}", "--", *flags]
    return two.machines[node].start(*command, env=two.environment())
