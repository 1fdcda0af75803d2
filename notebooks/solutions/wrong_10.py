"""Wrong answers to the task of lesson 10, each with what the check must say about it."""

import torch
import torch.distributed as dist


def plain_mean(losses):
    return losses.mean()


def plain_sum(losses):
    return losses.sum()


def forgets_the_ranks(losses):
    rows = torch.tensor(float(len(losses)))
    dist.all_reduce(rows)
    return losses.sum() / rows


def always_2_ranks(losses):
    return forgets_the_ranks(losses) * 2


def no_tensor(losses):
    return losses.mean().item()


def detached(losses):
    return losses.mean().detach()


WRONG = {
    "loss_for_backward": {
        "the mean of its own rows": (plain_mean, "with parts of [1, 4] rows"),
        "the sum of its own rows": (plain_sum, "with parts of [6, 6] rows"),
        "forgets that an average follows": (forgets_the_ranks, "with parts of [6, 6] rows"),
        "2 ranks, always": (always_2_ranks, "with parts of [6, 6, 6] rows"),
        "no tensor": (no_tensor, "what you return must be a tensor"),
        "without its graph": (detached, "what you return must be a tensor"),
    }
}
