"""The exercise of lesson 10: the loss for backward() when the parts of the ranks are uneven."""

import lesson_10_same_as_one_process as lesson
import torch
import torch.distributed as dist
from nbtools import run
from torch.nn.parallel import DistributedDataParallel


def solution(losses):
    """Return the loss of this rank, weighted by its share of all rows (claim A1)."""
    rows = torch.tensor(float(len(losses)), dtype=losses.dtype)
    dist.all_reduce(rows)  # one number from each rank: how many rows there are in all
    return losses.sum() * dist.get_world_size() / rows  # a sum, because the mean of no rows is nan


def examine(rank, world_size, attempt, sizes):
    """Return how far DDP's gradient with the attempt's loss is from the whole batch's."""
    rows, targets, model = lesson.make_toy(seed=3)
    first = sum(sizes[:rank])
    mine, everyone = slice(first, first + sizes[rank]), slice(sum(sizes))
    lesson.mean_loss(model(rows[everyone]), targets[everyone]).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    replica = DistributedDataParallel(model)  # keep it: one that is thrown away averages nothing
    loss = attempt((replica(rows[mine]) - targets[mine]).square().mean(1))
    if not isinstance(loss, torch.Tensor) or loss.shape != () or not loss.requires_grad:
        return "what you return must be a tensor of shape () that depends on losses"
    loss.backward()
    pairs = zip(model.parameters(), wanted, strict=True)
    return max((parameter.grad - right).abs().max().item() for parameter, right in pairs)


def check(attempt, nprocs=(2, 3)):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    problems = (check_ranks(attempt, nproc) for nproc in nprocs)
    return next(filter(None, problems), None)


def check_ranks(attempt, nproc):
    """Return None if the attempt is right on so many ranks, else what is wrong."""
    equal, uneven = [6] * nproc, [1 + 3 * rank for rank in range(nproc)]
    nobody = [4 * rank for rank in range(nproc - 1)] + [5]  # with several ranks, rank 0 has none
    for sizes in (equal, uneven, nobody):
        for off in run(examine, nproc, attempt, sizes, deadline=60):
            if isinstance(off, str):
                return off
            if not off < 1e-12:
                return f"with parts of {sizes} rows the gradient is off by {off:.3g}"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"loss_for_backward": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "loss_for_backward": (
        "Start from the weight that the first section gives to uneven parts, times the mean over "
        "this rank's rows. What cancels, so that a rank without rows makes no trouble, and what "
        "must the ranks tell each other?"
    ),
}
