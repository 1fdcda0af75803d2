"""Lesson 13: how do several ranks compute one layer together, and how do they also share the data?

Tensor parallelism cuts a layer by columns, the next one by rows, attention by heads. What stands
between two cuts never travels; each half of a transformer block costs one all-reduce forward and
one backward. Ranks that share a model can be one replica of several: the hybrid.

Run it:   bash scripts/lesson_13.sh [--nproc 4 --data 2 --tensor 2]    (else: 2 ranks, 2 parts)
Or alone: python lessons/lesson_13_tensor_and_hybrid.py    (a world of one)

Output to expect on a CPU:

    mesh: 1 (data) x 2 (tensor), over gloo on cpu
    loss of replica 0: 0.41 in step 1, 0.0686 in the last
    ...
    all-reduces per step with the other parts: 8, of 786,432 bytes in all
    ...
    PASS gradients differ from those of one process by at most ...; 4 all-reduces in each block
"""

import argparse
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


class SumInForward(torch.autograd.Function):
    """Megatron-LM's operator g: each rank has a part of a sum, and all go on with the total."""

    @staticmethod
    def forward(ctx, part, group):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None  # all have that of the total, which is also that of each part


class SumInBackward(torch.autograd.Function):
    """Its conjugate, f: all read the same x, and each knows a part of its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumInForward.apply(gradient, ctx.group), None


def my_part(tensor, dim, group):
    """Return this rank's part of `tensor`, cut along `dim` into as many as `group` has ranks."""
    parts = tensor.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


class Split(nn.Module):
    """Half a block, attention or MLP, with a share of its heads or hidden units on each rank.

    x and the result are (rows, tokens, width), and the same on all ranks of `group`.
    """

    def __init__(self, layers, columns, rows, group):
        super().__init__()
        self.layers, self.group = layers, group
        for layer in columns:  # PyTorch keeps a weight as (outputs, inputs)
            layer.weight = my_part(layer.weight, 0, group)
            layer.bias = my_part(layer.bias, 0, group)
        rows.weight = my_part(rows.weight, 1, group)
        self.bias, rows.bias = rows.bias, None  # else it would be added on each rank

    def forward(self, x):
        x = SumInBackward.apply(x, self.group)
        part = self.layers(x)  # what lies between the cuts never travels
        return SumInForward.apply(part, self.group) + self.bias


def split(blocks, group):
    """Leave this rank's part in each of `blocks`; the rest of a model is the same on every rank."""
    for block in blocks:
        attention, mlp = block.attention, block.mlp  # heads are not cut: their number must divide
        columns = attention.query, attention.key, attention.value
        block.attention = Split(attention, columns, attention.out, group)
        block.mlp = Split(mlp, [mlp.up], mlp.down, group)


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
    split(model.blocks, mesh.get_group("tensor"))  # before .to(): uncut it need not fit there
    averaged = DistributedDataParallel(model.to(device), process_group=mesh.get_group("data"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)  # after the cut: it has the parts
    losses = []
    while len(losses) < steps:
        sampler.set_epoch(len(losses) // len(loader))
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(averaged(rows.to(device)), targets.to(device))
            loss.backward()  # f's all-reduces among "tensor"; at the end DDP's, among "data"
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


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


# --- The example ---

HEADS, HEAD_WIDTH, HIDDEN, BLOCKS = 12, 4, 192, 2
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
        parts = [f(x).unflatten(-1, (-1, HEAD_WIDTH)) for f in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)  # (rows, heads, tokens, 4)
        return self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


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
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, rows):
        return self.head(self.norm(self.blocks(self.embed(rows))).mean(1))


def make_problem(seed):
    """Return 512 rows with targets, and a model, the same on every rank, in float64."""
    torch.manual_seed(seed)
    rows = torch.randn(512, TOKENS, NUMBERS, dtype=torch.float64)
    targets = rows.mean(1) @ torch.randn(NUMBERS, 2, dtype=torch.float64)
    targets += 0.1 * torch.randn(512, 2, dtype=torch.float64)
    return TensorDataset(rows, targets), Transformer().double()


def main(args):
    """Train on this rank; rank 0 tells what came of it."""
    rank, world_size, device = join_group()
    most = math.gcd(HEADS, world_size)  # both must be dealt out
    tensor = args.tensor or (world_size // args.data if args.data else most)
    mesh = make_mesh(device, tensor)
    data, model = make_problem(args.seed)
    losses = train(model, data, mesh, device, args.steps, args.batch_size, args.seed)
    if rank == 0:
        where = f"over {dist.get_backend()} on {device.type}"
        print(f"mesh: {world_size // tensor} (data) x {tensor} (tensor), {where}")
        print(f"loss of replica 0: {losses[0]:.3g} in step 1, {losses[-1]:.3g} in the last")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--data", type=int, help="number of replicas")
    parser.add_argument("--tensor", type=int, help="parts of a replica, which 12 heads allow")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
