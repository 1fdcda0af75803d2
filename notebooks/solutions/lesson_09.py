"""Solutions of the tasks of lesson 09, and their checks."""

import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from nbtools.record import Wire
from torch import nn

# --- Task 1: predict ---

variance_of_all_rows = 16.5  # (6 * 3 + 18 * 5) / 24 within, (6 * 36 + 18 * 4) / 24 between


def check_variance_of_all_rows(guess):
    """Return None if `guess` is right, else a hint."""
    if abs(guess - variance_of_all_rows) < 0.05:
        return None
    if abs(guess - 4.5) < 0.05 or abs(guess - 4) < 0.05:
        return "that is the spread within the parts; but their means lie apart, too"
    if abs(guess - 20) < 0.05:
        return "that would be right for parts of one size"
    return "how far is a row from the mean of all 24, on average, squared?"


# --- Task 2: build ---


def statistics_of_all_images(rank, world_size, images):
    """Return mean (C,) and variance (C,) of the images (n, C, h, w) of all ranks.

    Each rank hands in its own mean, squared distances from it, and count: 2C + 1 numbers.
    """
    values = images.transpose(0, 1).flatten(1)  # one row for each channel
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    count = values.shape[1]
    mean = values.sum(1) / max(count, 1)
    squares = (values - mean[:, None]).square().sum(1)
    own = torch.cat([mean, squares, values.new_tensor([count])])
    everyone = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(everyone, own)
    means, squares, counts = torch.stack(everyone).tensor_split((len(mean), -1), dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return mean.to(images.dtype), variance.to(images.dtype)


F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NEAR, FAR = (0, 3e3, -7e3), (0, 1e8, -3e8)

# Name: (images on rank 0, mean of each channel, type, height and width, tolerance).
CASES = {
    "parts of different sizes": (2, (0, 1, 2), F64, (4, 2), 1e-10),
    "no image on rank 0": (0, (0, 1, 2, 3, 4), F64, (3, 5), 1e-10),
    "no image on the last rank": (-1, (0, 1, 2), F64, (3, 5), 1e-10),
    "float32, and channel means of 0, 3,000 and -7,000": (2, NEAR, F32, (4, 2), 5e-3),
    "float64, and channel means of 0, 100 million and -300 million": (2, FAR, F64, (4, 2), 1e-3),
    "float16, and sums above 65,504": (2, (100, 50, -100), F16, (20, 20), 1e-3),
    "bfloat16, and thousands of pixels": (2, (100, 10, 0), BF16, (20, 20), 8e-3),
}


def make_parts(nproc, first, means, dtype, size):
    """Return `nproc` parts (n, C, *size) of a batch: `first` images on rank 0, then 3, 5, 7 ..."""
    generator = torch.Generator().manual_seed(9)
    sizes = [first] + [2 * rank + 1 for rank in range(1, nproc)]
    if first < 0:
        sizes = [*range(2, nproc + 1), 0]
    channels = len(means)
    images = torch.randn(sum(sizes), channels, *size, generator=generator, dtype=torch.float64)
    images *= torch.arange(1, channels + 1).view(-1, 1, 1)
    images += torch.arange(len(images)).view(-1, 1, 1, 1) / len(images)  # the parts' means differ
    images += torch.tensor(means, dtype=torch.float64).view(-1, 1, 1)
    return list(images.to(dtype).split(sizes))


def examine_images(rank, world_size, attempt, batches):
    """Call the attempt for this rank's part of each batch.

    Return for each its answer, how many numbers were handed in, and whether the images are changed.
    """
    found = []
    for parts in batches:
        images = parts[rank].clone()
        with Wire() as wire:
            answer = attempt(rank, world_size, images)
        sent = sum(call.numbers for call in wire.calls)
        found.append((answer, sent, not torch.equal(images, parts[rank])))
    return found


def check_statistics_of_all_images(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    for nproc in (2, 3):
        batches = [make_parts(nproc, *case[:-1]) for case in CASES.values()]
        try:
            found = run(examine_images, nproc, attempt, batches, deadline=60)
        except RankFailed as error:
            return f"on {nproc} ranks: {error}"
        problems = []
        for number, name in enumerate(CASES):
            for rank, answers in enumerate(found):
                problem = wrong_in_statistics(answers[number][0], batches[number], CASES[name][-1])
                if problem:
                    return f"with {name}, on {nproc} ranks, rank {rank} {problem}"
                problems.append(waste_or_damage(*answers[number][1:], 2 * len(CASES[name][1]) + 1))
        if any(problems):
            return f"on {nproc} ranks, a rank {next(filter(None, problems))}"
    return None


def waste_or_damage(sent, changed, enough):
    """Return what is wrong with a rank whose answer is right, or None."""
    if sent > enough:
        return f"hands in {sent} numbers; {enough} numbers are enough"
    return "changes its images, which others may need" if changed else None


def wrong_in_statistics(answer, parts, tolerance):
    """Return what is wrong with one rank's answer, or None."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"returned {type(answer).__name__}, not two tensors"
    whole = torch.cat(parts).double().transpose(0, 1).flatten(1)
    wanted = {"mean": whole.mean(1), "variance": whole.var(1, correction=0)}
    for ours, (name, right) in zip(answer, wanted.items(), strict=True):
        if not isinstance(ours, torch.Tensor) or ours.shape != right.shape:
            return f"has a {name} that is not a tensor of {len(right)} numbers"
        if ours.dtype != parts[0].dtype:
            return f"has a {name} in {ours.dtype}, and images in {parts[0].dtype}"
        off = ((ours - right).abs() / right.abs().clamp(min=1)).max().item()
        if not off <= tolerance:
            return f"has a {name} that is off by {off:.2g}"
    return None


# --- Task 3: repair ---


def gradient_of_the_rows(rank, world_size, gradient, normalised, scale, count):
    """Return the gradient (n, C) of this rank's rows, from that of its normalised rows."""
    sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)])
    dist.all_reduce(sums)
    through_mean, through_variance = sums / count
    return scale * (gradient - through_mean - normalised * through_variance)


def examine_gradient(rank, world_size, attempt, sizes_by_case):
    """Return for each case how far the answer is from one process's, what is sent, and damage."""
    found = []
    for sizes in sizes_by_case:
        rows, gradient = torch.randn(
            2, sum(sizes), 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        layer = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
        inputs = (rows * 3).requires_grad_()
        outputs = layer(inputs)
        (right,) = torch.autograd.grad(outputs, inputs, gradient)
        scale = (inputs.detach().var(0, correction=0) + layer.eps).rsqrt()
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        kept = gradient[mine], outputs.detach()[mine], scale
        given = [tensor.clone() for tensor in kept]
        with Wire() as wire:
            answer = attempt(rank, world_size, *given, sum(sizes))
        damage = not all(map(torch.equal, given, kept))
        sent = [call.numbers for call in wire.calls]
        found.append((compare(answer, right[mine]), sent, damage))
    return found


def compare(answer, right):
    """Return how far an answer is from the right one, or a sentence."""
    if not isinstance(answer, torch.Tensor):
        return f"returned {type(answer).__name__}, not a tensor"
    if answer.shape != right.shape:
        return f"returned {list(answer.shape)} numbers for {list(right.shape)} rows and channels"
    return (answer - right).abs().sum().item()


def check_gradient_of_the_rows(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    for nproc in (2, 3):
        sizes = [[3, 9, 4][:nproc], [5] * nproc, [0, 6, 7][:nproc], [6, 7, 0][-nproc:]]
        try:
            found = run(examine_gradient, nproc, attempt, sizes, deadline=60)
        except RankFailed as error:
            return f"on {nproc} ranks: {error}"
        for number, parts in enumerate(sizes):
            for rank, answers in enumerate(found):
                off, sent, damage = answers[number]
                place = f"with {parts} rows, rank {rank}"
                if isinstance(off, str):
                    return f"{place} {off}"
                calls = [len(theirs[number][1]) for theirs in found]
                if len(set(calls)) > 1:
                    return f"with {parts} rows, the ranks call {calls} collectives: all or none"
                if not off < 1e-10:
                    return f"{place} is off by {off:.2g} in all: whose loss depends on its rows?"
                if sum(sent) > 8:
                    return f"{place} hands in {sum(sent)} numbers; for 4 channels 8 are enough"
                if damage:
                    return f"{place} changes what it was given, and autograd may still need it"
    return None


# --- Task 4: predict ---

forwards_that_send = 7  # yes yes yes, yes no, no yes yes, yes no


def check_forwards_that_send(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == forwards_that_send:
        return None
    if guess == 10:
        return "not each forward: what does the forward before leave behind?"
    if guess == 6:
        return "ask what the forward before left behind; and before the first, the memory is true"
    return "write a list of the ten, and ask for each: had the one before it gradients?"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "variance_of_all_rows": (check_variance_of_all_rows, variance_of_all_rows),
    "statistics_of_all_images": (check_statistics_of_all_images, statistics_of_all_images),
    "gradient_of_the_rows": (check_gradient_of_the_rows, gradient_of_the_rows),
    "forwards_that_send": (check_forwards_that_send, forwards_that_send),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "variance_of_all_rows": (
        "First the mean of all rows: the larger part counts more. A row's squared distance from it "
        "has two parts, the distance within its own part, and that of its part's mean."
    ),
    "statistics_of_all_images": (
        "Each pixel is a value of its channel. Which numbers of a part, at least, let you "
        "compute mean and variance of all, as in task 1? What is a mean of nothing?"
    ),
    "gradient_of_the_rows": (
        "Both means in the formula run over the rows of the whole batch. Which two sums does "
        "a rank know of them, and by what must the total be divided?"
    ),
    "forwards_that_send": (
        "Two of the three conditions hold before all ten forwards. For the other one, write down "
        "what each forward leaves behind for the next."
    ),
}
