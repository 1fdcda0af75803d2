"""Lesson 16: what is an all-reduce made of, and which algorithm when?

The sum over all ranks, written with send and receive, in five ways, and timed beside the library's.
The launcher watches what each rank sends; the table of messages is its own, and so is PASS.

Run it:    bash scripts/lesson_16.sh --nproc 4 [--algorithm ring] [--megabytes 0.001 0.1 4]
Or alone:  torchrun --standalone --nproc-per-node=4 lessons/lesson_16_all_reduce.py

Output to expect on a CPU:

    2 ranks over gloo on cpu
    1 MB        milliseconds  off the library  between ranks
    naive ...
    1 MB            messages            bytes         rounds
    naive                  1        1,000,000              2
    ...
    PASS naive, tree, doubling, halving, ring: the library's sum ... same bits on all ranks
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it

# --- The technique ---
# Each function turns `tensor`, one-dimensional and contiguous, into the sum over all ranks of the
# default group, in place.


def swap(leaving, target, coming, source):
    """Send one tensor while another arrives; after it, both may be used."""
    pair = [dist.P2POp(dist.irecv, coming, source), dist.P2POp(dist.isend, leaving, target)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()  # before it, `leaving` may not change, and `coming` has no meaning


def naive(tensor):
    """Rank 0 takes in all tensors, one after the other, and sends the sum to each rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    for other in range(1, n) if rank == 0 else ():
        dist.recv(arrived, other)
        tensor += arrived
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    for other in range(1, n) if rank == 0 else ():
        dist.send(tensor, other)


def tree(tensor):
    """Pairs add up, then pairs of pairs, until rank 0 has the sum; it goes back the same way."""
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    children = [rank + 2**k for k in range(n.bit_length()) if rank % 2 ** (k + 1) == 0]
    children = [child for child in children if child < n]  # of rank 0: 1, 2, 4
    for child in children:
        dist.recv(arrived, child)
        tensor += arrived
    if rank > 0:
        parent = rank & (rank - 1)  # the last 1 of its binary number goes: 7, 6, 4, 0
        dist.send(tensor, parent)
        dist.recv(tensor, parent)
    for child in reversed(children):
        dist.send(tensor, child)


def doubling(tensor):
    """Swap everything with the neighbour, then with who is 2 away, 4 away, and add each time."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n & (n - 1):
        raise ValueError(f"doubling needs a power of two, and not {n} ranks")
    distance = 1
    while distance < n:
        arrived = torch.empty_like(tensor)
        swap(tensor, rank ^ distance, arrived, rank ^ distance)
        tensor += arrived
        distance *= 2


def halving(tensor, ranks=None):
    """Swap halves with who is far away, sum up the half that stays, and swap the two sums."""
    rank, n = dist.get_rank(), ranks or dist.get_world_size()
    if n & (n - 1):
        raise ValueError(f"halving needs a power of two, and not {n} ranks")
    if n > 1:
        partner, halves = rank ^ (n // 2), tensor.tensor_split(2)
        mine, theirs = halves if rank < partner else reversed(halves)
        arrived = torch.empty_like(mine)
        swap(theirs, partner, arrived, partner)
        mine += arrived
        halving(mine, n // 2)  # with the ranks that keep the same half
        swap(mine, partner, theirs, partner)


def ring(tensor):
    """Send to the right only: in n - 1 rounds chunks become sums, in n - 1 more these go round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.tensor_split(n)  # parts of the same memory; of 10 numbers 4, 3, 3
    for step in range(n - 1):
        leaving, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(mine)
        swap(leaving, right, arrived, left)
        mine += arrived
    for step in range(n - 1):
        swap(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left)


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

ALGORITHMS = {f.__name__: f for f in (naive, tree, doubling, halving, ring)}


def make_tensor(numbers, rank, seed=0, device="cpu"):
    """Return random numbers, other ones for each rank."""
    generator = torch.Generator().manual_seed(64 * seed + rank)
    return torch.randn(numbers, generator=generator).to(device)


def apart(tensor):
    """Return how far the tensors of all ranks lie apart, number by number."""
    lowest, highest = tensor.clone(), tensor.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest - lowest


def compare(add_up, mine):
    """Return how far its sum is off the library's, and from rank to rank: the largest numbers."""
    ours, library = mine.clone(), mine.clone()
    add_up(ours)
    dist.all_reduce(library)
    return (ours - library).abs().max().item(), apart(ours).max().item()


def milliseconds(add_up, mine, turns, in_a_row=1):
    """Return what one all-reduce takes the slowest rank: the median of so many turns."""
    tensor, times = torch.zeros_like(mine), mine.new_empty(turns + 1)
    for turn in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            add_up(tensor)
        tensor[:1].tolist()  # on a GPU this waits for the end
        times[turn] = (time.perf_counter() - begin) * 1e3 / in_a_row
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times[1:].median().item()  # the first turn has warmed up


def main(args):
    """Add up in each way that is asked for; rank 0 tells what came of it."""
    rank, world_size, device = join_group()
    works = ALGORITHMS | {"library": dist.all_reduce}
    if world_size & (world_size - 1) and args.algorithm == "all":
        del works["doubling"], works["halving"]  # they need a power of two
    tell = print if rank == 0 else lambda line: None
    tell(f"{world_size} ranks over {dist.get_backend()} on {device.type}")
    for megabytes in args.megabytes:
        mine = make_tensor(max(1, round(megabytes * 1e6 / 4)), rank, args.seed, device)
        tell(f"{megabytes:g} MB".ljust(12) + "milliseconds  off the library  between ranks")
        for name in works if args.algorithm == "all" else (args.algorithm, "library"):
            off, between = compare(works[name], mine)
            ms = milliseconds(works[name], mine, args.steps, args.batch_size)
            tell(f"{name:12}{ms:12.3g}{off:17.2g}{between:15.2g}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    names = {"choices": ("all", *ALGORITHMS), "default": "all"}
    parser.add_argument("--algorithm", **names, help="%(choices)s; if not given: %(default)s")
    sizes = {"type": float, "nargs": "+", "default": [1.0]}
    parser.add_argument("--megabytes", **sizes, help="sizes of the tensor, of float32: 1")
    parser.add_argument("--steps", type=int, default=5, help="turns that are timed: %(default)s")
    in_a_row = "all-reduces that are timed together: %(default)s"
    parser.add_argument("--batch-size", type=int, default=1, help=in_a_row)
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
