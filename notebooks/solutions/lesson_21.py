"""Solutions of the tasks of lesson 21, and their checks."""

import math

import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from solutions.lesson_18 import Sent
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def of_any_rank(problem):
    """Return the first rank's problem, the same on all ranks, or None: so they leave together."""
    mine = problem and f"rank {dist.get_rank()} {problem}"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next(filter(None, everyone), None)


def on_ranks(examine, attempt, deadline=20):
    """Return what 2 ranks find wrong, else what 3 ranks do, else None."""
    for nproc in (2, 3):
        try:
            problem = run(examine, nproc, attempt, deadline=deadline)[0]
        except RankFailed as error:
            return f"with {nproc} ranks: {error}"
        if problem:
            return f"with {nproc} ranks: {problem}"
    return None


# --- Task 1: predict ---

last_count = 2**8


def check_last_count(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == last_count:
        return None
    if guess in (2**7, 2**9):
        return "a factor of 2 away: count the first 1, which is not stored, among the digits"
    if guess in (2**8 - 1, 2**8 + 1):
        return "nearly: it is the number that the sum is, when 1 more does not change it"
    if guess == 2**11:
        return "that is float16: bfloat16 has fewer digits"
    return "from which number on is the next bfloat16 more than 1 away?"


# --- Task 2: build ---


def mean_rounded_once(flat):
    """Return the mean of `flat` over the ranks: sent in bfloat16, added up in float32."""
    ranks = dist.get_world_size()
    leaving = flat.bfloat16()
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)  # of each rank, the part that I am to add up
    mine = arrived.view(ranks, -1).float().mean(0).bfloat16()
    whole = torch.empty_like(leaving)
    dist.all_gather_single(whole, mine)
    return whole.float()


def made_of_few_digits(world_size, length):
    """Return numbers for each rank that are in bfloat16, also when they are divided by 2 or 3."""
    generator = torch.Generator().manual_seed(length)
    shape = world_size, world_size * length
    digits = 3 * torch.randint(-85, 86, shape, generator=generator)
    return digits * 2.0 ** torch.randint(-8, 9, shape, generator=generator)


def examine_mean(rank, world_size, attempt):
    """Call the attempt twice; return the first problem of any rank, or None."""
    for length in (5, 400):
        every = made_of_few_digits(world_size, length)
        with Sent() as sent:
            answer = attempt(every[rank].clone())
        problem = wrong_in_mean(answer, every.double().mean(0), sent.nbytes)
        if problem := of_any_rank(problem):
            return problem
        everyone = [torch.empty_like(answer) for _ in range(world_size)]
        dist.all_gather(everyone, answer.contiguous())
        if any(not torch.equal(other, answer) for other in everyone):
            return "two ranks have other numbers: from now on the replicas differ"
    return None


def wrong_in_mean(answer, right, sent):
    """Return what is wrong about the numbers of this rank, or None."""
    ranks = dist.get_world_size()
    if not isinstance(answer, torch.Tensor) or answer.shape != right.shape:
        return "does not return a tensor as long as `flat`"
    if answer.dtype != torch.float32:
        return f"returns {answer.dtype}: the optimizer wants float32"
    off = (answer.double() - right).abs() > right.abs() * 2**-8 * 1.001
    if off.double().mean() > 0.9:
        return "does not return the mean"
    if off.any():
        return f"has {int(off.sum())} of {len(off)} numbers more than one rounding away"
    budget = 2 * (ranks - 1) * 2 * len(answer) // ranks
    if sent > budget:
        return f"sends {sent:,.0f} bytes, where {budget:,} are enough"
    return None


def check_mean_rounded_once(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    return on_ranks(examine_mean, attempt)


# --- Task 3: repair ---


def update(replica, optimizer, scaler, micro_batches):
    """Add up the micro-batches' gradients, clip the norm of their mean to 1, and update."""
    optimizer.zero_grad()
    for rows, targets in micro_batches:
        loss = mse_loss(replica(rows), targets) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


class Job:
    """A job of this rank in float64, and one process that does the same without a scaler."""

    def __init__(self, world_size):
        self.world_size, model = world_size, nn.Linear(6, 3).double()
        generator = torch.Generator().manual_seed(5)
        self.twin = nn.Linear(6, 3).double()
        for p, q in zip(model.parameters(), self.twin.parameters(), strict=True):
            p.data = 0.1 * torch.randn(p.shape, generator=generator).double()
            q.data = p.data.clone()
        self.replica = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.replica.parameters(), lr=0.1, momentum=0.9)
        self.twins = torch.optim.SGD(self.twin.parameters(), lr=0.1, momentum=0.9)
        self.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.data = torch.randn(6, world_size, 3, 4, 9, generator=generator).double()
        self.data *= 5
        self.data[3] *= 0.01  # small gradients, which are not clipped
        self.data[1, world_size - 1, 1, 2, 3] = math.inf  # step 2, in a micro-batch of one rank
        self.data[5, 0, 0, 0] = 3e153  # step 6: only multiplied gradients are too large for float64

    def micro_batches(self, step, rank):
        return [(rows[:, :6], rows[:, 6:]) for rows in self.rows(step)[rank]]

    def rows(self, step):
        """Return the rows of all ranks: three micro-batches of each, and only two in step 4."""
        return self.data[step, :, : 2 if step == 3 else 3]

    def step_alone(self, step):
        """Make the update of one process on the rows of all ranks."""
        self.twins.zero_grad()
        rows = self.rows(step).flatten(0, 2)
        mse_loss(self.twin(rows[:, :6]), rows[:, 6:]).backward()
        nn.utils.clip_grad_norm_(self.twin.parameters(), 1.0)
        if step not in (1, 5):
            self.twins.step()

    def off(self):
        """Return how far the parameters are from those of one process."""
        pairs = zip(self.replica.parameters(), self.twin.parameters(), strict=True)
        return max((p - q).abs().max().item() for p, q in pairs)


SCALES = [
    1024.0,
    512.0,
    512.0,
    1024.0,
    1024.0,
    512.0,
]  # after each step: doubled after two good ones


def examine_update(rank, world_size, attempt):
    """Make six steps with the attempt; return the first problem of any rank, or None."""
    job = Job(world_size)
    for step, scale in enumerate(SCALES):
        attempt(job.replica, job.optimizer, job.scaler, job.micro_batches(step, rank))
        job.step_alone(step)
        if problem := of_any_rank(wrong_in_update(job, step + 1, scale)):
            return problem
    return None


def wrong_in_update(job, step, scale):
    """Return what is wrong about this rank after a step, or None."""
    if any(not p.isfinite().all() for p in job.replica.parameters()):
        return f"has updated its parameters with inf or nan in step {step}"
    if not job.off() < 1e-6:
        return f"is {job.off():.2g} away from one process without a scaler in step {step}"
    if job.scaler.get_scale() != scale:
        return f"has the factor {job.scaler.get_scale():g} after step {step}, not {scale:g}"
    return None


def check_update(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    return on_ranks(examine_update, attempt)


# --- Task 4: repair ---


def may_step(loss, gradients):
    """Return whether to make the update: one answer for all ranks."""
    finite = all(bool(g.isfinite().all()) for g in gradients)
    found = torch.tensor(0.0 if finite and math.isfinite(loss) else 1.0)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item() == 0


def cases(world_size):
    """Return {what has happened: (losses, a number in a gradient of each rank, which gradient)}."""
    last, inf, nan = world_size - 1, math.inf, math.nan
    fine, ones = [0.5] * world_size, [1.0] * world_size

    def with_one(values, rank, value):
        return [value if r == rank else v for r, v in enumerate(values)]

    return {
        "all is finite": (fine, ones, 0),
        "inf is in the part of rank 0": (fine, with_one(ones, 0, inf), 1),
        "nan is in the part of the last rank": (fine, with_one(ones, last, nan), 0),
        "-inf is in the part of the last rank": (fine, with_one(ones, last, -inf), 2),
        "inf and -inf are on two ranks": (fine, with_one(with_one(ones, 0, inf), last, -inf), 1),
        "the loss of the last rank is nan": (with_one(fine, last, nan), ones, 1),
        "the loss of rank 0 is inf": (with_one(fine, 0, inf), ones, 1),
        "all is finite again": (fine, ones, 1),
        "large numbers are on all ranks": (fine, [3e38] * world_size, 1),
    }


def examine_may_step(rank, world_size, attempt):
    """Call the attempt in several cases; return the first problem of any rank, or None."""
    for name, (losses, values, place) in cases(world_size).items():
        right = all(map(math.isfinite, losses + values))
        gradients = [torch.ones(4, 3), torch.ones(3), torch.ones(2, 2)]
        gradients[place].view(-1)[-1] = values[rank]
        with Sent() as sent:
            answer = bool(attempt(losses[rank], gradients))
        problem = None
        if answer != right:
            problem = f"{'makes the update' if answer else 'skips'} when {name}"
        elif sent.nbytes > 16:
            problem = f"sends {sent.nbytes:,.0f} bytes to decide: one number is enough"
        if problem := of_any_rank(problem):
            return problem
    return None


def check_may_step(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence about it."""
    return on_ranks(examine_may_step, attempt)


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "last_count": (check_last_count, last_count),
    "mean_rounded_once": (check_mean_rounded_once, mean_rounded_once),
    "update": (check_update, update),
    "may_step": (check_may_step, may_step),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "last_count": (
        "With eight binary digits you can write all whole numbers up to some power of two. The "
        "first one that does not fit lies between two neighbours: to which of them is it rounded?"
    ),
    "mean_rounded_once": (
        "Who adds, has to have all ranks' numbers, but only for a part: `dist.all_to_all_single` "
        "hands each rank its part of all others. After the sum, how do the parts get to everybody, "
        "and in which type?"
    ),
    "update": (
        "Which numbers does the clipping see: the true ones, or 1,024 times those? "
        "`scaler.unscale_(optimizer)` divides, once. And of how many micro-batches? Ask of each "
        "line what has to be complete before it."
    ),
    "may_step": (
        "A rank can see its own loss and its own part of the gradients, and no more. One number "
        "says what it has found. Every rank has to send it, also one that knows the answer already."
    ),
}
