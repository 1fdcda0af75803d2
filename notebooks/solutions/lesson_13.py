"""Solutions of the tasks of lesson 13, and their checks."""

import lesson_11_how_fast as how_fast
import lesson_13_tensor_and_hybrid as lesson
import torch
import torch.distributed as dist
from nbtools import run
from nbtools.record import Wire
from torch import nn

# --- Task 1: predict ---

megabytes_handed_in = 4 * 24 * (8 * 512 * 1024) * 2 / 1e6


def check_megabytes_handed_in(guess):
    """Return None if `guess` is right to 1 %, else a hint."""
    if abs(guess - megabytes_handed_in) < 0.01 * megabytes_handed_in:
        return None
    if abs(guess - megabytes_handed_in / 2) < 0.01 * megabytes_handed_in:
        return "half of it: a block has two halves, and each works forward and backward"
    return "one all-reduce carries x: rows x tokens x width numbers. How many does a block make?"


# --- Task 2: build ---


def look_up(part, tokens, group):
    """Return the rows of the whole table for `tokens`, the same on all ranks of `group`.

    A token that is not in this rank's part gives zeros, and the sum over the ranks is the row.
    """
    first = dist.get_rank(group) * len(part)
    here = (tokens >= first) & (tokens < first + len(part))
    row_numbers = torch.where(here, tokens - first, 0)
    found = part[row_numbers] * here.unsqueeze(-1)
    return lesson.SumInForward.apply(found, group)


def examine_look_up(rank, world_size, attempt, members):
    """Look up tokens in a table of 12 rows; return what went wrong on this rank, or None."""
    group = dist.new_group(members)
    dist.barrier()  # nobody leaves while another still connects
    if rank not in members:
        return None
    torch.manual_seed(0)
    for shape in ((5, 6), (7,)):
        if problem := examine_one_shape(rank, attempt, group, shape):
            return problem
    return None


def examine_one_shape(rank, attempt, group, shape):
    """Look up tokens of this shape; return what went wrong on this rank, or None."""
    table = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    tokens, factors = torch.randint(12, shape), torch.randn(*shape, 4, dtype=torch.float64)
    part = lesson.my_part(table, 0, group)
    with Wire() as wire:
        found = attempt(part, tokens, group)
    if not isinstance(found, torch.Tensor) or found.shape != (*shape, 4):
        was = tuple(getattr(found, "shape", ()))
        return f"rank {rank} returned {was}, not shape {(*shape, 4)}"
    if not (found - table[tokens]).abs().max() < 1e-12:
        return f"rank {rank} has not found the rows of the whole table"
    if not found.requires_grad:
        return f"no gradient can flow from the result of rank {rank} to its part of the table"
    with Wire() as backward:
        (found * factors).sum().backward()
    (table[tokens] * factors).sum().backward()
    wanted = lesson.my_part(table.grad, 0, group)
    if part.grad is None:
        return f"no gradient has come to the part of rank {rank}"
    if not (part.grad - wanted).abs().max() < 1e-12:
        ratio = part.grad.norm() / wanted.norm()
        return f"the gradient of rank {rank}'s part is wrong, and {ratio:.2f} times as long"
    if [(call.name, call.nbytes) for call in wire.calls] != [("allreduce", found.nbytes)]:
        sent = ", ".join(map(str, wire.calls)) or "nothing that Wire can see"
        return f"rank {rank} sent {sent}, not one all-reduce of the result's {found.nbytes} bytes"
    if backward.calls:
        sent = ", ".join(map(str, backward.calls))
        return f"rank {rank} sent {sent} in backward(), where nothing has to travel"
    return None


def check_look_up(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, and in a group of 2 of 3 ranks."""
    for nproc, members in ((2, [0, 1]), (3, [0, 1, 2]), (3, [1, 2])):
        problems = run(examine_look_up, nproc, attempt, members, deadline=40)
        for problem in filter(None, problems):
            return f"with {nproc} ranks, of which {members} form the group: {problem}"
    return None


# --- Task 3: repair ---


def clip(whole, parts, limit, group):
    """Scale all gradients so that the norm of the model's gradient is at most `limit`; return it.

    Each rank knew only the norm of what it holds, so each scaled by another number. Now the
    squares of the parts are added up over the ranks; those of the whole parameters count once.
    """
    squares = sum(parameter.grad.square().sum() for parameter in parts)
    dist.all_reduce(squares, group=group)
    squares += sum(parameter.grad.square().sum() for parameter in whole)
    norm = squares.sqrt()
    if norm > limit:
        for parameter in [*whole, *parts]:
            parameter.grad *= limit / norm
    return norm.item()


def with_gradient(gradient):
    """Return a parameter that has this gradient."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def examine_clip(rank, world_size, attempt, split):
    """Clip gradients whose norms are 13 and 5; return what went wrong on this rank, or None.

    `split`: the members of each group. A group holds one model, and clips by itself.
    """
    groups = [dist.new_group(members) for members in split]
    dist.barrier()  # nobody leaves while another still connects
    (group,) = (group for group in groups if dist.get_rank(group) >= 0)
    torch.manual_seed(0)
    for norms in ((5, 12), (4, 3)):
        for scale in (0.5, 1.0):
            if problem := examine_one_gradient(rank, attempt, group, norms, scale):
                return problem
    return None


def examine_one_gradient(rank, attempt, group, norms, scale):
    """Clip a gradient to the limit that needs this `scale`; return what went wrong, or None."""
    in_all, dealt_out = (torch.randn(size, dtype=torch.float64) for size in (7, 12))
    in_all, dealt_out = in_all / in_all.norm() * norms[0], dealt_out / dealt_out.norm() * norms[1]
    mine = dealt_out.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    right = (norms[0] ** 2 + norms[1] ** 2) ** 0.5
    limit = right * scale if scale < 1 else right + 7
    whole = [with_gradient(in_all[:3]), with_gradient(in_all[3:])]
    parts = [with_gradient(mine[:1]), with_gradient(mine[1:])]
    with Wire() as wire:
        norm = float(attempt(whole, parts, limit, group))
    if not abs(norm - right) < 1e-3:
        return f"the norm of the whole gradient is {right:g}, and rank {rank} has found {norm:.4g}"
    for name, parameters, before in (("whole", whole, in_all), ("parts", parts, mine)):
        after = torch.cat([parameter.grad for parameter in parameters])
        if not (after - before * scale).abs().max() < 1e-3:
            ratio = after.norm() / before.norm()
            return f"limit {limit:g}: rank {rank} has scaled its `{name}` by {ratio:.3g}"
    if [call.name for call in wire.calls] != ["allreduce"] or wire.calls[0].nbytes > 8:
        sent = ", ".join(map(str, wire.calls)) or "nothing that Wire can see"
        return f"right, but rank {rank} sent {sent}: one all-reduce of one number is enough"
    return None


def check_clip(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, and in groups of 2 and 1."""
    for split in ([[0, 1]], [[0, 1, 2]], [[1, 2], [0]]):
        nproc = sum(map(len, split))
        for problem in filter(None, run(examine_clip, nproc, attempt, split, deadline=40)):
            groups = f", in groups of {split}" if len(split) > 1 else ""
            return f"with {nproc} ranks{groups}: {problem}"
    return None


# --- Task 4: predict ---


def seconds_of_sending(parts, rows=512):
    """Return seconds per step of (sums, gradients): 4 machines of 8 devices, 80 blocks of 4,096.

    `rows` of 2,048 tokens in a step, over all devices; numbers have 2 bytes. NVLink in a machine;
    each machine has 8 cards of 100 Gbit/s, and what leaves it goes through all of them.
    """
    nvlink, card = (10e-6, 1 / 150e9), (20e-6, 1 / 12.5e9)  # seconds per message, per byte
    replicas = 32 // parts
    x = rows / replicas * 2048 * 4096 * 2  # bytes of one all-reduce
    if parts <= 8:
        one_sum = how_fast.predict_all_reduce(nvlink, parts, x)
    else:
        one_sum = how_fast.predict_all_reduce(card, parts, x / 8)
    gradients = PARAMETERS * 2 / max(parts, 8)  # a machine has a whole model, or 8 of its parts
    return 4 * 80 * one_sum, how_fast.predict_all_reduce(card, replicas, gradients)


def gigabytes(parts):
    """Return GB of parameters, gradients and Adam's state of one part."""
    return 16 * PARAMETERS / parts / 1e9


PARAMETERS, CHOICES = 80 * 12 * 4096**2, (2, 4, 8, 16)
that_fit = [parts for parts in CHOICES if gigabytes(parts) <= 40]
# It is 8: 64 GB do not fit with 4 parts, 32 GB do with 8, and more parts only enlarge the sums.
parts_for_40_gb = min(that_fit, key=lambda parts: sum(seconds_of_sending(parts)))


def check_parts_for_40_gb(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == parts_for_40_gb:
        return None
    if guess not in CHOICES:
        return "choose one of 2, 4, 8 and 16"
    if guess not in that_fit:
        return "does not fit: 16 billion parameters of 16 bytes, over so many parts, is how much?"
    return "fits, but what happens to the sums of a replica if you take more parts than you need?"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "megabytes_handed_in": (check_megabytes_handed_in, megabytes_handed_in),
    "look_up": (check_look_up, look_up),
    "clip": (check_clip, clip),
    "parts_for_40_gb": (check_parts_for_40_gb, parts_for_40_gb),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "megabytes_handed_in": (
        "Count the all-reduces in the picture of one block, forward and back; each carries "
        "something of the shape of x. Does the number of ranks occur anywhere in that product?"
    ),
    "look_up": (
        "What must a rank contribute for a token that is not in its part, so that adding up "
        "gives the right row? Then ask whether it is the result or its gradient of which each "
        "rank has only a piece."
    ),
    "clip": (
        "Suppose each rank adds up the squares of all that it holds, and the ranks then add up "
        "these sums. Which parameters would be counted once, and which several times?"
    ),
    "parts_for_40_gb": (
        "How does the column of gigabytes in the table above change with twice as many blocks? "
        "Then follow one sum: with more parts there are fewer replicas, so how many rows does "
        "each of them have?"
    ),
}
