"""Solutions of the tasks of lesson 18, and their checks."""

from unittest.mock import patch

import lesson_18_sharding as lesson
import torch
import torch.distributed as dist
from lockstep.watch.storages import Memory
from nbtools import run
from proofs import lesson_18 as proof
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# --- Task 1: predict ---


def kept(ranks, stage):
    """Return the bytes that one of so many ranks keeps."""
    return sum(proof.formulas(proof.modules_of(lesson.Transformer()), ranks, stage)[0].values())


kept_by_eight = kept(8, 2)


def check_kept_by_eight(guess):
    """Return None if `guess` is right to half a percent, else a hint."""
    if abs(guess / kept_by_eight - 1) < 0.005:
        return None
    for stage in (1, 3):
        if abs(guess / kept(8, stage) - 1) < 0.005:
            return f"that is stage {stage}: what is whole in stage 2, and what is dealt out?"
    if abs(guess / kept(4, 2) - 1) < 0.005:
        return "that is what one of four ranks keeps"
    return "add up parameters, gradients and Adam's two averages, each of 8 bytes a number"


# --- Task 2: build ---


def my_part_of_the_sum(flat):
    """Return this rank's part of the sum of `flat` over the ranks."""
    return lesson.reduce_scatter(flat).clone()


class Sent(TorchDispatchMode):
    """Adds up what a rank sends: messages as they are, collectives as by their rings."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.split("::")[1].replace("_", "")
            ranks = dist.get_world_size()
            names = [argument.name for argument in function._schema.arguments]
            given = [one for one, n in zip(args, names, strict=False) if n.startswith("input")]
            leaves = [t for t in tree_leaves(given or args) if isinstance(t, torch.Tensor)]
            share = dict.fromkeys(
                ("alltoall", "alltoallbase", "alltoallsingle"), (ranks - 1) / ranks
            )
            gathers = "allgather", "allgatherbase", "allgatherintotensor"
            share |= dict.fromkeys(gathers, ranks - 1)
            share |= dict.fromkeys(("recv", "recvanysource", "barrier", "waittensor"), 0)
            share |= {"send": 1}
            twice = 2 * (ranks - 1) / ranks  # all_reduce; reduce_scatter over gloo is one
            self.nbytes += share.get(name, twice) * sum(leaf.nbytes for leaf in leaves)
        return function(*args, **(kwargs or {}))


def examine_part_of_the_sum(rank, world_size, attempt):
    """Call the attempt twice; return [(is it right, bytes sent, the budget)]."""
    found = []
    for length in (7, 500):
        generator = torch.Generator().manual_seed(length)
        all_flat = torch.randn(world_size, world_size * length, generator=generator).double()
        with Sent() as sent:
            answer = attempt(all_flat[rank].clone())
        right = all_flat.sum(0).chunk(world_size)[rank]
        fits = isinstance(answer, torch.Tensor) and answer.shape == right.shape
        budget = (world_size - 1) * right.nbytes
        close = fits and torch.allclose(answer, right, rtol=0, atol=1e-12)
        found.append((bool(close), sent.nbytes, budget))
    return found


def check_my_part_of_the_sum(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    for nproc in (2, 3):
        for rank, cases in enumerate(run(examine_part_of_the_sum, nproc, attempt, deadline=30)):
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
    memory = Memory(x, *shards)
    collectives = {name: let_go(memory, getattr(dist, name)) for name in GATHERING}
    with memory, torch.no_grad(), patch.multiple(dist, **collectives):
        answer = attempt(shards, (WIDTH, WIDTH), x)
    most = memory.told()["peak"]["setup"]
    close = isinstance(answer, torch.Tensor) and answer.shape == right.shape
    return close and torch.allclose(answer, right, rtol=0, atol=1e-12), most


GATHERING = ["all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast"]
GATHERING += ["all_reduce", "reduce", "all_to_all_single", "all_to_all", "gather", "scatter"]


def let_go(memory, collective):
    """Return the collective on copies: a thread of gloo holds what it was given a moment longer."""

    def on_copies(*args, **options):
        pairs = []

        def copied(tensor):
            pairs.append((tensor, tensor.clone()))
            return pairs[-1][1]

        memory.paused = True
        args, options = tree_map_only(torch.Tensor, copied, (args, options))
        work = collective(*args, **options)
        if work is not None:
            work.wait()
        for tensor, copy in pairs:
            tensor.copy_(copy)
        memory.paused = False
        return work  # it is finished

    return on_copies


def check_forward_by_shards(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    budget = 8 * WIDTH * WIDTH * 5 // 4  # one whole layer, and room for what it computes
    for nproc in (2, 3):
        for rank, (close, most) in enumerate(run(examine_forward, nproc, attempt, deadline=30)):
            if not close:
                return f"with {nproc} ranks, rank {rank} does not compute what one process computes"
            if most > budget:
                size = most / (8 * WIDTH * WIDTH)
                words = f"what lives at a time is {size:.1f} whole layers"
                return f"with {nproc} ranks, {words}, and 1.25 are enough"
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
        for count in (24, 29, 5):
            whole = {n: torch.arange(1.0, count + 1) * 10**i for i, n in enumerate(NAMES)}
            saved = [cut(whole, count, rank, old) for rank in range(old)]
            for rank in range(new):
                parts, right = attempt(saved, count, rank, new), cut(whole, count, rank, new)
                for name in NAMES:
                    if not torch.equal(parts[name], right[name]):
                        words = f"{count} numbers were saved by {old} ranks, and loaded by {new}"
                        return f"{words}: rank {rank} does not go on from what was saved"
    return None


def cut(whole, count, rank, ranks):
    """Return the part of one rank, as a job of `ranks` ranks has it."""
    return resume([whole], count, rank, ranks)


TASKS = {
    "kept_by_eight": (check_kept_by_eight, kept_by_eight),
    "my_part_of_the_sum": (check_my_part_of_the_sum, my_part_of_the_sum),
    "forward_by_shards": (check_forward_by_shards, forward_by_shards),
    "resume": (check_resume, resume),
}

HINTS = {
    "kept_by_eight": (
        "In stage 2 one of the three kinds is whole on every rank. The page has printed the number "
        "of parameters; Adam has two averages for each."
    ),
    "my_part_of_the_sum": (
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
