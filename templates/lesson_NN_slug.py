"""Lesson NN: which question does this lesson answer?

What is new since the last lesson, in three to five lines. Which process sends what to
whom, how many bytes, and who waits.

(This template is a small lesson that runs: the ranks add up their numbers.)

Run it:   bash scripts/lesson_NN.sh --nproc 2
Or alone: python lessons/lesson_NN_slug.py

Output to expect on a CPU:

    ranks: 1, over gloo on cpu
    PASS the sum over 1 ranks is 0, computed by hand: 0
"""

import argparse
import json
import os
import sys
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


# --- The proof ---


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    rank, world_size, device = join_group()
    total = add_ranks(device)
    numbers = {"lesson": 0, "world_size": world_size, "total": total}
    numbers |= {"backend": dist.get_backend(), "device": device.type}
    dist.destroy_process_group()
    if rank == 0:
        print(f"ranks: {world_size}, over {numbers['backend']} on {device.type}")
    by_hand = world_size * (world_size - 1) // 2
    claim = f"the sum over {world_size} ranks is {total}, computed by hand: {by_hand}"
    return total == by_hand, claim, numbers


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=1, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=1, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(argv)


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
