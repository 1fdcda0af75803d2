"""Facts: what one process of a watched script writes down, a line of JSON each, at once.

A fact is there even if the process is killed in the next moment, and a fork gets a file of its own.
"""

import functools
import json
import multiprocessing
import os
import re
import sys
import time
import zlib

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/|/(site|dist)-packages/|<")
MOST = 2**18  # numbers of a tensor that are looked at, in a large model

_file = {"process": None, "descriptor": None}
process = {"rank": None, "large": False}  # what is known of this process
settings = {"folder": "", "home": "", "updates": 0}


def begin():
    """Read from the environment where facts go, and where the script is."""
    settings["folder"] = os.environ["LOCKSTEP_WATCH"]
    settings["home"] = os.environ["LOCKSTEP_WATCH_HOME"]
    settings["updates"] = int(os.environ["LOCKSTEP_WATCH_UPDATES"])  # leave after so many; 0: never


def note(what, **facts):
    """Write down one fact, with the moment (seconds since 1970)."""
    if _file["process"] != os.getpid():
        _file["process"] = os.getpid()
        path = os.path.join(settings["folder"], f"{os.getpid()}.jsonl")
        _file["descriptor"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        main = multiprocessing.current_process().name == "MainProcess"
        parent = process["rank"]
        if parent is None:  # it may be a process that was not forked, but started anew
            parent = json.loads(os.environ.get("LOCKSTEP_WATCH_PARENT", "null"))
        note("start", RANK=os.environ.get("RANK"), child_of=parent, main=main)
    line = json.dumps({"what": what, "at": time.time(), **facts}) + "\n"
    os.write(_file["descriptor"], line.encode())


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


def where():
    """Return "train.py:41", the innermost line of the reader's own on the stack, or None."""
    frame = sys._getframe(1)
    while frame:
        if is_own(frame.f_code.co_filename):
            return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# --- Numbers that stand for tensors ---


def flat(tensor):
    """Return the part of a tensor that this rank holds, as a vector that numpy can read."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = tensor.float() if tensor.dtype.itemsize == 2 and tensor.is_floating_point() else tensor
    vector = tensor.cpu().contiguous().reshape(-1)
    if process["large"] and len(vector) > MOST:
        vector = vector[:: len(vector) // MOST].contiguous()
    return vector


def checksum(tensor):
    """Return a number that differs, but for one case in 2**32, if any bit does; None for None."""
    return None if tensor is None else zlib.crc32(flat(tensor).numpy().data)


@functools.cache
def _direction(dtype, length):
    import torch

    generator = torch.Generator().manual_seed(7)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def projection(tensor):
    """Return a number that is linear in the tensor: of a mean, it is the mean of the parts'.

    So it shows whether a gradient is the mean of the ranks' own, and nobody keeps a gradient.
    """
    vector = flat(tensor)
    most = 2 ** (len(vector) - 1).bit_length() if len(vector) else 1
    return vector.dot(_direction(vector.dtype, most)[: len(vector)]).item()


def norm(tensor):
    """Return the length of the tensor as a vector."""
    return flat(tensor).norm().item()


def row_checksums(tensor, most=4096):
    """Return a checksum for each row, of at most 1,024 of its numbers; for at most `most` rows."""
    rows = tensor.detach()[:most].cpu()
    rows = rows.reshape(len(rows), -1) if len(rows) else rows.reshape(0, 1)
    rows = rows[:, :: max(1, rows.shape[1] // 1024)]
    rows = (rows.float() if rows.dtype.itemsize == 2 else rows).contiguous().numpy()
    return [zlib.crc32(row.data) for row in rows]
