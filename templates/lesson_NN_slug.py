"""Lesson NN: which question does this lesson answer?

What is new since the last lesson, in two or three short sentences. Which process
sends what to whom, how many bytes, and who waits.

(This template is a small lesson that runs: the ranks add up their numbers.)

Run it:   bash scripts/lesson_NN.sh --nproc 2
Or alone: python lessons/lesson_NN_slug.py

Output to expect on a CPU:

    ranks: 1, over gloo on cpu
    PASS the sum over 1 ranks is 0, as computed by hand
"""

import argparse
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


class Arguments(argparse.ArgumentParser):
    """The flags of all lessons. A bad value: one line on stderr, from rank 0, and exit code 2."""

    def __init__(self, text, **defaults):
        super().__init__(description=text, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, value in {**defaults, "seed": 0}.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
        self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        limits = {"nproc": (1, 64), "seed": (0, 2**32 - 1)}
        for name in ("nproc", "steps", "batch_size", "seed"):
            low, high = limits.get(name, (1, 10**6))
            if not low <= getattr(args, name, low) <= high:
                self.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" * (os.environ.get("RANK", "0") == "0"))


def setup(backend=None, store=None):
    """Join the process group; return (rank, world_size, device) (claims A10, A12, B3, E12).

    The launcher's variables say who we are; without them we are a world of one, no address needed.
    nccl where each rank of this machine has its own GPU, else gloo. A group joined before is kept.
    """
    import torch.distributed.nn  # DDP would do it later, and then no gloo thread could ever end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            rank, world_size, store = 0, 1, dist.HashStore()
        backend = backend or ("nccl" if enough_gpus and dist.is_nccl_available() else "gloo")
        place = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    if dist.get_backend() != "nccl":
        return dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


# --- New in this lesson ---


def add_ranks(rank, world_size, device):
    """Return the sum of the numbers of all ranks, an integer, on every rank (claim XX).

    One all-reduce of 8 bytes.
    """
    total = torch.tensor(rank, device=device)
    dist.all_reduce(total)
    return total.item()


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    args = Arguments(__doc__, steps=1, batch_size=1).parse_args(argv)
    rank, world_size, device = setup()
    total = add_ranks(rank, world_size, device)
    backend = dist.get_backend()
    dist.destroy_process_group()

    passed = total == world_size * (world_size - 1) // 2
    if rank == 0:
        print(f"ranks: {world_size}, over {backend} on {device.type}")
        verdict = "PASS" if passed else "FAIL"
        print(f"{verdict} the sum over {world_size} ranks is {total}, as computed by hand")
        if args.json:
            common = {"lesson": 0, "world_size": world_size, "backend": backend}
            print(json.dumps({**common, "device": device.type, "passed": passed, "total": total}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
