"""Ranks that are threads of one process, and send over gloo: a class of ours beside the real DDP.

A script's `dist` is replaced by one in which each thread has a group of its own. Its sums are late,
so that who does not wait is found out at once.
"""

import gc
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

here = threading.local()  # of the rank that a thread plays: its `group`, `events`, and `over`


def late(all_reduce, note):
    """Return an all-reduce whose sum arrives when somebody waits for it; nan is there before.

    note() is called with ("all_reduce", bytes) when it begins, and ("wait", bytes) at each wait.
    """

    def begin(tensor, *args, async_op=False, **options):
        note(("all_reduce", tensor.nbytes))
        total = tensor.clone()
        work = all_reduce(total, *args, async_op=True, **options)
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

        def wait(timeout=None):
            note(("wait", tensor.nbytes))
            work.wait()
            tensor.copy_(total)
            return True

        return SimpleNamespace(wait=wait) if async_op else wait()

    return begin


def note(event):
    """Write down what happens to the rank that this thread plays."""
    if here.over.is_set():
        raise RuntimeError("the play is over")
    here.events.append(event)


def taken():
    """Return the events of this thread's rank since it was last asked."""
    found, here.events = here.events, []
    return found


def is_call(event):
    """Return whether an event is a call, (name, bytes), and nothing that somebody else noted."""
    return isinstance(event, tuple)


def sent(events):
    """Return the bytes of each all-reduce among events."""
    return [size for name, size in filter(is_call, events) if name == "all_reduce"]


def waits_early(events):
    """Return whether somebody waits for an all-reduce before the last one has begun."""
    names = [name for name, _ in filter(is_call, events) if name != "broadcast"]
    return "wait" in names[: names.count("all_reduce")]


def broadcast(tensor, src=0):
    """Overwrite a tensor with that of rank `src`."""
    note(("broadcast", tensor.nbytes))
    here.group.broadcast(tensor, src).wait()


def all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True):
    """Begin to reduce, and return what can be waited for."""
    return here.group.allreduce(tensor, op)


PLAYED = SimpleNamespace(
    ReduceOp=dist.ReduceOp,
    all_reduce=late(all_reduce, note),
    broadcast=broadcast,
    get_rank=lambda: here.group.rank(),
    get_world_size=lambda: here.group.size(),
)


def group_of(store, rank, world_size):
    """Return a group over gloo, which DDP takes as `process_group`; it listens on 127.0.0.1."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timedelta(minutes=1), 1
    gloo, kind = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), gloo, kind(store, rank, world_size, options))
    group._set_default_backend(gloo)
    return group


def play(script, world_size, act):
    """Let so many threads call act(rank), with a script's `dist` of their own; return a list.

    A thread computes alone, as a rank does that torchrun starts. Raises what the first one raises;
    then, and when we are interrupted, nobody goes on.
    """
    store, before, over = dist.HashStore(), torch.get_num_threads(), threading.Event()
    failed = []

    def be(rank):
        here.group, here.events, here.over = group_of(store, rank, world_size), [], over
        here.group.allreduce(torch.zeros(1)).wait()  # all have met
        try:
            return act(rank)
        except BaseException as error:
            failed.append(error)
            here.group.abort()
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            gc.collect()  # a DDP object must not be the last that holds a group: CONTRIBUTING.md
            here.group = None  # who waits for this rank fails now

    torch.set_num_threads(1)
    gc.freeze()  # what was there before need not be looked through, which takes 0.3 s
    with patch.object(script, "dist", PLAYED), ThreadPoolExecutor(world_size) as threads:
        try:
            return list(threads.map(be, range(world_size)))
        except BaseException as error:
            over.set()
            raise (failed or [error])[0] from None
        finally:
            gc.unfreeze()
            torch.set_num_threads(before)
