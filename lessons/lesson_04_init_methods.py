"""Lesson 04: how do ranks find each other?

Before the first collective, ranks must learn how to reach each other. They read it at one meeting
place: a store, at a host and a port, or in a file. torchrun keeps one; here we open our own. New: a
roll call, which names the rank that is missing or came twice. This script is one rank.

Run it:   bash scripts/lesson_04.sh --init env|tcp|file|store --nproc 2
By hand:  copy each line that it prints into a terminal (with file, name a path of your own)
Or:       torchrun --standalone --nproc-per-node=2 lessons/lesson_04_init_methods.py

Output to expect on a CPU:

    terminal 0: env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... --init=env ...
    terminal 1: env RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... --init=env ...
    ...
    rank ... has met all 2; the sum is 3
    all were there after ... s, and met in ... s, over gloo on cpu
    PASS ranks 0, 1 met by env, and name who is missing; their all-reduce is 3
"""

import argparse
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it

# --- The technique ---

TWO_MINUTES = timedelta(minutes=2)


def told_by_environment():
    """Return (host:port, rank, world size): torchrun, a job script or your hand set them."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return place, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def open_store(place, rank, world_size, limit=TWO_MINUTES):
    """Return the store at `place`, where the ranks meet: host:port, or the path of a file.

    At a host and a port rank 0 holds it; under torchrun the launcher does, and rank 0 only calls.
    """
    if "/" in place:
        return dist.FileStore(place, world_size)
    host, _, port = place.rpartition(":")
    options = {"timeout": limit, "wait_for_workers": False}
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host.strip("[]"), int(port)), family=family)
        # There only; by default it is all addresses, and a store has no password.
        options |= {"is_master": True, "master_listen_fd": server.detach()}
    return dist.TCPStore(host.strip("[]"), int(port), world_size, **options)


def join(store, rank, world_size, job="job", backend="gloo", limit=TWO_MINUTES):
    """Call the roll, then join the default group. Jobs that share a store need a name each.

    A rank waits up to `limit` in the roll call, and in each collective of the group as well.
    """
    attempt = 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # this store outlives a restart
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"{job}, attempt {attempt}", store)
    call_the_roll(store, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def call_the_roll(store, rank, world_size, limit=TWO_MINUTES):
    """Return when each rank has come once, all with one world size; else raise RuntimeError."""
    end, problem = time.monotonic() + limit.total_seconds(), ""
    size = store.compare_set("world size", "", str(world_size)).decode()  # the first one sets it
    if size != str(world_size):
        problem = f"rank {rank} has world size {world_size}, another rank has {size}"
    elif not 0 <= rank < world_size:
        problem = f"rank {rank} is none of the {world_size} ranks, 0 to {world_size - 1}"
    elif store.add(f"rank {rank}", 1) > 1:  # in one step: of two, one gets 1 and the other gets 2
        problem = f"rank {rank} is here twice, or its mark is left from an earlier run"
    if problem:
        store.compare_set("verdict", "", problem)  # the others need not wait any longer
    if store.add("here", 1) == world_size:  # the last one lets all go, if nobody has a problem
        store.compare_set("verdict", "", "complete")
    try:
        store.wait(["verdict"], limit)
    except RuntimeError:
        missing = [f"rank {r}" for r in range(world_size) if not store.check([f"rank {r}"])]
        verdict = f"not here after {limit}: {', '.join(missing)}"
        store.compare_set("verdict", "", verdict if missing else "complete")
    verdict = problem or store.get("verdict").decode()
    if verdict != "complete":
        store.add("told", 1)
        if rank == 0:  # who may hold the store, so it leaves last
            stay_until_told(store, world_size, end)
        raise RuntimeError(verdict)


def stay_until_told(store, world_size, end):
    """Return when all ranks are told; after `end`, when all that are here are, or in 10 seconds."""
    while (now := time.monotonic()) < end + 10:
        if store.add("told", 0) >= (world_size if now < end else store.add("here", 0)):
            return
        time.sleep(0.01)


# --- The example ---


def find_store(args):
    """Return (store, rank, world size), as flags or the environment tell; alone, rank 0 of 1."""
    if args.rank is not None:
        place, rank, world_size = args.init.partition("://")[2], args.rank, args.nproc
    elif "RANK" in os.environ:
        place, rank, world_size = told_by_environment()
    else:
        return dist.HashStore(), 0, 1
    print(f"rank {rank} of {world_size} looks for the others at {place}", flush=True)
    return open_store(place, rank, world_size), rank, world_size


def choose_device(rank, ranks_here):
    """Return (backend, device): nccl where each rank of this machine can have a GPU of its own."""
    if dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return "nccl", device
    return "gloo", torch.device("cpu")


def main(args):
    """Be one rank: meet the others, then add up what all have."""
    store, rank, world_size = find_store(args)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    backend, device = choose_device(local_rank, ranks_here)
    join(store, rank, world_size, backend=backend)
    for _ in range(args.steps):
        numbers = torch.full((args.batch_size,), rank + 1 + args.seed, device=device)
        dist.all_reduce(numbers)  # 8 bytes for each number; every rank receives the sums
    print(f"rank {rank} has met all {world_size}; the sum is {numbers[-1]}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--init", default="env", help="env, tcp, file, store, or METHOD://PLACE")
    parser.add_argument("--rank", type=int, help="be this one, and meet at PLACE")
    parser.add_argument("--nproc", type=int, default=2, help="ranks: %(default)s")
    parser.add_argument("--steps", type=int, default=1, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=1, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
