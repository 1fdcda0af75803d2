"""Lesson 09: what does BatchNorm see when the batch is cut into parts?

BatchNorm normalises with the mean and the variance of the rows that it is given. A rank is given
its part of the batch, so N ranks use N means; averaging gradients does not mend that. Synchronised
BatchNorm uses those of all rows: in the forward of each layer, a rank hands 2C + 1 numbers to the
others (C is the number of channels), and in the backward 2C. The library's, nn.SyncBatchNorm,
refuses CPUs. This one is written by hand, and compared with one process that has all rows.

Run it: bash scripts/lesson_09.sh --nproc 2

Output to expect on a CPU:

    2 ranks over gloo on cpu; one channel's mean:
                           used in step 1    kept after the last step
    one process             0.082             0.085
    DataParallel            0.118  0.046      0.134
    DDP                     0.118  0.046      0.134  0.135
    DDP, buffers not sent   0.118  0.046      0.134  0.049
    synchronised            0.082  0.082      0.085  0.085
    plain BatchNorm: DDP is DataParallel to ... (in step 1)
    PASS off one process: plain by 0.278, synchronised on 10 + 20 rows by ...
"""

import argparse
import functools
import json
import math
import os
import sys
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

# --- The technique ---


class NormaliseOverRanks(torch.autograd.Function):
    """Take the mean of all ranks' values (n, C) from this rank's, and divide by their deviation.

    `n` may differ between ranks, and may be 0. Every rank must call this, in the forward and, if
    the values need a gradient, in the backward: each then waits for the others.
    """

    @staticmethod
    def forward(ctx, values, eps):
        own_count = values.new_tensor([len(values)])
        own_mean = values.sum(0) / own_count.clamp(min=1)
        own_squares = (values - own_mean).square().sum(0)
        own = torch.cat([own_mean, own_squares, own_count])  # 2C + 1 numbers
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        means, squares, counts = torch.stack(everyone).tensor_split((len(own) // 2, -1), dim=1)
        count = counts.sum()
        if count < 2:  # on every rank, or on none
            raise ValueError("Expected more than 1 value per channel on all ranks together")
        mean = (counts * means).sum(0) / count  # a rank with more rows counts more
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = (variance + eps).rsqrt()
        normalised = (values - mean) * scale
        ctx.save_for_backward(normalised, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *_):
        normalised, scale, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)])  # 2C numbers
        dist.all_reduce(sums)  # mean and variance depend on every row: all ranks' losses count
        through_mean, through_variance = sums / count
        return scale * (gradient - through_mean - normalised * through_variance), None


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """BatchNorm that acts like the whole batch, for inputs (n, C) and (n, C, ...); also on CPUs.

    It has BatchNorm's arguments, parameters and buffers. In evaluation it sends nothing.
    """

    def forward(self, inputs):
        if not self.training:  # with what is kept; if nothing is, with the mean of these inputs
            kept = self.running_mean, self.running_var
            options = {"training": self.running_mean is None, "eps": self.eps}
            return batch_norm(inputs, *kept, self.weight, self.bias, **options)
        channels_last = inputs.movedim(1, -1)  # an image's pixels are rows, too
        values = channels_last.reshape(-1, self.num_features)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()  # their sums need more digits
        outputs, mean, variance, count = NormaliseOverRanks.apply(values, self.eps)
        if self.track_running_stats:
            self.keep(mean, variance * count / (count - 1))  # divided by count - 1: unbiased
        if self.weight is not None:
            outputs = outputs * self.weight
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.reshape(channels_last.shape).movedim(-1, 1).to(inputs.dtype)

    def keep(self, mean, variance):
        """Move the running statistics towards these, which are the same on every rank."""
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # then the mean over all batches so far
            share = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


def train(model, batches):
    """Train on all ranks; `batches` are (rows, targets), this rank's part of each batch.

    Parts of a batch may have different sizes; all ranks have as many of them.
    """
    # Buffers begin and stay equal: none is sent. (The switch's older name is broadcast_buffers.)
    replica = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, targets in batches:
        count = torch.tensor(targets.numel(), device=rows.device)
        dist.all_reduce(count)
        loss = (replica(rows) - targets).square().sum() / count  # of all ranks' rows, this share
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()  # DDP divides the sum over the ranks by it
        optimizer.step()


# --- The proof ---


def make_toy(seed):
    """Return the article's toy: 100 rows of 5 numbers, targets of width 2, and a layer 5 -> 2.

    The targets are a fixed linear function of the rows, plus noise: there is something to learn.
    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    targets += 0.5 * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rows, targets, model


def make_model(norm, seed):
    """Return a network that maps the toy's rows (n, 5) to (n, 2), with the layer `norm(8)`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.ReLU(), nn.Linear(8, 2)).double()


def data_parallel(model, rows, replicas):
    """Return the outputs of lesson 01's DataParallel, computed in one process.

    The replicas share the parameters, so autograd adds up their gradients. All but the master,
    which has the first part, write their running statistics into copies that are lost.
    """
    first, *others = rows.chunk(replicas)
    outputs = [model(first)]
    for part in others:
        copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs.append(torch.func.functional_call(model, copies, (part,)))
    return torch.cat(outputs)


def train_alone(forward, model, batches):
    """Train `model` in one process, or on ranks whose parts are equally large."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, targets in batches:
        optimizer.zero_grad()
        mse_loss(forward(rows), targets).backward()
        optimizer.step()


def flat(tensors):
    """Return a copy of all numbers of some tensors, as one vector on the CPU."""
    left = [torch.tensor(math.nan) if tensor is None else tensor for tensor in tensors]
    return torch.cat([torch.zeros(0), *(one.detach().double().flatten().cpu() for one in left)])


def state_of(model):
    """Return a copy of all parameters and buffers, by name, on the CPU."""
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def mean_used(rows, outputs):
    """Return the mean (C,) with which a new BatchNorm made `outputs` of `rows` (n, C), n > 1.

    Solved from outputs = (rows - mean) / scale, at the smallest and the largest row.
    """
    (low, high), (low_output, high_output) = rows.aminmax(dim=0), outputs.aminmax(dim=0)
    return low - (high - low) / (high_output - low_output) * low_output


class Witness:
    """Sees from outside what a model's BatchNorm does, and what the model is after each update."""

    def __init__(self, model):
        self.model, self.layer, self.outputs = model, [], []
        self.used, self.steps = [], []  # means of step 1; outputs, gradient and state of each step
        model[1].register_forward_hook(lambda _, rows, outputs: self.layer.append((*rows, outputs)))
        model.register_forward_hook(lambda _, rows, outputs: self.outputs.append(outputs))

    def after_update(self, *_):
        gradient = flat(parameter.grad for parameter in self.model.parameters())
        outputs = torch.cat(self.outputs).detach().cpu()
        if not self.steps:
            pairs = [(rows.detach(), outputs.detach()) for rows, outputs in self.layer]
            self.used = [mean_used(*one)[0].item() if len(one[0]) > 1 else None for one in pairs]
        self.steps.append((outputs, gradient, state_of(self.model)))
        self.layer.clear(), self.outputs.clear()

    def see(self, training, *args):
        """Call training(*args); return what this rank has seen of it, a dictionary."""
        handle = register_optimizer_step_post_hook(self.after_update)
        training(*args)
        handle.remove()
        return {"used": self.used, "steps": self.steps, "state": state_of(self.model)}


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def cut_batches(args, world_size, device):
    """Return the whole batches; what a rank takes if parts are equal; and what, if they are not.

    Unequal ones have 1, 2, 3 ... shares of a batch; so with 8 ranks, the first one has no row.
    """
    share = args.batch_size // world_size
    rows, targets, _ = make_toy(args.seed)
    size, shares = share * world_size, range(world_size + 1)
    rows, targets = (tensor.to(device).split(size) for tensor in (rows, targets))
    full = list(zip(rows, targets, strict=True))[: 100 // size]
    even = [share * number for number in shares]
    uneven = [share * number * (number + 1) // (world_size + 1) for number in shares]
    return [full[step % len(full)] for step in range(args.steps)], even, uneven


def part_of(batches, borders, rank):
    """Return the rows of this rank in each batch."""
    mine = slice(*borders[rank : rank + 2])
    return [(rows[mine], targets[mine]) for rows, targets in batches]


def see_plain(way, args, place):
    """Train with plain BatchNorm in one of four ways; return what was seen, rank by rank."""
    rank, world_size, device = place
    batches, even, _ = cut_batches(args, world_size, device)
    model = make_model(nn.BatchNorm1d, args.seed).to(device)
    witness = Witness(model)
    if way == "one process":
        return [witness.see(train_alone, model, model, batches)]
    if way == "DataParallel":
        forward = functools.partial(data_parallel, model, replicas=world_size)
        return [witness.see(train_alone, forward, model, batches)]
    replica = DistributedDataParallel(model, forward_sync_buffers=way == "DDP")
    return from_all_ranks(witness.see(train_alone, replica, model, part_of(batches, even, rank)))


def see_synchronised(args, place, norm):
    """Train by `train`, on parts of different sizes; return what was seen, rank by rank.

    The models start apart, which DDP has to mend.
    """
    rank, world_size, device = place
    batches, _, uneven = cut_batches(args, world_size, device)
    model = make_model(norm, args.seed).to(device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += rank
    seen = Witness(model).see(train, model, part_of(batches, uneven, rank))
    rows = make_toy(args.seed)[0].to(device)
    seen["evaluated"] = model.eval()(rows).detach().cpu()
    seen["after"] = state_of(model)
    return from_all_ranks(seen)


def apart(one, other):
    """Return the largest difference between two tensors, or dictionaries of them; nan stays."""
    if isinstance(one, dict):
        return max_of([apart(tensor, other[name]) for name, tensor in one.items()])
    same = one.shape == other.shape
    return max_of((one.double() - other.double()).abs().flatten().tolist()) if same else math.inf


def max_of(numbers):
    """Return the largest number, at least 0.0; nan, if one of them is."""
    return torch.tensor([0.0, *numbers], dtype=torch.float64).max().item()


def off_one_process(everyone, args, world_size):
    """Return how far outputs, gradients and states are from one process's, in the worst step.

    It does each step from where the ranks were before it. Then it evaluates 100 rows.
    """
    batches, *_ = cut_batches(args, world_size, "cpu")
    model, off = make_model(nn.BatchNorm1d, args.seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [seen["steps"] for seen in everyone]
    for (rows, targets), *ranks in zip(batches, *steps, strict=False):
        outputs = model(rows)
        optimizer.zero_grad()
        mse_loss(outputs, targets).backward()
        optimizer.step()
        gradient = flat(parameter.grad for parameter in model.parameters())
        off.append(apart(torch.cat([outputs for outputs, *_ in ranks]), outputs.detach()))
        off += [apart(theirs, gradient) for _, theirs, _ in ranks]
        off += [apart(theirs, model.state_dict()) for *_, theirs in ranks]
        model.load_state_dict(ranks[0][2])
    right = model.eval()(make_toy(args.seed)[0]).detach()
    off += [apart(seen["evaluated"], right) for seen in everyone]
    off += [apart(seen["after"], model.state_dict()) for seen in everyone]
    return max_of(off)


def step_1_apart(everyone, one):
    """Return how far the ranks' outputs and gradients of step 1 are from those of one process."""
    first = [seen["steps"][0] for seen in everyone]
    off = [apart(torch.cat([outputs for outputs, *_ in first]), one["steps"][0][0])]
    return max_of(off + [apart(gradient, one["steps"][0][1]) for _, gradient, _ in first])


# What a layer must also be able to do. Name: (its arguments, the shape of a row, type and, by
# channel, mean of the numbers, rows on rank 0, tolerance). Each further rank has two rows more.
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CASES = {
    "no row on rank 0": ({}, (4,), F64, 1, 0, 1e-10),
    "images": ({}, (4, 3, 2), F64, 1, 20, 1e-10),
    "eps=0.1, momentum=0.3": ({"eps": 0.1, "momentum": 0.3}, (4,), F64, 1, 3, 1e-10),
    "momentum=None": ({"momentum": None}, (4,), F64, 1, 3, 1e-10),
    "affine=False": ({"affine": False}, (4,), F64, 1, 3, 1e-10),
    "bias=False": ({"bias": False}, (4,), F64, 1, 3, 1e-10),
    "track_running_stats=False": ({"track_running_stats": False}, (4,), F64, 1, 3, 1e-10),
    "float32, large means": ({}, (4,), F32, 1000, 9, 2e-3),
    "float16": ({}, (4,), F16, 100, 301, 2e-3),
    "bfloat16": ({}, (4,), BF16, 10, 301, 8e-3),
}


def use(layer, batches, weights, later):
    """Train a layer of 4 channels on two batches, then evaluate; return all that comes of it."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += torch.arange(4, device=later.device)
    for inputs in batches:
        inputs = inputs.clone().requires_grad_()
        outputs = layer(inputs)
    outputs.backward(weights)
    seen = {"outputs": outputs.detach(), "gradient of the inputs": inputs.grad}
    seen["gradient of the parameters"] = flat(parameter.grad for parameter in layer.parameters())
    seen["evaluation"] = layer.eval()(later).detach()
    seen["running statistics"] = flat(layer.buffers())
    return {name: tensor.cpu() for name, tensor in seen.items()}


def make_case(name, world_size):
    """Return four batches, the last of them weights, and where each rank's rows begin and end."""
    _, shape, dtype, mean, first, _ = CASES[name]
    counts = [first + 2 * rank + 5 * (world_size == 1) for rank in range(world_size)]
    generator = torch.Generator().manual_seed(9)
    whole = torch.randn(4, sum(counts), *shape, generator=generator, dtype=F64)
    whole[:3] += mean * torch.arange(1, 5).view(4, *[1] * (len(shape) - 1))
    return whole.to(dtype), [sum(counts[:rank]) for rank in range(world_size + 1)]


def see_case(place, name, kind):
    """Use a layer on this rank's rows; return what comes of it."""
    rank, world_size, device = place
    whole, borders = make_case(name, world_size)
    one, two, later, weights = whole.to(device)
    mine = slice(*borders[rank : rank + 2])
    layer = kind(4, **CASES[name][0]).to(device, F64 if one.dtype is F64 else F32)
    return use(layer, (one[mine], two[mine]), weights[mine], later)


def wrong_in_case(name, everyone):
    """Return how the ranks differ from BatchNorm in one process in this case: a list."""
    options, shape, dtype, *_, tolerance = CASES[name]
    one, two, later, weights = make_case(name, len(everyone))[0].double()
    kind = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
    right = use(kind(4, **options).double(), (one, two), weights, later)
    found = {seen["outputs"].dtype for seen in everyone}
    wrong = [] if found == {dtype} else [f"{name}: the outputs are in {found.pop()}"]
    for what, wanted in right.items():
        theirs = [seen[what] for seen in everyone]
        if what in ("outputs", "gradient of the inputs"):
            theirs = [torch.cat(theirs)]
        elif what == "gradient of the parameters":
            theirs = [sum(theirs)]  # DDP's work
        size = max(1.0, apart(wanted, torch.zeros_like(wanted)))
        off = max_of([apart(part, wanted) for part in theirs]) / size
        wrong += [f"{name}: {what} off by {off:.2g}"] * (not off <= tolerance)
    return wrong


def facts_of(found, args, world_size):
    """Return what was measured, from {way: what was seen, rank by rank}."""
    one, master, ddp = found["one process"][0], found["DataParallel"][0], found["DDP"]
    start = state_of(make_model(nn.BatchNorm1d, args.seed))
    off = [off_one_process(found[way], args, world_size) for way in [*found][4:]]
    kept = {way: [seen["state"] for seen in everyone] for way, everyone in found.items()}
    ddp_diff = [step_1_apart(ddp, master), apart(ddp[0]["steps"][0][2], master["steps"][0][2])]
    plain = [step_1_apart(ddp, one), *(apart(seen["state"], one["state"]) for seen in ddp)]
    moved = [apart(one["state"][name], start[name]) for name in ("0.weight", "3.weight")]
    return {
        "parts": [len(seen["steps"][0][0]) for seen in found["synchronised"] if seen["steps"]],
        # Of the first channel: means used in step 1; running means and variances at the end.
        "used": {
            way: [m for seen in theirs for m in seen["used"]] for way, theirs in found.items()
        },
        "kept": {way: [s["1.running_mean"][0].item() for s in kept[way]] for way in found},
        "kept_variance": {way: [s["1.running_var"][0].item() for s in kept[way]] for way in found},
        "plain_diff": max_of(plain),
        "ddp_diff": max_of(ddp_diff),
        "sync_diff": max_of(off),
        "param_change": max_of(moved),
    }


def wrong_in_facts(facts, found, steps):
    """Return what is wrong with what was measured: a list of sentences."""
    made = [len(seen["steps"]) for everyone in found.values() for seen in everyone]
    world_size, plain = len(found["DDP"]), facts["plain_diff"]
    rules = {
        "synchronised ranks are not one process": facts["sync_diff"] < 1e-10,
        f"updates, rank by rank: {made}, and not {steps}": set(made) == {steps},
        f"in step 1, DDP is off DataParallel by {facts['ddp_diff']:.2g}": facts["ddp_diff"] < 1e-10,
        "plain BatchNorm does not differ": plain > 1e-3 or (world_size == 1 and plain < 1e-10),
        "nothing has been trained": 0.0 < facts["param_change"] < math.inf,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = place = join_group()
    ways = ("one process", "DataParallel", "DDP", "DDP, buffers not sent")
    found = {way: see_plain(way, args, place) for way in ways}
    found["synchronised"] = see_synchronised(args, place, SynchronisedBatchNorm)
    if device.type == "cuda":  # it refuses CPUs
        found["nn.SyncBatchNorm"] = see_synchronised(args, place, nn.SyncBatchNorm)
    cases = {name: see_case(place, name, SynchronisedBatchNorm) for name in CASES}
    cases = from_all_ranks(cases)
    wrong = [wrong_in_case(name, [theirs[name] for theirs in cases]) for name in CASES]
    facts = facts_of(found, args, world_size)
    wrong = [*wrong_in_facts(facts, found, args.steps), *chain(*wrong)]
    numbers = {"lesson": 9, "world_size": world_size, "backend": dist.get_backend()}
    numbers |= {"device": device.type} | facts
    dist.destroy_process_group()
    if rank == 0:
        report(numbers)
    parts = " + ".join(map(str, facts["parts"] or ["no"]))
    claim = f"off one process: plain by {facts['plain_diff']:.3g}, "
    claim += f"synchronised on {parts} rows by {facts['sync_diff']:.2g}"
    return not wrong, "; ".join([claim, *wrong]), numbers


def report(numbers):
    """Print the means that each way has used and kept, rank by rank."""
    world_size = numbers["world_size"]
    print(
        f"{world_size} ranks over {numbers['backend']} on {numbers['device']}; one channel's mean:"
    )
    width = max(18, 7 * world_size + 4)
    print(f"{'':23}{'used in step 1':{width}}kept after the last step")
    for way, used in numbers["used"].items():
        used = ["     -" if mean is None else f"{mean:6.3f}" for mean in used]  # too few rows
        kept = " ".join(f"{mean:6.3f}" for mean in numbers["kept"][way])
        print(f"{way:23}{' '.join(used):{width}}{kept}")
    print(f"plain BatchNorm: DDP is DataParallel to {numbers['ddp_diff']:.2g} (in step 1)")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=20, help="%(default)s")
    size = {"type": whole(1, 10**6), "default": 30}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    least = 2 * int(os.environ.get("WORLD_SIZE", 1))
    if not least <= args.batch_size <= 100:
        parser.error(f"argument --batch-size: must be from {least}, 2 for each rank, to 100")
    return args


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU. If only
    some machines have GPUs, pass `backend`. If a rank may keep the others waiting for more than
    two minutes, raise `timeout`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    enough_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here
    backend = backend or ("nccl" if enough_gpus else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()  # alone, nobody has to be found
    place = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    return rank, world_size, device


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            limits = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{limits}, not {text[:40]!r}")
        return int(text)

    return number


def conclude(passed, claim, numbers, as_json):
    """Let rank 0 print the verdict as the last line, or before the JSON; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("PASS" if passed else "FAIL", claim)
        if as_json:
            print(json.dumps(numbers | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse_args()
    sys.exit(conclude(*main(args), args.json))
