"""Lesson 13: how do several ranks compute one layer together, and how do they also share the data?

Tensor parallelism cuts the matrices: a layer by columns, the next one by rows, attention by heads.
What stands between two cuts never travels; each half of a transformer block costs one all-reduce
forward and one backward. Ranks that share a model can be one replica of several: a mesh of
data x tensor, the hybrid. Gradients are compared with one process's; what is sent is counted.

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
import inspect
import itertools
import json
import os
import sys
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.nn.functional import gelu, linear, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
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


def train(mesh, device, data, model, batch_size, seed=0):
    """Train `model` on a mesh of data x tensor; yield its rows and loss after every update (D1).

    Ranks 0, 1, ... are neighbours in the dimension "tensor", so they should share a machine.
    """
    replicas, replica = mesh["data"].size(), mesh.get_local_rank("data")
    sampler = DistributedSampler(data, replicas, replica, seed=seed)  # replica: not the rank
    loader = DataLoader(data, batch_size // replicas, sampler=sampler)
    split(model.to(device).blocks, mesh.get_group("tensor"))
    averaged = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(averaged(rows.to(device)), targets.to(device))
            loss.backward()  # f's all-reduces among "tensor"; at the end DDP's, among "data"
            optimizer.step()
            yield rows, targets, loss.detach()


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


def make_problem(seed):
    """Return (data, model), the same on every rank, in float64: 512 rows of 8 tokens, and targets.

    The targets are a fixed linear function of a row, plus noise: there is something to learn.
    """
    torch.manual_seed(seed)
    rows = torch.randn(512, TOKENS, NUMBERS, dtype=torch.float64)
    targets = rows.mean(1) @ torch.randn(NUMBERS, 2, dtype=torch.float64)
    targets += 0.1 * torch.randn(512, 2, dtype=torch.float64)
    return TensorDataset(rows, targets), Transformer().double()


class AllReduces(TorchDispatchMode):
    """Writes down [(group, bytes)] of the all-reduces that this rank calls, DDP's included.

    Those in a group of one are left out: nothing is sent.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "c10d::allreduce_":
            group = dist.ProcessGroup.unbox(args[1])
            if group.size() > 1:
                self.calls.append((group, sum(tensor.nbytes for tensor in args[0])))
        return function(*args, **(kwargs or {}))


def from_all_replicas(tensor, mesh):
    """Return the tensors of all replicas, one below the other."""
    gathered = [torch.empty_like(tensor) for _ in range(mesh["data"].size())]
    dist.all_gather(gathered, tensor, group=mesh.get_group("data"))
    return torch.cat(gathered)


def part_like(whole, mine, group):
    """Return this rank's part of `whole`, a tensor that was cut as `mine` was, if it was cut."""
    cut = [dim for dim in range(mine.dim()) if mine.shape[dim] != whole.shape[dim]]
    return my_part(whole, cut[0], group) if cut else whole


def distance(model, one_process, group):
    """Return the largest difference of any gradient on this rank to that of one process."""
    differences = []
    pairs = zip(model.parameters(), one_process.parameters(), strict=True)
    for mine, whole in pairs:
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        differences.append((gradient - part_like(whole.grad, gradient, group)).abs().max())
    return torch.stack(differences).max().item()


def library_distance(mesh, device, rows, targets, seed):
    """Return the distance of the gradients of the model that PyTorch has split."""
    model, one_process = (make_problem(seed)[1].to(device) for _ in range(2))
    split_by_library(model, mesh)
    for network in (model, one_process):
        mse_loss(network(rows), targets).backward()
    return distance(model, one_process, mesh.get_group("tensor"))


def measure(rank, world_size, device, shape, steps, batch_size=32, seed=0):
    """Train on a mesh of `shape`, and in one process on the same rows; return this rank's facts.

    (So each rank has a whole model as well. That is the proof, not the technique.)
    """
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    (data, model), (_, one_process) = make_problem(seed), make_problem(seed)
    one_process.to(device)
    optimizer = torch.optim.SGD(one_process.parameters(), lr=0.03)
    training = train(mesh, device, data, model, batch_size, seed)
    facts = {"library_diff": 0.0, "grad_diffs": [], "losses": [], "loss_diffs": []}
    for step in range(steps):
        with AllReduces() as sent:
            *mine, loss_here = next(training)
        rows, targets = (from_all_replicas(part.to(device), mesh) for part in mine)
        if step == 0:
            facts["library_diff"] = library_distance(mesh, device, rows, targets, seed)
        optimizer.zero_grad()
        loss = mse_loss(one_process(rows), targets)
        loss.backward()
        optimizer.step()
        split_loss = from_all_replicas(loss_here.view(1), mesh).mean()
        facts["losses"].append(split_loss.item())
        facts["loss_diffs"].append((split_loss - loss).abs().item())
        facts["grad_diffs"].append(distance(model, one_process, mesh.get_group("tensor")))
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    facts |= {"rows": len(mine[0]), "place": mesh.get_coordinate()}
    for name in ("data", "tensor"):
        facts[name] = [size for group, size in sent.calls if group == mesh.get_group(name)]
    return facts


def collect(facts):
    """Gather what all ranks have measured; return one dict, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    diffs = [diff for theirs in everyone for diff in theirs["grad_diffs"]]
    result = {"max_grad_diff": torch.tensor(diffs).max().item()}  # nan, if one of them is
    diffs = [diff for theirs in everyone for diff in theirs["loss_diffs"]]
    result["max_loss_diff"] = torch.tensor(diffs).max().item()
    library = torch.tensor([theirs["library_diff"] for theirs in everyone])
    result["library_diff"] = library.max().item()
    result["loss_first"], result["loss_last"] = facts["losses"][0], facts["losses"][-1]
    result["parameters_per_rank"] = [theirs["parameters"] for theirs in everyone]
    result["places"] = [theirs["place"] for theirs in everyone]
    counts = [{name: len(theirs[name]) for name in ("data", "tensor")} for theirs in everyone]
    sizes = [{name: sum(theirs[name]) for name in ("data", "tensor")} for theirs in everyone]
    result["all_reduces_per_step"], result["bytes_per_step"] = counts, sizes
    return result


def counted_right(result, rows):
    """Return whether each block made two all-reduces forward and two backward, of x's size."""
    count = 4 * BLOCKS * (result["mesh"]["tensor"] > 1)
    size = count * rows * TOKENS * WIDTH * 8  # bytes: float64
    counts = [theirs["tensor"] for theirs in result["all_reduces_per_step"]]
    sizes = [theirs["tensor"] for theirs in result["bytes_per_step"]]
    ranks = result["world_size"]
    return counts == [count] * ranks and sizes == [size] * ranks


def report(result):
    """Print what a reader wants to know, rank by rank."""
    mesh, ranks = result["mesh"], result["world_size"]
    shape = f"{mesh['data']} (data) x {mesh['tensor']} (tensor) = {ranks} ranks"
    print(f"mesh: {shape}, over {result['backend']} on {result['device']}")
    whole = sum(parameter.numel() for parameter in Transformer().parameters())
    for rank, (replica, part) in enumerate(result["places"]):
        place = f"replica {replica}, part {part}, {HEADS // mesh['tensor']} of {HEADS} heads"
        print(
            f"rank {rank}: {place}, {result['parameters_per_rank'][rank]:,} of {whole:,} parameters"
        )
    counts, sizes = result["all_reduces_per_step"][0], result["bytes_per_step"][0]
    for name, peers in (("tensor", "the other parts"), ("data", "the other replicas")):
        print(f"all-reduces per step with {peers}: {counts[name]}, of {sizes[name]:,} bytes in all")
    library = result["library_diff"]
    print(f"the library's split (DTensor): largest difference of a gradient {library:.3g}")
    first, last = result["loss_first"], result["loss_last"]
    losses = f"{first:.3g} in step 1, {last:.3g} in step {result['steps']}"
    off = f"one process's differs by {result['max_loss_diff']:.3g}"
    print(f"loss of the split model: {losses}; {off}")


def mesh_shape(data, tensor):
    """Return (data, tensor) with what was not given filled in: as much tensor as HEADS allow."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if data == tensor == 0:
        tensor = max(n for n in range(1, ranks + 1) if ranks % n == HEADS % n == 0)
    return data or ranks // tensor, tensor or ranks // data


def refuse(batch_size, data, tensor, **others):
    """Return what is wrong with the flags, or None."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    for flag, given in (("--data", data), ("--tensor", tensor)):
        if given and ranks % given:
            return f"{flag}: {given} does not divide the number of ranks, {ranks}"
    data, tensor = mesh_shape(data, tensor)
    if data * tensor != ranks:
        return f"--data: {data} x {tensor} (--tensor) is not the number of ranks, {ranks}"
    if HEADS % tensor:
        return f"--tensor: the {HEADS} heads can't be dealt out to {tensor} ranks"
    if batch_size < data:
        return f"--batch-size: must be at least the number of replicas, {data}"
    return None


def main(
    steps: range(1, 10**6) = 20,
    batch_size: range(1, 10**6) = 32,
    seed: range(2**32) = 0,
    data: range(65) = 0,
    tensor: range(65) = 0,
):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    data, tensor = mesh_shape(data, tensor)
    facts = measure(rank, world_size, device, (data, tensor), steps, batch_size, seed)
    result = {"lesson": 13, "world_size": world_size, "backend": dist.get_backend()}
    result |= {"device": device.type, "mesh": {"data": data, "tensor": tensor}, "steps": steps}
    result |= collect(facts)
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03
    if rank == 0:
        report(result)
    worst = result["max_grad_diff"]
    equal = max(worst, result["max_loss_diff"], result["library_diff"]) < 1e-12
    counted = counted_right(result, facts["rows"])
    claim = f"gradients differ from those of one process by at most {worst:.3g}"
    claim += f"; {4 if tensor > 1 else 0} all-reduces in each block"
    return equal and counted, claim, result


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU.
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


def start(main, refuse=lambda **flags: None):
    """Run main with flags made from its arguments; return 0 (PASS) or 1 (FAIL), or exit with 2."""
    rank_0 = os.environ.get("RANK", "0") == "0"  # it speaks for all
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text[:300]}\n" * rank_0)
    arguments = inspect.signature(main).parameters
    for name, argument in arguments.items():
        options = {"type": type(argument.default), "default": argument.default, "metavar": "X"}
        parser.add_argument("--" + name.replace("_", "-"), **options, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    values = vars(parser.parse_args())
    flags = {name: values[name] for name in arguments}
    for name, value in flags.items():
        allowed = get_args(arguments[name].annotation) or arguments[name].annotation
        if value not in allowed:
            parser.error(f"argument --{name.replace('_', '-')}: must be in {allowed}, not {value}")
    if problem := refuse(**flags):
        parser.error(f"argument {problem}")
    if values["check"]:
        return 0
    passed, claim, result = main(**flags)
    if rank_0:
        print("PASS" if passed else "FAIL", claim)
        print(json.dumps(result | {"passed": passed}) + "\n" if values["json"] else "", end="")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(start(main, refuse))
