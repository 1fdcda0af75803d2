"""Solutions of the tasks of lesson 05, and their checks."""

import math

import lesson_05_rank_zero_output as lesson
import torch
from nbtools import RankFailed, run
from nbtools.record import Wire
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

BUDGET = 16  # bytes that a rank may hand to collectives for one mean: a sum and a count
ROUNDED = "it is close, but rounded: which type of number is the sum, and which the count?"

# --- Task 1: predict ---

factor_of_the_last_rank = 4 * 7 / 31


def check_factor_of_the_last_rank(guess):
    """Return None if `guess` is right to half a percent, else a hint."""
    if abs(guess - factor_of_the_last_rank) < 0.005 * factor_of_the_last_rank:
        return None
    if abs(guess - 7 / 31) < 0.01:
        return "so much does its mean count, but DDP also divides the sum by the number of ranks"
    return "DDP leaves (a + b + c + d) / 4; which weight must the last of them have in the end?"


# --- Task 2: build ---


def mean_loss(loss_of_my_rows, my_row_count):
    """Return the mean loss over the rows of all ranks, the same number on every rank.

    Ask for the number of rows, not whether the loss is nan: a nan of real rows must be seen.
    """
    total = loss_of_my_rows * my_row_count if my_row_count else torch.zeros_like(loss_of_my_rows)
    return lesson.mean_over_rows(total, my_row_count)


def examine_mean_loss(rank, world_size, attempt, cases):
    """Call the attempt with the mean over this rank's rows; return its answers, and the bytes."""
    found = []
    for _, parts in cases:
        mean, count = parts[rank]
        with Wire() as wire:
            answer = attempt(torch.tensor(mean, dtype=torch.float64), count)
        if isinstance(answer, torch.Tensor) and answer.numel() == 1:
            answer = answer.item()
        found.append((answer, sum(call.nbytes for call in wire.calls)))
    return found


def make_cases(nproc):
    """Return [(words, [(mean, rows) by rank])]: unequal, many, no row at all, nan, inf."""
    uneven = [[1.0 + rank] * (rank + 1) for rank in range(nproc)]
    thirds = [[1 / 3 + rank, 0.1] for rank in range(nproc)]
    cases = [
        ("equally many rows on all ranks", [[rank + 0.5, 3.0 * rank] for rank in range(nproc)]),
        ("unequal numbers of rows", uneven),
        ("losses of 0.1 and 1/3", thirds),
        ("more than 256 rows", [[0.1] * (257 + rank) + [2.0] for rank in range(nproc)]),
        ("no row on the last rank", [*uneven[:-1], []]),
        ("no row on rank 0", [[], *uneven[1:]]),
        (f"a loss that is nan on rank {nproc - 1}", [*uneven[:-1], [1.0, math.nan]]),
        ("a loss that is nan on rank 0", [[1.0, math.nan], *uneven[1:]]),
        ("a loss that is infinite on rank 0", [[math.inf], *uneven[1:]]),
    ]
    cases = [(words, [mean_and_count(part) for part in losses]) for words, losses in cases]
    many = [(1.0, 2**24 + 1), *((1.0 + rank, 3) for rank in range(1, nproc))]
    return [*cases, ("more than 16,777,216 rows", many)]


def mean_and_count(losses):
    """Return the mean of the losses, nan if there are none, and their number."""
    return (sum(losses) / len(losses) if losses else math.nan), len(losses)


def check_mean_loss(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    for nproc in (2, 3):
        cases = make_cases(nproc)
        try:
            answers = run(examine_mean_loss, nproc, attempt, cases, deadline=30)
        except RankFailed as error:
            return f"with {nproc} ranks: {error}"
        for number, (words, parts) in enumerate(cases):
            for rank in range(nproc):
                answer, sent = answers[rank][number]
                problem = wrong_mean(answer, parts, rank)
                if problem:
                    return f"with {words}, rank {rank} returned {problem}"
                if sent > BUDGET:
                    return f"a rank hands {sent} bytes to collectives, and {BUDGET} are enough"
    return None


def wrong_mean(answer, parts, rank):
    """Return what is wrong with one answer, or None."""
    means = [mean for mean, count in parts if count]
    right = sum(mean * count for mean, count in parts if count) / sum(count for _, count in parts)
    if not isinstance(answer, (int, float)):
        return f"{type(answer).__name__}, not a number"
    if answer == right or abs(answer - right) < 1e-12 or (math.isnan(answer) and right != right):
        return None
    hint = "it must be the mean over all rows, on every rank"
    if math.isnan(right) or math.isinf(right):
        hint = f"that rank has rows, and their {right} must not be hidden"
    elif math.isnan(answer):
        hint = "the mean over no rows is nan, and 0 times nan is nan"
    elif math.isclose(answer, sum(means)):
        hint = "that is the sum over the ranks: all_reduce adds up by default"
    elif abs(answer - right) < 1e-6 * abs(right):
        hint = ROUNDED
    elif parts[rank][1] and math.isclose(answer, parts[rank][0]):
        hint = "that is the loss of its own rows: nothing was reduced"
    elif math.isclose(answer, sum(means) / len(parts)):
        hint = "that is the mean of the means: a rank with more rows must count more"
    elif abs(answer - right) < 0.05 * abs(right):
        hint = ROUNDED
    return f"{answer:.12g}, not {right:.12g}: {hint}"


# --- Task 3: predict ---

event_files = 2


def check_event_files(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == event_files:
        return None
    return "write down the ranks from 0 to 11, and divide each by 8: whose remainder is 0?"


# --- Task 4: repair ---


def train_until(rank, world_size, model, rows, targets, limit):
    """Train until the loss of all rows is below `limit`, 50 steps at most; return the steps made.

    The decision rests on a number that is equal on all ranks, so they all take it together.
    """
    mine = slice(rank, None, world_size)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 51):
        loss = mse_loss(replica(rows[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count = len(rows[mine])
        if lesson.mean_over_rows(loss * count, count) < limit:
            return step
    return 50


def make_unlike_rows():
    """Return 36 rows that are harder to learn towards the end of each six, targets, and a model."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(36, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(36, 1, generator=generator, dtype=torch.float64)
    noise *= 0.5 * (torch.arange(36)[:, None] % 6 + 1) / 6
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    return rows, rows.sum(1, keepdim=True) + 3 + noise, model


def train_in_one_process(steps):
    """Return the loss of all 36 rows in each step, and the parameters after each."""
    rows, targets, model = make_unlike_rows()
    optimizer, losses, ends = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for _ in range(steps):
        loss = mse_loss(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends.append(nn.utils.parameters_to_vector(model.parameters()).tolist())
    return losses, ends


def examine_train_until(rank, world_size, attempt, limits):
    """Run the attempt for each limit; return the steps, parameters, bytes, and rows computed."""
    found = []
    for limit in limits:
        rows, targets, model = make_unlike_rows()
        computed = []
        model.register_forward_hook(lambda *seen, to=computed: to.append(len(seen[-1])))
        with Wire() as wire:
            steps = attempt(rank, world_size, model, rows, targets, limit)
        sizes = [call.nbytes for call in wire.calls if call.name != "broadcast"]
        end = nn.utils.parameters_to_vector(model.parameters()).tolist()
        found.append((steps, end, sum(sizes), sum(computed)))
    return found


def check_train_until(attempt, deadline=15):
    """Return None if all ranks stop when the loss of all rows says so, else one sentence."""
    losses, ends = train_in_one_process(50)
    near = losses[9] * 1e-6  # a number of 16 bits is off by more, one of 32 bits by less
    limits = [losses[9] + near, losses[9] - near, 1.01 * losses[29], 0.0]
    wanted = [next((n for n, loss in enumerate(losses, 1) if loss < lim), 50) for lim in limits]
    for nproc in (2, 3):
        where, found = f"with {nproc} ranks", [[] for _ in range(nproc)]
        for part in (limits[:1], limits[1:]):  # alone: a rank that stops first is noticed at once
            try:
                parts = run(examine_train_until, nproc, attempt, part, deadline=deadline)
            except RankFailed as error:
                return f"{where} they do not end together: {who_stopped(error)}"
            found = [theirs + more for theirs, more in zip(found, parts, strict=True)]
            problem = wrong_steps(found, wanted, ends)
            if problem:
                return f"{where} {problem}"
    return None


def who_stopped(error):
    """Return the part of a failure that says who has come to the end, and who has not."""
    place, _, stopped = str(error).partition(", because ")
    return f"{stopped.partition(':')[0]}, and {place.partition(' in ')[0]}" if stopped else place


def wrong_steps(found, wanted, ends):
    """Return what is wrong with what examine_train_until found on each rank so far, or None."""
    share = 36 // len(found)
    for number, right in enumerate(wanted[: len(found[0])]):
        steps = [theirs[number][0] for theirs in found]
        if len(set(steps)) > 1:
            return f"they say that they have made {steps} steps"
        off = max(math.dist(theirs[number][1], ends[right - 1]) for theirs in found)
        if steps[0] == right and not off < 1e-9:
            words = f"they return {right}, and the model is not that of {right} updates"
            return f"{words}: the last step has its update, too"
        if steps[0] != right:
            hint = ": is it a part of the rows, or is a number rounded?"
            hint *= abs(steps[0] - right) == 1
            return f"they stop after step {steps[0]}; the loss of all rows, after {right}{hint}"
        gradient = 32  # 4 numbers of float64
        if max(theirs[number][2] for theirs in found) > (gradient + BUDGET) * right + 64:
            return f"a rank sends more than {BUDGET} bytes in a step to decide"
        if max(theirs[number][3] for theirs in found) > share * right:
            return f"a rank computes more rows in a step than its share, {share} of 36"
    return None


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "factor_of_the_last_rank": (check_factor_of_the_last_rank, factor_of_the_last_rank),
    "mean_loss": (check_mean_loss, mean_loss),
    "event_files": (check_event_files, event_files),
    "train_until": (check_train_until, train_until),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "factor_of_the_last_rank": (
        "Write down what DDP leaves, with one unknown factor in front of each rank's gradient, and "
        "below it the mean over the rows. Compare the two for the last rank."
    ),
    "mean_loss": (
        "What does `mean_over_rows` want, and what are those two things on a rank without rows? "
        "Which of your arguments tells a nan of no rows from a nan of a failed training?"
    ),
    "event_files": (
        "The rule asks only for the rank. Go through the ranks in order, and forget the machines."
    ),
    "train_until": (
        "All ranks must come to the same decision in the same step. On which number must it rest, "
        "and what has to happen before every rank has it?"
    ),
}
