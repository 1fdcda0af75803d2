"""What lesson 13 claims: a split model has one process's gradients, and sends what it should.

The script knows nothing of this file; see lesson_02.py. Here one process trains the uncut model on
the rows of all replicas, and each rank's numbers are compared with its part. What else a rank could
keep, and what it moves to its device, can't be seen from outside: one process plays one rank of the
mesh, which sends nothing. The library's way, a plan, is no part of the script: threads play it.
"""

import functools
import math
from itertools import chain
from unittest.mock import MagicMock, patch

import lesson_13_tensor_and_hybrid as lesson
import numpy as np
import torch
from lockstep.watch import claims, facts
from lockstep.watch.played_mesh import play
from lockstep.watch.wire import Wire
from torch import nn
from torch.distributed.tensor import Replicate, parallel
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler

KEEP_VALUES = 16  # of the first two updates, and of one in so many: losses tell of all of them
LIMITS = dict.fromkeys(("--steps", "--batch-size"), (1, 10**6)) | {"--seed": (0, 2**32 - 1)}
LIMITS |= dict.fromkeys(("--data", "--tensor"), (1, 64))
SUMS = 4 * lesson.BLOCKS  # all-reduces of a step among the parts: half of them in backward()


def shape_of(args, ranks):
    """Return (replicas, parts of each): as much tensor as the heads allow, if nothing is said."""
    parts = ranks // args.data if args.data else math.gcd(lesson.HEADS, ranks)
    parts = args.tensor or max(1, parts)
    return args.data or max(1, ranks // parts), parts


def refuse(args, ranks, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    (data, tensor), divide = shape_of(args, ranks), f"does not divide the number of ranks, {ranks}"
    heads = f"the {lesson.HEADS} heads can't be dealt out to {tensor} ranks"
    rules = {
        f"--data: {data} {divide}": ranks % data == 0,
        f"--tensor: {tensor} {divide}": ranks % tensor == 0,
        f"--data: {data} x {tensor} (--tensor) is not {divide[16:]}": data * tensor == ranks,
        f"--tensor: {heads}": lesson.HEADS % tensor == 0,
        f"--batch-size: must be at least the number of replicas, {data}": args.batch_size >= data,
    }
    return next((f"argument {problem}" for problem in claims.broken(rules)), None)


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    shape = shape_of(args, started)
    wrong = claims.wrong_in_group(job, started) or claims.wrong_in_count(job, args.steps)
    wrong = wrong or wrong_in_rows(job, args, shape)
    if wrong:
        return claims.Verdict("gradients are those of one process", [wrong], {}, [])
    losses, off = against_one_process(job, args, shape[1])
    wrong = [f"a {name} is off by {gap:.3g}" for name, gap in off.items() if not gap < 1e-12]
    wrong += [wrong_on_rank(rank, seen, shape) for rank, seen in job.items()]
    numbers = numbers_of(job, args, shape) | {"loss_first": losses[0], "loss_last": losses[-1]}
    numbers |= {"max_grad_diff": off["gradient"], "max_loss_diff": off["loss"]}
    wrong += [claims.wrong_in_words(job, words_of(job, numbers))]
    wrong = list(filter(None, wrong)) or wrong_in_operators() + wrong_in_memory(shape)
    claim = f"gradients differ from those of one process by at most {off['gradient']:.3g}"
    claim += f"; {4 if shape[1] > 1 else 0} all-reduces in each block"
    if wrong:
        return claims.Verdict(claim, wrong[:3], numbers, [])
    numbers["library_diff"], wrong = by_library(args.seed, shape[1])
    return claims.Verdict(claim, wrong, numbers, lines_of(numbers))


def numbers_of(job, args, shape):
    """Return the numbers for --json that need no second look."""
    sent = [sent_in_a_step(rank, shape) for rank in job.values()]
    numbers = {"world_size": len(job), "backend": job[0].group["backend"], "steps": args.steps}
    numbers |= {"mesh": dict(zip(("data", "tensor"), shape, strict=True))}
    numbers |= {"device": job[0].optimizers[0]["device"]}
    numbers |= {"places": [divmod(rank, shape[1]) for rank in job]}
    numbers |= {"parameters_per_rank": [rank.models[0]["size"] for rank in job.values()]}
    for place, what in enumerate(("all_reduces_per_step", "bytes_per_step")):
        numbers[what] = [{name: each[name][place] for name in each} for each in sent]
    return numbers


def words_of(job, numbers):
    """Return the lines that rank 0 must have printed, and nobody else."""
    shape = "{data} (data) x {tensor} (tensor)".format(**numbers["mesh"])
    first, last = (job[0].of("loss")[step]["value"] for step in (0, -1))
    mesh = f"mesh: {shape}, over {numbers['backend']} on {numbers['device']}"
    return [mesh, f"loss of replica 0: {first:.3g} in step 1, {last:.3g} in the last"]


def lines_of(numbers):
    """Return what a reader wants to know beside the script's own words."""
    lines, shares = [], f"{lesson.HEADS // numbers['mesh']['tensor']} of {lesson.HEADS} heads"
    uncut = count(lesson.Transformer())
    for rank, (replica, part) in enumerate(numbers["places"]):
        held = f"{numbers['parameters_per_rank'][rank]:,} of {uncut:,} parameters"
        lines.append(f"rank {rank}: replica {replica}, part {part}, {shares}, {held}")
    counts, sizes = numbers["all_reduces_per_step"][0], numbers["bytes_per_step"][0]
    for name, peers in (("tensor", "the other parts"), ("data", "the other replicas")):
        told = f"{counts[name]}, of {sizes[name]:,} bytes in all"
        lines.append(f"all-reduces per step with {peers}: {told}")
    off = f"largest difference of a gradient {numbers['library_diff']:.3g}"
    return [*lines, f"the library's split (DTensor): {off}"]


# --- The numbers, against one process ---


def count(model):
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def usual_name(name):
    """Return the name that a parameter of a split model has in the uncut one."""
    name = name.replace(".layers.", ".")
    return name.replace("attention.bias", "attention.out.bias").replace("mlp.bias", "mlp.down.bias")


def part_of(name, tensor, part, parts):
    """Return what belongs to part `part` of `parts` of a parameter, or of its gradient."""
    if any(f".{layer}." in name for layer in ("query", "key", "value", "up")):  # by columns
        return tensor.chunk(parts, 0)[part]
    if name.endswith(("out.weight", "down.weight")):  # by rows
        return tensor.chunk(parts, 1)[part]
    return tensor


def distance(theirs, alone, part, parts):
    """Return how far a rank's {name: tensor} are from its part of one process's."""
    theirs, gaps = {usual_name(name): tensor for name, tensor in theirs.items()}, []
    for name, tensor in alone.items():
        mine, right = theirs.get(name), facts.flat(part_of(name, tensor, part, parts)).numpy()
        mine = np.empty(0) if mine is None else facts.flat(torch.as_tensor(mine)).numpy()
        gaps.append(claims.off(mine, right))  # nan, if there are not as many numbers
    return claims.worst(gaps)


def gradients(model):
    """Return {name: gradient} of all parameters of a model."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def against_one_process(job, args, parts):
    """Train the uncut model on all replicas' rows; return its losses, and what is how far off."""
    data, model = lesson.make_problem(args.seed)
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    off = {"gradient": [], "weight": [], "loss": []}
    of_replicas = [[loss["value"] for loss in rank.of("loss")] for rank in [*job.values()][::parts]]
    for step, theirs in zip(claims.steps(job), zip(*of_replicas, strict=True), strict=True):
        rows, targets = data[[*chain(*(update["asked"] for update in step[::parts]))]]
        sgd.zero_grad()
        loss = mse_loss(model(rows), targets)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        off["loss"].append(abs(losses[-1] - sum(theirs) / len(theirs)))
        for (rank, seen), update in zip(job.items(), step, strict=True):
            if values := seen.values(update):
                place, weights = (rank % parts, parts), dict(model.named_parameters())
                off["gradient"].append(distance(values["gradients"], gradients(model), *place))
                off["weight"].append(distance(values["after"], weights, *place))
    return losses, {name: claims.worst(gaps) for name, gaps in off.items()}


def wrong_in_rows(job, args, shape):
    """Rows go to replicas, all parts of one get the same; the first order is that of the seed."""
    data, parts = shape
    for step in claims.steps(job):
        if any(u["asked"] != step[n // parts * parts]["asked"] for n, u in enumerate(step)):
            return "the parts of a replica do not have the same rows"
    for replica in range(data):
        first = list(DistributedSampler(range(512), data, replica, seed=args.seed))
        dealt = [*chain(*(update["asked"] for update in job[replica * parts].updates))]
        if dealt[: len(first)] != first[: len(dealt)]:
            return "the first epoch's order of the rows does not come from the seed"
    return claims.wrong_in_rows(dict(enumerate([*job.values()][::parts])), 512, args.batch_size)


# --- What is sent, and to whom ---


def sent_for_updates(rank):
    """Return for each update ([[call, ranks, bytes]], [bytes that backward() has sent])."""
    done = [([], [])]
    for event in rank.events[rank.forwards[0]["number"] :]:
        if event["what"] == "call":
            shape, kind = event["shape"] or ([0], None)
            nbytes = math.prod(shape) * (8 if kind == "float64" else math.nan)
            done[-1][0].append([event["name"], event["members"], nbytes])
        elif event["what"] == "sent":
            done[-1][1].extend(nbytes for _, nbytes in event["calls"])
        elif event["what"] == "update":
            done.append(([], []))
    return done[:-1]


def sent_in_a_step(rank, shape):
    """Return {"data", "tensor"}: (all-reduces, bytes that go in) of the first step."""
    calls, sent = sent_for_updates(rank)[0]
    sums = sum(nbytes for *_, nbytes in calls)  # half of them in backward()
    found = {"data": (len(sent) - SUMS // 2, sum(sent) - sums // 2), "tensor": (len(calls), sums)}
    return {n: found[n] if size > 1 else (0, 0) for n, size in zip(found, shape, strict=True)}


def wrong_on_rank(rank, seen, shape):
    """It adds up x with its neighbours, and averages each gradient once with the other replicas."""
    (data, parts), held = shape, seen.models[0]["size"]
    neighbours = [*range(rank // parts * parts, rank // parts * parts + parts)]
    others = [*range(rank % parts, data * parts, parts)]
    if (members := [ddp["members"] for ddp in seen.wrapped.values()]) != [others]:
        return f"rank {rank} averages gradients with {members}, not with {others}"
    for update, (calls, sent) in zip(seen.updates, sent_for_updates(seen), strict=True):
        x = len(update["asked"]) * lesson.TOKENS * lesson.WIDTH * 8  # bytes
        if calls != (wanted := [["all_reduce", neighbours, x]] * SUMS):
            return f"rank {rank} sends {len(calls)} times, {calls[-1:]}, not {SUMS}, {wanted[:1]}"
        if update["values"] and (averaged := sum(sent) - SUMS // 2 * x) != 8 * held:
            return f"rank {rank} averages {averaged:,} bytes, not each gradient once"
    return None


# --- What one process plays ---


def wrong_in_operators():
    """Neither f nor g changes what it is given."""
    part, gradient, x = (torch.ones(2, 3) for _ in range(3))
    with patch.object(lesson.dist, "all_reduce", lambda total, group: total.mul_(2)):
        lesson.SumInForward.apply(part, None)
        read = lesson.SumInBackward.apply(x.requires_grad_(), None)
        torch.autograd.grad(read, x, gradient)
    rules = {"g's part is overwritten": part.eq(1).all()}
    return claims.broken(rules | {"f's gradient is overwritten": gradient.eq(1).all()})


def wrong_in_memory(shape):
    """After the cut no uncut matrix is left, and none was moved to the device."""
    (data, model), mesh, moved = lesson.make_problem(0), MagicMock(), []
    mesh["data"].size.return_value, mesh.get_local_rank.return_value = shape[0], 0
    alone = {"get_world_size": lambda _: shape[1], "get_rank": lambda _: shape[1] - 1}

    def move(module, *place):
        moved.append(count(module))
        return module

    with (
        patch.multiple(lesson.dist, **alone, all_reduce=lambda total, group: None),
        patch.object(lesson, "DistributedDataParallel", lambda model, process_group: model),
        patch.object(nn.Module, "to", move),
    ):
        lesson.train(model, data, mesh, torch.device("cpu"), 1, shape[0])
    held, leaves = count(model), tree_leaves([vars(module) for module in model.modules()])
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    rules = {f"{held:,} parameters are kept in {kept:,} bytes": kept == 8 * held}
    return claims.broken(rules | {"something is moved before it is cut": sum(moved) <= held})


# --- The same by the library ---


def split_by_library(model, mesh):
    """Do what split() does with PyTorch's DTensor: a plan in place of a class."""
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {f"blocks.*.attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {"blocks.*.attention.out": rows}
    plan |= {"blocks.*.mlp.up": columns, "blocks.*.mlp.down": rows}
    whole = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    plan["blocks.*.attention"] = parallel.PrepareModuleInput(**whole)  # f once for all three
    parallel.parallelize_module(model, mesh["tensor"], plan)


@functools.cache
def by_library(seed, parts):
    """Return how far the gradients of a model are that PyTorch has split, and what is wrong."""
    (data, alone), *others = (lesson.make_problem(seed) for _ in range(parts + 1))
    rows, targets = data[:32]
    mse_loss(alone(rows), targets).backward()

    def act(rank):
        model = others[rank][1]
        split_by_library(model, lesson.make_mesh(torch.device("cpu"), parts))
        with Wire() as wire:
            mse_loss(model(rows), targets).backward()
        off = distance(gradients(model), gradients(alone), rank, parts)
        return off, sum(name == "all_reduce" for name, _ in wire.calls)

    off, sent = zip(*play(parts, act), strict=True)
    rules = {f"the library sends {sent} times": set(sent) == {SUMS * (parts > 1)}}
    rules[f"the library's split is off by {max(off):.2g}"] = claims.worst(off) < 1e-12
    return claims.worst(off), claims.broken(rules)
