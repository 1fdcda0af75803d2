"""Lesson 16: what is an all-reduce made of, and which algorithm when?

New: the sum over all ranks, written with send and receive, in five ways. The proof counts on each
rank what it sends, and how many messages must follow each other; it compares the sums with those
of dist.all_reduce, and their bits between ranks. The notebook shows where each of the five wins.

Run it: bash scripts/lesson_16.sh --nproc 4 [--algorithm ring] [--megabytes 0.001 0.1 4]

Output to expect on a CPU:

    2 ranks over gloo on cpu; messages and bytes are those that the busiest rank sends
    1 MB         messages        bytes   rounds   milliseconds
    naive               1    1,000,000        2 ...
    tree                1    1,000,000        2 ...
    doubling            1    1,000,000        1 ...
    halving             2    1,000,000        2 ...
    ring                2    1,000,000        2 ...
    library ...
    PASS naive, tree, doubling, halving, ring: the library's sum ... same bits on all ranks
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch.utils._python_dispatch import TorchDispatchMode

# --- The technique ---
# Each function turns `tensor`, one-dimensional, into the sum over all ranks, in place.


def swap(leaving, target, coming, source):
    """Send one tensor while another arrives; return when both are through."""
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


# --- The proof ---

ALGORITHMS = {f.__name__: f for f in (naive, tree, doubling, halving, ring)}
POWER_OF_TWO = ("doubling", "halving")
LENGTHS = (0, 1, 2, 10, 1003)  # also fewer numbers than ranks, and what n does not divide


def budget(name, n, numbers):
    """Return (numbers that the busiest rank sends, its messages, rounds): the formulas."""
    steps = (n - 1).bit_length()  # how often 1 must be doubled to reach n
    halves = [-(-numbers // 2**k) for k in range(steps)]  # rounded up
    neighbours = numbers // n + (numbers + 1) // n  # two chunks that a rank does not send
    return {
        "naive": ((n - 1) * numbers, n - 1, 2 * (n - 1)),
        "tree": (steps * numbers, steps, 2 * steps),
        "doubling": (steps * numbers, steps, steps),
        "halving": (sum(halves), 2 * steps, 2 * steps),
        "ring": ((2 * numbers - neighbours) * (n > 1), 2 * (n - 1), 2 * (n - 1)),
    }[name]


class Counter(TorchDispatchMode):
    """Counts what goes through PyTorch's library of collectives: calls by name, bytes sent."""

    def __init__(self):
        super().__init__()
        self.calls, self.nbytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            name = function._schema.name.partition("::")[2].rstrip("_")
            self.calls[name] = self.calls.get(name, 0) + 1
            self.nbytes += sum(tensor.nbytes for tensor in args[0]) * (name == "send")
        return function(*args, **(kwargs or {}))


class Work:
    """A message of swap() that is under way. Only who waits for it gets what has arrived."""

    def __init__(self, watch, tensor, arrives):
        self.watch, self.tensor, self.arrives = watch, tensor, arrives
        self.before, self.waited, self.work = tensor.clone(), False, None

    def wait(self):
        self.work.wait()
        self.waited = True
        if self.arrives is not None:
            self.tensor.copy_(self.arrives)
        elif not same(self.tensor, self.before):
            self.watch.wrong.append("a buffer is changed while it is being sent")
        return True


class Watch:
    """Sees each send and receive of this rank from outside.

    rounds: what the rank does at a time, [(sends?, other rank, bytes)], in order. What nobody has
    waited for is not in its buffer, so that such a mistake is seen each time.
    """

    def __init__(self):
        self.rounds, self.wrong, self.works = [], [], []
        self.library = {name: getattr(dist, name) for name in ("send", "recv", "batch_isend_irecv")}

    def send(self, tensor, dst):
        self.rounds.append([(True, dst, tensor.nbytes)])
        self.library["send"](tensor, dst)

    def recv(self, tensor, src):
        self.rounds.append([(False, src, tensor.nbytes)])
        return self.library["recv"](tensor, src)

    def batch_isend_irecv(self, ops):
        sends = [op.op.__name__ == "isend" for op in ops]
        if sends != sorted(sends):  # over a slow link it takes up to twice the time: see the page
            self.wrong.append("a send is posted before its receive")
        self.rounds.append(
            [(s, op.peer, op.tensor.nbytes) for s, op in zip(sends, ops, strict=True)]
        )
        copies, mine = [], []
        for op, send in zip(ops, sends, strict=True):
            copy = op.tensor.clone() if send else torch.empty_like(op.tensor)
            copies.append(dist.P2POp(op.op, copy, op.peer))
            mine.append(Work(self, op.tensor, None if send else copy))
        for work, real in zip(mine, self.library["batch_isend_irecv"](copies), strict=True):
            work.work = real
        self.works += mine  # they live until the end: gloo would write into freed memory
        return mine

    @contextmanager
    def __call__(self):
        """Watch what happens in a with-block, and whether it goes past us."""
        watched = {name: getattr(self, name) for name in self.library}
        with patch.multiple(dist, **watched), Counter() as counter:
            yield counter
        sent = [sends for ops in self.rounds for sends, *_ in ops]
        seen = {"send": sum(sent), "recv": len(sent) - sum(sent)}
        if counter.calls != {name: count for name, count in seen.items() if count}:
            self.wrong.append(f"beside send and receive it calls {sorted(counter.calls)}")
        forgotten = [work for work in self.works if not work.waited]
        if forgotten:
            self.wrong.append(f"nobody waits for {len(forgotten)} messages")
        for work in forgotten:
            work.work.wait()


def same(one, other):
    """Return whether two tensors have the same bits; -0.0 is not 0.0, and nan is nan."""
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))


def play(everyone, per_message=1, per_byte=0):
    """Play what Watch has seen, everyone[rank], again, on a clock on which messages take a time.

    A message keeps both its ends busy. Returns [(when it ends, source, target, bytes)]; by default
    a message takes 1, so this is its round. None, if some messages never meet.
    """
    now, left = [0] * len(everyone), [[list(ops) for ops in rounds] for rounds in everyone]
    ends, found = list(now), []
    while any(left):
        before = [len(rounds) for rounds in left]
        for rank, rounds in enumerate(left):
            for op in [op for op in (rounds[0] if rounds else ()) if op[0]]:
                _, other, nbytes = op
                if left[other] and (False, rank, nbytes) in left[other][0]:
                    rounds[0].remove(op), left[other][0].remove((False, rank, nbytes))
                    end = max(now[rank], now[other]) + per_message + per_byte * nbytes
                    ends[rank], ends[other] = max(ends[rank], end), max(ends[other], end)
                    found.append((end, rank, other, nbytes))
        for rank, rounds in enumerate(left):
            if rounds and not rounds[0]:
                now[rank] = ends[rank]
                rounds.pop(0)
        if [len(rounds) for rounds in left] == before:
            return None
    return sorted(found)


def rounds_of(everyone):
    """Return how many messages must follow each other; None if some never meet."""
    messages = play(everyone)
    return None if messages is None else max((end for end, *_ in messages), default=0)


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def make_tensor(numbers, kind, seed, device):
    """Return random numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(64 * seed + dist.get_rank())
    return torch.randn(numbers, generator=generator, dtype=kind).to(device)


def examine(name, tensor):
    """Let an algorithm add up a copy of `tensor`; return what is seen on this rank."""
    mine, library, sizes = tensor.clone(), tensor.clone(), tensor.abs()
    dist.all_reduce(library)
    dist.all_reduce(sizes)
    watch = Watch()
    with watch():
        ALGORITHMS[name](mine)
    off = (mine - library).abs()
    rounding = dist.get_world_size() * torch.finfo(tensor.dtype).eps * sizes
    return {
        "rounds": watch.rounds,
        "wrong": watch.wrong,
        "off": max(off.tolist(), default=0.0),
        "close": bool((off <= rounding).all()),  # of nan it is not
        "bits": hashlib.sha256(mine.cpu().view(torch.uint8).numpy()).hexdigest(),
    }


def judge(name, everyone, numbers, item):
    """Return (what the busiest rank sends, its messages, rounds), and all that is wrong."""
    sent = [[op for ops in seen["rounds"] for op in ops if op[0]] for seen in everyone]
    nbytes = max(sum(size for *_, size in ops) for ops in sent)
    measured = nbytes, max(map(len, sent)), rounds_of([seen["rounds"] for seen in everyone])
    sends, *others = budget(name, len(everyone), numbers)
    wanted = (sends * item, *others)
    words = "{:,} bytes in {} messages, {} rounds"
    told = f"the busiest rank sends {words.format(*measured)}, and not {words.format(*wanted)}"
    rules = {
        told: measured == wanted,
        "the sum is not the library's": all(seen["close"] for seen in everyone),
        "the ranks differ in their bits": len({seen["bits"] for seen in everyone}) == 1,
    }
    wrong = [sentence for sentence, holds in rules.items() if not holds]
    wrong += dict.fromkeys(sentence for seen in everyone for sentence in seen["wrong"])
    return measured, [f"{name}, {numbers:,} numbers: {sentence}" for sentence in wrong]


def measure(names, sizes, seed, device):
    """Examine each algorithm at each length; return its facts at `sizes`, and what is wrong."""
    facts, wrong, off = {name: [] for name in names}, [], [0.0]
    lengths = [(numbers, torch.float32) for numbers in (*sizes, *LENGTHS)]
    for numbers, kind in [*lengths, (10, torch.float64)]:
        tensor = make_tensor(numbers, kind, seed, device)
        for name in names:
            everyone = from_all_ranks(examine(name, tensor))
            measured, problems = judge(name, everyone, numbers, tensor.itemsize)
            facts[name].append(measured)
            wrong += problems
            off += [seen["off"] for seen in everyone]
    facts = {name: measured[: len(sizes)] for name, measured in facts.items()}
    return facts, wrong, torch.tensor(off, dtype=torch.float64).max().item()  # nan, if one is


def time_it(names, sizes, rounds, batch_size, device):
    """Return {name: [median milliseconds at each size]}, also of the library; they take turns."""
    works = {name: ALGORITHMS[name] for name in names} | {"library": dist.all_reduce}
    mine = []
    for tensor in [torch.zeros(numbers, device=device) for numbers in sizes]:
        for turn in range(rounds + 1):  # the first one warms up
            for work in works.values():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(batch_size):
                    work(tensor)
                tensor.sum().item()  # on a GPU this waits for the end
                mine += [(time.perf_counter() - begin) * 1e3 / batch_size] * (turn > 0)
    slowest = iter([max(times) for times in zip(*from_all_ranks(mine), strict=True)])
    found = {name: [] for name in works}
    for _ in sizes:
        turns = [[next(slowest) for _ in works] for _ in range(rounds)]
        for name, times in zip(works, zip(*turns, strict=True), strict=True):
            found[name].append(statistics.median(times))
    return found


def report(numbers, left_out):
    """Print what a reader wants to know: a table for each size."""
    ranks, where = numbers["world_size"], f"{numbers['backend']} on {numbers['device']}"
    print(f"{ranks} ranks over {where}; messages and bytes are those that the busiest rank sends")
    for place, megabytes in enumerate(numbers["megabytes"]):
        print(f"{megabytes:g} MB".ljust(12), "messages        bytes   rounds   milliseconds")
        for name, times in numbers["milliseconds"].items():
            counts = " " * 28
            if name in numbers["algorithms"]:
                counts = f"{numbers['messages_busiest'][name]:8}"
                counts += f"{numbers['bytes_busiest'][name][place]:13,}{numbers['rounds'][name]:9}"
            print(f"{name:12} {counts:30}{times[place]:13.3g}")
    if left_out:
        print(f"{' and '.join(left_out)} need a power of two, and not {ranks} ranks: left out")


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    names, left_out = chosen(args.algorithm, world_size)
    sizes = [round(megabytes * 1e6 / 4) for megabytes in args.megabytes]
    facts, wrong, off = measure(names, sizes, args.seed, device)
    times = {} if wrong else time_it(names, sizes, args.steps, args.batch_size, device)
    numbers = {"lesson": 16, "world_size": world_size, "backend": dist.get_backend()}
    numbers |= {"device": device.type, "megabytes": args.megabytes, "algorithms": names}
    for place, key in enumerate(("bytes_busiest", "messages_busiest", "rounds")):
        numbers[key] = {name: [fact[place] for fact in facts[name]] for name in names}
    for key in ("messages_busiest", "rounds"):  # they are the same for all sizes
        numbers[key] = {name: each[0] for name, each in numbers[key].items()}
    numbers |= {"max_diff": off, "same_bits": not any("bits" in each for each in wrong)}
    numbers["milliseconds"] = times
    dist.destroy_process_group()
    if rank == 0:
        report(numbers, left_out)
    claim = f"{', '.join(names)}: the library's sum (off by {off:.2g}), same bits on all ranks"
    return not wrong, "; ".join(wrong[:3] or [claim]), numbers


def chosen(algorithm, ranks):
    """Return the names of the algorithms to run, and of those that this number does not allow."""
    wanted = list(ALGORITHMS) if algorithm == "all" else [algorithm]
    left_out = [name for name in wanted if name in POWER_OF_TWO and ranks & (ranks - 1)]
    return [name for name in wanted if name not in left_out], left_out


def some_megabytes(text):
    """Return a number from 0 to 1000; the type of --megabytes."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1000, not {text[:40]!r}")
    return number


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    names = {"choices": ("all", *ALGORITHMS), "default": "all"}
    parser.add_argument("--algorithm", **names, help="%(choices)s; if not given: %(default)s")
    sizes = {"type": some_megabytes, "nargs": "+", "default": [1.0]}
    parser.add_argument("--megabytes", **sizes, help="sizes of the tensor, of float32: 1")
    turns = "times that each is timed: %(default)s"
    parser.add_argument("--steps", type=whole(1, 10**6), default=5, help=turns)
    in_a_row = "all-reduces that are timed together: %(default)s"
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=1, help=in_a_row)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if not chosen(args.algorithm, ranks)[0]:
        problem = f"{args.algorithm} needs a power of two, and not {ranks} ranks"
        parser.error(f"argument --algorithm: {problem}")
    return args


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
