"""Lesson 17: what does DistributedDataParallel do while backward runs?

It is written here in about 90 lines: rank 0's state goes to all, gradients live in flat buckets,
and a bucket leaves as soon as it and all before it are full, while backward still computes.
The library's DDP trains beside it, on a model with tied weights, a frozen bias, BatchNorm, two
micro-batches a step, and parameters that a rank does not use. Both must leave the same gradients.

Run it:   bash scripts/lesson_17.sh --nproc 2 [--bucket-mb 1]
Or alone: python lessons/lesson_17_ddp_from_scratch.py    (a world of one)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu
    buckets of 1 MiB or a little more: 1,544,256 1,540,224 510,048 bytes
    all-reduces begun before the last gradient was there: 2 of 3
    gradients, largest difference to DDP's: 0 in reverse order, 0 in DDP's order
    PASS OwnDDP's gradients are those of DDP
"""

import argparse
import contextlib
import copy
import json
import os
import sys
from datetime import timedelta
from itertools import chain
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

# --- The technique ---


class OwnDDP(nn.Module):
    """A model whose backward() leaves the mean of all ranks' gradients, as under DDP.

    Wrap the model on its device, on all ranks, before the optimizer takes a step; then call this
    object. A bucket is closed as soon as it has `bucket_mb` MiB. With `find_unused`, parameters
    may get no gradient: on some ranks (then 0 counts), or on all (then .grad stays None).
    """

    def __init__(self, module, bucket_mb=25, find_unused=False):
        super().__init__()
        self.module, self.find_unused = module, find_unused
        self.averaging, self.buffers_differ = True, False
        take_from_rank_0([*module.parameters(), *module.buffers()])
        trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = into_buckets(trained[::-1], bucket_mb * 2**20)  # the last layer is first
        self.names = {p: name for name, p in module.named_parameters()}
        self.bucket_of = {p: n for n, bucket in enumerate(self.buckets) for p in bucket}
        self.flats, self.views = [], {}
        for bucket in self.buckets:
            sizes = [p.numel() for p in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for p, part in zip(bucket, flat.split(sizes), strict=True):
                self.views[p] = part.view_as(p)
            self.flats.append(flat)
        self.backward, self.works = None, []  # the number of this backward, all-reduces begun
        for p in trained:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, *inputs, **named):
        if self.buffers_differ:
            take_from_rank_0([*self.module.buffers()])
        self.buffers_differ = self.averaging and torch.is_grad_enabled()
        return self.module(*inputs, **named)

    def no_sync(self):
        """Return a context in which backward() adds this rank's gradients up, and sends nothing."""
        return NoSync(self)

    def on_gradient(self, p):
        """Autograd calls this when p.grad is complete: begin with each bucket that now is."""
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:  # this is the first gradient in it
            self.wait()  # there is nothing to wait for, unless the last backward has failed
            self.backward, self.missing = backward, [len(bucket) for bucket in self.buckets]
            if self.averaging:  # call finish() at the end
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.keep(p)
        self.missing[self.bucket_of[p]] -= 1
        if not self.averaging:
            return
        for number in range(len(self.works), len(self.buckets)):
            if self.missing[number]:
                break  # and begin with no later one: all ranks keep the same order
            self.begin(number)

    def keep(self, p):
        """Make p.grad a part of its bucket; where there is no gradient, put 0 there."""
        view = self.views[p]
        if p.grad is None:
            view.zero_()
        elif p.grad is not view:  # new, after optimizer.zero_grad()
            view.copy_(p.grad)
            p.grad = view

    def begin(self, number):
        self.flats[number].mul_(1 / dist.get_world_size())  # before the sum, which could overflow
        self.works.append(dist.all_reduce(self.flats[number], async_op=True))

    def finish(self):
        """Autograd calls this at the end of backward(): send what is left, and wait for all."""
        unused = [self.names[p] for p in self.views if p.grad is None]
        if unused and not self.find_unused:
            raise RuntimeError(f"no gradient for {', '.join(unused)}: find_unused=True allows it")
        for p in self.views:
            self.keep(p)
        for number in range(len(self.works), len(self.buckets)):
            self.begin(number)
        if self.find_unused:  # on how many ranks has it a gradient?
            used = [p.grad is not None for p in self.views]
            used = torch.tensor(used, dtype=torch.int32, device=self.flats[0].device)
            self.works.append(dist.all_reduce(used, async_op=True))
        self.wait()
        if self.find_unused:
            for (p, view), ranks in zip(self.views.items(), used.tolist(), strict=True):
                p.grad = view if ranks else None

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []


class NoSync:
    """What OwnDDP.no_sync() returns."""

    def __init__(self, ddp):
        self.ddp = ddp

    def __enter__(self):
        self.before, self.ddp.averaging = self.ddp.averaging, False

    def __exit__(self, *error):
        self.ddp.averaging = self.before


def into_buckets(parameters, limit):
    """Return lists of parameters of one type; each is closed once it has `limit` bytes."""
    filling, closed = {}, []
    for p in parameters:
        kind = p.dtype, p.device
        filling.setdefault(kind, []).append(p)
        if sum(other.nbytes for other in filling[kind]) >= limit:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())  # at last, what has not reached the limit


def take_from_rank_0(tensors):
    """Overwrite these tensors with those of rank 0: one broadcast, and copy, for each type."""
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t.detach() for t in tensors if (t.dtype, t.device) == kind]
        flat = torch.cat([t.flatten() for t in alike])
        dist.broadcast(flat, src=0)
        for t, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(part.view_as(t))


# --- The proof ---

WIDTH = 252  # of two layers, the MiB is not full; 10**6 bytes would be


class Model(nn.Module):
    """One weight in the first and the last layer, a frozen bias, BatchNorm.

    The last layer is registered first, as it happens: then the order of registration, turned
    round, is not that in which gradients come.
    """

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight = self.last.weight
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(6))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, rows):
        rows = self.first(rows)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            rows = relu(norm(block(rows)))
        return self.last(rows)


class Branches(nn.Module):
    """Two layers of the same size that are called in either order, or not at all.

    A third one is never called.
    """

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)  # in the last bucket, which holds no other one up
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows, names=()):
        rows = torch.tanh(self.trunk(rows))
        for name in names:
            rows = torch.tanh(getattr(self, name)(rows))
        return rows


class TwoTypes(nn.Module):
    """A parameter in float16, and one in float64."""

    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, factor):
        return (self.small * factor).sum().double() + (self.wide * factor).sum()


class Messages(TorchDispatchMode):
    """Writes down each collective that this rank calls: [(name, bytes that it hands in)]."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves(args)
            nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.calls.append((function._schema.name.split("::")[-1].rstrip("_"), nbytes))
        return function(*args, **(kwargs or {}))


all_reduce = dist.all_reduce  # the library's


class Late:
    """Stands in for dist.all_reduce: the sum arrives when somebody waits for it, nan before.

    `calls`: how many begin in a step. `blocking`: how many of them, or of the waits, held the rank
    up before all had begun. `events`, a list, gets "sent" for each call.
    """

    def __init__(self, calls, events=None):
        self.calls, self.begun, self.blocking = calls, 0, 0
        self.events = [] if events is None else events

    def __call__(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self.begun += 1
        self.events.append("sent")
        self.blocking += not async_op and self.begun % self.calls != 0
        if not async_op:
            return all_reduce(tensor, op, group)
        sent = tensor.clone()
        work = all_reduce(sent, op, group, async_op=True)
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        return Handle(self, work, sent, tensor)


class Handle:
    """What Late gives back, to wait for."""

    def __init__(self, late, work, sent, tensor):
        self.late, self.work, self.sent, self.tensor = late, work, sent, tensor

    def wait(self, timeout=None):
        self.late.blocking += self.late.begun % self.late.calls != 0
        self.work.wait()
        self.tensor.copy_(self.sent)
        return True


def make(kind, seed, device):
    """Return a model in float64; with another seed, other parameters and buffers."""
    torch.manual_seed(seed)
    model = kind().double().to(device)
    for buffer in model.buffers():
        buffer.add_(seed)
    return model


def make_micro_batches(args, device):
    """Return [step][micro-batch]: this rank's rows, named arguments, what to make of the rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(args.seed)
    shape = args.steps, 2, args.batch_size // 2, WIDTH
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    mine = rows[:, :, rank::world_size].to(device)
    return [[(part, {}, part.flip(1)) for part in step] for step in mine]


def wrap_with_ddp(model, batch, args):
    """Return (DDP, its parameters in the order of its buckets, the bytes of those).

    It has seen three steps: it has sorted its buckets anew, and says so. The model is as before.
    """
    before = copy.deepcopy(model.state_dict())
    replica = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    for _ in range(3):
        mse_loss(replica(batch[0]), batch[2]).backward()
        replica.zero_grad()
    model.load_state_dict(before)
    told = replica._get_ddp_logging_data()
    numbers = told["rebuilt_per_bucket_param_indices"].replace(",", "").split()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    sizes = [int(size) for size in told["rebuilt_bucket_sizes"].split(",")]
    return replica, [trained[int(number)] for number in numbers], sizes


def wrap_with_own(model, args, order=None):
    """Return OwnDDP of a model; with `order`, names, its buckets have the parameters in it."""
    if order is None:
        return OwnDDP(model, args.bucket_mb)
    named = dict(model.named_parameters())
    others = [p for name, p in named.items() if name not in order]
    listed = [*others, *(named[name] for name in reversed(order))]
    with patch.object(model, "parameters", lambda recurse=True: iter(listed)):
        return OwnDDP(model, args.bucket_mb)


def step(replica, micro_batches, watch=Messages, events=None):
    """Make a step's gradients, and send them with the last micro-batch; return what was sent.

    That is a list for each forward and each backward; `events` are emptied before each. DDP is not
    watched: in a world of one its C++ code can hang under a dispatch mode.
    """
    sent = []
    for number, (rows, named, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            with contextlib.nullcontext() if last else replica.no_sync():
                pass  # leaving the inner one must not end the outer one
            with watch() as forward:
                loss = mse_loss(replica(rows, **named), targets)
            events and events.clear()
            with watch() as backward:
                loss.backward()
        sent += [forward, backward]
    return [list(mode.calls) for mode in sent if mode]


def gradients_of(model):
    """Return a list that gets each parameter of a model when it has its gradient."""
    events = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(events.append)
    return events


def too_late(events, buckets):
    """Return how many gradients of a backward came while a full bucket, next in turn, was here."""
    ready, sent, found = set(), 0, 0
    for event in events:
        if isinstance(event, str):
            sent += 1
            continue
        found += sent < len(buckets) and ready.issuperset(buckets[sent])
        ready.add(event)
    return found


def apart(ones, others):
    """Return the largest difference between two lists of tensors."""
    pairs = zip(ones, others, strict=True)
    return torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max().item()


def difference(one, other):
    """Return the largest difference of a gradient; inf where only one of the models has it."""
    grads = [[p.grad for p in model.parameters()] for model in (one, other)]
    if [g is None for g in grads[0]] != [g is None for g in grads[1]]:
        return torch.inf
    return apart(*([g for g in theirs if g is not None] for theirs in grads))


def largest(model):
    """Return the largest number in a model's gradients: rounding is a part of that."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack([grad.double().abs().max() for grad in grads]).max().item()


def equal(one, other):
    """Return whether the gradients of two models are equal, but for rounding."""
    return difference(one, other) <= 1e-12 * largest(other)


def storages(model):
    """Return the bytes of each piece of memory in which gradients lie."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    pieces = [grad.untyped_storage() for grad in grads]
    return list({piece.data_ptr(): piece.nbytes() for piece in pieces}.values())


class Watched:
    """An OwnDDP of Model, trained beside DDP's, `theirs`; in `facts` what this rank has seen."""

    def __init__(self, args, device, theirs, order):
        self.model, self.theirs = make(Model, dist.get_rank() + 1, device), theirs
        self.events = gradients_of(self.model)  # first: these hooks come before OwnDDP's
        with Messages() as wrapping:
            self.own = wrap_with_own(self.model, args, order)
        self.late = Late(len(self.own.buckets), self.events)
        self.facts = {"wrapping": wrapping.calls, "sent": [], "off": [], "buffers": [], "late": 0}
        state, others = self.model.state_dict(), theirs.state_dict()
        self.facts["start"] = apart(state.values(), others.values())

    def step(self, micro_batches):
        """Make a step's gradients, and compare them with DDP's."""
        self.model.zero_grad()
        with patch.object(dist, "all_reduce", self.late):
            self.facts["sent"].append(step(self.own, micro_batches, Messages, self.events))
        self.facts["late"] += too_late(self.events, self.own.buckets)
        self.facts["off"].append(difference(self.model, self.theirs))
        self.facts["buffers"].append(apart(self.model.buffers(), self.theirs.buffers()))

    def seen(self, rows):
        """Return all facts, after two more forward passes, in which the model is evaluated."""
        facts = self.facts | {"blocking": self.late.blocking, "evaluating": []}
        facts |= {name: torch.tensor(facts[name]).max().item() for name in ("off", "buffers")}
        sends = [isinstance(event, str) for event in self.events]
        last = max(n for n, sent in enumerate(sends) if not sent)
        facts |= {"all_reduces": sum(sends), "overlapped": sum(sends[:last])}
        self.own.eval()
        for _ in range(2):
            with Messages() as messages, torch.no_grad():
                self.own(rows)
            facts["evaluating"].append(messages.calls)
        return facts | {"memory": storages(self.model)}


def compare(args, device, batches):
    """Train with DDP and with OwnDDP in both orders; return {order: what this rank has seen}."""
    theirs, highest = make(Model, 1, device), 0.0
    ddp, order, sizes = wrap_with_ddp(theirs, batches[0][0], args)
    orders = {"in reverse order": None, "in DDP's order": order}
    watched = {name: Watched(args, device, theirs, names) for name, names in orders.items()}
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for micro_batches in batches:
        optimizer.zero_grad()
        step(ddp, micro_batches, contextlib.nullcontext)
        highest = max(highest, largest(theirs))
        for each in watched.values():
            each.step(micro_batches)
        optimizer.step()
        for each in watched.values():  # what it rounds differently is that of one step, not of all
            each.model.load_state_dict(theirs.state_dict())
    shared = {"sizes": sizes, "largest": highest}
    return {name: each.seen(batches[0][0][0]) | shared for name, each in watched.items()}


def bytes_by_type(tensors):
    """Return the bytes of these tensors, one number for each type, in the order of their coming."""
    found = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
    return list(found.values())


def wrong_in_messages(facts, in_ddps_order):
    """Return what is wrong with what one rank has sent: a list of sentences."""
    model = Model().double()
    state, trained = [*model.parameters()], [p for p in model.parameters() if p.requires_grad]
    state = [("broadcast", n) for n in bytes_by_type([*state, *model.buffers()])]
    buffers = [("broadcast", n) for n in bytes_by_type(model.buffers())]
    forwards = [sent[0] for sent in facts["sent"]]
    quiet = list(chain(*(sent[1] + sent[2] for sent in facts["sent"])))
    backwards = [sent[3] for sent in facts["sent"]]
    total, sizes = sum(p.nbytes for p in trained), facts["sizes"]
    right = all(sum(n for _, n in calls) == total for calls in backwards)
    counts = {len(calls) for calls in backwards}
    same = all(calls == [("allreduce", n) for n in sizes] for calls in backwards)
    rules = {
        f"wrapping sends {facts['wrapping']}, not {state}": facts["wrapping"] == state,
        f"forward sends not just {buffers}, once a step": forwards[1:]
        == [buffers] * len(forwards[1:])
        and forwards[0] in ([], buffers),
        f"evaluating sends {facts['evaluating']}, not {buffers} once": facts["evaluating"]
        == [buffers, []],
        f"under no_sync, or in a later forward, it sends {quiet[:2]}": not quiet,
        f"all-reduces in a step: {sorted(counts)}; DDP has {len(sizes)}": counts == {len(sizes)},
        f"a step hands in not just {total:,} bytes of gradients": right,
        "its buckets have not the sizes of DDP's": same or not in_ddps_order,
        "gradients do not live in the buckets": sum(facts["memory"]) == total
        and len(facts["memory"]) == len(sizes),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


# What ranks call in turn: the layers of Branches in each of two micro-batches, by rank.
BOTH, SWAPPED, ONE = ("one", "other"), ("other", "one"), ("one",)
CASES = {
    "unused on all ranks": lambda rank: [ONE] * 2,
    "called in another order on each rank": lambda rank: [(BOTH, SWAPPED)[rank % 2]] * 2,
    "unused but on rank 0": lambda rank: [(ONE, BOTH)[rank == 0]] * 2,
    "unused in the last micro-batch": lambda rank: [BOTH, ONE],
    "used again": lambda rank: [BOTH] * 2,
}


def wrong_in_cases(batch, device):
    """Return what is wrong where ranks use other layers, or in another order: a list."""
    model, theirs = make(Branches, dist.get_rank() + 1, device), make(Branches, 1, device)
    events = gradients_of(model)
    own, wrong = OwnDDP(model, 0.25, find_unused=True), []
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=0.25, find_unused_parameters=True)
    late = Late(len(own.buckets) + 1, events)  # one more: who has used what
    for case, layers in CASES.items():
        micro_batches = [
            (batch[0], {"names": names}, batch[2]) for names in layers(dist.get_rank())
        ]
        for each in (model, theirs):
            each.zero_grad()
        with patch.object(dist, "all_reduce", late):
            sent = step(own, micro_batches, Messages, events)[3]
        step(ddp, micro_batches, contextlib.nullcontext)
        rules = {
            f"off by {difference(model, theirs):.2g}": equal(model, theirs),
            f"{len(sent)} messages in backward": len(sent) == len(own.buckets) + 1,
            "a full bucket does not leave at once": not too_late(events, own.buckets),
            "backward waits before all have left": not late.blocking,
        }
        wrong += [f"a layer {case}: {found}" for found, holds in rules.items() if not holds]
    return wrong


def wrong_after_errors(batch, device):
    """Return what is wrong after errors in no_sync, in backward and at its end: a list."""
    model, theirs = make(Branches, 1, device), make(Branches, 1, device)
    for each in (model, theirs):
        each.spare.requires_grad_(False)
    own, ddp = OwnDDP(model, 0.25), DistributedDataParallel(theirs, bucket_cap_mb=0.25)
    wrong, (rows, _, targets) = [], batch
    with contextlib.suppress(ValueError), own.no_sync():
        raise ValueError
    own.no_sync()  # not entered, so it does nothing
    with patch.object(dist, "all_reduce", Late(len(own.buckets))):
        try:  # all ranks leave out a layer: nothing has been sent when it is found
            mse_loss(own(rows, ONE), targets).backward()
            wrong.append("there is no error for a parameter without gradient")
        except RuntimeError as error:
            if "other.weight" not in str(error) or "one.weight" in str(error):
                wrong.append(f"the error does not name the right parameters: {error}")
        model.zero_grad()
        hook = model.trunk.register_forward_hook(let_backward_fail)
        with contextlib.suppress(ValueError):  # all ranks, when some buckets have left
            mse_loss(own(2 * rows, BOTH), targets).backward()
        hook.remove()
        model.zero_grad()
        mse_loss(model(rows, BOTH), targets).backward()  # not called through the wrapper
    mse_loss(ddp(rows, BOTH), targets).backward()
    off = difference(model, theirs)
    return wrong if equal(model, theirs) else [*wrong, f"after errors, it is off by {off:.2g}"]


def wrong_in_float16(device):
    """Return what is wrong with parameters of two types, and a sum that one can't hold: a list."""
    model = TwoTypes().to(device)
    try:
        OwnDDP(model)(60_000).backward()
    except RuntimeError as error:
        return [f"with two types of parameters: {error}"]
    mean = torch.cat([p.grad.double() for p in model.parameters()])
    right = (mean - 60_000).abs().max() < 100
    return [] if right else [f"float16 and float64: a mean of 60,000 is {mean.tolist()}"]


def let_backward_fail(module, inputs, output):
    """Raise an error when backward comes to this layer."""

    def fail(gradient):
        raise ValueError("in backward")

    output.register_hook(fail)


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def wrong_in_comparison(facts, in_ddps_order, exact):
    """Return what is wrong with what one rank has seen beside DDP: a list of sentences."""
    limit = 0.0 if exact else 1e-12 * facts["largest"]
    rules = {
        "the replicas do not start from rank 0's state": facts["start"] == 0.0,
        f"gradients are off by {facts['off']:.2g}": facts["off"] <= limit,
        f"buffers are off by {facts['buffers']:.2g}": facts["buffers"] <= limit,
        "backward waits before all buckets have left": facts["blocking"] == 0,
        "a full bucket does not leave at once": facts["late"] == 0,
    }
    wrong = [sentence for sentence, holds in rules.items() if not holds]
    return wrong + wrong_in_messages(facts, in_ddps_order)


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    numbers = {"lesson": 17, "world_size": world_size, "backend": dist.get_backend()}
    batches, wrong = make_micro_batches(args, device), []
    found = compare(args, device, batches)
    for name, facts in found.items():
        ordered = name == "in DDP's order"
        exact = ordered or world_size <= 2
        wrong += [f"{name}: {what}" for what in wrong_in_comparison(facts, ordered, exact)]
    wrong += wrong_in_cases(batches[0][0], device) + wrong_after_errors(batches[0][0], device)
    wrong += wrong_in_float16(device)
    off = {name: max(from_all_ranks(facts["off"])) for name, facts in found.items()}
    wrong = list(dict.fromkeys(chain(*from_all_ranks(wrong))))
    dist.destroy_process_group()
    numbers |= {"device": device.type, "max_grad_diff_to_ddp": off, "buckets": facts["sizes"]}
    numbers |= {name: facts[name] for name in ("all_reduces", "overlapped")}
    numbers |= {"bytes_sent": sum(facts["sizes"])}
    if rank == 0:
        report(numbers, args)
    return not wrong, "; ".join(["OwnDDP's gradients are those of DDP", *wrong]), numbers


def report(numbers, args):
    """Print what a reader wants to know."""
    print(f"ranks: {numbers['world_size']}, over {numbers['backend']} on {numbers['device']}")
    sizes = " ".join(f"{size:,}" for size in numbers["buckets"])
    print(f"buckets of {args.bucket_mb} MiB or a little more: {sizes} bytes")
    begun = f"{numbers['overlapped']} of {numbers['all_reduces']}"
    print(f"all-reduces begun before the last gradient was there: {begun}")
    told = ", ".join(
        f"{value:.3g} {name}" for name, value in numbers["max_grad_diff_to_ddp"].items()
    )
    print(f"gradients, largest difference to DDP's: {told}")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(2, 1000), default=4, help="%(default)s")
    size = {"type": whole(8, 10**5), "default": 64}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    megabytes = {"type": whole(1, 1000), "default": 1}
    parser.add_argument("--bucket-mb", **megabytes, help="MiB, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size < 8 * world_size:
        parser.error(
            f"argument --batch-size: must be at least {8 * world_size}, eight for each rank"
        )
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
