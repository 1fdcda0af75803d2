"""The exercise of lesson 06: write a file so that a kill at any moment leaves it whole."""

import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

from nbtools import run

OLD, NEW = b"old " * 5_000, b"new! " * 6_000  # bytes; both larger than Python's buffer of a file


def solution(data, path):
    """Write `data` (bytes) to `path`; killed at any moment, it leaves the old or the new (A17)."""
    unfinished = path.with_name("unfinished.tmp")  # in the same folder: a rename stays on one disk
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _watched(attempt, path):
    """Let the attempt write once, undisturbed; return the calls it made, in order."""
    calls = []

    def watch(name):
        real = getattr(os, name)

        def watching(*args, **options):
            calls.append((name, *args))
            return real(*args, **options)

        setattr(os, name, watching)  # for the rest of this rank, which ends after the check

    for name in ("fsync", "replace", "rename"):
        watch(name)
    attempt(NEW, path)
    return calls


def _killed(attempt, path, limit=None, line=None):
    """Let a child write, killed when the file reaches `limit` bytes, or at its `line`-th line.

    Return True if the child was killed, False if it came to its end before that.
    """
    child = os.fork()
    if child == 0:
        if limit is not None:  # the kernel sends SIGXFSZ to who writes more; by default it kills
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file of the killed child
        counted = 0

        def trace(frame, event, _):
            nonlocal counted
            if frame.f_code.co_filename != attempt.__code__.co_filename:
                return None
            counted += event == "line"
            if counted == line:
                os._exit(9)  # like a kill: nothing is flushed, no `finally` runs
            return trace

        sys.settrace(trace if line else None)
        try:
            attempt(NEW, path)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def _examine(rank, world_size, attempt):
    """Return None, or one sentence about what is wrong with the attempt, on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        path.write_bytes(OLD)
        calls = _watched(attempt, path)
        if not path.exists() or path.read_bytes() != NEW:
            return "after an undisturbed write, the file does not hold the new data"
        if os.listdir(folder) != [path.name]:
            return "it leaves another file in the folder"
        for limit in (0, 1, len(NEW) // 2, len(NEW) - 1):
            path.write_bytes(OLD)
            if not _killed(attempt, path, limit=limit):
                return f"a disk that is full after {limit} bytes went unnoticed"
            if not path.exists() or path.read_bytes() != OLD:
                size = path.stat().st_size if path.exists() else "no"
                return (
                    f"killed while it writes byte {limit + 1:,}, it leaves {size} bytes of a file"
                )
        line, killed = 0, True
        while killed:
            line += 1
            path.write_bytes(OLD)
            killed = _killed(attempt, path, line=line)
            if not path.exists() or path.read_bytes() not in (OLD, NEW):
                return f"killed before its line {line}, it leaves neither the old file nor the new"
        renames = [number for number, call in enumerate(calls) if call[0] != "fsync"]
        if not renames:
            return "it puts the data in place without a rename: use os.replace"
        if "fsync" not in [name for name, *_ in calls[: renames[0]]]:
            return "when it renames, the data may not be on the disk yet: call os.fsync before"
        if Path(os.fspath(calls[renames[0]][1])).parent != path.parent:
            return "the file to rename is in another folder, which may be on another disk"
    return None


def check(attempt, nproc=2):
    """Return None if the attempt is right on all of `nproc` ranks, else one sentence.

    Each rank writes into a folder of its own, is killed at every line and in the middle of a write.
    """
    problems = run(_examine, nproc, attempt, deadline=60)
    return next((problem for problem in problems if problem), None)


# The task of the notebook: its check, and its solution.
TASKS = {"write_safely": (check, solution)}
