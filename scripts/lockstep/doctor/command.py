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

# This file, report.py and machine.py have to run where Python is too old, and where torch is
# missing or broken: at the top they import only the standard library, and what of lockstep does the
# same, and they use no syntax that is younger than Python 3.8.

import importlib.util
import json
import os
import sys

from lockstep import lessons, run
from lockstep.doctor import machine
from lockstep.doctor.report import Report, Row
from lockstep.flags import Flags, whole

OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets
RANKS_NEED = ("Python", "torch", "backends", "memory")


def main(arguments):
    """Examine this machine, or be one rank of several; return the exit code."""
    flags = read_flags(arguments)
    if all(name in os.environ for name in OF_A_RANK):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is told in a line of ours
        from lockstep.doctor import ranks

        return ranks.main(flags.timeout, flags.json)
    report = Report(flags.json)
    report.tell(machine.look_at_machine(flags.nproc))
    broken = [row.check for row in report.rows if row.state == "not ok" and row.check in RANKS_NEED]
    if broken:
        why = f"not tried, because of {' and '.join(broken)}"
        report.tell([Row("ranks", "unknown", why, "mend that, then run it again")])
        return report.end()
    # Ranks start as those of a lesson do. Rank 0 ends the report, so it is told what was found.
    given = {**run.on_this_machine_alone(), "LOCKSTEP_ROWS": json.dumps(report.rows)}
    package = lessons.ROOT / "scripts" / "lockstep"
    theirs = ["doctor", f"--timeout={flags.timeout}", *["--json"] * flags.json]
    return run.start(lessons.TORCHRUN, package, [f"--nproc={flags.nproc}", "--", *theirs], given)


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
    return parser.parse_args(arguments)


def check(arguments):
    """Leave, before `machine` starts ranks, if a flag is wrong or ranks can't start here."""
    read_flags(arguments)
    rows = [*machine.look_at(machine.look_at_python), *machine.look_at(machine.look_at_versions)]
    if rows[0].state == "not ok" or importlib.util.find_spec("torch") is None:
        sys.exit("\n".join(row.as_line() for row in rows if row.state == "not ok"))
