"""Solutions of the tasks of lesson 01, and their checks."""

from unittest import mock

import lesson_01_data_parallel as lesson
import torch
from lockstep.watch.devices import Copies, Watch, gradient
from lockstep.watch.stand_ins import find_devices, place
from proofs.lesson_01 import gradient_of, parts_of
from torch import nn
from torch.nn.functional import mse_loss

# --- Task 1: predict ---

devices_with_rows = len(torch.zeros(10).chunk(8))


def check_devices_with_rows(guess):
    """Return None if `guess` is how many of 8 devices get some of 10 rows, else a hint."""
    if guess == devices_with_rows:
        return None
    return "how many rows has a part, if 10 / 8 is rounded up? And how many such parts are there?"


# --- Task 2: repair ---


class ScalesInputs(nn.Module):
    """Divides its inputs by the largest absolute value that it has seen.

    The value is a buffer, and it is changed in place: so the replica on device 0, which shares its
    buffers with the model, changes the model's.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2, dtype=torch.float64)
        self.register_buffer("largest", torch.ones((), dtype=torch.float64))

    def forward(self, rows):
        self.largest.copy_(torch.maximum(self.largest, rows.abs().max()))
        return self.layer(rows / self.largest)


def check_scales_inputs(attempt):
    """Return None if the module keeps its value under nn.DataParallel, else what is wrong."""
    start = float(attempt().largest)
    if start != 1:
        return f"before the first call `largest` must be 1, as in the module given; it is {start:g}"
    for count in (2, 3):
        devices = find_devices(count)
        module = place(attempt(), devices[0])
        parallel = nn.DataParallel(module, list(range(count)))
        expected = 1.0
        for call, scales in enumerate([(0.5, 0.7, 0.2), (3, 9, 2), (7, 2, 8), (4, 8, 1)], start=1):
            parts, before = make_parts(count, scales), float(module.largest)
            outputs = parallel(place(torch.cat(parts), devices[0])).detach().cpu()
            wanted = expected_outputs(module, parts, expected)
            expected = max(expected, parts[0].abs().max().item())
            problem = wrong_value(float(module.largest), expected, before)
            if not problem and not (outputs - wanted).abs().max() < 1e-9:
                problem = "the outputs are not those of rows / `largest`, part by part"
            if problem:
                return f"on {count} devices, after call {call}, {problem}"
    return None


def wrong_value(largest, expected, before):
    """Return what is wrong with the module's value after a call, or None."""
    if abs(largest - expected) < 1e-12:
        return None
    if largest == before:
        return f"`largest` is still {largest:.3g}: what device 0 wrote down is lost"
    seen = f"1 and device 0's rows so far have {expected:.3g}"
    return f"`largest` is {largest:.3g}, and the largest absolute value of {seen}"


def make_parts(count, scales):
    """Return the parts of 12 rows on `count` devices; the largest value of each is negative."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.rand(12, 5, generator=generator, dtype=torch.float64).chunk(count)
    scaled = [part / part.max() * -scale for part, scale in zip(parts, scales, strict=False)]
    return [part * torch.tensor([1, -0.5, 0.3, 1, -0.2]).double() for part in scaled]


def expected_outputs(module, parts, largest):
    """Return what the layer answers if each device starts with `largest` and sees its own part."""
    weight, bias = (parameter.detach().cpu() for parameter in module.layer.parameters())
    scaled = [part / max(largest, part.abs().max().item()) for part in parts]
    return torch.cat(scaled) @ weight.T + bias


# --- Task 3: predict ---

megabytes_of_parameters = 3 * 25.6 * 4


def check_megabytes_of_parameters(guess):
    """Return None if `guess` is right to 1 %, else a hint."""
    if abs(guess - megabytes_of_parameters) < 0.01 * megabytes_of_parameters:
        return None
    return "multiply the numbers, their bytes, and the devices that do not have the model already"


# --- Task 4: build ---


def loss_inside_step(model, rows, targets, devices):
    """Leave the gradient of the whole batch in `model`; return the loss of the whole batch."""
    parts = lesson.scatter(rows, devices)
    goals = lesson.scatter(targets, devices)
    replicas = [lesson.replicate(model, device) for device in devices[: len(parts)]]
    outputs = lesson.parallel_apply(replicas, parts)
    loss = 0.0
    for output, goal in zip(outputs, goals, strict=True):
        share = len(goal) / len(rows)  # a mean over 4 of 7 rows counts 4/7
        loss = loss + (share * mse_loss(output, goal)).to(devices[0])
    loss.backward()
    return loss.detach()


def check_loss_inside_step(attempt):
    """Return None if the attempt is right on 2 and 3 devices, else what is wrong."""
    for count in (2, 3):
        for size in (30, 10, 7, 4, 1):
            with torch.autograd.set_multithreading_enabled(False):
                problem = examine_step(attempt, count, size)
            if problem:
                return f"with {size} rows on {count} devices, {problem}"
    return None


def examine_step(attempt, count, size):
    """Let the attempt do one step; return what is wrong with it, or None."""
    rows, targets, alone = lesson.make_toy(seed=1)
    devices = find_devices(count)
    rows, targets = rows[:size], targets[:size]
    wanted = gradient_of(alone, alone, rows, targets)
    model = place(alone, devices[0])
    here = place(rows, devices[0]), place(targets, devices[0])
    parts = [len(part) for part in parts_of(rows, devices)]
    with Watch(len(parts)) as seen, watch_threads(seen.copies):
        loss = attempt(model, *here, devices)
    inside = [len(part) for _, part in sorted(seen.visits, key=lambda visit: visit[0])]
    if inside != parts:
        return f"the replicas must see {parts} rows; they saw {inside}"
    if seen.meeting.broken:
        return "the replicas do not compute at the same time"
    if any(parameter.grad is None for parameter in model.parameters()):
        return "there is no gradient in the master's model"
    difference = (gradient(model.parameters()) - wanted).abs().max().item()
    if not difference < 1e-12:
        return f"the gradient is off by {difference:.3g}"
    if problem := too_many_bytes(seen.copies, rows[parts[0] :], targets[parts[0] :], len(parts)):
        return problem
    loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
    if loss is None or not abs(float(loss) - mse_loss(alone(rows), targets).item()) < 1e-9:
        return "what the step returns is not the loss of the whole batch"
    return None


def too_many_bytes(copies, rows, targets, parts):
    """Return a sentence if more is sent than is needed, else None. rows: those that must travel.

    Each part beside the master's costs a model and a loss, and their gradients on the way back.
    """
    model_and_loss = (96 + 8) * (parts - 1)
    from_others = sum(nbytes for _, source, _, nbytes in copies if source not in (0, None))
    if from_others > model_and_loss:  # wherever it goes: also by way of the CPU
        return (
            f"the master received {from_others} bytes; gradients and losses need {model_and_loss}"
        )
    from_master = sum(nbytes for _, source, _, nbytes in copies if source in (0, None))
    allowed = model_and_loss + rows.nbytes + targets.nbytes
    if from_master > allowed:
        return f"the master sent {from_master} bytes; a part and a model for each need {allowed}"
    return None


def watch_threads(found):
    """Return a context in which `found` also gets the copies made in parallel_apply's threads.

    A TorchDispatchMode sees only what its own thread does.
    """
    parallel_apply = lesson.parallel_apply

    def watched(replica):
        def call(part):
            with Copies() as copies:
                output = replica(part)
            found.extend(copies.copies)
            return output

        return call

    def apply(replicas, parts):
        return parallel_apply([watched(replica) for replica in replicas], parts)

    return mock.patch.object(lesson, "parallel_apply", apply)


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "devices_with_rows": (check_devices_with_rows, devices_with_rows),
    "ScalesInputs": (check_scales_inputs, ScalesInputs),
    "megabytes_of_parameters": (check_megabytes_of_parameters, megabytes_of_parameters),
    "loss_inside_step": (check_loss_inside_step, loss_inside_step),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "devices_with_rows": (
        "Hand full parts out to one device after the other, as in the picture of the five moves, "
        "until no row is left. Which devices come too late?"
    ),
    "ScalesInputs": (
        "Look again at the two counters of `CountsCalls`: one forgets everything, the other "
        "keeps device 0's share. What is different in where each is kept, and in how it is "
        "changed?"
    ),
    "megabytes_of_parameters": (
        "In the picture of the five moves, count the arrows of move 2, and look at what each of "
        "them carries. How does the picture change with one device more and a larger model?"
    ),
    "loss_inside_step": (
        "Write the mean over the whole batch as a sum over the parts. How much must a part's own "
        "mean weigh in it if the parts differ in length, and on which device do the numbers "
        "meet?"
    ),
}
