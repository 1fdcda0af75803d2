"""Lesson NN: which question does this lesson answer?

What is new since the last lesson, in three to five lines. Which process sends what to
whom, how many bytes, and who waits.

(This template is a small lesson that runs: the ranks add up their numbers.)

Run it:   bash scripts/lesson_NN.sh --nproc 2
Or alone: python lessons/lesson_NN_slug.py

Output to expect on a CPU:

    ranks: 1, over gloo on cpu
    PASS the sum over 1 ranks is 0, as computed by hand
"""

import argparse
import inspect
import json
import os
import sys
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it

# --- The technique ---


def add_ranks(rank, world_size, device):
    """Return the sum of the numbers of all ranks, an integer, on every rank (claim XX)."""
    total = torch.tensor(rank, device=device)
    dist.all_reduce(total)  # 8 bytes from each rank; everybody waits for everybody
    return total.item()


# --- The proof ---


def main(
    steps: range(1, 10**6) = 1,
    batch_size: range(1, 10**6) = 1,
    seed: range(2**32) = 0,
):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    rank, world_size, device = join_group()
    total = add_ranks(rank, world_size, device)
    backend = dist.get_backend()
    dist.destroy_process_group()
    if rank == 0:
        print(f"ranks: {world_size}, over {backend} on {device.type}")
    result = {"lesson": 0, "world_size": world_size, "backend": backend, "device": device.type}
    passed = total == world_size * (world_size - 1) // 2
    claim = f"the sum over {world_size} ranks is {total}, as computed by hand"
    return passed, claim, result | {"total": total}


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device) (A10, A12, B3, E12).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU (E4).
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
    sys.exit(start(main))
