"""Solutions of the tasks of lesson 16, and their checks."""

from itertools import product

import lesson_16_all_reduce as lesson
import torch
import torch.distributed as dist
from lockstep.watch.played_messages import Stuck, play, same
from nbtools import run
from nbtools.blame import describe

LENGTHS = (9, 10, 2, 1, 1003)  # also what 3 does not divide, and fewer numbers than ranks


def problem_of(answer, parts, rank, wants_part):
    """Return what is wrong with one answer, or None; `parts` are those of the right sum."""
    right = parts[rank] if wants_part else torch.cat(parts)
    if not isinstance(answer, torch.Tensor):
        return f"it returns {type(answer).__name__}, not a tensor"
    if answer.dtype != right.dtype:
        return f"the numbers are {answer.dtype}, not {right.dtype}"
    if answer.shape == right.shape and torch.allclose(answer, right, atol=1e-5):
        return None
    for number, part in enumerate(parts) if wants_part else ():
        if answer.shape == part.shape and torch.allclose(answer, part, atol=1e-5):
            return f"part number {number} of the sum comes back, and {rank} is wanted"
    if answer.shape != right.shape:
        return f"there are {answer.numel()} numbers, not {right.numel()}"
    return "the sum is not right"


def judge_played(attempt, n, numbers, most, wants_part, to_right):
    """Return what is wrong if threads play n ranks that call the attempt, or None."""
    tensors = [lesson.make_tensor(numbers, rank) for rank in range(n)]
    parts, mine = sum(tensors).tensor_split(n), [tensor.clone() for tensor in tensors]
    ranks = play(n, lambda rank, _: attempt(mine[rank]))
    for rank in ranks:
        if rank.error and not isinstance(rank.error, Stuck):
            return f"rank {rank.number}{describe(rank.error).message}"
    if any(rank.error for rank in ranks):
        return f"it does not come to an end: {'; '.join(map(waiting, ranks))}"
    answers = [rank.value for rank in ranks] if wants_part else mine
    for rank, answer in zip(ranks, answers, strict=True):
        problems = [problem_of(answer, parts, rank.number, wants_part)]
        problems += [wrong for wrong in rank.wrong if "before its receive" not in wrong]
        problems.append(wrong_in_sent(rank, *most(n, numbers), to_right and (rank.number + 1) % n))
        if problem := next(filter(None, problems), None):
            return f"of {numbers} numbers, on rank {rank.number}, {problem}"
    if not wants_part and not all(same(answer, answers[0]) for answer in answers):
        return f"of {numbers} numbers, the ranks' sums differ in their last bits"
    return None


def wrong_in_sent(rank, numbers, messages, target):
    """Return what is wrong if a rank may send so many numbers, and messages, or None.

    messages: None for any number of them; target: the only rank that may get them, or False.
    """
    sent = [op for ops in rank.rounds for op in ops if op[0]]
    nbytes, targets = sum(nbytes for *_, nbytes in sent), {other for _, other, _ in sent}
    if nbytes > 4 * numbers:
        return f"{nbytes} bytes are sent, and {4 * numbers} are enough"
    if messages is not None and len(sent) > messages:
        return f"{len(sent)} messages are sent, and {messages} are enough"
    if target is not False and targets != {target}:
        return f"messages go to {sorted(targets)}, not to the right only"
    return None


def waiting(rank):
    """Return whom a rank is waiting for."""
    if not rank.error:
        return f"rank {rank.number} is through"
    begun = rank.rounds[-1]
    words = [f"{'sends to' if sends else 'receives from'} {peer}" for sends, peer, _ in begun]
    return f"rank {rank.number} {' and '.join(words)}"


def judge_all(rank, world_size, *attempt):
    """Return what is wrong with 2, 3 and 4 ranks, threads of this process, or None."""
    for n, numbers in product((2, 3, 4), LENGTHS):
        if problem := judge_played(attempt[0], n, numbers, *attempt[1:]):
            return f"with {n} ranks: {problem}"
    return None


def on_two_to_four(attempt, most, wants_part=False, to_right=False):
    """Return None if an attempt is right on 2, 3 and 4 ranks, else one sentence.

    most(n, numbers): the numbers that a rank may send, and its messages, or None for any number.
    Who goes on for ever is ended: so it is tried in a process of its own.
    """
    return run(judge_all, 1, attempt, most, wants_part, to_right)[0]


def chunks(times):
    """Return a budget: `times` (n - 1) messages, of n-ths of the numbers, rounded up."""
    return lambda n, numbers: (times * (n - 1) * -(-numbers // n), times * (n - 1))


# --- Task 1: repair ---


def everybody(tensor):
    """Swap whole tensors with each other rank, and add in the order of the ranks.

    Both directions of a swap are under way at once, so nobody waits for a turn. In round `step` all
    send to the rank that is `step` further, and receive from the one that is `step` before them.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [tensor.clone() for _ in range(n)]
    for step in range(1, n):
        source = (rank - step) % n
        lesson.swap(tensor, (rank + step) % n, parts[source], source)
    tensor.copy_(sum(parts))


def check_everybody(attempt):
    """Return None if the attempt ends on 2, 3 and 4 ranks, right, in (n - 1) N numbers."""
    return on_two_to_four(attempt, lambda n, numbers: ((n - 1) * numbers, None))


# --- Task 2: build ---


def my_ring(tensor):
    """All-reduce `tensor` in place: each rank sends to its right neighbour only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        leaving, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(coming)
        lesson.swap(leaving, right, arrived, left)
        if step < n - 1:
            coming += arrived
        else:
            coming.copy_(arrived)


def check_my_ring(attempt):
    """Return None if the attempt is right on 2, 3 and 4 ranks, within 2 (n - 1) chunks."""
    return on_two_to_four(attempt, chunks(2), to_right=True)


# --- Task 3: build ---


def my_reduce_scatter(tensor):
    """Return this rank's part of the sum; a rank sends another one only what that one adds."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = tensor.tensor_split(n)
    total = parts[rank].clone()
    for step in range(1, n):
        arrived = torch.empty_like(total)
        lesson.swap(parts[(rank + step) % n], (rank + step) % n, arrived, (rank - step) % n)
        total += arrived
    return total


def check_my_reduce_scatter(attempt):
    """Return None if the attempt is right on 2, 3 and 4 ranks, within n - 1 chunks."""
    return on_two_to_four(attempt, chunks(1), wants_part=True)


# --- Task 4: predict ---

A, B, N, STEPS = 1e-3, 8 / 200e6, 64, 6  # seconds of a round and of a byte; ranks, doublings to 64

# Doubling: 6 rounds, 6 S bytes in a row. Halving, its first rival: 12 rounds, 2 * 63/64 S bytes.
last_bytes = STEPS * A / ((STEPS - 2 * (N - 1) / N) * B)
FACTORS = {  # of the answer
    1e-3: "in bytes, please",
    1e-6: "in bytes, please",
    1 / 8: "a byte has eight bits",
    8: "a byte has eight bits",
    (2 * (N - 1) - STEPS) / STEPS: "there the ring passes doubling; another one has done so before",
}


def check_last_bytes(guess):
    """Return None if `guess` is right to 2 %, else a hint."""
    if abs(guess - last_bytes) < 0.02 * last_bytes:
        return None
    for factor, words in FACTORS.items():
        if abs(guess - factor * last_bytes) < 0.03 * factor * last_bytes:
            return words
    return "at this size doubling and its first rival need the same time: write both as formulas"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "everybody": (check_everybody, everybody),
    "my_ring": (check_my_ring, my_ring),
    "my_reduce_scatter": (check_my_reduce_scatter, my_reduce_scatter),
    "last_bytes": (check_last_bytes, last_bytes),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "everybody": (
        "Write down the first partner of each of three ranks, as the loop computes it. Is the "
        "partner of my partner myself? Then ask what the two directions need to be independent."
    ),
    "my_ring": (
        "In the picture, follow one chunk. Which chunk does rank r send in step s of the first "
        "half, and which one arrives? The second half goes on counting in the same way; only the "
        "adding stops."
    ),
    "my_reduce_scatter": (
        "Half a ring ends with the chunk that was added to last. Count back from there: if rank r "
        "is to end with part r, which part arrives in the last round, and with which does r begin?"
    ),
    "last_bytes": (
        "All others have more rounds, so a rival must have fewer bytes in a row. Of those with few "
        "bytes, which has the fewest rounds? Let its time be equal to that of doubling."
    ),
}
