"""Facts: what one process of a watched script writes down, a line of JSON each, at once.

A fact is there even if the process is killed in the next moment, and a fork gets a file of its own.
A run of days does not fill the disk: of what comes again and again, there is ROOM for so much.
"""

import functools
import json
import os
import re
import sys
import time
import zlib

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Files of Python, of installed packages and of this one, wherever a job has run.
LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/|/(site|dist)-packages/|/scripts/lockstep/|^<")
LARGE, MOST = 2**24, 2**22  # of a model with so many numbers, so many are looked at
MOST_ROWS = 4096  # of one batch
RUN, BLOCK, WORDS = 16, 2**16, 2**12  # numbers side by side in a sample, or in a block
# updates: numbers that are written of them; rows: of one loader, and of one line that calls a model
ROOM = {"updates": 2**16, "rows": 2**16, "forwards": 2**12, "calls": 2**14}

_file = {"process": None, "descriptor": None}
_used = {}  # (a word of ROOM, of what): how much of the room, or None when it is used up
process = {"rank": None, "most": None}  # "most": numbers of a tensor that are looked at, or all
settings = {"folder": "", "home": "", "updates": 0, "values": 0, "sigterm": 0, "storages": False}
settings["times"] = False


def environment(folder, script, updates=0, values=0, storages=False, times=False):
    """Return what a process finds in its environment that is to be watched.

    `folder` is where facts go. After so many `updates` a rank leaves; 0: never. At every so many
    updates (`values`) it writes down all gradients and parameters; 0: never. With `storages` it
    looks at all memory of tensors, with `times` it sleeps while the script's clock runs.
    """
    inject = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
    path = os.pathsep.join(filter(None, [inject, os.environ.get("PYTHONPATH")]))
    found = {"PYTHONPATH": path, "LOCKSTEP_WATCH": str(folder)}
    found["LOCKSTEP_WATCH_STORAGES"] = str(int(storages))
    found["LOCKSTEP_WATCH_TIMES"] = str(int(times))
    found["LOCKSTEP_WATCH_HOME"] = os.path.dirname(os.path.abspath(script))
    return found | {"LOCKSTEP_WATCH_UPDATES": str(updates), "LOCKSTEP_WATCH_VALUES": str(values)}


def begin():
    """Read from the environment where facts go, and where the script is."""
    settings["folder"] = os.environ["LOCKSTEP_WATCH"]
    settings["home"] = os.environ["LOCKSTEP_WATCH_HOME"]
    settings["updates"] = int(os.environ["LOCKSTEP_WATCH_UPDATES"])
    settings["values"] = int(os.environ["LOCKSTEP_WATCH_VALUES"])
    settings["sigterm"] = int(os.environ.get("LOCKSTEP_WATCH_SIGTERM", 0))  # see updates.terminate
    settings["storages"] = os.environ.get("LOCKSTEP_WATCH_STORAGES") == "1"
    settings["times"] = os.environ.get("LOCKSTEP_WATCH_TIMES") == "1"


def note(what, **facts):
    """Write down one fact, with the moment (seconds since 1970)."""
    if _file["process"] != os.getpid():
        _file["process"] = os.getpid()
        path = os.path.join(settings["folder"], f"{os.getpid()}.jsonl")
        _file["descriptor"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        parent = process["rank"]
        if parent is None:  # it may be a process that was not forked, but started anew
            parent = json.loads(os.environ.get("LOCKSTEP_WATCH_PARENT", "null"))
        note("start", RANK=os.environ.get("RANK"), child_of=parent)
    line = json.dumps({"what": what, "at": time.time(), **facts}) + "\n"
    os.write(_file["descriptor"], line.encode())


def keep(values, name):
    """Keep {name: vector of numpy} in a file of their own; return its name, for a fact."""
    import numpy as np

    file = f"{os.getpid()}_{name}.npz"
    np.savez(os.path.join(settings["folder"], file), **values)
    return file


def room(kind, of=None, count=1):
    """Return whether there is room for so much more; say once if there is not.

    It depends on what a rank does, not on bytes or time, so that all ranks stop at one place.
    """
    if settings["values"]:
        return True  # a proof needs all of them
    used = _used.get((kind, of), 0)
    if used is None:
        return False
    if used + count > ROOM[kind]:
        _used[kind, of] = None
        note("left_out", kind=kind)
        return False
    _used[kind, of] = used + count
    return True


# --- Lines of the reader's own files ---


@functools.cache
def is_own(filename):
    """Return whether a file is the reader's: no library, and not this package."""
    path = os.path.abspath(filename)
    return not LIBRARY.search(filename) and not path.startswith(OURS + os.sep)


def shown(filename):
    """Return a path as it is shown: relative to the script's folder, if it is below it."""
    path = os.path.abspath(filename)
    home = settings["home"]
    return os.path.relpath(path, home) if path.startswith(home + os.sep) else path


def way():
    """Yield the lines of the reader's own on the stack, as "train.py:41", the innermost first."""
    frame = sys._getframe(1)
    while frame:
        if is_own(frame.f_code.co_filename):
            yield f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back


def where():
    """Return the innermost line of the reader's own on the stack, or None."""
    return next(way(), None)


# --- Numbers that stand for tensors ---


def flat(tensor):
    """Return the part of a tensor that this rank holds, as a vector that numpy can read.

    Of a large model it is a sample: short runs of numbers, at distances that are odd, because
    even ones would meet the same columns of a matrix again and again.
    """
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
    if settings["storages"]:  # the script may free memory, but not what numpy has seen
        import torch

        there = tensor.untyped_storage().nbytes()
        tensor = tensor.clone() if there else torch.empty(0, dtype=tensor.dtype)
    vector = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
    if process["most"] and len(vector) > process["most"]:
        vector = vector.unfold(0, RUN, RUN * len(vector) // process["most"] | 1).reshape(-1)
    half = vector.dtype.itemsize == 2 and vector.is_floating_point()
    return (vector.float() if half else vector).cpu().contiguous()


@functools.cache
def _factors():
    import numpy

    return numpy.random.default_rng(7).integers(0, 2**63, WORDS, dtype=numpy.uint64) * 2 + 1


def checksum(tensor):
    """Return a number that differs, but for one case in 2**32, if any bit does; None for None.

    Blocks of words are first multiplied by odd factors and added up, modulo 2**64: that is several
    times as fast as a CRC, and a word that differs makes a sum that differs.
    """
    import numpy

    if tensor is None:
        return None
    memory = flat(tensor).numpy().reshape(-1).view(numpy.uint8)
    whole = len(memory) // (8 * WORDS) * 8 * WORDS
    sums = memory[:whole].view(numpy.uint64).reshape(-1, WORDS) @ _factors()
    return zlib.crc32(memory[whole:].data, zlib.crc32(sums.data))


@functools.cache
def _direction(dtype):
    import torch

    generator = torch.Generator().manual_seed(7)
    return torch.randn(BLOCK, generator=generator, dtype=torch.float64).to(dtype)


def projection(tensor):
    """Return a number that is linear in the tensor: of a mean, it is the mean of the parts'.

    So it shows whether a gradient is the mean of the ranks' own, and nobody keeps a gradient.
    """
    vector = flat(tensor)
    direction = _direction(vector.dtype)
    blocks = len(vector) // BLOCK
    rest = vector[blocks * BLOCK :]
    parts = vector[: blocks * BLOCK].view(blocks, BLOCK).mv(direction)
    whole = parts.double().dot(direction[:blocks].double())
    return (whole + rest.dot(direction[: len(rest)]).double()).item()


def norm(tensor):
    """Return the length of the tensor as a vector."""
    import torch

    return torch.linalg.vector_norm(flat(tensor)).item()


def row_checksums(tensor, most=MOST_ROWS):
    """Return a checksum for each row, of at most 1,024 of its numbers; for at most `most` rows."""
    rows = tensor.detach()[:most].cpu()
    rows = rows.reshape(len(rows), -1) if len(rows) else rows.reshape(0, 1)
    rows = rows[:, :: max(1, rows.shape[1] // 1024)]
    rows = (rows.float() if rows.dtype.itemsize == 2 else rows).contiguous().numpy()
    return [zlib.crc32(row.data) for row in rows]
