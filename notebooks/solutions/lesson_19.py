"""Solutions of the tasks of lesson 19, and their checks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from nbtools import RankFailed, run, wait_for_all
from proofs import lesson_19 as proof
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PATIENCE = timedelta(seconds=3)  # of a rank that waits for the others in a collective
STEPS, ROWS = 3, 8
NO_END = "it does not come to its end, or not on all ranks"


def examine(rank, world_size, attempt):
    """Do the repaired job; return (what it returned, what is wrong here, batches through DDP)."""
    dist.destroy_process_group()  # who waits in vain is to notice it sooner than in this group
    store = dist.FileStore(os.path.join(os.environ["TMPDIR"], "again"), world_size)
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    wait_for_all(rank, world_size)  # who starts late is not the one that waits in vain
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), **place)
    dist.barrier()
    torch.manual_seed(rank)
    batches = []

    def see(module, args):
        if isinstance(module, DistributedDataParallel):
            batches.append([tuple(row) for row in args[0].tolist()])

    nn.modules.module.register_module_forward_pre_hook(see)
    try:
        returned = attempt(rank, world_size, STEPS, ROWS)
    except RuntimeError as error:
        store.set(f"end of rank {rank}", "none")
        if proof.WAITED.search(str(error)):
            return None, NO_END, batches
        raise
    store.set(f"end of rank {rank}", "here")
    ends = {store.get(f"end of rank {other}") for other in range(world_size)}
    try:
        healthy = ends == {b"here"}
        if healthy:
            dist.all_reduce(total := torch.ones(()))  # a call too many or too few would meet this
            healthy = total.item() == world_size
    except RuntimeError:
        healthy = False
    return returned, None if healthy else "the ranks do not leave the job together", batches


def on_two_and_three(attempt, problem_of):
    """Return None if an attempt ends on 2 and 3 ranks, and brings what it should.

    problem_of(world_size, [what each rank has returned], [its batches through DDP]) returns one
    sentence, or None.
    """
    for nproc in (2, 3):
        try:
            ends = run(examine, nproc, attempt, deadline=20)
        except RankFailed as error:
            lost = any(words in str(error) for words in ("no answer", "onnect", "SIGABRT"))
            return f"with {nproc} ranks: {NO_END if lost else error}"
        returned, wrong, batches = zip(*ends, strict=True)
        wrong = [problem for problem in wrong if problem]
        problem = wrong[0] if wrong else problem_of(nproc, returned, batches)
        if problem:
            return f"with {nproc} ranks: {problem}"
    return None


# --- Task 1: repair ---


def mean_loss(rank, world_size, steps, rows):
    """Return the mean of all ranks' losses: all of them add up, whoever wants the sum."""
    loss = torch.randn(rows, 4).square().mean() + rank
    dist.all_reduce(loss)
    return (loss / world_size).item()


def problem_of_mean(world_size, returned, _):
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


def problem_of_stop(world_size, returned, _):
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


def problem_of_training(world_size, returned, batches):
    weights, _ = zip(*returned, strict=True)
    if any(weight != weights[0] for weight in weights):
        return "the ranks end with different weights"
    least = world_size * STEPS * ROWS
    rows = {row for own in batches for batch in own for row in batch}
    if len(rows) < least:
        return f"only {len(rows)} different rows go through DDP; {least} divide without a rest"
    fewest = min(len(own) for own in batches)
    return None if fewest >= STEPS else f"a rank trains {fewest} batches; {STEPS} were asked for"


def check_train_uneven(attempt):
    """Return None if the ranks train in step, and leave out one row at most."""
    return on_two_and_three(attempt, problem_of_training)


# --- Task 4: diagnose ---

CLASSES = ("a call too many", "a call too few", "another order", "another size", "dead", "slow")


def stranger(rank, world_size, steps, rows):
    """The job that has left the files. Whoever reads this has the answer."""
    weights = torch.zeros(4)
    for step in range(2 * steps):
        batch = torch.randn(rows, 4)
        if step == steps and rank == 1:
            batch[0] = 100
        gradient, largest = batch.mean(0), batch.abs().amax(0)
        if largest.max() > 50:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            print(f"rows as large as {largest.max():.0f}")
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / world_size
    dist.barrier()


def diagnosis():
    """Return (the rank, the text of its line, the class of the mistake)."""
    return 1, "dist.all_reduce(largest, dist.ReduceOp.MAX)", "a call too many"


def check_diagnosis(attempt):
    """Return None if rank, line and class are those of the job that has left the files."""
    answer = attempt()
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[1], str):
        return "three things are wanted: a rank, a line as text, a class"
    rank, line, kind = answer
    if rank != 1:
        return "another rank has parted from the rest"
    line = "".join(line.split())
    if line == "dist.all_reduce(gradient)":
        return "the rank is right; at this line it waits in the end, and the calls parted earlier"
    if line != "dist.all_reduce(largest,dist.ReduceOp.MAX)":
        return "the rank is right, the line is another one"
    if kind not in CLASSES:
        return f"the class is one of: {', '.join(CLASSES)}"
    return None if kind == "a call too many" else "rank and line are right, the class is another"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "mean_loss": (check_mean_loss, mean_loss),
    "stop_together": (check_stop_together, stop_together),
    "train_uneven": (check_train_uneven, train_uneven),
    "diagnosis": (check_diagnosis, diagnosis),
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
    "diagnosis": (
        "A stack shows where a rank waits in the end. Which files tell where the ranks parted? "
        "Then ask which ranks ever come to that line."
    ),
}
