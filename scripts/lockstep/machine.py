"""Be one machine of several that run a lesson, the doctor, or a script of yours, together.

    python scripts/lockstep machine WHAT --nodes HOST,HOST --node-rank N --port PORT
                            [--nproc RANKS] [--wait SECONDS] [--verbose] [flags of WHAT]

WHAT is a lesson's number, "doctor" (look at the network before a long job), or the path of a
training script of yours that torchrun could start. --nodes names all machines, in the same order
everywhere; --node-rank says which of them this one is; --port is free on the first. --nproc: ranks
on this machine, 2 by default. --wait: seconds for the others to come, 120 by default. What follows
"--" is handed to WHAT as it is. The files in cluster/ (for Slurm, Kubernetes, ssh) call it once on
each machine. docs/several_machines.md says what it does that torchrun does not, what the machines
need, and where lessons 05 and 06 write. There is no password: a machine trusts all that reach it.
"""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from lockstep import ending, lessons, needs, network, run
from lockstep.doctor import command
from lockstep.flags import Flags, split_at_dashes, whole

HOSTS = r"[\w:][\w.:@%-]*(,[\w:][\w.:@%-]*)*"  # none begins with "-": ssh would take it as a flag


def main(arguments):
    """Be one machine; return the exit code."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0
    parser = make_parser()
    own, flags = read_flags(parser, arguments)
    script = find_script(parser, own.what)
    if own.what == "doctor":
        command.check(flags)
        flags = ["doctor", *flags]
    lesson = lessons.of_script(script)
    if lesson and (problem := needs.missing_packages(lesson)):
        ending.say(f"{script.name}: error: {problem}")
        return 2
    here, first = find_way(own)
    environment = {name: os.environ[name] for name in os.environ if name not in run.OF_A_JOB}
    interface = network.interface_of(here)
    if interface:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment["LOCKSTEP_NODES"] = ",".join(own.nodes)
    environment["LOCKSTEP_NODE_RANK"] = str(own.node_rank)
    environment["LOCKSTEP_STORE"] = f"{first} {own.port} {own.wait}"
    if own.end_with_stdin:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    ours = [f"--nproc={own.nproc}", *["--verbose"] * own.verbose]
    return run.start(lessons.TORCHRUN, script, [*ours, "--", *flags], environment)


def make_parser():
    """Return the parser of our own flags."""
    parser = Flags("machine", add_help=False)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--node-rank", type=whole(0, 9999), required=True)
    parser.add_argument("--port", type=whole(1, 65535), required=True)
    parser.add_argument("--nproc", type=whole(1, 64), default=2)
    parser.add_argument("--wait", type=whole(0, 86400), default=120)
    parser.add_argument("--verbose", action="store_true")
    # The ssh loop: nobody is left here if its terminal has gone.
    parser.add_argument("--end-with-stdin", action="store_true")
    return parser


def read_flags(parser, arguments):
    """Return (our own flags, those of WHAT)."""
    what, *rest = arguments
    ours, theirs = split_at_dashes(rest)
    own, flags = parser.parse_known_args(ours)
    own.what = what
    if not re.fullmatch(HOSTS, own.nodes):
        parser.error("argument --nodes: takes host names or addresses, with commas between them")
    own.nodes = own.nodes.split(",")
    if own.node_rank >= len(own.nodes):
        parser.error(f"argument --node-rank: must be from 0 to {len(own.nodes) - 1}")
    return own, flags + theirs


def find_script(parser, what):
    """Return the script that runs on each rank; leave if it can't run on several machines."""
    if what == "doctor":
        return lessons.ROOT / "scripts" / "lockstep"
    if Path(what).is_file():
        return Path(what).absolute()
    lesson = lessons.find(what)
    if lesson is None:
        parser.error(f"there is no lesson and no file {what[:80]!r}; take a number, or doctor")
    if lesson.start not in lessons.ON_SEVERAL_MACHINES:
        one = lesson.start == lessons.ONE_PROCESS
        why = "is one process" if one else "starts its own ranks, all on one machine"
        can = [each.number for each in lessons.TABLE if each.start in lessons.ON_SEVERAL_MACHINES]
        parser.error(f"lesson {lesson.number} {why}; take {', '.join(can)}, doctor, or a script")
    return lesson.script


def whole_path(parser, what):
    """Return `what`, and of a script its whole path; leave if there is no such thing."""
    script = find_script(parser, what)
    return str(script) if Path(what).is_file() else what


def find_way(own):
    """Return (this machine's address on the way to the others, the first machine's address).

    Waits until the names are known: in Kubernetes they are not, before the pods have addresses.
    """
    end = time.monotonic() + own.wait
    while True:
        known = {node: network.addresses_of(node) for node in own.nodes}
        unknown = [node for node, addresses in known.items() if not addresses]
        if not unknown:
            break
        if time.monotonic() > end:
            names = ", ".join(unknown)
            sys.exit(f"machine: error: nobody knows the address of {names}: see --nodes, and DNS")
        time.sleep(1)
    others = [node for node in own.nodes if node != own.nodes[own.node_rank]] or own.nodes
    try:
        here = network.address_towards(known[others[0]][0])
    except OSError as error:
        where = f"{others[0]} ({known[others[0]][0]})"
        sys.exit(f"machine: error: no way to {where}: {error.strerror}")
    return here, here if own.node_rank == 0 else known[own.nodes[0]][0]


def end_with_stdin():
    """Ask this process to end when nobody holds its stdin open any more."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
