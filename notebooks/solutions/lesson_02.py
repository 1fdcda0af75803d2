"""Solutions of the tasks of lesson 02, and their checks."""

import tempfile
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import lesson_02_launch_ddp as lesson
import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from nbtools.record import Wire
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

CPU = torch.device("cpu")

# --- Task 1: predict ---

rows_in_a_step = 4 * (30 // 4)


def check_rows_in_a_step(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == rows_in_a_step:
        return None
    return "compute what one rank takes first, as the loop does, and remember what // does"


# --- Task 2: predict ---

megabytes_handed_in = 25.6 * 4


def check_megabytes_handed_in(guess):
    """Return None if `guess` is right to 1 %, else a hint."""
    if abs(guess - megabytes_handed_in) < 0.01 * megabytes_handed_in:
        return None
    return "a rank hands in each of its gradients once, however many ranks there are"


# --- Task 3: repair ---


def deal_and_train(rank, world_size, rows, targets, model, batch_size):
    """Train `model` with DDP for one epoch; return the number of steps on this rank.

    101 rows are 51 and 50, so the ranks had different numbers of batches, and the rank with one
    more waited in its all-reduce for nobody. Now the rows that do not divide are left out.
    """
    share = len(rows) // world_size
    mine = list(range(len(rows)))[rank::world_size][:share]
    batches = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in batches:
        optimizer.zero_grad()
        mse_loss(replica(rows[numbers]), targets[numbers]).backward()
        optimizer.step()
    return len(batches)


def examine_deal_and_train(rank, world_size, attempt, folder):
    """Run the attempt; return the row numbers of each step, the parameters, and what it returned.

    The first column of the rows holds their number, and a hook in the model reads it.
    """
    rows, targets, model = make_numbered_rows()
    steps = []

    def read_numbers(_, inputs):
        steps.append((inputs[0][:, 0] * len(rows)).round().long().tolist())
        Path(folder, str(rank)).write_text(str(len(steps)))

    model.register_forward_pre_hook(read_numbers)
    returned = attempt(rank, world_size, rows, targets, model, 10)
    return steps, parameters_to_vector(model.parameters()).detach(), returned


def make_numbered_rows():
    """Return 101 rows whose first number is their place / 101, targets, and a layer."""
    torch.manual_seed(0)
    rows, targets = torch.randn(101, 5), torch.randn(101, 2)
    rows[:, 0] = torch.arange(101) / 101
    return rows, targets, nn.Linear(5, 2)


def run_deal_and_train(attempt, nproc):
    """Return what the ranks returned, or a sentence if they did not come to the end together."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(examine_deal_and_train, nproc, attempt, Path(folder), deadline=20)
        except RankFailed as error:
            if "onnect" not in str(error) and "no answer" not in str(error):
                return str(error)  # a mistake of its own, not a lost neighbour
            begun = [Path(folder, str(rank)) for rank in range(nproc)]
            steps = [path.read_text() if path.exists() else "0" for path in begun]
    return f"the ranks do not come to the end: steps begun, rank by rank: {', '.join(steps)}"


def expected_parameters(seen):
    """Return the parameters after the steps that were seen, with gradients averaged over ranks."""
    rows, targets, model = make_numbered_rows()
    for step in range(max(len(steps) for steps, *_ in seen)):
        batches = [steps[step] for steps, *_ in seen if step < len(steps)]
        losses = [mse_loss(model(rows[numbers]), targets[numbers]) for numbers in batches]
        gradients = torch.autograd.grad(sum(losses) / len(seen), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return parameters_to_vector(model.parameters()).detach()


def check_deal_and_train(attempt):
    """Return None if the attempt ends on 2 and 3 ranks with equal parameters, else a sentence."""
    for nproc in (2, 3):
        where = f"with {nproc} ranks and 101 rows,"
        seen = run_deal_and_train(attempt, nproc)
        if isinstance(seen, str):
            return f"{where} {seen}"
        used = [set(chain(*steps)) for steps, *_ in seen]
        different = set().union(*used)
        if len(different) < 90:
            return f"{where} only {len(different)} different rows were trained on"
        if sum(map(len, used)) - len(different) > 10:
            return f"{where} the ranks' rows overlap"
        if not all((theirs - seen[0][1]).abs().max() == 0 for _, theirs, _ in seen):
            return f"{where} the ranks' parameters differ"
        if not (seen[0][1] - expected_parameters(seen)).abs().max() < 1e-5:
            return f"{where} the parameters are not those of averaged gradients, step by step"
        largest = max(len(numbers) for steps, *_ in seen for numbers in steps)
        if largest > 10:
            return f"{where} a rank takes {largest} rows in a step, and not the batch size, 10"
        for rank, (steps, _, returned) in enumerate(seen):
            if returned != len(steps):
                return f"{where} rank {rank} returns {returned}, and has made {len(steps)} steps"
    return None


# --- Task 4: build ---


def my_ddp(model):
    """Return `model`, with rank 0's parameters, and made to average its gradients in backward().

    A frozen parameter is sent as well, but has no gradient, and takes no hook. One that two layers
    share is in parameters() once.
    """

    def average(parameter):  # called in backward(), as soon as this gradient is complete
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return model


class Tied(nn.Module):
    """Two layers that share one weight, as the first and the last of many language models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.last = nn.Linear(5, 5, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))[:, :2]


def make_model(kind, seed):
    """Return the toy's layer, or a model with one frozen parameter, or one with tied weights."""
    torch.manual_seed(seed)
    model = Tied() if kind == "tied" else nn.Linear(5, 2, dtype=torch.float64)
    if kind == "frozen":
        model.bias.requires_grad_(False)
    return model


KINDS = {
    "plain": "",
    "frozen": "a model whose bias is frozen: ",
    "tied": "a model with two layers that share a weight: ",
}


class Late:
    """An all-reduce that was started with async_op=True: it arrives when somebody waits for it.

    Until then the tensor is nan. So what nobody waits for is seen each time, not one time in ten.
    """

    def __init__(self, tensor, *arguments):
        self.tensor, self.arguments, self.sent = tensor, arguments, tensor.detach().clone()
        tensor.detach().fill_(torch.nan)

    def wait(self, timeout=None):
        if self.sent is not None:
            all_reduce(self.sent, *self.arguments)
            self.tensor.detach().copy_(self.sent)
            self.sent = None
        return True


all_reduce = dist.all_reduce  # the library's


def late_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    return Late(tensor, op, group) if async_op else all_reduce(tensor, op, group)


def refuse_the_library(*args, **kwargs):
    raise TypeError("the task is to write it: DistributedDataParallel itself is not an answer")


def too_many_bytes(calls, tensors, what):
    """Return a sentence if these collectives were handed more bytes than the tensors have."""
    sent, enough = sum(call.nbytes for call in calls), sum(tensor.nbytes for tensor in tensors)
    if sent > enough:
        return f"{dist.get_rank()} hands {sent} bytes to collectives, and {what} have {enough}"
    return None


def examine_my_ddp(rank, world_size, attempt, kind, steps):
    """Wrap a model, with other parameters on each rank; return what went wrong, or None."""
    library = patch.object(DistributedDataParallel, "__init__", refuse_the_library)
    with library, patch.object(dist, "all_reduce", late_all_reduce):
        return of_any_rank(wrap_and_train(rank, world_size, attempt, kind, steps))


def wrap_and_train(rank, world_size, attempt, kind, steps):
    """Return this rank's problem, or None; all ranks come to the same `of_any_rank`."""
    rows, targets, _ = lesson.make_toy(seed=0)
    mine = slice(rank, 96, world_size)
    model, untouched = make_model(kind, seed=rank), make_model(kind, seed=rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with Wire() as wire:
        replica = attempt(model)
    problem = None
    if not isinstance(replica, nn.Module):
        problem = f"after the call, rank {rank} has a {type(replica).__name__}, not a model"
    elif not torch.equal(vector(model), vector(make_model(kind, seed=0))):
        problem = f"after the call, rank {rank} does not hold the parameters that rank 0 had"
    elif waste := too_many_bytes(wire.calls, model.parameters(), "the parameters"):
        problem = f"in the call, rank {waste}"
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(1, steps + 1):
        if found := of_any_rank(problem):
            return found
        untouched.load_state_dict(model.state_dict())
        wanted = mean_over_ranks(untouched, rows[mine], targets[mine])
        optimizer.zero_grad()
        with Wire() as wire:
            mse_loss(replica(rows[mine]), targets[mine]).backward()
        off = (torch.cat([p.grad.flatten() for p in trained]) - wanted).abs().max().item()
        if not off < 1e-12:
            problem = f"in step {step}, rank {rank}'s gradient is {off:.2g} away from the mean"
            if off != off:  # nan: see Late
                problem += ": has nobody waited for an all-reduce with async_op=True?"
        elif waste := too_many_bytes(wire.calls, trained, "the gradients"):
            problem = f"in step {step}, rank {waste}"
        optimizer.step()
    others = from_all_ranks(vector(model))
    if not max((other - others[0]).abs().max().item() for other in others) < 1e-12:
        problem = f"after {steps} steps, the ranks' parameters differ"
    return problem


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def of_any_rank(problem):
    """Return the first rank's problem, the same on all ranks, or None."""
    return next((found for found in from_all_ranks(problem) if found), None)


def vector(model):
    return parameters_to_vector(model.parameters()).detach()


def mean_over_ranks(model, rows, targets):
    """Return the mean over all ranks of the gradient of this model, which has no hooks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alone = torch.autograd.grad(mse_loss(model(rows), targets), trained)
    total = torch.cat([gradient.flatten() for gradient in alone])
    all_reduce(total)
    return total / dist.get_world_size()


def check_my_ddp(attempt):
    """Return None if the attempt is right for three models on 2 and 3 ranks, else one sentence."""
    for kind, name in KINDS.items():
        for nproc in (2, 3):
            try:
                problem = run(examine_my_ddp, nproc, attempt, kind, 3, deadline=20)[0]
            except RankFailed as error:
                return f"{name}{error}"
            if problem:
                return f"{name}with {nproc} ranks: {problem}"
    return None


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "rows_in_a_step": (check_rows_in_a_step, rows_in_a_step),
    "megabytes_handed_in": (check_megabytes_handed_in, megabytes_handed_in),
    "deal_and_train": (check_deal_and_train, deal_and_train),
    "my_ddp": (check_my_ddp, my_ddp),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "rows_in_a_step": (
        "Find the share of one rank in the `DataLoader` line of `train`. Then ask whether the "
        "shares of all ranks still add up to the batch."
    ),
    "megabytes_handed_in": (
        "In the log of the slow motion, compare the bytes of a backward with those of all "
        "parameters. Which factor of lesson 01's task has no place here, where nobody is the "
        "master?"
    ),
    "deal_and_train": (
        "Write down how many batches each rank has, and which all-reduce only one of them calls. "
        "What has to be equal on all ranks before the loop begins?"
    ),
    "my_ddp": (
        'The picture "Parameters travel once" shows two collectives at two moments. Which of '
        "them belongs in the call itself, which in a hook, and what makes a mean out of a sum? "
        "Then ask which of the two a frozen parameter needs."
    ),
}
