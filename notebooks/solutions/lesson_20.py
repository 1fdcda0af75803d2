"""Solutions of the tasks of lesson 20, and their checks."""

import inspect
import itertools
import logging
import multiprocessing
import random
import warnings

import numpy as np
import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(data, batch_size, workers, **settings):
    """Return a DataLoader whose workers are forks of this rank, be they more than its cores."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    if workers:
        settings["multiprocessing_context"] = multiprocessing.get_context("fork")
    return DataLoader(data, batch_size, num_workers=workers, **settings)


def stateful_loader(data, batch_size, workers):
    """Return torchdata's loader, with workers that are forks, and without its warnings."""
    warnings.filterwarnings("ignore", "'set_vital'|This DataLoader will create")
    logging.disable(logging.WARNING)  # that it reads rows again that it had read
    settings = {"collate_fn": list, "multiprocessing_context": "fork"}
    return StatefulDataLoader(data, batch_size, num_workers=workers, **settings)


def on_ranks(examine, *given):
    """Return what a rank of 2 finds wrong, else one of 3, else None."""
    for nproc in (2, 3):
        try:
            problems = run(examine, nproc, *given, deadline=60)
        except RankFailed as error:
            return f"with {nproc} ranks: {error}"
        if any(problems):
            return f"with {nproc} ranks: {next(filter(None, problems))}"
    return None


# --- Task 1: predict ---

rows_left_out = 2 * 4 * (1000 // (2 * 4) % 32)


def check_rows_left_out(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == rows_left_out:
        return None
    if guess == 2 * (500 % 32):
        return "so it would be if each rank made its batches itself; who makes them here?"
    if guess == 1000 % 32:
        return "so it would be if one process made all batches; how many make them here?"
    if guess == rows_left_out // 8:
        return "that is one worker's loss: how many are there in the whole job?"
    return "how many rows does one worker read, and how many whole batches can it make of them?"


# --- Task 2: build ---


def numbers_of_row(seed, epoch, row):
    """Return three numbers from 0 to 1 that depend on nothing else."""
    return np.random.default_rng([seed, epoch, row]).random(3).tolist()


class Augmented(Dataset):
    """A row is what an attempt draws for it."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 12

    def __getitem__(self, row):
        return row, plain(self.draw(0, 1, row))


def plain(numbers):
    """Return numbers of a list, an array or a tensor as a list."""
    return [float(number) for number in numbers]


def examine_numbers(rank, world_size, draw, here):
    """Return what is wrong with numbers that workers draw, or None."""
    torch.manual_seed(rank)
    mine = range(rank, 12, world_size)
    for row, numbers in loader(
        Augmented(draw), None, world_size - 1, sampler=mine, persistent_workers=True
    ):
        if numbers != here[row]:
            return f"row {row} has other numbers in a worker of rank {rank} than in the notebook"
    return None


def states():
    """Return the states of the generators that everybody shares."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def check_numbers_of_row(attempt):
    """Return None if the attempt is right, here and on 2 and 3 ranks, else one sentence."""
    before = states()
    rows = {row: plain(attempt(0, 1, row)) for row in range(12)}
    if states() != before:
        return "it changes the state of a generator that the model may use for dropout, too"
    for numbers in rows.values():
        if len(numbers) != 3 or not all(0 <= n <= 1 for n in numbers):
            return f"three numbers from 0 to 1 are wanted, not {numbers}"
    torch.manual_seed(8), random.seed(8), np.random.seed(8)
    if [plain(attempt(0, 1, row)) for row in reversed(range(12))] != [*rows.values()][::-1]:
        return "asked a second time, in another order, it draws other numbers for a row"
    known = {}
    places = itertools.chain(
        itertools.product(range(3), range(4), range(20)),
        itertools.product((1, 11, 111), repeat=3),
        itertools.product((0, 1, 10, 100, 1000, 10**4, 10**5, 10**6), repeat=3),
        ((0, 0, 2**power) for power in range(5, 31)),
    )
    for place in dict.fromkeys(places):
        numbers = tuple(plain(attempt(*place)))
        if numbers in known:
            return f"(seed, epoch, row) {known[numbers]} and {place} draw the same numbers"
        known[numbers] = place
    drawn = np.array(list(known))
    if not (abs(drawn.mean(0) - 0.5) < 0.1).all() or not (drawn.std(0) > 0.2).all():
        return f"the means of {len(drawn)} rows are {drawn.mean(0).round(2).tolist()}, not 0.5"
    if abs(np.corrcoef(drawn.T) - np.eye(3)).max() > 0.4:
        return "the three numbers of a row know each other"
    return on_ranks(examine_numbers, attempt, rows)


# --- Task 3: build ---


def rows_left(rows, batch_size, taken, worker, workers):
    """Return what this worker has to read, after the rank has taken so many batches."""
    was = (worker + taken) % workers  # a new loader asks worker 0 first
    given = -(-(taken - was) // workers)  # batches that this one had given
    return rows[was::workers][given * batch_size :]


class Stream(IterableDataset):
    """The rows of a rank, of which each worker reads a part."""

    def __init__(self, rows, part):
        self.rows, self.part = rows, part

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(self.part(self.rows, number, workers))


def every_nth(rows, worker, workers):
    return rows[worker::workers]


def played(rows, batch_size, workers, part):
    """Return the batches of a loader, played by lists: it asks its workers in turn."""
    queues = []
    for worker in range(workers):
        own = list(part(rows, worker, workers))
        queues.append([own[i : i + batch_size] for i in range(0, len(own), batch_size)])
    longest = max(map(len, queues))
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def flat(lists):
    return [*itertools.chain.from_iterable(lists)]


def of_workers(count):
    return "1 worker" if count == 1 else f"{count} workers"


def told(batches):
    return f"{batches[:3]}{' ...' if len(batches) > 3 else ''}"


def wrong_after(whole, taken, workers, found):
    """Return what is wrong with the batches after a stop, or None."""
    if found == whole[taken:]:
        return None
    rows, left = flat(found), flat(whole[taken:])
    how = "the right rows in other batches" if sorted(rows) == sorted(left) else "other rows"
    text = f"with {of_workers(workers)}, taken = {taken}: next come {how}"
    return f"{text}: {told(found)}, and not {told(whole[taken:])}"


def examine_rows_left(rank, world_size, attempt):
    """Go on with real loaders; return what is wrong, or None."""
    rows = [*range(rank, 12 * world_size + 1, world_size)]
    for workers, taken in ((world_size, 2), (2, 3)):
        whole = [batch for batch in loader(Stream(rows, every_nth), 2, workers, collate_fn=list)]
        parts = Stream(rows, lambda *own, taken=taken: attempt(own[0], 2, taken, *own[1:]))
        found = [batch for batch in loader(parts, 2, workers, collate_fn=list)]
        if problem := wrong_after(whole, taken, workers, found):
            return problem
    return None


def check_rows_left(attempt):
    """Return None if the attempt is right, with lists and on 2 and 3 ranks, else one sentence."""
    for count, workers in itertools.product((24, 23, 17), (1, 2, 3, 4, 5)):
        rows = [*range(100, 100 + count)]
        whole = played(rows, 3, workers, every_nth)
        for taken in range(len(whole) + 1):
            found = played(
                rows,
                3,
                workers,
                lambda rows, w, workers, taken=taken: attempt(rows, 3, taken, w, workers),
            )
            if problem := wrong_after(whole, taken, workers, found):
                return problem
    return on_ranks(examine_rows_left, attempt)


# --- Task 4: repair ---


class Faulty(IterableDataset):
    """All rows, in an order of their own in each epoch, dealt to the ranks."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(self.rows, len(self.rows))
        return iter(order[dist.get_rank() :: dist.get_world_size()])


class Repaired(IterableDataset):
    """All rows, in an order of their own in each epoch, dealt to all workers of all ranks."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(order[mine :: dist.get_world_size() * workers])


EPOCHS = (0, 1, 5, 1)


def rows_of_epochs(attempt, workers, persistent, count):
    """Return what this rank gets of so many rows in each of EPOCHS."""
    data = attempt(list(range(count)))
    settings = {"collate_fn": list, "persistent_workers": persistent}
    batches = loader(data, 4, workers, **settings)
    found = []
    for epoch in EPOCHS:
        data.set_epoch(epoch)
        found.append(flat(batches))
    return found


def wrong_in_epochs(ranks, count):
    """Return what is wrong with the rows of all ranks, [[rows of an epoch]], or None."""
    for number, epoch in enumerate(EPOCHS):
        rows = sorted(flat(rank[number] for rank in ranks))
        if rows != [*range(count)]:
            often = max(rows.count(row) for row in rows) if rows else 0
            text = f"{len(set(rows))} of {count} rows come in epoch {epoch}"
            return f"{text}, one of them {often} times" if often > 1 else text
        if count == 72 and len({len(rank[number]) for rank in ranks}) > 1:
            return f"in epoch {epoch} the ranks have {[len(rank[number]) for rank in ranks]} rows"
    first, second, third, again = (ranks[0][number] for number in range(len(EPOCHS)))
    if first == second or second == third:
        return "the order of an epoch is that of the one before"
    if second == [*range(0, count, len(ranks))] or first == sorted(first):
        return "the rows are not shuffled"
    if sorted(first) == sorted(second):
        return "a rank gets the same rows in each epoch, in another order"
    follow = [{pair for rank in ranks for pair in itertools.pairwise(rank[n])} for n in (0, 1)]
    if len(follow[0] & follow[1]) > len(follow[0]) / 2:
        return "most rows come after the same row as in the epoch before"
    if second != again:
        return "set_epoch(1) does not bring back the order of epoch 1, so nobody can go on there"
    return None


def examine_job(rank, world_size, attempt):
    """Read four epochs with several numbers of workers; return what is wrong, or None."""
    cases = [(0, False, 72), (1, True, 72), (2, True, 72), (3, True, 72), (2, False, 73)]
    for workers, persistent, count in cases:
        ranks, before = [None] * world_size, states()[1:]
        dist.all_gather_object(ranks, rows_of_epochs(attempt, workers, persistent, count))
        if problem := wrong_in_epochs(ranks, count):
            kept = ", kept alive," if persistent else ""
            return f"{of_workers(workers)}{kept} on each rank: {problem}"
        if states()[1:] != before:
            return "it changes the state of a generator from which augmentation may draw"
    return None


def check_job(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else one sentence."""
    return on_ranks(examine_job, attempt)


def job_in_a_script():
    """Return edits for the check: templates/smallest_ddp.py, with the faulty job as its data."""
    job = inspect.getsource(Faulty).replace("class Faulty", "class Job")
    return [
        ("import torch\nimport", "import random\n\nimport torch\nimport"),
        ("DataLoader, DistributedSampler", "DataLoader, IterableDataset"),
        ("dist.init_process_group(", f"{job}\n\ndist.init_process_group("),
        ("sampler = DistributedSampler(data)", "numbers = Job(list(range(len(data))))"),
        (
            "data, batch_size=10, sampler=sampler",
            "numbers, 10, num_workers=2, persistent_workers=1",
        ),
        ("sampler.set_epoch(", "numbers.set_epoch("),
        (
            "for inputs, targets in loader:\n",
            "for own in loader:\n        inputs, targets = data[own]\n",
        ),
    ]


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "rows_left_out": (check_rows_left_out, rows_left_out),
    "numbers_of_row": (check_numbers_of_row, numbers_of_row),
    "Job": (check_job, Repaired),
    "rows_left": (check_rows_left, rows_left),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "rows_left_out": (
        "A batch is made where rows are read, and no worker knows the rows of another one. So ask "
        "one worker first: how many rows does it read, how many batches does it fill, what is left?"
    ),
    "numbers_of_row": (
        "A generator of its own for each row, and no seed that is a sum: there 1 + 2 is 2 + 1. "
        "`np.random.default_rng` takes a list of numbers as its seed, `random.Random` a text."
    ),
    "Job": (
        "Of the order: which copy of `self.epoch` does `set_epoch` change, and what memory do a "
        "rank and its workers share? Of rows that come twice: who deals rows to workers, and what "
        "does `get_worker_info()` say there?"
    ),
    "rows_left": (
        "Two questions. Which worker would have given the next batch, and who is asked first by a "
        "new loader? And of the batches taken so far, how many came from the worker whose place "
        "this one takes?"
    ),
}
