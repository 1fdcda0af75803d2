"""Lesson NN: which question does this lesson answer?

What is new since the last lesson, in three to five lines. Which process sends what to
whom, how many bytes, and who waits. The launcher watches from outside; the last line is its own.

(This template is a small lesson that runs: the ranks add up their numbers.)

Run it:   bash scripts/lesson_NN.sh --nproc 2
Or alone: python lessons/lesson_NN_slug.py

Output to expect on a CPU:

    ranks: 1, over gloo on cpu
    the numbers of all ranks together: 0
    PASS the sum over 1 ranks is 0, computed by hand: 0
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it

# --- The technique ---


def add_ranks(device):
    """Return the sum of the numbers of all ranks, an integer, on every rank."""
    total = torch.tensor(dist.get_rank(), device=device)
    dist.all_reduce(total)  # 8 bytes from each rank; everybody waits for everybody
    return total.item()


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


def main(args):
    """Add up on this rank; rank 0 says what came of it."""
    rank, world_size, device = join_group()
    total = add_ranks(device)
    if rank == 0:
        print(f"ranks: {world_size}, over {dist.get_backend()} on {device.type}")
        print(f"the numbers of all ranks together: {total}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
