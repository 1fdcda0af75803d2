"""Lesson 02: how does DistributedDataParallel keep separate processes in step?

A launcher starts one process per device, a rank. Each has its own model, optimizer and
share of the rows. DDP sends rank 0's parameters once, when it wraps the model. In every
step it sends gradients: an all-reduce inside backward() leaves their mean on every rank,
so all ranks make the same update. The launcher watches from outside that they did, on
rows that nobody else had; the last lines are its own. (What is sent, the notebook counts.)

Run it:         bash scripts/lesson_02.sh --nproc 2 [--launcher torchrun|launch]
What that does: torchrun --standalone --nproc-per-node=2 lessons/lesson_02_launch_ddp.py
Or alone:       python lessons/lesson_02_launch_ddp.py    (a world of one)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu
    loss on all 100 rows: 15.3 before, 0.241 after 40 steps; the replicas agree
    rank 0: LOCAL_RANK=0 WORLD_SIZE=2 OMP_NUM_THREADS=1, rows per step 15 15 15 5
    rank 1: LOCAL_RANK=1 WORLD_SIZE=2 OMP_NUM_THREADS=1, rows per step 15 15 15 5
    gradient against the whole batch's: max difference ...
    PASS the parameters of 2 ranks differ by 0.0 after each of 40 steps
"""

import argparse
import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


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


def train(model, data, steps, batch_size, device, seed=0):
    """Train `model` on all ranks, each with its share of `data`, which is the same on all ranks."""
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, seed=seed)  # which rank, of how many: it asks the group
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)  # 15 rows each, not 30
    replica = DistributedDataParallel(model.to(device))  # rank 0's parameters go to all, only here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch, done = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(replica(rows.to(device)), targets.to(device))
            loss.backward()  # DDP averages the gradients of all ranks while this runs
            optimizer.step()  # same start, same gradient: the replicas stay equal
            done += 1
            if done == steps:
                break
        epoch += 1


def replicas_agree(model):
    """Return whether all ranks hold the same parameters (not buffers); each sends 16 bytes."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        numbers = parameter.detach().cpu().contiguous().flatten()
        digest.update(numbers.view(torch.uint8).numpy())
    checksum = int.from_bytes(digest.digest()[:8], "big", signed=True)
    checksum = torch.tensor(checksum, device=parameter.device)
    lowest, highest = checksum.clone(), checksum.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


# --- The example ---


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


def main(args):
    """Train the toy on this rank; rank 0 says what came of it."""
    rank, world_size, device = join_group(None if args.backend == "auto" else args.backend)
    rows, targets, model = make_toy(args.seed)
    before = mse_loss(model(rows), targets)
    with torch.no_grad():
        model.weight += rank  # the replicas start apart: DDP has to mend that
    train(model, TensorDataset(rows, targets), args.steps, args.batch_size, device, args.seed)
    agree = replicas_agree(model)
    after = mse_loss(model(rows.to(device)), targets.to(device))
    if rank == 0:
        print(f"ranks: {world_size}, over {dist.get_backend()} on {device.type}")
        words = "agree" if agree else "DIFFER"
        losses = f"{before:.3g} before, {after:.3g} after {args.steps} steps"
        print(f"loss on all 100 rows: {losses}; the replicas {words}")
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=40, help="%(default)s")
    size = {"type": int, "default": 30}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    backends = {"choices": ("auto", "gloo", "nccl"), "default": "auto"}
    parser.add_argument("--backend", **backends, help="auto is nccl if there are enough GPUs")
    parser.add_argument("--local-rank", type=int, help="torch.distributed.launch adds it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
