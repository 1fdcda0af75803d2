"""Lesson 12: how do several ranks train a model that none of them could hold alone?

Each rank keeps some of the layers, a stage. Outputs go to the next rank, gradients come back. So
that all can work at a time, the batch is cut into micro-batches: this is pipeline parallelism. The
launcher watches who does and sends what; the lines about ranks are its own, and so is PASS.

Run it:    bash scripts/lesson_12.sh --nproc 2 [--micro-batches 4] [--schedule 1f1b]
Or alone:  torchrun --standalone --nproc-per-node=2 lessons/lesson_12_pipeline_parallel.py

Output to expect on a CPU:

    ranks: 2, over gloo on cpu, schedule 1f1b, 4 micro-batches of 8 rows
    loss: 0.574 before, 0.353 after 20 steps
    rank 0: 4 layers, micro-batches kept at a time: 2, bytes sent in a step: 8,192
    ...
    PASS 2 stages have the gradients of one process: largest difference ...
"""

import argparse
import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss

# --- The technique ---


def split(layers, stages):
    """Cut `layers`, an nn.Sequential, into `stages` pieces; lengths differ by one at most."""
    bounds = [len(layers) * stage // stages for stage in range(stages + 1)]
    return [layers[begin:end] for begin, end in itertools.pairwise(bounds)]


def all_forward_then_all_backward(rank, world_size, micro_batches):
    """Return what a rank does in a step, in order: GPipe (Huang et al., 2019)."""
    numbers = range(micro_batches)
    return [("forward", n) for n in numbers] + [("backward", n) for n in numbers]


def one_forward_one_backward(rank, world_size, micro_batches):
    """Return what a rank does in a step: 1F1B (PipeDream-Flush, Narayanan et al., 2021).

    It never keeps more than `world_size - rank` micro-batches.
    """
    ahead = min(world_size - 1 - rank, micro_batches)
    actions = [("forward", n) for n in range(ahead)]
    for n in range(ahead, micro_batches):
        actions += [("forward", n), ("backward", n - ahead)]
    return actions + [("backward", n) for n in range(micro_batches - ahead, micro_batches)]


def one_message(operation, tensor, peer):
    """Return [the message], not yet under way, or [] if the default group has no rank `peer`."""
    exists = 0 <= peer < dist.get_world_size()
    return [dist.P2POp(operation, tensor, peer)] if exists else []


def exchange(messages):
    """Begin all `messages`, then wait: one by one, two that both send first would wait for ever."""
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def train_step(rank, world_size, stage, actions, rows, targets):
    """Do `actions` with this rank's layers; their gradients are those of all rows then.

    rows, targets: one tensor [rows, width] for each micro-batch. Rows are used on the first rank,
    targets on the last; the others need the rows' shape and dtype, which all messages have.
    """
    inputs, outputs = {}, {}  # kept from a micro-batch's forward until its backward
    messages = []  # what the last action has made, for a neighbour
    for kind, n in actions:
        if kind == "forward":
            inputs[n] = rows[n] if rank == 0 else torch.empty_like(rows[n], requires_grad=True)
            exchange(one_message(dist.irecv, inputs[n].detach(), rank - 1) + messages)
            outputs[n] = stage(inputs[n])
            messages = one_message(dist.isend, outputs[n].detach(), rank + 1)
            if rank == world_size - 1:  # divided, so that their sum is the mean of the batch
                outputs[n] = mse_loss(outputs[n], targets[n]) / len(targets)
        else:
            gradient = torch.ones_like(outputs[n])  # on the last rank: of the loss by itself, 1
            exchange(one_message(dist.irecv, gradient, rank + 1) + messages)
            outputs.pop(n).backward(gradient)  # adds to the gradients of this stage
            messages = one_message(dist.isend, inputs.pop(n).grad, rank - 1)
    exchange(messages)


def train(rank, world_size, stage, batches, schedule, micro_batches):
    """Train `stage`, this rank's layers, with (rows, targets) for each step."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0, momentum=0.5)
    actions = schedule(rank, world_size, micro_batches)
    for rows, targets in batches:
        if len(rows) % micro_batches:  # with unequal pieces the gradients would be wrong
            raise ValueError(f"{len(rows)} rows can't be cut into {micro_batches} equal pieces")
        optimizer.zero_grad()
        pieces = rows.chunk(micro_batches), targets.chunk(micro_batches)
        train_step(rank, world_size, stage, actions, *pieces)
        optimizer.step()  # after all micro-batches; each rank updates its own layers


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


# --- The example ---

SCHEDULES = {
    "naive": all_forward_then_all_backward,  # of one piece
    "gpipe": all_forward_then_all_backward,
    "1f1b": one_forward_one_backward,
}


def make_chain(batch_size, seed=0, layers=8, width=32):
    """Return (model, rows, targets), in float64: rounding is too small to hide a mistake."""
    generator, model = torch.Generator().manual_seed(seed), nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width, dtype=torch.float64)
        for parameter in linear.parameters():
            nn.init.normal_(parameter, std=width**-0.5, generator=generator)
        model.append(nn.Sequential(linear, nn.Tanh()))
    rows, targets = torch.randn(2, batch_size, width, generator=generator, dtype=torch.float64)
    return model, rows, targets.tanh()


@torch.no_grad()
def mean_loss(rank, stage, rows, targets):
    """Return the loss of all rows, on the last rank; the others know only what they send."""
    inputs = rows if rank == 0 else torch.empty_like(rows)
    exchange(one_message(dist.irecv, inputs, rank - 1))
    outputs = stage(inputs)
    exchange(one_message(dist.isend, outputs, rank + 1))
    return mse_loss(outputs, targets).item()


def main(args):
    """Train this rank's layers; the last rank, which knows the loss, tells it."""
    rank, world_size, device = join_group()
    model, rows, targets = make_chain(3 * args.batch_size, args.seed)
    stage = split(model, world_size)[rank].to(device)
    rows, targets = rows.to(device), targets.to(device)
    pairs = zip(rows.split(args.batch_size), targets.split(args.batch_size), strict=True)
    batches = itertools.islice(itertools.cycle(pairs), args.steps)
    before = mean_loss(rank, stage, rows, targets)
    train(rank, world_size, stage, batches, SCHEDULES[args.schedule], args.micro_batches)
    after = mean_loss(rank, stage, rows, targets)
    if rank == world_size - 1:
        where = f"over {dist.get_backend()} on {device.type}, schedule {args.schedule}"
        pieces = f"{args.micro_batches} micro-batches of {args.batch_size // args.micro_batches}"
        print(f"ranks: {world_size}, {where}, {pieces} rows")
        print(f"loss: {before:.3g} before, {after:.3g} after {args.steps} steps")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    for flag, default in (("--steps", 20), ("--batch-size", 32), ("--micro-batches", 4)):
        parser.add_argument(flag, type=int, default=default, help="%(default)s")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    args = parser.parse_args(argv)
    if args.schedule == "naive":
        args.micro_batches = 1  # all rows at a time
    return args


if __name__ == "__main__":
    main(parse_args())
