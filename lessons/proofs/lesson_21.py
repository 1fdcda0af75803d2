"""What lesson 21 claims: in half precision N ranks make the updates of one process in float64.

The script knows nothing of this file; see lesson_02.py. Seen are the gradients that are used, the
parameters, and what is sent. Not seen are types within a forward pass, and a rank that is alone
with its inf, since DDP's sum has it on all ranks. So threads play ranks without DDP, and say so.
"""

import contextlib
import copy
import math
from types import SimpleNamespace
from unittest.mock import patch

import lesson_21_half_precision as lesson
import torch
from lockstep.watch import claims, threads
from torch import nn
from torch.nn.functional import mse_loss

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (4, 1000), "--micro-batches": (1, 16), "--batch-size": (2, 10**4)}
LIMITS |= {"--factor": (2**12, 2**24), "--seed": (0, 2**32 - 1)}
BAD = (math.inf, -math.inf, math.nan)
ROUNDINGS = 20  # by which a gradient may be off, as a part of its length


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.factor & (args.factor - 1):
        return "argument --factor: must be a power of two, by which numbers can be divided exactly"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    claim = f"{started} ranks train in {args.dtype} as one process in float64"
    model, batches = lesson.make_model(args.seed), batches_of(args, started)
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_optimizer(job, model)]
    wrong = [*filter(None, wrong)] or [*filter(None, [wrong_in_types(job)])]
    if wrong:
        return claims.Verdict(claim, wrong, {}, [])
    done = {rank: steps_of(seen, args.micro_batches) for rank, seen in job.items()}
    made = [actions[-1:] == ["update"] for actions in done[0]]
    factors = factors_of(made, args)
    wrong = [wrong_in_steps(done, made, args, model), claims.wrong_in_replicas(job)]
    wrong = [*filter(None, [*wrong, wrong_in_words(job, args, made, factors, model)])]
    numbers = {"world_size": started, "backend": job[0].group["backend"], "dtype": args.dtype}
    numbers |= {"device": job[0].optimizers[0]["device"], "skipped": made.count(False)}
    numbers |= {"bytes_sent": bytes_of(model, args), "factor": factors[-1]}
    if not wrong:
        offs = gradients_off(job[0], made, batches, model)
        wrong = wrong_in_gradients(offs, args.dtype)
        numbers |= {"max_gradient_off": max(offs)}
        claim += f": gradients off by {max(offs):.2g} of their length at most"
        wrong += wrong_in_plays(max(2, started))
    return claims.Verdict(claim, wrong, numbers, [])


# --- What the ranks did ---


def batches_of(args, started):
    """Return the batches of all ranks, [step][micro-batch]: (rows, targets)."""
    return lesson.make_steps(args.steps, args.micro_batches, started * args.batch_size, args.seed)


def bytes_of(model, args):
    """Return how many bytes the gradients have that are sent in a step."""
    return sum(p.numel() for p in model.parameters()) * lesson.DTYPES[args.dtype].itemsize


def wrong_in_types(job):
    """What the optimizer updates is float32: the master weights."""
    kinds = {kind for rank in job.values() for kind in rank.optimizers[0]["kinds"]}
    return None if kinds == {"float32"} else f"weights are updated in {', '.join(sorted(kinds))}"


def steps_of(rank, micro_batches):
    """Return what a rank did in each step: forwards, calls, what was sent, and "update" if so."""
    done, forwards = [], 0
    for event in rank.events:
        if event["what"] == "forward":
            if forwards % micro_batches == 0:
                done.append([])
            forwards += 1
            done[-1].append("forward")
        elif event["what"] == "call" and done:
            done[-1].append(f"{event['name']} {event['shape']}")
        elif event["what"] == "sent" and event["calls"]:
            done[-1] += [f"{name} {nbytes}" for name, nbytes in event["calls"]]
        elif event["what"] == "update":
            done[-1].append("update")
    return done


def wrong_in_steps(done, made, args, model):
    """All ranks do the same: forwards, half the bytes once, the decision; then all update or none.

    In float16 the third step is skipped, whose numbers are too large for it.
    """
    if len(made) != args.steps:
        return f"{len(made)} steps are made, and not {args.steps}"
    count = sum(p.numel() for p in model.parameters())
    wanted = [*["forward"] * args.micro_batches, f"all_reduce {[[count], args.dtype]}"]
    wanted += [f"allreduce_ {bytes_of(model, args)}", f"all_reduce {[[], 'float32']}"]
    for rank, steps in done.items():
        for number, actions in enumerate(steps):
            if actions != wanted + ["update"] * made[number]:
                return f"in step {number + 1}, rank {rank} does {actions}, and not {wanted}"
    skips = [number + 1 for number, updated in enumerate(made) if not updated]
    if args.dtype == "float16":
        return None if 3 in skips else "step 3 is not skipped: it has a number beyond float16"
    return f"steps {skips} are skipped" if skips else None


def factors_of(made, args):
    """Return the factor of the loss in each step, and after the last."""
    factors, good = [args.factor if args.dtype == "float16" else 1], 0
    for updated in made:
        good, factor = good + 1 if updated else 0, factors[-1]
        if args.dtype == "float16" and not updated:
            factor /= 2
        elif args.dtype == "float16" and good == lesson.PATIENCE:
            factor, good = factor * 2, 0
        factors.append(factor)
    return factors


def wrong_in_words(job, args, made, factors, model):
    """Rank 0 has told who trains, how many steps were skipped, losses, factors and bytes."""
    seen, parts = [event["value"] for event in job[0].of("loss")], args.micro_batches
    losses = [sum(seen[n * parts : n * parts + parts]) / factors[n] for n in (0, args.steps - 1)]
    where = f"over {job[0].group['backend']} on {job[0].optimizers[0]['device']}"
    lines = [f"{len(job)} ranks {where}, in {args.dtype}"]
    skipped = f"{sum(made)} updates, {made.count(False)} skipped by all ranks"
    lines.append(f"{args.steps} steps: {skipped}")
    lines.append("loss on rank 0: {:.3g} at first, {:.3g} at last".format(*losses))
    lines.append(f"factor of the loss: {factors[0]:,.0f} at first, {factors[-1]:,.0f} at last")
    count = sum(p.numel() for p in model.parameters())
    lines.append(f"gradients sent in a step: {count:,}, as {bytes_of(model, args):,} bytes")
    return claims.wrong_in_words(job, lines)


# --- Gradients ---


def gradients_off(rank, made, batches, model):
    """Return how far each update's gradient is off that of one process, by this one's length.

    One process computes in float64, on the rows of all ranks, with the parameters of the update.
    """
    model, offs = copy.deepcopy(model).double(), []
    steps = [parts for parts, updated in zip(batches, made, strict=True) if updated]
    for update, parts in zip(rank.updates, steps, strict=True):
        values = rank.values(update)
        claims.fill(model, values["before"])
        model.zero_grad()
        for rows, targets in parts:
            (mse_loss(model(rows.double()), targets.double()) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), lesson.MAX_NORM)
        right = torch.from_numpy(claims.numbers_of(model, lambda p: p.grad))
        used = torch.from_numpy(claims.as_vector(values["gradients"])).double()
        offs.append(((used - right).norm() / right.norm()).item())
    return offs


def wrong_in_gradients(offs, dtype):
    """Gradients are off by as much as the type rounds, not more; and not by nothing."""
    rounding, worst = torch.finfo(lesson.DTYPES[dtype]).eps / 2, claims.worst(offs)
    rules = {f"more than {dtype} rounds": worst <= ROUNDINGS * rounding}
    rules["and nothing was rounded"] = max(offs) > rounding / 100
    return claims.broken(rules)


# --- What threads play ---


def wrong_in_plays(ranks=2):
    """Return what is wrong with the hook, the decision, the factor, and a step of one rank."""
    return [*wrong_in_hook(ranks), *wrong_in_decision(ranks), *wrong_in_factor(), *wrong_in_step()]


def wrong_in_hook(ranks):
    """A mean that float16 has arrives, though the sum, or one rank's part, is too large for it."""
    wrong, waits = [], []
    for dtype in lesson.DTYPES.values():
        large = 4e4 if dtype == torch.float16 else 1e6  # what only the others have
        numbers = [torch.tensor([large, 1e5 * (r == 0), 3e-3 * r]) for r in range(ranks)]
        right = torch.stack(numbers).mean(0)

        def average(rank, *_, dtype=dtype, numbers=numbers):
            buffer = numbers[rank].clone()
            sent = lesson.send_in(dtype, SimpleNamespace(buffer=lambda: buffer))
            return sent.wait(), buffer

        with patch.object(threads.Done, "wait", lambda _: waits.append("waits for its sum")):
            played = threads.play(lesson.dist, ranks, average)
        for result, buffer in played:
            result = result[0] if isinstance(result, list) else result
            off = ((result - right).abs() / right).max().item()
            fine = off <= ranks * torch.finfo(dtype).eps and torch.equal(result, buffer)
            rules = {f"sent in {dtype}, a mean of {ranks} ranks is {off:.2g} off": fine}
            rules[f"the hook returns {result.dtype}"] = result.dtype == torch.float32
            wrong += claims.broken(rules)
    return wrong + [f"the hook {text}, in the middle of backward" for text in waits[:1]]


def wrong_in_decision(ranks):
    """If one gradient of one rank is inf or nan, all know; else each is divided, and all go on."""
    wrong, cases = [], [(4.0, 0, 0), (None, 0, 0)]  # None: a rank without any gradient
    cases += [(value, n, at) for value in BAD for n, at in ((0, 0), (0, 5), (1, 0), (1, 1))]
    for value, n, at in cases:

        def decide(rank, *_, value=value, n=n, at=at):
            model = nn.Linear(3, 2)
            for p in model.parameters() if rank != ranks - 1 or value is not None else ():
                p.grad = torch.full_like(p, 4.0)
                if p is [*model.parameters()][n] and rank == ranks - 1:
                    p.grad.flatten()[at] = value
            finite = lesson.LossScale(8.0).unscale(model.parameters())
            return finite, [p.grad.flatten().tolist() for p in model.parameters() if rank == 0]

        answers = threads.play(lesson.dist, ranks, decide)
        divided = answers[0][1] == [[0.5] * 6, [0.5] * 2]
        right = divided and {finite for finite, _ in answers} == {value not in BAD}
        said = f"with {value} on the last rank, they say {answers}"
        wrong += claims.broken({said: right})
    return wrong


def wrong_in_factor():
    """The factor is halved after an overflow, and doubled after so many others without a break."""
    scale, factors = lesson.LossScale(8.0, patience=3), []
    for finite in map(int, "1101110111111"):
        scale.update(bool(finite))
        factors.append(scale.factor)
    right = [8, 8, 4, 4, 4, 8, 4, 4, 4, 8, 8, 8, 16]
    usual = lesson.LossScale()
    rules = {f"its factors are {factors}, not {right}": factors == right}
    rules["by itself it is not GradScaler's: 65,536, and 2,000 good updates"] = (
        usual.factor == 2**16 and usual.patience == 2000
    )
    return claims.broken(rules)


class Alone(nn.Sequential):
    """A model that computes on one rank, without DDP; it notes the type of what its layers make."""

    def __init__(self):
        super().__init__(*lesson.make_model(0))
        self.types = []
        self[0].register_forward_hook(lambda _, inputs, made: self.types.append(made.dtype))

    @property
    def module(self):
        """It is what DDP would have inside."""
        return self

    def no_sync(self):
        """It never sends."""
        return contextlib.nullcontext()


def wrong_in_step():
    """A layer makes half a float; without DDP's sum, too, all take a step, or none of two ranks."""
    wrong = []
    parts = [*map(tuple, lesson.make_steps(3, 2, 2, 0)[2])]
    for name, dtype in lesson.DTYPES.items():

        def step(rank, *_, dtype=dtype):
            model = Alone()
            begin = copy.deepcopy(model.state_dict())
            for parameter in model.parameters():  # of the step before
                parameter.grad = torch.full_like(parameter, math.nan)
            mine = [(rows[rank : rank + 1], targets[rank : rank + 1]) for rows, targets in parts]
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            _, finite = lesson.train_step(model, sgd, lesson.LossScale(), mine, dtype, 1.0)
            return finite, not claims.same_bits(begin, model.state_dict()), set(model.types)

        for finite, moved, types in threads.play(lesson.dist, 2, step):
            rules = {f"in {name}, a layer computes {types}": types == {dtype}}
            told = f"in {name}, with inf on one rank, one says {finite} and moves: {moved}"
            rules[told] = finite == moved == (name != "float16")
            wrong += claims.broken(rules)
    return wrong
