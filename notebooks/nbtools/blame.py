"""Why a rank has failed, or where it waits, in one line."""

import faulthandler
import functools
import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import cloudpickle
from lockstep import ending
from lockstep.watch import facts

SIGNAL = signal.SIGUSR2
NBTOOLS = str(Path(__file__).parent)
A_CELL = re.compile("<(ipython-input|stdin>|string>)")  # what the reader has typed, in no file
DECORATORS = {"wrapper", "decorate_context"}  # torch puts these between a call and the function


class RankFailed(RuntimeError):
    """One or more ranks raised, died, or did not finish. `details` has a rank's traceback."""

    def __init__(self, message, details=""):
        super().__init__(message)
        self.details = details

    def _render_traceback_(self):  # IPython asks for this: one line instead of a page
        return [f"{type(self).__name__}: {self}"]


# --- Why a rank has failed ---


class Failure(NamedTuple):
    """Why a rank has failed. A failure is secondary if it only tells that another rank is gone."""

    time: float
    secondary: bool
    message: str  # follows the words "rank 0"
    details: str = ""


class NotSent(Exception):
    """Something can't travel to another process."""


def pickle(thing, name):
    """Return `thing` as bytes; raises NotSent."""
    try:
        return cloudpickle.dumps(thing)
    except Exception as error:
        raise NotSent(f"{name} can't be pickled: {ending.reason(error)}") from error


def unpickle(data, name):
    """Return what was pickled; raises NotSent."""
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise NotSent(f"{name} can't be unpickled: {ending.reason(error)}") from error


def describe(error):
    """Return the Failure of the rank that has caught `error`."""
    stack = traceback.extract_tb(error.__traceback__)
    place = find_place([(frame.filename, frame.lineno, frame.name) for frame in reversed(stack)])
    lost = ending.tells(ending.LOST, error)
    late = ending.tells(ending.LATE, error)
    if isinstance(error, NotSent):
        message = f": {error}"
    elif lost and place:
        message = f" lost its connection {place}"
    else:
        function, line = place[:2] if place else (stack[-1].name, stack[-1].lineno)
        waited = f"; {ending.WAITED}" * late
        message = f": {ending.reason(error)} (in {function}, line {line}{waited})"
    return Failure(time.monotonic(), lost or late, message, traceback.format_exc())


# --- Where a rank is ---


class Place(NamedTuple):
    """A line of the reader's function, and the library's function that it has called there."""

    function: str
    line: int
    call: str = ""
    collective: bool = False

    def __str__(self):
        if self.call:
            return f"in {self.call} ({self.function}, line {self.line})"
        return f"in {self.function}, line {self.line}"


def find_place(frames):
    """Return the innermost place in the reader's code, or None if the stack has none.

    frames: (file, line, function), innermost first.
    """
    call, collective = "", False
    for file, line, function in frames:
        if file == f"{NBTOOLS}/run.py":  # it has called the reader's function
            return None
        if not _is_library(file):
            return Place(function, line, call, collective)
        if not function.startswith("_") and function not in DECORATORS:
            call = function  # the outermost is the one that the reader knows
            collective = "/torch/distributed/" in file
    return None


def _is_library(file):
    own = facts.is_own(file) and not file.startswith(NBTOOLS)
    return not (own or A_CELL.match(file))


# --- Does a rank join others, and where is it? ---


def mark_while_it_joins(c10d, path):
    """Let this file exist while this rank connects to others in a new group: none may leave then.

    (Here and not in run.py: find_place takes what run.py calls for the reader's own function.)
    """
    connect = c10d._new_process_group_helper

    @functools.wraps(connect)
    def marked(*args, **options):
        path.touch()
        try:
            return connect(*args, **options)
        finally:
            path.unlink(missing_ok=True)

    c10d._new_process_group_helper = marked


def listen(path):
    """Let this process write its stacks to the file `path` when it gets SIGNAL, or aborts.

    faulthandler can do that while C++ code runs, as in a collective; Python itself can't.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    faulthandler.enable(file)
    faulthandler.register(SIGNAL, file, all_threads=False)  # others may move, and we die of it
    os.write(file, b"listens\n")


def read_place(path):
    """Return the place that a rank has written to `path`, or None."""
    return find_place(_read_frames(path, 0))


def _read_frames(path, size):
    """Return the frames of the main thread, innermost first, that follow the first `size` bytes."""
    text = Path(path).read_bytes()[size:].decode(errors="replace")
    main_thread = text.rpartition("(most recent call first):")[2]  # it is written last
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
    return [
        (file.encode().decode("unicode_escape"), int(line), name) for file, line, name in frames
    ]


def ask(processes, paths):
    """Ask ranks for their stacks; return the frames of each, innermost first.

    [] of a rank that does not listen yet (the signal would end it), has ended, or was stopped. On a
    busy machine they may take seconds to answer.
    """
    sizes = [path.stat().st_size for path in paths]
    for process, size in zip(processes, sizes, strict=True):
        if size and process.is_alive():
            os.kill(process.pid, SIGNAL)
    end = time.monotonic() + 30
    return [
        _wait_for_frames(process, path, size, end if size else 0)
        for process, path, size in zip(processes, paths, sizes, strict=True)
    ]


def _wait_for_frames(process, path, size, end):
    frames = []
    while process.is_alive() and time.monotonic() < end:
        frames = _read_frames(path, size)
        if frames and frames[-1][2] == "<module>":  # the outermost frame is written last
            break
        if path.read_bytes()[size:].endswith(b"  ...\n"):  # of a deep stack it is not written
            break
        time.sleep(0.01)
    return frames


def state(frames):
    """Return what a rank with these frames is doing, as (singular, plural) for sentence()."""
    place = find_place(frames)
    if place is None and {function for _, _, function in frames} & {"_value", "_send"}:
        return "is sending its value", "are sending their values"
    if place is None:
        return "is still starting", "are still starting"
    verbs = ("waits", "wait") if place.collective else ("is", "are")
    return tuple(f"{verb} {place}" for verb in verbs)


def sentence(states):
    """Return "rank 0 is ...; ranks 1 and 2 wait ..." for {rank: (singular, plural)}."""
    groups = {}
    for rank, state in states.items():
        groups.setdefault(state, []).append(str(rank))
    parts = []
    for (singular, plural), ranks in groups.items():
        *first, last = ranks
        if first:
            parts.append(f"ranks {', '.join(first)} and {last} {plural}")
        else:
            parts.append(f"rank {last} {singular}")
    return "; ".join(parts)
