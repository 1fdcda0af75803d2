"""What lesson 01 claims: several devices make the update of one device, and of nn.DataParallel.

The script knows nothing of this file. It has no ranks to compare: all happens between the devices
and the threads of one process. So the launcher runs it in `watched`, which has hooks of its own.
What its batches do not show (devices without rows, a buffer, replicas that must compute at the same
time) the proof sees when it calls the script's `train` itself.
"""

import contextlib
from itertools import cycle

import lesson_01_data_parallel as lesson
import torch
from lockstep.watch import claims
from lockstep.watch.devices import KINDS, Watch, as_vector, gradient
from lockstep.watch.facts import row_checksums
from lockstep.watch.stand_ins import find_devices, place
from torch import nn
from torch.nn.functional import mse_loss

LIMITS = {"--nproc": (1, 64), "--steps": (1, 10**6), "--batch-size": (1, 10**6)}
LIMITS |= {"--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return None: all flags within their limits fit together."""


@contextlib.contextmanager
def watched(args):
    """Lend the script its devices; write down its steps, and the lines that it prints."""
    find_devices(args.nproc)
    one_thread = torch.autograd.set_multithreading_enabled(False)  # the stand-ins need it
    with one_thread, claims.hear() as said, Watch() as watch:
        yield watch.steps, said


def watch_step(model, rows, targets, devices):
    """Let the script's `train` make one step with a copy of a model; return the Step."""
    model, *batch = (place(thing, devices[0]) for thing in (model, rows, targets))
    with Watch(len(parts_of(rows, devices))) as watch:
        lesson.train(model, [batch], devices, 1)
    return watch.steps[0]


def judge(seen, args, started, launcher):
    """Return the verdict on what `watched` has seen of the script, with so many devices."""
    steps, said = seen
    rows, targets, toy = lesson.make_toy(args.seed)
    if [len(step.after) for step in steps] != [len(as_vector(toy.parameters()))] * args.steps:
        wrong = f"{len(steps)} updates in {args.steps} steps, or not of all parameters"
        return claims.Verdict("several devices train one model", [wrong], {}, [])
    batches = [*zip(rows.split(args.batch_size), targets.split(args.batch_size), strict=True)]
    devices = find_devices(started)
    with torch.autograd.set_multithreading_enabled(False):
        off = {"one device": off_by(steps, toy, batches, ["cpu"])}
        off["nn.DataParallel"] = off_by(steps, toy, batches, devices, wrapped=True)
        wrong = [wrong_in_numbers(far, whose) for whose, far in off.items()]
        pairs = zip(steps, cycle(batches), strict=False)
        wrong += [wrong_in_step(step, toy, *batch, devices) for step, batch in pairs]
        wrong += [wrong_in_hard_cases(toy, *batches[0], devices)] if not any(wrong) else []
    numbers = numbers_of(steps, len(batches), devices) | losses(steps, rows, targets, toy)
    gradients = [far["a gradient"] for far in off.values()]
    numbers |= dict(zip(("max_grad_diff", "max_diff_to_data_parallel"), gradients, strict=True))
    wrong.append(wrong_in_words(said, numbers, devices, args.steps))
    claim = f"gradients are those of {' and of '.join(off)}"
    claim += f" (max difference {claims.worst(gradients):.2g})"
    return claims.Verdict(claim, list(filter(None, wrong))[:1], numbers, lines_of(numbers))


# --- The numbers of a step ---


def off_by(steps, model, batches, devices, wrapped=False):
    """Return {what: how far steps are from training on one device, or with nn.DataParallel}."""
    model, far = place(model, devices[0]), {"a gradient": [], "an update": []}
    forward = nn.DataParallel(model, [device.index for device in devices]) if wrapped else model
    assert not wrapped or len(forward.device_ids) == len(devices), "it does not use these devices"
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in zip(steps, cycle(batches), strict=False):
        theirs = gradient_of(model, forward, *(place(part, devices[0]) for part in batch))
        sgd.step()
        after = as_vector(model.parameters())
        far["a gradient"].append(claims.off(step.gradient.numpy(), theirs.numpy()))
        far["an update"].append(claims.off(step.after.numpy(), after.numpy()))
    return {what: claims.worst(differences) for what, differences in far.items()}


def gradient_of(model, forward, rows, targets):
    """Compute the gradient of the loss of forward(rows), and return it as one vector."""
    model.zero_grad()
    mse_loss(forward(rows), targets).backward()
    return gradient(model.parameters())


def wrong_in_numbers(off, whose):
    """All numbers of the steps are those of another training, but for rounding."""
    wrong = [f"{what} is off by {far:.3g}" for what, far in off.items() if not far < 1e-12]
    return f"{wrong[0]} against {whose}" if wrong else None


# --- Who computes, and what is sent ---


def parts_of(rows, devices):
    """Return the parts as they should be: the rows in order, the size of a part rounded up."""
    return rows.split(-(-len(rows) // len(devices)))


def bytes_by_hand(model, rows, targets, devices):
    """Return {what: bytes} that a step must send; an output is as large as a target."""
    first, *others = parts_of(rows, devices)
    buffers = len(others) * sum(buffer.nbytes for buffer in model.buffers())
    parameters = len(others) * sum(parameter.nbytes for parameter in model.parameters())
    replies = targets[len(first) :].nbytes
    numbers = rows[len(first) :].nbytes + buffers, parameters, replies, replies, parameters
    return dict(zip(KINDS, numbers, strict=True))


def wrong_in_step(step, model, rows, targets, devices):
    """Each device has its part of the rows, in order; all compute together; no byte is wasted."""
    parts = [*enumerate(map(row_checksums, parts_of(rows, devices)))]
    if (step.visits, step.outside) != (parts, len(rows)):
        sizes, wanted = ([(device, len(part)) for device, part in p] for p in (step.visits, parts))
        return f"(device, rows) are {sizes}, and not these rows of the batch, {wanted}"
    if not step.together:
        return "the replicas do not compute at the same time"
    sent, needed = step.sent(), bytes_by_hand(model, rows, targets, devices)
    return None if sent == needed else f"the bytes sent are {sent}; counted by hand: {needed}"


def wrong_in_hard_cases(toy, rows, targets, devices):
    """It holds with a buffer, too, and with so few rows that some devices get none."""
    shift = nn.BatchNorm1d(2, affine=False, dtype=rows.dtype).eval()
    shift.running_mean += 1
    model = nn.Sequential(toy, shift)
    for count in (len(rows), len(devices) + 1, 1):
        batch = rows[:count], targets[:count]
        try:
            step = watch_step(model, *batch, devices)
        except RuntimeError as error:  # for example: tensors of several devices were mixed
            return f"with a buffer: {error}"
        off = off_by([step], model, [batch], ["cpu"])
        wrong = wrong_in_step(step, model, *batch, devices) or wrong_in_numbers(off, "one device")
        if wrong:
            return f"with a buffer, and {len(batch[0])} rows: {wrong}"
    return None


# --- What is told ---


def losses(steps, rows, targets, model):
    """Return the loss on all rows before the first update, and after the last."""
    first = mse_loss(model(rows), targets).item()
    nn.utils.vector_to_parameters(steps[-1].after, model.parameters())
    return {"loss_first": first, "loss_last": mse_loss(model(rows), targets).item()}


def numbers_of(steps, per_epoch, devices):
    """Return the numbers for --json that the steps of an epoch tell by themselves."""
    epoch = steps[:per_epoch]
    sent = [step.sent() for step in epoch]
    return {
        "world_size": len(devices),
        "backend": "threads",
        "device": "cuda" if devices[0].type == "cuda" else "cpu",
        "rows_per_replica": [[len(rows) for _, rows in step.visits] for step in epoch],
        "rows_outside": [step.outside for step in epoch],
        "bytes_per_step": sent,
        "bytes_broadcast_per_step": sent[0]["parameters"],
        "bytes_gathered_per_step": sent[0]["gradients"],
    }


def wrong_in_words(said, numbers, devices, steps):
    """The script has told its devices and its losses."""
    losses = f"{numbers['loss_first']:.3g} before, {numbers['loss_last']:.3g} after {steps} steps"
    wanted = [f"devices: {' '.join(map(str, devices))}", f"loss on all 100 rows: {losses}"]
    return None if said == wanted else f"it says {said}, and not {wanted}"


def lines_of(numbers):
    """Return what a reader wants to know of the steps of an epoch."""
    lines = []
    pairs = zip(numbers["rows_per_replica"], numbers["rows_outside"], strict=True)
    for step, (inside, outside) in enumerate(pairs, 1):
        idle = numbers["world_size"] - len(inside)
        none = f" ({idle} devices get none)" if idle else ""
        parts = f"inside, the model sees {' + '.join(map(str, inside))} rows{none}"
        lines.append(f"step {step}: {parts}; outside, the caller sees {outside}")
    sent, received = numbers["bytes_broadcast_per_step"], numbers["bytes_gathered_per_step"]
    sends = f"in step 1 the master sends {sent} bytes of parameters"
    return [*lines, f"{sends} and receives {received} bytes of gradients"]
