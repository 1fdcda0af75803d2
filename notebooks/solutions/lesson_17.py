"""Solutions of the tasks of lesson 17, and their checks."""

import contextlib
import copy
from unittest.mock import patch

import lesson_17_ddp_from_scratch as lesson
import torch
import torch.distributed as dist
from lockstep.watch.played_gloo import late, sent, waits_early
from nbtools import RankFailed, run
from proofs.lesson_17 import difference
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

# --- Task 1: predict ---

buckets_of_ddp = 1 + -(-23 // 3)


def check_buckets_of_ddp(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == buckets_of_ddp:
        return None
    return "close the first bucket by its own limit, then count how many layers reach the other one"


# --- Task 2: build ---


def overlapped(model, limit):
    """Begin with each bucket's all-reduce as soon as it is full; return finish()."""
    buckets = lesson.into_buckets([*model.parameters()][::-1], limit)
    ready, sent = set(), []

    def on_gradient(p):
        ready.add(p)
        for bucket in buckets[len(sent) :]:
            if not ready.issuperset(bucket):
                break
            flat = torch.cat([p.grad.flatten() for p in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, flat, work in sent:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(part.view_as(p))
        ready.clear(), sent.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return finish


class Chain(nn.Module):
    """Six layers of the same size, called one after the other, in any order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, rows, order=range(6)):
        for number in order:
            rows = torch.tanh(self.layers[number](rows))
        return rows


LIMIT = 2 * (16 * 16 + 16) * 8  # bytes of two of the layers in float64


all_reduce = dist.all_reduce  # the library's


class Watch:
    """A model in a job of this rank, and the order of what happens to it: `events`.

    An event is the number of a layer whose weight has its gradient, or ("all_reduce", bytes), or
    ("wait", bytes).
    """

    def __init__(self):
        torch.manual_seed(0)
        self.model = Chain().double()
        self.twin, self.events = copy.deepcopy(self.model), []
        note = self.events.append
        for number, layer in enumerate(self.model.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: note(n))
        self.all_reduce = late(all_reduce, note)

    def sent_before(self, layer):
        """Return how many all-reduces begin before the gradient of a layer's weight is there."""
        return len(sent(self.events[: self.events.index(layer)]))

    def step(self, rows, finish, order=range(6)):
        """Make a step that sends; only what happens in it is in `events` then."""
        self.events.clear()
        mse_loss(self.model(rows, order), rows.flip(1)).backward()
        finish()

    def off(self, micro_batches, order=range(6)):
        """Return how far the gradients are from the mean over all ranks."""
        self.twin.zero_grad()
        for rows in micro_batches:
            mse_loss(self.twin(rows, order), rows.flip(1)).backward()
        for p in self.twin.parameters():
            all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        return difference(self.model, self.twin)


def refuse_the_library(*args, **kwargs):
    raise TypeError("the task is to write it: DDP, or OwnDDP, is not an answer")


@contextlib.contextmanager
def examined(watch):
    """Let the attempt call a dist.all_reduce that is late, and no DDP."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(dist, "all_reduce", watch.all_reduce))
        for kind in (DistributedDataParallel, lesson.OwnDDP):
            stack.enter_context(patch.object(kind, "__init__", refuse_the_library))
        yield


def of_any_rank(problem):
    """Return the first rank's problem, the same on all ranks, or None."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return next(filter(None, everyone), None)


def off_by(off):
    """Return what is to be said about a wrong gradient."""
    return f"'s gradient is {off:.2g} away from the mean" + (
        ": has nobody waited for an all-reduce?" if off != off else ""
    )


def rows_of(rank, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(8, 16, generator=generator, dtype=torch.float64)


SIZES = [LIMIT] * 3  # bytes of the buckets


def wrong_in_sending(watch, off):
    """Return what is wrong with a step that sends buckets, about a rank, or None."""
    sizes = sent(watch.events)
    if off < 1e-12 and not sizes:
        return " calls nothing by the name dist.all_reduce, the only one that this check sees"
    if not off < 1e-12:
        return off_by(off)
    if sizes != SIZES:
        return f" begins {len(sizes)} all-reduces, of {sizes} bytes; the buckets have {SIZES}"
    if watch.sent_before(3) < 1 or watch.sent_before(1) < 2:
        return " lets a bucket wait that is full: the next layer has its gradient before it leaves"
    if waits_early(watch.events):
        return " waits before all buckets have left: use async_op=True, and wait in finish()"
    return None


def examine_sending(rank, world_size, attempt, pauses):
    """Make two steps with the attempt; return the first problem of any rank, or None.

    If it `pauses`, a step has three micro-batches, and the second one an error inside no_sync.
    """
    watch = Watch()
    with examined(watch):
        made = attempt(watch.model, LIMIT)
        finish, no_sync = made if pauses else (made, None)
        for step in (1, 2):
            parts = [rows_of(rank, 10 * step + part) for part in range(3 if pauses else 1)]
            watch.model.zero_grad()
            watch.events.clear()
            for rows in parts[:-1]:
                with no_sync():
                    mse_loss(watch.model(rows), rows.flip(1)).backward()
            early, after = sent(watch.events), ""
            if pauses and step == 2:
                after = ", after an error inside no_sync"
                with contextlib.suppress(ValueError), no_sync():
                    raise ValueError
            watch.step(parts[-1], finish)
            problem = wrong_in_sending(watch, watch.off(parts))
            problem = f" sends {sum(early)} bytes inside no_sync" if early else problem
            if problem := of_any_rank(problem and f"step {step}: rank {rank}{problem}{after}"):
                return problem
    return None


def check_overlapped(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    return on_ranks(examine_sending, attempt, False)


def on_ranks(examine, *given):
    """Return what 2 ranks find wrong, else what 3 ranks do, else None."""
    for nproc in (2, 3):
        try:
            problem = run(examine, nproc, *given, deadline=30)[0]
        except RankFailed as error:
            return f"with {nproc} ranks: {error}"
        if problem:
            return f"with {nproc} ranks: {problem}"
    return None


# --- Task 3: build ---


def pausable(model, limit):
    """Return finish() as before, and no_sync(): inside `with no_sync():` nothing is sent."""
    buckets = lesson.into_buckets([*model.parameters()][::-1], limit)
    state = {"averaging": True}

    @contextlib.contextmanager
    def no_sync():
        state["averaging"] = False
        try:
            yield
        finally:
            state["averaging"] = True

    ready, sent = set(), []

    def on_gradient(p):
        if not state["averaging"]:
            return
        ready.add(p)
        for bucket in buckets[len(sent) :]:
            if not ready.issuperset(bucket):
                break
            flat = torch.cat([p.grad.flatten() for p in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, flat, work in sent:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(part.view_as(p))
        ready.clear(), sent.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return finish, no_sync


def check_pausable(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    return on_ranks(examine_sending, attempt, True)


# --- Task 4: repair ---


def average_each(model):
    """Average each gradient as soon as it is there, in the same order on all ranks.

    The order is agreed on before: the last parameter first. What is ready too soon has to wait.
    """
    order, ready, works = [*model.parameters()][::-1], set(), []

    def on_gradient(p):
        ready.add(p)
        while len(works) < len(order) and order[len(works)] in ready:
            works.append(dist.all_reduce(order[len(works)].grad, async_op=True))

    def finish():
        for p, work in zip(order, works, strict=True):
            work.wait()
            p.grad /= dist.get_world_size()
        ready.clear(), works.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return finish


def examine_average_each(rank, world_size, attempt):
    """Let ranks call layers in the same order twice, then in others; return a problem, or None."""
    watch = Watch()
    total = sum(p.nbytes for p in watch.model.parameters())
    turned = [*range(rank % 3, 6), *range(rank % 3)]
    orders = {"first step": [*range(6)], "the same order": [*range(6)], "another order": turned}
    with examined(watch):
        finish = attempt(watch.model)
        for name, order in orders.items():
            rows, problem = rows_of(rank, 1), None
            watch.model.zero_grad()
            watch.step(rows, finish, order)
            off, sizes, early = watch.off([rows], order), sent(watch.events), watch.sent_before(2)
            if not off < 1e-12:
                problem = off_by(off)
            elif sum(sizes) > total or len(sizes) > 12:
                problem = f" sends {sum(sizes)} bytes in {len(sizes)} messages; it needs {total}"
            elif name == "the same order" and early < 4:
                problem = f" begins only {early} all-reduces before layer 2 has its gradient"
            elif name == "the same order" and waits_early(watch.events):
                problem = " waits before all have left: use async_op=True, and wait in finish()"
            if problem := of_any_rank(problem and f"{name}: rank {rank}{problem}"):
                return problem
    return None


def check_average_each(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    return on_ranks(examine_average_each, attempt)


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "buckets_of_ddp": (check_buckets_of_ddp, buckets_of_ddp),
    "overlapped": (check_overlapped, overlapped),
    "pausable": (check_pausable, pausable),
    "average_each": (check_average_each, average_each),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "buckets_of_ddp": (
        "The first bucket has a limit of its own, and one layer passes it. Then ask how many "
        "layers the next bucket has taken when it has reached 25 MiB for the first time."
    ),
    "overlapped": (
        "A hook knows one gradient. Keep a set of all that are ready, and ask of the next bucket "
        "whether it is a part of that set. Then do what the loop over buckets did, but divide and "
        "copy later."
    ),
    "pausable": (
        "The hook needs one more question before it notes anything. Who sets the answer back, if "
        "the block is left by an error? `contextlib.contextmanager` and `finally` go together."
    ),
    "average_each": (
        "Compare line 1 of both logs: an all-reduce knows no names, only its turn. Which order "
        "do all ranks know before backward begins, and what must a gradient do that comes too soon?"
    ),
}
