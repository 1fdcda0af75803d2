"""Wrong answers to the task of lesson 06, each with what the check must say about it."""

import os
import shutil

from solutions.lesson_06 import solution


def directly(data, path):
    path.write_bytes(data)


def removes_first(data, path):
    unfinished = path.with_name("new")
    with open(unfinished, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    path.unlink()
    os.rename(unfinished, path)


def without_fsync(data, path):
    path.with_name("new").write_bytes(data)
    os.replace(path.with_name("new"), path)


def copies(data, path):
    path.with_name("new").write_bytes(data)
    shutil.copy(path.with_name("new"), path)
    path.with_name("new").unlink()


def keeps_the_other(data, path):
    solution(data, path)
    path.with_name("backup").write_bytes(data)


def writes_nothing(data, path):
    pass


WRONG = {
    "write_safely": {
        "directly": (directly, "it leaves 0 bytes of a file"),
        "removes first": (removes_first, "neither the old file nor the new"),
        "without fsync": (without_fsync, "call os.fsync"),
        "copies": (copies, "use os.replace"),
        "keeps the other": (keeps_the_other, "leaves another file"),
        "writes nothing": (writes_nothing, "does not hold the new data"),
    }
}
