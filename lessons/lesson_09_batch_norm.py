"""Lesson 09: what does BatchNorm see when the batch is cut into parts?

BatchNorm normalises with mean and variance of the rows that it is given. A rank is given its part
of the batch, so N ranks use N means; averaging gradients does not mend that. Synchronised BatchNorm
uses those of all rows. The library's, nn.SyncBatchNorm, can't train on CPUs in a process group.
This one is written by hand, put into a model by `synchronise`, and compared with one process.

Run it: bash scripts/lesson_09.sh --nproc 2

Output to expect on a CPU:

    2 ranks over gloo on cpu; one channel's mean:
                           used in step 1    kept after the last step
    one process             0.082             0.063
    DataParallel            0.118  0.046      0.136
    DDP                     0.118  0.046      0.136  0.110
    DDP, buffers not sent   0.118  0.046      0.136  0.018
    synchronised            0.082  0.082      0.063  0.063
    plain BatchNorm: DDP is DataParallel to ... (in step 1)
    PASS off one process: plain by 0.278, synchronised on 10 + 20 rows by ...
"""

import argparse
import contextlib
import functools
import io
import json
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        means, squares, counts = torch.stack(everyone).tensor_split((values.shape[1], -1), dim=1)
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
        if channels_last.shape[-1] != self.num_features:
            raise ValueError(f"{self.num_features} channels are wanted, not {inputs.shape[1]}")
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
        outputs = outputs.reshape(channels_last.shape).movedim(-1, 1)
        return outputs.contiguous().to(inputs.dtype)

    def keep(self, mean, variance):
        """Move the running statistics towards these, which are the same on every rank."""
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # then the mean over all batches so far
            share = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


def synchronise(model):
    """Make each nn.BatchNorm1d, 2d and 3d in a model a SynchronisedBatchNorm; return the model.

    Only the forward differs, so a layer keeps all that it has, and changes its class. A subclass
    is left as it is: it would lose its own forward.
    """
    for layer in model.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            layer.__class__ = SynchronisedBatchNorm
    return model


def train(model, batches):
    """Train on all ranks; `batches` are (rows, targets), this rank's part of each batch.

    Parts of a batch may have different sizes; the number of batches is the same on all ranks.
    """
    # Wrapping sends rank 0's buffers. As they then stay equal, no forward has to send them.
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
    """Return the mean (C,) with which `rows` (n, C) were normalised to `outputs`, n > 1.

    Solved from outputs = (rows - mean) / scale, at the smallest and the largest row.
    """
    (low, high), (low_output, high_output) = rows.aminmax(dim=0), outputs.aminmax(dim=0)
    return low - (high - low) / (high_output - low_output) * low_output


class Messages(TorchDispatchMode):
    """Writes down the collectives of this rank: type and count of the numbers it hands in."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:  # PyTorch's collectives
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.calls.append((first.dtype, first.numel()))
        return function(*args, **(kwargs or {}))


class Witness:
    """Sees from outside what a model's BatchNorm does, and what the model is after each update."""

    def __init__(self, model):
        self.model, self.layer, self.outputs, self.messages = model, [], [], Messages()
        # Of each step: means of one channel; collectives; and outputs, gradient and state.
        self.used, self.sent, self.steps = [], [], []
        model[1].register_forward_hook(self.after_layer)
        model.register_forward_hook(lambda _, rows, outputs: self.outputs.append(outputs))

    def after_layer(self, layer, rows, outputs):
        normalised = (outputs - layer.bias) / layer.weight
        self.layer.append((rows[0].detach(), normalised.detach()))

    def after_update(self, *_):
        gradient = flat(parameter.grad for parameter in self.model.parameters())
        outputs = torch.cat(self.outputs).detach().cpu()
        used = [mean_used(*one)[0].item() if len(one[0]) > 1 else None for one in self.layer]
        self.used.append(used)
        self.sent.append(self.messages.calls[:])
        self.steps.append((outputs, gradient, state_of(self.model)))
        self.layer.clear(), self.outputs.clear(), self.messages.calls.clear()

    def see(self, training, *args):
        """Call training(*args); return what this rank has seen of it, a dictionary."""
        handle = register_optimizer_step_post_hook(self.after_update)
        with self.messages:
            training(*args)
        handle.remove()
        sent = [*self.sent, self.messages.calls]  # the last is what comes after the last update
        return {"used": self.used, "sent": sent, "steps": self.steps, "state": state_of(self.model)}


def to_rank_0(value):
    """Return on rank 0 what all ranks hand in, a list; elsewhere, None."""
    everyone, buffer = [None] * dist.get_world_size(), io.BytesIO()
    torch.save(value, buffer)  # all at once: pickle would save tensor by tensor, which takes longer
    if dist.get_rank() > 0:
        return dist.gather_object(buffer.getvalue())
    dist.gather_object(buffer.getvalue(), everyone)
    return [torch.load(io.BytesIO(one), weights_only=False) for one in everyone]


def cut_batches(args, world_size, device):
    """Return the whole batches, rows and targets. Every second one is a row per rank smaller."""
    share, batches = args.batch_size // world_size, []
    size, smaller = world_size * share, world_size * max(2, share - 1)
    rows, targets, _ = make_toy(args.seed)
    for step in range(args.steps):
        begin = step % (100 // size) * size
        both = (tensor[begin:][: smaller if step % 2 else size] for tensor in (rows, targets))
        batches.append(tuple(tensor.to(device) for tensor in both))
    return batches


def part_of(batches, rank, world_size, even):
    """Return the rows of this rank in each batch: of equal parts, or of different ones.

    Those are 1, 2, 3 ... shares of a batch; so with 8 ranks, the first one has no row.
    """
    parts = []
    for rows, targets in batches:
        share, ends = len(rows) // world_size, (rank, rank + 1)
        begin, end = (share * n if even else share * n * (n + 1) // (world_size + 1) for n in ends)
        parts.append((rows[begin:end], targets[begin:end]))
    return parts


def see_plain(way, args, place):
    """Train with plain BatchNorm in one of four ways; return what this rank has seen."""
    rank, world_size, device = place
    batches = cut_batches(args, world_size, device)
    model = make_model(nn.BatchNorm1d, args.seed).to(device)
    witness = Witness(model)
    if way == "one process":
        return witness.see(train_alone, model, model, batches)
    if way == "DataParallel":
        forward = functools.partial(data_parallel, model, replicas=world_size)
        return witness.see(train_alone, forward, model, batches)
    replica = DistributedDataParallel(model, forward_sync_buffers=way == "DDP")
    mine = part_of(batches, rank, world_size, even=True)
    return witness.see(train_alone, replica, model, mine)


def see_synchronised(args, place, convert):
    """Train a converted model by `train`, on parts of different sizes; return what was seen.

    The models start apart, which DDP has to mend.
    """
    rank, world_size, device = place
    batches = cut_batches(args, world_size, device)
    model = convert(make_model(nn.BatchNorm1d, args.seed).to(device))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += rank
    seen = Witness(model).see(train, model, part_of(batches, rank, world_size, even=False))
    rows = make_toy(args.seed)[0].to(device)
    with Messages() as messages, torch.no_grad():
        seen["evaluated"] = model.eval()(rows).detach().cpu()
    seen["sent in evaluation"] = messages.calls
    seen["after"] = state_of(model)
    return seen


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
    batches = cut_batches(args, world_size, "cpu")
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
    "images (n, C, h, w)": ({}, (4, 3, 2), F64, 1, 20, 1e-10),
    "signals (n, C, length)": ({}, (4, 3), F64, 1, 20, 1e-10),
    "videos (n, C, time, h, w)": ({}, (4, 2, 3, 2), F64, 1, 5, 1e-10),
    "eps=0.1, momentum=0.3": ({"eps": 0.1, "momentum": 0.3}, (4,), F64, 1, 3, 1e-10),
    "momentum=None": ({"momentum": None}, (4,), F64, 1, 3, 1e-10),
    "one row on rank 0, affine=False": ({"affine": False}, (4,), F64, 1, 1, 1e-10),
    "bias=False": ({"bias": False}, (4,), F64, 1, 3, 1e-10),
    "track_running_stats=False": ({"track_running_stats": False}, (4,), F64, 1, 3, 1e-10),
    "float32, large means": ({}, (4,), F32, 1000, 9, 2e-3),
    "float16": ({}, (4,), F16, 100, 301, 2e-3),
    "bfloat16": ({}, (4,), BF16, 10, 301, 8e-3),
}


def make_layer(name):
    """Return BatchNorm of 4 channels for this case, with numbers that no new layer has."""
    options, shape, *_ = CASES[name]
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    layer = kind(4, **options).double()
    for tensor in layer.state_dict().values():
        tensor += torch.arange(1, 1 + tensor.numel()).view_as(tensor)
    return layer


def use(layer, batches, weights, later):
    """Train a layer of 4 channels on two batches, then evaluate; return all that comes of it."""
    with torch.no_grad():
        layer(batches[0])  # in training, this counts without gradients, too
    inputs = batches[1].clone().requires_grad_()
    outputs = layer(inputs)
    outputs.backward(weights)
    seen = {"outputs": outputs.detach(), "gradient of the inputs": inputs.grad}
    seen["gradient of the parameters"] = flat(parameter.grad for parameter in layer.parameters())
    later = later.clone().requires_grad_()
    evaluation = layer.eval()(later)
    if evaluation.requires_grad:
        evaluation.backward(later.detach())
    seen |= {"evaluation": evaluation.detach(), "gradient in evaluation": flat([later.grad])}
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


def see_case(place, name):
    """Use a converted layer on this rank's rows; return what comes of it."""
    rank, world_size, device = place
    whole, borders = make_case(name, world_size)
    one, two, later, weights = whole.to(device)
    mine = slice(*borders[rank : rank + 2])
    layer = synchronise(make_layer(name).to(device, F64 if one.dtype is F64 else F32))
    return use(layer, (one[mine], two[mine]), weights[mine], later)


def off_in_case(name, everyone):
    """Return how far the ranks are from BatchNorm in one process in this case: {what: how far}."""
    one, two, later, weights = make_case(name, len(everyone))[0].double()
    right = use(make_layer(name), (one, two), weights, later)
    same = {seen["outputs"].dtype for seen in everyone} == {CASES[name][2]}
    off = {"type of the outputs": 0.0 if same else math.inf}
    for what, wanted in right.items():
        theirs = [seen[what] for seen in everyone]
        if what in ("outputs", "gradient of the inputs"):
            theirs = [torch.cat(theirs)]
        elif what == "gradient of the parameters":
            theirs = [sum(theirs)]  # DDP's work
        size = max(1.0, apart(wanted, torch.zeros_like(wanted)))
        off[what] = max_of([apart(part, wanted) for part in theirs]) / size
    return off


def accepted(device):
    """Return what the layer does on this rank, and should refuse: a list of sentences."""
    layer = SynchronisedBatchNorm(4).to(device)
    rows = torch.arange(12.0, device=device).sin().view(3, 4).requires_grad_()
    done = []
    with contextlib.suppress(ValueError):
        layer(rows[: dist.get_rank() == 0])  # one row on rank 0, and none elsewhere
        done.append("the only row of a batch is normalised")
    (gradient,) = torch.autograd.grad(layer(rows).square().sum(), rows, create_graph=True)
    with contextlib.suppress(RuntimeError):
        gradient.sum().backward()
        done.append("a gradient of a gradient is given, which is wrong")
    return done


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
            way: [mean for seen in theirs for means in seen["used"][:1] for mean in means]
            for way, theirs in found.items()
        },
        "kept": {way: [s["1.running_mean"][0].item() for s in kept[way]] for way in found},
        "kept_variance": {way: [s["1.running_var"][0].item() for s in kept[way]] for way in found},
        "plain_diff": max_of(plain),
        "ddp_diff": max_of(ddp_diff),
        "sync_diff": max_of(off),
        "param_change": max_of(moved),
    }


def kept_by_hand(way, everyone):
    """Return what each rank should keep of one channel's mean, from those that it used."""
    kept = [0.0] * len(everyone)
    for used in zip(*(seen["used"] for seen in everyone), strict=False):
        if way == "DDP":
            kept = kept[:1] * len(kept)  # before the forward, rank 0's are sent to all
        kept = [0.9 * old + 0.1 * means[0] for old, means in zip(kept, used, strict=True)]
    return kept


def wrong_in_sent(everyone):
    """Return what is wrong with what the ranks hand in, as one sentence in a list, or none."""
    ints, channels = (torch.int32, torch.int64), 8
    parameters = flat(make_model(nn.BatchNorm1d, 0).parameters()).numel()
    usual = [2 * channels + 1, 2 * channels, parameters]  # the layer's two; and gradients, by DDP
    # Wrapping, DDP sends the model. In two steps it also sends whole numbers, which are left out;
    # later the only one is `train`'s count.
    wanted = [parameters + 2 * channels, *usual], usual, [1, *usual]
    for seen in everyone:
        *steps, after = seen["sent"]
        for step, calls in enumerate(steps):
            sent = [n for dtype, n in calls if step > 1 or dtype not in ints]
            right = wanted[min(step, 2)]
            if sent != right:
                return [f"in step {step + 1}, a rank hands in {sent}, not {right}"]
        if after or seen["sent in evaluation"]:
            return [f"collectives after training: {after + seen['sent in evaluation']}"]
    return []


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
    for way in [*found][:4]:
        pairs = zip(facts["kept"][way], kept_by_hand(way, found[way]), strict=True)
        off = max_of([abs(kept - wanted) for kept, wanted in pairs])
        rules[f"{way}: kept means off those used by {off:.2g}"] = off < 1e-10
    return [sentence for sentence, holds in rules.items() if not holds]


def examine(everyone, args):
    """Return what was measured, and what is wrong, from what each rank has seen, in rank order."""
    wrong = [sentence for theirs in everyone for sentence in theirs.pop("accepted")]
    ways = [name for name in everyone[0] if name not in CASES]
    found = {way: [theirs[way] for theirs in everyone if way in theirs] for way in ways}
    facts = facts_of(found, args, len(everyone))
    wrong += wrong_in_facts(facts, found, args.steps) + wrong_in_sent(found["synchronised"])
    for name in CASES:
        off = off_in_case(name, [theirs[name] for theirs in everyone])
        worst = [what for what in off if not off[what] <= CASES[name][-1]]
        wrong += [f"{name}: {what} off by {off[what]:.2g}" for what in worst]
    return facts, wrong


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = place = join_group()
    alone = ("one process", "DataParallel") if rank == 0 else ()  # they need no ranks
    seen = {way: see_plain(way, args, place) for way in alone}
    seen |= {way: see_plain(way, args, place) for way in ("DDP", "DDP, buffers not sent")}
    seen["synchronised"] = see_synchronised(args, place, synchronise)
    if device.type == "cuda":  # on CPUs, it can't train in a group
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        seen["nn.SyncBatchNorm"] = see_synchronised(args, place, convert)
    seen |= {name: see_case(place, name) for name in CASES} | {"accepted": accepted(device)}
    everyone = to_rank_0(seen)
    verdict = [examine(everyone, args) if rank == 0 else None]
    dist.broadcast_object_list(verdict)
    facts, wrong = verdict[0]
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
    place = f"{numbers['backend']} on {numbers['device']}"
    print(f"{world_size} ranks over {place}; one channel's mean:")
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
    parser.add_argument("--steps", type=whole(1, 10**6), default=24, help="%(default)s")
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
