"""Solution of the exercise of lesson 02: a wrapper that makes replicas cooperate, as DDP does."""

import lesson_02_launch_ddp as lesson
import torch
import torch.distributed as dist
from nbtools import run
from torch import nn


def solution(model):
    """Return `model`, made to start as rank 0's and to average its gradients in backward()."""

    def average(parameter):  # called in backward(), as soon as this gradient is complete
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
        parameter.register_post_accumulate_grad_hook(average)
    return model


def _flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _measure(rank, world_size, attempt):
    """Train with `attempt` as the wrapper, from other weights on each rank; return what we saw."""
    make_toy, seen = lesson.make_toy, {}

    def other_weights(seed):
        rows, targets, model = make_toy(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += rank
        return rows, targets, model

    def wrap(model):
        wanted = lesson.gather_from_ranks(_flat(model.parameters()))[0]
        replica = attempt(model)
        if not isinstance(replica, nn.Module):
            raise TypeError("the wrapper must return a model")
        seen["start"] = (_flat(model.parameters()) - wanted).abs().max().item()
        return replica

    lesson.make_toy = other_weights  # for the rest of this process, which ends after the run
    trained = lesson.train(rank, world_size, torch.device("cpu"), steps=8, wrap=wrap)
    return seen | trained


def _first_gradient(rank, world_size, attempt):
    """Return how far the gradient is, after one backward(), from the mean of all ranks' own."""
    rows, targets, model = lesson.make_toy(seed=1)
    part, wanted = rows[rank::world_size], targets[rank::world_size]
    alone = torch.autograd.grad(nn.functional.mse_loss(model(part), wanted), [*model.parameters()])
    mean = lesson.gather_from_ranks(_flat(alone)).mean(dim=0)
    replica = attempt(model)  # keep it: a DDP that is thrown away averages nothing
    nn.functional.mse_loss(replica(part), wanted).backward()
    gradient = _flat(parameter.grad for parameter in model.parameters())
    return (gradient - mean).abs().max().item()


def check(attempt, nproc=2):
    """Return None if `attempt` is right on `nproc` ranks, else one sentence about the mistake.

    The attempt wraps the toy in real processes, which start from different weights.
    """
    measured = run(_measure, nproc, attempt, deadline=60)
    for rank, seen in enumerate(measured):
        if seen["start"] != 0.0:
            return f"after the wrapping, rank {rank} does not hold the parameters that rank 0 had"
    for rank, off in enumerate(run(_first_gradient, nproc, attempt, deadline=60)):
        if not off < 1e-12:
            return f"after backward(), rank {rank}'s gradient is {off:.3g} away from the mean"
    seen = measured[0]
    if not seen["max_grad_diff"] < 1e-12:
        return (
            f"over 8 steps, a gradient is {seen['max_grad_diff']:.3g} away from the whole batch's"
        )
    if max(seen["param_spread"]) > 1e-12:
        return f"over 8 steps, the parameters drift apart by {max(seen['param_spread']):.3g}"
    return None
