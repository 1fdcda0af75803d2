"""The exercise of lesson 09: mean and variance of the images of all ranks."""

import torch
import torch.distributed as dist
from nbtools import run
from nbtools.record import Wire


def solution(rank, world_size, images):
    """Return mean (C,) and variance (C,) of the images (n, C, h, w) of all ranks (claim A7)."""
    channels = images.transpose(0, 1).flatten(1)  # one row for each channel
    sums = torch.cat([channels.sum(1), channels.new_tensor([channels.shape[1]])])
    dist.all_reduce(sums)  # C + 1 numbers: the sums, and how many values were added up
    count = sums[-1]
    mean = sums[:-1] / count
    squares = (channels - mean[:, None]).square().sum(1)
    dist.all_reduce(squares)  # C numbers
    return mean, squares / count


def make_parts(nproc, first, offset, dtype, size):
    """Return `nproc` parts (n, 3, *size) of a batch: `first` images on rank 0, then 3, 5, 7 ..."""
    generator = torch.Generator().manual_seed(9)
    sizes = [first] + [2 * rank + 1 for rank in range(1, nproc)]
    images = torch.randn(sum(sizes), 3, *size, generator=generator, dtype=torch.float64)
    images *= torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    images += torch.arange(len(images)).view(-1, 1, 1, 1) / len(images)  # the parts' means differ
    return list((images + offset).to(dtype).split(sizes))


def examine(rank, world_size, attempt, parts):
    """Run the attempt on this rank's part; return its answer, and what it handed to collectives."""
    with Wire() as wire:
        answer = attempt(rank, world_size, parts[rank].clone())
    return answer, [call.name for call in wire.calls], sum(call.numbers for call in wire.calls)


def check(attempt, nprocs=(2, 3)):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    problems = (check_ranks(attempt, nproc) for nproc in nprocs)
    return next(filter(None, problems), None)


def check_ranks(attempt, nproc):
    """Return None if the attempt is right on so many ranks, else what is wrong."""
    cases = [
        (2, 0.0, torch.float64, (4, 2), 1e-10, "parts of different sizes"),
        (0 if nproc > 1 else 1, 0.0, torch.float64, (3, 5), 1e-10, "no image on rank 0"),
        (2, 1e3, torch.float32, (4, 2), 1e-3, "float32, and a mean near 1000"),
        (2, 1e8, torch.float64, (4, 2), 1e-3, "float64, and a mean near 100 million"),
    ]
    for first, offset, dtype, size, tolerance, words in cases:
        parts = make_parts(nproc, first, offset, dtype, size)
        whole = torch.cat(parts).double().transpose(0, 1).flatten(1)
        wanted = whole.mean(1), whole.var(1, correction=0)
        place = f"with {words}, on {nproc} rank{'s' * (nproc > 1)},"
        found = run(examine, nproc, attempt, parts, deadline=60)
        for rank, (answer, calls, numbers) in enumerate(found):
            if not isinstance(answer, tuple) or len(answer) != 2:
                return f"{place} rank {rank} returned {type(answer).__name__}, not two tensors"
            for name, ours, right in zip(("mean", "variance"), answer, wanted, strict=True):
                if not isinstance(ours, torch.Tensor) or ours.shape != (3,):
                    return f"{place} the {name} of rank {rank} is not a tensor of 3 numbers"
                if ours.dtype != dtype:
                    return (
                        f"{place} the {name} of rank {rank} is {ours.dtype}, the images are {dtype}"
                    )
                off = ((ours - right).abs() / right.abs().clamp(min=1)).max().item()
                if not off <= tolerance:
                    return f"{place} the {name} of rank {rank} is off by {off:.2g}"
            if set(calls) - {"allreduce"} or numbers > 20:
                called = " and ".join(sorted(set(calls)))
                return f"{place} rank {rank} handed {numbers} numbers to {called}: send sums only"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"statistics_of_all_images": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "statistics_of_all_images": (
        "`batch_statistics` does it for rows, in two passes so that a large mean costs no "
        "digits. What plays the part of its rows if every pixel is a value of its channel, and "
        "what must then be counted?"
    ),
}
