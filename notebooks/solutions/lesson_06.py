"""Solutions of the tasks of lesson 06, and their checks."""

import errno
import math
import os
import sys
import tempfile
from itertools import count
from pathlib import Path

import torch.distributed as dist
from lockstep.watch.kills import fate
from nbtools import RankFailed, run

# --- Task 1: build ---

OLD, NEW = b"old " * 5_000, b"new! " * 6_000  # bytes; both larger than Python's buffer of a file
SHORT = b"short"  # it fits into the buffer, and stays there until somebody flushes it


def write_safely(data, path):
    """Write `data` (bytes) to `path`; killed at any moment, it leaves the old or the new."""
    unfinished = path.with_suffix(".unfinished")  # in the same folder: a rename stays on one disk
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()  # from Python to the operating system
        os.fsync(file.fileno())  # and to the disk
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the name is an entry of the folder: to the disk with it
    os.close(folder)


def _calls(attempt, data, path):
    """Let the attempt write once, undisturbed; return what it synced, renamed, opened, in order.

    A sync is ("sync", number of the file, its bytes at that moment), or without bytes for a folder;
    a rename is ("rename", number of the file, its folder). ("open",) is `path` opened for writing.
    """
    calls, real = [], {name: getattr(os, name) for name in ("fsync", "replace", "rename")}
    watching = True

    def hook(event, arguments):  # Python calls it before each opening; it can't be removed again
        if watching and event == "open" and not isinstance(arguments[0], int):
            same = os.path.realpath(os.fsdecode(arguments[0])) == os.path.realpath(path)
            if same and arguments[2] & (os.O_WRONLY | os.O_RDWR):
                calls.append(("open",))

    def fsync(handle):
        number = os.fstat(handle if isinstance(handle, int) else handle.fileno()).st_ino
        files = [file for file in path.parent.iterdir() if file.stat().st_ino == number]
        calls.append(("sync", number, *[file.read_bytes() for file in files[:1]]))
        real["fsync"](handle)

    def renaming(name):
        def rename(old, new, **options):
            calls.append(("rename", os.stat(old).st_ino, Path(os.fspath(old)).parent))
            real[name](old, new, **options)

        return rename

    os.fsync, os.replace, os.rename = fsync, renaming("replace"), renaming("rename")
    sys.addaudithook(hook)
    try:
        attempt(data, path)
    finally:
        watching = False
        os.fsync, os.replace, os.rename = real["fsync"], real["replace"], real["rename"]
    return calls


def _order(calls, data, folder):
    """Return None, or one sentence about a power cut that would lose what the attempt wrote."""
    renames = [number for number, call in enumerate(calls) if call[0] == "rename"]
    if not renames:
        return "it puts the data in place without a rename: use os.replace"
    if ("open",) in calls:
        return "it opens the file of that name for writing: a kill just then leaves a part of it"
    _, renamed, where = calls[renames[0]]
    if where != folder:
        return "the file to rename is in another folder, which may be on another disk"
    before, after = calls[: renames[0]], calls[renames[-1] + 1 :]
    synced = [call for call in before if call[:2] == ("sync", renamed)]
    if not synced:
        return "when it renames, the data may not be on the disk yet: call os.fsync before"
    if ("sync", renamed, data) not in synced:
        return "at its os.fsync the file does not hold all the data yet, so they may not be on disk"
    if ("sync", folder.stat().st_ino) not in after:
        return "when it returns, the new name may not be on the disk yet: nobody has synced it"
    return None


def _fate(attempt, path, **when):
    """Return how a killed write ends; raise FileExistsError if an unfinished file stops it."""
    end = fate(attempt, NEW, path, **when)
    if end == errno.EEXIST:
        raise FileExistsError("the unfinished file of a killed run stops the next write")
    return end


def _examine(rank, world_size, attempt):
    """Return None, or one sentence about what is wrong with the attempt, on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        path, another = Path(folder, "checkpoint.pt"), Path(folder, "unfinished.tmp")
        another.write_text("of another program")
        problems, opened = [], len(os.listdir("/dev/fd"))
        for data, old in ((SHORT, OLD), (NEW, OLD), (NEW, None)):
            path.unlink(missing_ok=True)  # None: there is no older file
            if old:
                path.write_bytes(old)
            calls = _calls(attempt, data, path)
            if not path.exists() or path.read_bytes() != data:
                return "after an undisturbed write, the file does not hold the new data"
            if not another.exists() or another.read_text() != "of another program":
                return f"{another.name} was another program's, and is changed or gone"
            if sorted(os.listdir(folder)) != [path.name, another.name]:
                return "it leaves another file in the folder"
            problems.append(_order(calls, data, path.parent))
        if len(os.listdir("/dev/fd")) > opened:
            return "it leaves a descriptor open at each call: os.close what you os.open"
        for limit in (0, 1, len(NEW) // 2, len(NEW) - 1):
            path.write_bytes(OLD)
            if _fate(attempt, path, limit=limit) >= 0:
                return f"a disk that is full after {limit} bytes went unnoticed"
            if not path.exists() or path.read_bytes() != OLD:
                size = path.stat().st_size if path.exists() else "no"
                return (
                    f"killed while it writes byte {limit + 1:,}, it leaves {size} bytes of a file"
                )
        path.write_bytes(OLD)
        full = _fate(attempt, path, limit=len(NEW) // 2, kills=False)
        if full != errno.EFBIG or path.read_bytes() != OLD:
            return "the disk is full, and it returns as if all were saved: let the OSError through"
        for moment in count(1):
            path.write_bytes(OLD)
            killed = _fate(attempt, path, moment=moment) < 0
            if not path.exists() or path.read_bytes() not in (OLD, NEW):
                return "killed between two of its steps, it leaves neither the old file nor the new"
            if not killed:
                break
        path.write_bytes(OLD)
        _fate(attempt, path, limit=len(NEW) - 1)
        attempt(SHORT, path)
        if path.read_bytes() != SHORT:
            return "after a killed long write, a short one ends with a part of the long one"
    return next((problem for problem in problems if problem), None)


def check_write_safely(attempt, nproc=2):
    """Return None if the attempt is right on all of `nproc` ranks, else one sentence.

    Each rank writes into a folder of its own, and is killed at every line, rename and removal, and
    in the middle of a write.
    """
    problems = run(_examine, nproc, attempt, deadline=60)
    return next((problem for problem in problems if problem), None)


# --- Task 2: repair ---


def common_step(rank, world_size, steps_here):
    """Return the latest step of which every rank has a file; None if there is no such step."""
    everyone = [None] * world_size
    dist.all_gather_object(everyone, steps_here)
    return max(set.intersection(*map(set, everyone)), default=None)


CASES = {  # the steps that each rank has, for 2 and for 3 ranks; those of EMPTY come last
    2: [[[3, 4, 6], [4, 5]], [[9, 10], [9, 10]], [[1, 2], [3]], [[70_000], [70_000, 7]]],
    3: [[[1, 2, 4, 6], [2, 3, 4, 5], [1, 2, 3, 7]], [[5, 8], [5, 8], [8, 5]], [[2], [2], [3]]],
}
EMPTY = {2: [[[], [1]], [[1], []], [[], []]], 3: [[[2], [], [2]]]}


def _answer(rank, world_size, attempt, cases):
    return [attempt(rank, world_size, list(case[rank])) for case in cases]


def check_common_step(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else what is wrong."""
    for nproc, cases in CASES.items():
        for part in (cases, EMPTY[nproc]):
            try:
                answers = run(_answer, nproc, attempt, part, deadline=20)
            except RankFailed as error:
                return f"with {nproc} ranks: {error}"
            for number, case in enumerate(part):
                given = [of_rank[number] for of_rank in answers]
                common = set.intersection(*map(set, case))
                if given != [max(common, default=None)] * nproc:
                    return f"the ranks have the steps {case}, and go on from {given}"
    return None


# --- Task 3: predict ---

COST, MEAN_TIME = (
    24,
    50 * 24 * 3600 / 100,
)  # seconds: of a save, and between two failures of the job
seconds_between_saves = math.sqrt(2 * COST * MEAN_TIME)


def check_seconds_between_saves(guess):
    """Return None if `guess` is within two percent of the right number, else a hint."""
    if abs(guess / seconds_between_saves - 1) < 0.02:
        return None
    if abs(guess / math.sqrt(2 * COST * 100 * MEAN_TIME) - 1) < 0.02:
        return "so it is for one machine: how often does one of the hundred fail?"
    return "how many seconds pass between two failures of the job, and what does the formula say?"


TASKS = {
    "write_safely": (check_write_safely, write_safely),
    "common_step": (check_common_step, common_step),
    "seconds_between_saves": (check_seconds_between_saves, seconds_between_saves),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "write_safely": (
        "Follow `save` line by line, and ask what would be found after a power cut just there. "
        "`file.write` only fills a buffer of Python: who empties it, before os.fsync looks?"
    ),
    "common_step": (
        "The smallest of the latest steps need not be among the steps of every rank. Which lists "
        "does a rank have to know, before it can say what all have in common?"
    ),
    "seconds_between_saves": (
        "The job fails when any of its machines does. With twice as many machines it fails twice "
        "as often; then put the two times, in seconds, into the formula."
    ),
}
