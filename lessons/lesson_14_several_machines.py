"""Lesson 14: how do ranks on several machines become one job?

Start torchrun on each machine; say how many there are, which one this is, and where the first
is. The launchers meet there and number all ranks. This script trains as lesson 02 does, and
says who is where. The launcher of the lesson watches from outside who connects with whom.

Run it:   bash scripts/lesson_14.sh --nproc 4   (two machines rehearsed on one; ranks on both)
For real: torchrun --nnodes=2 --node-rank=K --nproc-per-node=2 --master-addr=ADDRESS_OF_0
              --master-port=29500 lessons/lesson_14_several_machines.py   (one line; K is 0, then 1)

Output to expect on a CPU:

    ranks: 4, machines: 2, over gloo on cpu
    rank 0: node 0, local rank 0, on ...
    rank 3: node 1, local rank 1, on ...
    loss on all 100 rows: 15.3 before, 0... after 20 steps
    to type on node 0: --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=127.0.0.2 ...
    to type on node 1: --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=127.0.0.2 ...
    rank 0 is at 127.0.0.2 and meets 1, 2, 3 at 127.0.0.2
    ...
    rank 3 is at 127.0.0.3 and meets 0, 1 at 127.0.0.2, 2 at 127.0.0.3
    PASS 4 ranks hold the same parameters: off by 0.0 among them, by ... from one process
"""

import argparse
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


def what_to_type(node, nodes, ranks_here, first, port):
    """Return the flags of torchrun on machine `node`; `first` is the address of machine 0."""
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",  # which machine this is, from 0: the only one that differs
        f"--nproc-per-node={ranks_here}",  # one for each of its GPUs; machines may differ here, too
        f"--master-addr={first}",  # where to meet, and not: who I am
        f"--master-port={port}",
    ]


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


def who_is_where():
    """Return where each rank runs, as its launcher has told it: a dict for each, in their order."""
    place = {
        "host": socket.gethostname(),
        "node": int(os.environ.get("GROUP_RANK", 0)),  # which machine
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),  # which process of this machine
        "ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, place)
    return everyone


def train(model, data, steps, batch_size, device, seed=0):
    """Train `model` on this rank's share of `data`: the loop of lesson 02. No machine is in it."""
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, seed=seed)  # which rank, of how many: it asks the group
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)  # 6 rows each, not 24
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
    """Train the toy on this rank; rank 0 says who was there, and what came of it."""
    rank, _, device = join_group()
    rows, targets, model = make_toy(args.seed)
    before = mse_loss(model(rows), targets)
    with torch.no_grad():
        model.weight += rank  # the replicas start apart: DDP has to mend that
    train(model, TensorDataset(rows, targets), args.steps, args.batch_size, device, args.seed)
    after = mse_loss(model(rows.to(device)), targets.to(device))
    places = who_is_where()
    if rank == 0:
        machines = [place for place in places if place["local_rank"] == 0]
        where = f"over {dist.get_backend()} on {device.type}"
        print(f"ranks: {len(places)}, machines: {len(machines)}, {where}")
        for other, place in enumerate(places):
            who = f"node {place['node']}, local rank {place['local_rank']}"
            print(f"rank {other}: {who}, on {place['host']}")
        print(f"loss on all 100 rows: {before:.3g} before, {after:.3g} after {args.steps} steps")
        tell_what_to_type(machines)
    dist.destroy_process_group()


def tell_what_to_type(machines):
    """Print the flags of torchrun on each machine; each is the place of its first rank."""
    first = os.environ.get("MASTER_ADDR", "ADDRESS_OF_0")
    port = int(os.environ.get("MASTER_PORT", 29500))
    for place in machines:
        typed = what_to_type(place["node"], len(machines), place["ranks_here"], first, port)
        print(f"to type on node {place['node']}: {' '.join(typed)}")


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=20, help="%(default)s")
    size = {"type": int, "default": 24}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--local-rank", type=int, help="torch.distributed.launch adds it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
