"""What lesson 09 claims: plain BatchNorm sees a part, and synchronised ranks are one process.

The script knows nothing of this file; see lesson_02.py. It was seen what BatchNorm got, gave and
kept on each rank. Here one process makes each step again, and plays DataParallel beside DDP. What
the script's layer does not meet there (images, half precision, a rank without rows) it meets here,
on ranks that are threads of this process.
"""

import contextlib
import math
from itertools import chain, pairwise
from typing import Any, NamedTuple

import lesson_09_batch_norm as lesson
import numpy as np
import torch
from lockstep.watch import claims, facts, threads
from torch import nn
from torch.nn.functional import mse_loss

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (1, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
WAYS = ("DDP", "DDP, buffers not sent", "synchronised", "nn.SyncBatchNorm")  # the last on GPUs


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    least = 2 * world_size
    if least <= args.batch_size <= 100:
        return None
    return f"argument --batch-size: must be from {least}, 2 for each rank, to 100"


@claims.one_thread()
def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    gpus = any(optimizer["device"] == "cuda" for optimizer in job[0].optimizers.values())
    ways = WAYS if gpus else WAYS[:3]
    model = lesson.make_model(nn.BatchNorm1d, args.seed)
    wrong = claims.wrong_in_optimizer(job, model) or claims.wrong_in_group(job, started)
    wrong = wrong or claims.wrong_in_count(job, len(ways) * args.steps)
    seen = {} if wrong else steps_by_way(job, args, ways)
    if wrong := wrong or wrong_in_rows(seen, args):
        return claims.Verdict("the ranks train in several ways", [wrong], {}, [])
    ddp, alone = seen["DDP"], {"one process": in_one_process(seen["DDP"], args)}
    alone["DataParallel"] = in_one_process(ddp, args, whole=False)
    numbers = numbers_of(job, started, alone | seen)
    for name, steps in (("plain", ddp), *(("sync", seen[way]) for way in ways[2:])):
        pairs = zip(steps, in_one_process(steps, args, begin_anew=True), strict=True)
        off = [apart(*pair) for pair in pairs]
        numbers[f"{name}_diff"] = claims.worst([numbers.get(f"{name}_diff", 0.0), *off])
    numbers["ddp_diff"] = apart(ddp[0], alone["DataParallel"][0], keep=1)
    wrong = claims.broken(rules_of(numbers)) + [wrong_in_kept(way, seen[way]) for way in WAYS[:2]]
    wrong += [claims.wrong_in_replicas(job), wrong_in_sent(job, args, ways)]
    wrong += [claims.wrong_in_words(job, words_of(numbers, ways))]
    wrong = list(filter(None, wrong)) or list(filter(None, [wrong_in_layer()]))
    parts = " + ".join(map(str, numbers["parts"]))
    claim = f"synchronised on {parts} rows by {numbers['sync_diff']:.2g}"
    claim = f"off one process: plain by {numbers['plain_diff']:.3g}, {claim}"
    return claims.Verdict(claim, wrong, numbers, lines_of(numbers))


def rules_of(numbers):
    """Return {sentence that says what is wrong: whether all is well} about the numbers."""
    plain = numbers["plain_diff"]
    differs = plain > 1e-3 or (numbers["world_size"] == 1 and plain < 1e-10)
    return {
        "synchronised ranks are not one process": numbers["sync_diff"] < 1e-10,
        f"DDP is off DataParallel by {numbers['ddp_diff']:.2g}": numbers["ddp_diff"] < 1e-10,
        "plain BatchNorm does not differ": differs,
        "nothing has been trained": 0 < numbers["param_change"] < math.inf,
    }


# --- What the ranks did, and what one process does ---


class Step(NamedTuple):
    """A rank in one update, or a part of the rows in one process."""

    rows: list  # their numbers
    before: dict  # the parameters: {name: vector}
    update: Any  # gradients, then the parameters afterwards, one vector
    inputs: Any  # of BatchNorm, (n, 8), as `outputs`
    outputs: Any
    kept: Any  # 8 means, then 8 variances


def steps_by_way(job, args, ways):
    """Return {way: [[Step of rank 0, of rank 1, ...] of each step]}."""
    marks = facts.row_checksums(lesson.make_rows(args.seed)[0])
    known, ranks = {mark: number for number, mark in enumerate(marks)}, []
    for rank in job.values():
        ranks.append(steps := [])
        for update, norm in zip(rank.updates, rank.of("norm"), strict=False):
            rows = [known.get(mark) for mark in update["given"]]
            values, layer = rank.values(update), rank.kept(norm)
            after = [claims.as_vector(values[what]) for what in ("gradients", "after")]
            both = [layer[what].reshape(-1, 8) for what in ("inputs", "outputs")]
            kept = np.concatenate([layer["mean"], layer["variance"]])
            steps.append(Step(rows, values["before"], np.concatenate(after), *both, kept))
    steps = [list(step) for step in zip(*ranks, strict=True)]
    return {way: steps[n * args.steps :][: args.steps] for n, way in enumerate(ways)}


def in_one_process(steps, args, whole=True, begin_anew=False):
    """Make these steps in one process, on all rows of the ranks or in their parts; return Steps.

    In parts it is lesson 01's DataParallel. `begin_anew`: each from where the ranks were before it.
    """
    model, found = lesson.make_model(nn.BatchNorm1d, args.seed), []
    for ranks in steps:
        parts = [step.rows for step in ranks]
        if begin_anew:
            claims.fill(model, ranks[0].before)
        found.append(make_step(model, [[*chain(*parts)]] if whole else parts, args))
        if begin_anew:
            for tensor, kept in zip(kept_by(model), ranks[0].kept.reshape(2, 8), strict=True):
                tensor.copy_(torch.from_numpy(kept))
    return found


def kept_by(model):
    """Return the running statistics of its BatchNorm."""
    return model[1].running_mean, model[1].running_var


def make_step(model, parts, args):
    """Make an update; return the Step of each part. The first alone keeps running statistics."""
    rows, targets = lesson.make_rows(args.seed)
    sgd, layer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    look = model[1].register_forward_hook(lambda _, x, y: layer.append((x[0].detach(), y.detach())))
    for part in parts:
        lost = {name: buffer.clone() for name, buffer in model.named_buffers()} if outputs else {}
        outputs.append(torch.func.functional_call(model, lost, (rows[part],)))
    look.remove()
    sgd.zero_grad()
    mse_loss(torch.cat(outputs), targets[[*chain(*parts)]]).backward()
    gradient = claims.numbers_of(model, lambda parameter: parameter.grad)
    sgd.step()
    update = np.concatenate([gradient, claims.numbers_of(model, lambda parameter: parameter)])
    kept = torch.cat(kept_by(model)).numpy()
    both = [[x.numpy(), y.numpy()] for x, y in layer]
    return [Step(part, before, update, *xy, kept) for part, xy in zip(parts, both, strict=True)]


def apart(ranks, alone, keep=None):
    """Return how far ranks are in a step from one process; of what is kept, the first `keep`."""
    off = [claims.off(*(np.concatenate([step.outputs for step in one]) for one in (ranks, alone)))]
    off += [claims.off(step.update, alone[0].update) for step in ranks]
    return claims.worst(off + [claims.off(step.kept, alone[0].kept) for step in ranks[:keep]])


def mean_used(rows, outputs):
    """Return the mean (C,) with which `rows` (n, C) were normalised to `outputs`, n > 1.

    Solved from outputs = (rows - mean) / scale, at the smallest and the largest row.
    """
    (low, high), (low_output, high_output) = rows.aminmax(dim=0), outputs.aminmax(dim=0)
    return low - (high - low) / (high_output - low_output) * low_output


def used_in(step):
    """Return the mean of each channel that BatchNorm used in a Step; None of fewer than 2 rows."""
    if len(step.rows) < 2:
        return None
    normalised = (step.outputs - step.before["1.bias"]) / step.before["1.weight"]
    return mean_used(torch.from_numpy(step.inputs), torch.from_numpy(normalised)).numpy()


def wrong_in_rows(seen, args):
    """All ways have the same batches, no row twice; plain in equal parts, else in 1, 2, 3 ..."""
    for number, same in enumerate(zip(*seen.values(), strict=True)):
        for way, ranks in zip(seen, same, strict=True):
            batch, first = ([*chain(*(step.rows for step in one))] for one in (ranks, same[0]))
            size, count = args.batch_size // len(ranks) * len(ranks), len(ranks)
            whole = None not in batch and len({*batch}) == len(batch) > size // 2
            shares = [1] * count if way in WAYS[:2] else range(1, count + 1)
            ends = [len(batch) * sum(shares[:n]) // sum(shares) for n in range(count + 1)]
            sizes = [end - begin for begin, end in pairwise(ends)]
            if batch != first or not whole or [len(step.rows) for step in ranks] != sizes:
                return f"{way}: in step {number + 1} the ranks have other rows"
    return None


def wrong_in_kept(way, steps):
    """A rank keeps a tenth of the mean that it used; of the rest, DDP takes rank 0's before."""
    kept = np.zeros((len(steps[0]), 8))
    for number, ranks in enumerate(steps, 1):
        kept[:] = kept[0] if way == "DDP" else kept
        kept = 0.9 * kept + 0.1 * np.stack([used_in(step) for step in ranks])
        off = claims.off(np.stack([step.kept[:8] for step in ranks]), kept)
        if not off < 1e-10:
            return f"{way}: after step {number}, kept means are off those used by {off:.2g}"
    return None


def wrong_in_sent(job, args, ways):
    """A synchronised layer meets twice in a step, with so many numbers; only DDP sends buffers."""
    loss, wanted = ["all_reduce", [[], "int64"]], []
    layer = [["all_gather", [[17], "float64"]], ["all_reduce", [[2, 8], "float64"]]]
    for way in ways:
        step = [loss, *layer, "update"] if way == "synchronised" else [loss, "update"]
        wanted += [*step * args.steps, ["all_gather_object", None]]
    for number, rank in job.items():
        events = [event for event in rank.events if event["what"] == "update" or event.get("own")]
        sent = [[e["name"], e["shape"]] if "name" in e else "update" for e in events]
        if sent != wanted:
            more = [one for one in sent if one not in wanted]
            return f"rank {number} hands in {more[:1] or 'too much, or too little'}"
        sends = [wrapped["sends_buffers"] for wrapped in rank.wrapped.values()]
        if sends != [way == "DDP" for way in ways]:
            return f"rank {number} sends buffers before a forward: {sends}"
    return None


# --- The layer, on ranks that are threads ---

# Name: (arguments of the layer, the shape of a row, type and, by channel, mean of the numbers, rows
# on rank 0, tolerance). Each further rank has two rows more.
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CASES = {
    "no row on rank 0": ({}, (4,), F64, 1, 0, 1e-10),
    "images (n, C, h, w)": ({}, (4, 3, 2), F64, 1, 20, 1e-10),
    "signals (n, C, length)": ({}, (4, 3), F64, 1, 20, 1e-10),
    "videos (n, C, time, h, w)": ({}, (4, 2, 3, 2), F64, 1, 5, 1e-10),
    "eps=0.1, momentum=0.3": ({"eps": 0.1, "momentum": 0.3}, (4,), F64, 1, 3, 1e-10),
    "momentum=None": ({"momentum": None}, (4,), F64, 1, 3, 1e-10),
    "one row on rank 0, affine=False": ({"affine": False}, (4,), F64, 1, 1, 1e-10),
    "bias=False": ({"bias": False}, (4,), F64, 1, 3, 1e-10),
    "track_running_stats=False": ({"track_running_stats": False}, (4,), F64, 1, 3, 1e-10),
    "float32, large means": ({}, (4,), F32, 1000, 9, 2e-3),
    "float16": ({}, (4,), F16, 100, 301, 2e-3),
    "bfloat16": ({}, (4,), BF16, 10, 301, 8e-3),
}


def make_layer(name):
    """Return BatchNorm of 4 channels for this case, with numbers that no new layer has."""
    options, shape, *_ = CASES[name]
    layer = getattr(nn, f"BatchNorm{max(1, len(shape) - 1)}d")(4, **options).double()
    for tensor in layer.state_dict().values():
        tensor += torch.arange(1, 1 + tensor.numel()).view_as(tensor)
    return layer


def make_case(name, world_size):
    """Return four batches, the last of them weights, and where each rank's rows begin and end."""
    _, shape, dtype, mean, first, _ = CASES[name]
    ends = [rank * (first + rank - 1) for rank in range(world_size + 1)]
    generator = torch.Generator().manual_seed(9)
    batches = torch.randn(4, ends[-1], *shape, generator=generator, dtype=F64)
    batches[:3] += mean * torch.arange(1, 5).view(4, *[1] * (len(shape) - 1))
    return batches.to(dtype), ends


def use(layer, one, two, later, weights):
    """Train a layer on two batches, then evaluate; return what comes of it, in three vectors.

    Of its rows (outputs and gradients), of its parameters, and what does not depend on the ranks.
    """
    with torch.no_grad():
        layer(one)  # in training, this counts without gradients, too
    inputs, later = two.clone().requires_grad_(), later.clone().requires_grad_()
    outputs = layer(inputs)
    outputs.backward(weights)
    evaluation = layer.eval()(later)
    slope = torch.autograd.grad(evaluation, later, later.detach())
    by_row = torch.stack([outputs.detach().view(-1), inputs.grad.flatten()])  # view: one piece
    return (
        by_row,
        flat(p.grad for p in layer.parameters()),
        flat([evaluation, *slope, *layer.buffers()]),
    )


def flat(tensors):
    """Return a zero, so that there is something, and all numbers of some tensors, as one vector."""
    return torch.cat([torch.zeros(1), *(one.detach().double().flatten() for one in tensors)])


def see_case(rank, world_size, name):
    """Use a converted layer on this rank's rows; return what comes of it."""
    batches, ends = make_case(name, world_size)
    layer = make_layer(name).to(F64 if batches.dtype is F64 else F32)
    mine = batches[:, ends[rank] : ends[rank + 1]]
    return use(lesson.synchronise(layer), *mine[:2], batches[2], mine[3])  # all evaluate the same


def off_in_case(name, everyone):
    """Return how far the ranks are from BatchNorm in one process, relative to numbers above 1."""
    by_row, by_parameter, shared = zip(*everyone, strict=True)
    if {one.dtype for one in by_row} != {CASES[name][2]}:
        return math.inf
    right = use(make_layer(name), *make_case(name, len(everyone))[0].double())
    pairs = [(torch.cat(by_row, 1), right[0]), (sum(by_parameter), right[1])]  # DDP's work
    pairs += [(one, right[2]) for one in shared]
    sizes = [wanted.abs().max().clamp(min=1) for _, wanted in pairs]
    off = [(one - wanted).abs().max() for one, wanted in pairs]
    return claims.worst([(far / size).item() for far, size in zip(off, sizes, strict=True)])


def accepted(rank, world_size):
    """Return what the layer does on this rank, and should refuse: a list of sentences."""
    layer, done = lesson.SynchronisedBatchNorm(4), []
    rows = torch.arange(12.0).sin().view(3, 4).requires_grad_()
    with contextlib.suppress(ValueError):
        layer(rows[: rank == 0])  # one row on rank 0, and none elsewhere
        done.append("the only row of a batch is normalised")
    (gradient,) = torch.autograd.grad(layer(rows).square().sum(), rows, create_graph=True)
    with contextlib.suppress(RuntimeError):
        gradient.sum().backward()
        done.append("a gradient of a gradient is given, which is wrong")
    return done


def wrong_in_layer():
    """On three ranks, a converted layer is BatchNorm in all cases, and refuses what it can't do."""
    try:
        for name in CASES:
            off = off_in_case(name, threads.play(lesson.dist, 3, see_case, name))
            if not off <= CASES[name][-1]:
                return f"{name}: off by {off:.2g}"
        lesson.SynchronisedBatchNorm(4).eval()(torch.ones(1, 4))  # here is nobody to meet
        done = threads.play(lesson.dist, 3, accepted)[0]
    except (RuntimeError, ValueError) as error:
        return f"the layer fails: {error}"
    return done[0] if done else None


# --- What is told ---


def numbers_of(job, world_size, seen):
    """Return the numbers for --json that need no second look; of the first channel, by rank."""
    first, last = seen["synchronised"][0], seen["synchronised"][-1]
    numbers = {"world_size": world_size, "backend": job[0].group["backend"]}
    numbers |= {"device": job[0].optimizers[0]["device"], "parts": [len(s.rows) for s in first]}
    begin = claims.as_vector(first[0].before)
    numbers["param_change"] = claims.off(last[0].update[-len(begin) :], begin)
    numbers |= {"used": {}, "kept": {}, "kept_variance": {}}
    for way, steps in seen.items():
        means = [used_in(step) for step in steps[0]]
        numbers["used"][way] = [None if mean is None else float(mean[0]) for mean in means]
        last = steps[-1][: 1 if way == "DataParallel" else None]  # what the others keep is lost
        numbers["kept"][way] = [float(step.kept[0]) for step in last]
        numbers["kept_variance"][way] = [float(step.kept[8]) for step in last]
    return numbers


def words_of(numbers, ways):
    """Return the lines that rank 0 must have printed, and nobody else."""
    place = f"{numbers['world_size']} ranks over {numbers['backend']} on {numbers['device']}"
    kept = [" ".join(f"{mean:6.3f}" for mean in numbers["kept"][way]) for way in ways]
    lines = [f"{way:23}{means}" for way, means in zip(ways, kept, strict=True)]
    return [f"{place}; of one channel's mean, they keep:", *lines]


def lines_of(numbers):
    """Return the means that each way has used and kept, rank by rank."""
    lines = []
    for way, used in numbers["used"].items():
        used = " ".join("-" if mean is None else f"{mean:.3f}" for mean in used)  # too few rows
        kept = " ".join(f"{mean:.3f}" for mean in numbers["kept"][way])
        lines.append(f"{way}: used {used} in step 1, kept {kept}")
    return [*lines, f"in step 1, plain DDP is DataParallel to {numbers['ddp_diff']:.2g}"]
