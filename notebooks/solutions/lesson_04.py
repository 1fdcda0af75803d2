"""The exercise of lesson 04: processes without numbers take their ranks from a store."""

import tempfile
from datetime import timedelta
from pathlib import Path

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


def _examine(index, processes, attempt, path, world_size):
    """Call the attempt in this process; return its answer, and the sum if the ranks can join."""
    dist.destroy_process_group()
    store = dist.FileStore(path, processes)
    store.set_timeout(timedelta(seconds=8))
    try:
        answer = attempt(dist.PrefixStore("attempt", store), world_size)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        answer = f"RuntimeError: {error}"
    store.set(f"answer {index}", repr(answer))
    answers = [store.get(f"answer {other}").decode() for other in range(processes)]
    if sorted(answers) != sorted(map(repr, range(processes))):
        return answer, None
    group = dist.PrefixStore("group", store)
    dist.init_process_group(
        "gloo", store=group, rank=answer, world_size=processes, timeout=timedelta(seconds=8)
    )
    total = torch.tensor([2**answer])
    dist.all_reduce(total)
    return answer, total.item()


def check(attempt, nprocs=(2, 3)):
    """Return None if the attempt is right in a world of each size, else one sentence about it."""
    problems = (_check_world(attempt, nproc) for nproc in nprocs)
    return next((problem for problem in problems if problem), None)


def _check_world(attempt, nproc):
    """Return None if the attempt is right in a world of `nproc`, else one sentence about it.

    Real processes meet in a file, take their ranks with the attempt, and join. Then one process
    too many comes: it must be refused, and the others must not be disturbed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for processes in (nproc, nproc + 1):
            path = str(Path(folder, f"{processes} processes"))
            answers = run(_examine, processes, attempt, path, nproc, deadline=60)
            ranks = [answer for answer, _ in answers]
            place = f"when {processes} processes come for a world of {nproc},"
            refused = [rank for rank in ranks if str(rank).startswith("RuntimeError")]
            if len(refused) != processes - nproc:
                return (
                    f"{place} {len(refused)} got a RuntimeError; it must be {processes - nproc}: "
                    f"the answers were {sorted(map(str, ranks))}"
                )
            given = [rank for rank in ranks if rank not in refused]
            if any(type(rank) is not int for rank in given):
                return f"{place} a rank must be an int, not {given[0]!r}"
            if sorted(given) != list(range(nproc)):
                return f"{place} the ranks are {sorted(given)}, not each of {list(range(nproc))}"
            if processes == nproc and {total for _, total in answers} != {2**nproc - 1}:
                return f"{place} they could not do an all-reduce together"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"take_rank": (check, solution)}
