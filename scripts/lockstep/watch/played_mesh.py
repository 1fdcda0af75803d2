"""Ranks that threads of this process play, with a group of PyTorch's own for its own tests.

So a proof can run what sends by itself, as a DTensor does, without starting a process.
"""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg


def play(world_size, act):
    """Return [act(rank) of each rank]; each finds a group, "threaded", of so many ranks.

    Random numbers are drawn before: all threads have one generator.
    """
    store = dist.HashStore()

    def be_rank(rank):
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        return act(rank)

    _set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        with ThreadPoolExecutor(world_size) as threads:
            return list(threads.map(be_rank, range(world_size)))
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
