"""Solutions of the tasks of lesson 16, and their checks."""

import os
from datetime import timedelta

import lesson_16_all_reduce as lesson
import torch
import torch.distributed as dist
from nbtools import RankFailed, run, wait_for_all

LENGTHS = (9, 10, 2, 1, 1003)  # also what 3 does not divide, and fewer numbers than ranks
PATIENCE = timedelta(seconds=3)  # of a rank in one send or receive


def examine(rank, world_size, attempt, wants_part):
    """Call the attempt at each length; return a list of what was seen, for each length.

    If a message does not come to an end, return the messages that this rank has begun last.
    """
    dist.destroy_process_group()  # who waits in vain is to notice it sooner than in this group
    store = dist.FileStore(os.path.join(os.environ["TMPDIR"], "again"), world_size)
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    wait_for_all(rank, world_size)  # who starts late is not the one that waits in vain
    dist.init_process_group("gloo", store=store, **place)
    dist.barrier()
    found = []
    for numbers in LENGTHS:
        tensor = lesson.make_tensor(numbers, torch.float32, 0, torch.device("cpu"))
        mine, right, watch = tensor.clone(), tensor.clone(), lesson.Watch()
        try:
            with watch() as counter:
                returned = attempt(mine)
            dist.all_reduce(right)
        except RuntimeError as error:
            if watch.rounds and any(words in str(error) for words in ("Timed out", "onnect")):
                return watch.rounds[-1]
            raise
        answer = returned if wants_part else mine
        seen = {"problem": problem_of(answer, right.tensor_split(world_size), rank, wants_part)}
        seen |= {"nbytes": counter.nbytes, "messages": counter.calls.get("send", 0)}
        seen["wrong"] = [each for each in watch.wrong if "before its receive" not in each]
        seen["targets"] = {peer for ops in watch.rounds for sends, peer, _ in ops if sends}
        found.append(seen | {"answer": answer})
    return found


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


def run_and_judge(attempt, nproc, most, wants_part=False, to_right=False):
    """Return what is wrong with an attempt on `nproc` ranks, or None.

    most(n, numbers): the numbers that a rank may send, and its messages, or None for any number.
    """
    try:
        everyone = run(examine, nproc, attempt, wants_part, deadline=60)
    except RankFailed as error:
        if any(words in str(error) for words in ("Timed out", "no answer", "onnect")):
            return "it does not come to an end: who waits for whom?"
        return str(error)
    if any(isinstance(begun, tuple) for seen in everyone for begun in seen):
        return f"it does not come to an end: {'; '.join(map(waiting, range(nproc), everyone))}"
    for numbers, seen in zip(LENGTHS, zip(*everyone, strict=True), strict=True):
        for rank, own in enumerate(seen):
            where = f"of {numbers} numbers, on rank {rank},"
            if problem := own["problem"] or (own["wrong"] or [None])[0]:
                return f"{where} {problem}"
            sent, messages = most(nproc, numbers)
            if own["nbytes"] > 4 * sent:
                return f"{where} {own['nbytes']} bytes are sent, and {4 * sent} are enough"
            if messages is not None and own["messages"] > messages:
                return f"{where} {own['messages']} messages are sent, and {messages} are enough"
            if to_right and own["targets"] != {(rank + 1) % nproc}:
                return f"{where} messages go to {sorted(own['targets'])}, not to the right only"
        if not wants_part and not all(lesson.same(o["answer"], seen[0]["answer"]) for o in seen):
            return f"of {numbers} numbers, the ranks' sums differ in their last bits"
    return None


def waiting(rank, begun):
    """Return whom a rank was waiting for; `begun` is what examine() has returned there."""
    if not begun or isinstance(begun[0], dict):
        return f"rank {rank} is through"
    words = [f"{'sends to' if sends else 'receives from'} {peer}" for sends, peer, _ in begun]
    return f"rank {rank} {' and '.join(words)}"


def on_two_to_four(attempt, most, **wanted):
    """Return None if an attempt is right on 2, 3 and 4 ranks, else one sentence."""
    for nproc in (2, 3, 4):
        if problem := run_and_judge(attempt, nproc, most, **wanted):
            return f"with {nproc} ranks: {problem}"
    return None


def chunks(times):
    """Return a budget for run_and_judge: `times` (n - 1) messages, of n-ths that are rounded up."""
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
