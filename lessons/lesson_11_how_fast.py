"""Lesson 11: how fast is it, and how fast would it be on another machine?

First the limit: each rank computes its share of a batch, and nothing is sent. Then what keeps DDP
from it: its wrapper, and sending. Beside them, one process, also with threads. Bytes are
counted on every rank. A cost model is fitted to some all-reduces and tested on others. If other
work runs on the machine, the lesson says so, and concludes nothing about speed.

Run it: bash scripts/lesson_11.sh --nproc 2 [--steps ROUNDS] [--batch-size ROWS_OF_ALL_RANKS]

Output to expect on a CPU:

    2 ranks over gloo on cpu, ... compute thread(s) each, ... cores
    ...
    PASS gradients, bytes, clock and test are right (a gradient is off by ...); ...
"""

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

# --- The technique ---


def take_turns(works, rounds):
    """Time functions in turns: {name: rounds of ((seconds, processor seconds) of each rank)}.

    Every rank calls this, with the same names; who has nothing to do in a turn hands in a function
    that does nothing. Each turn first warms up. It begins when all ranks are ready; the barrier
    lets them go one shortly after the other.
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
            spent = time.perf_counter() - wall, time.process_time() - processor
            mine[name].append(spent)
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


def fit_link(times):
    """Return the link with the least squared relative error on `times`, [(n, bytes, seconds)]."""
    seconds = torch.tensor([time for *_, time in times], dtype=torch.float64)
    costs = torch.tensor([all_reduce_cost(n, size) for n, size, _ in times], dtype=torch.float64)
    weights = 1 / seconds  # in seconds, only the largest sizes would count
    costs, seconds = costs * weights[:, None], seconds * weights
    links = [torch.linalg.lstsq(costs, seconds[:, None]).solution[:, 0]]
    for column in (0, 1):  # no price is below 0: then the other one pays for all
        link = torch.zeros(2).double()
        link[column] = costs[:, column] @ seconds / costs[:, column].square().sum()
        links.append(link)
    links = [link for link in links if (link >= 0).all()]
    return min(links, key=lambda link: (costs @ link - seconds).square().sum()).tolist()


def predict_speedup(alone, share, sending):
    """Estimate the speed-up (if nothing overlaps, if all does). `alone`: one worker's time."""
    return alone / (share + sending), alone / max(share, sending)


# --- The proof ---

SHAPES = {"many small layers": (100, 16), "few large layers": (4, 512)}  # (layers, width)
WAYS = ("one process", "more threads", "DataParallel", "silent", "wrapped", "DDP")
BY_ALL = WAYS[3:]  # all ranks do these; the others are done by rank 0 alone
SIZES = [2**power for power in range(11, 24, 2)]  # bytes, 2 kB to 8 MB; every second one is fitted
NOT_SET = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")  # DDP as it is
IDLE = 0.95  # of the processor time that ranks get on an idle machine: less is disturbed
OTHERS = 0.1  # cores that other programs keep busy: more is disturbed
SPREAD = 0.15  # between the quartiles of what the ranks compute alone: more is disturbed
ENOUGH = 5  # rounds; from fewer nothing is concluded


def make_problem(shape, batch_size, seed, device):
    """Return (model, rows, targets), in float64; random rows are cheap on purpose (claim C10)."""
    layers, width = SHAPES[shape]
    torch.manual_seed(seed)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    for linear in parts[::2]:
        nn.init.orthogonal_(linear.weight)  # else no gradient would reach the first of 100 layers
    rows, targets = torch.randn(2, batch_size, width, dtype=torch.float64).to(device)
    return nn.Sequential(*parts).to(device, torch.float64), rows, targets


def backward(network, rows, targets, weight, threads=None):
    """Leave the gradient of `weight` times the summed squared error in the parameters."""
    if threads:
        torch.set_num_threads(threads)
    network.zero_grad()
    (mse_loss(network(rows), targets, reduction="sum") * weight).backward()


def data_parallel(model, rows, targets, n, copied):
    """Return a function that leaves the gradient in `model`: n threads of one process (A3, A6)."""
    replicas = [model, *(copy.deepcopy(model) for _ in range(n - 1))]
    pool, threads = ThreadPoolExecutor(n), torch.get_num_threads()  # handed in with each batch
    one = partial(backward, weight=1 / targets.numel(), threads=threads)
    sides = [[*replica.parameters()] for replica in replicas]  # kept, unlike in lesson 01
    both = [pair for other in sides[1:] for pair in zip(sides[0], other, strict=True)]

    def work():
        for ours, theirs in both:  # the master sends all parameters to each replica
            theirs.data.copy_(ours.data)
            copied["parameters"] += ours.nbytes
        list(pool.map(one, replicas, rows.tensor_split(n), targets.tensor_split(n)))
        for ours, theirs in both:  # and it receives all gradients of each replica
            ours.grad += theirs.grad
            copied["gradients"] += theirs.grad.nbytes

    return work


class Contest:
    """The ways to compute the gradient of one batch, on this rank, and what is seen of each."""

    def __init__(self, shape, args, place, alone):
        self.rank, self.n, device = place
        self.threads, self.alone = torch.get_num_threads(), alone
        self.whole, *self.batch = make_problem(shape, args.batch_size, args.seed, device)
        self.share = [part.tensor_split(self.n)[self.rank] for part in self.batch]
        self.seen = {name: [] for name in WAYS}  # of each forward pass: (compute threads, rows)
        self.copied = {"parameters": 0, "gradients": 0}
        ours = WAYS if self.rank == 0 else BY_ALL
        self.models = {name: self.watched(name) for name in ours}
        self.works = {name: self.make(name) if name in ours else tuple for name in WAYS}
        every = self.whole, *self.models.values()
        for parameter in chain(*(model.parameters() for model in every)):
            parameter.data.mul_(1.01)  # like an update: replicas must hear of it
        for work in self.works.values():
            work()  # in the second step, DDP's buckets are sorted anew: take_turns comes after this
        backward(self.whole, *self.batch, 1 / self.batch[1].numel())
        self.right = gradient_of(self.whole)

    def watched(self, name):
        """Return a copy of the model whose forward passes are written down."""

        def write_down(module, inputs):
            self.seen[name].append((torch.get_num_threads(), len(inputs[0])))

        model = copy.deepcopy(self.whole)
        model.register_forward_pre_hook(write_down)
        return model

    def make(self, name):
        """Return a function: one way to leave a gradient in the model of this name (E6)."""
        model, weight = self.models[name], 1 / self.batch[1].numel()
        if name == "DataParallel" and not self.batch[0].is_cuda:
            return data_parallel(model, *self.batch, self.n, self.copied)
        if name == "DataParallel":
            model = nn.DataParallel(model, [*range(self.n)])
        if name == "wrapped":  # all that DDP does, but nobody is there to whom it could send
            model = DistributedDataParallel(model, process_group=self.alone)
        if name == "DDP":  # it takes the mean over ranks: times n, it is the sum
            model, weight = DistributedDataParallel(model), self.n * weight
        batch = self.share if name in BY_ALL else self.batch
        threads = self.threads * (self.n if name == "more threads" else 1)
        return partial(backward, model, *batch, weight, threads)

    def count(self, name):
        """Return how many bytes this rank writes in a step, gloo's too; None without /proc."""
        self.copied.update(parameters=0, gradients=0)
        return written_by(self.works[name])

    def off(self, name):
        """Return how far the gradient is from that of one process, relative to that."""
        if name not in self.models:
            return 0.0
        gradient = gradient_of(self.models[name])
        if name in BY_ALL[:2]:
            dist.all_reduce(gradient)  # each rank has the part of its rows
        off = ((gradient - self.right).norm() / self.right.norm()).item()
        return off if math.isfinite(off) else math.nan


def gradient_of(model):
    """Return the gradient in a model as one vector; where there is none, nan."""
    parts = [torch.full_like(p, math.nan) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def written_by(work):
    """Call `work`; return how many bytes this process writes meanwhile; None without /proc.

    gloo writes to its sockets by `write` and `writev`. What goes out by `send` is not counted here.
    """
    counts = Path("/proc/self/io")
    before = counts.read_text() if counts.exists() else None
    work()
    return before and int(counts.read_text().split()[3]) - int(before.split()[3])


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def send(tensor, group=None):
    """All-reduce a tensor in place."""
    dist.all_reduce(tensor, group=group)


def measure_sending(rounds, world_size, device):
    """Return [[n, bytes, seconds of both peaks, share of the slow one, rounds]] of all-reduces.

    Also, for each rank, how many bytes it has written in one of each: {(n, bytes): written}.
    """
    workers = sorted({n for n in (2, 4, 8, 16, 32, world_size) if 1 < n <= world_size})
    works = {}
    for n in workers:
        group = dist.new_group([*range(n)])
        for size in SIZES:
            tensor = torch.zeros(size // 4, device=device)
            works[n, size] = partial(send, tensor, group) if dist.get_rank() < n else tuple
    times = take_turns(works, rounds) if works else {}
    counted = from_all_ranks({key: written_by(work) for key, work in works.items()})
    return [point(key, times[key]) for key in works], counted


def point(key, rounds):
    """Return [n, bytes, seconds of both peaks, share of the slow one, rounds] of an all-reduce."""
    return [*key, *peaks(slowest(rounds)), len(rounds)]


def peaks(seconds):
    """Return (fast, slow, share of the slow): medians of two groups; of one group, twice the same.

    The cut leaves the least variance of logarithms inside the groups. If that is more than a fifth
    of all, there is one group: a rectangle would keep a quarter, a bell curve more than a third.
    """
    times = sorted(seconds)
    logs = torch.tensor(times, dtype=torch.float64).log()
    fewest = max(3, len(times) // 10)  # of a group

    def inside(cut):
        return sum((part - part.mean()).square().sum() for part in logs.tensor_split([cut]))

    cut = min(range(fewest, len(times) - fewest + 1), key=inside, default=0)
    if inside(cut) >= inside(0) / 5:
        return statistics.median(times), statistics.median(times), 0.0
    fast, slow = (statistics.median(group) for group in (times[:cut], times[cut:]))
    return fast, slow, 1 - cut / len(times)


def middle(values):
    """Return the median and both quartiles; of one value, three times this value."""
    low, median, high = statistics.quantiles(values * 2 if len(values) == 1 else values)
    return median, low, high


def measure(shape, args, place, alone):
    """Let all ways compute the gradient in turns; return the times, and what this rank has seen."""
    contest = Contest(shape, args, place, alone)
    times = take_turns(contest.works, args.steps)
    facts = []
    for name in WAYS:
        fact = {"shape": shape, "workers": contest.n, "variant": name, "rank": contest.rank}
        fact |= {"difference": contest.off(name), "written": contest.count(name)}
        fact |= contest.copied | {"seen": contest.seen[name], "threads": contest.threads}
        told = told_by_ddp(contest.works[name])
        fact |= {"cpu": not contest.batch[0].is_cuda, "buckets": buckets_of(contest.works[name])}
        fact["settings"] = [key for key in NOT_SET if told.get(key)]
        facts.append(fact | {"seconds": [ranks[contest.rank][0] for ranks in times[name]]})
    buckets = buckets_of(contest.works["DDP"])
    contest.works.clear()  # no DDP object may outlive the group
    contest.models.clear()
    return times, facts, buckets


def buckets_of(work):
    """Return the bytes of each bucket that DDP all-reduces, in their order; [] without DDP."""
    told = told_by_ddp(work)
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes", "")
    return [int(size) for size in sizes.split(", ") if size]


def told_by_ddp(work):
    """Return what DDP tells of itself; {} without DDP."""
    network = getattr(work, "args", [None])[0]
    is_ddp = isinstance(network, DistributedDataParallel)
    return network._get_ddp_logging_data() if is_ddp else {}


def fit_and_test(times):
    """Return the link, and by which factors it is wrong where it was fitted, and where it was not.

    Fitted: every second size, without the largest number of ranks, if there are several.
    """
    most = max(n for n, *_ in times)
    fewer = {n for n, *_ in times if n < most} or {most}
    fitted = [t for t in times if t[0] in fewer and t[1] in SIZES[::2]]
    tested = [t for t in times if t not in fitted]
    link = fit_link([t[:3] for t in fitted])
    return link, [factors(link, part) for part in (fitted, tested)]


def fit_slow(times):
    """Return the link by the slow peaks, fitted where the other one is."""
    return fit_and_test([[n, size, slow] for n, size, _, slow, *_ in times])[0] if times else None


def factors(link, times):
    """Return by which factor the model is wrong: the median, and the worst."""
    ratios = [predict_all_reduce(link, n, size) / seconds for n, size, seconds, *_ in times]
    wrong = [max(ratio, 1 / ratio) for ratio in ratios]
    return [statistics.median(wrong), max(wrong)]


# What is wrong


class MadeUpClock:
    """Time for take_turns: of two calls in a row the first takes 50 s, the second 1 + rank.

    Then the GPU works for another 0.25 s. Other ranks are 1000 s late for each barrier.
    """

    def __init__(self, rank):
        self.rank, self.wall, self.processor, self.left, self.log = rank, 0.0, 0.0, 0.0, []

    def work(self, name):
        warm = [word for word in self.log if word != "barrier"][-1:] == [name]
        self.wall += 1 + self.rank if warm else 50
        self.processor, self.left = self.processor + 0.5, self.left + 0.25
        self.log.append(name)

    def barrier(self):
        self.wall += 1000
        self.log.append("barrier")

    def synchronize(self):
        self.wall, self.left = self.wall + self.left, 0.0


def wrong_in_clock(rank, world_size):
    """Return what is wrong with take_turns, by a clock that is made up: a list of sentences."""
    clock, names = MadeUpClock(rank), ("a", "b")
    stand_ins = {"is_initialized": lambda: True, "synchronize": clock.synchronize}
    with (
        patch.multiple(time, perf_counter=lambda: clock.wall, process_time=lambda: clock.processor),
        patch.multiple(torch.cuda, **stand_ins),
        patch.object(dist, "barrier", clock.barrier),
    ):
        times = take_turns({name: partial(clock.work, name) for name in names}, 3)
    right = tuple((1.25 + other, 0.5) for other in range(world_size))
    turns = [word for name in names for word in (name, "barrier") * 2] * 3
    last = slowest(times["a"]) == [world_size + 0.25] * 3
    rules = {
        f"the clock says {times['a'][0]}, not {right}": times == dict.fromkeys(names, [right] * 3),
        f"the turns are {clock.log[:8]}, not {turns[:8]}": clock.log == turns,
        "a step is over before its slowest rank": last,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_waiting(rank, world_size, device):
    """Return what is wrong if the last rank is late for an all-reduce: a list of sentences."""
    tensor = torch.full((10**6,), rank + 1.0, device=device)
    dist.barrier()
    time.sleep(0.5 * (rank == world_size - 1))
    send(tensor)
    there = tensor.eq(world_size * (world_size + 1) / 2).all()
    dist.barrier()
    return [] if there else ["sending is over before the sum is there"]


def wrong_in_model():
    """Return what is wrong with the formulas: a list of sentences."""
    ring = all(ring_by_hand(n) == all_reduce_cost(n, 8 * n) for n in range(1, 9))
    links = [(5e-5, 1e-9), (0.0, 2e-9), (1e-3, 0.0)]
    points = [(n, size) for n in (2, 3) for size in SIZES]
    made_up = [[(*p, predict_all_reduce(link, *p)) for p in points] for link in links]
    found = [fit_link(times) for times in made_up]
    wrong = (torch.tensor(found) - torch.tensor(links)).abs().amax(0)  # per message, per byte
    halves = [(2, 8, 1e-3), (2, 8, 4e-3)]  # by this link it would be 2e-3
    falling = fit_link([(2, size, 1e-3 - 1e-11 * size) for size in SIZES])
    relative = predict_all_reduce(fit_link(halves), 2, 8)  # in seconds it would be 2.5e-3
    rules = {
        "messages or bytes are not those of a ring": ring,
        f"of the links {links}, the fit finds {found}": (wrong < torch.tensor((1e-9, 1e-15))).all(),
        "the errors of the fit are not relative": math.isclose(relative, 0.02 / 17),
        "a price is below 0": min(falling) == 0 < max(falling),
        "twice as much is not as wrong as half": factors((1e-3, 0.0), halves) == [2, 2],
        "4 workers do not gain 2.67, or 4": predict_speedup(8, 2, 1) == (8 / 3, 4),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def ring_by_hand(n):
    """Return (messages, bytes) that a rank of a ring sends until all have a sum of n numbers."""
    has = [[{rank} for _ in range(n)] for rank in range(n)]  # of each number: who is in it
    messages = 0
    while any(part != set(range(n)) for chunks in has for part in chunks):
        moving = [(rank, (rank - messages) % n) for rank in range(n)]
        moving = [(rank, chunk, set(has[rank][chunk])) for rank, chunk in moving]
        for rank, chunk, part in moving:
            has[(rank + 1) % n][chunk] |= part
        messages += 1
    return messages, 8.0 * messages


def wrong_in_sending(counted, on_cpu):
    """Return what is wrong with the bytes of the all-reduces, by rank: a list of sentences.

    gloo cuts what a step of the ring sends into two segments at least, of 1 MiB at most; each is
    three writes, with 48 bytes of gloo's own.
    """
    wrong = []
    if not (on_cpu and Path("/proc/self/io").exists()):
        return wrong
    for rank, counts in enumerate(counted):
        for (n, size), written in counts.items():
            steps, sent = all_reduce_cost(n, size) if rank < n else (0, 0)
            sent += 3 * 48 * steps * max(2, math.ceil(size / n / 2**20))
            if written is None or abs(written - sent) > 48:
                wrong.append(f"rank {rank} of {n} writes {written} bytes of {size}, not {sent:.0f}")
    return wrong[:1]


def wrong_in_test(times, rounds):
    """Fit and test the model; return the link, the errors, and what is wrong with the test."""
    if not times:
        return [0.0, 0.0], [], []
    used, fit = [], fit_link
    with patch.dict(globals(), fit_link=lambda part: used.extend(part) or fit(part)):
        link, errors = fit_and_test(times)
    unseen = [t for t in times if tuple(t[:3]) not in {tuple(u) for u in used}]
    ranks = [{n for n, *_ in points} for points in (times, used)]
    honest = len(unseen) >= len(SIZES) // 2 and errors[1] == factors(link, unseen)
    honest = honest and (len(ranks[0]) == 1 or ranks[0] > ranks[1])  # a number of ranks is unseen
    rules = {
        "the model is tested on what it was fitted to": honest,
        "the error where it was fitted is another one": errors[0] == factors(link, used),
        f"not each all-reduce was timed in {rounds} rounds": all(t[5] == rounds for t in times),
    }
    return link, errors, [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_report(n=2):
    """Return what is wrong with what is concluded from times, by times that are made up."""
    ms = [(100, 0), (60, 0), (80, 0), (50, 40), (47, 53), (70, 69)]  # of each way and rank
    times = {
        name: [tuple((k * part / 1e3, k * part / 2e3) for part in ranks) for k in (1, 2, 8)]
        for name, ranks in zip(WAYS, ms, strict=True)
    }
    row = summarize("", times, [8, 8], [1e-3, 0.0], n)  # two buckets of two messages each
    parts = [90, 10, 6, 34]  # computing, waiting, wrapper, sending
    gains = [1, 100 / 60, 100 / 80, 2, 100 / 53, 100 / 70]
    said = conclude_on_speed({"signs": [], "rows": [row], "errors": [[1, 1], [1.1, 2]]})
    rules = {
        "the parts of DDP's step are others": near(row["parts"].values(), parts),
        "the speed-ups are others": near(row["speedup"].values(), gains),
        "the prediction is another one": near(row["predicted"], (200 / 110, 200 / 106)),
        "other processors are busy": near([row["busy"]["DDP"]], [139 / 140]),
        "the limit is not what silent ranks reach": "71% of the limit" in said,
        "the model's errors are others": "off by 10% where it was not fitted, by 27% for D" in said,
        "the median or a quartile is another value": middle([5, 1, 2, 9, 4]) == (4, 1.5, 7),
        "sending is over before its slowest rank": point((2, 8), times["wrapped"])[2] == 0.106,
        "speed is concluded beside other work": "no c" in conclude_on_speed({"signs": ["so"]}),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_signs():
    """Return what is wrong with the signs of other work, and with peaks, by made-up times."""
    quiet = [((0.1, 0.1),)] * 2
    crowded = [((0.1, 0.05),), ((0.3, 0.15),)]  # half of the processor, far apart, two rounds
    looks = [look_at_made_up_processors(end) for end in (0, 1)]
    with patch.object(looks[0], "now", lambda: looks[1].begin):
        others = looks[0].cores()
    one, two = [*range(10, 30)], [10, 11, 12] * 4 + [90, 60, 300] * 2
    slow = fit_slow([[2, size, 1e-3, 4e-3] for size in SIZES])
    rules = {
        "other programs keep other cores busy": near([others], [2]),
        "other work is not noticed": len(signs_of_other_work([quiet, crowded], 1e3, 1)[1]) == 4,
        "other work is seen where none is": len(signs_of_other_work([quiet], 0, 1)[1]) == 1,
        "one peak is two": peaks(one) == (19.5, 19.5, 0),
        "the slow peaks are not fitted": near(slow[:1], [2e-3]),
        "two peaks are others": near(peaks(two), (11, 90, 1 / 3)),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def look_at_made_up_processors(end):
    """Return Others that begin here: at the end, 2 s later, 6 were used, 2 of them by all ranks."""
    kinds = (1, 1, 1, 50, 50, 1, 1, 1, 0, 0)  # the two 50 are of processors that had no work
    stat = " ".join(str(os.sysconf("SC_CLK_TCK") * kind * end) for kind in kinds)
    own = 2 * end / dist.get_world_size()
    with (
        patch.multiple(Path, exists=lambda _: True, read_text=lambda _: f"cpu {stat}"),
        patch.multiple(time, monotonic=lambda: 2 * end, process_time=lambda: own),
    ):
        return Others()


def near(found, wanted):
    """Return whether two collections have nearly the same numbers."""
    return all(math.isclose(ours, right) for ours, right in zip(found, wanted, strict=True))


def wrong_in_turns(turns, shape, n, args):
    """Return what is wrong with a model's turns: each rank must have told of each of its own."""
    who = [(shape, rank, name) for rank in range(n) for name in WAYS]
    told = [(turn["shape"], turn["rank"], turn["variant"]) for turn in turns]
    silent = [] if told == who else ["not every rank has told what it did"]
    return [*silent, *chain(*(wrong_in_turn(turn, args) for turn in turns))]


def wrong_in_turn(turn, args):
    """Return what is wrong with the gradient, the rows, the threads and the bytes of a turn."""
    n, name, rank, threads = (turn[key] for key in ("workers", "variant", "rank", "threads"))
    parts = [len(part) for part in torch.arange(args.batch_size).tensor_split(n)]
    passes = {"one process": [(threads, args.batch_size)]}
    passes["more threads"] = [(threads * n, args.batch_size)]
    passes["DataParallel"] = [(threads, rows) for rows in parts]
    wanted = passes.get(name, [(threads, parts[rank])]) if rank == 0 or name in BY_ALL else []
    calls = 2 * args.steps + 2  # at the beginning; warm and timed; and one that is counted
    layers, width = SHAPES[turn["shape"]]
    size = 8 * layers * width * (width + 1)
    buckets = [size] if size < 2**20 else [size // layers, size - size // layers]  # 1 MiB is full
    sent = all_reduce_cost(n, size)[1] if name == "DDP" else 0
    copied = (n - 1) * size if name == "DataParallel" and rank == 0 and turn["cpu"] else 0
    countable = turn["cpu"] and Path("/proc/self/io").exists()
    most = sent * (1 + max(0.02, 0.0025 * n))  # gloo's own words about each message
    counted = not countable or (turn["written"] is not None and sent <= turn["written"] <= most)
    rules = {
        f"a gradient is off by {turn['difference']:.2g}": turn["difference"] < 1e-10,
        f"{turn['written']} bytes are written, not {sent:.0f}": counted,
        "other rows or compute threads": sorted(turn["seen"]) == sorted(wanted * calls),
        "DDP's buckets are others": turn["buckets"] == (buckets if name in WAYS[4:] else []),
        f"DDP has {turn['settings']}": not turn["settings"],
        "other copies": turn["parameters"] == turn["gradients"] == copied,
    }
    where = f"{name}, rank {rank}: "
    return [where + sentence for sentence, holds in rules.items() if not holds]


# The report


def summarize(shape, times, buckets, link, n):
    """Return what follows from the times of one model: speed-ups, parts of a step, a prediction."""
    ms = {name: [1e3 * seconds for seconds in slowest(times[name])] for name in WAYS}
    median = {name: statistics.median(ms[name]) for name in WAYS}
    used = {name: sum(p for ranks in times[name] for _, p in ranks) for name in WAYS}
    busy = {name: used[name] / sum(slowest(times[name])) for name in WAYS}  # how many processors
    means = [1e3 * statistics.fmean(s for s, _ in ranks) for ranks in times["silent"]]
    parts = {"computing": statistics.median(means)}  # with the waiting for the slowest, the limit
    parts["waiting"] = median["silent"] - parts["computing"]
    parts["wrapper"] = median["wrapped"] - median["silent"]
    parts["sending"] = median["DDP"] - median["wrapped"]  # with all waiting that it causes
    one, sending = median["one process"], sum(1e3 * predict_all_reduce(link, n, b) for b in buckets)
    guess = predict_speedup(one, median["wrapped"], sending)
    speedup = {name: one / median[name] for name in WAYS}
    off = max(guess[0] / speedup["DDP"], speedup["DDP"] / guess[0])
    row = {"shape": shape, "workers": n, "bytes": sum(buckets), "buckets": buckets, "ms": ms}
    row |= {"busy": busy, "parts": parts, "speedup": speedup}
    return row | {"predicted": guess if n > 1 else None, "off": off}


def signs_of_other_work(silent, others, ranks):
    """Return (share of the processor that the ranks got, why nothing may be said about speed).

    A rank that computes and sends nothing never sleeps: what it lacks, other work has had, or a
    limit on this process has taken away. Of several compute threads it is enough that one is busy.
    `others`: how many cores other programs kept busy meanwhile. `ranks`: how many cores we want.
    """
    shares = [min(1, used / seconds) for rounds in silent for r in rounds for seconds, used in r]
    share = min(1, statistics.fmean(shares) / min(1, count_cores() / ranks))
    signs = []
    if share < IDLE:
        signs.append(f"DISTURBED, the ranks got {share:.0%} of their processor time")
    if others > OTHERS and others + ranks > os.cpu_count():
        signs.append(f"DISTURBED, other programs kept {others:.1f} cores busy")
    spreads = [(high - low) / median for median, low, high in (middle(slowest(r)) for r in silent)]
    if max(spreads) > SPREAD:
        signs.append(f"DISTURBED, quartiles of their computing are {max(spreads):.0%} apart")
    if min(map(len, silent)) < ENOUGH:
        signs.append(f"{min(map(len, silent))} round(s) are too few")
    return share, signs


class Others:
    """How many cores other programs keep busy while we measure; 0 where Linux does not tell."""

    def __init__(self):
        self.begin = self.now()

    def now(self):
        """Return seconds: on the clock, of all processors, and of this process."""
        stat, ticks = Path("/proc/stat"), [0]
        if stat.exists():
            user, nice, system, _, _, *interrupts = map(int, stat.read_text().split()[1:9])
            ticks = [user, nice, system, *interrupts]
        return time.monotonic(), sum(ticks) / os.sysconf("SC_CLK_TCK"), time.process_time()

    def cores(self):
        """Return it; all ranks call this."""
        wall, busy, own = (now - then for now, then in zip(self.now(), self.begin, strict=True))
        return max(0.0, busy - sum(from_all_ranks(own))) / wall


def report(numbers, threads, signs):
    """Return the lines that tell what was measured; of disturbed times, each says so."""
    n, mark = numbers["world_size"], "disturbed: " if "DISTURBED" in str(signs) else ""
    place = f"{n} ranks over {numbers['backend']} on {numbers['device']}"
    lines = [f"{place}, {threads} compute thread(s) each, {count_cores()} cores"]
    for row in numbers["rows"]:
        for name in WAYS:
            median, low, high = middle(row["ms"][name])
            line = f"{row['shape']}, {name}: {median:.3g} ms ({low:.3g} to {high:.3g}), speed-up "
            line += f"{row['speedup'][name]:.3g}, processors busy {row['busy'][name]:.2f}"
            lines.append(mark + line)
        parts = " + ".join(f"{name} {ms:.3g}" for name, ms in row["parts"].items())
        lines.append(f"{mark}{row['shape']}, DDP's step: {parts} ms")
    if numbers["errors"]:
        us, slow = 1e6 * numbers["link"][0], 1e6 * numbers["slow_link"][0]
        link = f"{us:.3g} us per message ({slow:.3g} by the slow peaks), "
        link += f"{1e9 * numbers['link'][1]:.3g} s per GB"
        text = "wrong by a factor of {:.2g} (median), {:.2g} (worst) where fitted; {:.2g}, {:.2g}"
        text = text.format(*chain(*numbers["errors"]))
        lines.append(f"{mark}{n} ranks, all-reduce: {link}; {text} elsewhere")
    return lines


def conclude_on_speed(numbers):
    """Return what may be said about speed: nothing, if the times were disturbed."""
    if numbers["signs"]:
        return f"no conclusion about speed: {'; '.join(numbers['signs'])}"
    row = numbers["rows"][-1]
    reached = statistics.median(row["ms"]["silent"]) / statistics.median(row["ms"]["DDP"])
    text = f"with few large layers DDP reaches {reached:.0%} of the limit"
    if numbers["errors"]:
        off, step = numbers["errors"][1][0] - 1, row["off"] - 1
        text += f"; the model is off by {off:.0%} where it was not fitted, by {step:.0%} for DDP"
    return text


def what_is_right(numbers):
    """Return a sentence that names what was examined: one rank, or a GPU, lacks some."""
    counted = all(turn["written"] is not None and turn["cpu"] for turn in numbers["turns"])
    names = ["gradients", *["bytes"] * counted, "clock", *["test"] * bool(numbers["errors"])]
    worst = max(turn["difference"] for turn in numbers["turns"])
    right = f"{', '.join(names[:-1])} and {names[-1]} are right"
    return f"{right} (a gradient is off by {worst:.2g})"


def measure_all(args, place, numbers):
    """Measure, and add it to the numbers; return what is wrong with it, the same on every rank."""
    rank, n, device = place
    alone = [dist.new_group([other]) for other in range(n)][rank]
    others = Others()
    numbers["all_reduce"], counted = measure_sending(4 * args.steps, n, device)
    link, errors, wrong = wrong_in_test(numbers["all_reduce"], 4 * args.steps)
    wrong = [*chain(*from_all_ranks(wrong + wrong_in_sending(counted, device.type == "cpu")))]
    if wrong:
        return wrong
    rows, turns, silent = [], [], []
    for shape in SHAPES:
        times, facts, buckets = measure(shape, args, place, alone)
        told = [*chain(*from_all_ranks(facts))]
        if wrong := wrong_in_turns(told, shape, n, args):
            return wrong
        rows.append(summarize(shape, times, buckets, link, n))
        turns, silent = turns + told, [*silent, times["silent"]]
    want, numbers["others"] = n * turns[0]["threads"], others.cores()
    numbers["processor"], signs = signs_of_other_work(silent, numbers["others"], want)
    numbers |= {"link": link, "errors": errors, "rows": rows, "turns": turns, "signs": signs}
    numbers["slow_link"] = fit_slow(numbers["all_reduce"])
    free = n > 1 and any(low == high for low, high in (row["predicted"] for row in rows))
    return ["DDP is predicted without a link"] * free


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    place = rank, n, device = join_group()
    numbers = {"lesson": 11, "world_size": n, "backend": dist.get_backend(), "device": device.type}
    wrong = wrong_in_clock(rank, n) + wrong_in_waiting(rank, n, device) + wrong_in_signs()
    wrong = [*chain(*from_all_ranks(wrong + wrong_in_model() + wrong_in_report()))]
    if not wrong:  # by a clock or formulas that are wrong there is nothing to measure
        wrong = measure_all(args, place, numbers)
    dist.destroy_process_group()
    if "rows" in numbers and rank == 0:
        print("\n".join(report(numbers, numbers["turns"][0]["threads"], numbers["signs"])))
    if wrong:
        return False, "; ".join(dict.fromkeys(wrong)), numbers
    return True, f"{what_is_right(numbers)}; {conclude_on_speed(numbers)}", numbers


def count_cores():
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=6, help="rounds, %(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=512, help="rows, %(default)s")
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
