"""What lesson 20 claims: each row once in an epoch, and no number of workers changes a bit.

The script knows nothing of this file; see lesson_02.py. Its ranks run it in five turns, each in new
processes. The stream: half of the steps, the rest with one worker less, and all without a stop and
without a worker. Then by length: half of the steps, and the rest. What these runs do not show,
such as rows that fill no batch, is played with the script's own classes, in one process.
"""

from contextlib import suppress
from itertools import chain, groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lesson_20_feed_ranks as lesson
import torch
from lockstep.watch import claims, facts

KEEP_VALUES = 10**9  # of the first two updates, and of the end
LIMITS = {"--workers": (0, 64), "--steps": (2, 10**6), "--batch-size": (1, 10**6)}
LIMITS |= {"--rows": (1, 1000), "--seed": (0, 2**31)}


# --- Flags ---


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    if args.data is not None and not any(Path(args.data).glob("*.txt")):
        return f"argument --data: there is no *.txt in {args.data}"
    if (batches := batches_of(args, world_size)) == 0:
        return f"argument --rows: {len(lines_of(args))} rows fill no batch of all ranks"
    if args.workers > batches:
        return f"argument --workers: an epoch has {batches} batches, a worker without one idles"
    wrong = wrong_in_checkpoint(args, world_size) if args.checkpoint is not None else None
    return f"argument --checkpoint: {wrong}" if wrong else None


def wrong_in_checkpoint(args, world_size):
    """Return why the job can't go on from the file --checkpoint, or None."""
    path = Path(args.checkpoint)
    if not path.exists():
        return None if path.parent.is_dir() else f"there is no folder {path.parent}"
    try:
        now = torch.load(path, map_location="cpu", weights_only=True)["now"]
        step, size = now["step"], now["batch_size"]
    except Exception as error:  # damage has many forms
        return f"{path} can't be read: {error!r:.60}"
    if size != size_of(args, world_size):
        return f"{path} counts batches of {size} rows, this job of {size_of(args, world_size)}"
    return f"{path} is at step {step}" if step >= args.steps else None


def lines_of(args):
    """Return the lines that are trained, in the order of their numbers."""
    if args.data is None:
        return lesson.make_lines(args.rows, args.seed)
    files = sorted(Path(args.data).glob("*.txt"))
    return [line for path in files for line in path.read_text().splitlines()]


def size_of(args, world_size):
    """Return how many rows a batch of all ranks has."""
    return args.batch_size // world_size * world_size


def batches_of(args, world_size):
    """Return how many batches of all ranks an epoch has."""
    return len(lines_of(args)) // size_of(args, world_size)


# --- The turns ---


def plan(args):
    """Return the turns: (what is trained, from which step to which, with how many workers)."""
    half, end, workers = args.steps // 2, args.steps, args.workers
    by_length = [("by length", 0, half, workers), ("by length", half, end, workers)]
    if args.by_length:
        return by_length
    other = workers - 1 if workers else 1
    stream = [("the stream", 0, half, workers), ("the stream", half, end, other)]
    return [*stream, ("the stream without a stop", 0, end, 0), *by_length]


def turns(args, world_size, place):
    """Return the flags of the ranks, turn by turn; nobody gets a signal."""
    if args.checkpoint is not None:
        return [([], 0)]
    found = []
    for way, _, end, workers in plan(args):
        flags = ["--steps", str(end), "--workers", str(workers)]
        flags += ["--by-length"] if way == "by length" else []
        if "without" not in way:
            flags += ["--checkpoint", str(Path(place, f"{way}.pt"))]
        found.append((flags, 0))
    return found


def judge(jobs, args, started, launcher):
    """Return the verdict on the jobs of all turns, each {rank: what was seen of it}."""
    claim, of_turns = f"{started} ranks: each row once in an epoch", plan(args)
    if args.checkpoint is not None:
        begin = args.steps - len(jobs[0][0].updates)
        way = "by length" if args.by_length else "the stream"
        of_turns = [(way, begin, args.steps, args.workers)]
    wrong = wrong_in_turns(jobs, of_turns, started)
    if wrong:
        return claims.Verdict(claim, [wrong], {}, [])
    workers = [turn[3] for turn in of_turns]
    wrong = [wrong_in_deal(jobs, of_turns, args, started), wrong_in_evaluation(jobs)]
    for job, turn in zip(jobs, of_turns, strict=True):
        wrong.append(wrong_in_words(job, turn, args, started))
    if len(jobs) == 5:
        wrong += wrong_in_bits(jobs, size_of(args, started) // started)
        *most, last = dict.fromkeys(map(str, workers[:3]))
        claim += (
            f"; with {', '.join(most)} or {last} workers, with a stop or without, the same bits"
        )
    if len(jobs) > 1:
        wrong.append(wrong_in_draws(jobs[-2:], args.workers))
    wrong = [*filter(None, wrong)] or wrong_in_plays()
    numbers = {"world_size": started, "backend": jobs[0][0].group["backend"], "steps": args.steps}
    numbers |= {"device": jobs[0][0].optimizers[0]["device"], "workers": workers}
    numbers |= {"rows": len(lines_of(args)), "batches_per_epoch": batches_of(args, started)}
    return claims.Verdict(claim, wrong, numbers, [])


def wrong_in_turns(jobs, of_turns, started):
    """All ranks take all turns together, and make the steps of each, with equal replicas."""
    if len(jobs) != len(of_turns):
        return f"{len(jobs)} turns were taken, and not {len(of_turns)}"
    for job, (_, begin, end, _) in zip(jobs, of_turns, strict=True):
        wrong = claims.wrong_in_group(job, started) or claims.wrong_in_count(job, end - begin)
        if wrong := wrong or claims.wrong_in_replicas(job):
            return wrong
        if writers := [rank for rank, seen in job.items() if rank and seen.of("save")]:
            return f"ranks {writers} save, too"
    return None


# --- What the ranks trained on ---


def trained(rank):
    """Return for each update of a rank the checksums of the labels that it was given."""
    found, marks = [], []
    for event in rank.events:
        if event["what"] == "batch":
            marks = event["marks"] or []
        elif event["what"] == "update":
            found.append(marks)
            marks = []
    return found


def steps_of(jobs):
    """Return the rows of each step of the jobs, one after the other: [checksums of each rank]."""
    return [step for job in jobs for step in zip(*map(trained, job.values()), strict=True)]


def wrong_in_deal(jobs, of_turns, args, started):
    """In each way, over all its turns, each epoch deals all rows out, once, in a new order."""
    lines, size = lines_of(args), size_of(args, started)
    labels = lesson.make_batch(lines, left_out=0)[1]
    names = {mark: row for row, mark in enumerate(facts.row_checksums(labels, len(lines)))}
    lengths = [len(line.split()[1]) for line in lines]
    for way in dict.fromkeys(turn[0] for turn in of_turns):
        of = [job for job, turn in zip(jobs, of_turns, strict=True) if turn[0] == way]
        steps = [[[names.get(mark) for mark in rows] for rows in step] for step in steps_of(of)]
        begun = args.steps - len(steps)
        wrong = wrong_in_epochs(steps, len(lines), size, begun)
        if way == "by length":
            wrong = wrong or wrong_in_lengths(steps, lengths, len(lines) // size, begun)
        if wrong:
            return f"{way}: {wrong}"
    return None


def wrong_in_epochs(steps, rows, size, begun):
    """All rows but those that fill no batch come once in an epoch, as many on each rank."""
    orders = set()
    for number, step in enumerate(steps, begun):
        if any(len(part) != size // len(step) for part in step):
            return f"step {number}: {[*map(len, step)]} rows, rank by rank, and not equally many"
    for epoch, of in by_epoch(steps, rows // size, begun):
        dealt = [*chain(*chain(*of))]
        if None in dealt or len(set(dealt)) < len(dealt):
            again = len(dealt) - len(set(dealt))
            return f"epoch {epoch}: {again} rows came twice, or are unknown"
        if len(dealt) >= 8 and tuple(dealt[:8]) in orders:
            return f"epoch {epoch}: the order is that of an earlier one"
        orders.add(tuple(dealt[:8]))
    return None


def by_epoch(steps, per_epoch, begun):
    """Return the steps of each epoch, [(number, steps)]; the first may have begun before."""
    numbered = groupby(enumerate(steps, begun), lambda pair: pair[0] // per_epoch)
    return [(epoch, [step for _, step in pairs]) for epoch, pairs in numbered]


def wrong_in_lengths(steps, lengths, per_epoch, begun):
    """By length: no batch reaches into another one's lengths, and they come in any order."""
    ascending = []
    for epoch, of in by_epoch(steps, per_epoch, begun):
        batches = [[lengths[row] for row in chain(*step)] for step in of]
        spans = [(min(batch), max(batch)) for batch in batches]
        ascending.append(spans == sorted(spans))
        if any(b[0] < a[1] for a, b in pairwise(sorted(spans))):
            return f"epoch {epoch}: long and short rows meet in a batch"
    if per_epoch > 3 and len(ascending) > 1 and all(ascending):
        return "short rows come first, in every epoch"
    return None


def wrong_in_bits(jobs, rows):
    """With other workers, and after a stop, models get the same rows, and have the same bits."""
    wrong = []
    for rank in jobs[2]:
        parts = [update for job in jobs[:2] for update in job[rank].updates]
        pairs = list(zip(parts, jobs[2][rank].updates, strict=True))
        if any(a["given"][-rows:] != b["given"][-rows:] for a, b in pairs):
            wrong.append(f"rank {rank} gets other rows with other workers, or after a stop")
        elif any(a["after"] != b["after"] for a, b in pairs):
            wrong.append(f"rank {rank} has other parameters after a stop")
    return wrong[:1]


def wrong_in_draws(jobs, workers):
    """By length: other numbers on each rank, in each worker, and after a stop."""
    drawn = {id(event): event for job in jobs for rank in job.values() for event in rank.drawn}
    looks = [event["states"]["random"] for event in drawn.values() if "random" in event["states"]]
    if workers:  # the rank draws as well, in the evaluation
        looks = [e["states"].get("random") for e in drawn.values() if e["worker"]]
    if len(looks) < len(jobs) * len(jobs[0]) or len(set(looks)) < len(looks):
        return f"by length {len(looks)} looks at rows began with {len(set(looks))} random states"
    return None


# --- The evaluation, and what is said ---


def model_of(job):
    """Return a model with the last parameters of rank 0."""
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(9, 4, padding_idx=0, mode="mean"), torch.nn.Linear(4, 1)
    )
    values = job[0].values_at_end()
    claims.fill(model, {name.removeprefix("module."): v for name, v in values.items()})
    return model


def wrong_in_evaluation(jobs):
    """Each of the 37 rows is on one rank, once; then two numbers of each rank are added up."""
    for job in jobs:
        tested = sorted(chain(*(rank.tested for rank in job.values())))
        if tested != list(range(37)):
            return f"the evaluation sees {len(tested)} rows, {len(set(tested))} of them once"
        for number, rank in job.items():
            last = max(update["number"] for update in rank.updates)
            calls = [[c["name"], c["shape"]] for c in rank.calls if c["number"] > last]
            if calls != [["all_reduce", [[2], "float64"]]]:
                return f"after its training rank {number} calls {calls}"
    return None


def wrong_in_words(job, turn, args, started):
    """Rank 0 tells how far it came, and the error of all rows."""
    way, _, end, workers = turn
    letters, targets = lesson.make_batch(lesson.make_lines(37, args.seed + 1), left_out=0)
    with torch.no_grad(), suppress(KeyError):
        error = (model_of(job)(letters) - targets).double().square().mean().item()
    epoch, batch = divmod(end - 1, batches_of(args, started))
    at = f"step {end}, batch {batch + 1} of epoch {epoch}; error on 37 texts: "
    said = [event["text"] for event in job[0].of("said")]
    way = way.removesuffix(" without a stop")
    wanted = f"{way}, {started} ranks, {workers} workers each: {at}"
    if len(said) != 1 or not said[0].startswith(wanted):
        return f"rank 0 says {said}, and not {wanted!r}"
    if not abs(float(said[0].removeprefix(wanted)) - error) < 2e-6:
        return f"rank 0 says {said[0]!r}, and the error is {error:.6f}"
    return claims.wrong_in_words(job, said)


# --- What is played ---


def delivered(source, workers, epoch, first=0):
    """Return the batches of a stream as a loader delivers them: it asks its workers in turn."""
    source.start_at(epoch, first)
    if workers == 0:
        return list(source)
    parts, found = [], []
    for number in range(workers):
        info = SimpleNamespace(id=number, num_workers=workers)
        with patch.object(lesson, "get_worker_info", lambda info=info: info):
            parts.append(list(source))
    for turn in range(max(map(len, parts))):
        found += [part[turn] for part in parts if turn < len(part)]
    return found


def wrong_in_plays():
    """Return what is wrong with rows that fill no batch, with orders, numbers, or loaders."""
    rules = {}
    for world in (1, 2, 3):
        for workers in (0, 1, 2, 5):
            for first in (0, 1, 3):
                where = f"{world} ranks with {workers} workers, from batch {first} on"
                rules[f"29 rows are dealt wrongly to {where}"] = deals_29(world, workers, first)
    return claims.broken(rules | rules_of_length() | rules_of_chance() | rules_of_loader())


def deals_29(world, workers, first):
    """Return whether of 29 rows, in batches of 6, all ranks get their parts, in the same steps."""
    made = []
    how = lambda epoch: range(29), lambda rows, chance: made.append(1) or rows, 6
    ranks = [lesson.Dealt(*how, rank, world) for rank in range(world)]
    steps = list(zip(*(delivered(one, workers, 0, first) for one in ranks), strict=True))
    wanted = [set(range(6 * number, 6 * number + 6)) for number in range(first, 4)]
    if len(made) != world * len(wanted):  # a worker makes what it gives, and no more
        return False
    return [set(chain(*step)) for step in steps] == wanted and all(
        len(part) == 6 // world for step in steps for part in step
    )


def rules_of_length():
    """Of 10 rows in batches of 4 two are left out, other ones each time; a stop changes nothing."""
    found = []
    for epoch in range(30):
        ranks = [lesson.LikeLengths([*range(10)], 4, rank, 2) for rank in range(2)]
        for one in ranks:
            one.start_at(epoch, 0)
        whole = [list(one) for one in ranks]
        for one in ranks:
            one.start_at(epoch, 1)
        found.append((whole, [list(one) for one in ranks]))
    rows = [sorted(chain(*chain(*whole))) for whole, _ in found]
    rules = {"by length a rank has not its part": all(len(set(one)) == 8 for one in rows)}
    rules["by length some rows never come"] = len(set(chain(*rows))) == 10
    firsts = [[sorted(chain(*step)) for step in zip(*whole, strict=True)] for whole, _ in found]
    apart = all(a[-1] < b[0] for steps in firsts for a, b in pairwise(sorted(steps)))
    rules["by length long and short rows meet in a batch"] = apart
    rules["by length short rows come first"] = len({a < b for a, b in firsts}) == 2
    orders = [list(lesson.LikeLengths([*range(10)], 4, 0, 2, seed)) for seed in range(9)]
    rules["by length all seeds have one order"] = any(one != orders[0] for one in orders)
    goes_on = all([one[1:] for one in whole] == rest for whole, rest in found)
    return rules | {"by length a stop changes the rows": goes_on}


def rules_of_chance():
    """Each batch has numbers of its own; a stop changes none; no order comes twice."""
    lines, drawn = [*map(str, range(24))], []
    same = True
    for seed, epoch, rank in [(s, e, r) for s in (0, 1) for e in range(3) for r in range(2)]:
        source = lesson.Dealt(lambda _: lines, lambda _, chance: chance.random(), 6, rank, 2, seed)
        drawn += delivered(source, 0, epoch)
        same &= delivered(source, 3, epoch, 1) == drawn[-3:]
    files = [SimpleNamespace(read_text="\n".join(part).strip) for part in (lines[:12], lines[12:])]
    orders = [[*lesson.stream(files, e, seed)] for seed in (0, 1) for e in range(20)]
    rules = {"two batches draw the same numbers": len(set(drawn)) == len(drawn) == 48}
    rules["after a stop, or in workers, a batch draws other numbers"] = same
    rules["an order of the stream comes twice"] = len(set(map(tuple, orders))) == 40
    rules["the files come in one order"] = len({order[0] in lines[:12] for order in orders}) == 2
    return rules | {"the stream loses lines": all(sorted(o) == sorted(lines) for o in orders)}


def rules_of_loader():
    """A loop over the loader does not draw where the rank draws; its workers live on."""
    before = torch.get_rng_state()
    read = list(lesson.make_loader(0, 1, dataset=["a", "b"], batch_size=None))
    rules = {f"the loader delivers {read}": read == ["a", "b"]}
    loader = lesson.make_loader(1, 5, dataset=["a", "b"])
    rules["the workers end with the epoch"] = loader.persistent_workers
    rules["the workers' seed is another one"] = (
        loader.generator is not None and loader.generator.initial_seed() == 5
    )
    return rules | {"a loop over the loader draws": torch.equal(before, torch.get_rng_state())}
