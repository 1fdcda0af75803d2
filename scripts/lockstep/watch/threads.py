"""Ranks that are threads of one process: for a proof that tries what its job does not show."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch


class Ranks:
    """So many threads that hand values to each other."""

    def __init__(self, world_size):
        self.barrier, self.here = threading.Barrier(world_size), threading.local()
        self.given = [None] * world_size

    def play(self, act):
        """Return [act(rank) for each rank], a thread. Raises what a rank raises."""
        with ThreadPoolExecutor(len(self.given)) as pool:
            started = [pool.submit(self.be, rank, act) for rank in range(len(self.given))]
        errors = [rank.exception() for rank in started if rank.exception()]
        broken = threading.BrokenBarrierError
        for error in sorted(errors, key=lambda error: isinstance(error, broken)):
            raise error  # who broke the barrier, before those who found it broken
        return [rank.result() for rank in started]

    def be(self, rank, act):
        """Be a rank, in a thread."""
        self.here.rank = rank
        try:
            result = act(rank)
            self.exchange("nothing more", None)
            return result
        except BaseException:
            self.barrier.abort()  # nobody waits for this rank
            raise

    def exchange(self, name, value):
        """Hand in a value; return those of all ranks, which must call the same `name`."""
        self.given[self.here.rank] = name, value
        self.barrier.wait()  # all have come
        everyone = self.given[:]
        self.barrier.wait()  # all have seen it
        names = [name for name, _ in everyone]
        if len(set(names)) > 1:
            raise RuntimeError(f"of the ranks, each calls something else: {', '.join(names)}")
        return [value for _, value in everyone]

    def all_gather(self, tensors, tensor):
        """Fill `tensors` with those of all ranks."""
        for mine, theirs in zip(tensors, self.exchange("all_gather", tensor.detach()), strict=True):
            mine.copy_(theirs)

    def all_gather_object(self, objects, own, group=None):
        """Fill `objects` with those of all ranks."""
        objects[:] = self.exchange("all_gather_object", own)

    def all_reduce(self, tensor, op="SUM", async_op=False):
        """Make `tensor` the sum over all ranks; autograd does not see it, as that of a group.

        It is there at once, but who wants to wait gets something to wait for.
        """
        import torch

        given = self.exchange(f"all_reduce {op}", tensor.detach().clone())
        add = {"MAX": torch.maximum, "MIN": torch.minimum}.get(
            str(op).rpartition(".")[2], torch.add
        )
        tensor.detach().copy_(functools.reduce(add, given))
        return Done([tensor]) if async_op else None


class Done:
    """What is returned of a collective that is over already."""

    def __init__(self, value):
        self.result = value

    def wait(self):
        """Wait for nothing."""

    def get_future(self):
        """Return a future that has its result."""
        import torch

        future = torch.futures.Future()
        future.set_result(self.result)
        return future


def play(dist, world_size, function, *args):
    """Return [function(rank, world_size, *args) for each rank]; a rank is a thread, on the CPU.

    For them `dist`, which is torch.distributed, has all_gather, all_gather_object, and an
    all_reduce that adds up, or finds the largest or smallest. Raises what a rank raises, and
    RuntimeError if they call different collectives.
    """
    ranks = Ranks(world_size)
    ours = {"get_world_size": lambda: world_size, "get_rank": lambda: ranks.here.rank}
    ours |= {"all_gather": ranks.all_gather, "all_reduce": ranks.all_reduce}
    ours |= {"all_gather_object": ranks.all_gather_object}
    with patch.multiple(dist, **ours):
        return ranks.play(lambda rank: function(rank, world_size, *args))
