"""Lesson 21: how do N ranks train with 16 bits instead of 32, and lose nothing that matters?

The model computes in float16 or bfloat16, and gradients travel in it: half the bytes. What is
updated stays float32. A float16 ends at 65504, and below 3e-8 it is 0, so the loss is multiplied
before backward(), and the gradients are divided after it. If one rank finds inf or nan among them,
no rank takes this step. The launcher compares with one process that computes in float64.

Run it:   bash scripts/lesson_21.sh --nproc 2 [--dtype bfloat16]
Or alone: python lessons/lesson_21_half_precision.py    (a world of one)

Output to expect on a CPU:

    2 ranks over gloo on cpu, in float16
    12 steps: 11 updates, 1 skipped by all ranks
    loss on rank 0: 8... at first, 4... at last
    factor of the loss: 65,536 at first, 131,072 at last
    gradients sent in a step: 12,480, as 24,960 bytes
    PASS 2 ranks train in float16 as one process in float64: gradients off by ...
"""

import argparse
import contextlib
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

# --- The technique ---


def send_in(dtype, bucket):
    """Average a bucket of float32 gradients over all ranks of the job, sent in another type.

    DDP calls this when a bucket is full: replica.register_comm_hook(torch.bfloat16, send_in).
    """
    # Divided before it is rounded: the sum over the ranks, in float16, could be beyond its range.
    half = (bucket.buffer() / dist.get_world_size()).to(dtype)
    sent = dist.all_reduce(half, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))  # float32 again


def on_any_rank(found):
    """Return whether `found`, a tensor of one bool, is true on any rank; all must call this."""
    anywhere = found.float()
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)  # 4 bytes, and everybody waits for everybody
    return anywhere.item() > 0


class LossScale:
    """The factor of the loss. It is halved after an overflow, and doubled after long peace.

    Multiply the loss with `factor`, call backward(), unscale() once, and update() at the end of
    the step. All ranks must do so.
    """

    def __init__(self, factor=2.0**16, patience=2000):
        self.factor, self.patience, self.good = factor, patience, 0

    def unscale(self, parameters):
        """Divide the gradients by the factor; return whether those of all ranks are finite."""
        parameters = list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        found = torch.tensor(False, device=parameters[0].device)
        for gradient in gradients:
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()  # the part that this rank keeps
            gradient /= self.factor
            found |= ~gradient.isfinite().all()
        return not on_any_rank(found)  # also a rank that has no gradients calls it

    def update(self, finite):
        """Say how the step went: this sets the factor of the next one."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.factor /= 2
        elif self.good == self.patience:
            self.factor, self.good = self.factor * 2, 0


def train_step(replica, optimizer, scale, micro_batches, dtype, max_norm):
    """Make one update, or skip it on all ranks; return this rank's mean loss, and which it was.

    `replica` is a DistributedDataParallel with float32 parameters: they are the master weights.
    """
    optimizer.zero_grad()
    mean = 0.0
    for number, (rows, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            with torch.autocast(rows.device.type, dtype, enabled=dtype != torch.float32):
                outputs = replica(rows)
            loss = mse_loss(outputs.float(), targets) / len(micro_batches)
            (loss * scale.factor).backward()  # the last one sends
        mean += loss.item()
    finite = scale.unscale(replica.parameters())  # before clipping: max_norm has no factor in it
    if finite:
        nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
        optimizer.step()
    scale.update(finite)
    return mean, finite


def train(model, batches, dtype, scale, lr, max_norm=1.0):
    """Train a float32 model on all ranks; return [(this rank's loss, whether it was updated)].

    `batches` has the micro-batches of this rank, step by step: [[(rows, targets), ...], ...].
    """
    replica = DistributedDataParallel(model)  # rank 0's first weights go to all
    replica.register_comm_hook(dtype, send_in)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return [train_step(replica, optimizer, scale, parts, dtype, max_norm) for parts in batches]


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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUMBERS, HIDDEN, OUTPUTS = 32, 128, 64  # of a row, between the layers, of a target
LR, MAX_NORM, PATIENCE = 5, 1.2e-5, 4


def make_steps(steps, micro_batches, rows, seed):
    """Return [step][micro-batch]: (rows, targets) of all ranks; no target is beyond 0.0001.

    In the third step a row has a number that float16 has not: in it, its rank finds inf or nan.
    """
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(steps, micro_batches, rows, NUMBERS, generator=generator)
    targets = 1e-4 * torch.tanh(data @ torch.randn(NUMBERS, OUTPUTS, generator=generator))
    data[2, 0, 1 % rows, 0] = 1e5
    return [list(zip(*step, strict=True)) for step in zip(data, targets, strict=True)]


def make_model(seed):
    """Return a model of 12,480 numbers of float32; its first outputs are 0."""
    torch.manual_seed(seed)
    last = nn.Linear(HIDDEN, OUTPUTS)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(NUMBERS, HIDDEN), nn.GELU(), last)


def main(args):
    """Train on this rank; rank 0 tells what came of it."""
    rank, world_size, device = join_group()
    dtype, steps = DTYPES[args.dtype], args.steps
    batches = make_steps(steps, args.micro_batches, world_size * args.batch_size, args.seed)
    mine = [[[x[rank::world_size].to(device) for x in part] for part in step] for step in batches]
    model = make_model(args.seed + rank).to(device)  # the replicas start apart: DDP mends that
    scale = LossScale(1.0, math.inf)  # bfloat16 needs no factor; this skips what is not finite
    if dtype == torch.float16:
        scale = LossScale(args.factor, PATIENCE)
    first = scale.factor
    losses, finite = zip(*train(model, mine, dtype, scale, LR, MAX_NORM), strict=True)
    if rank == 0:
        made, count = sum(finite), sum(p.numel() for p in model.parameters())
        print(f"{world_size} ranks over {dist.get_backend()} on {device.type}, in {args.dtype}")
        print(f"{steps} steps: {made} updates, {steps - made} skipped by all ranks")
        print(f"loss on rank 0: {losses[0]:.3g} at first, {losses[-1]:.3g} at last")
        print(f"factor of the loss: {first:,.0f} at first, {scale.factor:,.0f} at last")
        print(f"gradients sent in a step: {count:,}, as {count * dtype.itemsize:,} bytes")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="%(default)s")
    parser.add_argument("--steps", type=int, default=12, help="3 at least, %(default)s")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step, %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="of each, %(default)s")
    parser.add_argument("--factor", type=int, default=2**16, help="of the loss, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
