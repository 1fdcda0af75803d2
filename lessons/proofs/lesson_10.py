"""What lesson 10 claims: N ranks train as one process does, and eleven conditions are needed.

The script knows nothing of this file; see lesson_02.py. What a condition is good for can't be
watched in a script that keeps it. So edits take them away, one at a time, and the script is played
in threads, with an average of our own for DDP's. Unedited, it must do what the ranks have done.
"""

import contextlib
import math
from functools import partial
from pathlib import Path
from unittest.mock import patch

import lesson_10_same_as_one_process as lesson
import torch
from lockstep.watch import claims, facts
from lockstep.watch.played_ddp import distance, play, spoiled, update_of, updates_of
from torch import nn
from torch.nn.functional import cross_entropy, normalize

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (1, 300), "--batch-size": (1, 32), "--micro-batches": (2, 16)}
LIMITS |= {"--seed": (0, 2**32 - 1)}
SOURCE = Path(lesson.__file__).read_text()

SHARE, OWN = "batch[rank::world_size] for", "/ max(1, (targets != -100).sum())"
COUNT = "dist.all_reduce(total)", "total *= dist.get_world_size()", "gradients"
WITHOUT = {  # condition: (text in the script, text in its place, what is wrong first)
    "a part of its own for each rank": (SHARE, "batch[::world_size] for", "rows"),
    "each row once": (SHARE, f"torch.cat([batch, batch[:1]]){SHARE[5:]}", "rows"),
    "a new order in each epoch": ("manual_seed(seed + epoch)", "manual_seed(seed)", "rows"),
    "one count for all ranks": COUNT,
    "one count for all micro-batches": ("* weight)", f"{OWN} / len(micro_batches))", "gradients"),
    "losses divided": ("* weight)", f"{OWN})", "gradients"),
    "the last micro-batch sends": ("number == len(micro_batches)", "number == 1", "gradients"),
    "the loss is a sum over rows": ("return cross_entropy(", "return contrast_sum(", "gradients"),
    "the same first weights": ("Parallel(model)", "Parallel(model, init_sync=False)", "gradients"),
    "the same optimizer settings": ("lr=0.3", "lr=0.3 * (1 + rank)", "updates"),
    "nothing random but by row": ("nn.Sequential(", "DropByRank(", "gradients"),
}
BY_ROW = ("nn.Sequential(", "DropByRow(")
ALWAYS = ("nullcontext() if last else replica.no_sync()", "nullcontext()")


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < 2 * world_size:
        return f"argument --batch-size: must be at least two for a rank, {2 * world_size}"
    if args.steps <= (epoch := math.ceil(35 / args.batch_size)):
        return f"argument --steps: must be more than an epoch has, {epoch}"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    model, claim = lesson.make_model(args.seed), f"{started} ranks equal one process"
    if wrong := claims.wrong_in_optimizer(job, model):
        return claims.Verdict(claim, [wrong], {}, [])
    begin = claims.numbers_of(model, lambda parameter: parameter)
    alone, seen = one_process(vars(lesson), args), [updates_of(rank) for rank in job.values()]
    first, kept = spoiled(seen, alone), distance(seen, alone)
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong += [claims.wrong_in_replicas(job), wrong_in_words(job, args, started, model)]
    wrong += [wrong_in_sent(job, args.micro_batches, begin.nbytes)]
    wrong += [f"{first} differ first" if first != "nothing" else None]
    numbers = {"world_size": started, "backend": job[0].group["backend"], "off": {}, "bytes": []}
    numbers |= {"device": job[0].optimizers[0]["device"], "rows_per_step": args.batch_size}
    numbers |= {"param_change": claims.off(alone[-1].after, begin)}
    claim = f"{claim} (off by {kept:.1e})"
    if wrong := list(filter(None, wrong)) or wrong_in_pieces():
        return claims.Verdict(claim, wrong, numbers, [])
    off, wrong = remove_each(args, started, alone, seen)
    always = play(partial(load, *ALWAYS), args, started)
    numbers |= {"off": off, "bytes": [begin.nbytes, always[0][0].nbytes]}
    damage = min(removed for _, removed in off.values())
    claim += f"; a removed condition is off by {damage:.1e} or more" if started > 1 else ""
    return claims.Verdict(claim, wrong, numbers, lines_of(numbers, args.micro_batches))


def lines_of(numbers, micro_batches):
    """Return what a reader wants to know beside the script's own words."""
    pairs = numbers["off"].items()
    lines = [f"{name:34} {kept:7.1e} {removed:7.3g}" for name, (kept, removed) in pairs]
    lines.append(f"bytes for the all-reduce of an update, {micro_batches} micro-batches: ")
    lines[-1] += "{} with no_sync, {} without".format(*numbers["bytes"])
    return ["parameters off by, if kept, and if removed:", *lines]


# --- What the ranks did ---


def one_process(script, args, loss=None):
    """Train with whole batches and PyTorch's mean over all tokens; return a list of Update."""
    (texts, targets), seen, epoch = script["make_texts"](args.seed), [], 0
    model = script["make_model"](args.seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    while len(seen) < args.steps:
        order = torch.randperm(35, generator=torch.Generator().manual_seed(args.seed + epoch))
        for batch in order.split(args.batch_size)[: args.steps - len(seen)]:
            outputs, wanted = model(texts[batch]).flatten(0, 1), targets[batch].flatten()
            mean = loss(outputs) / (wanted >= 0).sum() if loss else cross_entropy(outputs, wanted)
            sgd.zero_grad()
            mean.backward()
            sgd.step()
            seen.append(update_of(model, facts.row_checksums(texts[batch])))
        epoch += 1
    return seen


def wrong_in_sent(job, micro_batches, nbytes):
    """For an update, each rank hands in a count, goes forward, and in the end sends gradients."""
    wanted = ["all_reduce [[], 'float64']", *["forward"] * micro_batches, f"allreduce_ {nbytes}"]
    for number, rank in job.items():
        for done in claims.done_for_updates(rank):
            if done != wanted:
                return f"for an update, rank {number} does {done}, and not {wanted}"
    return None


def wrong_in_words(job, args, started, model):
    """Rank 0 has told who trains, and the loss before and after."""
    data, losses = lesson.make_texts(args.seed), []
    for values in (job[0].values(job[0].updates[0])["before"], job[0].values_at_end()):
        claims.fill(model, values)
        losses.append(f"{lesson.mean_loss(model, *data):.3g}")
    where = f"over {job[0].group['backend']} on {job[0].optimizers[0]['device']}"
    ranks = f"{started} ranks {where}: {args.steps} updates, {args.batch_size} texts in each"
    loss = "mean loss of a token: {} before, {} after".format(*losses)
    return claims.wrong_in_words(job, [ranks, loss])


def wrong_in_pieces():
    """Counts are exact; no order comes twice; one token in all, or none, makes no trouble."""
    orders = [lesson.deal(35, e, 35, 0, 1, seed)[0] for seed in (0, 50) for e in range(50)]
    with patch.object(lesson.dist, "all_reduce", lambda total: total.add_(2**24 + 2)):
        counted = lesson.count_everywhere(2**24 + 1, torch.device("cpu"))  # float32 has no such
    rules = {f"two ranks count {counted:.0f}, not {2**25 + 3}": counted == 2**25 + 3}
    rules["in 50 epochs of two seeds an order comes twice"] = len(set(map(str, orders))) == 100
    for tokens in (0, 1):
        handed, off = step_alone(tokens)
        rules[f"of {tokens} tokens a rank counts {handed}"] = handed == [tokens]
        rules[f"with {tokens} tokens in all, a gradient is off by {off:.2g}"] = off < 1e-12
    return claims.broken(rules)


def step_alone(tokens):
    """Let one rank make a step; return the counts that it hands in, and how far it is off."""
    texts, targets, handed = torch.zeros(2, 9).long(), torch.full((2, 9), -100), []
    targets[0, :tokens] = 3
    model, right = lesson.make_model(0), lesson.make_model(0)
    cross_entropy(right(texts).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    alone = {"get_world_size": lambda: 1, "all_reduce": lambda total: handed.append(total.item())}
    with patch.multiple(lesson.dist, **alone), contextlib.suppress(ZeroDivisionError):
        lesson.train_step(model, torch.optim.SGD(model.parameters()), [(texts, targets)])
        return handed, claims.off(update_of(model, []).gradients, update_of(right, []).gradients)
    return handed, math.nan


# --- The conditions, removed ---


def load(part="", other="", rank=0):
    """Return the script with an edit, as a dictionary, and with the names that an edit may use."""
    script = {"__name__": "script", "__doc__": "", "contrast_sum": contrast_sum}
    random = torch.Generator().manual_seed(rank)
    script["DropByRank"] = partial(Drop, lambda marks: random)
    script["DropByRow"] = partial(Drop, lambda mark: torch.Generator().manual_seed(mark))
    exec(SOURCE.replace(part, other), script)
    return script


def contrast_sum(outputs, *_, **__):
    """Return a sum over texts in which each is compared with all others: not a sum over rows."""
    features = normalize(outputs.reshape(-1, 9, 8).mean(1), dim=1)
    return cross_entropy(5 * features @ features.T, torch.arange(len(features)), reduction="sum")


class Drop(nn.Sequential):
    """A model that drops half of the features, by the numbers of generator_of(a text's mark)."""

    def __init__(self, generator_of, *layers):
        super().__init__(*layers)
        self.generator_of = generator_of

    def forward(self, texts):
        generators = map(self.generator_of, facts.row_checksums(texts))
        masks = [torch.rand(1, 9, 5, generator=one) > 0.5 for one in generators]
        return self[1](self[0](texts) * 2.0 * torch.cat([torch.empty(0, 9, 5), *masks]))


def remove_each(args, world_size, alone, seen):
    """Return {condition: [how far off if it is kept, if it is removed]}, and what is wrong."""
    off, wrong, every = {}, [], distance(seen, alone)
    references = dict.fromkeys(WITHOUT, (every, alone))
    references["the loss is a sum over rows"] = every, one_process(load(), args, contrast_sum)
    right = one_process(load(*BY_ROW), args)
    by_row = distance(play(partial(load, *BY_ROW), args, world_size), right)
    references["nothing random but by row"] = by_row, right
    if not distance(play(partial(load, "", ""), args, world_size), seen[0]) < 1e-12:
        wrong.append("the play of the script does not what the ranks do")
    for name, (*edit, wanted) in WITHOUT.items():
        kept, right = references[name]
        everyone = play(partial(load, *edit), args, world_size)
        first, removed = spoiled(everyone, right), distance(everyone, right)
        off[name] = [kept, removed]
        if not kept < 1e-12 or (world_size > 1 and (first != wanted or not removed > 1e-6)):
            wrong.append(f"{name}: {kept:.2g} off, without it {removed:.2g}; wrong first: {first}")
    if world_size > 1 and len({removed for _, removed in off.values()}) < len(off):
        wrong.append("two conditions do the same damage: are they one?")
    return off, wrong
