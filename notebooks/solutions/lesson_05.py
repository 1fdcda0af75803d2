"""The exercise of lesson 05: the loss over the rows of all ranks, whatever each rank has."""

import math

import torch
import torch.distributed as dist
from nbtools import run


def solution(loss_of_my_rows, my_row_count):
    """Return the mean loss over the rows of all ranks, the same number on every rank (claim C4)."""
    # Ask for the number of rows, not whether the loss is nan: a nan of real rows must be seen.
    loss_sum = loss_of_my_rows.item() * my_row_count if my_row_count else 0.0
    numbers = torch.tensor([loss_sum, my_row_count], dtype=torch.float64)
    dist.all_reduce(numbers)  # a sum and a count, 16 bytes from each rank
    return (numbers[0] / numbers[1]).item()


def examine(rank, world_size, attempt, losses):
    """Call the attempt with the mean over this rank's rows, as a loss function computes it."""
    mean = torch.tensor(losses[rank], dtype=torch.float64).mean()  # nan if there are no rows
    answer = attempt(mean, len(losses[rank]))
    return answer.item() if isinstance(answer, torch.Tensor) and answer.numel() == 1 else answer


def make_cases(nproc):
    """Return [(words, losses of the rows by rank)]: equal parts, unequal, no row at all, nan."""
    even = [[rank + 0.5, 3.0 * rank] for rank in range(nproc)]
    uneven = [[1.0 + rank] * (rank + 1) for rank in range(nproc)]
    return [
        ("equally many rows on all ranks", even),
        ("unequal numbers of rows", uneven),
        ("no row on the last rank", [*uneven[:-1], []] if nproc > 1 else uneven),
        ("no row on rank 0", [[], *uneven[1:]] if nproc > 1 else uneven),
        (f"a loss that is nan on rank {nproc - 1}", [*uneven[:-1], [1.0, math.nan]]),
        ("a loss that is nan on rank 0", [[1.0, math.nan], *uneven[1:]]),
    ]


def check(attempt, nprocs=(2, 3)):
    """Return None if the attempt is right on each number of ranks, else one sentence about it."""
    problems = (check_ranks(attempt, nproc) for nproc in nprocs)
    return next((problem for problem in problems if problem), None)


def check_ranks(attempt, nproc):
    """Return None if the attempt is right on `nproc` ranks, else one sentence about the mistake."""
    for words, losses in make_cases(nproc):
        rows = [loss for part in losses for loss in part]
        right = sum(rows) / len(rows)
        means = [sum(part) / len(part) for part in losses if part]
        answers = run(examine, nproc, attempt, losses, deadline=60)
        for rank, answer in enumerate(answers):
            place = f"with {words}, rank {rank}"
            if not isinstance(answer, (int, float)):
                return f"{place} returned {type(answer).__name__}, not a number"
            if abs(answer - right) < 1e-12 or (math.isnan(answer) and math.isnan(right)):
                continue
            hint = "it must be the loss of all rows, on every rank"
            if math.isnan(right):
                hint = "that rank has rows, and a nan of rows must not be hidden"
            elif math.isnan(answer):
                hint = "the mean over no rows is nan, and 0 times nan is nan"
            elif math.isclose(answer, sum(means)):
                hint = "that is the sum over the ranks: all_reduce adds up by default"
            elif losses[rank] and math.isclose(answer, sum(losses[rank]) / len(losses[rank])):
                hint = "that is the loss of its own rows: nothing was reduced"
            elif math.isclose(answer, sum(means) / nproc):
                hint = "that is the mean of the means: a rank with more rows must count more"
            return f"{place} returned {answer:.4g}, not {right:.4g}: {hint}"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"mean_loss": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "mean_loss": (
        "Ask what `reduce_loss` would send for a rank without rows, and what becomes of the sum. "
        "Which of the two arguments tells a nan of no rows from a nan of a failed training?"
    ),
}
