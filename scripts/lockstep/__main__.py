"""The commands of the course, as the files in scripts/ and in scripts/cluster/ call them.

    python scripts/lockstep lesson NN [flags]           run a lesson on this machine
    python scripts/lockstep machine WHAT [flags]        be one of several machines that run WHAT
    python scripts/lockstep check [flags] train.py      what goes wrong in silence in this script?
    python scripts/lockstep explain [log.txt ...]       which rank failed first, why, what to do?
    python scripts/lockstep doctor [flags]              what can this machine do, do ranks meet?
    python scripts/lockstep ssh HOST,HOST WHAT [flags]  start `machine` on each of them by ssh
    python scripts/lockstep two-machines WHAT [flags]   run WHAT on two machines made of one
    python scripts/lockstep execute [NOTEBOOK ...]      execute notebooks in place

Each says more with --help. Others are for the package itself: `inside` is the second process of a
lesson (run.py), `on-two-machines` that of two-machines; `environment` makes .venv (environment.py).
"""

# This file, the doctor and environment.py also run where Python is too old to say so: they use no
# syntax that is younger than Python 3.8.

import importlib
import signal
import sys
from pathlib import Path

COMMANDS = {
    "lesson": "lockstep.run",
    "inside": "lockstep.inside",
    "machine": "lockstep.machine",
    "check": "lockstep.check",
    "explain": "lockstep.explain",
    "doctor": "lockstep.doctor.command",
    "ssh": "lockstep.ssh",
    "two-machines": "lockstep.two_machines",
    "on-two-machines": "lockstep.two_machines.run",
    "execute": "lockstep.execute",
    "environment": "lockstep.environment",
}


def main():
    """Call the main(arguments) of a command; return its exit code, and say why it has left."""
    from lockstep import ending  # the path to it is known only now

    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "--help":
        print(__doc__)
        return 0
    if name not in COMMANDS:
        ending.say(__doc__)
        return 2
    try:
        return importlib.import_module(COMMANDS[name]).main(arguments)
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            raise
        ending.say(stop.code)  # Python itself would make two writes of it
        return 1


def command():
    """The command `lockstep`, after `pip install .`: only these need no other file."""
    if sys.argv[1:2] not in (["check"], ["explain"]):
        from lockstep import ending

        ending.say("lockstep check train.py, or lockstep explain log.txt; --help says more")
        return 2
    return main()


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has started yet: no traceback
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
