"""Lesson 10: what must hold so that N ranks train exactly as one process?

One process takes a whole batch and the mean loss over its tokens. N ranks cut the batch, each
cuts its part into micro-batches, and backward() adds up. After each update both must hold the
same parameters. The launcher compares them, and takes eleven conditions away, one at a time.

Run it:     bash scripts/lesson_10.sh --nproc 2 [--micro-batches 4]
Or alone:   python lessons/lesson_10_same_as_one_process.py    (a world of one)

Output to expect on a CPU:

    2 ranks over gloo on cpu: 12 updates, 16 texts in each
    mean loss of a token: 2... before, 1... after
    ...
    bytes for the all-reduce of an update, 3 micro-batches: 640 with no_sync, 1920 without
    PASS 2 ranks equal one process (off by ...); a removed condition is off by ... or more
"""

import argparse
import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# --- The technique ---


def deal(rows, epoch, batch_size, rank, world_size, seed=0):
    """Return this rank's part of each batch of an epoch: row numbers, each row on one rank."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
    return [batch[rank::world_size] for batch in order.split(batch_size)]  # 15 rows: 8 and 7


def loss_sum(outputs, targets):
    """Return the sum of the losses of all tokens; a target of -100 is padding, and counts 0."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def count_everywhere(count, device):
    """Return the sum of the counts of all ranks; every rank must call this."""
    total = torch.tensor(count, dtype=torch.float64, device=device)  # exact, in 8 bytes
    dist.all_reduce(total)
    return total.item()


def train_step(replica, optimizer, micro_batches):
    """Make one update with the mean loss over the tokens of all ranks and micro-batches.

    `replica` is a DistributedDataParallel. Every rank must call this, with at least one
    micro-batch, which may be empty; the ranks need not have equally many.
    """
    mine = sum(int((targets != -100).sum()) for _, targets in micro_batches)
    total = max(1, count_everywhere(mine, micro_batches[0][1].device))  # 0: nobody has a token
    # DDP will divide the sum over ranks by their number. So each token is left with 1 / total.
    weight = dist.get_world_size() / total
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():  # the forward, too
            (loss_sum(replica(inputs), targets) * weight).backward()  # the last one sends
    optimizer.step()


def train(model, optimizer, texts, targets, steps, batch_size, micro_batches, seed=0):
    """Train on all ranks; `batch_size` texts of all ranks make a step."""
    rank, world_size, epoch, done = dist.get_rank(), dist.get_world_size(), 0, 0
    replica = DistributedDataParallel(model)  # rank 0's first weights go to all
    while done < steps:
        for mine in deal(len(texts), epoch, batch_size, rank, world_size, seed)[: steps - done]:
            parts = mine.tensor_split(micro_batches)  # some may be empty
            train_step(replica, optimizer, [(texts[part], targets[part]) for part in parts])
            done += 1
        epoch += 1


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


def make_texts(seed):
    """Return 35 texts of 1 to 9 tokens, filled up to 9, and the targets."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, 8, (35, 9), generator=generator)
    targets = (3 * texts + torch.randint(0, 2, texts.shape, generator=generator)) % 8
    lengths = torch.randint(1, 10, (35, 1), generator=generator)
    targets[torch.arange(9) >= lengths] = -100
    return texts, targets


def make_model(seed):
    """Return a model that predicts the next token from this one: 80 numbers of float64."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8, bias=False)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


@torch.no_grad()
def mean_loss(model, texts, targets):
    """Return the mean loss over all tokens."""
    return loss_sum(model(texts), targets) / (targets != -100).sum()


def main(args):
    """Train on this rank; rank 0 tells what came of it."""
    rank, world_size, device = join_group()
    data = [part.to(device) for part in make_texts(args.seed)]
    model = make_model(args.seed + rank).to(device)  # the replicas start apart: DDP mends that
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    before = mean_loss(model, *data)
    train(model, optimizer, *data, args.steps, args.batch_size, args.micro_batches, args.seed)
    after = mean_loss(model, *data)
    if rank == 0:
        where = f"over {dist.get_backend()} on {device.type}"
        print(f"{world_size} ranks {where}: {args.steps} updates, {args.batch_size} texts in each")
        print(f"mean loss of a token: {before:.3g} before, {after:.3g} after")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=12, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks, %(default)s")
    parser.add_argument("--micro-batches", type=int, default=3, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
