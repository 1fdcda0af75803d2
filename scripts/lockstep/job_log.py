"""What the log of a job says: the errors of each rank, and how the processes ended.

It reads what torchrun, mp.spawn, Slurm and this course's launchers print, also of several ranks
mixed line by line. A log is read in pieces, so its size costs time and no memory.
"""

import re
from collections import Counter
from datetime import datetime
from typing import NamedTuple

from lockstep import errors
from lockstep.ending import LATE, LOST
from lockstep.watch.facts import LIBRARY

PIECE = 1 << 18  # bytes that are read at once
LONGEST = 1 << 16  # bytes of a line that are looked at
MOST = 500  # errors that are kept of a rank: the cause comes early

# A line without one of these is not looked at, unless a traceback is open. Each message of the page
# has one of them.
TELLING = (
    *(b"Error", b"rror:", b"Exception", b"arning", b"raceback", b'  File "', b"-- Process "),
    *(b"exitcode", b"exit code", b"failed", b"signal", b"Signal", b"illed", b"oom_kill", b"NCCL"),
    *(b"terminate", b"what():", b"  rank ", b"  time ", b"roup", b"imed out", b"leaked"),
    *(b"An attempt", b"OMP_NUM", b"Address", b"hostname", b"us error", b"mismatch", b"key(s)"),
    *(b"unrecognized", b"not receive"),
)

# --- Who says a line ---

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What containers and clusters put before each line.
STAMP = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.,]+(Z|[+-]\d\d:?\d\d)? ((stdout|stderr) [FP] )?|\S+ +\| "
)
MARKS = [
    (re.compile(r".{0,80}?\[rank(\d+)\]: ?"), "rank"),  # torch, in a process that has a group
    (re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?"), "rank"),  # mpirun
    (re.compile(r"\[[A-Za-z_]+(\d+)\]: ?"), "local rank"),  # torchrun --tee
    (re.compile(r"\(\w+ pid=(\d+)[^)]*\) ?"), "process"),  # Ray
]
MARK_OF_SRUN = (re.compile(r" *(\d+): ?"), "task")  # srun --label
SAID_BY_NCCL = re.compile(r"\[Rank (\d+)\]")


def speaker(line, marks):
    """Return (who says this line, or "" if it does not tell, the line without its mark)."""
    for pattern, name in marks:
        if found := pattern.match(line):
            return f"{name} {int(found[1])}", line[found.end() :]
    if found := SAID_BY_NCCL.search(line):
        return f"rank {int(found[1])}", line
    return "", line


def is_labelled(lines):
    """Return whether most of these lines of bytes begin with a number, as with srun --label."""
    some = [line for line in lines[:200] if line.strip()]
    labelled = [line for line in some if re.match(rb" *\d+: ", line)]
    return len(labelled) > 0.8 * len(some)


# --- What is said ---


class Said(NamedTuple):
    """An error or a warning. `place` is the innermost line of yours in its traceback, if any."""

    who: str
    text: str
    role: str
    entry: errors.Entry | None = None
    place: str = ""
    log: str = ""
    line: int = 0


class Exit(NamedTuple):
    """How a process ended, by torchrun's table; the time is in seconds."""

    exitcode: int
    timestamp: float


BEGIN = re.compile(r"(Original )?Traceback \(most recent call last\)")
FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Empty)(?=:|$)")
# These only pass on what a process has said, above or below.
PASSED_ON = re.compile("(ChildFailed|ProcessRaised|ProcessExited|CalledProcess|Checkpoint)E")
SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")
LEFT = re.compile(r"process (\d+) terminated with (exit code \d+|signal SIG\w+)")
BY_LAUNCHER = re.compile(r"(rank \d+) failed: (.*)")
FIELD = re.compile(r"\s+(time|rank|exitcode) +: (\S+)")


def role_of(name, text):
    """Return the role of an exception that the page does not know; `name` is its type."""
    of_torch = name == "RuntimeError" or name.startswith("torch.distributed")
    if "Warning" in name:
        return errors.WARNING
    if of_torch and LOST.search(text):
        return errors.ECHO
    if of_torch and LATE.search(text):
        return errors.WAIT
    return errors.CAUSE


class Log:
    """What was read of a job.

    `said` is in the order of the lines; `exits` is {who: Exit} of torchrun's table, `left` is
    {who: how it ended} of mp.spawn.
    """

    def __init__(self, page):
        self.page = page
        self.said, self.count = [], Counter()
        self.exits, self.left = {}, {}
        self.marks = MARKS
        self.open = {}  # {who: innermost place of yours} of each traceback that has begun
        self.around = None  # the entry of an error that has only passed on the one which comes
        self.spawned = ""  # whose traceback mp.spawn passes on
        self.row = {}  # the last fields of torchrun's table

    def read(self, stream, name="the log"):
        """Read a stream of bytes to its end; `name` is what a reader calls it."""
        self.name, self.lines, rest = name, 0, b""
        self.open.clear()
        while piece := stream.read(PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            if not self.lines and is_labelled(lines):
                self.marks = [*MARKS, MARK_OF_SRUN]
            if self.open or any(word in piece or word in lines[0] for word in TELLING if lines):
                self.look(lines)
            self.lines += len(lines)
            if len(rest) > LONGEST:  # a progress bar ends no line
                rest = rest[-LONGEST:]
        self.look([rest])
        self.lines += bool(rest)

    def look(self, lines):
        """Take in these lines of bytes; those without a telling word cost little."""
        for number, line in enumerate(lines, self.lines + 1):
            if self.open or any(word in line for word in TELLING):
                for part in line[-LONGEST:].split(b"\r"):
                    text = COLOUR.sub("", part.decode("utf-8", "replace")).rstrip()
                    self.hear(number, *speaker(STAMP.sub("", text, count=1), self.marks))

    def hear(self, number, who, text):
        """Take in one line."""
        if self.hear_launcher(number, text):
            return
        if self.row and not who:
            text = self.in_table(text)
        who = who or self.spawned or self.row.get("who", "")
        if begins := BEGIN.search(text):
            if begins[1] and self.said:  # after "Caught KeyError in DataLoader worker process 0."
                self.around = self.said.pop().entry
            self.open[who] = ""
        elif who in self.open and (text[:1] in ("", " ", "\t") or text.startswith("| ")):
            self.hear_frame(who, text)
        elif named := EXCEPTION.match(text):
            self.hear_exception(number, who, named[0], text)
        else:
            self.open.pop(who, None)
            self.hear_other(number, who, text)

    def in_table(self, text):
        """Return a line of torchrun's table, which may have a traceback, without its margin."""
        if not text.startswith("  "):
            self.row = {}
        return text.removeprefix("  ")

    def hear_frame(self, who, text):
        """Take in a line of a traceback."""
        frame = FRAME.match(text)
        if frame and not LIBRARY.search(frame[1]) and "/bin/" not in frame[1]:  # torchrun is there
            self.open[who] = f"{frame[1].rpartition('/')[2]}:{frame[2]}, in {frame[3]}"

    def hear_exception(self, number, who, name, text):
        """Take in the line with the type and the message."""
        place = self.open.pop(who, None)
        if PASSED_ON.search(name):
            self.spawned = ""
            return
        entry = self.find(text) or self.around
        self.around = None
        role = entry.role if entry else role_of(name, text)
        if entry or place is not None:
            self.keep(Said(who, text, role, entry, place or "", self.name, number))

    def hear_other(self, number, who, text):
        """Take in what is no exception of Python: a warning, C++'s words, a message's next line."""
        entry = self.find(text)
        if not entry:
            return
        last = self.said[-1] if self.said else None
        if last and last.who == who and not last.entry and number - last.line < 20:
            text = f"{last.text} {text.strip()}"
            self.said[-1] = last._replace(text=text, role=entry.role, entry=entry)
        else:
            self.keep(Said(who, text.strip(), entry.role, entry, "", self.name, number))

    def hear_launcher(self, number, text):
        """Take in a line of what has started the ranks; return whether it is one."""
        if found := BY_LAUNCHER.match(text):
            entry = self.find(found[2])
            role = entry.role if entry else role_of("RuntimeError", found[2])
            self.keep(Said(found[1], found[2], role, entry, "", self.name, number))
        elif found := SPAWNED.match(text):
            self.spawned = f"process {found[1]}"
        elif found := LEFT.search(text):
            self.left[f"process {found[1]}"] = found[2]
        elif found := FIELD.match(text):
            self.hear_field(*found.groups())
        return bool(found)

    def hear_field(self, name, value):
        """Take in a field of torchrun's table: time, rank, exitcode, in this order."""
        self.row[name] = value
        if name == "time":
            self.row = {"time": value}
        elif name == "rank":
            self.row["who"] = f"rank {value}"
        elif name == "exitcode" and "who" in self.row:
            seconds = datetime.strptime(self.row["time"], "%Y-%m-%d_%H:%M:%S").timestamp()
            self.exits[self.row["who"]] = Exit(int(value), seconds)

    def find(self, text):
        """Return the entry of the page whose words stand in this text, or None."""
        return next((entry for entry in self.page if entry.words_in(text)), None)

    def keep(self, said):
        """Keep what is said, but for what comes after the first MOST of somebody."""
        self.count[said.who] += 1
        if self.count[said.who] <= MOST:
            self.said.append(said)
