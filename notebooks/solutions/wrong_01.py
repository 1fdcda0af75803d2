"""Wrong attempts at the tasks of lesson 01, and words that their verdict must contain."""

import lesson_01_data_parallel as lesson
import torch
from solutions.lesson_01 import ScalesInputs
from torch import nn
from torch.nn.functional import mse_loss


class AsGiven(ScalesInputs):
    """Keeps the value in an attribute of the replica."""

    def __init__(self):
        super().__init__()
        del self.largest
        self.largest = 1.0

    def forward(self, rows):
        self.largest = max(self.largest, rows.abs().max().item())
        return self.layer(rows / self.largest)


class AssignsTheBuffer(ScalesInputs):
    """Has a buffer, and puts a new tensor in its place."""

    def forward(self, rows):
        self.largest = torch.maximum(self.largest, rows.abs().max())
        return self.layer(rows / self.largest)


class ForgetsTheBatchesBefore(ScalesInputs):
    """Changes the buffer in place, to the largest value of this batch only."""

    def forward(self, rows):
        self.largest.copy_(rows.abs().max())
        return self.layer(rows / self.largest)


class WithoutAbs(ScalesInputs):
    """Looks at the values and not at their sizes."""

    def forward(self, rows):
        self.largest.copy_(torch.maximum(self.largest, rows.max()))
        return self.layer(rows / self.largest)


class FromZero(ScalesInputs):
    """Begins with 0 and not with 1."""

    def __init__(self):
        super().__init__()
        self.largest.zero_()


class ReturnsNan(ScalesInputs):
    """Keeps the value, and answers nan."""

    def forward(self, rows):
        return super().forward(rows) * float("nan")


class NeverDivides(ScalesInputs):
    """Keeps the value and does not use it."""

    def forward(self, rows):
        super().forward(rows)
        return self.layer(rows)


class ForAllReplicas(ScalesInputs):
    """Keeps the value in the class, where the replicas of all devices find it."""

    value = 1.0

    def __init__(self):
        super().__init__()
        type(self).value = 1.0

    def forward(self, rows):
        type(self).value = max(self.value, rows.abs().max().item())
        self.largest.fill_(type(self).value)
        return self.layer(rows / self.largest)


def weighted(share, **options):
    """Return an attempt that weighs the mean loss of a part by share(part, rows, parts)."""

    def attempt(model, rows, targets, devices):
        parts, goals = lesson.scatter(rows, devices), lesson.scatter(targets, devices)
        replicas = [lesson.replicate(model, device) for device in devices[: len(parts)]]
        outputs = lesson.parallel_apply(replicas, parts)
        loss = 0.0
        for output, goal in zip(outputs, goals, strict=True):
            mean = share(goal, rows, parts) * mse_loss(output, goal)
            loss = loss + mean.to(devices[0])
        loss.backward()
        return loss.detach() * options.get("returned", 1)

    return attempt


def right_share(part, rows, parts):
    return len(part) / len(rows)


def outputs_travel(model, rows, targets, devices):
    loss = mse_loss(lesson.data_parallel(model, rows, devices), targets)
    loss.backward()
    return loss.detach()


def outputs_travel_in_threads(model, rows, targets, devices):
    parts = lesson.scatter(rows, devices)
    goals = targets.chunk(len(devices))  # left on the master
    losses = []
    for device, part, goal in zip(devices, parts, goals, strict=False):
        replica = lesson.replicate(model, device)

        def own_loss(part, replica=replica, goal=goal):
            share = len(goal) / len(rows)
            return share * mse_loss(replica(part).to(devices[0]), goal)

        losses.append(own_loss)
    loss = sum(lesson.parallel_apply(losses, parts))
    loss.backward()
    return loss.detach()


def one_device_does_all(model, rows, targets, devices):
    loss = mse_loss(model(rows), targets)
    loss.backward()
    return loss.detach()


def the_library_does_it(model, rows, targets, devices):
    wrapped = nn.DataParallel(model, [device.index for device in devices])
    loss = mse_loss(wrapped(rows), targets)
    loss.backward()
    return loss.detach()


def own_losses(model, rows, targets, devices, apply=None, move=None, idle=False):
    """Do the task, with another way to apply, or to move the outputs, or with idle replicas."""
    parts, goals = lesson.scatter(rows, devices), lesson.scatter(targets, devices)
    used = devices if idle else devices[: len(parts)]
    replicas = [lesson.replicate(model, device) for device in used]
    outputs = (apply or lesson.parallel_apply)(replicas[: len(parts)], parts)
    if move:
        outputs, goals = [move(out) for out in outputs], [move(goal) for goal in goals]
    means = zip(outputs, goals, strict=True)
    losses = [len(goal) / len(rows) * mse_loss(out, goal) for out, goal in means]
    loss = sum(loss.to(outputs[0].device) for loss in losses)
    loss.backward()
    return loss.detach()


def by_way_of_the_cpu(*arguments):
    return own_losses(*arguments, move=lambda tensor: tensor.cpu())


def call(model, part):
    return model(part)


def one_after_the_other(*arguments):
    return own_losses(*arguments, apply=lambda models, parts: list(map(call, models, parts)))


def replicas_for_idle_devices(*arguments):
    return own_losses(*arguments, idle=True)


def everything_to_everybody(model, rows, targets, devices):
    """Send the whole batch to each device, and cut it there."""
    size = len(rows.chunk(len(devices))[0])
    starts = range(0, len(rows), size)
    everything = [(rows.to(device), targets.to(device)) for device in devices[: len(starts)]]
    parts = [r[i : i + size] for i, (r, _) in zip(starts, everything, strict=True)]
    goals = [t[i : i + size] for i, (_, t) in zip(starts, everything, strict=True)]
    replicas = [lesson.replicate(model, device) for device in devices[: len(starts)]]
    outputs = lesson.parallel_apply(replicas, parts)
    losses = [len(g) / len(rows) * mse_loss(out, g) for out, g in zip(outputs, goals, strict=True)]
    loss = sum(loss.to(devices[0]) for loss in losses)
    loss.backward()
    return loss.detach()


def written_into_the_master(model, rows, targets, devices):
    """Bring the outputs home by copy_(), which is no .to()."""

    def move(output):
        return torch.empty(output.shape, dtype=output.dtype, device=devices[0]).copy_(output)

    return own_losses(model, rows, targets, devices, move=move)


def no_backward(model, rows, targets, devices):
    return mse_loss(lesson.data_parallel(model, rows, devices), targets).detach()


def returns_nothing(model, rows, targets, devices):
    weighted(right_share)(model, rows, targets, devices)


WRONG = {
    "devices_with_rows": {"all": (8, "rounded up"), "rounded down": (10, "rounded up")},
    "megabytes_of_parameters": {
        "a copy for the master too": (4 * 25.6 * 4, "have the model already"),
        "numbers, not bytes": (3 * 25.6, "have the model already"),
    },
    "ScalesInputs": {
        "as given": (
            AsGiven,
            "after call 2, `largest` is still 1: what device 0 wrote down is lost",
        ),
        "without abs": (WithoutAbs, "the largest absolute value of"),
        "from zero": (FromZero, "before the first call `largest` must be 1"),
        "assigns the buffer": (AssignsTheBuffer, "what device 0 wrote down is lost"),
        "forgets": (ForgetsTheBatchesBefore, "after call 1, `largest` is 0.5, and the largest"),
        "never divides": (NeverDivides, "are not those of rows / `largest`"),
        "nan": (ReturnsNan, "are not those of rows / `largest`"),
        "for all replicas": (ForAllReplicas, "after call"),
    },
    "loss_inside_step": {
        "sum of the means": (weighted(lambda *_: 1), "the gradient is off"),
        "mean of the means": (weighted(lambda p, r, parts: 1 / len(parts)), "with 7 rows on 2"),
        "outputs travel": (outputs_travel, "the master received"),
        "outputs travel in threads": (outputs_travel_in_threads, "the master received"),
        "by way of the CPU": (by_way_of_the_cpu, "the master received"),
        "copy_": (written_into_the_master, "the master received"),
        "everything to everybody": (everything_to_everybody, "the master sent"),
        "idle replicas": (replicas_for_idle_devices, "with 1 rows on 2 devices, the master sent"),
        "one after the other": (one_after_the_other, "do not compute at the same time"),
        "one device does all": (one_device_does_all, "the replicas must see"),
        "nn.DataParallel": (the_library_does_it, "the master received"),
        "no backward": (no_backward, "there is no gradient"),
        "half the loss": (weighted(right_share, returned=0.5), "not the loss of the whole batch"),
        "returns nothing": (returns_nothing, "not the loss of the whole batch"),
    },
}
