"""Solutions of the tasks of lesson 16, and their checks."""

import os
from datetime import timedelta

import lesson_16_all_reduce as lesson
import torch
import torch.distributed as dist
from nbtools import RankFailed, run

LENGTHS = (9, 10, 2, 1, 1003)  # also what 3 does not divide, and fewer numbers than ranks
PATIENCE = timedelta(seconds=5)  # of a rank in one send or receive


class Watch(lesson.Watch):
    """Watches all ways to send: send and recv, isend and irecv, batch_isend_irecv."""

    def __init__(self):
        super().__init__()
        self.library |= {name: getattr(dist, name) for name in ("isend", "irecv", "P2POp")}

    def isend(self, tensor, dst):
        return self.batch_isend_irecv([self.library["P2POp"](self.library["isend"], tensor, dst)])[
            0
        ]

    def irecv(self, tensor, src):
        return self.batch_isend_irecv([self.library["P2POp"](self.library["irecv"], tensor, src)])[
            0
        ]

    def P2POp(self, op, *args, **options):
        known = {self.isend: self.library["isend"], self.irecv: self.library["irecv"]}
        return self.library["P2POp"](known.get(op, op), *args, **options)


def examine(rank, world_size, attempt, wants_part):
    """Call the attempt at each length; return a list of what was seen, for each length."""
    dist.destroy_process_group()  # who waits in vain is to notice it sooner than in this group
    store = dist.FileStore(os.path.join(os.environ["TMPDIR"], "again"), world_size)
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    dist.init_process_group("gloo", store=store, **place)
    dist.barrier()
    found = []
    for numbers in LENGTHS:
        tensor = lesson.make_tensor(numbers, torch.float32, 0, torch.device("cpu"))
        mine, right, watch = tensor.clone(), tensor.clone(), Watch()
        with watch() as counter:
            returned = attempt(mine)
        dist.all_reduce(right)
        answer = returned if wants_part else mine
        right = right.tensor_split(world_size)[rank] if wants_part else right
        seen = {"problem": problem_of(answer, right), "nbytes": counter.nbytes}
        seen["wrong"] = [each for each in watch.wrong if "before its receive" not in each]
        seen["messages"] = counter.calls.get("send", 0)
        found.append(seen | {"answer": answer})
    return found


def problem_of(answer, right):
    """Return what is wrong with one answer, or None."""
    if not isinstance(answer, torch.Tensor):
        return f"it returns {type(answer).__name__}, not a tensor"
    if answer.shape != right.shape:
        return f"there are {answer.numel()} numbers, not {right.numel()}"
    if answer.dtype != right.dtype:
        return f"the numbers are {answer.dtype}, not {right.dtype}"
    return None if torch.allclose(answer, right, atol=1e-5) else "the sum is not right"


def run_and_judge(attempt, nproc, most, wants_part=False):
    """Return what is wrong with an attempt on `nproc` ranks, or None.

    most(n, numbers): the numbers that a rank may send, and its messages, or None for any number.
    """
    try:
        everyone = run(examine, nproc, attempt, wants_part, deadline=60)
    except RankFailed as error:
        if any(words in str(error) for words in ("Timed out", "no answer", "onnect")):
            return "it does not come to an end: who waits for whom?"
        return str(error)
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
        if not wants_part and not all(lesson.same(o["answer"], seen[0]["answer"]) for o in seen):
            return f"of {numbers} numbers, the ranks' sums differ in their last bits"
    return None


def on_two_and_three(attempt, most, wants_part=False):
    """Return None if an attempt is right on 2 and 3 ranks, else one sentence."""
    for nproc in (2, 3):
        if problem := run_and_judge(attempt, nproc, most, wants_part):
            return f"with {nproc} ranks: {problem}"
    return None


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
    """Return None if the attempt ends on 2 and 3 ranks, right, in (n - 1) N numbers."""
    return on_two_and_three(attempt, lambda n, numbers: ((n - 1) * numbers, None))


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
    """Return None if the attempt is right on 2 and 3 ranks, within 2 (n - 1) chunks."""
    return on_two_and_three(
        attempt, lambda n, numbers: (2 * (n - 1) * -(-numbers // n), 2 * (n - 1))
    )


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
    """Return None if the attempt is right on 2 and 3 ranks, within n - 1 chunks."""
    return on_two_and_three(
        attempt, lambda n, numbers: ((n - 1) * -(-numbers // n), n - 1), wants_part=True
    )


# --- Task 4: predict ---

best_milliseconds = 6 * (1 + 1e3 * 8 / 200e6 * 1e3)


def check_best_milliseconds(guess):
    """Return None if `guess` is right to 2 %, else a hint."""
    if abs(guess - best_milliseconds) < 0.02 * best_milliseconds:
        return None
    rounds = {126: "naive, and the ring, make", 12: "the tree, and halving, make"}
    for count, who in rounds.items():
        if abs(guess - count) < 0.06 * count:
            return f"so many rounds {who}: which of the five has no way back?"
    if abs(guess - 6) < 0.01:
        return "nearly: a kilobyte takes a moment on the cable, too, in each round"
    return "count rounds: how often must 1 be doubled to reach 64?"


# What test_contract.py asks: (check, solution) of each task.
TASKS = {
    "everybody": (check_everybody, everybody),
    "my_ring": (check_my_ring, my_ring),
    "my_reduce_scatter": (check_my_reduce_scatter, my_reduce_scatter),
    "best_milliseconds": (check_best_milliseconds, best_milliseconds),
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
        "Which numbers of my tensor does another rank need for its part? It may get them from me, "
        "or already added up by those on the way."
    ),
    "best_milliseconds": (
        "A small message costs its round, hardly its bytes. So look for the smallest number of "
        "rounds in the table, as a formula in n, and put 64 into it."
    ),
}
