"""Wrong attempts at the tasks of lesson 19, and words that their verdict must contain."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from solutions.lesson_19 import mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HANGS = "it does not come to its end"


# --- Task 1 ---


def mean_as_given(rank, world_size, steps, rows):
    loss = torch.randn(rows, 4).square().mean() + rank
    mean = None
    if rank == 0:
        dist.all_reduce(loss)
        mean = (loss / world_size).item()
    dist.barrier()
    return mean


def mean_without_barrier(rank, world_size, steps, rows):
    loss = torch.randn(rows, 4).square().mean() + rank
    if rank == 0:
        dist.all_reduce(loss)
    return (loss / world_size).item()


def mean_with_a_longer_timeout(rank, world_size, steps, rows):
    group = dist.new_group(timeout=timedelta(minutes=30))
    loss = torch.randn(rows, 4).square().mean() + rank
    if rank == 0:
        dist.all_reduce(loss, group=group)
    dist.barrier(group)
    return (loss / world_size).item()


def mean_swallows_the_error(rank, world_size, steps, rows):
    with contextlib.suppress(RuntimeError):
        return mean_as_given(rank, world_size, steps, rows)
    return 0.0


def mean_of_one(rank, world_size, steps, rows):
    return (torch.randn(rows, 4).square().mean() + rank).item()


def sum_of_all(rank, world_size, steps, rows):
    return mean_loss(rank, world_size, steps, rows) * world_size


def mean_by_reduce(rank, world_size, steps, rows):
    """A right attempt: the sum goes to rank 0 only, and all call it."""
    loss = torch.randn(rows, 4).square().mean() + rank
    dist.reduce(loss, 0)
    return (loss / world_size).item() if rank == 0 else None


# --- Task 2 ---


def stop_as_given(rank, world_size, steps, rows, decide=lambda loss: loss):
    for step in range(20):
        loss = decide(torch.tensor(1 / (1 + step * (1 + rank))))
        if loss < 0.1:
            break
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    return step


def never_stop(rank, world_size, steps, rows):
    return stop_as_given(rank, world_size, steps, rows, lambda loss: loss + 1)


def from_rank_zero(loss):
    dist.broadcast(loss, 0)
    return loss


def best_of_all(loss):
    dist.all_reduce(loss, dist.ReduceOp.MIN)
    return loss


def rank_zero_decides(*job):
    return stop_as_given(*job, from_rank_zero)


def first_one_decides(*job):
    return stop_as_given(*job, best_of_all)


def barrier_before(rank, world_size, steps, rows):
    for step in range(20):
        dist.barrier()
        if torch.tensor(1 / (1 + step * (1 + rank))) < 0.1:
            break
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    return step


def with_average(*job):
    """A right attempt: the library divides."""

    def mean(loss):
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss

    return stop_as_given(*job, mean)


# --- Task 3 ---


def train(rank, world_size, steps, rows, batches, around=contextlib.nullcontext):
    torch.manual_seed(0)
    data, seen = torch.randn(world_size * steps * rows + 1, 4), 0
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with around(model) if around is not contextlib.nullcontext else contextlib.nullcontext():
        for batch in batches(data[rank::world_size].split(rows)):
            alone = around is contextlib.nullcontext and len(batch) == 1
            with model.no_sync() if alone else contextlib.nullcontext():
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                seen += len(batch)
    dist.barrier()
    return model.module.weight.tolist(), seen


def train_as_given(rank, world_size, steps, rows):
    torch.manual_seed(0)
    data, seen = torch.randn(world_size * steps * rows + 1, 4), 0
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in data[rank::world_size].split(rows):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seen += len(batch)
    dist.barrier()
    return model.module.weight.tolist(), seen


def without_synchronising(*job):
    return train(*job, lambda batches: batches)


def one_batch_only(*job):
    return train(*job, lambda batches: batches[:1])


def with_join(*job):
    """A right attempt: DDP shadows the calls of those that have no batch any more."""
    return train(*job, lambda batches: batches, around=lambda model: model.join())


def without_the_rest(*job):
    """A right attempt: incomplete batches are left out."""
    return train(*job, lambda batches: [batch for batch in batches if len(batch) == 8])


# --- Task 4 ---


def both_as_given(rank, world_size, steps, rows, before=lambda: None):
    limit = timedelta(seconds=2)
    dense, sparse = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    work = [(dense, torch.full((rows,), 1.0 + rank)), (sparse, torch.full((rows,), 10.0 + rank))]
    before()
    for group, tensor in reversed(work) if rank == world_size - 1 else work:
        dist.all_reduce(tensor, group=group)
    return [tensor[0].item() for _, tensor in work]


def both_after_a_barrier(*job):
    return both_as_given(*job, dist.barrier)


def both_in_one_group(rank, world_size, steps, rows):
    work = [torch.full((rows,), 1.0 + rank), torch.full((rows,), 10.0 + rank)]
    for tensor in reversed(work) if rank == world_size - 1 else work:
        dist.all_reduce(tensor)
    return [tensor[0].item() for tensor in work]


def both_as_one(rank, world_size, steps, rows):
    """A right attempt: both travel in one call."""
    both = torch.tensor([1.0 + rank, 10.0 + rank])
    dist.all_reduce(both)
    return both.tolist()


RIGHT = {
    "mean_loss": [mean_by_reduce],
    "stop_together": [with_average],
    "train_uneven": [with_join, without_the_rest],
    "add_up_both": [both_as_one],
}

WRONG = {
    "mean_loss": {
        "as given": (mean_as_given, HANGS),
        "no barrier": (mean_without_barrier, "with 2 ranks: "),
        "a longer timeout": (mean_with_a_longer_timeout, HANGS),
        "swallowed": (mean_swallows_the_error, "the ranks do not leave the job together"),
        "its own": (mean_of_one, "its own loss"),
        "the sum": (sum_of_all, "another number"),
    },
    "stop_together": {
        "as given": (stop_as_given, HANGS),
        "never": (never_stop, "it does not stop early any more"),
        "rank 0": (rank_zero_decides, "the mean of all losses is small at another one"),
        "the first": (first_one_decides, "the mean of all losses is small at another one"),
        "a barrier": (barrier_before, HANGS),
    },
    "train_uneven": {
        "as given": (train_as_given, HANGS),
        "not synchronised": (without_synchronising, "the ranks end with different weights"),
        "one batch": (one_batch_only, "only 16 rows are trained on"),
    },
    "add_up_both": {
        "as given": (both_as_given, HANGS),
        "a barrier": (both_after_a_barrier, HANGS),
        "one group": (both_in_one_group, "rank 0 has the sums"),
    },
}
