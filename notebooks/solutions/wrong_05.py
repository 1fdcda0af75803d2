"""Wrong attempts at the tasks of lesson 05, and words that their verdict must contain."""

import functools

import lesson_05_rank_zero_output as lesson
import torch
import torch.distributed as dist
from solutions.lesson_05 import check_train_until
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

# --- Task 2 ---


def reduced(*numbers, dtype=torch.float64):
    numbers = torch.tensor(numbers, dtype=dtype)
    dist.all_reduce(numbers)
    return numbers.tolist()


def no_reduction(loss, rows):
    return loss


def sum_only(loss, rows):
    return reduced(loss)[0]


def mean_of_means(loss, rows):
    return reduced(loss)[0] / dist.get_world_size()


def average(loss, rows):
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss


def mean_of_means_without_empty_ranks(loss, rows):
    total, ranks = reduced(loss if rows else 0.0, rows > 0)
    return total / ranks


def in_bfloat16(loss, rows):
    total, count = reduced(loss * rows if rows else 0.0, rows, dtype=torch.bfloat16)
    return total / count


def in_float32(loss, rows):
    total, count = reduced(loss * rows if rows else 0.0, rows, dtype=torch.float32)
    return total / count


def counted_in_float32(loss, rows):
    total, count = reduced(loss * rows if rows else 0.0, torch.tensor(rows).float())
    return total / count


def summed_in_bfloat16(loss, rows):
    total, count = reduced(loss.bfloat16() * rows if rows else 0.0, rows)
    return total / count


def nan_spreads(loss, rows):
    total, count = reduced(loss * rows, rows)
    return total / count


def nan_hidden(loss, rows):
    total, count = reduced(torch.nan_to_num(loss, posinf=torch.inf) * rows, rows)
    return total / count


def nan_hidden_on_rank_0(loss, rows):
    hidden = dist.get_rank() == 0 or not rows
    total, count = reduced(torch.nan_to_num(loss) * rows if hidden else loss * rows, rows)
    return total / count


def inf_is_0(loss, rows):
    total, count = reduced(0.0 if not rows or loss.isinf() else loss * rows, rows)
    return total / count


def only_on_rank_0(loss, rows):
    total, count = reduced(loss * rows if rows else 0.0, rows)
    return total / count if dist.get_rank() == 0 else None


def sends_everything(loss, rows):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (loss.item() * rows if rows else 0.0, rows))
    total, count = map(sum, zip(*everyone, strict=True))
    return total / count


# --- Task 4 ---


def trained(decide, all_rows=False, update_first=True):
    """Return an attempt that stops when decide(loss, limit, rank) says so."""

    def attempt(rank, world_size, model, rows, targets, limit):
        mine = slice(None) if all_rows else slice(rank, None, world_size)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 51):
            loss = mse_loss(replica(rows[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            if update_first:
                optimizer.step()
            if decide(loss.detach(), limit, rank):
                return step
            if not update_first:
                optimizer.step()
        return 50

    return attempt


def as_rank_0_says(loss, limit, rank):
    decision = (loss < limit).double()
    dist.broadcast(decision, 0)
    return decision.item()


def as_soon_as_one_says(loss, limit, rank):
    dist.all_reduce(loss, op=dist.ReduceOp.MIN)
    return loss < limit


def when_all_say(loss, limit, rank):
    dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    return loss < limit


def by_the_sum(loss, limit, rank):
    dist.all_reduce(loss)
    return loss < limit


def only_rank_0_asks(loss, limit, rank):
    return rank == 0 and lesson.mean_over_rows(loss, 1) < limit


def with_all_losses_as_objects(loss, limit, rank):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, loss)
    return sum(everyone) / len(everyone) < limit


def with_sums_in_bfloat16(loss, limit, rank):
    numbers = torch.stack((loss, torch.ones_like(loss))).bfloat16()
    dist.all_reduce(numbers)
    return numbers[0] / numbers[1] < limit


def with_all_rows_beside(rank, world_size, model, rows, targets, limit):
    def decide(loss, limit, rank):
        decision = whole[-1] < limit
        whole.append(mse_loss(model(rows), targets).detach())
        return decision

    whole = [mse_loss(model(rows), targets).detach()]
    return trained(decide)(rank, world_size, model, rows, targets, limit)


impatient = functools.partial(check_train_until, deadline=4)  # this one hangs

WRONG = {
    "factor_of_the_last_rank": {
        "its weight": (7 / 31, "DDP also divides"),
        "none": (1, "which weight must the last"),
        "its share of a full one": (7 / 8, "which weight must the last"),
    },
    "mean_loss": {
        "no reduction": (no_reduction, "nothing was reduced"),
        "sum only": (sum_only, "all_reduce adds up by default"),
        "mean of means": (mean_of_means, "a rank with more rows must count more"),
        "AVG": (average, "a rank with more rows must count more"),
        "mean of the means": (
            mean_of_means_without_empty_ranks,
            "a rank with more rows must count more",
        ),
        "bfloat16": (in_bfloat16, "which type of number is the sum"),
        "float32": (in_float32, "which type of number is the sum"),
        "counted in float32": (counted_in_float32, "which type of number is the sum"),
        "summed in bfloat16": (summed_in_bfloat16, "which type of number is the sum"),
        "nan spreads": (nan_spreads, "0 times nan is nan"),
        "nan hidden": (nan_hidden, "their nan must not be hidden"),
        "nan hidden on rank 0": (nan_hidden_on_rank_0, "their nan must not be hidden"),
        "inf is 0": (inf_is_0, "their inf must not be hidden"),
        "only on rank 0": (only_on_rank_0, "NoneType, not a number"),
        "sends everything": (sends_everything, "and 16 are enough"),
    },
    "event_files": {
        "one": (1, "whose remainder is 0"),
        "one a machine": (3, "whose remainder is 0"),
        "all": (12, "whose remainder is 0"),
    },
    "train_until": {
        "as given": (trained(lambda loss, limit, rank: loss < limit), "they do not end together"),
        "as rank 0 says": (trained(as_rank_0_says), "the loss of all rows, after"),
        "as soon as one says": (trained(as_soon_as_one_says), "the loss of all rows, after"),
        "when all say": (trained(when_all_say), "the loss of all rows, after"),
        "by the sum": (trained(by_the_sum), "the loss of all rows, after"),
        "only rank 0 asks": (trained(only_rank_0_asks), "they do not end together", impatient),
        "objects": (trained(with_all_losses_as_objects), "more than 16 bytes in a step"),
        "bfloat16": (trained(with_sums_in_bfloat16), "is a number rounded"),
        "all rows beside": (with_all_rows_beside, "more rows in a step than its share"),
        "all rows": (
            trained(lambda loss, limit, rank: loss < limit, all_rows=True),
            "more rows in a step than its share",
        ),
        "decides before its update": (
            trained(
                lambda loss, limit, rank: lesson.mean_over_rows(loss, 1) < limit,
                update_first=False,
            ),
            "the last step has its update, too",
        ),
        "never": (trained(lambda loss, limit, rank: False), "the loss of all rows, after"),
    },
}
