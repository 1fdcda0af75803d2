"""Lesson 18: if no rank can keep the whole model with its optimizer, who keeps what?

DDP keeps on every rank what all have alike. Sharding (ZeRO) deals it out, stage by stage: Adam's
averages, then the gradients, then the parameters, gathered while a block computes. The launcher
compares: the numbers are DDP's, and the bytes that are kept and sent are those of formulas.

Run it: bash scripts/lesson_18.sh --nproc 2 [--stage 1|2|3]; or the script alone, with python.

Output to expect on a CPU:

    stage 3, 2 ranks over gloo on cpu: loss ... after 5 steps
    ...
    PASS after 5 steps of Adam off by ... from DDP; kept and sent as by the formulas
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import gelu, mse_loss, pad, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# --- The technique ---


def reduce_scatter(flat):
    """Add up `flat` over the ranks, by a ring; return this rank's part. The rest is used up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = flat.chunk(ranks)
    received = torch.empty_like(parts[0])
    for turn in range(1, ranks):
        send = dist.P2POp(dist.isend, parts[rank - turn], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        parts[rank - turn - 1].add_(received)  # in the last turn: this rank's own part
    return parts[rank]


class Sharded:
    """A module, whose parameters lie in a flat tensor, cut into n parts; `shard` is this rank's.

    Of parameters, gradients and averages a rank keeps in stage 1 all, all, a part; in 2 all, a
    part, a part; in 3 a part of each. A forward needs all parameters, and calls the module once.
    """

    def __init__(self, module, stage):
        self.stage, self.module, self.gradient = stage, module, None
        self.parameters, ranks = list(module.parameters()), dist.get_world_size()
        numbers = parameters_to_vector(self.parameters).detach()
        self.flat = pad(numbers, (0, -len(numbers) % ranks))  # zeros at the end: padding
        dist.broadcast(self.flat, 0)  # all ranks begin with the model of rank 0
        vector_to_parameters(self.flat, self.parameters)  # from now on, windows of the flat tensor
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.after_gradient)
        mine = self.flat.chunk(ranks)[dist.get_rank()]
        self.shard = nn.Parameter(mine.clone() if stage == 3 else mine)  # stage 1, 2: a window too
        module.register_forward_hook(self.after_forward)
        self.free()
        if stage == 3:
            module.register_forward_pre_hook(lambda *_: self.gather())

    def gather(self):
        """Put the parts of all ranks into the flat tensor."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_single(self.flat, self.shard.detach())

    def free(self):
        """Give the memory back. The parameters keep their shape, and have no numbers."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(0)

    def after_forward(self, module, inputs, output):
        self.free()
        if output.requires_grad:  # when backward comes to this module:
            output.register_hook(self.before_backward)

    def before_backward(self, _):
        if self.stage == 3:
            self.gather()
        if self.gradient is None:
            self.gradient = self.shard.new_zeros(self.flat.shape)
            sizes = [parameter.numel() for parameter in self.parameters]
            windows = self.gradient[: sum(sizes)].split(sizes)
            for parameter, window in zip(self.parameters, windows, strict=True):
                parameter.grad = window.view(parameter.shape)  # autograd adds to what is there
        self.missing = len(self.parameters)

    def after_gradient(self, _):
        self.missing -= 1
        if self.missing == 0 and self.stage > 1:  # the last one of this module
            self.reduce()
            self.free()

    def reduce(self):
        """Leave in shard.grad this rank's part of the mean of all ranks' gradients."""
        mine = reduce_scatter(self.gradient).div_(dist.get_world_size())
        if self.shard.grad is not None:
            self.shard.grad += mine  # accumulation: several backwards before an update
        else:
            self.shard.grad = mine if self.stage == 1 else mine.clone()
        self.gradient = None
        if self.stage > 1:  # stage 1 keeps it until zero_grad; shard.grad is a window of it
            self.module.zero_grad()


def train(model, batches, stage, pieces=1):
    """Train on all ranks with Adam; each takes every n-th row of a batch, in equal pieces."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    units = [Sharded(module, stage) for module in (model.embed, *model.blocks, model.head)]
    optimizer = torch.optim.Adam([unit.shard for unit in units])  # after the cut
    for rows, targets in batches:
        optimizer.zero_grad()
        model.zero_grad()  # stage 1: the full gradients, too
        mine = zip(rows[rank::ranks].chunk(pieces), targets[rank::ranks].chunk(pieces), strict=True)
        for some, answers in mine:  # more than one: their gradients are accumulated
            (mse_loss(model(some), answers) / pieces).backward()
        if stage == 1:
            for unit in units:
                unit.reduce()
        optimizer.step()
        if stage < 3:
            for unit in units:
                unit.gather()  # stage 3 does it when a module computes


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

HEADS, HEAD_WIDTH, HIDDEN, BLOCKS = 12, 4, 191, 4  # lesson 13's transformer has 2 blocks
TOKENS, NUMBERS, WIDTH = 8, 5, HEADS * HEAD_WIDTH


class Attention(nn.Module):
    """Each token looks at all tokens of its row, with HEADS heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = [f(x).unflatten(-1, (HEADS, -1)) for f in (self.query, self.key, self.value)]
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


def make_problem(seed, steps, batch_size, device="cpu"):
    """Return (batches, model): the batches are alike on all ranks, and each has another model."""
    torch.manual_seed(seed)
    rows = torch.randn(steps, batch_size, TOKENS, NUMBERS, dtype=torch.float64)
    targets = rows.mean(2) @ torch.randn(NUMBERS, 2, dtype=torch.float64)
    torch.manual_seed(seed + dist.get_rank())
    batches = zip(rows.to(device), targets.to(device), strict=True)
    return list(batches), Transformer().double().to(device)


def main(args):
    """Train on this rank; rank 0 tells what came of it."""
    rank, ranks, device = join_group()
    batch_size = args.batch_size or 4 * ranks * args.accumulate
    batches, model = make_problem(args.seed, args.steps, batch_size, device)
    train(model, batches, args.stage, args.accumulate)
    with torch.no_grad():
        loss = mse_loss(model(batches[0][0]), batches[0][1]).item()  # all ranks: each has a part
    if rank == 0:
        where = f"{ranks} ranks over {dist.get_backend()} on {device.type}"
        print(f"stage {args.stage}, {where}: loss {loss:.3g} after {args.steps} steps")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="%(default)s")
    parser.add_argument("--steps", type=int, default=5, help="%(default)s")
    parser.add_argument("--accumulate", type=int, default=1, help="pieces of a step: %(default)s")
    parser.add_argument("--batch-size", type=int, help="of all ranks, default: 4 rows in a piece")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
