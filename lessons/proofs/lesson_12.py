"""What lesson 12 claims: stages have one process's gradients, and idle and keep what is known.

The script knows nothing of this file; see lesson_02.py. What its ranks do, and in which order, what
they send, their gradients and weights, and what is told, is seen. Which micro-batch is whose, and
how long its memory lives, is not: so threads play the first two steps again (played_messages.py),
and then those of torch.distributed.pipelining.
"""

import copy
import functools
import itertools
import weakref
from collections import defaultdict
from queue import SimpleQueue
from unittest.mock import patch

import lesson_12_pipeline_parallel as lesson
import torch
import torch.distributed as dist
from lockstep.watch import claims
from lockstep.watch.played_messages import play
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (1, 10**6), "--batch-size": (1, 10**6), "--micro-batches": (1, 64)}
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
    numbers = what_was_asked(job, args, started)
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong += [wrong_in_stages(job), wrong_in_order(job, args), wrong_schedule(started, m)]
    if wrong := list(filter(None, wrong)) + wrong_in_pieces():
        return claims.Verdict(claim, wrong[:3], numbers, [])
    numbers["device"] = next(iter(job[0].optimizers.values()))["device"]
    numbers["stages"] = [len(names_of(rank)) // 2 for rank in job.values()]
    numbers["bytes_sent"] = [bytes_sent(rank) // args.steps for rank in job.values()]
    off, played = in_one_process(job, args), Played(started, args)
    library, failed = library_gradients(started, args)
    numbers["max_grad_diff"] = claims.worst([gradients for gradients, _ in off])
    numbers["library_diff"] = claims.off(whole_vector(job, 0, "gradients"), library)
    if wrong := failed + played.wrong(job, args):
        return claims.Verdict(claim, wrong[:3], numbers, [])
    numbers["alive"], numbers["bubble"] = played.kept, bubble(played.actions)
    words, losses = what_is_told(job, args, numbers)
    wrong = [wrong_in_numbers(off), claims.wrong_in_words(job, words, speaker=started - 1)]
    if not abs(numbers["bubble"] - numbers["bubble_formula"]) < 1e-12:
        wrong.append("the idle share is not that of the formula")
    if not numbers["library_diff"] < 1e-12:
        wrong.append(f"gradients differ from the library's by {numbers['library_diff']:.2g}")
    claim += f" {numbers['max_grad_diff']:.2g}"
    return claims.Verdict(claim, [*filter(None, wrong)], numbers | losses, lines_of(numbers))


def what_was_asked(job, args, started):
    """Return the numbers that flags and the start decide."""
    m = args.micro_batches
    numbers = {"world_size": started, "backend": job[0].group["backend"]}
    numbers |= {"schedule": args.schedule, "steps": args.steps, "micro_batches": m}
    bubble_formula = (started - 1) / (m + started - 1)
    return numbers | {"rows": args.batch_size // m, "bubble_formula": bubble_formula}


def lines_of(numbers):
    """Return what a reader wants to know beside the script's own words."""
    by_rank = zip(*(numbers[what] for what in ("stages", "alive", "bytes_sent")), strict=True)
    lines = [
        f"rank {rank}: {layers} layers, micro-batches kept at a time: {kept}, "
        f"bytes sent in a step: {nbytes:,}"
        for rank, (layers, kept, nbytes) in enumerate(by_rank)
    ]
    clock = f"{numbers['bubble']:.4f}, by the formula {numbers['bubble_formula']:.4f}"
    lines.append(f"idle share of a step, if all stages took equally long: {clock}")
    library = "gradients of torch.distributed.pipelining, largest difference"
    return [*lines, f"{library} {numbers['library_diff']:.2g}"]


# --- What the ranks did ---


def names_of(rank):
    """Return the names of the parameters that a rank trains."""
    return rank.names(rank.updates[0]) if rank.updates else []


def wrong_in_stages(job):
    """The stages are the model in its order, and their lengths differ by one at most."""
    names = [names_of(rank) for rank in job.values()]
    whole = [name for name, _ in lesson.make_chain(1)[0].named_parameters()]
    if [*itertools.chain(*names)] != whole:
        return f"the stages train {names}: that is not the model in its order"
    lengths = [len(own) // 2 for own in names]
    return f"the stages have {lengths} layers" if max(lengths) - min(lengths) > 1 else None


def by_the_rule(schedule, rank, world_size, micro_batches):
    """Return what a rank has to do in a step: forward while it may keep more, else backward."""
    may_keep = world_size - rank if schedule == "1f1b" else micro_batches
    actions, forwards, backwards = [], 0, 0
    while backwards < micro_batches:
        if forwards < micro_batches and forwards - backwards < may_keep:
            actions.append(("forward", forwards))
            forwards += 1
        else:
            actions.append(("backward", backwards))
            backwards += 1
    return actions


def wrong_schedule(world_size, micro_batches):
    """Each schedule keeps its rule, also one that was not asked for."""
    for name, schedule in lesson.SCHEDULES.items():
        for rank in range(world_size):
            place = rank, world_size, micro_batches
            if (order := schedule(*place)) != by_the_rule(name, *place):
                return f"{name} lets rank {rank} do {short(order)}"
    return None


def short(actions):
    """Return actions as text: F0 F1 B0; a question mark where no micro-batch of the step is."""
    return " ".join(f"{kind[0].upper()}{'?' if n is None else n}" for kind, n in actions)


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


def to_be_done(kinds, nbytes, rank, world_size):
    """Return what `kinds` of actions have to be, with messages: each as early as it can be."""
    done, made = [], []
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
        look = to_be_done(["look"], 3 * args.batch_size * 256, *place)  # 32 numbers of 8 bytes
        step = to_be_done(rule, args.batch_size // args.micro_batches * 256, *place)
        wanted = [*look, *[*step, "update"] * args.steps, *look]
        for did, should in itertools.zip_longest(done_by(rank), wanted):
            if did != should:
                return f"rank {number}: {did} comes where {should} should; {args.schedule}"
    return None


def bytes_sent(rank):
    """Return what a rank has sent while it trained."""
    done = done_by(rank)
    rounds = done[done.index("forward") : len(done) - done[::-1].index("update")]
    rounds = [ops for ops in rounds if isinstance(ops, list)]
    return sum(nbytes for ops in rounds for sends, _, nbytes in ops if sends)


def batches_of(args):
    """Return the model, and (rows, targets) of the batches that come again and again."""
    model, *both = lesson.make_chain(3 * args.batch_size, args.seed)
    return model, [*zip(*(part.split(args.batch_size) for part in both), strict=True)]


def whole_vector(job, step, what):
    """Return what all stages together had in a step, as one vector."""
    kept = (rank.values(rank.updates[step])[what] for rank in job.values())
    return torch.cat([torch.from_numpy(claims.as_vector(own)) for own in kept]).numpy()


def in_one_process(job, args):
    """Train the whole model; return [(gradients off, weights off)] of each step."""
    model, batches = batches_of(args)
    optimizer, off = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), []
    for step in range(args.steps):
        rows, targets = batches[step % 3]
        optimizer.zero_grad()
        mse_loss(model(rows), targets).backward()
        optimizer.step()
        ours = gradient(model).numpy(), claims.numbers_of(model, lambda own: own)
        theirs = (whole_vector(job, step, what) for what in ("gradients", "after"))
        off.append([*map(claims.off, theirs, ours)])
    return off


def wrong_in_numbers(off):
    """Gradients and weights are in each step those of one process."""
    for step, both in enumerate(off, 1):
        for what, by in zip(("gradients", "weights"), both, strict=True):
            if not by < 1e-12:
                return f"step {step}: {what} are off by {by:.2g}"
    return None


def gradient(model):
    """Return the gradient that is stored in the parameters of `model`, as one vector."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def what_is_told(job, args, numbers):
    """Return the lines that the last rank has to tell, and the two losses, for --json."""
    model, rows, targets = lesson.make_chain(3 * args.batch_size, args.seed)
    first = mse_loss(model(rows), targets).item()
    claims.fill(model, functools.reduce(dict.__or__, (r.values_at_end() for r in job.values())))
    last = mse_loss(model(rows), targets).item()
    where = f"over {numbers['backend']} on {numbers['device']}, schedule {args.schedule}"
    pieces = f"{args.micro_batches} micro-batches of {numbers['rows']} rows"
    told = [f"ranks: {len(job)}, {where}, {pieces}"]
    told.append(f"loss: {first:.3g} before, {last:.3g} after {args.steps} steps")
    return told, {"loss_first": first, "loss_last": last}


def wrong_in_pieces():
    """train() refuses three rows in two pieces."""
    rows = torch.zeros(3, 32, dtype=torch.float64)
    try:
        lesson.train(0, 1, lesson.make_chain(1)[0], [(rows, rows)], lambda *_: [], 2)
    except ValueError:
        return []
    return ["a batch is cut into unequal pieces"]


# --- Two steps, played by threads ---


class Played:
    """Threads that play two steps of the ranks: each rank's `actions`, and how many it `kept`."""

    def __init__(self, world_size, args):
        self.model, self.batches = batches_of(args)
        self.batches, self.m = self.batches[: min(2, args.steps)], args.micro_batches
        self.stages = lesson.split(copy.deepcopy(self.model), world_size)
        self.actions = [[] for _ in self.stages]
        self.alive, self.kept = [[] for _ in self.stages], [0] * world_size
        plan = lesson.SCHEDULES[args.schedule]

        def act(rank, world_size):
            self.stages[rank].register_forward_hook(functools.partial(self.after_forward, rank))
            blank = torch.full_like(self.batches[0][0], torch.nan)  # who does not need them
            shown = [
                (rows if rank == 0 else blank, targets if rank == world_size - 1 else blank)
                for rows, targets in self.batches
            ]
            lesson.train(rank, world_size, self.stages[rank], shown, plan, self.m)

        self.ranks = play(world_size, act)

    def after_forward(self, rank, stage, args, outputs):
        """Note what a rank does with which micro-batch, and how many it keeps."""
        n = sum(kind == "forward" for kind, _ in self.actions[rank]) % self.m
        self.actions[rank].append(("forward", n))
        outputs.register_hook(lambda _: self.actions[rank].append(("backward", n)))
        memory = [*args, outputs] if args[0].requires_grad else [outputs]  # rows are there anyway
        position = len(self.actions[rank])
        self.alive[rank] += [(position, weakref.ref(x.untyped_storage())) for x in memory]
        self.alive[rank] = [one for one in self.alive[rank] if one[1]() is not None]
        self.kept[rank] = max(self.kept[rank], len({at for at, _ in self.alive[rank]}))

    def wrong(self, job, args):
        """Return what is wrong with the order, with what is kept, or with what came of it."""
        found = []
        for number, rank in enumerate(self.ranks):
            rule = by_the_rule(args.schedule, number, len(job), self.m)
            if rank.error or rank.wrong:
                found.append(f"rank {number}, played: {rank.error or rank.wrong[0]}")
            if self.actions[number] != rule * len(self.batches):
                found.append(f"rank {number} did {short(self.actions[number])}: {args.schedule}")
            elif self.kept[number] != alive_at_most(rule):
                found.append(f"rank {number} kept {self.kept[number]} micro-batches at a time")
            self.actions[number] = self.actions[number][: len(rule)]
        after = [claims.numbers_of(stage, lambda own: own) for stage in self.stages]
        theirs = whole_vector(job, len(self.batches) - 1, "after")
        if not claims.off(torch.cat([*map(torch.from_numpy, after)]).numpy(), theirs) < 1e-12:
            found.append("the play does not what the ranks did")
        return found


def library_gradients(world_size, args):
    """Return the first step's gradients by torch.distributed.pipelining, and what went wrong."""
    model, ((rows, targets), *_) = batches_of(args)
    stages, letters = lesson.split(model, world_size), defaultdict(SimpleQueue)

    def send(objects, dst, **_):  # of what shape messages will be
        letters[dist.get_rank(), dst].put(objects)

    def receive(objects, src, **_):
        objects[:] = letters[src, dist.get_rank()].get(timeout=60)

    def act(rank, world_size):
        library_step(rank, world_size, stages[rank], rows, targets, args)

    places = {"get_global_rank": lambda group, rank: rank, "send_object_list": send}
    with (
        patch.multiple(dist, **places, recv_object_list=receive),
        patch.object(dist.distributed_c10d, "_get_default_group"),
    ):
        errors = [rank.error for rank in play(world_size, act) if rank.error]
    found = torch.cat([gradient(stage) for stage in stages]).numpy()
    return found, [f"these stages by the library: {error}" for error in errors]


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
