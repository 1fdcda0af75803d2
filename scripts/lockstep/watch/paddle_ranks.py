"""Ranks of Paddle that a proof starts: what each has returned, who has failed, what is sent."""

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import paddle

from lockstep import ending, imports


def call(function, *args):
    """Return function(*args)."""
    return function(*args)


@contextlib.contextmanager
def answers(watch=call):
    """Let paddle.distributed.spawn wait in our way; yield what its ranks have returned, by rank.

    A rank calls watch(function, *args), and ends with this process. One that fails is named by a
    SystemExit.
    """
    found, start = [], paddle.distributed.spawn
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PADDLE_", "MASTER_"))}
    kept["LOCKSTEP_PARENT"] = str(os.getpid())

    def spawn(function, args=(), nprocs=-1, **options):
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, kept, clear=True):
            # Beside variables of another job, Paddle starts nothing: we would be a part of that.
            given = watch, (function, *args), folder
            wait_for(start(be_a_rank, given, nprocs, join=False, daemon=True, **options))
            places = [Path(folder, str(rank)) for rank in range(nprocs)]
            found[:] = [pickle.loads(place.read_bytes()) for place in places]

    logging.disable(logging.INFO)  # the ports that spawn has found
    with patch.object(paddle.distributed, "spawn", spawn):
        yield found


def be_a_rank(function, args, folder):
    """Be a new process: call function(*args), and leave what it returns in `folder`."""
    ending.end_with_parent(signal.SIGKILL)
    imports.hush()
    try:
        found = pickle.dumps(function(*args))
        Path(folder, os.environ["PADDLE_TRAINER_ID"]).write_bytes(found)
    except Exception:
        time.sleep(1)  # the others wait for this rank; when it leaves, they fail as well
        raise


def wait_for(job):
    """Return when all ranks have ended well. SystemExit names the rank that failed."""
    try:
        while not any(codes := [p.exitcode for p in job.processes]) and None in codes:
            time.sleep(0.02)
        if any(codes):  # a rank that loses a neighbour aborts (-6), maybe before that one is gone
            end = time.monotonic() + 10
            while None in codes and set(codes) <= {None, 0, -6} and time.monotonic() < end:
                time.sleep(0.02)
                codes = [process.exitcode for process in job.processes]
            rank = min(range(len(codes)), key=lambda r: (codes[r] in (None, 0), codes[r] == -6))
            told = job.error_queues[rank]
            why = f"exit code {codes[rank]}" if told.empty() else told.get().strip()
            sys.exit(f"rank {rank} failed: {why.splitlines()[-1]}")
    finally:
        for process in job.processes:
            process.kill()


@contextlib.contextmanager
def handed_over():
    """Yield a list that gets the bytes of a ProcessGroup's collectives, if Python calls them.

    So DataParallel's broadcasts are in it, but not its all-reduces, which C++ calls in backward().
    """
    sent, kind = [], paddle.base.core.ProcessGroup

    def watched(method):
        def call(*given):
            tensors = filter(paddle.is_tensor, paddle.utils.flatten(given))
            sent.extend(tensor.size * tensor.element_size() for tensor in tensors)
            return method(*given)

        return call

    methods = {name: watched(getattr(kind, name)) for name in dir(kind) if name[0] != "_"}
    with patch.multiple(kind, **methods):
        yield sent
