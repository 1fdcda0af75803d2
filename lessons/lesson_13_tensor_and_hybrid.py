"""Lesson 13: how do several ranks compute one layer together, and how do they also share the data?

Tensor parallelism cuts the matrices: a layer by columns, the next one by rows, attention by heads.
What stands between two cuts never travels; each half of a transformer block costs one all-reduce
forward and one backward. Ranks that share a model can be one replica of several: the hybrid.
Gradients, weights and losses are compared with one process, the messages of each step counted.

Run it:   bash scripts/lesson_13.sh --nproc 4 [--data 2 --tensor 2]    (default: much tensor)
Or alone: python lessons/lesson_13_tensor_and_hybrid.py    (a world of one)

Output to expect on a CPU:

    mesh: 1 (data) x 2 (tensor) = 2 ranks, over gloo on cpu
    rank 0: replica 0, part 0, 6 of 12 heads, 29,042 of 57,026 parameters
    rank 1: replica 0, part 1, 6 of 12 heads, 29,042 of 57,026 parameters
    all-reduces per step with the other parts: 8, of 786,432 bytes in all
    all-reduces per step with the other replicas: 0, of 0 bytes in all
    the library's split (DTensor): largest difference of a gradient ...
    loss of the split model: 0.41 in step 1, 0.0686 in step 20; one process's differs by ...
    PASS gradients differ from those of one process by at most ...; 4 all-reduces in each block
"""

import argparse
import itertools
import json
import os
import sys
import weakref
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.nn.functional import gelu, linear, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


class SumInBackward(torch.autograd.Function):
    """Megatron-LM's operator f: forward nothing, backward a sum (Shoeybi et al. 2019, section 3).

    All ranks read x, each with its own part of a layer: each gets a part of x's gradient.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumInForward(torch.autograd.Function):
    """Its conjugate, g: forward a sum, backward nothing.

    Each rank has a part of the sum, and all go on with the same total: so each already has the
    whole gradient of the total, which is also that of its part.
    """

    @staticmethod
    def forward(ctx, part, group):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def my_part(tensor, dim, group):
    """Return this rank's part of `tensor`, cut along `dim` into as many as `group` has ranks."""
    parts = tensor.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


def by_columns(layer, group):
    """Return `layer` with this rank's share of its outputs: Linear(inputs, outputs / n)."""
    mine = nn.Linear(layer.in_features, layer.out_features // dist.get_world_size(group))
    mine.weight = my_part(layer.weight, 0, group)  # PyTorch keeps a weight as (outputs, inputs)
    mine.bias = my_part(layer.bias, 0, group)
    return mine


def by_rows(layer, group):
    """Return `layer` with this rank's share of its inputs: Linear(inputs / n, outputs)."""
    mine = nn.Linear(layer.in_features // dist.get_world_size(group), layer.out_features)
    mine.weight = my_part(layer.weight, 1, group)
    mine.bias = nn.Parameter(layer.bias.detach().clone())  # whole: it is added after the sum
    return mine


class SplitMLP(nn.Module):
    """An MLP with a share of its hidden units on each rank.

    x and the result are (rows, tokens, width), and the same on all ranks of `group`.
    """

    def __init__(self, mlp, group):
        super().__init__()
        self.group = group
        self.up = by_columns(mlp.up, group)
        self.down = by_rows(mlp.down, group)

    def forward(self, x):
        x = SumInBackward.apply(x, self.group)
        hidden = gelu(self.up(x))  # (rows, tokens, hidden / n): it never travels
        part = linear(hidden, self.down.weight)  # without the bias, which would be added n times
        return SumInForward.apply(part, self.group) + self.down.bias


class SplitAttention(nn.Module):
    """An attention block with a share of its heads on each rank; the rest as in SplitMLP."""

    def __init__(self, attention, group):
        super().__init__()
        self.group = group
        self.query = by_columns(attention.query, group)  # whole heads: their number must divide
        self.key = by_columns(attention.key, group)
        self.value = by_columns(attention.value, group)
        self.out = by_rows(attention.out, group)

    def forward(self, x):
        x = SumInBackward.apply(x, self.group)  # once for all three
        mixed = attend(self.query(x), self.key(x), self.value(x))
        part = linear(mixed, self.out.weight)
        return SumInForward.apply(part, self.group) + self.out.bias


def split(blocks, group):
    """Leave this rank's part in each of `blocks`; the rest of a model stays whole on every rank."""
    for block in blocks:
        block.attention = SplitAttention(block.attention, group)
        block.mlp = SplitMLP(block.mlp, group)


def split_by_library(model, mesh):
    """Do the same with PyTorch's DTensor: a plan in place of classes."""
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {f"blocks.*.attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {"blocks.*.attention.out": rows}
    plan |= {"blocks.*.mlp.up": columns, "blocks.*.mlp.down": rows}
    whole = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    plan["blocks.*.attention"] = parallel.PrepareModuleInput(**whole)  # f once for all three
    parallel.parallelize_module(model, mesh["tensor"], plan)


def make_mesh(device, tensor):
    """Return the ranks as a table: one row for each replica, one column for each part.

    The last name runs fastest: ranks 0, 1, ... are neighbours in "tensor", so they share a machine.
    """
    shape = (dist.get_world_size() // tensor, tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))


def train(model, data, mesh, device, steps, batch_size, seed=0):
    """Train `model`, which is equal on all ranks, on a mesh; return the losses of this replica."""
    replicas, replica = mesh["data"].size(), mesh.get_local_rank("data")
    sampler = DistributedSampler(data, replicas, replica, seed=seed)  # replica: not the rank
    loader = DataLoader(data, batch_size // replicas, sampler=sampler)
    split(model.blocks, mesh.get_group("tensor"))
    model.to(device)  # after the cut: the whole model need not fit there
    averaged = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)  # after the cut: it has the parts
    losses = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(averaged(rows.to(device)), targets.to(device))
            loss.backward()  # f's all-reduces among "tensor"; at the end DDP's, among "data"
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                return losses


# --- The model: an ordinary transformer, for one process ---

HEADS, HEAD_WIDTH, HIDDEN, BLOCKS = 12, 4, 192, 2
TOKENS, NUMBERS, WIDTH = 8, 5, HEADS * HEAD_WIDTH


def attend(query, key, value):
    """Return (rows, tokens, width) for as many heads as there are in `query` of that shape."""
    parts = [part.unflatten(-1, (-1, HEAD_WIDTH)) for part in (query, key, value)]
    query, key, value = (part.transpose(1, 2) for part in parts)  # (rows, heads, tokens, 4)
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Each token looks at all tokens of its row, with HEADS heads."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(attend(self.query(x), self.key(x), self.value(x)))


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
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, rows):
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# --- The proof ---


ROWS = 512


class Watched(TensorDataset):
    """Rows and targets that write down which row numbers were asked for."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        return super().__getitem__(number)


def make_problem(seed):
    """Return (data, model), the same on every rank, in float64: ROWS rows of 8 tokens, and targets.

    The targets are a fixed linear function of a row, plus noise: there is something to learn.
    """
    torch.manual_seed(seed)
    rows = torch.randn(ROWS, TOKENS, NUMBERS, dtype=torch.float64)
    targets = rows.mean(1) @ torch.randn(NUMBERS, 2, dtype=torch.float64)
    targets += 0.1 * torch.randn(ROWS, 2, dtype=torch.float64)
    return Watched(rows, targets), Transformer().double()


class Messages(TorchDispatchMode):
    """Writes down what this rank sends, DDP's all-reduces too: [(kind, ranks of the group, bytes)].

    What is called in a group of one is left out: nothing is sent.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor's own collectives come here one by one
        if function.namespace == "c10d":
            self.note(function, args)
        elif function.namespace == "_c10d_functional" and "group_name" in str(function._schema):
            self.calls.append((function.name(), (), args[0].nbytes))  # DTensor's
        return function(*args, **(kwargs or {}))

    def note(self, function, args):
        """Write down a call of c10d, PyTorch's library of collectives."""
        leaves = torch.utils._pytree.tree_leaves(args)
        boxes = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        groups = [box for box in boxes if "ProcessGroup" in str(box._type())]
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
        if len(ranks) > 1:
            nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.calls.append((function.name(), tuple(ranks), nbytes))


def from_all_ranks(value):
    """Return [value of rank 0, value of rank 1, ...]."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def joined(lists):
    """Return one list of what is in several."""
    return list(itertools.chain.from_iterable(lists))


def count(model):
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def part_like(whole, mine, part):
    """Return this rank's part of `whole`, a tensor that was cut as `mine` was, if it was cut."""
    for dim in range(mine.dim()):
        if mine.shape[dim] < whole.shape[dim]:
            return whole.chunk(whole.shape[dim] // mine.shape[dim], dim)[part]
    return whole


def distance(tensors, whole, part):
    """Return the largest difference of any tensor on this rank to that of one process."""
    differences = [torch.full((), torch.inf if len(tensors) != len(whole) else 0.0)]
    for mine, of_all in zip(tensors, whole, strict=False):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        differences.append((mine - part_like(of_all, mine, part)).detach().abs().max().cpu())
    return torch.stack(differences).max().item()  # nan, if one of them is


def gradients(model):
    """Return the gradients of all parameters; one that nobody has computed is not a number."""
    parameters = list(model.parameters())
    return [p.grad if p.grad is not None else torch.full_like(p, torch.nan) for p in parameters]


def watch(model, one_process, data, sent, tensor, facts):
    """Return a hook: after each update, one process makes the same one, and all is compared."""
    part = dist.get_rank() % tensor

    def after_step(optimizer, args, kwargs):
        facts["messages"].append(sent.calls.copy())
        facts["rows"].append(from_all_ranks(data.asked))
        numbers = joined(facts["rows"][-1][::tensor])  # of each replica once
        device = next(one_process.parameters()).device
        rows, targets = (whole[numbers].to(device) for whole in data.tensors)
        one_process.zero_grad()
        loss = mse_loss(one_process(rows), targets)
        loss.backward()
        facts["losses"].append(loss.item())
        facts["grad_diffs"].append(distance(gradients(model), gradients(one_process), part))
        with torch.no_grad():
            for parameter in one_process.parameters():
                parameter -= 0.03 * parameter.grad
        both = list(model.parameters()), list(one_process.parameters())
        facts["weight_diffs"].append(distance(*both, part))
        data.asked, sent.calls = [], []

    return after_step


def measure(rank, world_size, device, shape, steps, batch_size=32, seed=0):
    """Train on a mesh of `shape`, and in one process on the same rows; return this rank's facts.

    (So each rank has a whole model as well. That is the proof, not the technique.)
    """
    (data, model), (_, one_process) = make_problem(seed), make_problem(seed)
    one_process.to(device)
    mesh = make_mesh(device, shape[1])
    facts = {name: [] for name in ("messages", "rows", "losses", "grad_diffs", "weight_diffs")}
    whole = [(p.numel(), weakref.ref(p.untyped_storage())) for p in model.parameters()]
    moved, move = [], nn.Module.to

    def note(module, *place):
        moved.append(count(module))
        return move(module, *place)

    with Messages() as sent, patch.object(nn.Module, "to", note):
        after_step = watch(model, one_process, data, sent, shape[1], facts)
        handle = register_optimizer_step_post_hook(after_step)
        first = model.register_forward_pre_hook(lambda *_: sent.calls.clear() or first.remove())
        losses = train(model, data, mesh, device, steps, batch_size, seed)
        handle.remove()
    everyone = from_all_ranks(losses)[:: shape[1]]  # of each replica once
    facts["moved"] = sum(moved)
    facts["split_losses"] = [sum(step) / len(step) for step in zip(*everyone, strict=True)]
    facts |= memory(model, whole) | by_library(mesh, device, data, seed) | overwritten(mesh, device)
    for name, group in zip(("tensor", "data"), groups_of(rank, shape), strict=True):
        last = facts["messages"][-1] if facts["messages"] else []
        facts[name] = [n for kind, ranks, n in last if (kind, ranks) == ("c10d::allreduce_", group)]
    return facts | {"problem": problem_of(facts, rank, shape, steps, batch_size, seed)}


def overwritten(mesh, device):
    """Return what f or g changes of what it is given, where the sum needs memory of its own."""
    part, gradient = (torch.ones(2, 3, device=device) for _ in range(2))
    x, group = torch.ones(2, 3, device=device, requires_grad=True), mesh.get_group("tensor")
    SumInForward.apply(part, group)
    torch.autograd.grad(SumInBackward.apply(x, group), x, gradient)
    given = {"g's part": part, "f's gradient": gradient}
    return {"overwritten": [name for name, tensor in given.items() if not tensor.eq(1).all()]}


def memory(model, whole):
    """Return how many parameters this rank holds, in how many bytes, and what else is alive.

    whole: (size, weak reference to its memory) of each parameter before the cut.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    cut = [storage() for (before, storage), now in zip(whole, sizes, strict=False) if now < before]
    leaves = torch.utils._pytree.tree_leaves([vars(module) for module in model.modules()])
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    facts = {"wholes_alive": sum(each is not None for each in cut)}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = [(each.weight.shape, (each.out_features, each.in_features)) for each in layers]
    facts["made_larger"] = sum(is_now != made for is_now, made in shapes)
    return facts | {"parameters": sum(sizes), "bytes_kept": sum(kept.values())}


def by_library(mesh, device, data, seed):
    """Return the distance of gradients of the model that PyTorch has split, and its messages."""
    rows, targets = (tensor[:32].to(device) for tensor in data.tensors)
    model, one_process = (make_problem(seed)[1].to(device) for _ in range(2))
    split_by_library(model, mesh)
    with Messages() as sent:
        mse_loss(model(rows), targets).backward()
    mse_loss(one_process(rows), targets).backward()
    part = mesh.get_local_rank("tensor")
    off = distance(gradients(model), gradients(one_process), part)
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]
    ranks = {tuple(part.device_mesh.mesh.tolist()) for part in parts}
    return {
        "library_diffs": [off],
        "library_ranks": ranks,
        "library_messages": [kind for kind, *_ in sent.calls],
    }


def problem_of(facts, rank, shape, steps, batch_size, seed):
    """Return what is wrong with the rows, the messages or the memory of this rank, or None."""
    wrong = wrong_rows(facts["rows"], shape, batch_size)
    in_order = list(DistributedSampler(range(ROWS), shape[0], rank // shape[1], seed=seed))
    dealt = joined(step[rank] for step in facts["rows"])
    if dealt[: len(in_order)] != in_order[: len(dealt)]:
        wrong = wrong or "the first epoch's order of the rows does not come from the seed"
    for step, (sent, dealt) in enumerate(zip(facts["messages"], facts["rows"], strict=True)):
        if step == 1:  # DDP has seen the order of the gradients, and rank 0's is made everybody's
            sent = [call for call in sent if call[0] != "c10d::broadcast_" or call[2] > 1000]
        wrong = wrong or wrong_messages(sent, len(dealt[rank]), rank, shape, facts["parameters"])
    if facts["bytes_kept"] != 8 * facts["parameters"] or facts["wholes_alive"]:
        held = f"{facts['parameters']:,} parameters in {facts['bytes_kept']:,} bytes"
        alive = f"{facts['wholes_alive']} whole ones are still there"
        wrong = wrong or f"it holds {held}, and {alive}"
    if facts["made_larger"]:
        wrong = wrong or f"{facts['made_larger']} layers were made larger than what they hold"
    if facts["overwritten"]:
        wrong = wrong or f"{facts['overwritten'][0]} is overwritten"
    if facts["moved"] > facts["parameters"]:
        wrong = wrong or "something was moved to the device before it was cut"
    calls, lies_on = facts["library_messages"], facts["library_ranks"]
    if calls != ["_c10d_functional::all_reduce"] * 4 * BLOCKS * (shape[1] > 1):
        wrong = wrong or f"the library sends {len(calls)} times"
    if lies_on != {groups_of(rank, shape)[0]}:
        wrong = wrong or f"the library deals its parts out to {sorted(lies_on)}"
    if [len(facts["rows"]), len(facts["split_losses"])] != [steps, steps]:
        wrong = wrong or f"{len(facts['rows'])} updates were made, not {steps}"
    return wrong and f"rank {rank}: {wrong}"


def groups_of(rank, shape):
    """Return the ranks that hold the other parts of this rank's replica, and its part elsewhere."""
    replicas, parts = shape
    first = rank // parts * parts  # neighbours, so that they share a machine
    return tuple(range(first, first + parts)), tuple(range(rank % parts, replicas * parts, parts))


def wrong_messages(sent, rows, rank, shape, parameters):
    """Return what is wrong with what a rank has sent in a step of `rows` rows, or None."""
    replicas, parts = shape
    neighbours, others = groups_of(rank, shape)
    sums = [nbytes for kind, ranks, nbytes in sent if ranks == neighbours]
    means = [nbytes for kind, ranks, nbytes in sent if ranks == others]
    if kinds := {kind for kind, *_ in sent} - {"c10d::allreduce_"}:
        return f"sends {sorted(kinds)}, not only all-reduces"
    if strangers := {ranks for _, ranks, _ in sent} - {neighbours, others}:
        return f"adds up with ranks {sorted(strangers)}, not with {neighbours} and {others}"
    if sums != [rows * TOKENS * WIDTH * 8] * (4 * BLOCKS * (parts > 1)):
        return f"adds up {len(sums)} times with {neighbours}, {sum(sums):,} bytes in all"
    if sum(means) != parameters * 8 * (replicas > 1):
        return f"averages {sum(means):,} bytes with {others}, not each gradient once"
    return None


def wrong_rows(dealt, shape, batch_size):
    """Return what is wrong with the rows, or None. dealt[step][rank]: the row numbers."""
    replicas, parts = shape
    share, batch = -(-ROWS // replicas), batch_size // replicas  # rows of a replica
    steps, first = -(-share // batch), None  # in an epoch
    for begin in range(0, len(dealt), steps):
        epoch = dealt[begin : begin + steps]
        for place, step in enumerate(epoch):
            if any(step[rank] != step[rank // parts * parts] for rank in range(len(step))):
                return "the parts of a replica do not have the same rows"
            if place < steps - 1 and len(set(joined(step[::parts]))) < len(joined(step[::parts])):
                return "a row is dealt to two replicas in the same step"
            if {len(rows) for rows in step} != {min(batch, share - place * batch)}:
                return f"a replica takes {len(step[0])} rows of {batch_size} over {replicas}"
        batches = [joined(step[::parts]) for step in epoch]
        seen = joined(batches)
        if len(set(seen)) < min(len(seen), ROWS):
            return f"an epoch deals {len(seen)} rows, of which {len(set(seen))} are different"
        first = first or batches
        again = [set(one) == set(other) for one, other in zip(batches, first, strict=False)]
        if begin and len(seen) > 7 and all(again):
            return "a later epoch has the batches of the first one"
    return None


def worst(differences):
    """Return the largest difference: not a number, if one of them is, or if there is none."""
    return torch.tensor(differences or [torch.nan]).max().item()


def collect(facts):
    """Gather what all ranks have measured; return the numbers, and what is wrong or None."""
    everyone = from_all_ranks(facts)
    off, names = {}, ("data", "tensor")
    for name in ("grad", "weight", "library"):
        off[name] = worst([diff for theirs in everyone for diff in theirs[f"{name}_diffs"]])
    pairs = zip(facts["split_losses"], facts["losses"], strict=False)
    off["loss"] = worst([abs(split - whole) for split, whole in pairs])
    numbers = {"max_grad_diff": off["grad"], "max_loss_diff": off["loss"]}
    first, *_, last = facts["split_losses"] * 2 or [torch.nan] * 2
    numbers |= {"library_diff": off["library"], "loss_first": first, "loss_last": last}
    numbers["parameters_per_rank"] = [theirs["parameters"] for theirs in everyone]
    numbers["all_reduces_per_step"] = [{n: len(theirs[n]) for n in names} for theirs in everyone]
    numbers["bytes_per_step"] = [{n: sum(theirs[n]) for n in names} for theirs in everyone]
    wrong = [theirs["problem"] for theirs in everyone if theirs["problem"]]
    wrong += [f"{name} off by {diff:.3g}" for name, diff in off.items() if not diff < 1e-12]
    return numbers, wrong[0] if wrong else None


def report(result):
    """Print what a reader wants to know, rank by rank."""
    mesh, ranks = result["mesh"], result["world_size"]
    shape = f"{mesh['data']} (data) x {mesh['tensor']} (tensor) = {ranks} ranks"
    print(f"mesh: {shape}, over {result['backend']} on {result['device']}")
    whole = count(Transformer())
    for rank, (replica, part) in enumerate(result["places"]):
        place = f"replica {replica}, part {part}, {HEADS // mesh['tensor']} of {HEADS} heads"
        held = result["parameters_per_rank"][rank]
        print(f"rank {rank}: {place}, {held:,} of {whole:,} parameters")
    counts, sizes = result["all_reduces_per_step"][0], result["bytes_per_step"][0]
    for name, peers in (("tensor", "the other parts"), ("data", "the other replicas")):
        print(f"all-reduces per step with {peers}: {counts[name]}, of {sizes[name]:,} bytes in all")
    library = result["library_diff"]
    print(f"the library's split (DTensor): largest difference of a gradient {library:.3g}")
    first, last = result["loss_first"], result["loss_last"]
    losses = f"{first:.3g} in step 1, {last:.3g} in step {result['steps']}"
    off = f"one process's differs by {result['max_loss_diff']:.3g}"
    print(f"loss of the split model: {losses}; {off}")


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    data, tensor = args.data, args.tensor
    options = args.steps, args.batch_size, args.seed
    facts = measure(rank, world_size, device, (data, tensor), *options)
    result = {"lesson": 13, "world_size": world_size, "backend": dist.get_backend()}
    result |= {"device": device.type, "mesh": {"data": data, "tensor": tensor}}
    result |= {"steps": args.steps, "places": [divmod(r, tensor) for r in range(world_size)]}
    numbers, wrong = collect(facts)
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03
    if rank == 0:
        report(result | numbers)
    if len(facts["rows"]) != args.steps:
        wrong = wrong or f"{len(facts['rows'])} updates, not {args.steps}"
    claim = f"gradients differ from those of one process by at most {numbers['max_grad_diff']:.3g}"
    claim += f"; {4 if tensor > 1 else 0} all-reduces in each block"
    return wrong is None, wrong or claim, result | numbers


def mesh_shape(data, tensor, ranks):
    """Return (data, tensor) with what was not given filled in: as much tensor as HEADS allow."""
    if data is tensor is None:
        tensor = max(n for n in range(1, ranks + 1) if ranks % n == HEADS % n == 0)
    return data or ranks // tensor, tensor or ranks // data


def what_does_not_fit(args, ranks):
    """Return what is wrong with flags that belong together, or None; fill in the mesh."""
    for flag, given in (("--data", args.data), ("--tensor", args.tensor)):
        if given and ranks % given:
            return f"{flag}: {given} does not divide the number of ranks, {ranks}"
    args.data, args.tensor = mesh_shape(args.data, args.tensor, ranks)
    if args.data * args.tensor != ranks:
        return f"--data: {args.data} x {args.tensor} (--tensor) is not the number of ranks, {ranks}"
    if HEADS % args.tensor:
        return f"--tensor: the {HEADS} heads can't be dealt out to {args.tensor} ranks"
    if args.batch_size < args.data:
        return f"--batch-size: must be at least the number of replicas, {args.data}"
    return None


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    many, all_rows = whole(1, 10**6), "rows of a step, rounded down to a multiple of the replicas"
    parser.add_argument("--steps", type=many, default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=many, default=32, help=f"{all_rows}: %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    replicas = "number of replicas; if not given: what --tensor leaves"
    parser.add_argument("--data", type=whole(1, 64), help=replicas)
    parts = f"number of parts of a replica; if not given: as many as divide the {HEADS} heads"
    parser.add_argument("--tensor", type=whole(1, 64), help=parts)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if problem := what_does_not_fit(args, int(os.environ.get("WORLD_SIZE", 1))):
        parser.error(f"argument {problem}")
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
