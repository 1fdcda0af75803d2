"""Lesson 17: what does DistributedDataParallel do while backward runs?

It is written here in about 90 lines: rank 0's state goes to all, gradients live in flat buckets,
and a bucket leaves as soon as it and all before it are full, while backward still computes.
The launcher lets the library's DDP train beside it, on a model with tied weights, a frozen bias,
BatchNorm, two micro-batches a step, and on one with parameters that a rank does not use. Both must
leave the same gradients.

Run it:   bash scripts/lesson_17.sh --nproc 2 [--bucket-mb 1]
Or alone: python lessons/lesson_17_ddp_from_scratch.py    (a world of one)

Output to expect on a CPU:

    2 ranks over gloo on cpu
    buckets of 1 MiB or a little more: 1,542,240 1,540,224 512,064 bytes
    step 1: loss 1... on rank 0
    step 4: loss 1... on rank 0
    all-reduces begun before the last gradient was there: 2 of 3
    gradients, largest difference to DDP's: 0 in reverse order, 0 in DDP's order
    PASS OwnDDP's gradients are those of DDP
"""

import argparse
import contextlib
import os
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss

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

    @contextlib.contextmanager
    def no_sync(self):
        """Within `with ddp.no_sync():` backward() adds to own gradients, and sends nothing."""
        before, self.averaging = self.averaging, False
        try:
            yield
        finally:
            self.averaging = before

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

WIDTH = 252  # of two layers, the MiB is not full; 10**6 bytes would be


class Model(nn.Module):
    """One weight in the first and the last layer, a frozen bias, BatchNorm.

    The last layer is registered first, and its bias gets its gradient first: orders differ.
    """

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight = self.last.weight
        blocks = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(6)]
        self.blocks = nn.Sequential(*chain(*blocks))
        self.blocks[3].bias.requires_grad_(False)

    def forward(self, rows):
        return self.last(self.blocks(self.first(rows)))


def make_rows(steps, batch_size, seed):
    """Return [step][micro-batch][row]: the rows of all ranks, which the model is to turn round."""
    generator = torch.Generator().manual_seed(seed)
    shape = steps, 2, batch_size // 2, WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def main(args):
    """Train on this rank; rank 0 tells what came of it."""
    rank, world_size, device = join_group()
    batches = make_rows(args.steps, args.batch_size, args.seed)[:, :, rank::world_size].to(device)
    torch.manual_seed(args.seed + rank)  # the replicas start apart: OwnDDP mends that
    ddp = OwnDDP(Model().double().to(device), args.bucket_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if rank == 0:
        sizes = " ".join(f"{flat.nbytes:,}" for flat in ddp.flats)
        print(f"{world_size} ranks over {dist.get_backend()} on {device.type}")
        print(f"buckets of {args.bucket_mb} MiB or a little more: {sizes} bytes")
    for step, (first, second) in enumerate(batches, 1):
        optimizer.zero_grad()
        with ddp.no_sync():
            mse_loss(ddp(first), first.flip(1)).backward()
        loss = mse_loss(ddp(second), second.flip(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (1, args.steps):
            print(f"step {step}: loss {loss.item():.3g} on rank 0")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=4, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks, %(default)s")
    parser.add_argument("--bucket-mb", type=int, default=1, help="MiB, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
