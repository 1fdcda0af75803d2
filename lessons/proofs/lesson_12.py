"""What lesson 12 claims: stages have one process's gradients, and idle and keep what is known.

The script knows nothing of this file; see lesson_02.py. What its ranks do, and in which order, what
they send, their gradients and weights, and what is told, is seen. Which micro-batch is whose, and
how long its memory lives, is not: so threads play the first two steps again (played_messages.py),
and then those of torch.distributed.pipelining.
"""

import functools
import itertools
import weakref
from collections import defaultdict
from queue import SimpleQueue
from unittest.mock import patch

import lesson_12_pipeline_parallel as lesson
import numpy as np
import torch
import torch.distributed as dist
from lockstep.watch import claims
from lockstep.watch.played_messages import play
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

KEEP_VALUES = 20  # of the first two updates, and of one in twenty after them
LIMITS = {"--steps": (1, 10**5), "--batch-size": (1, 10**6), "--micro-batches": (1, 64)}
LIMITS |= {"--seed": (0, 2**32 - 1)}
COST = {"forward": 1, "backward": 2}  # ticks of the logical clock


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if world_size > 8:
        return "argument --nproc: at most 8 ranks, because the model has 8 layers"
    if args.batch_size % args.micro_batches:
        rows = f"do not divide the batch of {args.batch_size} rows"
        return f"argument --micro-batches: {args.micro_batches} {rows}"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    who = "1 stage has" if started == 1 else f"{started} stages have"
    claim, m = f"{who} the gradients of one process: largest difference", args.micro_batches
    numbers = {"world_size": started, "backend": job[0].group["backend"], "steps": args.steps}
    numbers |= {"schedule": args.schedule, "micro_batches": m, "rows": args.batch_size // m}
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong = list(filter(None, wrong)) or [wrong_in_stages(job), wrong_in_order(job, args)]
    wrong += [wrong_in_schedules(started, m), wrong_in_pieces()]
    if wrong := list(filter(None, wrong)):
        return claims.Verdict(claim, wrong[:3], numbers, [])
    off, losses = in_one_process(job, args)
    kept, failed = play_again(job, args)
    library, unlike = library_gradients(started, args)
    numbers |= losses | {"stages": lengths_of(job), "alive": kept}
    sent = [bytes_sent(rank, number == started - 1) for number, rank in job.items()]
    numbers["bytes_sent"] = [nbytes // args.steps for nbytes in sent]
    numbers["bubble"] = bubble([lesson.SCHEDULES[args.schedule](r, started, m) for r in job])
    numbers["bubble_formula"] = (started - 1) / (m + started - 1)
    numbers["max_grad_diff"] = claims.worst([by for what, by in off.items() if "grad" in what])
    numbers["library_diff"] = claims.off(whole_vector(job, 0, "gradients"), library)
    numbers["device"] = next(iter(job[0].optimizers.values()))["device"]
    off["gradients, beside the library's,"] = numbers["library_diff"]
    wrong = claims.broken({f"{what} are off by {by:.2g}": by < 1e-12 for what, by in off.items()})
    wrong += [*unlike, *failed]
    wrong += filter(None, [claims.wrong_in_words(job, to_be_told(numbers), started - 1)])
    claim += f" {numbers['max_grad_diff']:.2g}"
    return claims.Verdict(claim, wrong[:3], numbers, lines_of(numbers))


def lines_of(numbers):
    """Return what a reader wants to know beside the script's own words."""
    by_rank = zip(*(numbers[what] for what in ("stages", "alive", "bytes_sent")), strict=True)
    words = "rank {}: {} layers, micro-batches kept at a time: {}, bytes sent in a step: {:,}"
    lines = [words.format(rank, *seen) for rank, seen in enumerate(by_rank)]
    clock = "{bubble:.4f}, by the formula {bubble_formula:.4f}".format(**numbers)
    lines.append(f"idle share of a step, if all stages took equally long: {clock}")
    library = "gradients of torch.distributed.pipelining, largest difference"
    return [*lines, f"{library} {numbers['library_diff']:.2g}"]


def to_be_told(numbers):
    """Return the lines that the last rank has to print."""
    return [
        "ranks: {world_size}, over {backend} on {device}, schedule {schedule}, "
        "{micro_batches} micro-batches of {rows} rows".format(**numbers),
        "loss: {loss_first:.3g} before, {loss_last:.3g} after {steps} steps".format(**numbers),
    ]


# --- What the ranks did ---


def lengths_of(job):
    """Return how many layers each rank trains."""
    return [len(rank.names(rank.updates[0])) // 2 for rank in job.values()]


def wrong_in_stages(job):
    """The stages are the model in its order, and their lengths differ by one at most."""
    names = [name for rank in job.values() for name in rank.names(rank.updates[0])]
    if names != [name for name, _ in lesson.make_chain(1)[0].named_parameters()]:
        return f"the stages train {names}: that is not the model in its order"
    lengths = lengths_of(job)
    return f"the stages have {lengths} layers" if max(lengths) - min(lengths) > 1 else None


def by_the_rule(schedule, rank, world_size, micro_batches):
    """Return what a rank has to do in a step: backward n follows the forward that fills it up."""
    may_keep = world_size - rank if schedule == "1f1b" else micro_batches
    full = [min(n + may_keep, micro_batches) - 1 for n in range(micro_batches)]
    actions = []
    for forward in range(micro_batches):
        actions.append(("forward", forward))
        actions += [("backward", n) for n in range(micro_batches) if full[n] == forward]
    return actions


def wrong_in_schedules(world_size, micro_batches):
    """Each schedule keeps its rule, also one that was not asked for."""
    for name, rank in itertools.product(lesson.SCHEDULES, range(world_size)):
        place = rank, world_size, micro_batches
        if (order := lesson.SCHEDULES[name](*place)) != by_the_rule(name, *place):
            return f"{name} lets rank {rank} do {short(order)}"
    return None


def short(actions):
    """Return actions as text: F0 F1 B0."""
    return " ".join(f"{kind[0].upper()}{n}" for kind, n in actions)


def done_by(rank):
    """Return what a rank did, in order: messages that begin together, and words for the rest."""
    done = []
    for event in rank.events:
        if event["what"] == "call":
            done.append([tuple(op) for op in event["ops"]] if event.get("ops") else event["name"])
        elif event["what"] == "forward":
            done.append("forward" if event["grad"] else "look")
        elif event["what"] in ("loss", "update"):
            done.append({"loss": "backward"}.get(event["what"], "update"))
    return done


def to_be_done(kinds, rows, rank, world_size):
    """Return what `kinds` of actions have to be, with messages: each as early as it can be."""
    done, made, nbytes = [], [], rows * 32 * 8  # a row has 32 numbers
    for kind in kinds:
        source, target = (rank + 1, rank - 1) if kind == "backward" else (rank - 1, rank + 1)
        come = [(False, source, nbytes)] if 0 <= source < world_size else []
        done += [come + made, kind]
        made = [(True, target, nbytes)] if 0 <= target < world_size else []
    return [one for one in [*done, made] if one]


def wrong_in_order(job, args):
    """Each rank goes forward and backward by the rule; sends at once, and nothing else."""
    for number, rank in job.items():
        place = number, len(job)
        rule = [kind for kind, _ in by_the_rule(args.schedule, *place, args.micro_batches)]
        look = to_be_done(["look"], 3 * args.batch_size, *place)
        step = to_be_done(rule, args.batch_size // args.micro_batches, *place)
        wanted = [*look, *[*step, "update"] * args.steps, *look]
        for did, should in itertools.zip_longest(done_by(rank), wanted):
            if did != should:
                return f"rank {number}: {did} comes where {should} should; {args.schedule}"
    return None


def bytes_sent(rank, is_last):
    """Return what a rank has sent while it trained; the first and last message are for losses."""
    sent = [nbytes for call in rank.calls for sends, _, nbytes in call["ops"] if sends]
    return sum(sent if is_last else sent[1:-1])  # the last rank has the losses


def batches_of(args):
    """Return the model, and (rows, targets): of all rows, and of the batches that come in turn."""
    model, *every = lesson.make_chain(3 * args.batch_size, args.seed)
    return model, every, [*zip(*(part.split(args.batch_size) for part in every), strict=True)]


def whole_vector(job, step, what):
    """Return what all stages together had in a step, as one vector."""
    kept = (rank.values(rank.updates[step])[what] for rank in job.values())
    return np.concatenate([claims.as_vector(own) for own in kept])


def in_one_process(job, args):
    """Train the whole model; return {"step 1: gradients": how far the ranks are off} and losses."""
    model, (all_rows, all_targets), batches = batches_of(args)
    optimizer, off = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), {}
    losses = {"loss_first": mse_loss(model(all_rows), all_targets).item()}
    for step in range(args.steps):
        rows, targets = batches[step % 3]
        optimizer.zero_grad()
        mse_loss(model(rows), targets).backward()
        optimizer.step()
        if all(rank.updates[step]["values"] for rank in job.values()):  # which are kept
            theirs = [whole_vector(job, step, what) for what in ("gradients", "after")]
            off[f"step {step + 1}: gradients"] = claims.off(theirs[0], gradient(model).numpy())
            off[f"step {step + 1}: weights"] = claims.off(theirs[1], weights_of(model))
    ends = [claims.as_vector(rank.values_at_end()) for rank in job.values()]
    off["in the end weights"] = claims.off(np.concatenate(ends), weights_of(model))
    return off, losses | {"loss_last": mse_loss(model(all_rows), all_targets).item()}


def weights_of(model):
    """Return the parameters of a model, as one vector."""
    return claims.numbers_of(model, lambda own: own)


def gradient(model):
    """Return the gradient that is stored in the parameters of `model`, as one vector."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def wrong_in_pieces():
    """A batch that can't be cut into equal pieces is refused: three rows in two."""
    rows = torch.zeros(3, 32, dtype=torch.float64)
    try:
        lesson.train(0, 1, lesson.make_chain(1)[0], [(rows, rows)], lambda *_: [], 2)
    except ValueError:
        return None
    return "a batch is cut into unequal pieces"


# --- Two steps, played by threads ---


def note_memory(memory, counts, stage, inputs, outputs):
    """Note after a forward what is kept for its backward, and of how many micro-batches it is."""
    own = [*inputs, outputs] if inputs[0].requires_grad else [outputs]  # rows are there anyway
    memory.append([weakref.ref(tensor.untyped_storage()) for tensor in own])
    counts.append(sum(any(one() is not None for one in refs) for refs in memory))


def play_again(job, args):
    """Let threads make the first two steps; return how many micro-batches each keeps, and faults.

    Who needs no rows, or no targets, gets none.
    """
    model, _, batches = batches_of(args)
    batches, stages = batches[: args.steps][:2], lesson.split(model, len(job))
    plan, m, counts, rules = lesson.SCHEDULES[args.schedule], args.micro_batches, {}, {}

    def act(rank, world_size):
        note = functools.partial(note_memory, [], counts.setdefault(rank, []))
        stages[rank].register_forward_hook(note)
        blank = torch.full_like(batches[0][0], torch.nan)
        first, last = rank == 0, rank == world_size - 1
        shown = [(x if first else blank, y if last else blank) for x, y in batches]
        lesson.train(rank, world_size, stages[rank], shown, plan, m)

    ranks = play(len(job), act)
    kept = [max(counts[rank], default=0) for rank in job]
    for number, rank in enumerate(ranks):
        most = alive_at_most(by_the_rule(args.schedule, number, len(job), m))
        rules[f"rank {number}, played: {rank.error or rank.wrong}"] = not (rank.error or rank.wrong)
        rules[f"rank {number} keeps {kept[number]} micro-batches at a time"] = kept[number] == most
    off = claims.off(weights_of(model), whole_vector(job, len(batches) - 1, "after"))
    rules[f"the play is off what the ranks did by {off:.2g}"] = off < 1e-12
    return kept, claims.broken(rules)


def library_gradients(world_size, args):
    """Return the first step's gradients by torch.distributed.pipelining, and what went wrong."""
    model, _, ((rows, targets), *_) = batches_of(args)
    stages, letters = lesson.split(model, world_size), defaultdict(SimpleQueue)

    def receive(objects, src, **_):
        objects[:] = letters[src, dist.get_rank()].get(timeout=60)

    def act(rank, world_size):
        library_step(rank, world_size, stages[rank], rows, targets, args)

    places = {
        "get_global_rank": lambda group, rank: rank,
        "send_object_list": lambda objects, dst, **_: letters[dist.get_rank(), dst].put(objects),
        "recv_object_list": receive,  # of what shape messages will be
    }
    group = patch.object(dist.distributed_c10d, "_get_default_group")
    with patch.multiple(dist, **places), group:
        errors = [rank.error for rank in play(world_size, act) if rank.error]
    return gradient(model).numpy(), [f"these stages by the library: {error}" for error in errors]


def library_step(rank, world_size, stage, rows, targets, args):
    """Make a step of this rank's layers with torch.distributed.pipelining; gradients stay."""
    pipeline_stage = PipelineStage(stage, rank, world_size, rows.device)
    kind = ScheduleGPipe
    if args.schedule == "1f1b" and args.micro_batches >= world_size:  # it refuses fewer
        kind = Schedule1F1B
    pipeline = kind(pipeline_stage, args.micro_batches, loss_fn=mse_loss)
    inputs = [rows] if rank == 0 else []
    last = {"target": targets} if rank == world_size - 1 else {}
    pipeline.step(*inputs, **last)


# --- The logical clock ---


def alive_at_most(actions):
    """Return how many micro-batches have had their forward and not yet their backward."""
    changes = [1 if kind == "forward" else -1 for kind, _ in actions]
    return max(itertools.accumulate(changes))


def logical_clock(actions, lengths=None):
    """Return {(rank, kind, n): the tick at which this action ends}.

    actions: for each rank, what it does in a step, in order. A forward takes one tick and a
    backward two, times the rank's entry in `lengths` (default: 1 for all); a message takes none.
    An action begins when its rank is free and what it needs has come.
    """

    @functools.cache
    def end(rank, position):
        kind, n = actions[rank][position]
        begin = end(rank, position - 1) if position > 0 else 0
        sender = rank - 1 if kind == "forward" else rank + 1
        if 0 <= sender < len(actions):
            begin = max(begin, end(sender, actions[sender].index((kind, n))))
        return begin + COST[kind] * (lengths[rank] if lengths else 1)

    places = [(rank, position) for rank, own in enumerate(actions) for position in range(len(own))]
    return {(rank, *actions[rank][position]): end(rank, position) for rank, position in places}


def bubble(actions, lengths=None):
    """Return the share of a step in which the ranks idle, on the logical clock."""
    lengths = lengths or [1] * len(actions)
    pairs = zip(actions, lengths, strict=True)
    busy = sum(COST[kind] * length for own, length in pairs for kind, _ in own)
    return 1 - busy / (len(actions) * max(logical_clock(actions, lengths).values()))
