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


def rows_of_rank_zero(rank, world_size, steps, rows):
    torch.manual_seed(0)
    data, seen = torch.randn(world_size * steps * rows + 1, 4), 0
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in data[0::world_size].split(rows):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seen += len(batch)
    dist.barrier()
    return model.module.weight.tolist(), seen


def without_ddp(rank, world_size, steps, rows):
    torch.manual_seed(0)
    return nn.Linear(4, 1).weight.tolist(), world_size * steps * rows


def one_step_for_all(rank, world_size, steps, rows):
    return train_in_one(rank, world_size, steps * rows)


def train_in_one(rank, world_size, count):
    torch.manual_seed(0)
    data = torch.randn(world_size * count + 1, 4)[rank * count : (rank + 1) * count]
    model = DistributedDataParallel(nn.Linear(4, 1))
    model(data).square().mean().backward()
    return model.module.weight.tolist(), count


# --- Task 4 ---


def by_the_stacks():
    return 1, "dist.all_reduce(gradient)", "a call too many"


def the_one_that_waits():
    return 0, "dist.barrier()", "a call too few"


def another_line():
    return 1, "dist.barrier()", "a call too many"


def another_class():
    return 1, "dist.all_reduce(largest, dist.ReduceOp.MAX)", "another order"


def only_a_rank():
    return 1


RIGHT = {
    "mean_loss": [mean_by_reduce],
    "stop_together": [with_average],
    "train_uneven": [with_join, without_the_rest],
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
        "one batch": (one_batch_only, "only 16 different rows go through DDP"),
        "one rank's rows": (rows_of_rank_zero, "different rows go through DDP"),
        "no DDP": (without_ddp, "only 0 different rows"),
        "one step": (one_step_for_all, "a rank trains 1 batches"),
    },
    "diagnosis": {
        "stacks": (by_the_stacks, "waits in the end"),
        "a victim": (the_one_that_waits, "another rank has parted"),
        "another line": (another_line, "the line is another one"),
        "another class": (another_class, "the class is another"),
        "a rank alone": (only_a_rank, "three things are wanted"),
    },
}
