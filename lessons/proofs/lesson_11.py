"""What lesson 11 claims: gradients, bytes, clock and test are right, and what follows from times.

The script knows nothing of this file; see lesson_02.py. A watched step would take longer, and to
measure again would give other times. So the ranks are watched while they warm up, and left alone
while their clock runs; both readings of it are told (clock.py). Whether the clock starts and stops
where it should, no run shows: take_turns is played with a clock that is made up. So are the cost
model with links, and DataParallel with an update before it, whose right results are known.
"""

import copy
import math
import os
import statistics
import time
from functools import partial
from itertools import chain, product
from unittest.mock import patch

import lesson_11_how_fast as lesson
import numpy as np
import torch
import torch.distributed as dist
from lockstep.watch import claims, facts
from torch import nn
from torch.nn.functional import mse_loss

KEEP_VALUES, TIMES = 1, True
LIMITS = {"--steps": (1, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
WAYS = ("one process", "more threads", "DataParallel", "silent", "wrapped", "DDP")
IDLE = 0.95  # of the processor time that ranks get on an idle machine: less is disturbed
OTHERS = 0.1  # cores that other programs keep busy: more is disturbed
SPREAD = 0.15  # between the quartiles of what the ranks compute alone: more is disturbed
DOUBLE = torch.float64
ENOUGH = 5  # rounds; from fewer nothing is concluded
near = partial(np.allclose, rtol=1e-6, atol=0)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    claim, numbers = "gradients, bytes, clock and test are right", {"world_size": started}
    wrong = [*filter(None, [claims.wrong_in_group(job, started), wrong_in_plays()])]
    timed = None if wrong else turns_of(job, args, started)
    if timed is None:
        wrong = wrong or ["not each turn is timed, or others are"]
        return claims.Verdict(claim, wrong, numbers, [])
    numbers["backend"] = job[0].group["backend"]
    numbers["device"] = "cuda" if numbers["backend"] == "nccl" else "cpu"
    wrong, lines = measured(numbers, timed, args, job), report(numbers)
    if not wrong:
        claim = f"{what_is_right(numbers)}; {conclude_on_speed(numbers)}"
    return claims.Verdict(claim, list(dict.fromkeys(wrong))[:5], numbers, lines)


def measured(numbers, timed, args, job):
    """Add what was measured to the numbers; return what is wrong with it: a list of sentences."""
    n, on_cpu = numbers["world_size"], numbers["device"] == "cpu"
    sums = {place: rounds for place, rounds in timed.items() if place[0] not in lesson.SHAPES}
    sums = [(*place, lesson.slowest(spent(rounds))) for place, rounds in sums.items()]
    points = [[*place, *peaks(times), len(times)] for *place, times in sums]
    fast = slow = [0.0, 0.0], []  # of one rank
    if sums:
        fast, slow = (lesson.fit_and_test([(*p[:2], p[k]) for p in points]) for k in (2, 3))
    numbers |= {"all_reduce": points, "link": fast[0], "errors": fast[1], "slow_link": slow[0]}
    numbers |= {"turns": [], "rows": []}
    for shape in lesson.SHAPES:
        of_shape = {way: timed[shape, way] for way in WAYS}
        numbers["turns"] += seen_in(shape, of_shape, args)
        times = {way: spent(rounds[1:]) for way, rounds in of_shape.items()}
        numbers["rows"].append(summarize(shape, times, numbers["turns"][-1]["buckets"], fast[0], n))
    ((threads, _),) = numbers["turns"][-1]["seen"][-1]
    looks = [[rank.of("turn")[place]["then"] for rank in job.values()] for place in (0, -1)]
    numbers["others"] = cores_of_others(*looks)
    silent = [spent(timed[shape, "silent"][1:]) for shape in lesson.SHAPES]
    signs = signs_of_other_work(silent, numbers["others"], n * threads)
    numbers["processor"], numbers["signs"] = signs
    wrong = wrong_in_sending(timed, on_cpu)
    wrong += chain(*(wrong_in_turn(turn, args, threads, on_cpu) for turn in numbers["turns"]))
    return [*wrong, *filter(None, [claims.wrong_in_words(job, words(numbers, sums, threads))])]


# --- What the ranks did ---


def turns_of(job, args, n):
    """Return {what is timed: rounds of [turn of each rank]}; None if it is not all of it.

    What is timed: (ranks, bytes) of an all-reduce, or (shape, way). A turn: what clock.py notes.
    """
    workers = sorted({k for k in (2, 4, 8, 16, 32, n) if 1 < k <= n})
    order = [*product(workers, lesson.SIZES)] * 4 * args.steps
    for shape in lesson.SHAPES:
        order += [*product([shape], WAYS)] * (args.steps + 1)
    of_ranks, timed = [rank.of("turn") for rank in job.values()], {key: [] for key in order}
    if any(len(turns) != len(order) for turns in of_ranks):
        return None
    for key, *turns in zip(order, *of_ranks, strict=True):
        timed[key].append(turns)
    return timed


def spent(rounds):
    """Return (seconds, processor seconds) of each rank in each round."""
    return [[turn["spent"] for turn in turns] for turns in rounds]


def seen_in(shape, timed, args):
    """Return what each rank did with a model: a dictionary for each way and rank."""
    with claims.one_thread():
        model, rows, targets = lesson.make_problem(shape, args.batch_size, args.seed, "cpu")
        mse_loss(model(rows), targets).backward()
    right = torch.tensor([facts.projection(p.grad) for p in model.parameters()], dtype=DOUBLE)
    length, found = math.hypot(*(facts.norm(p.grad) for p in model.parameters())), []
    for name, rounds in timed.items():
        everyone = [model["gradient"] for turn in rounds[-1] for model in turn["models"]]
        for rank, turns in enumerate(zip(*rounds, strict=True)):
            last = turns[-1]
            mine = [[model["gradient"]] for model in last["models"]]
            sums = [everyone] if name in ("silent", "wrapped") else mine  # of all parts of the rows
            sums = [torch.tensor(each, dtype=DOUBLE).sum(0) for each in sums]
            off = [((each - right).norm() / length).item() for each in sums]
            turn = {"shape": shape, "workers": len(rounds[-1]), "variant": name, "rank": rank}
            turn["difference"] = min(off, default=0.0)  # DataParallel: in one of its replicas
            models = [turn["models"] for turn in turns]
            turn["seen"] = [sorted((m["threads"], m["rows"]) for m in each) for each in models]
            turn |= {"written": last["written"], "buckets": [call[1] for call in last["calls"]]}
            turn["settings"] = [*chain(*(model["settings"] for model in last["models"]))]
            found.append(turn | {"seconds": [turn["spent"][0] for turn in turns[1:]]})
    return found


def wrong_in_turn(turn, args, threads, on_cpu):
    """Return what is wrong with the gradient, the rows, the threads and the bytes of a turn."""
    n, name, rank = (turn[key] for key in ("workers", "variant", "rank"))
    parts = [len(part) for part in torch.arange(args.batch_size).tensor_split(n)]
    wanted = {way: [(threads, parts[rank])] for way in WAYS}
    wanted["one process"] = [(threads, args.batch_size)]
    wanted["more threads"] = [(threads * n, args.batch_size)]
    wanted["DataParallel"] = sorted((threads, rows) for rows in parts)
    wanted = wanted[name] if rank == 0 or name in WAYS[3:] else []  # rank 0 does three ways alone
    layers, width = lesson.SHAPES[turn["shape"]]
    size = 8 * layers * width * (width + 1)
    buckets = [size] if size < 2**20 else [size // layers, size - size // layers]  # 1 MiB is full
    sent = lesson.all_reduce_cost(n, size)[1] if name == "DDP" else 0
    most = sent * (1 + max(0.02, 0.0025 * n))  # gloo's own words about each message
    counted = turn["written"] is None or sent <= turn["written"] <= most
    alike = all(models == wanted for models in turn["seen"])
    rules = {
        f"a gradient is off by {turn['difference']:.2g}": turn["difference"] < 1e-10,
        f"{turn['written']} bytes are written, not {sent:.0f}": counted or not on_cpu,
        "other rows or compute threads": alike or (name == "DataParallel" and not on_cpu),
        "DDP's buckets are others": turn["buckets"] == buckets * (name in ("wrapped", "DDP")),
        f"DDP has {turn['settings']}": not turn["settings"],
    }
    return [f"{name}, rank {rank}: {sentence}" for sentence in claims.broken(rules)]


def wrong_in_sending(timed, on_cpu):
    """Return what is wrong with the all-reduces of a last round: calls, and bytes by rank.

    gloo cuts what a step of the ring sends into two segments at least, of 1 MiB at most; each is
    three writes, with 48 bytes of gloo's own.
    """
    for (n, size), rounds in timed.items():
        for rank, seen in enumerate(rounds[-1] if n not in lesson.SHAPES else ()):
            calls = [["all_reduce", size, True]] if rank < n else []  # it waits for the sum
            if seen["calls"] != calls:
                return [f"rank {rank} of {n} sends {seen['calls']}, and not {calls}"]
            steps, sent = lesson.all_reduce_cost(n, size) if rank < n else (0, 0)
            sent += 3 * 48 * steps * max(2, math.ceil(size / n / 2**20))
            if on_cpu and seen["written"] is not None and abs(seen["written"] - sent) > 48:
                return [f"rank {rank} of {n} writes {seen['written']} bytes, not {sent:.0f}"]
    return []


def words(numbers, sums, threads):
    """Return what rank 0 should have told, by the times that were seen."""
    where = f"over {numbers['backend']} on {numbers['device']}"
    lines = [f"{numbers['world_size']} ranks {where}, {threads} compute thread(s) each"]
    if sums:
        link, errors = lesson.fit_and_test([(*p, statistics.median(times)) for *p, times in sums])
        lines.append(
            f"all-reduce: {1e6 * link[0]:.3g} us per message, {1e9 * link[1]:.3g} s per GB"
        )
        most = [error[1] for error in errors]
        lines.append("wrong by a factor of {:.2g} where fitted, {:.2g} elsewhere".format(*most))
    for row in numbers["rows"]:
        for name, gain in row["speedup"].items():
            ms = statistics.median(row["ms"][name])
            lines.append(f"{row['shape']}, {name}: {ms:.3g} ms, speed-up {gain:.3g}")
    return lines


# --- What a run does not show ---


def wrong_in_clock():
    """Return what is wrong with take_turns, by clocks that tell how much was called before them."""
    log = []

    def noting(name):
        return lambda: log.append(name) or len(log)

    def gather(everyone, mine):
        late = {name: [(wall + 1, used) for wall, used in turns] for name, turns in mine.items()}
        everyone[:] = [mine, late]

    group = {"barrier": noting("barrier"), "get_world_size": lambda: 2, "all_gather_object": gather}
    cuda = {"is_initialized": lambda: True, "synchronize": noting("GPU")}
    clocks = {"perf_counter": noting("wall"), "process_time": noting("processor")}
    with (
        patch.multiple(time, **clocks),
        patch.multiple(torch.cuda, **cuda),
        patch.multiple(dist, **group),
    ):
        times = lesson.take_turns({name: noting(name) for name in "ab"}, 3)
    right, readings = ((4, 4), (5, 4)), ["wall", "processor"]
    turns = [[way, "GPU", "barrier", *readings, way, "GPU", *readings, "barrier"] for way in "ab"]
    rules = {
        f"the clocks tell {times['a'][0]}, not {right}": times == dict.fromkeys("ab", [right] * 3),
        f"a turn is {log[:10]}, not {turns[0]}": log == [*chain(*turns)] * 3,
        "a step is over before its slowest rank": lesson.slowest([right] * 3) == [5] * 3,
    }
    return claims.broken(rules)


def wrong_in_model():
    """Return what is wrong with the fit and the speed-up; gloo's bytes are those of the formula."""
    predict, fit = lesson.predict_all_reduce, lesson.fit_link
    links = [(5e-5, 1e-9), (0.0, 2e-9), (1e-3, 0.0)]
    points = [*product((2, 3), lesson.SIZES)]
    found = [fit([(*point, predict(link, *point)) for point in points]) for link in links]
    wrong = (torch.tensor(found) - torch.tensor(links)).abs().amax(0)  # per message, per byte
    halves = fit([(2, 8, 1e-3), (2, 8, 4e-3)])  # in seconds the fit would predict 2.5e-3
    falling = fit([(2, size, 1e-3 - 1e-11 * size) for size in lesson.SIZES])
    rules = {
        f"of the links {links}, the fit finds {found}": (wrong < torch.tensor((1e-9, 1e-15))).all(),
        "the errors of the fit are not relative": near(predict(halves, 2, 8), 0.02 / 17),
        "a price is below 0": min(falling) == 0 < max(falling),
        "4 workers do not gain 2.67, or 4": lesson.predict_speedup(8, 2, 1) == (8 / 3, 4),
    }
    return claims.broken(rules)


def wrong_in_test(workers):
    """Times that are not fitted are half as long as the model says, or four times as long."""
    link, small = (1e-4, 1e-9), lesson.SIZES[1]
    seen = [*product(workers[:-1] or workers, lesson.SIZES[::2])]
    times = {(n, size): 4.0 if size == small else 0.5 for n, size in product(workers, lesson.SIZES)}
    times |= dict.fromkeys(seen, 1.0)
    times = [(*p, lesson.predict_all_reduce(link, *p) * factor) for p, factor in times.items()]
    found, errors = lesson.fit_and_test(times)
    honest = near(found, link) and near(errors, ((1, 1), (2, 4)))
    return [] if honest else [f"the model is not tested where it was not fitted: {errors}"]


def wrong_in_copies():
    """Three replicas of a master that was updated have its parameters, and it their gradients."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    (rows, targets), alone = torch.randn(2, 7, 3, dtype=DOUBLE), copy.deepcopy(model)
    with claims.one_thread():
        work = lesson.data_parallel(model, rows, targets, 3)
        for parameter in chain(model.parameters(), alone.parameters()):
            parameter.data.mul_(1.01)  # like an update
        work()
    mse_loss(alone(rows), targets).backward()
    off = claims.off(*(claims.numbers_of(each, lambda p: p.grad) for each in (model, alone)))
    return [] if off < 1e-12 else [f"DataParallel: a gradient is off by {off:.2g}"]


def wrong_in_plays():
    """Return what is wrong with what a run does not show, in one sentence, or None."""
    wrong = wrong_in_clock() + wrong_in_model()
    wrong = wrong or wrong_in_test((2,)) + wrong_in_test((2, 3, 4)) + wrong_in_copies()
    return "; ".join(wrong) or None


# --- What follows from the times ---


def peaks(seconds):
    """Return (fast, slow, share of the slow): medians of two groups; of one group, twice the same.

    The cut leaves the least variance of logarithms inside the groups. If that is more than a fifth
    of all, there is one group: a rectangle would keep a quarter, a bell curve more than a third.
    """
    times = sorted(seconds)
    logs, fewest = torch.tensor(times, dtype=DOUBLE).log(), max(3, len(times) // 10)  # of a group

    def inside(cut):
        return sum((part - part.mean()).square().sum() for part in logs.tensor_split([cut]))

    cut = min(range(fewest, len(times) - fewest + 1), key=inside, default=0)
    cut = cut if inside(cut) < inside(0) / 5 else 0
    fast, slow = (statistics.median(group) for group in (times[:cut] or times, times[cut:]))
    return fast, slow, 1 - cut / len(times) if cut else 0.0


def summarize(shape, timed, buckets, link, n):
    """Return what follows from the times of one model: speed-ups, parts of a step, a prediction.

    `timed`: {way: rounds of ((seconds, processor seconds) of each rank)}.
    """
    ms = {way: [1e3 * seconds for seconds in lesson.slowest(turns)] for way, turns in timed.items()}
    median = {way: statistics.median(times) for way, times in ms.items()}
    means = [1e3 * statistics.fmean(s for s, _ in ranks) for ranks in timed["silent"]]
    parts = {"computing": statistics.median(means)}  # with the waiting for the slowest, the limit
    parts["waiting"] = median["silent"] - parts["computing"]
    parts["wrapper"] = median["wrapped"] - median["silent"]
    parts["sending"] = median["DDP"] - median["wrapped"]  # with all waiting that it causes
    speedup = {way: median["one process"] / each for way, each in median.items()}
    sending = sum(1e3 * lesson.predict_all_reduce(link, n, size) for size in buckets)
    guess = lesson.predict_speedup(median["one process"], median["wrapped"], sending)
    off = max(guess[0] / speedup["DDP"], speedup["DDP"] / guess[0])
    row = {"shape": shape, "workers": n, "bytes": sum(buckets), "buckets": buckets, "ms": ms}
    row |= {"parts": parts, "speedup": speedup}
    return row | {"predicted": guess if n > 1 else None, "off": off}


def cores_of_others(begin, end):
    """Return how many cores other programs kept busy meanwhile, by what clock.processors told."""
    busy = end[0][1] - begin[0][1]
    own = sum(after[2] - before[2] for before, after in zip(begin, end, strict=True))
    return max(0.0, busy - own) / (end[0][0] - begin[0][0])


def signs_of_other_work(silent, others, ranks):
    """Return (share of the processor that the ranks got, why nothing may be said about speed).

    A rank that computes and sends nothing never sleeps: what it lacks, other work has had, or a
    limit on this process has taken away. Of several compute threads it is enough that one is busy.
    `others`: how many cores other programs kept busy meanwhile. `ranks`: how many cores we want.
    """
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shares = [min(1, used / seconds) for rounds in silent for r in rounds for seconds, used in r]
    share = min(1, statistics.fmean(shares) / min(1, may_use / ranks))
    times = [lesson.slowest(rounds) for rounds in silent]
    quartiles = [statistics.quantiles(own * 2 if len(own) == 1 else own) for own in times]
    spread = max((high - low) / median for low, median, high in quartiles)
    fewest = min(map(len, silent))
    signs = {
        f"DISTURBED, the ranks got {share:.0%} of their processor time": share >= IDLE,
        f"DISTURBED, other programs kept {others:.1f} cores busy": others <= OTHERS
        or others + ranks <= os.cpu_count(),
        f"DISTURBED, quartiles of their computing are {spread:.0%} apart": spread <= SPREAD,
        f"{fewest} round(s) are too few": fewest >= ENOUGH,
    }
    return share, claims.broken(signs)


def report(numbers):
    """Return the lines that tell what was measured; of disturbed times, each says so."""
    lines = []
    for row in numbers["rows"]:
        parts = " + ".join(f"{name} {ms:.3g}" for name, ms in row["parts"].items())
        lines.append(f"{row['shape']}, DDP's step: {parts} ms")
    for kind, link in (("fast", "link"), ("slow", "slow_link")) if numbers["errors"] else ():
        us, per_gb = 1e6 * numbers[link][0], 1e9 * numbers[link][1]
        lines.append(f"all-reduce, {kind} times: {us:.3g} us per message, {per_gb:.3g} s per GB")
    return ["disturbed: " * ("DISTURBED" in str(numbers["signs"])) + line for line in lines]


def conclude_on_speed(numbers):
    """Return what may be said about speed: nothing, if the times were disturbed."""
    if numbers["signs"]:
        return f"no conclusion about speed: {'; '.join(numbers['signs'])}"
    row = numbers["rows"][-1]
    reached = row["speedup"]["DDP"] / row["speedup"]["silent"]
    text = f"with few large layers DDP reaches {reached:.0%} of the limit"
    if numbers["errors"]:
        off, step = numbers["errors"][1][0] - 1, row["off"] - 1
        text += f"; the model is off by {off:.0%} where it was not fitted, by {step:.0%} for DDP"
    return text


def what_is_right(numbers):
    """Return a sentence that names what was examined: one rank, or a GPU, lacks some."""
    counted = numbers["device"] == "cpu" and all(t["written"] is not None for t in numbers["turns"])
    names = ["gradients", *["bytes"] * counted, "clock", *["test"] * bool(numbers["errors"])]
    worst = claims.worst([turn["difference"] for turn in numbers["turns"]])
    right = f"{', '.join(names[:-1])} and {names[-1]} are right"
    return f"{right} (a gradient is off by {worst:.2g})"
