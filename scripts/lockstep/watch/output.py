"""What a rank says, saves and writes: its screen, files, checkpoints' names, TensorBoard."""

import builtins
import functools
import os
import sys

import wrapt

from lockstep.watch import facts
from lockstep.watch.hooks import around

_printed, _written = set(), set()


def watch():
    """Put the hooks in place."""
    import torch

    around(builtins, "print", say)
    around(torch, "save", save)
    wrapt.register_post_import_hook(watch_boards, "torch.utils.tensorboard.writer")
    sys.addaudithook(heard)
    if facts.settings["values"]:
        around(os, "fsync", sync)
        around(os, "replace", rename)
    listen()


def listen():
    """For a proof: hear all that is written to the screen, by whomever, but for what C++ writes."""
    if facts.settings["values"]:
        for name in ("stdout", "stderr"):
            around(getattr(sys, name), "write", functools.partial(write_to, name))


def write_to(stream, write, instance, args, kwargs):
    """Something is written to sys.stdout or sys.stderr: a part of a line, or several."""
    facts.note("voice", stream=stream, text=args[0])
    return write(*args, **kwargs)


def say(function, instance, args, kwargs):
    """A line is printed."""
    place = facts.where()
    if facts.settings["values"] and place:
        facts.note("said", text=" ".join(map(str, args)))
    if place and place not in _printed and kwargs.get("file") in (None, sys.stdout):
        _printed.add(place)
        facts.note("print", where=place)
    return function(*args, **kwargs)


def save(function, instance, args, kwargs):
    """Something is saved: where to, and do its names begin with "module."?"""
    given = dict(zip(("obj", "f"), args, strict=False)) | kwargs
    thing, file = given["obj"], given["f"]
    path = os.path.abspath(file) if isinstance(file, str | os.PathLike) else None
    inside = [thing, *thing.values()] if isinstance(thing, dict) else []
    keys = [key for one in inside if isinstance(one, dict) for key in one]
    prefix = any(isinstance(key, str) and key.startswith("module.") for key in keys)
    facts.note("save", path=path, prefix=prefix, where=facts.where())
    return function(*args, **kwargs)


def sync(function, instance, args, kwargs):
    """For a proof: the script sends a file, or a folder, to the disk."""
    if facts.is_own(sys._getframe(1).f_code.co_filename):
        about = os.fstat(args[0])
        facts.note("sync", file=about.st_ino, bytes=about.st_size)
    return function(*args, **kwargs)


def rename(function, instance, args, kwargs):
    """For a proof: the script gives a file another name; what is there of that kind already?"""
    if facts.is_own(sys._getframe(1).f_code.co_filename):
        about, folder = os.stat(args[0]), os.path.dirname(os.path.abspath(args[1]))
        stray = os.path.dirname(os.path.abspath(args[0])) != folder
        place = {"new": os.path.abspath(args[1]), "home": os.stat(folder).st_ino, "stray": stray}
        kind = os.path.splitext(args[1])[1]
        beside = sorted(name for name in os.listdir(folder) if name.endswith(kind))
        facts.note("rename", file=about.st_ino, bytes=about.st_size, beside=beside, **place)
    return function(*args, **kwargs)


def watch_boards(module):
    """TensorBoard is imported: torch does that only when it is asked to."""
    around(module.SummaryWriter, "__init__", board)
    if facts.settings["values"]:
        around(module.SummaryWriter, "add_scalar", scalar)


def board(init, writer, args, kwargs):
    """A writer for TensorBoard is opened. Its own folder is one of runs/, named by the second."""
    folder = args[0] if args else kwargs.get("log_dir")
    facts.note("board", folder=os.path.abspath(folder or "runs"), where=facts.where())
    return init(*args, **kwargs)


def scalar(add, writer, args, kwargs):
    """For a proof: a number is written for TensorBoard."""
    given = dict(zip(("tag", "scalar_value", "global_step"), args, strict=False)) | kwargs
    value = given["scalar_value"]
    value = value.item() if hasattr(value, "item") else value
    facts.note("scalar", tag=given["tag"], value=value, step=given.get("global_step"))
    return add(*args, **kwargs)


def heard(event, args):
    """Python tells that something happens: here, that a file is opened."""
    if event != "open" or not isinstance(args[0], str) or facts.process["rank"] is None:
        return
    path, _, flags = args
    writes = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else 0
    path = os.path.abspath(path)
    if (
        not writes
        or path in _written
        or path.startswith((facts.settings["folder"], "/dev", "/proc"))
    ):
        return
    _written.add(path)
    place = facts.where()
    if place:
        facts.note("write", path=path, where=place)
