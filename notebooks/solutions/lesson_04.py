"""The exercise of lesson 04: processes without numbers take their ranks from a store."""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from time import sleep
from unittest.mock import patch

import torch
import torch.distributed as dist
from nbtools import run


def solution(store, world_size):
    """Return a rank that no other process has: 0 to the first that comes, 1 to the next, ..."""
    rank = store.add("processes", 1) - 1  # add is atomic, and returns the new value
    if rank >= world_size:
        raise RuntimeError(f"all {world_size} ranks are taken")
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here" for other in range(world_size)])
    return rank


class _SlowStore(dist.PrefixStore):
    """A store that pauses after each read, so that others read the same before this one writes."""

    def get(self, key):
        return self._pause(super().get(key))

    def multi_get(self, keys):
        return self._pause(super().multi_get(keys))

    def check(self, keys):
        return self._pause(super().check(keys))

    def add(self, key, amount):
        value = super().add(key, amount)
        return value if amount else self._pause(value)

    def _pause(self, answer):
        sleep(0.2)
        return answer


def _examine(index, processes, attempt, path, world_size, patience):
    """Call the attempt in this process; return its answer, whether another process had an answer
    before this one had come, and the sum if the ranks can join."""
    dist.destroy_process_group()
    limit = timedelta(seconds=patience)
    store = dist.FileStore(path, processes)
    store.set_timeout(limit)
    store.set(f"process {index}", "")
    store.wait([f"process {other}" for other in range(processes)])  # all begin at once, but one
    hasty = False
    if processes == world_size and index == processes - 1:  # it comes late
        end = time.monotonic() + 1
        while not hasty and time.monotonic() < end:
            time.sleep(0.02)
            hasty = any(store.check([f"answer {other}"]) for other in range(processes))
    try:
        with patch("time.sleep", lambda seconds: sleep(min(seconds, 0.02))):  # it is no waiting
            answer = attempt(_SlowStore("attempt", store), world_size)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        answer = f"RuntimeError: {error}"
    store.set(f"answer {index}", repr(answer))
    answers = [store.get(f"answer {other}").decode() for other in range(processes)]
    if sorted(answers) != sorted(map(repr, range(processes))):
        return answer, hasty, None
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=answer, world_size=processes, timeout=limit)
    total = torch.tensor([2**answer])
    dist.all_reduce(total)
    return answer, hasty, total.item()


def check(attempt, nprocs=(2, 3), patience=8):
    """Return None if the attempt is right in a world of each size, else one sentence about it.

    A process waits `patience` seconds for another one, and then gives up.
    """
    problems = (_check_world(attempt, nproc, patience) for nproc in nprocs)
    return next((problem for problem in problems if problem), None)


def _check_world(attempt, nproc, patience):
    """Return None if the attempt is right in a world of `nproc`, else one sentence about it.

    Real processes meet in a file, take their ranks with the attempt, and join. The last one comes
    late: nobody may have an answer before. Then one process too many comes: it must be refused,
    and the others must not be disturbed.
    """
    hasty = False
    with tempfile.TemporaryDirectory() as folder:
        for processes in (nproc, nproc + 1):
            path = str(Path(folder, f"{processes} processes"))
            answers = run(_examine, processes, attempt, path, nproc, patience, deadline=60)
            ranks = [answer for answer, _, _ in answers]
            hasty = hasty or any(early for _, early, _ in answers)
            place = f"when {processes} processes come for a world of {nproc},"
            refused = [rank for rank in ranks if str(rank).startswith("RuntimeError")]
            if len(refused) != processes - nproc:
                same = "perhaps two read the same number before either wrote; "
                return (
                    f"{place} {len(refused)} got a RuntimeError; it must be {processes - nproc}: "
                    f"{same if len(refused) > processes - nproc else ''}"
                    f"the answers were {sorted(map(str, ranks))}"
                )
            given = [rank for rank in ranks if rank not in refused]
            if any(type(rank) is not int for rank in given):
                return f"{place} a rank must be an int, not {given[0]!r}"
            if sorted(given) != list(range(nproc)):
                return f"{place} the ranks are {sorted(given)}, not each of {list(range(nproc))}"
            if processes == nproc and {total for *_, total in answers} != {2**nproc - 1}:
                return f"{place} they could not do an all-reduce together"
    if hasty:
        return f"in a world of {nproc} one returned a rank before the last process had come"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"take_rank": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "take_rank": (
        "Two processes may come in the same instant: which operation of the store reads and "
        'changes a number in one step? For "when all have come", look at the barrier that was '
        "made from a store."
    ),
}
