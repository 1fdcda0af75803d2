"""Wrong answers to the tasks of lesson 06, with what the checks must say; and right ones."""

import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from solutions.lesson_06 import check_write_safely, common_step, write_safely


def send(data, unfinished, mode="wb"):
    """Write data to a file, and send it to the disk."""
    with open(unfinished, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def directly(data, path):
    path.write_bytes(data)


def removes_first(data, path):
    unfinished = path.with_name("new")
    with open(unfinished, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
    os.rename(unfinished, path)


def removes_first_on_one_line(data, path):
    unfinished = path.with_name("new")
    send(data, unfinished)
    path.unlink(missing_ok=True), os.rename(unfinished, path)
    sync_folder(path)


def needs_an_older_file(data, path):
    path.stat()
    write_safely(data, path)


def without_fsync(data, path):
    path.with_name("new").write_bytes(data)
    os.replace(path.with_name("new"), path)


def fsync_first(data, path):
    with open(path.with_name("new"), "wb") as file:
        os.fsync(file.fileno())
        file.write(data)
    os.replace(path.with_name("new"), path)


def without_flush(data, path):
    with open(path.with_name("new"), "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    os.replace(path.with_name("new"), path)
    sync_folder(path)


def fsync_of_the_folder_only(data, path):
    path.with_name("new").write_bytes(data)
    sync_folder(path)
    os.replace(path.with_name("new"), path)
    sync_folder(path)


def fsync_of_the_file_only(data, path):
    send(data, path.with_name("new"))
    os.replace(path.with_name("new"), path)


def folder_too_early(data, path):
    send(data, path.with_name("new"))
    sync_folder(path)
    os.replace(path.with_name("new"), path)


def sync_folder(path):
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def takes_another_s_name(data, path):
    unfinished = path.with_name("unfinished.tmp")
    send(data, unfinished)
    os.replace(unfinished, path)
    sync_folder(path)


def copies(data, path):
    path.with_name("new").write_bytes(data)
    shutil.copy(path.with_name("new"), path)
    path.with_name("new").unlink()


def keeps_the_other(data, path):
    write_safely(data, path)
    path.with_name("backup").write_bytes(data)


def writes_it_again(data, path):
    write_safely(data, path)
    path.write_bytes(data)


def stopped_by_an_old_one(data, path):
    send(data, path.with_suffix(".unfinished"), "xb")
    os.replace(path.with_suffix(".unfinished"), path)
    sync_folder(path)


def swallows_the_error(data, path):
    with suppress(OSError):  # as with `except OSError: pass`
        write_safely(data, path)


def leaves_the_folder_open(data, path):
    with open(path.with_name("new"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file)
    os.replace(path.with_name("new"), path)
    os.fsync(os.open(path.parent, os.O_RDONLY))


def writes_nothing(data, path):
    pass


def with_a_name_of_chance(data, path):
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)
    Path(unfinished).rename(path)
    sync_folder(path)


def syncs_the_file_itself(data, path):
    with open(path.with_name("new"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file)
    os.replace(path.with_name("new"), path)
    sync_folder(path)


def without_a_buffer(data, path):
    """A disk that is nearly full takes a part of the data, and nobody looks how much."""
    with open(path.with_name("new"), "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file)
    os.replace(path.with_name("new"), path)
    sync_folder(path)


def without_truncating(data, path):
    """What a killed long write has left is longer than a short one."""
    handle = os.open(path.with_suffix(".unfinished"), os.O_WRONLY | os.O_CREAT)
    with open(handle, "wb", closefd=False) as file:
        file.write(data)
    os.fsync(handle)
    os.close(handle)
    os.replace(path.with_suffix(".unfinished"), path)
    sync_folder(path)


def as_given(rank, world_size, steps_here):
    latest = torch.tensor(max(steps_here))
    dist.all_reduce(latest, dist.ReduceOp.MIN)
    return latest.item()


def its_own_latest(rank, world_size, steps_here):
    return max(steps_here)


def latest_of_rank_0(rank, world_size, steps_here):
    choice = [max(steps_here, default=None)]
    dist.broadcast_object_list(choice)
    return choice[0]


def with_one_neighbour(rank, world_size, steps_here):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, steps_here)
    return max({*everyone[0]} & {*everyone[1]}, default=None)


def the_earliest(rank, world_size, steps_here):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, steps_here)
    return min(set.intersection(*map(set, everyone)), default=None)


def skips_empty_lists(rank, world_size, steps_here):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, steps_here)
    common = set(everyone[0])
    for steps in everyone[1:]:
        common &= set(steps) or common
    return max(common, default=None)


def only_rank_0_knows(rank, world_size, steps_here):
    step = common_step(rank, world_size, steps_here)
    return step if rank == 0 else None


def zero_for_none(rank, world_size, steps_here):
    return common_step(rank, world_size, steps_here) or 0


def by_counting(rank, world_size, steps_here):
    """Count on how many ranks each step is found: one all-reduce of a long tensor."""
    have = torch.zeros(100_000, dtype=torch.uint8)
    have[steps_here] = 1
    dist.all_reduce(have)
    everywhere = (have == world_size).nonzero().flatten().tolist()
    return max(everywhere, default=None)


RIGHT = {
    "write_safely": [with_a_name_of_chance, syncs_the_file_itself],
    "common_step": [by_counting],
}
WRONG = {
    "write_safely": {
        "directly": (directly, "it leaves 0 bytes of a file"),
        "removes first": (removes_first, "neither the old file nor the new"),
        "removes first, on one line": (
            removes_first_on_one_line,
            "neither the old file nor the new",
        ),
        "needs an older file": (needs_an_older_file, "FileNotFoundError"),
        "without a buffer": (without_a_buffer, "a disk that is full after 1 bytes went unnoticed"),
        "without fsync": (without_fsync, "call os.fsync"),
        "fsync first": (fsync_first, "does not hold all the data yet"),
        "without flush": (without_flush, "does not hold all the data yet"),
        "fsync of the folder only": (fsync_of_the_folder_only, "call os.fsync before"),
        "fsync of the file only": (fsync_of_the_file_only, "the new name may not be on the disk"),
        "folder too early": (folder_too_early, "the new name may not be on the disk"),
        "takes another's name": (takes_another_s_name, "was another program's"),
        "copies": (copies, "use os.replace"),
        "keeps the other": (keeps_the_other, "leaves another file"),
        "writes it again": (writes_it_again, "it opens the file of that name for writing"),
        "stopped by an old one": (stopped_by_an_old_one, "unfinished file of a killed run stops"),
        "swallows the error": (swallows_the_error, "let the OSError through"),
        "leaves the folder open": (leaves_the_folder_open, "leaves a descriptor open"),
        "writes nothing": (writes_nothing, "does not hold the new data"),
        "without truncating": (without_truncating, "a short one ends with a part of the long one"),
    },
    "common_step": {
        "as given": (as_given, "go on from [5, 5]"),
        "its own latest": (its_own_latest, "go on from [6, 5]"),
        "latest of rank 0": (latest_of_rank_0, "go on from [6, 6]"),
        "with one neighbour": (with_one_neighbour, "go on from [4, 4, 4]"),
        "the earliest": (the_earliest, "go on from [9, 9]"),
        "skips empty lists": (skips_empty_lists, "the steps [[1], []], and go on from [1, 1]"),
        "only rank 0 knows": (only_rank_0_knows, "go on from [4, None]"),
        "zero for none": (zero_for_none, "go on from [0, 0]"),
    },
    "seconds_between_saves": {
        "one machine": (14_400, "for one machine"),
        "without the two": (1018, "between two failures of the job"),
        "between two failures": (43_200, "between two failures of the job"),
    },
}

# The ranks write in folders of their own: one is enough to see that an attempt is wrong.
ON_ONE_RANK = partial(check_write_safely, nproc=1)
for title, attempt in WRONG["write_safely"].items():
    WRONG["write_safely"][title] = (*attempt, ON_ONE_RANK)
