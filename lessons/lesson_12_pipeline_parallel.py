"""Lesson 12: how do several ranks train a model that none of them could hold alone?

Each rank keeps some of the layers, a stage. What a stage computes goes to the next rank, and
in the backward pass the gradient comes back. Alone, that lets one rank work while all others
wait. So the batch is cut into micro-batches, and several of them are under way at a time: this
is pipeline parallelism. The script trains by one of three schedules. After every step it compares
the gradients with those of one process, and in step 1 also with torch.distributed.pipelining's.

Run it:         bash scripts/lesson_12.sh --nproc 2 [--micro-batches 4] [--schedule 1f1b]
What that does: torchrun --standalone --nproc-per-node=2 lessons/lesson_12_pipeline_parallel.py
Or alone:       python lessons/lesson_12_pipeline_parallel.py    (one stage: the whole model)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu, schedule 1f1b, 4 micro-batches of 8 rows
    rank 0: 4 layers, micro-batches kept at a time: 2, bytes sent in a step: 8,192
    rank 1: 4 layers, micro-batches kept at a time: 1, bytes sent in a step: 8,192
    idle share of a step, if all stages took equally long: 0.2000, by the formula 0.2000
    gradients of torch.distributed.pipelining, largest difference ...
    loss: 0.537 before, 0.225 after 20 steps
    PASS 2 stages have the gradients of one process: largest difference ...
"""

import argparse
import copy
import functools
import inspect
import itertools
import json
import os
import sys
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
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

    As many forwards as it takes until the first gradient can be back; then a backward after each
    forward, so that this rank never keeps more than `world_size - rank` micro-batches.
    """
    ahead = min(world_size - 1 - rank, micro_batches)
    actions = [("forward", n) for n in range(ahead)]
    for n in range(ahead, micro_batches):
        actions += [("forward", n), ("backward", n - ahead)]
    actions += [("backward", n) for n in range(micro_batches - ahead, micro_batches)]
    return actions


def one_message(operation, tensor, peer):
    """Return [the message], not yet under way, or [] if there is no rank `peer`."""
    exists = 0 <= peer < dist.get_world_size()
    return [dist.P2POp(operation, tensor, peer)] if exists else []


def exchange(messages):
    """Send and receive all `messages` at the same time; return when all are through.

    One after the other, two neighbours that both send first would wait for each other for ever:
    over gloo, a send ends when the other side receives.
    """
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def train_step(rank, world_size, stage, actions, rows, targets):
    """Do `actions` with this rank's layers; yield each action when it is done.

    rows, targets: one tensor [rows, width] for each micro-batch. Only the first rank uses the
    values of the rows, and only the last one the targets. The others need their shape: every
    message has it, because all layers have the same width.
    """
    inputs, outputs = {}, {}  # kept from a micro-batch's forward until its backward
    messages = []  # what the last action has made, for a neighbour
    for kind, n in actions:
        if kind == "forward":
            inputs[n] = rows[n].clone()  # on rank 0 the rows, on the others a place for what comes
            messages += one_message(dist.irecv, inputs[n], rank - 1)
            exchange(messages)
            outputs[n] = stage(inputs[n].requires_grad_(rank > 0))
            messages = one_message(dist.isend, outputs[n].detach(), rank + 1)
            if rank == world_size - 1:
                loss = mse_loss(outputs[n], targets[n])
                outputs[n] = loss / len(targets)  # so that their sum is the mean of the batch
        else:
            gradient = torch.ones_like(outputs[n])  # on the last rank: of the loss by itself, 1
            messages += one_message(dist.irecv, gradient, rank + 1)  # on the others it comes
            exchange(messages)
            outputs.pop(n).backward(gradient)  # adds to the gradients of this stage
            messages = one_message(dist.isend, inputs.pop(n).grad, rank - 1)
        yield kind, n
    exchange(messages)


def train(rank, world_size, stage, batches, schedule, micro_batches):
    """Train `stage`, this rank's layers; yield each action, and after a step ("update", step).

    batches: (rows, targets) for each step; `micro_batches` divides the number of rows.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=2.0)
    for step, (rows, targets) in enumerate(batches):
        optimizer.zero_grad()
        actions = schedule(rank, world_size, micro_batches)
        pieces = rows.chunk(micro_batches), targets.chunk(micro_batches)
        yield from train_step(rank, world_size, stage, actions, *pieces)
        optimizer.step()  # after all micro-batches; each rank updates its own layers
        yield "update", step


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


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends to each other rank: `sent.to`, {rank: bytes}."""

    def __init__(self):
        super().__init__()
        self.to = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d.send.default:
            tensors, _, peer, _ = args
            self.to[peer] = self.to.get(peer, 0) + sum(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


def gradient(model):
    """Return the gradient that is stored in the parameters of `model`, as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def alive_at_most(actions):
    """Return how many micro-batches have had their forward and not yet their backward."""
    changes = [1 if kind == "forward" else -1 for kind, _ in actions]
    return max(itertools.accumulate(changes))


def logical_clock(actions, lengths=None, message=0):
    """Return {(rank, kind, n): the tick at which this action ends}.

    actions: for each rank, what it does in a step, in order. A forward takes one tick and a
    backward two, times the rank's entry in `lengths` (default: 1 for all); a message takes
    `message` ticks, in which neither sender nor receiver has to wait for it. An action begins when
    its rank is free and what it needs has come.
    """

    @functools.cache
    def end(rank, position):
        kind, n = actions[rank][position]
        begin = end(rank, position - 1) if position > 0 else 0
        sender = rank - 1 if kind == "forward" else rank + 1
        if 0 <= sender < len(actions):
            begin = max(begin, end(sender, actions[sender].index((kind, n))) + message)
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


def train_alone(model, batches):
    """Train the whole model in this process; yield after each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for rows, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(rows), targets).backward()
        optimizer.step()
        yield


def measure(rank, world_size, device, steps, batch_size, micro_batches, schedule, seed=0):
    """Train the toy in stages and, beside them, the whole model alone; return this rank's numbers.

    After every step the gradient of this stage is compared with that of the same layers in the
    whole model. (So each rank holds the whole model here: it is a toy, and this is the proof.)
    """
    model, rows, targets = make_chain(batch_size, seed)
    model, rows, targets = model.to(device), rows.to(device), targets.to(device)
    whole = copy.deepcopy(model)
    stage, same_layers = split(model, world_size)[rank], split(whole, world_size)[rank]
    own = (rank, world_size, stage)
    by_library = library_gradient(*own, device, schedule, rows, targets, micro_batches)
    batches = [(rows, targets)] * steps
    alone = train_alone(whole, batches)
    actions, gradients, expected = [], [], []
    with Sent() as sent:
        for action in train(*own, batches, SCHEDULES[schedule], micro_batches):
            actions.append(action)
            if action[0] == "update":
                next(alone)
                gradients.append(gradient(stage))
                expected.append(gradient(same_layers))
    first_step = actions[: actions.index(("update", 0))]
    facts = {"layers": len(stage), "actions": first_step}
    facts["sent"] = {peer: nbytes // steps for peer, nbytes in sent.to.items()}
    facts["max_grad_diff"] = largest_difference(gradients, expected)
    facts["library_diff"] = largest_difference(gradients[:1], [by_library])
    return facts, stage.state_dict()


def largest_difference(vectors, others):
    """Return the largest absolute difference of two lists of vectors; nan if one is nan."""
    return (torch.stack(vectors) - torch.stack(others)).abs().max().item()


def collect(facts, own_layers, batch_size, seed):
    """Gather what all ranks have measured; return one dict, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (facts, own_layers))
    result = {"stages": [theirs["layers"] for theirs, _ in everyone]}
    actions = [theirs["actions"] for theirs, _ in everyone]
    result["alive"] = [alive_at_most(own) for own in actions]
    result["bytes_sent"] = [sum(theirs["sent"].values()) for theirs, _ in everyone]
    result["bubble"] = bubble(actions)
    for name in ("max_grad_diff", "library_diff"):
        result[name] = torch.tensor([theirs[name] for theirs, _ in everyone]).max().item()
    model, rows, targets = make_chain(batch_size, seed)
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


def refuse(batch_size, micro_batches, **others):
    """Return what is wrong with the flags, or None."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 8:
        return "--nproc: at most 8 ranks, because the model has 8 layers"
    if batch_size % micro_batches:
        return f"--micro-batches: {micro_batches} do not divide the batch of {batch_size} rows"
    return None


def main(
    steps: range(1, 10**6) = 20,
    batch_size: range(1, 10**6) = 32,
    micro_batches: range(1, 65) = 4,
    schedule: Literal["naive", "gpipe", "1f1b"] = "1f1b",
    seed: range(2**32) = 0,
):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    micro_batches = 1 if schedule == "naive" else micro_batches
    flags = (steps, batch_size, micro_batches, schedule, seed)
    result = {"lesson": 12, "world_size": world_size, "backend": dist.get_backend()}
    result |= {"device": device.type, "schedule": schedule, "micro_batches": micro_batches}
    result |= {"steps": steps, "rows": batch_size // micro_batches}
    result["bubble_formula"] = (world_size - 1) / (micro_batches + world_size - 1)
    result |= collect(*measure(rank, world_size, device, *flags), batch_size, seed)
    dist.destroy_process_group()
    if rank == 0:
        report(result)
    exact = result["max_grad_diff"] < 1e-12 and result["library_diff"] < 1e-12
    as_planned = abs(result["bubble"] - result["bubble_formula"]) < 1e-12
    passed = exact and as_planned and result["loss_last"] < result["loss_first"]
    who = "1 stage has" if world_size == 1 else f"{world_size} stages have"
    claim = f"{who} the gradients of one process: largest difference"
    return passed, f"{claim} {result['max_grad_diff']:.2g}", result


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU.
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


def start(main, refuse=lambda **flags: None):
    """Run main with flags made from its arguments; return 0 (PASS) or 1 (FAIL), or exit with 2."""
    rank_0 = os.environ.get("RANK", "0") == "0"  # it speaks for all
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text[:300]}\n" * rank_0)
    arguments = inspect.signature(main).parameters
    for name, argument in arguments.items():
        options = {"type": type(argument.default), "default": argument.default, "metavar": "X"}
        parser.add_argument("--" + name.replace("_", "-"), **options, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    values = vars(parser.parse_args())
    flags = {name: values[name] for name in arguments}
    for name, value in flags.items():
        allowed = get_args(arguments[name].annotation) or arguments[name].annotation
        if value not in allowed:
            parser.error(f"argument --{name.replace('_', '-')}: must be in {allowed}, not {value}")
    if problem := refuse(**flags):
        parser.error(f"argument {problem}")
    if values["check"]:
        return 0
    passed, claim, result = main(**flags)
    if rank_0:
        print("PASS" if passed else "FAIL", claim)
        print(json.dumps(result | {"passed": passed}) + "\n" if values["json"] else "", end="")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(start(main, refuse))
