"""Solutions of the tasks of lesson 10, their checks, and the six jobs of which each has a bug."""

import contextlib
import functools
import itertools
import math
from typing import NamedTuple
from unittest.mock import patch

import lesson_10_same_as_one_process as lesson
import torch
import torch.distributed as dist
from nbtools import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# --- Task 1: predict ---

ratio_of_weights = (40 + 30 + 50) / (60 + 20)


def check_ratio_of_weights(guess):
    """Return None if `guess` is right to half a percent, else a hint."""
    if abs(guess - ratio_of_weights) < 0.005:
        return None
    if abs(guess - 1) < 0.005:
        return "so it would be with one count for all ranks"
    if abs(guess - 1 / ratio_of_weights) < 0.005:
        return "which rank has fewer tokens: are its tokens worth more or less?"
    return "first the weight of a token on each rank: each rank's mean counts one half"


# --- Task 2: build ---


def loss_for_backward(losses):
    """Return the loss of this rank, weighted by its share of all rows."""
    rows = torch.tensor(float(len(losses)), dtype=torch.float64)
    dist.all_reduce(rows)  # one number from each rank: how many rows there are in all
    return losses.sum() * dist.get_world_size() / rows  # a sum of nothing leads back, too


def leads_back(loss, losses):
    """Return whether backward() from `loss`, a tensor of shape (), comes to `losses`."""
    if not isinstance(loss, torch.Tensor) or loss.shape != () or not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, losses, retain_graph=True, allow_unused=True)
    return gradient is not None


def examine_loss(rank, world_size, attempt, steps):
    """Return how far DDP's gradient with the attempt's loss is from the batch's, step by step."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    replica, found = DistributedDataParallel(model), []
    for sizes in steps:
        first = sum(sizes[:rank])
        right = torch.autograd.grad(model(rows[: sum(sizes)]).square().mean(), model.weight)[0]
        model.zero_grad()
        losses = replica(rows[first : first + sizes[rank]]).square().mean(1)
        loss = attempt(losses)
        no_way = torch.tensor(not leads_back(loss, losses)).int()
        dist.all_reduce(no_way)  # else the others would wait
        if no_way:
            return "what you return must be a tensor of shape () that depends on losses"
        loss.backward()
        found.append((model.weight.grad - right).abs().max().item())
    return found


def check_loss_for_backward(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, in one step after another."""
    for nproc in (2, 3):
        uneven = [1 + 3 * rank for rank in range(nproc)]
        nobody = [4 * rank for rank in range(nproc - 1)] + [5]  # rank 0 has none
        many = [1025 + 201 * rank for rank in range(nproc)]  # 2,251 is no number of float16
        steps = [[6] * nproc, uneven, nobody, many]
        for found in run(examine_loss, nproc, attempt, steps, deadline=20):
            if isinstance(found, str):
                return found
            for sizes, off in zip(steps, found, strict=True):
                if not off < 1e-12:
                    return f"with parts of {sizes} rows the gradient is off by {off:.3g}"
    return None


# --- Six jobs, of which each has a bug ---


def job_1(replica, optimizer, micro_batches):
    optimizer.zero_grad()
    for number, (texts, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            loss = cross_entropy(replica(texts).flatten(0, 1), targets.flatten())
            (loss / len(micro_batches)).backward()
    optimizer.step()


def job_2(replica, optimizer, micro_batches):
    optimizer.zero_grad()
    for number, (texts, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            loss = cross_entropy(replica(texts).flatten(0, 1), targets.flatten())
            loss.backward()
    optimizer.step()


def job_3(replica, optimizer, micro_batches):
    optimizer.zero_grad()
    for number, (texts, targets) in enumerate(micro_batches, 1):
        loss = cross_entropy(replica(texts).flatten(0, 1), targets.flatten())
        loss = loss / len(micro_batches)
        replica.require_backward_grad_sync = number == len(micro_batches)
        loss.backward()
    optimizer.step()


def job_4(replica, optimizer, micro_batches):
    for number, (texts, targets) in enumerate(micro_batches):
        wait = number % len(micro_batches) != 0
        with replica.no_sync() if wait else contextlib.nullcontext():
            loss = cross_entropy(replica(texts).flatten(0, 1), targets.flatten())
            (loss / len(micro_batches)).backward()
        if (number + 1) % len(micro_batches) == 0:
            optimizer.step()
            optimizer.zero_grad()


def job_5(rank, world_size, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 5), nn.Dropout(0.5), nn.Linear(5, 8)).double()
    return DistributedDataParallel(model)


def job_6(texts, epochs, seed):
    sampler = DistributedSampler(texts, shuffle=True, seed=seed)
    for _ in range(epochs):
        yield list(sampler)


# What is right. Job 1 itself is, where texts have equal length: there a mean of means is the mean.


def right_start(rank, world_size, seed):
    replica = job_5(rank, world_size, seed)
    torch.manual_seed(1000 * seed + rank)  # after the model is made
    return replica


def right_order(texts, epochs, seed):
    sampler = DistributedSampler(texts, shuffle=True, seed=seed)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield list(sampler)


# --- What a job leaves behind ---


class Rank(NamedTuple):
    """What one rank has done, update by update."""

    loss: list  # the mean loss of its own texts, before each update
    gradient: list  # the gradient of each update, a vector
    before: list  # the parameters before each update, a vector
    after: list  # the parameters after each update, a vector
    texts: list  # for each update: the numbers of its texts, in the order in which they came
    sent: list  # for each update: the bytes given to the all-reduce, micro-batch by micro-batch
    dropped: list  # for each update, for each micro-batch: a vector, True where dropout put a 0


def make_texts(seed, padded):
    """Return 96 texts and targets; if `padded`, of different length."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, 8, (96, 9), generator=generator)
    targets = (3 * texts + torch.randint(0, 2, texts.shape, generator=generator)) % 8
    if padded:
        lengths = torch.randint(1, 10, (96, 1), generator=generator)
        targets[torch.arange(9) >= lengths] = -100
    return texts, targets


def vector(tensors):
    """Return a copy of these tensors, as one vector."""
    return nn.utils.parameters_to_vector(tensors).detach()


def work(rank, world_size, seed, padded, drop, step, start, order):
    """Be a rank of a job: 2 epochs of 4 updates, each of 2 or 4 micro-batches; return a Rank."""
    texts, targets = make_texts(seed, padded)
    replica, seen = start(rank, world_size, seed), Rank([], [], [], [], [], [], [])
    (embed, dropout, predict), parameters = replica.module, [*replica.parameters()]
    with torch.no_grad():
        embed.weight *= (1.0, 4.0, 0.3)[seed]  # no two jobs are of the same size
    dropout.p = 0.5 if drop else 0.0

    def after_dropout(module, inputs, outputs):
        seen.dropped[-1].append((outputs == 0).flatten())
        seen.sent[-1].append(0)

    def before_sending(_, bucket):
        seen.sent[-1][-1] += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)  # what DDP does without a hook

    dropout.register_forward_hook(after_dropout)
    replica.register_comm_hook(None, before_sending)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    optimizer.register_step_pre_hook(
        lambda *_: seen.gradient.append(vector(p.grad for p in parameters))
    )
    epochs = order(range(96), 2, 81 * seed)  # with 81 both epochs may begin with one text
    for numbers in itertools.chain(*(torch.tensor(epoch).tensor_split(4) for epoch in epochs)):
        with torch.no_grad():
            outputs = predict(embed(texts[numbers])).flatten(0, 1)
            seen.loss.append(cross_entropy(outputs, targets[numbers].flatten()).item())
        for words, new in zip(seen[4:], (numbers.tolist(), [], []), strict=True):
            words.append(new)
        seen.before.append(vector(parameters))
        parts = numbers.tensor_split((2, 4)[seed % 2])
        step(replica, optimizer, [(texts[part], targets[part]) for part in parts])
        seen.after.append(vector(parameters))
    return seen


class Job(NamedTuple):
    """What all ranks of a job have left behind."""

    ranks: list  # a Rank for each rank
    padded: bool
    seed: int

    def gradient_of_one_process(self, update):
        """Return the gradient of all texts of this update, at rank 0's parameters before it."""
        texts, targets = make_texts(self.seed, self.padded)
        numbers = [number for rank in self.ranks for number in rank.texts[update]]
        model = nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8)).double()
        nn.utils.vector_to_parameters(self.ranks[0].before[update], model.parameters())
        cross_entropy(model(texts[numbers]).flatten(0, 1), targets[numbers].flatten()).backward()
        return vector(p.grad for p in model.parameters())


RIGHT = {"step": job_1, "start": right_start, "order": right_order}
BUGS = {n: {"step": job} for n, job in enumerate((job_1, job_2, job_3, job_4), 1)}
BUGS |= {5: {"start": job_5}, 6: {"order": job_6}}


def play_all(rank, world_size, numbers, seeds):
    """Return {(job, seed): (what this rank did with the bug, what without)}."""
    done = {}
    for number, seed in itertools.product(numbers, seeds):
        settings = RIGHT | ({"step": lesson.train_step} if number == 1 else {})
        ways = settings | BUGS[number], settings
        kind = number == 1, number == 5  # padded, with dropout
        done[number, seed] = [work(rank, world_size, seed, *kind, **way) for way in ways]
    return done


@functools.cache
def jobs(nproc, seeds=(0, 1, 2)):
    """Return {number: [(job with its bug, job without)]}, run on so many ranks."""
    everyone = run(play_all, nproc, tuple(BUGS), seeds, deadline=300)
    found = {number: [] for number in BUGS}
    for number, seed in everyone[0]:
        pairs = zip(*(theirs[number, seed] for theirs in everyone), strict=True)
        found[number].append([Job(list(ranks), number == 1, seed) for ranks in pairs])
    return found


# Jobs that nobody ran, made of those that ran: of them no sum tells, and no single number.


def vectors_all_but_right(which, bug, cure, first):
    """Return the bug with the vectors of its cure, of which four numbers have changed places."""

    def moved(vectors, by):
        return [torch.cat([v[:first], v[first:][:4].roll(by), v[first + 4 :]]) for v in vectors]

    ranks = []
    for by, (wrong, right) in enumerate(zip(bug.ranks, cure.ranks, strict=True), 1):
        after, before = moved(right.after, by), right.before
        if which > 2:  # in 1 and 2 the gradient of one process is taken before the fault
            before = [before[0], *after[:-1]]
        gradient = moved(right.gradient, by)
        ranks.append(wrong._replace(gradient=gradient, before=before, after=after))
    return bug._replace(ranks=ranks)


def masks_of_equal_sums(job, by):
    """Return the job with masks that drop on each rank as many features as on rank 0."""
    ranks = []
    for number, rank in enumerate(job.ranks):
        moved = [[mask.roll(by * number) for mask in step] for step in job.ranks[0].dropped]
        ranks.append(rank._replace(dropped=moved))
    return job._replace(ranks=ranks)


def texts_of_equal_sums(job, epochs):
    """Return the job with text 0 next to 95, 1 next to 94, ...: each update has the same sum."""
    ranks = []
    for number, rank in enumerate(job.ranks):
        generators = [torch.Generator().manual_seed(81 * job.seed + epoch) for epoch in epochs]
        orders = [torch.randperm(48, generator=g)[number :: len(job.ranks)] for g in generators]
        steps = itertools.chain(*(order.tensor_split(4) for order in orders))
        texts = [torch.stack([step, 95 - step], 1).flatten().tolist() for step in steps]
        ranks.append(rank._replace(texts=texts))
    return job._replace(ranks=ranks)


def look_alike(which, bug, cure):
    """Yield (words for a verdict, a job with this bug, a job without)."""
    if which < 5:
        for first in (0, 84):  # at both ends of a vector, so that no single number tells both
            almost = vectors_all_but_right(which, bug, cure, first)
            yield ", where a sum is right, and each number but four", almost, cure
    elif which == 5:
        for by in range(1, 9):
            others = masks_of_equal_sums(cure, by)
            yield ", where ranks drop equally many features, but others", bug, others
    else:
        same, new = (texts_of_equal_sums(job, end) for job, end in ((bug, (0, 0)), (cure, (0, 1))))
        yield ", where other texts have the same sum", same, new


@functools.cache
def cases(which):
    """Return [(words for a verdict, a job with this bug, a job without)]: first those that ran."""
    ran = [("", *pair) for nproc in (2, 3) for pair in jobs(nproc)[which]]
    return ran + [case for _, *pair in ran for case in look_alike(which, *pair)]


def check_number(number_of, *wanted):
    """Return None if the number tells each of these jobs with its bug from the same without."""
    for which in wanted:
        values = [], []  # with the bug, without
        for words, group in itertools.groupby(cases(which), key=lambda case: case[0]):
            for found, job in itertools.chain(*(zip(values, c[1:], strict=True) for c in group)):
                found.append(float(number_of(job)))
                if not math.isfinite(found[-1]):
                    return f"of job {which} it makes {found[-1]}, which is no number"
            (low, high), (lower, higher) = [(min(found), max(found)) for found in values]
            if not max(low - higher, lower - high) > 1e-9:
                told = f"{low:.3g} to {high:.3g} with the bug, {lower:.3g} to {higher:.3g} without"
                told += f", on 2 and 3 ranks{words}"
                return f"it does not tell job {which} from its cure: {told}"
    return None


# --- Tasks 3 to 6: which number tells? ---


def off_from_one_process(job):
    """Return how far the first gradient is from that of one process."""
    return (job.ranks[0].gradient[0] - job.gradient_of_one_process(0)).abs().max()


def ranks_apart(job):
    """Return the largest difference of a parameter between two ranks, at the end."""
    ends = torch.stack([rank.after[-1] for rank in job.ranks])
    return (ends.amax(0) - ends.amin(0)).max()


def equal_masks(job):
    """Return the share of features about which ranks 0 and 1 agree, in the first micro-batch."""
    zero, one = (rank.dropped[0][0] for rank in job.ranks[:2])
    return (zero == one).double().mean()


def equal_orders(job):
    """Return how many texts come at the same place in both epochs, on rank 0."""
    texts = job.ranks[0].texts
    first, second = (list(itertools.chain(*epoch)) for epoch in (texts[:4], texts[4:]))
    return sum(a == b for a, b in zip(first, second, strict=True))


def check_jobs_1_and_2(number_of):
    """Return None if one number tells jobs 1 and 2 from their cures, else a sentence."""
    return check_number(number_of, 1, 2)


def check_jobs_3_and_4(number_of):
    """Return None if one number tells jobs 3 and 4 from their cures, without one process."""
    asked = []

    def refused(job, update):
        asked.append(update)
        return torch.zeros_like(job.ranks[0].before[update])

    with patch.object(Job, "gradient_of_one_process", refused):
        told = check_number(number_of, 3, 4)
    return "without gradient_of_one_process: use only what the ranks have done" if asked else told


def check_job_5(number_of):
    """Return None if the number tells job 5 from its cure, else a sentence."""
    return check_number(number_of, 5)


def check_job_6(number_of):
    """Return None if the number tells job 6 from its cure, else a sentence."""
    return check_number(number_of, 6)


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "ratio_of_weights": (check_ratio_of_weights, ratio_of_weights),
    "loss_for_backward": (check_loss_for_backward, loss_for_backward),
    "number_for_1_and_2": (check_jobs_1_and_2, off_from_one_process),
    "number_for_3_and_4": (check_jobs_3_and_4, ranks_apart),
    "number_for_5": (check_job_5, equal_masks),
    "number_for_6": (check_job_6, equal_orders),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "ratio_of_weights": (
        "Divide one by the tokens of a rank: so much does a token count within its rank's mean. "
        "Then compare the two ranks."
    ),
    "loss_for_backward": (
        "What must be the weight of each row, before DDP divides by the number of ranks? Ask what "
        "the ranks must tell each other for it, and what a sum does on a rank without rows."
    ),
    "number_for_1_and_2": (
        "The name of this lesson is the number that you need: how far from what? One update is "
        "enough, the first."
    ),
    "number_for_3_and_4": (
        "Which micro-batches has nobody averaged? Then each rank makes its update with another "
        "gradient. What is no longer equal afterwards?"
    ),
    "number_for_5": (
        "The gradients are averaged, and the ranks agree. Ask whether they agree in something in "
        "which they should not."
    ),
    "number_for_6": (
        "Each update is right by itself. Compare what one rank does in the second epoch with what "
        "it did in the first."
    ),
}
