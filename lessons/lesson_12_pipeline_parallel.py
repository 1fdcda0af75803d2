"""Lesson 12: how do several ranks train a model that none of them could hold alone?

Each rank keeps some of the layers, a stage. What a stage computes goes to the next rank, and
in the backward pass the gradient comes back. Alone, that lets one rank work while all others
wait. So the batch is cut into micro-batches, and several of them are under way at a time: this
is pipeline parallelism, by one of three schedules. The proof watches each rank: what it does and
in which order, how many micro-batches it keeps, what it sends; and it compares with one process.

Run it:         bash scripts/lesson_12.sh --nproc 2 [--micro-batches 4] [--schedule 1f1b]
What that does: torchrun --standalone --nproc-per-node=2 lessons/lesson_12_pipeline_parallel.py
Or alone:       python lessons/lesson_12_pipeline_parallel.py    (one stage: the whole model)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu, schedule 1f1b, 4 micro-batches of 8 rows
    rank 0: 4 layers, micro-batches kept at a time: 2, bytes sent in a step: 8,192
    rank 1: 4 layers, micro-batches kept at a time: 1, bytes sent in a step: 8,192
    idle share of a step, if all stages took equally long: 0.2000, by the formula 0.2000
    gradients of torch.distributed.pipelining, largest difference ...
    loss: 0.574 before, 0.353 after 20 steps
    PASS 2 stages have the gradients of one process: largest difference ...
"""

import argparse
import copy
import functools
import itertools
import json
import os
import sys
import weakref
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

# --- The technique ---


def split(layers, stages):
    """Cut `layers`, an nn.Sequential, into `stages` pieces; lengths differ by one at most."""
    bounds = [len(layers) * stage // stages for stage in range(stages + 1)]
    return [layers[begin:end] for begin, end in itertools.pairwise(bounds)]


def all_forward_then_all_backward(rank, world_size, micro_batches):
    """Return what a rank does in a step, in order: GPipe (Huang et al., 2019; its paper also
    saves memory by computing activations twice, which is left out here).
    """
    numbers = range(micro_batches)
    return [("forward", n) for n in numbers] + [("backward", n) for n in numbers]


def one_forward_one_backward(rank, world_size, micro_batches):
    """Return what a rank does in a step, in order: 1F1B (PipeDream-Flush, Narayanan et al., 2021).

    As many forwards as there are ranks behind this one; then a forward and a backward in turn, so
    that this rank never keeps more than `world_size - rank` micro-batches; at last what is left.
    """
    ahead = min(world_size - 1 - rank, micro_batches)
    actions = [("forward", n) for n in range(ahead)]
    for n in range(ahead, micro_batches):
        actions += [("forward", n), ("backward", n - ahead)]
    actions += [("backward", n) for n in range(micro_batches - ahead, micro_batches)]
    return actions


def one_message(operation, tensor, peer):
    """Return [the message], not yet under way, or [] if the default group has no rank `peer`."""
    exists = 0 <= peer < dist.get_world_size()
    return [dist.P2POp(operation, tensor, peer)] if exists else []


def exchange(messages):
    """Send and receive all `messages` at the same time; over gloo, return when all are through.

    One after the other, two neighbours that both send first would wait for each other until the
    group's timeout: over gloo, a send ends when the other side receives.
    """
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def train_step(rank, world_size, stage, actions, rows, targets):
    """Do `actions` with this rank's layers; their gradients are those of the whole batch then.

    rows, targets: one tensor [rows, width] for each micro-batch. Only the first rank uses the
    values of the rows, and only the last one the targets. The others need the shape and the dtype
    of the rows: every message has them, because all layers have the same width.
    """
    inputs, outputs = {}, {}  # kept from a micro-batch's forward until its backward
    messages = []  # what the last action has made, for a neighbour
    for kind, n in actions:
        if kind == "forward":
            inputs[n] = rows[n] if rank == 0 else torch.empty_like(rows[n], requires_grad=True)
            messages += one_message(dist.irecv, inputs[n].detach(), rank - 1)
            exchange(messages)
            outputs[n] = stage(inputs[n])
            messages = one_message(dist.isend, outputs[n].detach(), rank + 1)
            if rank == world_size - 1:  # divided, so that their sum is the mean of the batch
                outputs[n] = mse_loss(outputs[n], targets[n]) / len(targets)
        else:
            gradient = torch.ones_like(outputs[n])  # on the last rank: of the loss by itself, 1
            messages += one_message(dist.irecv, gradient, rank + 1)  # on the others it comes
            exchange(messages)
            outputs.pop(n).backward(gradient)  # adds to the gradients of this stage
            messages = one_message(dist.isend, inputs.pop(n).grad, rank - 1)
    exchange(messages)


def train(rank, world_size, stage, batches, schedule, micro_batches):
    """Train `stage`, this rank's layers; `schedule` makes the list of this rank's actions.

    batches: (rows, targets) for each step; `micro_batches` divides the number of rows.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0, momentum=0.5)
    actions = schedule(rank, world_size, micro_batches)
    for rows, targets in batches:
        if len(rows) % micro_batches:  # with unequal pieces the gradients would be wrong
            raise ValueError(f"{len(rows)} rows can't be cut into {micro_batches} equal pieces")
        optimizer.zero_grad()
        pieces = rows.chunk(micro_batches), targets.chunk(micro_batches)
        train_step(rank, world_size, stage, actions, *pieces)
        optimizer.step()  # after all micro-batches; each rank updates its own layers


# --- The proof ---

SCHEDULES = {
    "naive": all_forward_then_all_backward,  # with one micro-batch: the whole batch
    "gpipe": all_forward_then_all_backward,
    "1f1b": one_forward_one_backward,
}
COST = {"forward": 1, "backward": 2}  # ticks of the logical clock


def make_chain(batch_size, seed=0, layers=8, width=32):
    """Return (model, rows, targets): an nn.Sequential, and two tensors [batch_size, width].

    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width, dtype=torch.float64)
        for parameter in linear.parameters():
            numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = numbers / width**0.5
        model.append(nn.Sequential(linear, nn.Tanh()))
    rows, targets = torch.randn(2, batch_size, width, generator=generator, dtype=torch.float64)
    return model, rows, targets.tanh()


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


class Sent(TorchDispatchMode):
    """Counts what this rank sends: `messages` by (rank, bytes); `others` are other collectives.

    tell: a function that is called with the receiver's rank when a message goes out.
    """

    def __init__(self, tell=lambda peer: None):
        super().__init__()
        self.messages, self.others, self.tell = Counter(), Counter(), tell

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d.send.default:
            tensors, _, peer, _ = args
            self.messages[peer, sum(tensor.nbytes for tensor in tensors)] += 1
            self.tell(peer)
        elif "c10d" in function.namespace and function is not torch.ops.c10d.recv_.default:
            self.others[function._schema.name] += 1
        return function(*args, **(kwargs or {}))

    def bytes_to(self):
        """Return {rank: bytes sent to it}."""
        total = Counter()
        for (peer, nbytes), count in self.messages.items():
            total[peer] += nbytes * count
        return dict(total)


class Watch:
    """Sees what a stage does: hooks at its two ends, and at the optimizer's update.

    Beside it the whole model is trained in this process. So it is known what must come into the
    stage and go out of it for each micro-batch: by that, micro-batches are told apart.
    """

    def __init__(self, stage, whole, batches, micro_batches):
        self.stage, self.whole, self.batches = stage, whole, batches
        self.micro_batches = micro_batches
        self.layers = [int(name) for name, _ in stage.named_children()]  # names are from the whole
        self.same_layers = nn.Sequential(*(whole[number] for number in self.layers))
        self.actions, self.orders = [], []  # of this step; each order that a step has had
        self.sent_after = []  # (step, the action before it, receiver) of each message
        self.alive, self.kept = [], 0  # [(micro-batch, its memory)]; most micro-batches
        self.updates, self.off = 0, dict.fromkeys(("outputs", "gradients", "weights"), 0.0)
        self.first_gradient = torch.tensor([])
        self.look_ahead()

    def look_ahead(self):
        """Work out what comes into this stage, and goes out of it, in the next step."""
        rows, _ = self.batches[self.updates % len(self.batches)]
        with torch.no_grad():
            came = [self.whole[: self.layers[0]](piece) for piece in rows.chunk(self.micro_batches)]
            self.expected = [(inputs, self.same_layers(inputs)) for inputs in came]

    def after_forward(self, stage, args, outputs):
        """Find out which micro-batch this is, compare its outputs, count what is kept."""
        (inputs,) = args
        known = [difference(inputs, expected) < 1e-9 for expected, _ in self.expected]
        n = known.index(True) if True in known else None
        if n is not None:
            self.compare("outputs", outputs, self.expected[n][1])
        self.actions.append(("forward", n))
        outputs.register_hook(lambda gradient: self.actions.append(("backward", n)))
        tensors = [inputs, outputs] if inputs.requires_grad else [outputs]  # rows are there anyway
        memory = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]  # of copies, too
        self.alive += [(len(self.actions), each) for each in memory]
        self.alive = [one for one in self.alive if one[1]() is not None]
        self.kept = max(self.kept, len({number for number, _ in self.alive}))

    def at_message(self, peer):
        """Note after which action a message goes to the rank `peer`."""
        self.sent_after.append((self.updates, (self.actions or [None])[-1], peer))

    def after_update(self, optimizer, args, kwargs):
        """Make the same step in one process, and compare."""
        rows, targets = self.batches[self.updates % len(self.batches)]
        step_alone(self.whole, rows, targets)
        self.compare("gradients", gradient(self.stage), gradient(self.same_layers))
        self.compare("weights", *map(weights, (self.stage, self.same_layers)))
        if self.updates == 0:
            self.first_gradient = gradient(self.stage)
        self.updates += 1
        self.orders += [self.actions] if self.actions not in self.orders else []
        self.actions = []
        self.look_ahead()

    def compare(self, what, ours, theirs):
        """Remember the largest difference, until one is too large: others would follow from it."""
        if all(by < 1e-12 for by in self.off.values()):
            self.off[what] = largest(self.off[what], difference(ours, theirs))


def step_alone(model, rows, targets):
    """Make one step of the whole model in this process; its gradients stay."""
    model.zero_grad()
    mse_loss(model(rows), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():  # SGD with momentum, written out
            parameter.speed = 0.5 * getattr(parameter, "speed", 0.0) + parameter.grad
            parameter -= parameter.speed


def gradient(model):
    """Return the gradient that is stored in the parameters of `model`, as one vector."""
    both = [(parameter, parameter.grad) for parameter in model.parameters()]
    return torch.cat([(0 * own if grad is None else grad).flatten() for own, grad in both])


def weights(model):
    """Return the parameters of `model` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def difference(ours, theirs):
    """Return the largest absolute difference; inf if the shapes differ, nan if a number is nan."""
    if ours.shape != theirs.shape:
        return float("inf")
    return (ours - theirs).abs().max().item()


def largest(*numbers):
    """Return the largest number, nan if one is nan."""
    return torch.tensor(numbers, dtype=torch.float64).max().item()


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
    busy = sum(
        COST[kind] * length for own, length in zip(actions, lengths, strict=True) for kind, _ in own
    )
    return 1 - busy / (len(actions) * max(logical_clock(actions, lengths).values()))


def library_gradient(rank, world_size, stage, device, schedule, rows, targets, micro_batches):
    """Return the gradient of this stage as torch.distributed.pipelining computes it, one vector."""
    stage = copy.deepcopy(stage)
    stage.zero_grad()
    pipeline_stage = PipelineStage(stage, rank, world_size, device)
    kind = ScheduleGPipe
    if schedule == "1f1b" and micro_batches >= world_size:  # the library refuses fewer
        kind = Schedule1F1B
    pipeline = kind(pipeline_stage, micro_batches, loss_fn=mse_loss)
    inputs = [rows] if rank == 0 else []
    last = {"target": targets} if rank == world_size - 1 else {}
    pipeline.step(*inputs, **last)
    return gradient(stage)


def make_job(batch_size, steps, seed, device):
    """Return the model and (rows, targets) for each step: three batches, again and again."""
    model, rows, targets = make_chain(3 * batch_size, seed)
    rows, targets = rows.to(device).split(batch_size), targets.to(device).split(batch_size)
    return model.to(device), [(rows[step % 3], targets[step % 3]) for step in range(steps)]


def refuses_unequal_pieces(rank, world_size, stage):
    """Return whether train() refuses three rows in two pieces; it has no actions, so none waits."""
    rows = torch.zeros(3, 32)
    try:
        train(rank, world_size, stage, [(rows, rows)], lambda *_: [], 2)
    except ValueError:
        return True
    return False


def needed(rank, world_size, rows, targets):
    """Blank what this rank must not use: only the first reads rows, only the last targets."""
    blank = torch.full_like(rows, torch.nan)
    return rows if rank == 0 else blank, targets if rank == world_size - 1 else blank


def measure(rank, world_size, device, steps, batch_size, micro_batches, schedule, seed=0):
    """Train the toy in stages, and watch; return what this rank has measured, and its layers.

    Each rank holds the whole model beside its stage here: it is a toy, and this is the proof.
    """
    model, batches = make_job(batch_size, steps, seed, device)
    whole = copy.deepcopy(model)
    stage = split(model, world_size)[rank]
    own = (rank, world_size, stage)
    refuses = refuses_unequal_pieces(*own)
    by_library = library_gradient(*own, device, schedule, *batches[0], micro_batches)
    watch = Watch(stage, whole, batches, micro_batches)
    hooks = [stage.register_forward_hook(watch.after_forward)]
    hooks.append(register_optimizer_step_post_hook(watch.after_update))
    with Sent(watch.at_message) as sent:
        shown = [needed(rank, world_size, *batch) for batch in batches]
        train(*own, shown, SCHEDULES[schedule], micro_batches)
    for hook in hooks:
        hook.remove()
    names = ("layers", "updates", "orders", "sent_after", "kept", "off")
    facts = {name: getattr(watch, name) for name in names}
    facts["library_diff"] = difference(watch.first_gradient, by_library)
    facts["refuses"] = refuses
    facts |= {"messages": dict(sent.messages), "others": dict(sent.others)}
    facts["sent"] = {peer: nbytes // steps for peer, nbytes in sent.bytes_to().items()}
    return facts, stage.state_dict()


def what_is_wrong(everyone, args):
    """Return one sentence, or None; `everyone` has what each rank has measured."""
    layers = [number for facts in everyone for number in facts["layers"]]
    if layers != list(range(8)):
        return f"the stages hold the layers {layers}: that is not the model in its order"
    lengths = [len(facts["layers"]) for facts in everyone]
    if max(lengths) - min(lengths) > 1:
        return f"the stages have {lengths} layers: their lengths differ by more than one"
    for rank, facts in enumerate(everyone):
        if problems := problems_of(rank, facts, len(everyone), args):
            return f"rank {rank} {problems[0]}"
    return wrong_schedule(len(everyone), args.micro_batches)


def wrong_schedule(world_size, micro_batches):
    """Return a sentence on a schedule that breaks its rule, or None: also if it has not run."""
    for name, schedule in SCHEDULES.items():
        for rank in range(world_size):
            place = rank, world_size, micro_batches
            if (order := schedule(*place)) != by_the_rule(name, *place):
                return f"{name} lets rank {rank} do {short(order)}"
    return None


def problems_of(rank, facts, world_size, args):
    """Return sentences on what a rank did against the rule, and on what is off."""
    rule = by_the_rule(args.schedule, rank, world_size, args.micro_batches)
    other = [short(order) for order in facts["orders"] if order != rule]
    peer = {"forward": rank + 1, "backward": rank - 1}
    at_once = [(step, one, peer[one[0]]) for step in range(args.steps) for one in rule]
    at_once = [message for message in at_once if 0 <= message[2] < world_size]
    nbytes = args.batch_size // args.micro_batches * 32 * 8  # rows, width, float64
    neighbours = {rank - 1, rank + 1} & set(range(world_size))
    messages = {(peer, nbytes): args.micro_batches * args.steps for peer in neighbours}
    off = {**facts["off"], "gradients that differ from the library's,": facts["library_diff"]}
    wrong = {
        f"made {facts['updates']} updates in {args.steps} steps": facts["updates"] != args.steps,
        f"did {', then '.join(other)}; {args.schedule} is {short(rule)}": bool(other),
        f"kept {facts['kept']} micro-batches at a time": facts["kept"] != alive_at_most(rule),
        f"sent {facts['messages']}, not {messages}": facts["messages"] != messages,
        "sent an output or a gradient too late, or too early": facts["sent_after"] != at_once,
        f"called {list(facts['others'])} as well": bool(facts["others"]),
        "cut a batch into unequal pieces": not facts["refuses"],
    }
    wrong |= {f"has {what} off by {by:.2g}": not by < 1e-12 for what, by in off.items()}
    return [sentence for sentence, is_so in wrong.items() if is_so]


def short(actions):
    """Return actions as text: F0 F1 B0; a question mark where no micro-batch of the step is."""
    words = (kind[0].upper() + ("?" if n is None else str(n)) for kind, n in actions)
    return " ".join(words) or "nothing"


def collect(everyone, problem, args):
    """Return the numbers for --json; `everyone` is [(facts, layers)], by rank."""
    facts = [own for own, _ in everyone]
    result = {"stages": [len(own["layers"]) for own in facts]}
    result["alive"] = [own["kept"] for own in facts]
    result["bytes_sent"] = [sum(own["sent"].values()) for own in facts]
    result["bubble"] = float("nan")
    if problem is None:  # else the lists of actions may not fit together
        result["bubble"] = bubble([own["orders"][0] for own in facts])
    result["max_grad_diff"] = largest(*(own["off"]["gradients"] for own in facts))
    result["library_diff"] = largest(*(own["library_diff"] for own in facts))
    model, rows, targets = make_chain(3 * args.batch_size, args.seed)
    result["loss_first"] = mse_loss(model(rows), targets).item()
    for _, layers in everyone:  # a stage's layers have kept the names that they had in the whole
        model.load_state_dict(layers, strict=False)
    result["loss_last"] = mse_loss(model(rows), targets).item()
    return result


def report(result):
    """Print what a reader wants to know, rank by rank."""
    where = f"over {result['backend']} on {result['device']}"
    pieces = f"{result['micro_batches']} micro-batches of {result['rows']} rows"
    print(f"ranks: {result['world_size']}, {where}, schedule {result['schedule']}, {pieces}")
    for rank, layers in enumerate(result["stages"]):
        alive, nbytes = result["alive"][rank], result["bytes_sent"][rank]
        kept = f"micro-batches kept at a time: {alive}"
        print(f"rank {rank}: {layers} layers, {kept}, bytes sent in a step: {nbytes:,}")
    clock = f"{result['bubble']:.4f}, by the formula {result['bubble_formula']:.4f}"
    print(f"idle share of a step, if all stages took equally long: {clock}")
    library = "gradients of torch.distributed.pipelining, largest difference"
    print(f"{library} {result['library_diff']:.2g}")
    losses = f"{result['loss_first']:.3g} before, {result['loss_last']:.3g} after"
    print(f"loss: {losses} {result['steps']} steps")


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    job = (args.steps, args.batch_size, args.micro_batches, args.schedule, args.seed)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, measure(rank, world_size, device, *job))
    problem = what_is_wrong([facts for facts, _ in everyone], args)
    result = {"lesson": 12, "world_size": world_size, "backend": dist.get_backend()}
    result |= {"device": device.type, "schedule": args.schedule, "steps": args.steps}
    result |= {"micro_batches": args.micro_batches, "rows": args.batch_size // args.micro_batches}
    result["bubble_formula"] = (world_size - 1) / (args.micro_batches + world_size - 1)
    result |= collect(everyone, problem, args)
    dist.destroy_process_group()
    if rank == 0:
        report(result)
    if problem is None and not abs(result["bubble"] - result["bubble_formula"]) < 1e-12:
        problem = "the idle share is not that of the formula"
    who = "1 stage has" if world_size == 1 else f"{world_size} stages have"
    claim = f"{who} the gradients of one process: largest difference"
    claim = problem or f"{claim} {result['max_grad_diff']:.2g}"
    return problem is None, claim, result


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=32, help="%(default)s")
    parser.add_argument("--micro-batches", type=whole(1, 64), default=4, help="%(default)s")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if args.schedule == "naive":
        args.micro_batches = 1  # the whole batch
    if int(os.environ.get("WORLD_SIZE", 1)) > 8:
        parser.error("argument --nproc: at most 8 ranks, because the model has 8 layers")
    if args.batch_size % args.micro_batches:
        rows = f"do not divide the batch of {args.batch_size} rows"
        parser.error(f"argument --micro-batches: {args.micro_batches} {rows}")
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
