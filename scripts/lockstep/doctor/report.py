"""What can this machine do, and do ranks meet on it? Under torchrun: do the machines meet?

    bash scripts/doctor.sh [--nproc RANKS] [--json]             this machine
    torchrun --nnodes=2 ... scripts/lockstep doctor [--json]    on each machine: the way between

Each line begins with one of these words:

    ok         nothing to do
    limited    the course runs; the line says what does not
    not ok     the line says what to do
    unknown    cannot be said here; the line says why

Exit code: 0 if no line says "not ok", 1 if one does, 2 after a bad flag.

No fixed port is used. On one machine nothing listens beyond 127.0.0.1; under torchrun each rank
listens, while the doctor runs, at the address that gloo would use, and tells a random word.
"""

# This file, row.py and machine.py have to run where Python is too old, and where torch is missing
# or broken: at the top they import only the standard library, and what of lockstep does the same,
# and they use no syntax that is younger than Python 3.8.

import importlib.util
import json
import os
import signal
import sys

from lockstep import ending
from lockstep.doctor import machine
from lockstep.doctor.row import Row
from lockstep.flags import Flags, whole

OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets
RANKS_NEED = ("Python", "torch", "backends", "memory")


def main(arguments):
    """Examine this machine, or be one rank of several; return the exit code."""
    flags = read_flags(arguments)
    if flags.check:  # in the process of a launcher, which goes on: nothing is changed there
        return 0
    report = Report(flags.json)
    if all(name in os.environ for name in OF_A_RANK):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is told in a line of ours
        from lockstep.doctor import ranks

        return ranks.main(flags.timeout, report)
    for number in ending.WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)
    try:
        one_machine(flags, report)
    except SystemExit as stop:
        ending.say_goodbye(stop.code - 128)
        raise
    return report.end()


def read_flags(arguments):
    """Return the flags. Leaves with one line and exit code 2 if one is wrong."""
    parser = Flags("doctor.sh", description=__doc__)
    parser.add_argument(
        "--nproc", type=whole(1, 64), default=2, help="ranks on this machine; default: 2"
    )
    parser.add_argument(
        "--timeout", type=whole(1, 3600), default=30, help="seconds to wait for a rank; default: 30"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    return parser.parse_args(arguments)


def check(arguments):
    """Leave, before `machine` starts ranks, if a flag is wrong or ranks can't start here."""
    read_flags(arguments)
    rows = [*machine.look_at(machine.look_at_python), *machine.look_at(machine.look_at_versions)]
    if rows[0].state == "not ok" or importlib.util.find_spec("torch") is None:
        sys.exit("\n".join(row.as_line() for row in rows if row.state == "not ok"))


def interrupt(number, frame):
    """Handle a signal: leave through each `finally`, once."""
    for each in ending.WORDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def one_machine(flags, report):
    """Look at this machine, then let ranks meet on it, unless that can't go well."""
    report.tell(machine.look_at_machine(flags.nproc))
    broken = [row.check for row in report.rows if row.state == "not ok" and row.check in RANKS_NEED]
    if broken:
        why = f"not tried, because of {' and '.join(broken)}"
        report.tell([Row("ranks", "unknown", why, "mend that, then run it again")])
    else:
        report.tell(machine.look_at(machine.look_at_ranks, flags.nproc, flags.timeout))


class Report:
    """The rows that were found: told at once, or as one JSON object at the end."""

    def __init__(self, as_json):
        self.rows, self.as_json = [], as_json

    def tell(self, rows):
        """Add rows, and print them."""
        for row in rows:
            self.rows.append(row)
            if not self.as_json:
                print(row.as_line(), flush=True)

    def end(self):
        """Print what is to be done, or all as JSON; return the exit code."""
        wrong, limited, unknown = map(self.named, ("not ok", "limited", "unknown"))
        last = "ok       all that is needed is here"
        if limited:
            last = f"limited  the course runs; look above for what does not: {'; '.join(limited)}"
        if unknown:
            last += f" (not known: {'; '.join(unknown)})"
        if wrong:
            last = f"not ok   {len(wrong)} to mend: {'; '.join(wrong)}"
        if self.as_json:
            last = json.dumps({"ok": not wrong, "checks": [row.as_dict() for row in self.rows]})
        print(last, flush=True)
        return 1 if wrong else 0

    def named(self, state):
        """Return the names of the checks that ended so."""
        return [row.check for row in self.rows if row.state == state]
