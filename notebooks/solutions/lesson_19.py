"""Solutions of the tasks of lesson 19, and their checks."""

import os
from datetime import timedelta

import lesson_19_hang_clinic as lesson
import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PATIENCE = timedelta(seconds=2)  # of a rank that waits for the others
STEPS, ROWS = 3, 8
NO_END = "it does not come to its end, or not on all ranks"


def examine(rank, world_size, attempt):
    """Do the repaired job; return (what it returned, what is wrong on this rank)."""
    dist.destroy_process_group()  # who waits in vain is to notice it sooner than in this group
    store = dist.FileStore(os.path.join(os.environ["TMPDIR"], "again"), world_size)
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), **place)
    dist.barrier()
    torch.manual_seed(rank)
    try:
        returned = attempt(rank, world_size, STEPS, ROWS)
    except RuntimeError as error:
        if lesson.WAITED.search(str(error)):
            return None, NO_END
        raise
    store.set(f"end of rank {rank}", "")
    try:
        store.wait([f"end of rank {other}" for other in range(world_size)], 2 * PATIENCE)
        dist.all_reduce(total := torch.ones(()))  # a call too many or too few would meet this one
        healthy = total.item() == world_size
    except RuntimeError:
        healthy = False
    return returned, None if healthy else "the ranks do not leave the job together"


def on_two_and_three(attempt, problem_of):
    """Return None if an attempt ends on 2 and 3 ranks, and brings what it should.

    problem_of(world_size, [what each rank has returned]) returns one sentence, or None.
    """
    for nproc in (2, 3):
        try:
            ends = run(examine, nproc, attempt, deadline=20)
        except RankFailed as error:
            lost = any(words in str(error) for words in ("no answer", "onnect", "SIGABRT"))
            return f"with {nproc} ranks: {NO_END if lost else error}"
        wrong = [problem for _, problem in ends if problem]
        problem = wrong[0] if wrong else problem_of(nproc, [returned for returned, _ in ends])
        if problem:
            return f"with {nproc} ranks: {problem}"
    return None


# --- Task 1: repair ---


def mean_loss(rank, world_size, steps, rows):
    """Return the mean of all ranks' losses: all of them add up, whoever wants the sum."""
    loss = torch.randn(rows, 4).square().mean() + rank
    dist.all_reduce(loss)
    return (loss / world_size).item()


def problem_of_mean(world_size, returned):
    losses = []
    for rank in range(world_size):
        torch.manual_seed(rank)
        losses.append(torch.randn(ROWS, 4).square().mean().item() + rank)
    right = sum(losses) / world_size
    if not isinstance(returned[0], float):
        return f"rank 0 returns {type(returned[0]).__name__}, and no number"
    if abs(returned[0] - losses[0]) < 1e-4:
        return "rank 0 returns its own loss, and not the mean of all"
    return None if abs(returned[0] - right) < 1e-4 else "rank 0 returns another number"


def check_mean_loss(attempt):
    """Return None if rank 0 gets the mean of all losses, and all ranks come to their end."""
    return on_two_and_three(attempt, problem_of_mean)


# --- Task 2: repair ---


def stop_together(rank, world_size, steps, rows):
    """Return the step at which all ranks have stopped: they decide by one number."""
    for step in range(20):
        loss = torch.tensor(1 / (1 + step * (1 + rank)))
        dist.all_reduce(loss)
        if loss / world_size < 0.1:
            break
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    return step


def problem_of_stop(world_size, returned):
    right = {2: 7, 3: 6}[world_size]
    if len(set(returned)) > 1:
        return f"the ranks stop at steps {returned}"
    if returned[0] == 19:
        return "it does not stop early any more"
    if returned[0] != right:
        return f"it stops at step {returned[0]}; the mean of all losses is small at another one"
    return None


def check_stop_together(attempt):
    """Return None if all ranks stop where the mean loss is below 0.1."""
    return on_two_and_three(attempt, problem_of_stop)


# --- Task 3: repair ---


def train_uneven(rank, world_size, steps, rows):
    """Train on equal numbers of batches; return (weights, rows that this rank has seen)."""
    torch.manual_seed(0)
    data, seen = torch.randn(world_size * steps * rows + 1, 4), 0
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    equal = len(data) // world_size * world_size
    for batch in data[:equal][rank::world_size].split(rows):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seen += len(batch)
    dist.barrier()
    return model.module.weight.tolist(), seen


def problem_of_training(world_size, returned):
    weights, seen = zip(*returned, strict=True)
    if any(weight != weights[0] for weight in weights):
        return "the ranks end with different weights"
    least = world_size * STEPS * ROWS
    if sum(seen) < least:
        return f"only {sum(seen)} rows are trained on; {least} divide without a rest"
    return None


def check_train_uneven(attempt):
    """Return None if the ranks train in step, and leave out one row at most."""
    return on_two_and_three(attempt, problem_of_training)


# --- Task 4: repair ---


def add_up_both(rank, world_size, steps, rows):
    """Add up two tensors, each in a group of its own, in one order on all ranks."""
    limit = timedelta(seconds=2)
    dense, sparse = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    work = [(dense, torch.full((rows,), 1.0 + rank)), (sparse, torch.full((rows,), 10.0 + rank))]
    for group, tensor in work:
        dist.all_reduce(tensor, group=group)
    return [tensor[0].item() for _, tensor in work]


def problem_of_both(world_size, returned):
    ranks = sum(range(world_size))
    right = [world_size + ranks, 10 * world_size + ranks]
    for rank, sums in enumerate(returned):
        if list(sums) != right:
            return f"rank {rank} has the sums {list(sums)}, and not {right}"
    return None


def check_add_up_both(attempt):
    """Return None if all ranks get both sums."""
    return on_two_and_three(attempt, problem_of_both)


# What test_contract.py asks: (check, solution) of each task.
TASKS = {
    "mean_loss": (check_mean_loss, mean_loss),
    "stop_together": (check_stop_together, stop_together),
    "train_uneven": (check_train_uneven, train_uneven),
    "add_up_both": (check_add_up_both, add_up_both),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "mean_loss": (
        "Who has to call a collective so that one rank gets its result? Only what is done with "
        "the result may depend on the rank."
    ),
    "stop_together": (
        "A decision about a collective must come out the same on all ranks. So let it depend on "
        "a number that all of them have. How do they get one?"
    ),
    "train_uneven": (
        "Each backward is one call for all. Either all ranks get the same number of batches, or "
        "those that have no batch any more take part without one: DDP has a context for that."
    ),
    "add_up_both": (
        "Write down, for each rank, the group of its first call and that of its second. Which "
        "line makes two of the lists differ?"
    ),
}
