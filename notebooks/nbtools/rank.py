"""What a process that nbtools.run has started does: it is one rank."""

import contextlib
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

from nbtools import where
from nbtools.failure import describe, pickle, unpickle


def rank_main(rank, world_size, payload, folder, deadline, group, sender, writers):
    """Be one rank: join the group, call the function, send back its value or its error."""
    os.setpgid(0, group)  # which ends with the notebook's kernel, and with it our children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook to handle
    where.listen(Path(folder, f"stacks_{rank}"))
    for number, name, writer in ((1, "stdout", writers[0]), (2, "stderr", writers[1])):
        os.dup2(writer.fileno(), number)  # so it gets also what C++ code writes
        writer.close()
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))
    store = None
    try:
        fn, args, store = _begin(rank, world_size, payload, folder, deadline)
        answer = _leave(fn(rank, world_size, *args))
    except BaseException as error:
        answer = describe(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    sender.send(answer)
    del store  # not before: it writes to its file, which fails where a file may not grow


def _begin(rank, world_size, payload, folder, deadline):
    """Join the process group; return the function, its arguments and the store."""
    import torch
    import torch.distributed as dist

    fn, args, environment = unpickle(payload, "the function or one of its arguments")
    os.environ.update(environment)  # the forkserver may be older than the notebook's changes
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    torch.seed()  # forks of one process would all draw the same "random" numbers
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
    if loopback:  # all ranks are here: do not depend on the host's name or network
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(Path(folder, "rendezvous")), world_size)
    limit = timedelta(seconds=deadline)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()  # a rank that left before all have met would break the meeting
    return fn, args, store


def _leave(value):
    """Leave the process group; return the value in pickled form."""
    import torch.distributed as dist

    answer = pickle(value, "the value that it returned")
    if dist.is_initialized():
        dist.destroy_process_group()
    return answer
