"""Wrong answers to the task of lesson 05, each with what the check must say about it."""

import torch
import torch.distributed as dist


def reduced(*numbers):
    numbers = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(numbers)
    return numbers.tolist()


def no_reduction(loss, rows):
    return loss


def sum_only(loss, rows):
    return reduced(loss)[0]


def mean_of_means(loss, rows):
    return reduced(loss)[0] / dist.get_world_size()


def nan_spreads(loss, rows):
    total, count = reduced(loss * rows, rows)
    return total / count


def nan_hidden(loss, rows):
    total, count = reduced(torch.nan_to_num(loss) * rows, rows)
    return total / count


def nan_hidden_on_rank_0(loss, rows):
    hidden = dist.get_rank() == 0 or not rows
    total, count = reduced(torch.nan_to_num(loss) * rows if hidden else loss * rows, rows)
    return total / count


def only_on_rank_0(loss, rows):
    total, count = reduced(loss * rows if rows else 0.0, rows)
    return total / count if dist.get_rank() == 0 else None


WRONG = {
    "mean_loss": {
        "no reduction": (no_reduction, "nothing was reduced"),
        "sum only": (sum_only, "all_reduce adds up by default"),
        "mean of means": (mean_of_means, "a rank with more rows must count more"),
        "nan spreads": (nan_spreads, "0 times nan is nan"),
        "nan hidden": (nan_hidden, "a nan of rows must not be hidden"),
        "nan hidden on rank 0": (nan_hidden_on_rank_0, "a nan of rows must not be hidden"),
        "only on rank 0": (only_on_rank_0, "returned NoneType, not a number"),
    }
}
