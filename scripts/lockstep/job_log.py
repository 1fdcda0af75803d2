"""What the log of a job says: the errors of each rank, and how the processes ended.

It reads what torchrun, mp.spawn, Slurm and this course's launchers print, also of several ranks
mixed line by line. A log is read in pieces, so its size costs time and no memory.
"""

import re
from collections import Counter
from typing import NamedTuple

from lockstep import errors
from lockstep.ending import LATE, LOST
from lockstep.launched import Launchers
from lockstep.watch.facts import LIBRARY

PIECE = 1 << 18  # bytes that are read at once
SHORT = 1 << 14  # bytes of a log that is looked at line by line
LONGEST = 1 << 16  # bytes of a line that are looked at
MOST = 500  # errors that are kept of a rank: the cause comes early

# In a long log, a line without one of these is not looked at, unless a traceback is open.
TELLING = (
    *(b"Error", b"rror:", b"Exception", b"arning", b"raceback", b'  File "', b"-- Process "),
    *(b"exitcode", b"exit code", b"failed", b"failure", b"signal", b"Signal", b"illed", b"illing"),
    *(b"NCCL", b"oom", b"Out Of", b"terminate", b"what():", b"  rank ", b"  time ", b"roup"),
    *(b"imed out", b"leaked", b"An attempt", b"OMP_NUM", b"Address", b"hostname", b"us error"),
    *(b"mismatch", b"key(s)", b"unrecognized", b"not receive", b"rocess name", b"return code"),
    *(b"local_rank", b"Last error", b"Duplicate GPU", b"no socket interface", b"CANCELLED"),
    *(b"task ", b"watchdog", b"FAILED", b"above exc", b"free()", b"corrupt", b"Fatal"),
    b"can't open file",
)

# --- Who says a line ---

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What containers and clusters put before each line.
STAMP = re.compile(
    r"^(\d{4}-\d\d-\d\d[T ][\d:.,]+(Z|[+-]\d\d:?\d\d)? ((stdout|stderr) [FP] )?"
    r"|[\w.-]+ +\| |stderr: |\s*[>`*│]+ ?)"  # and what a paste has
)
MARKS = [
    (re.compile(r".{0,300}?\[rank(\d+)\]: ?"), "rank"),  # torch, in a process that has a group
    (re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?"), "rank"),  # mpirun
    (re.compile(r"\[[A-Za-z_]+(\d+)\]: ?"), "local rank"),  # torchrun --tee
    (re.compile(r"\(\w+ pid=(\d+)[^)]*\) ?"), "process"),  # Ray
]
MARK_OF_SRUN = (re.compile(r" *(\d+): ?"), "task")  # srun --label
MARK_OF_HOST = (re.compile(r"([\w.-]*\d[\w.-]*): ?"), "host")  # pdsh, and so DeepSpeed
SAID_BY_NCCL = re.compile(
    r"(?:\[Rank (?=\d+\])|: \[(?=\d+\] is setting up))(\d+)\]|^\S+:\d+:\d+ \[(\d+)\] "
)


def speaker(line, marks):
    """Return (who says this line, or "" if it does not tell, the line without its mark)."""
    for pattern, name in marks:
        if found := pattern.match(line):
            rest = line[found.end() :]
            if name == "host":  # a rank may be named after it
                return speaker(rest, MARKS)[0] or f"host {found[1]}", rest
            return f"{name} {int(found[1])}", rest
    if found := SAID_BY_NCCL.search(line):
        return f"rank {found[1]}" if found[1] else f"local rank {found[2]}", line
    return "", line


def extra_marks(lines):
    """Return the marks with which most of these lines of bytes begin: a task of srun, a host."""
    some = [line for line in lines[:200] if line.strip()]
    for pattern, marks in (
        (rb" *\d+: ", [MARK_OF_SRUN]),
        (rb"[\w.-]*[A-Za-z-]\d+[\w.-]*: ", [MARK_OF_HOST]),
    ):
        if sum(bool(re.match(pattern, line)) for line in some) > 0.8 * len(some):
            return marks
    return []


# --- What is said ---


class Said(NamedTuple):
    """An error or a warning. `place` is the innermost line of yours in its traceback, if any.

    `doubt` is 0, or 1 for an error without a traceback that the page does not know, which may be a
    line of a log that went on, or a warning from which errors may follow; or 2 for words of the
    page in a line that is no error.
    """

    who: str
    text: str
    role: str
    entry: errors.Entry | None = None
    place: str = ""
    log: str = ""
    line: int = 0
    doubt: int = 0
    chain: int = 0  # errors that led to one another have the same number; 0: without a traceback


BEGIN = re.compile(r"(Original )?Traceback \(most recent call last\)")
FRAMES = [
    re.compile(r' *File "(.*)", line (\d+), in (.*)'),
    re.compile(r"(?:File )?([/~\w].*\.py):(\d+),? in ([\w.<>]+)"),  # of rich, and of a notebook
]
# A line between two of those: of rich in a box, of a notebook with arrows.
IN_TRACEBACK = re.compile(r"[ \t]|$|(File )?[/~].*\.py|-+> |\(\.\.\.\)|Cell In|<ipython|❱|.*[│╮╯]$")
# Not yours, beside what is LIBRARY on Linux: Python on Windows, and PyTorch wherever it lies.
OTHER_LIBRARY = re.compile(
    r"/(Python\d+|[^/]*conda\d?|envs/[^/]+)/lib/"
    r"|(^|/)torch/(_|nn/|utils/|distributed/|multiprocessing/|autograd/|optim/|serialization\.py)",
    re.IGNORECASE,
)
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Empty)(?=:|$)")
LAST_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)+\w+|[A-Z]\w*)(?=:|$)")  # of a traceback: cv2.error
GROUP = re.compile(r" *\| ")  # the margin of an ExceptionGroup
IN_JSON = re.compile(r'\s*"message": "(\w+(?:Error|Exception): .*)')  # torchrun's error file
AFTER_A_BAR = re.compile(r"\S.*?(\[[EW]\d{0,4} .*)")
LED_TO = re.compile("The above exception was the direct cause|During handling of the above exc")
IGNORED = re.compile("Exception ignored in|Error in atexit")  # what comes as Python clears up
# These only pass on what a process has said, above or below.
PASSED_ON = re.compile("(ChildFailed|ProcessRaised|ProcessExited|Checkpoint)E|ExceptionGroup")
# So begins a line that tells of an error, and is not only a program's word about one.
SERIOUS = re.compile(
    r"^\s*(what\(\)|terminate called|\[?[EF]\d{3,4} |\[E |srun|slurmstepd|free\(\)|double free"
    r"|Fatal|ERROR: |\S*python\S*: can't|.*death signal|\S+: error: |\S+:\d+:\d+ \[\d+\] )"
    r"|\w(Error|Exception)[:(]"
)
NO_GPU = re.compile("Warning: CUDA initialization: ")  # what fails later may follow from it
OF_CPP = re.compile(r"\s*(\[?[WEIF]\d{3,4} |\[[WEIF] |what\(\)|terminate called)")
SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")
BY_LAUNCHER = re.compile(r"(rank \d+) failed: (.*)")


def is_of_torch(name):
    """Return whether an exception's type is one with which torch.distributed tells of others."""
    return bool(re.match(r"RuntimeError|torch\.|Dist|Rendezvous", name))


def is_yours(file):
    """Return whether a file, with slashes, is neither Python's nor a package's."""
    libraries = (LIBRARY, OTHER_LIBRARY)
    return "/bin/" not in file and not any(library.search(file) for library in libraries)


def role_of(name, text, entry, traced):
    """Return the role of an exception of this type; `traced`: it has ended a traceback."""
    own = is_of_torch(name) or name == "KeyboardInterrupt"
    if entry and (own or entry.role in (errors.CAUSE, errors.WARNING)):
        return errors.CAUSE if traced and entry.role == errors.WARNING else entry.role
    if "Warning" in name and not traced:
        return errors.WARNING
    if is_of_torch(name) and LOST.search(text):
        return errors.ECHO
    if is_of_torch(name) and LATE.search(text):
        return errors.WAIT
    return errors.CAUSE


def goes_on(last, number, text, entry):
    """Return whether a line is one more of a message that the page did not know by its first."""
    stronger = errors.ROLES.index(entry.role) <= errors.ROLES.index(last.role)
    return not last.entry and number - last.line < 5 and stronger and not OF_CPP.match(text)


class Log:
    """What was read of a job: `said` by its processes, in the order of the lines; `launchers`."""

    def __init__(self, page):
        self.page = page
        self.said, self.count = [], Counter()
        self.launchers = Launchers()
        self.marks = MARKS
        self.open = {}  # {who: innermost place of yours} of each traceback that has begun
        self.chains = Counter()  # tracebacks of each that did not lead to one another
        self.linked, self.ignored = (
            set(),
            set(),
        )  # whose next traceback belongs to the last; is idle
        self.around = None  # the entry of an error that has only passed on the one which comes
        self.spawned = ""  # whose traceback mp.spawn passes on
        self.unknown = -1  # the line of an error that the page does not know, or not by this line

    def read(self, stream, name="the log"):
        """Read a stream of bytes to its end; `name` is what a reader calls it."""
        self.name, self.lines, rest = name, 0, b""
        self.open.clear()
        self.unknown = -1
        self.is_short = False
        while piece := stream.read(PIECE):
            self.is_short = not self.lines and len(piece) < SHORT
            *lines, rest = (rest + piece).split(b"\n")
            if not self.lines:
                self.marks = [*MARKS, *extra_marks(lines)]
            if self.is_telling(rest + piece if not lines else piece + lines[0]):
                self.look(lines)
            self.lines += len(lines)
            if len(rest) > LONGEST:  # a progress bar ends no line
                rest = rest[-LONGEST:]
        self.look([rest])
        self.lines += bool(rest)

    def look(self, lines):
        """Take in these lines of bytes; those without a telling word cost little."""
        for number, line in enumerate(lines, self.lines + 1):
            if self.is_telling(line) or number == self.unknown + 1:
                line = (
                    line if len(line) <= LONGEST else line[: LONGEST // 2] + line[-LONGEST // 2 :]
                )
                for part in line.split(b"\r"):
                    text = COLOUR.sub("", part.decode("utf-8", "replace")).rstrip()
                    self.hear(number, *speaker(STAMP.sub("", text), self.marks))

    def is_telling(self, text):
        """Return whether bytes have to be looked at."""
        return self.is_short or self.open or any(word in text for word in TELLING)

    def hear(self, number, who, text):
        """Take in one line."""
        if self.launchers.hear(text):
            return
        if self.launchers.row and not who:
            text = self.in_table(text)
        if found := SPAWNED.match(text):
            self.spawned = f"process {found[1]}"
            return
        if found := BY_LAUNCHER.match(text):
            entry = self.find(found[2])
            role = role_of("RuntimeError", found[2], entry, traced=False)
            self.keep(Said(*found.groups(), role, entry, "", self.name, number, chain=1))
            return
        self.hear_process(number, who or self.spawned or self.launchers.row.get("who", ""), text)

    def hear_process(self, number, who, text):
        """Take in a line of a process."""
        if found := IN_JSON.match(text) or AFTER_A_BAR.search(text):
            text = found[1]
        if GROUP.match(text):
            text = GROUP.sub("", text, count=1)
            if EXCEPTION.match(text):  # one that was never raised has no traceback
                self.open.setdefault(who, "")
        if LED_TO.search(text):
            self.linked.add(who)
        elif IGNORED.search(text):
            self.ignored.add(who)
        elif begins := BEGIN.search(text):
            self.begin(who, original=bool(begins[1]))
        elif FRAMES[0].match(text) or (who in self.open and IN_TRACEBACK.match(text)):
            self.hear_frame(who, text)
        elif named := (LAST_LINE if who in self.open else EXCEPTION).match(text):
            self.hear_exception(number, who, named[0], text)
        else:
            self.open.pop(who, None)
            self.hear_other(number, who, text)

    def begin(self, who, original):
        """Take in the first line of a traceback."""
        if original and self.said:  # after "Caught KeyError in DataLoader worker process 0."
            self.around = self.said.pop().entry
        elif who not in self.linked | self.ignored:
            self.chains[who] += 1
        self.linked.discard(who)
        self.open[who] = ""

    def in_table(self, text):
        """Return a line of torchrun's table, which may have a traceback, without its margin."""
        if not text.startswith("  "):
            self.launchers.row = {}
        return text.removeprefix("  ")

    def hear_frame(self, who, text):
        """Take in a line of a traceback."""
        frame = next(filter(None, (pattern.match(text) for pattern in FRAMES)), None)
        self.open.setdefault(who, "")
        if frame and is_yours(file := frame[1].replace("\\", "/")):
            self.open[who] = f"{file.rpartition('/')[2]}:{frame[2]}, in {frame[3]}"

    def hear_exception(self, number, who, name, text):
        """Take in the line with the type and the message."""
        place = self.open.pop(who, None)
        by_launcher = "CalledProcessError" in name and not place
        of_spawn = text == "Exception:"  # so began what mp.spawn passed on before PyTorch 1.6
        if PASSED_ON.search(name) or by_launcher or of_spawn or who in self.ignored:
            self.spawned = ""
            self.ignored.discard(who)
            return
        entry = self.find(text) or self.around
        self.around = None
        role = role_of(name, text, entry, place is not None)
        chain = self.chains[who] if place is not None else 0
        doubt = 0 if chain or entry else 1
        self.unknown = -1 if entry else number
        self.keep(Said(who, text, role, entry, place or "", self.name, number, doubt, chain))

    def hear_other(self, number, who, text):
        """Take in what is no exception of Python: a warning, C++'s words, a message's next line."""
        entry = self.find(text)
        last = self.said[-1] if self.said else None
        if last and last.who == who and last.text.endswith("Last error:"):  # nccl's reason
            known = {"entry": entry, "role": entry.role, "doubt": 0} if entry else {}
            self.said[-1] = last._replace(text=f"{last.text} {text}", **known)
            return
        if text == "Last error:" and last and last.who == who:
            self.said[-1] = last._replace(text=f"{last.text} {text}")
            return
        if not entry and last and last.who == who and number == self.unknown + 1:
            entry = self.find(f"{last.text} {text.strip()}")  # a box, or a terminal, broke the line
        if not entry or text.lstrip().startswith("raise "):
            return
        if last and last.who == who and goes_on(last, number, text, entry):
            text = f"{last.text} {text.strip()}"
            self.said[-1] = last._replace(text=text, role=entry.role, entry=entry, doubt=0)
            return
        serious = who.startswith("rank") or entry.role == errors.WARNING or SERIOUS.search(text)
        doubt = 0 if serious else 1 if NO_GPU.search(text) else 2
        self.keep(Said(who, text.strip(), entry.role, entry, "", self.name, number, doubt))

    def find(self, text):
        """Return the entry of the page whose words stand in this text, or None."""
        found = [entry for entry in self.page if entry.words_in(text)]
        return max(found, key=lambda entry: entry.role == errors.WARNING, default=None)

    def keep(self, said):
        """Keep what is said, but for what comes after the first MOST of somebody."""
        self.count[said.who] += 1
        if self.count[said.who] <= MOST:
            self.said.append(said)
