"""Solutions of the tasks of lesson 18, and their checks."""

from unittest.mock import patch

import lesson_18_sharding as lesson
import torch
import torch.distributed as dist
from nbtools import run
from nbtools.record import Wire
from torch import nn

# --- Task 1: predict ---

kept_by_eight = sum(lesson.formulas(lesson.modules_of(lesson.Transformer()), 8, 2)[0].values())


def check_kept_by_eight(guess):
    """Return None if `guess` is right to half a percent, else a hint."""
    if abs(guess / kept_by_eight - 1) < 0.005:
        return None
    for stage in (1, 3):
        others = lesson.formulas(lesson.modules_of(lesson.Transformer()), 8, stage)[0]
        if abs(guess / sum(others.values()) - 1) < 0.005:
            return f"that is stage {stage}: what is whole in stage 2, and what is dealt out?"
    return "add up parameters, gradients and Adam's two averages, each of 8 bytes a number"


# --- Task 2: build ---


def reduce_scatter(flat):
    """Return this rank's part of the sum of `flat` over the ranks."""
    lesson.reduce_scatter(flat)
    return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()


def sent_bytes(calls, ranks):
    """Return what a rank sends: messages as they are, collectives as by their rings."""
    share = {"send": 1, "recv": 0, "alltoall": (ranks - 1) / ranks}
    share |= {"alltoall_base": (ranks - 1) / ranks, "allgather_base": ranks - 1}
    twice = 2 * (ranks - 1) / ranks  # all_reduce; reduce_scatter over gloo is one
    names = [(call.name.strip("_"), call.nbytes) for call in calls]
    return sum(nbytes * share.get(name, twice) for name, nbytes in names)


def examine_reduce_scatter(rank, world_size, attempt):
    """Call the attempt twice; return [(is it right, bytes sent)]."""
    found = []
    for length in (7, 500):
        generator = torch.Generator().manual_seed(length)
        all_flat = torch.randn(world_size, world_size * length, generator=generator).double()
        with Wire() as wire:
            answer = attempt(all_flat[rank].clone())
        right = all_flat.sum(0).chunk(world_size)[rank]
        fits = isinstance(answer, torch.Tensor) and answer.shape == right.shape
        budget = (world_size - 1) * right.nbytes
        close = fits and torch.allclose(answer, right, rtol=0, atol=1e-12)
        found.append((bool(close), sent_bytes(wire.calls, world_size), budget))
    return found


def check_reduce_scatter(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    for nproc in (2, 3):
        for rank, cases in enumerate(run(examine_reduce_scatter, nproc, attempt, deadline=30)):
            for close, sent, budget in cases:
                if not close:
                    return f"with {nproc} ranks, rank {rank} does not return its part of the sum"
                if sent > budget:
                    words = f"rank {rank} sends {sent:,.0f} bytes"
                    return f"with {nproc} ranks, {words}, where {budget:,} are enough"
    return None


# --- Task 3: build ---


def forward_by_shards(shards, shape, x):
    """Compute x through all layers, of which at most one is whole at a time."""
    for shard in shards:
        whole = shard.new_empty(shape)
        dist.all_gather_single(whole.view(-1), shard)
        x = torch.tanh(x @ whole)
        del whole  # before the next one is made
    return x


WIDTH, LAYERS = 60, 5


def examine_forward(rank, world_size, attempt):
    """Call the attempt; return (is it right, the most bytes that lived in it)."""
    torch.manual_seed(5)
    wholes = torch.randn(LAYERS, WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    shards = [whole.flatten().chunk(world_size)[rank].clone() for whole in wholes]
    right = x
    for whole in wholes:
        right = torch.tanh(right @ whole)
    memory = lesson.Memory(nn.Identity(), x, *shards)
    gather = dist.all_gather_single

    def gather_and_let_go(whole, shard, *args, **options):
        """Gather into other memory: a thread of gloo holds what it was given a moment longer."""
        memory.paused = True
        own = torch.empty_like(whole)
        gather(own, shard, *args, **options)
        whole.copy_(own)
        memory.paused = False

    names = dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), gather_and_let_go)
    with memory, torch.no_grad(), patch.multiple(dist, **names):
        answer = attempt(shards, (WIDTH, WIDTH), x)
    most = lesson.replay([([], []), (memory.events, [])])[1]["besides"]
    close = isinstance(answer, torch.Tensor) and answer.shape == right.shape
    return close and torch.allclose(answer, right, rtol=0, atol=1e-12), most


def check_forward_by_shards(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    budget = 8 * WIDTH * WIDTH * 5 // 4  # one whole layer, and room for what it computes
    for nproc in (2, 3):
        for rank, (close, most) in enumerate(run(examine_forward, nproc, attempt, deadline=30)):
            if not close:
                return f"with {nproc} ranks, rank {rank} does not compute what one process computes"
            if most > budget:
                size = most / (8 * WIDTH * WIDTH)
                words = f"{size:.0f} whole layers live at a time"
                return f"with {nproc} ranks, {words}, and 1 is enough"
    return None


# --- Task 4: repair ---


def resume(saved, count, rank, ranks):
    """Return {name: this rank's part} for another number of ranks; `count` without padding."""
    length = -(-count // ranks)
    parts = {}
    for name in saved[0]:
        whole = torch.cat([theirs[name] for theirs in saved])[:count]
        padded = torch.cat([whole, whole.new_zeros(length * ranks - count)])
        parts[name] = padded[rank * length : (rank + 1) * length]
    return parts


NAMES = ("parameters", "exp_avg", "exp_avg_sq")


def check_resume(attempt):
    """Return None if every rank of every new world gets its part, else one sentence."""
    for old, new in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 1)):
        for count in (24, 29):
            whole = {n: torch.arange(1.0, count + 1) * 10**i for i, n in enumerate(NAMES)}
            saved = [cut(whole, count, rank, old) for rank in range(old)]
            for rank in range(new):
                parts, right = attempt(saved, count, rank, new), cut(whole, count, rank, new)
                for name in NAMES:
                    if not torch.equal(parts[name], right[name]):
                        place = f"saved by {old} ranks, loaded by {new}, {count} numbers"
                        return f"{place}: rank {rank} does not get its {name}"
    return None


def cut(whole, count, rank, ranks):
    """Return the part of one rank, as a job of `ranks` ranks has it."""
    return resume([whole], count, rank, ranks)


TASKS = {
    "kept_by_eight": (check_kept_by_eight, kept_by_eight),
    "reduce_scatter": (check_reduce_scatter, reduce_scatter),
    "forward_by_shards": (check_forward_by_shards, forward_by_shards),
    "resume": (check_resume, resume),
}

HINTS = {
    "kept_by_eight": (
        "In stage 2 one of the three kinds is whole on every rank. The page has printed the number "
        "of parameters; Adam has two averages for each."
    ),
    "reduce_scatter": (
        "Send to your neighbour the part that has the longest way to go, and add to your own what "
        "comes. After how many turns has each part visited everybody?"
    ),
    "forward_by_shards": (
        "When Python runs `whole = gather(...)` a second time, what does the name still hold while "
        "the right side is computed?"
    ),
    "resume": (
        "Which file does rank 1 of three read, when two were saved, and which numbers are in it? "
        "Treat all three names alike."
    ),
}
