"""Solution of the exercise of lesson 01: each replica computes the loss of its own part."""

import collections
import copy

import lesson_01_data_parallel as lesson
import torch
from torch import nn


def solution(model, rows, targets, devices, traffic):
    """Leave the gradient of the whole batch in `model`; no outputs travel, but targets do."""
    parts = lesson.scatter(rows, devices, traffic, "rows")
    wanted = lesson.scatter(targets, devices, traffic, "targets")
    replicas = lesson.replicate(model, devices[: len(parts)], traffic)
    loss = 0.0
    for replica, part, goal in zip(replicas, parts, wanted, strict=True):
        share = len(part) / len(rows)  # a mean over 4 rows counts 4/7 in a mean over 7
        part_loss = share * nn.functional.mse_loss(replica(part), goal)
        part_loss.backward()
        loss += part_loss.item()
    lesson.add_gradients(model, replicas, traffic)
    return [len(part) for part in parts], len(rows), loss


def check(attempt, nproc=2):
    """Return None if `attempt` is right on `nproc` replicas, else one sentence about the mistake.

    The attempt is run for real, on batches of 30, 10 and 7 rows: not all of them divide evenly.
    """
    devices = [torch.device("cpu")] * nproc
    for count in (30, 10, 7):
        rows, targets, model = lesson.make_toy(seed=1)
        rows, targets = rows[:count], targets[:count]
        reference = copy.deepcopy(model)
        reference_loss = nn.functional.mse_loss(reference(rows), targets)
        reference_loss.backward()
        seen = []  # replicas are copies of the model, so they have this hook too
        model.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(len(inputs[0])))

        traffic = collections.Counter()
        answer = attempt(model, rows, targets, devices, traffic)

        where = f"with {count} rows on {nproc} replicas,"
        parts = [len(part) for part in rows.chunk(nproc)]
        if sorted(seen, reverse=True) != parts:
            return f"{where} the replicas must see {parts} rows; they saw {seen}"
        if any(parameter.grad is None for parameter in model.parameters()):
            return f"{where} there is no gradient in the master's model"
        difference = lesson.largest_difference(model, reference)
        if not difference < 1e-12:
            return f"{where} the gradient is off by {difference:.3g}"
        if traffic["outputs"] or traffic["gradients of the outputs"]:
            return f"{where} outputs were sent; only the loss of each part may leave a replica"
        others = sum(parameter.nbytes for parameter in model.parameters()) * (len(parts) - 1)
        if traffic["parameters"] != others or traffic["gradients"] != others:
            return f"{where} {others} bytes of parameters must go out, and as many of gradients in"
        if not isinstance(answer, tuple) or len(answer) != 3 or list(answer[:2]) != [parts, count]:
            return f"{where} the step must return ({parts}, {count}, loss), not {answer!r}"
        if abs(float(answer[2]) - reference_loss.item()) > 1e-9:
            return f"{where} the loss of the whole batch is {reference_loss:.3g}, not {answer[2]!r}"
    return None
