"""Lesson 18: if no rank can keep the whole model with its optimizer, who keeps what?

DDP keeps on every rank what all ranks have alike. Sharding (ZeRO) deals it out, in three stages:
the optimizer's state, then the gradients, then the parameters, which are gathered block by block
while a block computes, and freed. Adam's numbers are DDP's; kept and sent bytes are the formulas'.

Run it:   bash scripts/lesson_18.sh --nproc 2 [--stage 1|2|3]
Or alone: python lessons/lesson_18_sharding.py    (a world of one)

Output to expect on a CPU:

    stage 3, 2 ranks, over gloo on cpu: 113,182 parameters in 6 modules, 8 bytes each
    parameters  a rank keeps   452,744 bytes, and has   452,744 at most
    gradients   a rank keeps   452,744 bytes, and has   677,000 at most
    optimizer   a rank keeps   905,512 bytes, and has   905,512 at most
    gathered    a rank keeps         0 bytes, and has   225,408 at most
    together    at most 2,260,664 bytes; DDP keeps 3,621,824; the activations are not in it
    sent in a step: reduce_scatter 452,744 bytes, all_gather 905,488 bytes
    PASS after 5 steps of Adam off by ... from DDP; kept and sent as by the formulas
"""

import argparse
import copy
import functools
import json
import os
import sys
import time
import weakref
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --- The technique ---


def reduce_scatter(flat):
    """Add up `flat` over the ranks, by a ring; leave this rank's part of the sum in its place.

    The other parts are used up. Each rank sends n - 1 of n parts, to the next rank only.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = flat.chunk(ranks)
    received = torch.empty_like(parts[0])
    for turn in range(1, ranks):
        send = dist.P2POp(dist.isend, parts[rank - turn], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        parts[rank - turn - 1].add_(received)  # in the last turn: this rank's own part


class Sharded:
    """One module, whose parameters lie one after the other in a flat tensor, cut into n parts.

    `shard` is this rank's part, the only one that its optimizer knows. By stage, a rank keeps of
    the parameters, gradients and Adam's averages: 1: all, all, a part; 2: all, a part, a part;
    3: a part of each. A forward calls the module once; it returns one tensor, uses all of its
    parameters, and shares none with another module.
    """

    def __init__(self, module, stage):
        self.stage, self.parameters = stage, list(module.parameters())
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        count = sum(parameter.numel() for parameter in self.parameters)
        self.length = -(-count // self.ranks)  # of a part: rounded up, so the last parts are padded
        self.flat = self.parameters[0].detach().new_zeros(self.ranks * self.length)
        for parameter, view in self.views(self.flat):
            view.copy_(parameter.detach())
            parameter.data = view  # from now on, a window of the flat tensor
            parameter.register_post_accumulate_grad_hook(self.after_gradient)
        dist.broadcast(self.flat, 0)  # all ranks begin with the model of rank 0
        mine = self.mine(self.flat)
        self.shard = nn.Parameter(mine.clone() if stage == 3 else mine)  # stage 1, 2: a window too
        self.gradient, self.missing = None, 0
        module.register_forward_hook(self.after_forward)
        if stage == 3:
            self.free()
            module.register_forward_pre_hook(lambda *_: self.gather())

    def views(self, flat):
        """Return each parameter with its window in `flat`, which has the parameter's shape."""
        begin, pairs = 0, []
        for parameter in self.parameters:
            window = flat[begin : begin + parameter.numel()]
            pairs.append((parameter, window.view(parameter.shape)))
            begin += parameter.numel()
        return pairs

    def mine(self, flat):
        return flat[self.rank * self.length : (self.rank + 1) * self.length]

    def gather(self):
        """Put the parts of all ranks into the flat tensor."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_single(self.flat, self.shard.detach())

    def free(self):
        """Give the memory back. The parameters keep their shape, and have no numbers."""
        self.flat.untyped_storage().resize_(0)

    def after_forward(self, module, inputs, output):
        if self.stage == 3:
            self.free()
        if output.requires_grad:  # when backward comes to this module:
            output.register_hook(self.before_backward)

    def before_backward(self, _):
        if self.stage == 3:
            self.gather()
        if self.gradient is None:
            self.gradient = self.shard.detach().new_zeros(self.ranks * self.length)
            for parameter, view in self.views(self.gradient):
                parameter.grad = view  # autograd adds to what is there
        self.missing = len(self.parameters)

    def after_gradient(self, _):
        self.missing -= 1
        if self.missing == 0 and self.stage > 1:  # the last one of this module
            self.reduce()
            if self.stage == 3:
                self.free()

    def reduce(self):
        """Leave in shard.grad this rank's part of the mean of all ranks' gradients."""
        reduce_scatter(self.gradient)
        mine = self.mine(self.gradient).div_(self.ranks)
        if self.shard.grad is not None:
            self.shard.grad += mine  # accumulation: several backwards before an update
        else:
            self.shard.grad = mine if self.stage == 1 else mine.clone()
        self.gradient = None
        if self.stage > 1:  # stage 1 keeps the whole until zero_grad; shard.grad is a window of it
            for parameter in self.parameters:
                parameter.grad = None


def train(model, batches, stage, pieces=1):
    """Train on all ranks with Adam; each takes every n-th row of a batch, in equal pieces."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    units = [Sharded(module, stage) for module in (model.embed, *model.blocks, model.head)]
    optimizer = torch.optim.Adam([unit.shard for unit in units])  # after the cut
    for rows, targets in batches:
        optimizer.zero_grad()
        model.zero_grad()  # stage 1: the whole gradients, too
        mine = zip(rows[rank::ranks].chunk(pieces), targets[rank::ranks].chunk(pieces), strict=True)
        for some, answers in mine:  # more than one: their gradients are accumulated
            loss = mse_loss(model(some), answers) / pieces
            loss.backward()
        if stage == 1:
            for unit in units:
                unit.reduce()
        optimizer.step()
        if stage < 3:
            for unit in units:
                unit.gather()  # stage 3 does it when a module computes


# --- The model: lesson 13's transformer, with more blocks, and sizes that no rank count divides ---

HEADS, HEAD_WIDTH, HIDDEN, BLOCKS = 12, 4, 191, 4
TOKENS, NUMBERS, WIDTH = 8, 5, HEADS * HEAD_WIDTH


class Attention(nn.Module):
    """Each token looks at all tokens of its row, with HEADS heads."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = [
            layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value)
        ]
        query, key, value = (part.transpose(1, 2) for part in parts)  # (rows, heads, tokens, 4)
        mixed = scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, and a GELU between them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP; each reads a normalised copy of x, and adds to x."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Rows of 8 tokens with 5 numbers each in, (rows, 8, 5), two numbers for each row out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(NUMBERS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, rows):
        return self.head(self.blocks(self.embed(rows)).mean(1))


# --- The proof ---

KINDS = ("parameters", "gradients", "optimizer", "gathered")


class Memory(TorchDispatchMode):
    """Sees all memory of tensors that lives on this rank, and all that it sends.

    It asks no class what it keeps. It knows every storage that an operation has returned, and
    writes down when it comes, changes its size and goes. What the optimizer updates is
    `parameters`, its state `optimizer`; what was ever a .grad is `gradients`; where else a layer
    found its parameters is `gathered`; the rest is `besides`: activations and buffers.
    """

    def __init__(self, model, *given):
        super().__init__()
        self.paused, self.updates, self.given, self.updated = False, 0, set(), 0
        self.storages, self.kinds = {}, {}  # by number: weak reference; [kind], [bytes]
        self.events, self.calls, self.steps = [], [], []
        self.meet(None, given)
        self.given, self.events = set(self.storages), []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.after_gradient)
        model.register_forward_pre_hook(self.between)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and any(map(is_freed, tree_leaves([args, kwargs]))):
            raise RuntimeError(f"{function._schema.name} would read parameters that are freed")
        result = function(*args, **(kwargs or {}))
        if not self.paused:
            self.meet(None, tree_leaves(result))
            if function.namespace == "c10d":
                self.events.append("call")
                self.calls.append(handed_over(function, args))
        return result

    def meet(self, kind, things):
        """Get to know the storages of these tensors, or what they are."""
        for tensor in things:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                number = storage._cdata
                if number not in self.storages:
                    gone = functools.partial(self.change, number, 0)
                    self.storages[number] = weakref.ref(storage, gone)
                    self.kinds[number] = [None], [0]
                    self.change(number, storage.nbytes())
                if kind not in (None, "gathered") or not self.kinds[number][0][0]:
                    self.kinds[number][0][0] = kind

    def change(self, number, nbytes, reference=None):
        """Write down that a storage has another size now, or is gone."""
        if number in self.kinds:
            kind, size = self.kinds[number]
            if number not in self.given:
                self.events.append((kind, nbytes - size[0]))
            size[0] = nbytes
            if reference is not None:
                del self.storages[number], self.kinds[number]

    def after_gradient(self, parameter):
        self.meet("gradients", [parameter.grad])
        self.events.append("computed")

    def after_update(self, optimizer, *_):
        """Learn from the optimizer what it keeps, and of which parameters."""
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        self.meet("parameters", updated)
        self.meet("gradients", (parameter.grad for parameter in updated))
        self.meet("optimizer", tree_leaves([list(optimizer.state[p].values()) for p in updated]))
        self.updates, self.optimizer = self.updates + 1, optimizer  # it lives until all is seen
        self.updated = sum(parameter.numel() for parameter in updated)
        self.events.append("kept")  # here, between two steps, is what a rank keeps

    def between(self, *_):
        """End a step, at the beginning of the first forward after the update."""
        if len(self.steps) == self.updates:
            self.steps.append((self.events, self.calls))
            self.events, self.calls = [], []


def is_freed(leaf):
    """Return whether this is a tensor with numbers whose memory is gone."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.untyped_storage().nbytes()


def replay(steps):
    """Return (what lives after each update, the most in a step); steps[0] is what was before.

    `most` has, too, the largest `piece` of what is besides; how much has come `beside a call` since
    a layer or a gradient was computed; and all that lived in the `setup`, before the first step.
    """
    now = dict.fromkeys((*KINDS, "besides", "together"), 0)
    kept, most, before = [], now | {"piece": 0, "beside a call": 0, "setup": 0}, 0
    for number, (events, _) in enumerate(steps):
        for event in events:
            if event == "kept":
                kept.append(now.copy())
            elif event == "computed":
                before = now["besides"]
            elif event == "call":
                most["beside a call"] = max(most["beside a call"], now["besides"] - before)
            else:
                (kind,), nbytes = event
                now[kind or "besides"] += nbytes
                now["together"] += nbytes if kind else 0
                if number:
                    most |= {name: max(now[name], most[name]) for name in now}
                    most["piece"] = max(most["piece"], 0 if kind else nbytes)
                else:
                    most["setup"] = max(most["setup"], now["together"] + now["besides"])
    return kept, most


def handed_over(function, args):
    """Return (what it is, bytes that this rank sends); an all-gather sends by a ring, too."""
    rank, ranks, name = dist.get_rank(), dist.get_world_size(), function._schema.name
    if name == "c10d::send" and args[2] == (rank + 1) % ranks:
        return "reduce_scatter", args[0][0].nbytes
    if name == "c10d::_allgather_base_":
        return "all_gather", (ranks - 1) * args[1].nbytes
    return name, 0


def formulas(counts, ranks, stage, pieces=1):
    """Return what a rank keeps, has at most, and sends in a step; counts: parameters by module."""
    parts = [-(-count // ranks) for count in counts]
    wholes, part, biggest = [ranks * part for part in parts], sum(parts), max(parts) * ranks
    kept = {"parameters": part if stage == 3 else sum(wholes)}
    kept |= {"gradients": sum(wholes) if stage == 1 else part, "optimizer": 2 * part, "gathered": 0}
    peak = kept | {"gathered": biggest if stage == 3 else 0}
    together, lasting = [sum(kept.values())], kept["parameters"] + kept["optimizer"]
    if stage > 1:  # backward comes to the first module last
        done = [sum(parts[i:] if pieces == 1 else parts) for i in range(len(parts))]
        grads = [whole + own for whole, own in zip(wholes, done, strict=True)]
        peak["gradients"] = max(grads)
        together += [lasting + g + w * (stage == 3) for g, w in zip(grads, wholes, strict=True)]
    peak["together"] = max(together)
    kept, peak = ({kind: 8 * n for kind, n in numbers.items()} for numbers in (kept, peak))
    for numbers, kind in ((kept, "optimizer"), (peak, "optimizer"), (peak, "together")):
        numbers[kind] += 4 * len(parts)  # Adam counts its steps, in float32
    once = (ranks - 1) * part * 8
    reduced, gathered = (1, 1) if stage == 1 else (pieces, 1 if stage == 2 else 2 * pieces)
    return kept, peak, {"reduce_scatter": once * reduced, "all_gather": once * gathered}


def make_problem(seed, steps, batch_size):
    """Return (batches, model) in float64. Each rank has another model; rank 0's is to be trained.

    The batches are the same on every rank, and what there is to learn is linear.
    """
    torch.manual_seed(seed)
    rows = torch.randn(steps, batch_size, TOKENS, NUMBERS, dtype=torch.float64)
    targets = rows.mean(2) @ torch.randn(NUMBERS, 2, dtype=torch.float64)
    torch.manual_seed(seed + dist.get_rank())
    return list(zip(rows, targets, strict=True)), Transformer().double()


def train_with_ddp(model, batches):
    """Train with DDP, which keeps all; return the parameters, {name: numbers}, by update."""
    rank, ranks, states = dist.get_rank(), dist.get_world_size(), []
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    for rows, targets in batches:
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
        optimizer.zero_grad()
        mse_loss(replica(rows[rank::ranks]), targets[rank::ranks]).backward()
        optimizer.step()
    return [*states, dict(model.named_parameters())]


def compare_in_forward(model, memory, states):
    """Return a list: how far what the layers compute with is from DDP's parameters, by forward."""
    off = [0.0] * len(states)

    def after_layer(name, layer):
        memory.paused, now = True, len(memory.steps) - 1
        for own, parameter in layer.named_parameters(recurse=False):
            memory.meet("gathered", [parameter])
            right = states[now][f"{name}.{own}"] if now < len(states) else torch.nan
            distance = (parameter.detach() - right).abs().max().item()
            off[now] = max(off[now], distance) if distance == distance else torch.inf
        memory.paused = False
        memory.events.append("computed")

    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda layer, *_, name=name: after_layer(name, layer))
    return off


def most_when_plain(model, rows, targets):
    """Return the most bytes, by kind, of a forward and backward where nothing is sharded."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Memory(model, rows, targets) as memory:
        mse_loss(model(rows), targets).backward()
    return replay([*memory.steps, (memory.events, [])])[1]


def spoiled(resize, memory):
    """Return Storage.resize_ that leaves no right number where memory goes, or comes."""

    def resize_and_spoil(storage, size):
        storage.fill_(255)  # not a number
        resize(storage, size)
        memory.change(storage._cdata, size)
        return storage.fill_(255)

    return resize_and_spoil


def watch(model, batches, stage, pieces, states):
    """Train in this stage; return (what Memory has seen, how far off by forward, error or None)."""
    memory, problem = Memory(model, *(part for batch in batches for part in batch)), None
    off = compare_in_forward(model, memory, states)
    resize, rows = spoiled(torch.UntypedStorage.resize_, memory), batches[0][0]
    handle = register_optimizer_step_post_hook(memory.after_update)
    try:
        with memory, patch.object(torch.UntypedStorage, "resize_", resize):
            train(model, batches, stage, pieces)
            with torch.no_grad():
                model(rows[: len(rows) // pieces // dist.get_world_size()])  # the updated numbers?
            memory.events.append("kept")  # also without backward, nothing stays
    except Exception as error:
        if not all_have_failed():
            raise  # the other ranks wait for this one
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    handle.remove()
    return memory, off, problem


def all_have_failed():
    """Return whether all ranks call this within a minute; it needs no collective."""
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    calls = store.add("calls of all_have_failed", 1)
    wanted = -(-calls // ranks) * ranks
    for _ in range(600):
        if store.add("calls of all_have_failed", 0) >= wanted:
            return True
        time.sleep(0.1)
    return False


def measure(rank, ranks, device, stage, steps, batch_size=24, pieces=1, seed=0):
    """Train with DDP and in this stage, and watch; return the facts of this rank."""
    batches, model = make_problem(seed, steps, batch_size)
    batches = [tuple(part.to(device) for part in batch) for batch in batches]
    replica, plain = (copy.deepcopy(model).to(device) for _ in range(2))
    states = train_with_ddp(replica, batches)
    rows, targets = (part[rank::ranks].chunk(pieces)[0] for part in batches[0])
    facts = {"plain": most_when_plain(plain, rows, targets)}
    facts["crumbs"] = 100 + 4 * targets.nbytes  # the last loss, and what it was made of
    memory, off, problem = watch(model.to(device), batches, stage, pieces, states)
    moved = [(states[-1][name] - before).abs().max().item() for name, before in states[0].items()]
    facts |= {"off": off, "problem": problem, "moved": max(moved), "updates": memory.updates}
    facts["updated"] = memory.updated
    return facts | what_was_seen(memory)


def modules_of(model):
    """Return the number of parameters of each module that is gathered by itself."""
    modules = model.embed, *model.blocks, model.head
    return [sum(parameter.numel() for parameter in module.parameters()) for module in modules]


def what_was_seen(memory):
    """Return what this rank kept between steps, had at most inside one, and sent in each."""
    kept, peak = replay([*memory.steps, (memory.events, [])])
    setup, *steps = memory.steps or [([], [])]
    sent = [{} for _ in steps]
    for (_, calls), by_name in zip(steps, sent, strict=True):
        for name, nbytes in calls:
            by_name[name] = by_name.get(name, 0) + nbytes
    return {"kept": kept, "peak": peak, "sent": sent, "setup": {name for name, _ in setup[1]}}


def wrong_in_memory(facts, kept, peak, part, ranks):
    """Return what is wrong with what one rank has; `part`: bytes of the largest part."""
    wrong, has, plain = [], facts["peak"], facts["plain"]
    for now in facts["kept"]:
        pairs = [(kind, now[kind], kept[kind]) for kind in KINDS]
        wrong += [f"keeps {a:,} bytes of {kind}, not {b:,}" for kind, a, b in pairs if a != b]
        if now["besides"] > facts["crumbs"]:
            wrong.append(f"keeps {now['besides']:,} bytes that are nothing of these")
    pairs = [(kind, has[kind], peak[kind]) for kind in peak]
    wrong += [f"has {a:,} bytes of {kind} at a time, not {b:,}" for kind, a, b in pairs if a != b]
    rooms = {"besides": plain["besides"] + part, "piece": max(plain["piece"], part)}
    rooms["beside a call"] = plain["piece"] + part  # the ring receives a part
    rooms["setup"] = kept["parameters"] + 2 * ranks * part + facts["crumbs"]
    for name, room in rooms.items():
        if has[name] > room:
            wrong.append(f"has {has[name]:,} bytes besides ({name}), where {room:,} are enough")
    return wrong


def wrong_in(facts, rank, ranks, stage, steps, pieces):
    """Return what is wrong on one rank: a list of sentences."""
    if facts["problem"]:
        return [f"rank {rank}: {facts['problem']}"]
    counts, off = modules_of(Transformer()), max(facts["off"])
    kept, peak, sent = formulas(counts, ranks, stage, pieces)
    wrong = wrong_in_memory(facts, kept, peak, 8 * -(-max(counts) // ranks), ranks)
    for by_name in facts["sent"]:
        names = {"c10d::recv_": 0} if ranks > 1 else {}
        if by_name != {name: n for name, n in (sent | names).items() if n or name in by_name}:
            wrong.append(f"sends {by_name} in a step, not {sent}")
    if not off < 1e-12 * max(1, steps / 10):  # rounding: from step to step it grows
        wrong.append(f"computes with parameters that are off by {off:.2g} from DDP's")
    if facts["updates"] != steps or len(facts["sent"]) != steps or not facts["moved"] > 1e-4:
        wrong.append(f"made {facts['updates']} updates of {steps}")
    if facts["updated"] != sum(-(-count // ranks) for count in counts):
        wrong.append(f"gives its optimizer {facts['updated']:,} numbers")
    if facts["setup"] != {"c10d::broadcast_"}:
        wrong.append(f"calls {sorted(facts['setup'])} before the first step")
    return [f"rank {rank} {sentence}" for sentence in dict.fromkeys(wrong)]


def numbers_of(facts):
    """Return what one rank has measured, for --json."""
    counts = modules_of(Transformer())
    numbers = {"parameters": sum(counts), "modules": len(counts), "peak": facts["peak"]}
    sent = facts["sent"][-1] if facts["sent"] else {}
    names = ("reduce_scatter", "all_gather")
    numbers |= {"kept": facts["kept"][-1] if facts["kept"] else dict.fromkeys(KINDS, 0)}
    return numbers | {"bytes_sent": {name: sent.get(name, 0) for name in names}}


def report(result):
    """Print what a reader wants to know."""
    place = f"{result['world_size']} ranks, over {result['backend']} on {result['device']}"
    model = f"{result['parameters']:,} parameters in {result['modules']} modules"
    print(f"stage {result['stage']}, {place}: {model}, 8 bytes each")
    for kind in KINDS:
        kept, peak = (result[name][kind] for name in ("kept", "peak"))
        print(f"{kind:<10}  a rank keeps {kept:>9,} bytes, and has {peak:>9,} at most")
    together, sent = result["peak"]["together"], result["bytes_sent"]
    ddp = f"DDP keeps {32 * result['parameters']:,}; the activations are not in it"
    print(f"together    at most {together:,} bytes; {ddp}")
    print("sent in a step:", ", ".join(f"{name} {n:,} bytes" for name, n in sent.items()))


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, ranks, device = join_group()
    stage, steps = args.stage, args.steps
    options = args.batch_size, args.accumulate, args.seed
    facts = measure(rank, ranks, device, stage, steps, *options)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, facts)
    result = {"lesson": 18, "world_size": ranks, "backend": dist.get_backend()}
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03
    wrong = []
    for other, theirs in enumerate(everyone):
        wrong += wrong_in(theirs, other, ranks, stage, steps, args.accumulate)
    off = max(max(theirs["off"]) for theirs in everyone)
    result |= {"device": device.type, "stage": stage, "max_diff_to_ddp": off} | numbers_of(facts)
    if rank == 0:
        report(result)
    claim = f"after {steps} steps of Adam off by {off:.2g} from DDP"
    claim += "; kept and sent as by the formulas"
    return not wrong, "; ".join(wrong) or claim, result


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    stages = {"type": whole(1, 3), "default": 3, "metavar": "1|2|3"}
    parser.add_argument("--stage", **stages, help="what is dealt out, see above: %(default)s")
    parser.add_argument("--steps", type=whole(1, 100), default=5, help="%(default)s")
    pieces = "number of pieces in which a rank computes its rows, before one update: %(default)s"
    parser.add_argument("--accumulate", type=whole(1, 1000), default=1, help=pieces)
    rows = "rows of a step, a multiple of ranks times pieces; if not given: 4 in each piece"
    parser.add_argument("--batch-size", type=whole(1, 10**5), help=rows)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args, ranks = parser.parse_args(argv), int(os.environ.get("WORLD_SIZE", 1))
    parts = ranks * args.accumulate
    args.batch_size = args.batch_size or 4 * parts
    if args.batch_size % parts:  # a mean of means of unequal parts is not the mean
        what = "ranks times --accumulate" if args.accumulate > 1 else "the number of ranks"
        parser.error(f"argument --batch-size: must be a multiple of {what}, {parts}")
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
