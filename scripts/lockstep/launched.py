"""What launchers say of how processes have ended: torchrun, mp.spawn, DeepSpeed, srun, mpirun.

They say it where a process that was killed can't, and where a log was cut.
"""

import re
import signal
from datetime import datetime
from typing import NamedTuple

from lockstep.ending import own_exit_codes


class Exit(NamedTuple):
    """How a process ended: a negative code is that of a signal; the time is in seconds."""

    exitcode: int
    timestamp: float


# A row of torchrun's table.
FIELD = re.compile(r"\s+(time|rank|exitcode) +: (\d{4}-\S+_\S+|-?\d+) *(?=\(|$)")
RECEIVED = re.compile(r"\s+traceback : Signal \d+ ")  # says no more than the exit code
# Each says (who, with which exit code); what follows a number of srun's is in WORDS.
LEFT = [
    (
        re.compile(r"failed \(exitcode: (?P<code>-?\d+)\)(?: local_rank: (?P<number>\d+))?"),
        "local rank",
    ),
    (
        re.compile(  # torch.distributed.launch before 1.9, and accelerate
            r"Command '\[(?:.*--local[_-]rank=(?P<number>\d+))?.*died with <Signals\.(?P<code>\w+)"
        ),
        "local rank",
    ),
    (  # Lightning
        re.compile(r"\[rank: (?P<number>\d+)\] Child .* terminated with code (?P<code>-?\d+)"),
        "rank",
    ),
    (
        re.compile(r"[Pp]rocess (?P<number>\d+) terminated with (exit code|signal) (?P<code>\w+)"),
        "process",
    ),
    (re.compile(r"srun: error: \S+ tasks? (?P<number>\d+)\S*: (?P<code>\w.*)"), "task"),
    (re.compile(r"process rank (?P<number>\d+) .*exited on signal (?P<code>\d+)"), "rank"),
]
MPIRUN_NAMES = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]")
WORDS = {
    "Out Of Memory": -signal.SIGKILL,
    "Killed": -signal.SIGKILL,
    "Terminated": -signal.SIGTERM,
    "Aborted": -signal.SIGABRT,
    "Bus error": -signal.SIGBUS,
    "Segmentation fault": -signal.SIGSEGV,
}
# A line of a launcher or of a cluster after which nobody can say that all went well.
TROUBLE = re.compile(
    r"srun: error|slurmstepd\S*: error|mpirun (detected|noticed)|Killing subprocess|NCCL WARN"
    r"|exitcode *: -?[1-9]|death signal|closing signal|CANCELLED|Worker group failed"
    r"|returned non-zero exit"
)


def code_of(words, pattern_says_signal=False):
    """Return the exit code that "1", "-9", "SIGKILL" or srun's words mean, or None."""
    if re.fullmatch(r"-?\d+", words):
        return -int(words) if pattern_says_signal else int(words)
    if words in signal.Signals.__members__:
        return -signal.Signals[words]
    if found := re.search(r"exit code (\d+)", words):
        return int(found[1])
    return next((code for said, code in WORDS.items() if words.startswith(said)), None)


def seconds_of(time):
    """Return a time of torchrun's table in seconds; 0 if it is none, as when the table was cut."""
    try:
        return datetime.strptime(time, "%Y-%m-%d_%H:%M:%S").timestamp()
    except ValueError:
        return 0.0


def named(code):
    """Return an exit code in the words of torchrun's table."""
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"exitcode : {code}{names.get(-code, '')}"


class Launchers:
    """What the launchers in a log have said: `order` has {who: exit code}, the first one first."""

    def __init__(self):
        self.table, self.left = {}, {}
        self.row = {}  # the last fields of torchrun's table
        self.command = ""  # whose command DeepSpeed has printed last
        self.trouble = ""  # the first line that tells of some

    def hear(self, text):
        """Take in a line; return whether it is all theirs."""
        if not self.trouble and TROUBLE.search(text):
            self.trouble = text.strip()
        if found := FIELD.match(text):
            self.hear_field(*found.groups())
            return True
        if RECEIVED.match(text):
            return True
        if found := MPIRUN_NAMES.search(text):
            self.left.setdefault(f"rank {found[1]}", 1)
        if "--local_rank=" in text or "return code" in text:
            self.hear_deepspeed(text)
        for pattern, name in LEFT:
            if found := pattern.search(text):
                code = code_of(found["code"], "exited on signal" in text)
                if code is not None:
                    number = found["number"]
                    self.left.setdefault(f"{name} {number}" if number else "", code)
                return True
        return False

    def hear_deepspeed(self, text):
        """Take in a line with the command of a process, or with its exit code, or with both."""
        if command := re.search(r"--local_rank=(\d+)", text):
            self.command = f"local rank {command[1]}"
        if returned := re.search(r"exits with return code = (-?\d+)", text):
            self.left.setdefault(self.command, int(returned[1]))

    def hear_field(self, name, value):
        """Take in a field of torchrun's table: time, rank, exitcode, in this order."""
        if name == "time":
            self.row = {}
        self.row[name] = value
        if name == "rank":
            self.row["who"] = f"rank {value}"
        elif name == "exitcode" and int(value) and "who" in self.row:
            seconds = seconds_of(self.row.get("time", ""))
            self.table[self.row["who"]] = Exit(int(value), seconds)

    @property
    def order(self):
        """{who: exit code} of those that no launcher has ended, the first one first."""
        ended = sorted(reversed(self.table.items()), key=lambda item: item[1].timestamp)
        codes = own_exit_codes(dict(ended))  # torchrun's table has the first one last
        if not self.table:
            codes |= {who: code for who, code in self.left.items() if code != -signal.SIGTERM}
        return codes
