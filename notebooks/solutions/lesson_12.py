"""Solutions of the tasks of lesson 12, and their checks."""

import lesson_12_pipeline_parallel as lesson
import torch
import torch.distributed as dist
from nbtools import run
from nbtools.record import Wire
from proofs.lesson_12 import gradient
from torch.nn.functional import mse_loss

# --- Task 1: predict ---

bytes_of_rank_1 = 2 * 40 * 32 * 8


def check_bytes_of_rank_1(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == bytes_of_rank_1:
        return None
    if guess == bytes_of_rank_1 / 2:
        return "that is what one of its neighbours gets"
    return "count the numbers of one message, and then the messages that rank 1 sends"


# --- Task 2: predict ---

micro_batches_for_10_percent = 63  # 7 / (63 + 7) is 0.1


def check_micro_batches(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == micro_batches_for_10_percent:
        return None
    if guess > micro_batches_for_10_percent:
        return "with fewer the ranks idle at most 10 %, too"
    return "with so few the ranks idle more than 10 %"


# --- Task 3: build ---


def clip_gradients(stage, limit):
    """Clip the gradients of this rank's `stage` by the norm of those of all stages; return it."""
    gradients = [own.grad for own in stage.parameters() if own.grad is not None]  # not frozen
    squares = sum((gradient**2).sum() for gradient in gradients)
    dist.all_reduce(squares)  # squares can be added over ranks, norms can't
    norm = squares.sqrt().item()
    if norm > limit:
        for gradient in gradients:
            gradient *= limit / norm
    return norm


def examine_clip_gradients(rank, world_size, attempt, limit):
    """Let the attempt clip a stage's gradients; return (returned, the norm, bytes, problem).

    No problem (None): they are those of the same layers in the whole model, multiplied by
    limit / norm if that is less than 1. (The library divides by norm + 1e-6: near enough.)
    """
    whole, rows, targets = lesson.make_chain(30, seed=world_size)
    mse_loss(whole(rows), targets).backward()
    norm = gradient(whole).norm().item()
    stages = lesson.split(whole, world_size)
    own, norms = gradient(stages[rank]), [gradient(s).norm() for s in stages]
    for other in stages[:rank] + stages[rank + 1 :]:
        other.zero_grad()  # a rank has the gradients of its own layers only
    with Wire() as wire:
        returned = attempt(stages[rank], limit)
    problem = "does not have the gradients of one process"
    by = {f"{problem}: it used the norm of its own stage": norms[rank]}
    by |= {f"{problem}: norms can't be added up": sum(norms), None: norm}  # None: right
    for verdict, used in by.items():
        if (gradient(stages[rank]) - own * min(1, limit / used)).abs().max() < 1e-6:
            problem = verdict
    return returned, norm, sum(call.nbytes for call in wire.calls), problem


def check_clip_gradients(attempt):
    """Return None if the attempt is right on 2 and 3 stages, else a sentence."""
    for nproc in (2, 3):
        for limit in (0.2, 100.0):  # less and more than the norm, which is about 0.3
            answers = run(examine_clip_gradients, nproc, attempt, limit, deadline=20)
            for rank, (returned, norm, nbytes, problem) in enumerate(answers):
                where = f"with {nproc} stages and the limit {limit}, rank {rank}"
                if problem:
                    return f"{where} {problem}"
                if not isinstance(returned, float | torch.Tensor):
                    return f"{where} returned {type(returned).__name__}, not the norm"
                if not abs(float(returned) - norm) < 1e-6:
                    return f"{where} returned {float(returned):.3g}, not the norm of all gradients"
                if nbytes > 100:
                    return f"{where} handed over {nbytes:,} bytes, where 100 are more than enough"
    return None


# --- Task 4: repair ---


def count_positive(rank, world_size, stage, rows, batch_size):
    """Return on the last rank how many rows have a positive first output, else None.

    The last batch of 35 rows has 3. They were received into a buffer for 8, without an error over
    gloo, and the 5 rows of the batch before were counted again. Now the buffer has the size of the
    batch, which all ranks know.
    """
    positive = 0
    for begin in range(0, len(rows), batch_size):
        inputs = rows[begin : begin + batch_size]
        if rank > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, rank - 1)
        outputs = stage(inputs).detach()
        if rank < world_size - 1:
            dist.send(outputs, rank + 1)
        positive += (outputs[:, 0] > 0).sum().item()
    return positive if rank == world_size - 1 else None


def examine_count_positive(rank, world_size, attempt, count, batch_size):
    """Count among `count` rows; return (what the attempt returned, the answer, bytes of messages).

    Each rank but the first is given rows without values: it has to use what it receives.
    """
    whole, rows, _ = lesson.make_chain(count, seed=1)
    positive = (whole(rows)[:, 0] > 0).sum().item()
    stage = lesson.split(whole, world_size)[rank]
    known = rows if rank == 0 else torch.full_like(rows, torch.nan)
    with Wire() as wire:
        returned = attempt(rank, world_size, stage, known, batch_size)
    return returned, positive, sorted(call.nbytes for call in wire.calls if call.name == "send")


def check_count_positive(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else a sentence."""
    for nproc in (2, 3):
        for count, batch_size in ((40, 8), (35, 8), (3, 8), (38, 8), (16, 7)):
            where = f"with {nproc} ranks and {count} rows in batches of {batch_size},"
            job = (attempt, count, batch_size)
            answers = run(examine_count_positive, nproc, *job, deadline=20)
            *others, (returned, positive, _) = answers
            if returned != positive:
                return f"{where} the last rank returned {returned}, one process counts {positive}"
            rest = [count % batch_size] if count % batch_size else []
            batches = [256 * rows for rows in rest + [batch_size] * (count // batch_size)]
            for rank, (_, _, sent) in enumerate(others):
                sizes = f"sends messages of {sent} bytes; the outputs of its batches are {batches}"
                if [nbytes for nbytes in sent if nbytes] != batches:  # 32 numbers of 8 bytes a row
                    return f"{where} rank {rank} {sizes}"
            if any(value is not None for value, _, _ in others):
                return f"{where} a rank before the last returned something: it can't know"
    return None


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "bytes_of_rank_1": (check_bytes_of_rank_1, bytes_of_rank_1),
    "micro_batches_for_10_percent": (check_micro_batches, micro_batches_for_10_percent),
    "clip_gradients": (check_clip_gradients, clip_gradients),
    "count_positive": (check_count_positive, count_positive),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "bytes_of_rank_1": (
        "In the picture of the messages of one step, look at the arrows that begin at rank 1; a "
        "rank in the middle of four does the same. What decides how many numbers one message "
        "has?"
    ),
    "micro_batches_for_10_percent": (
        "Put the number of stages into the formula of the bubble, set it equal to the allowed "
        "share, and solve for m."
    ),
    "clip_gradients": (
        "How is the norm of a long vector made from those of its pieces? Look for a number that "
        "the ranks can add up, so that all of them scale by the same factor."
    ),
    "count_positive": (
        "Compare the number of rows in the last batch with the number of places in `buffer`."
    ),
}
