"""Wrong attempts at the tasks of lesson 12, and words that their verdict must contain."""

import torch
import torch.distributed as dist
from solutions.lesson_12 import clip_gradients, count_positive
from torch.distributed._functional_collectives import all_reduce
from torch.nn.utils import clip_grad_norm_

# --- Task 3 ---


def multiply(stage, factor):
    for parameter in stage.parameters():
        parameter.grad *= factor


def own_norm(stage, limit):
    return clip_grad_norm_(stage.parameters(), limit).item()


def sum_of_norms(stage, limit):
    norm = clip_grad_norm_(stage.parameters(), float("inf"))
    dist.all_reduce(norm)
    multiply(stage, min(1, limit / norm))
    return norm.item()


def largest_norm(stage, limit):
    norm = clip_grad_norm_(stage.parameters(), float("inf"))
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    multiply(stage, min(1, limit / norm))
    return norm.item()


def always_to_the_limit(stage, limit):
    norm = clip_gradients(stage, float("inf"))
    multiply(stage, limit / norm)
    return norm


def clipped_after_the_norm(stage, limit):
    return min(clip_gradients(stage, limit), limit)


def constant(stage, limit):
    norm = 0.317  # what the page printed once
    multiply(stage, min(1, limit / norm))
    return norm


def gathers_everything(stage, limit):
    gathered = [None] * dist.get_world_size()
    own = [parameter.grad for parameter in stage.parameters()]
    dist.all_gather_object(gathered, own)
    norm = torch.cat([grad.flatten() for grads in gathered for grad in grads]).norm().item()
    multiply(stage, min(1, limit / norm))
    return norm


def gathers_by_the_functional_library(stage, limit):
    gathered = torch.cat([parameter.grad.flatten() for parameter in stage.parameters()])
    squares = all_reduce(gathered**2, "sum", dist.group.WORLD).sum()  # stages of equal length only
    norm = squares.sqrt().item()
    multiply(stage, min(1, limit / norm))
    return norm


def returns_nothing(stage, limit):
    clip_gradients(stage, limit)


def right_by_the_library(stage, limit):
    """Not wrong: the library multiplies, once the norm is known."""
    gradients = [parameter.grad for parameter in stage.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm**2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    torch.nn.utils.clip_grads_with_norm_(stage.parameters(), limit, norm)
    return norm


# --- Task 4 ---


def pipeline(rank, world_size, stage, rows, batch_size, receive, count):
    """Do what the task's function does, with this way to receive and to count."""
    positive = 0
    for begin in range(0, len(rows), batch_size):
        inputs = rows[begin : begin + batch_size]
        if rank > 0:
            inputs = receive(inputs)
        outputs = stage(inputs).detach()
        if rank < world_size - 1:
            dist.send(outputs, rank + 1)
        positive += count(outputs[:, 0] > 0)
    return positive if rank == world_size - 1 else None


def as_given(rank, world_size, stage, rows, batch_size):
    buffer = torch.empty(batch_size, rows.shape[1], dtype=rows.dtype)

    def receive(inputs):
        dist.recv(buffer, rank - 1)
        return buffer

    return pipeline(rank, world_size, stage, rows, batch_size, receive, torch.sum)


def filled_with_zeros(rank, world_size, stage, rows, batch_size):
    def receive(inputs):
        buffer = torch.zeros(batch_size, rows.shape[1], dtype=rows.dtype)
        dist.recv(buffer, rank - 1)
        return buffer

    return pipeline(rank, world_size, stage, rows, batch_size, receive, torch.sum)


def filled_with_nan(rank, world_size, stage, rows, batch_size):
    """The rows that are too many are never positive, but they are sent and computed."""

    def receive(inputs):
        buffer = torch.full((batch_size, rows.shape[1]), torch.nan, dtype=rows.dtype)
        dist.recv(buffer, rank - 1)
        return buffer

    return pipeline(rank, world_size, stage, rows, batch_size, receive, torch.sum)


def last_batch_left_out(rank, world_size, stage, rows, batch_size):
    full = len(rows) // batch_size * batch_size
    return count_positive(rank, world_size, stage, rows[:full], batch_size)


def everybody_returns(rank, world_size, stage, rows, batch_size):
    return count_positive(rank, world_size, stage, rows, batch_size) or 0


def always_three_left(rank, world_size, stage, rows, batch_size):
    """Right for 35 rows in batches of 8, where the last batch has 3."""
    buffer = torch.empty(batch_size, rows.shape[1], dtype=rows.dtype)
    begins = iter(range(0, len(rows), batch_size))

    def receive(inputs):
        dist.recv(buffer, rank - 1)
        return buffer[:3] if next(begins) + batch_size > len(rows) else buffer

    return pipeline(rank, world_size, stage, rows, batch_size, receive, torch.sum)


def always_batches_of_eight(rank, world_size, stage, rows, batch_size):
    return count_positive(rank, world_size, stage, rows, 8)


def all_rows_at_once(rank, world_size, stage, rows, batch_size):
    return count_positive(rank, world_size, stage, rows, len(rows))


def without_messages(rank, world_size, stage, rows, batch_size):
    positive = (stage(rows)[:, 0] > 0).sum().item()
    return positive if rank == world_size - 1 else None


def right_by_cutting(rank, world_size, stage, rows, batch_size):
    """Not wrong: a buffer for the largest batch, of which only the new rows are used."""

    def receive(inputs):
        buffer = torch.empty(batch_size, rows.shape[1], dtype=rows.dtype)
        dist.recv(buffer, rank - 1)
        return buffer[: len(inputs)]

    return pipeline(rank, world_size, stage, rows, batch_size, receive, torch.sum)


def right_in_float32(stage, limit):
    """Not wrong: the norms travel as Python numbers, in a tensor of float32."""
    squares = torch.tensor(sum((p.grad**2).sum().item() for p in stage.parameters()))
    dist.all_reduce(squares)
    multiply(stage, min(1, limit / squares.sqrt().item()))
    return squares.sqrt().item()


RIGHT = {
    "clip_gradients": [right_by_the_library, right_in_float32],
    "count_positive": [right_by_cutting],
}

WRONG = {
    "bytes_of_rank_1": {
        "one direction": (10240, "what one of its neighbours gets"),
        "float32": (10240 // 2, "count the numbers of one message"),
        "the batch of the page": (2 * 8192, "count the numbers of one message"),
    },
    "micro_batches_for_10_percent": {
        "one less": (62, "idle more than 10 %"),
        "less than 10 %": (64, "with fewer the ranks idle at most 10 %, too"),
        "as a part of m only": (70, "with fewer"),
    },
    "clip_gradients": {
        "own norm": (own_norm, "of one process: it used the norm of its own stage"),
        "sum of norms": (sum_of_norms, "norms can't be added up"),
        "largest norm": (largest_norm, "does not have the gradients of one process"),
        "always": (always_to_the_limit, "limit 100.0, rank 0 does not have the gradients"),
        "norm after clipping": (clipped_after_the_norm, "not the norm of all gradients"),
        "a constant": (constant, "does not have the gradients"),
        "all gradients to all": (gathers_everything, "bytes, where 100 are more than enough"),
        "all gradients by the functional library": (
            gathers_by_the_functional_library,
            "bytes, where 100 are more than enough",
        ),
        "returns nothing": (returns_nothing, "returned NoneType, not the norm"),
    },
    "count_positive": {
        "as given": (as_given, "with 2 ranks and 35 rows in batches of 8, the last rank returned"),
        "zeros": (
            filled_with_zeros,
            "with 2 ranks and 35 rows in batches of 8, the last rank returned",
        ),
        "nan": (
            filled_with_nan,
            "with 3 ranks and 35 rows in batches of 8, rank 1 sends messages of",
        ),
        "left out": (
            last_batch_left_out,
            "with 2 ranks and 35 rows in batches of 8, the last rank returned",
        ),
        "everybody returns": (everybody_returns, "a rank before the last returned something"),
        "three are left": (always_three_left, "38 rows in batches of 8, the last rank returned"),
        "batches of eight": (always_batches_of_eight, "16 rows in batches of 7, rank 0 sends"),
        "all at once": (all_rows_at_once, "rank 0 sends messages of [10240] bytes"),
        "without messages": (without_messages, "the last rank returned 0"),
    },
}
