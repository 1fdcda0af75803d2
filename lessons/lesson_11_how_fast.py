"""Lesson 11: how fast is it, and how fast would it be on another machine?

First the limit: each rank computes its share of a batch, and nothing is sent. Then what keeps DDP
from it. Beside them, one process, also with threads. A cost model is fitted to some all-reduces,
and tested on others. The launcher counts bytes, and says nothing of speed beside other work.

Run it:     bash scripts/lesson_11.sh --nproc 2
Or alone:   torchrun --standalone --nproc-per-node=2 lessons/lesson_11_how_fast.py

Output to expect on a CPU:

    2 ranks over gloo on cpu, ... compute thread(s) each
    ...
    PASS gradients, bytes, clock and test are right (a gradient is off by ...); ...
"""

import argparse
import copy
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# --- The technique ---

SIZES = [2**power for power in range(11, 24, 2)]  # bytes, 2 kB to 8 MB; every second one is fitted


def take_turns(works, rounds):
    """Time functions in turns: {name: rounds of ((seconds, processor seconds) of each rank)}.

    Every rank calls this, with the same names; who has nothing to do in a turn hands in a function
    that does nothing. Each turn first warms up, and begins when all ranks are ready.
    """
    mine = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            work()  # not counted: memory, connections, the fastest kernel
            wait_for_gpu()
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            work()
            wait_for_gpu()
            mine[name].append((time.perf_counter() - wall, time.process_time() - processor))
            dist.barrier()  # nobody warms up for the next turn while another rank still works
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: [*zip(*(theirs[name] for theirs in everyone), strict=True)] for name in works}


def wait_for_gpu():
    """Wait until the GPU has done what it was told: a call returns before that."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def slowest(rounds):
    """Return the seconds of each round: a step is over when its slowest rank is."""
    return [max(seconds for seconds, _ in ranks) for ranks in rounds]


def all_reduce_cost(n, size):
    """Return (messages, bytes) that each of n ranks sends when a ring all-reduces `size` bytes."""
    return 2 * (n - 1), 2 * (n - 1) / n * size


def predict_all_reduce(link, n, size):
    """Return seconds. `link`: the price of sending, (seconds per message, seconds per byte)."""
    return sum(price * much for price, much in zip(link, all_reduce_cost(n, size), strict=True))


def time_sums(rounds, device):
    """Return [(ranks, bytes, seconds of each round)] of all-reduces of different sizes."""
    rank, world_size, works = dist.get_rank(), dist.get_world_size(), {}
    for n in sorted({n for n in (2, 4, 8, 16, 32, world_size) if 1 < n <= world_size}):
        group = dist.new_group([*range(n)])
        for size in SIZES:
            work = partial(dist.all_reduce, torch.zeros(size // 4, device=device), group=group)
            works[n, size] = work if rank < n else lambda: None
    times = take_turns(works, rounds)
    return [(*key, slowest(turns)) for key, turns in times.items()]


def fit_link(times):
    """Return the link with the least squared relative error on `times`, [(n, bytes, seconds)]."""
    costs = torch.tensor([all_reduce_cost(n, size) for n, size, _ in times], dtype=torch.float64)
    seconds = torch.tensor([[time] for *_, time in times], dtype=torch.float64)
    weights = 1 / seconds  # else only the largest sizes would count
    links = []
    for paid in ([0, 1], [0], [1]):  # if a price comes out below 0, the other one pays for all
        link = torch.zeros(2, 1, dtype=torch.float64)
        link[paid] = torch.linalg.lstsq(weights * costs[:, paid], weights * seconds).solution
        if (link >= 0).all():
            error = (weights * (costs @ link - seconds)).square().sum()
            links.append((error.item(), link.flatten().tolist()))
    return min(links)[1]


def fit_and_test(times):
    """Return the link, and by which factors it is wrong where it was fitted, and where it was not.

    Fitted: every second size, without the largest number of ranks, if there are several.
    """
    most = max(n for n, *_ in times)
    fewer = {n for n, *_ in times if n < most} or {most}
    fitted = [t for t in times if t[0] in fewer and t[1] in SIZES[::2]]
    link, errors = fit_link(fitted), []
    for part in (fitted, [t for t in times if t not in fitted]):
        ratios = [predict_all_reduce(link, n, size) / seconds for n, size, seconds in part]
        wrong = [max(ratio, 1 / ratio) for ratio in ratios]
        errors.append([statistics.median(wrong), max(wrong)])
    return link, errors


def predict_speedup(alone, share, sending):
    """Estimate the speed-up (if nothing overlaps, if all does). `alone`: one worker's time."""
    return alone / (share + sending), alone / max(share, sending)


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

SHAPES = {"many small layers": (100, 16), "few large layers": (4, 512)}  # (layers, width)


def make_problem(shape, batch_size, seed, device):
    """Return (model, rows, targets), in float64; random rows are cheap on purpose (claim C10)."""
    layers, width = SHAPES[shape]
    torch.manual_seed(seed)
    linears = [nn.Linear(width, width, dtype=torch.float64) for _ in range(layers)]
    for linear in linears:
        nn.init.orthogonal_(linear.weight)  # else no gradient would reach the first of 100 layers
    rows, targets = torch.randn(2, batch_size, width, dtype=torch.float64).to(device)
    parts = [part for linear in linears for part in (linear, nn.Tanh())]
    return nn.Sequential(*parts).to(device), rows, targets


def backward(network, rows, targets, weight, threads):
    """Leave the gradient of `weight` times the summed squared error in the parameters."""
    torch.set_num_threads(threads)
    network.zero_grad()
    (nn.functional.mse_loss(network(rows), targets, reduction="sum") * weight).backward()


def data_parallel(model, rows, targets, n):
    """Return a function that leaves the gradient in `model`: n threads of one process (A3, A6)."""
    replicas = [model, *(copy.deepcopy(model) for _ in range(n - 1))]  # kept, as the threads are
    pool, threads = ThreadPoolExecutor(n), torch.get_num_threads()
    compute = partial(backward, weight=1 / targets.numel(), threads=threads)
    ours, *others = ([*replica.parameters()] for replica in replicas)
    pairs = [pair for theirs in others for pair in zip(ours, theirs, strict=True)]

    def work():
        for our, their in pairs:  # the master sends all parameters to each replica
            their.data.copy_(our.data)
        list(pool.map(compute, replicas, rows.tensor_split(n), targets.tensor_split(n)))
        for our, their in pairs:  # and it receives all gradients of each replica
            our.grad += their.grad

    return work


def make_ways(model, *batch):
    """Return {name: a function that leaves the gradient of one batch in a copy of the model}."""
    rank, n, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    share, mean = [part.tensor_split(n)[rank] for part in batch], 1 / batch[1].numel()
    single, master, silent, *inner = (copy.deepcopy(model) for _ in range(5))
    alone = [dist.new_group([other]) for other in range(n)][rank]
    wrapped = DistributedDataParallel(inner[0], process_group=alone)  # nobody is there to send to
    ddp = DistributedDataParallel(inner[1])  # it takes the mean over ranks: times n, it is the sum
    ways = {"one process": partial(backward, single, *batch, mean, threads)}
    ways["more threads"] = partial(backward, single, *batch, mean, n * threads)
    ways["DataParallel"] = data_parallel(master, *batch, n)
    if batch[0].is_cuda:
        ways["DataParallel"] = partial(backward, nn.DataParallel(master), *batch, mean, threads)
    if rank > 0:  # these three rank 0 does alone
        ways = dict.fromkeys(ways, lambda: None)
    ways["silent"] = partial(backward, silent, *share, mean, threads)
    ways["wrapped"] = partial(backward, wrapped, *share, mean, threads)
    ways["DDP"] = partial(backward, ddp, *share, n * mean, threads)
    return ways


def time_ways(shape, rounds, batch_size, seed, device):
    """Return what take_turns does; DDP sorts its buckets before its second step: not counted."""
    ways = make_ways(*make_problem(shape, batch_size, seed, device))
    return {name: turns[1:] for name, turns in take_turns(ways, rounds + 1).items()}


def main(args):
    """Measure on this rank; rank 0 tells what came of it."""
    rank, n, device = join_group()
    say = print if rank == 0 else lambda line: None
    where, threads = f"over {dist.get_backend()} on {device.type}", torch.get_num_threads()
    say(f"{n} ranks {where}, {threads} compute thread(s) each")
    if n > 1:
        sums = time_sums(4 * args.steps, device)
        link, errors = fit_and_test([(*key, statistics.median(times)) for *key, times in sums])
        say(f"all-reduce: {1e6 * link[0]:.3g} us per message, {1e9 * link[1]:.3g} s per GB")
        say(f"wrong by a factor of {errors[0][1]:.2g} where fitted, {errors[1][1]:.2g} elsewhere")
    for shape in SHAPES:
        times = time_ways(shape, args.steps, args.batch_size, args.seed, device)
        medians = {name: statistics.median(slowest(turns)) for name, turns in times.items()}
        for name, seconds in medians.items():
            gain = medians["one process"] / seconds
            say(f"{shape}, {name}: {1e3 * seconds:.3g} ms, speed-up {gain:.3g}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=6, help="rounds, %(default)s")
    parser.add_argument("--batch-size", type=int, default=512, help="rows, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
