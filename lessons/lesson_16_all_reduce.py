"""Lesson 16: what is an all-reduce made of, and which algorithm when?

New: the sum over all ranks, written with send and receive, in five ways. The proof counts on each
rank what it sends, and how many messages must follow each other; it compares the sums with those
of dist.all_reduce, and their bits between ranks. The notebook has recorded times at three sizes.

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
import re
import statistics
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch.utils._python_dispatch import TorchDispatchMode

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


# --- The proof ---

ALGORITHMS = {f.__name__: f for f in (naive, tree, doubling, halving, ring)}
POWER_OF_TWO = ("doubling", "halving")
LENGTHS = (0, 1, 2, 10, 1003)  # also fewer numbers than ranks, and what n does not divide
WAYS = ("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv")


def budget(name, n, numbers):
    """Return the formulas: (numbers that the busiest rank sends, its messages, rounds, of all).

    The last are the messages of all ranks.
    """
    steps = (n - 1).bit_length()  # how often 1 must be doubled to reach n
    halves = [-(-numbers // 2**k) for k in range(steps)]  # rounded up
    neighbours = numbers // n + (numbers + 1) // n  # two chunks that a rank does not send
    return {
        "naive": ((n - 1) * numbers, n - 1, 2 * (n - 1), 2 * (n - 1)),
        "tree": (steps * numbers, steps, 2 * steps, 2 * (n - 1)),
        "doubling": (steps * numbers, steps, steps, n * steps),
        "halving": (sum(halves), 2 * steps, 2 * steps, 2 * n * steps),
        "ring": ((2 * numbers - neighbours) * (n > 1), 2 * (n - 1), 2 * (n - 1), 2 * n * (n - 1)),
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
            if name == "send":
                self.nbytes += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


class Work:
    """A message that is under way. Only who waits for it gets what has arrived."""

    def __init__(self, watch, op, copy, real):
        self.watch, self.tensor, self.copy, self.real = watch, op.tensor, copy, real
        self.sends, self.waited = op.op.__name__ == "isend", False

    def wait(self, *timeout):
        self.real.wait(*timeout)
        self.watch.posting, first, self.waited = False, not self.waited, True
        if first and not self.sends:
            self.tensor.copy_(self.copy)
        elif first and not same(self.tensor, self.copy):
            self.watch.wrong.append("a buffer is changed while it is being sent")
        return True

    def is_completed(self):
        return self.real.is_completed()


class Watch:
    """Sees each send and receive of this rank from outside.

    rounds: what the rank starts before it waits, [(sends?, other rank, bytes)], in order. What
    nobody has waited for is not in its buffer, so that such a mistake is seen each time.
    """

    def __init__(self):
        self.rounds, self.wrong, self.works, self.posting = [], [], [], False
        self.library = {name: getattr(dist, name) for name in WAYS}

    def P2POp(self, op, *args, **options):
        known = {self.isend: self.library["isend"], self.irecv: self.library["irecv"]}
        options = {re.sub("dst|src", "peer", name): value for name, value in options.items()}
        return self.library["P2POp"](known.get(op, op), *args, **options)

    def isend(self, *args, **options):
        return self.batch_isend_irecv([self.P2POp(self.isend, *args, **options)])[0]

    def irecv(self, *args, **options):
        return self.batch_isend_irecv([self.P2POp(self.irecv, *args, **options)])[0]

    def send(self, *args, **options):
        self.isend(*args, **options).wait()

    def recv(self, *args, **options):
        self.irecv(*args, **options).wait()
        return self.rounds[-1][-1][1]

    def batch_isend_irecv(self, ops):
        if not self.posting:
            self.rounds.append([])
        self.posting, copies = True, []
        for op in ops:
            self.rounds[-1].append((op.op.__name__ == "isend", op.peer, op.tensor.nbytes))
            copy = op.tensor.clone() if op.tensor.is_contiguous() else op.tensor  # gloo refuses it
            copies.append(self.library["P2POp"](op.op, copy, op.peer, op.group, op.tag))
        real = self.library["batch_isend_irecv"](copies)
        new = [Work(self, op, c.tensor, r) for op, c, r in zip(ops, copies, real, strict=True)]
        self.works += new  # they live until the end: gloo would write into freed memory
        under_way = [work for work in self.works if not work.waited]
        for one, other in combinations(under_way, 2):
            if not (one.sends and other.sends) and overlap(one.tensor, other.tensor):
                self.wrong.append("a message arrives in memory that another one still uses")
        return new

    @contextmanager
    def __call__(self):
        """Watch what happens in a with-block, and whether it goes past us."""
        watched = {name: getattr(self, name) for name in WAYS}
        with patch.multiple(dist, **watched), Counter() as counter:
            yield counter
        sent = [sends for ops in self.rounds for sends, *_ in ops]
        seen = {"send": sum(sent), "recv": len(sent) - sum(sent)}
        others = sorted(counter.calls.keys() - seen)
        if others:
            self.wrong.append(f"beside send and receive it calls {others}")
        elif counter.calls != {name: count for name, count in seen.items() if count}:
            self.wrong.append(
                "a send or receive is not seen: call it as dist.send, dist.irecv and so on"
            )
        for ops in self.rounds:  # over a slow link it takes up to twice the time: see the page
            if [sends for sends, *_ in ops] != sorted(sends for sends, *_ in ops):
                self.wrong.append("a send is posted before its receive")
        forgotten = [work for work in self.works if not work.waited]
        if forgotten:
            self.wrong.append(f"nobody waits for {len(forgotten)} messages")
        for work in forgotten:
            work.real.wait()


def same(one, other):
    """Return whether two tensors have the same bits; -0.0 is not 0.0, and nan is nan."""
    return torch.equal(*(each.flatten().clone().view(torch.uint8) for each in (one, other)))


def overlap(one, other):
    """Return whether two tensors share memory."""
    begin = max(one.data_ptr(), other.data_ptr())
    return begin < min(one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes)


def play(everyone):
    """Play what Watch has seen, everyone[rank], again, on a clock on which a message takes 1.

    What a rank starts together, as the two directions of a swap, travels at once. Returns
    [(when it ends: its round, source, target, bytes)]; None, if some messages never meet.
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
                    end = max(now[rank], now[other]) + 1
                    ends[rank], ends[other] = max(ends[rank], end), max(ends[other], end)
                    found.append((end, rank, other, nbytes))
        for rank, rounds in enumerate(left):
            if rounds and not rounds[0]:
                now[rank] = ends[rank]
                rounds.pop(0)
        if [len(rounds) for rounds in left] == before:
            return None
    return sorted(found)


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def make_tensor(numbers, kind, seed, device):
    """Return random numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(64 * seed + dist.get_rank())
    return torch.randn(numbers, generator=generator, dtype=kind).to(device)


def examine(names, tensor):
    """Let each algorithm add up a copy of `tensor`; return {name: what is seen on this rank}."""
    library, sizes, found = tensor.clone(), tensor.abs(), {}
    dist.all_reduce(library)
    dist.all_reduce(sizes)
    rounding = dist.get_world_size() * torch.finfo(tensor.dtype).eps * sizes
    for name in names:
        mine, watch = tensor.clone(), Watch()
        with watch():
            ALGORITHMS[name](mine)
        off = (mine - library).abs()
        found[name] = {
            "rounds": watch.rounds,
            "wrong": watch.wrong,
            "off": off.amax().item() if len(off) else 0.0,
            "close": bool((off <= rounding).all()),  # of nan it is not
            "bits": hashlib.sha256(mine.cpu().view(torch.uint8).numpy()).hexdigest(),
        }
    return found


def find_faults(name, everyone, numbers, item):
    """Return what is counted, in the order of budget() and in bytes, and all that is wrong."""
    n, messages = len(everyone), play([seen["rounds"] for seen in everyone])
    sent = [[op for ops in seen["rounds"] for op in ops if op[0]] for seen in everyone]
    rounds = None if messages is None else max((end for end, *_ in messages), default=0)
    nbytes = max(sum(size for *_, size in ops) for ops in sent)
    counted = nbytes, max(map(len, sent)), rounds, sum(map(len, sent))
    sends, *others = budget(name, n, numbers)
    wanted = (sends * item, *others)
    words = "{:,} bytes in {} messages, in {} rounds, of {} messages in all"
    told = f"the busiest rank sends {words.format(*counted)}, and not {words.format(*wanted)}"
    to_right = all(op[1] == (rank + 1) % n for rank, ops in enumerate(sent) for op in ops)
    rules = {
        told: rounds is None or counted == wanted,
        "a receive is not as long as its message": rounds is not None,
        "a message goes to another rank than the right neighbour": name != "ring" or to_right,
        "the sum is not the library's": all(seen["close"] for seen in everyone),
        "the ranks differ in their bits": len({seen["bits"] for seen in everyone}) == 1,
    }
    wrong = [sentence for sentence, holds in rules.items() if not holds]
    wrong += dict.fromkeys(sentence for seen in everyone for sentence in seen["wrong"])
    return counted, [f"{name}, {numbers:,} numbers: {sentence}" for sentence in wrong]


def measure(names, sizes, seed, device):
    """Examine each algorithm at each length; return its facts at `sizes`, and what is wrong."""
    lengths = [(numbers, torch.float32) for numbers in (*sizes, *LENGTHS)]
    lengths.append((10, torch.float64))
    mine = [examine(names, make_tensor(*length, seed, device)) for length in lengths]
    facts, wrong, off = {name: [] for name in names}, [], [0.0]
    for (numbers, kind), ranks in zip(
        lengths, zip(*from_all_ranks(mine), strict=True), strict=True
    ):
        for name in names:
            everyone = [found[name] for found in ranks]
            counted, problems = find_faults(name, everyone, numbers, kind.itemsize)
            facts[name].append(counted)
            wrong += problems
            off += [seen["off"] for seen in everyone]
    facts = {name: counted[: len(sizes)] for name, counted in facts.items()}
    return facts, wrong, torch.tensor(off, dtype=torch.float64).max().item()  # nan, if one is


def refuses(name):
    """Return whether an algorithm raises a ValueError before it sends anything."""
    forbidden = Mock(side_effect=RuntimeError("it has begun to send"))
    with patch.multiple(dist, **dict.fromkeys(WAYS, forbidden)):
        try:
            ALGORITHMS[name](torch.ones(1))
        except (ValueError, RuntimeError) as error:
            return isinstance(error, ValueError)
    return False


def time_it(names, sizes, rounds, batch_size, device):
    """Return {name: [median milliseconds at each size]}, also of the library, and wrong sums."""
    works = {name: ALGORITHMS[name] for name in names} | {"library": dist.all_reduce}
    tensors, mine, wrong = [torch.empty(numbers, device=device) for numbers in sizes], [], []
    one = dist.get_world_size() - 1 if dist.get_rank() == 0 else -1  # of all ranks the sum is 0
    for tensor in tensors:
        for turn in range(rounds + 1):  # the first one warms up
            for name, work in works.items():  # they take turns
                tensor.fill_(one)
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(batch_size):
                    work(tensor)
                right = tensor.norm().item() == 0  # on a GPU this waits for the end
                mine += [(time.perf_counter() - begin) * 1e3 / batch_size] * (turn > 0)
                wrong += [f"{name}, {len(tensor):,} numbers: a timed sum is wrong"] * (not right)
    times, wrong = zip(*from_all_ranks((mine, wrong)), strict=True)
    slowest = iter([max(turn) for turn in zip(*times, strict=True)])
    found = {name: [] for name in works}
    for _ in sizes:
        turns = [[next(slowest) for _ in works] for _ in range(rounds)]
        for name, times in zip(works, zip(*turns, strict=True), strict=True):
            found[name].append(statistics.median(times))
    return found, list(dict.fromkeys(fault for own in wrong for fault in own))


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
    wrong += [f"{name} sends, with {world_size} ranks" for name in left_out if not refuses(name)]
    times = {}
    if not wrong:
        times, wrong = time_it(names, sizes, args.steps, args.batch_size, device)
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
