"""Wrong answers to the task of lesson 06, with what the check must say; and another right one."""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from lesson_06_checkpoint_map_location import UNFINISHED
from solutions.lesson_06 import check, solution


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
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True), os.rename(unfinished, path)
    sync_folder(path)


def needs_an_older_file(data, path):
    path.stat()
    solution(data, path)


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
    with open(path.with_name("new"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_name("new"), path)


def folder_too_early(data, path):
    with open(path.with_name("new"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)
    os.replace(path.with_name("new"), path)


def sync_folder(path):
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def takes_another_s_name(data, path):
    unfinished = path.with_name("unfinished.tmp")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path)


def copies(data, path):
    path.with_name("new").write_bytes(data)
    shutil.copy(path.with_name("new"), path)
    path.with_name("new").unlink()


def keeps_the_other(data, path):
    solution(data, path)
    path.with_name("backup").write_bytes(data)


def writes_it_again(data, path):
    solution(data, path)
    path.write_bytes(data)


def stopped_by_an_old_one(data, path):
    with open(path.with_name(UNFINISHED), "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_name(UNFINISHED), path)
    sync_folder(path)


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


RIGHT = {"write_safely": [with_a_name_of_chance, syncs_the_file_itself]}
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
        "writes nothing": (writes_nothing, "does not hold the new data"),
    }
}

# The ranks do the same, each in a folder of its own: one is enough to see that it is wrong.
ON_ONE_RANK = partial(check, nproc=1)
WRONG = {
    task: {title: (*attempt, ON_ONE_RANK) for title, attempt in attempts.items()}
    for task, attempts in WRONG.items()
}
