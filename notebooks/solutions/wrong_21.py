"""Wrong attempts at the tasks of lesson 21, and words that their verdict must contain."""

import math

import torch
import torch.distributed as dist
from solutions.lesson_21 import examine_may_step, on_ranks
from torch import nn
from torch.nn.functional import mse_loss

# --- Task 2 ---


def in_float32(flat):
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def by_functional_collectives(flat):
    total = torch.distributed._functional_collectives.all_reduce(flat, "sum", dist.group.WORLD)
    return total / dist.get_world_size()


def added_in_bfloat16(flat):
    half = flat.bfloat16()
    dist.all_reduce(half)
    return half.float() / dist.get_world_size()


def in_float16(flat):
    half = flat.half()
    dist.all_reduce(half)
    return half.float() / dist.get_world_size()


def all_from_all(flat):
    half = flat.bfloat16()
    parts = [torch.empty_like(half) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, half)
    return torch.stack(parts).float().mean(0)


def exchanged(change):
    """Return an answer like the solution's, after `change(whole, mine, rank)` at its end."""

    def attempt(flat):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        leaving = flat.bfloat16()
        arrived = torch.empty_like(leaving)
        dist.all_to_all_single(arrived, leaving)
        mine = arrived.view(ranks, -1).float().mean(0)
        whole = torch.empty_like(leaving)
        dist.all_gather_single(whole, mine.bfloat16())
        return change(whole, mine, rank)

    return attempt


def own_part_unrounded(whole, mine, rank):
    whole = whole.float()
    whole.chunk(dist.get_world_size())[rank].copy_(mine)
    return whole


def gathered_in_float32(flat):
    ranks, leaving = dist.get_world_size(), flat.bfloat16()
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    whole = torch.empty_like(flat)
    dist.all_gather_single(whole, arrived.view(ranks, -1).float().mean(0))
    return whole


def parts_added_in_bfloat16(flat):
    ranks, leaving = dist.get_world_size(), flat.bfloat16()
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    mine, *others = arrived.view(ranks, -1)
    for other in others:
        mine = mine + other
    whole = torch.empty_like(leaving)
    dist.all_gather_single(whole, mine)
    return whole.float() / ranks


def divided_first(flat):
    """Right: the numbers of the check can be divided exactly."""
    ranks = dist.get_world_size()
    leaving = (flat / ranks).bfloat16()
    parts = [torch.empty_like(leaving.chunk(ranks)[0]) for _ in range(ranks)]
    dist.all_to_all(parts, [*leaving.chunk(ranks)])
    mine = torch.stack(parts).float().sum(0).bfloat16()
    whole = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(whole, mine)
    return torch.cat(whole).float()


# --- Task 3 ---


def add_up(replica, optimizer, scaler, micro_batches, parts=None):
    """Add up scaled gradients of the micro-batches' mean."""
    optimizer.zero_grad()
    for rows, targets in micro_batches:
        loss = mse_loss(replica(rows), targets) / (parts or len(micro_batches))
        scaler.scale(loss).backward()
    return loss


def as_given(replica, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for rows, targets in micro_batches:
        loss = mse_loss(replica(rows), targets)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clips_before(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def never_clips(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches)
    scaler.step(optimizer)
    scaler.update()


def not_divided(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches, 1)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def unscales_each_time(replica, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for rows, targets in micro_batches:
        loss = mse_loss(replica(rows), targets) / len(micro_batches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def updates_each_time(replica, optimizer, scaler, micro_batches):
    for batch in micro_batches:
        add_up(replica, optimizer, scaler, [batch])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def past_the_scaler(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    optimizer.step()
    scaler.update()


def without_a_scaler(replica, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for rows, targets in micro_batches:
        (mse_loss(replica(rows), targets) / len(micro_batches)).backward()
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    if all(p.grad.isfinite().all() for p in replica.parameters()):
        optimizer.step()


def skips_by_loss(replica, optimizer, scaler, micro_batches):
    loss = add_up(replica, optimizer, scaler, micro_batches)
    if math.isfinite(loss.item()):
        for p in replica.parameters():
            p.grad /= scaler.get_scale()
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()


def by_three(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches, 3)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def by_all_losses(replica, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    total = torch.zeros(())
    for rows, targets in micro_batches:
        loss = mse_loss(replica(rows), targets) / len(micro_batches)
        scaler.scale(loss).backward()
        total += not loss.isfinite()
    dist.all_reduce(total)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    if total == 0:
        optimizer.step()
    scaler.update()


def makes_nan_zero(replica, optimizer, scaler, micro_batches):
    add_up(replica, optimizer, scaler, micro_batches)
    scaler.unscale_(optimizer)
    for p in replica.parameters():
        if not p.grad.isfinite().all():
            p.grad.zero_()
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    optimizer.step()
    scaler.update()


def by_a_scaled_norm(replica, optimizer, scaler, micro_batches):
    """Right: the limit is multiplied, in place of the gradients being divided."""
    add_up(replica, optimizer, scaler, micro_batches)
    nn.utils.clip_grad_norm_(replica.parameters(), scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


# --- Task 4 ---


def by_own_loss(loss, gradients):
    return math.isfinite(loss)


def by_own_gradients(loss, gradients):
    return math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients)


def agreed(find, op=dist.ReduceOp.MAX):
    """Return an answer that agrees on what `find(loss, gradients)` has found."""

    def attempt(loss, gradients):
        found = torch.tensor(float(find(loss, gradients)))
        dist.all_reduce(found, op=op)
        return found.item() == 0

    return attempt


def leaves_early(loss, gradients):
    if not by_own_gradients(loss, gradients):
        return False
    return agreed(lambda *_: False)(loss, gradients)


def as_rank_0(loss, gradients):
    found = torch.tensor(float(by_own_gradients(loss, gradients)))
    dist.broadcast(found, 0)
    return found.item() == 1


def by_the_sum(loss, gradients):
    total = sum(g.double().sum() for g in gradients)
    dist.all_reduce(total)
    return math.isfinite(total)


def by_all_gradients(loss, gradients):
    flat = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    return agreed(lambda *_: not math.isfinite(loss))(loss, gradients) and bool(
        flat.isfinite().all()
    )


def by_the_norm(loss, gradients):
    return agreed(lambda *_: not torch.cat([g.flatten() for g in gradients]).norm().isfinite())(
        loss, gradients
    )


def by_the_least(loss, gradients):
    """Right: the ranks agree on what is fine."""
    fine = torch.tensor([int(by_own_gradients(loss, gradients))], dtype=torch.int32)
    dist.all_reduce(fine, op=dist.ReduceOp.MIN)
    return bool(fine[0] == 1)


def impatient(attempt):
    """The check of task 4, with less patience: the attempt waits for ever."""
    return on_ranks(examine_may_step, attempt, deadline=4)


# Other right answers.
RIGHT = {
    "mean_rounded_once": [divided_first],
    "update": [by_a_scaled_norm],
    "may_step": [by_the_least],
}

NOT_ONE = "more than one rounding away"
BY_OWN = "makes the update when inf is in the part of rank 0"

WRONG = {
    "last_count": {
        "stored digits": (128, "a factor of 2 away"),
        "one digit too many": (512, "a factor of 2 away"),
        "the first that fails": (257, "nearly"),
        "float16": (2048, "that is float16"),
        "the largest number": (3.39e38, "more than 1 away"),
    },
    "mean_rounded_once": {
        "in float32": (in_float32, "bytes, where"),
        "in float32, functional": (by_functional_collectives, "bytes, where"),
        "added in bfloat16": (added_in_bfloat16, "with 3 ranks: rank 0 has"),
        "parts added in bfloat16": (parts_added_in_bfloat16, NOT_ONE),
        "in float16": (in_float16, NOT_ONE),
        "all from all": (all_from_all, "with 3 ranks: rank 0 sends"),
        "gathered in float32": (gathered_in_float32, "bytes, where"),
        "own part unrounded": (exchanged(own_part_unrounded), "the replicas differ"),
        "half at the end": (exchanged(lambda whole, *_: whole), "the optimizer wants float32"),
        "the sum": (
            exchanged(lambda whole, *_: whole.float() * dist.get_world_size()),
            "does not return the mean",
        ),
        "its part": (exchanged(lambda whole, mine, _: mine), "as long as `flat`"),
    },
    "update": {
        "as given": (as_given, "away from one process"),
        "clips before": (clips_before, "away from one process"),
        "never clips": (never_clips, "away from one process"),
        "not divided": (not_divided, "in step 4"),
        "unscales each time": (unscales_each_time, "unscale_() has already been called"),
        "updates each time": (updates_each_time, "away from one process"),
        "past the scaler": (past_the_scaler, "with inf or nan in step 2"),
        "without a scaler": (without_a_scaler, "has the factor 1024 after step 2"),
        "skips by loss": (skips_by_loss, "in step 2"),
        "by three": (by_three, "in step 4"),
        "by all losses": (by_all_losses, "with inf or nan in step 6"),
        "makes nan zero": (makes_nan_zero, "in step 2"),
    },
    "may_step": {
        "by own loss": (by_own_loss, BY_OWN),
        "by own gradients": (
            by_own_gradients,
            BY_OWN,
        ),
        "leaves early": (leaves_early, "no answer after", impatient),
        "as rank 0": (as_rank_0, "when nan is in the part of the last rank"),
        "by the sum": (by_the_sum, "when the loss of the last rank is nan"),
        "the last gradient": (
            agreed(lambda loss, gradients: not by_own_gradients(loss, gradients[-1:])),
            BY_OWN,
        ),
        "the middle one": (
            agreed(lambda loss, gradients: not by_own_gradients(loss, gradients[1:2])),
            "when nan is in the part of the last rank",
        ),
        "-inf is overlooked": (
            agreed(
                lambda loss, gradients: (
                    not math.isfinite(loss)
                    or any(bool((g.isnan() | (g == math.inf)).any()) for g in gradients)
                )
            ),
            "when -inf is in the part of the last rank",
        ),
        "only a loss of nan": (
            agreed(lambda loss, gradients: math.isnan(loss) or not by_own_gradients(0, gradients)),
            "when the loss of rank 0 is inf",
        ),
        "all gradients": (by_all_gradients, "bytes to decide"),
        "by the norm": (by_the_norm, "when the loss of the last rank is nan"),
        "all have to find it": (
            agreed(lambda *given: not by_own_gradients(*given), dist.ReduceOp.MIN),
            BY_OWN,
        ),
    },
}
