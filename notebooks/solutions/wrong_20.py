"""Wrong attempts at the tasks of lesson 20, and words that their verdict must contain."""

import random

import numpy as np
import torch
import torch.distributed as dist
from solutions.lesson_20 import Faulty, Repaired, numbers_of_row
from torch.utils.data import get_worker_info

# --- Task 2 ---


def by_sum(seed, epoch, row):
    return np.random.default_rng(seed + epoch + row).random(3).tolist()


def by_digits(seed, epoch, row):
    return np.random.default_rng(seed * 10**6 + epoch * 1000 + row).random(3).tolist()


def by_low_bits(seed, epoch, row):
    return numbers_of_row(seed, epoch, row & 127)


def by_row_alone(seed, epoch, row):
    return np.random.default_rng([seed, row]).random(3).tolist()


def by_text_without_gaps(seed, epoch, row):
    draw = random.Random(f"{seed}{epoch}{row}").random
    return [draw(), draw(), draw()]


def by_seeding_everybody(seed, epoch, row):
    torch.manual_seed(1_000_000 * seed + 1000 * epoch + row)
    return torch.rand(3).tolist()


def by_the_shared_one(seed, epoch, row):
    return [np.random.default_rng().random() for _ in range(3)]


def by_worker(seed, epoch, row):
    worker = get_worker_info()
    return numbers_of_row(seed, epoch, row + 1000 * (worker.id if worker else 0))


def by_rank(seed, epoch, row):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return numbers_of_row(seed, epoch, row + 1000 * rank)


def three_times_one(seed, epoch, row):
    return numbers_of_row(seed, epoch, row)[:1] * 3


def two_numbers(seed, epoch, row):
    return numbers_of_row(seed, epoch, row)[:2]


def not_uniform(seed, epoch, row):
    return [number / 10 for number in numbers_of_row(seed, epoch, row)]


def right_by_a_text(seed, epoch, row):
    draw = random.Random(f"{seed} {epoch} {row}").random
    return [draw(), draw(), draw()]


def right_by_torch(seed, epoch, row):
    generator = torch.Generator().manual_seed(hash((seed, epoch, row)))
    return torch.rand(3, generator=generator, dtype=torch.float64).tolist()


def right_as_a_tensor(seed, epoch, row):
    generator = torch.Generator().manual_seed(hash((seed, epoch, row)))
    return torch.rand(3, generator=generator)


def right_as_an_array(seed, epoch, row):
    return np.random.default_rng([seed, epoch, row]).random(3, dtype=np.float32)


# --- Task 3 ---


def without_turning(rows, batch_size, taken, worker, workers):
    given = -(-(taken - worker) // workers)
    return rows[worker::workers][given * batch_size :]


def all_the_same(rows, batch_size, taken, worker, workers):
    return rows[worker::workers][taken // workers * batch_size :]


def skips_batches_in_each(rows, batch_size, taken, worker, workers):
    return rows[worker::workers][taken * batch_size :]


def deals_the_rest_anew(rows, batch_size, taken, worker, workers):
    return rows[taken * batch_size :][worker::workers]


def turned_the_other_way(rows, batch_size, taken, worker, workers):
    was = (worker - taken) % workers
    given = -(-(taken - was) // workers)
    return rows[was::workers][given * batch_size :]


def turned_too_far(rows, batch_size, taken, worker, workers):
    was = (worker + taken**3) % workers
    given = -(-(taken - was) // workers)
    return rows[was::workers][given * batch_size :]


def from_the_start(rows, batch_size, taken, worker, workers):
    return rows[worker::workers]


def right_by_counting(rows, batch_size, taken, worker, workers):
    """Ask for each batch who gave it."""
    was = (worker + taken) % workers
    given = sum(batch % workers == was for batch in range(taken))
    return rows[was::workers][given * batch_size :]


# --- Task 4 ---


class OnlyWorkers(Faulty):
    def __iter__(self):
        order = random.Random(self.epoch).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(order[mine :: dist.get_world_size() * workers])


class OnlyEpochs(Repaired):
    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        return iter(order[dist.get_rank() :: dist.get_world_size()])


class CountsItself(OnlyWorkers):
    """The worker counts its epochs: right for workers that live on, from epoch 0."""

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        found = super().__iter__()
        self.epoch += 1
        return found


class UnseededOrder(Repaired):
    def __iter__(self):
        random.shuffle(self.rows)
        self.rows.sort(key=lambda row: random.random())
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(self.rows[mine :: dist.get_world_size() * workers])


class NotShuffled(Repaired):
    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(self.rows[mine :: dist.get_world_size() * workers])


class NeedsWorkers(Repaired):
    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        mine = dist.get_rank() * worker.num_workers + worker.id
        return iter(order[mine :: dist.get_world_size() * worker.num_workers])


class SeedsEverybody(Repaired):
    """All workers augment alike from here on."""

    def __iter__(self):
        random.seed(self.epoch.item())
        self.rows.sort()
        random.shuffle(self.rows)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(self.rows[mine :: dist.get_world_size() * workers])


class ShufflesItsOwn(Repaired):
    """Rows are dealt once, and each worker shuffles its own."""

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        own = self.rows[mine :: dist.get_world_size() * workers]
        return iter(random.Random(self.epoch.item()).sample(own, len(own)))


class Rotates(Repaired):
    def __iter__(self):
        first = 7 * self.epoch.item() + 7
        order = self.rows[first:] + self.rows[:first]
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = dist.get_rank() * workers + number
        return iter(order[mine :: dist.get_world_size() * workers])


class CutsEnd(Repaired):
    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        size = len(order) // (dist.get_world_size() * workers)
        mine = dist.get_rank() * workers + number
        return iter(order[mine * size : (mine + 1) * size])


class WithoutRanks(Repaired):
    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(order[number::workers])


class WithOverlap(Repaired):
    """Rank and worker are added: worker 1 of rank 0 is worker 0 of rank 1."""

    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(order[dist.get_rank() + number :: dist.get_world_size() * workers])


class RightInBlocks(Repaired):
    """Ranks first, then workers."""

    def __iter__(self):
        order = random.Random(self.epoch.item()).sample(self.rows, len(self.rows))
        worker = get_worker_info()
        mine = order[dist.get_rank() :: dist.get_world_size()]
        return iter(mine[worker.id :: worker.num_workers] if worker else mine)


# Other right answers.
RIGHT = {
    "numbers_of_row": [
        right_by_a_text,
        right_by_torch,
        right_as_a_tensor,
        right_as_an_array,
    ],
    "rows_left": [right_by_counting],
    "Job": [RightInBlocks],
}

WRONG = {
    "rows_left_out": {
        "each rank makes batches": (40, "if each rank made its batches itself"),
        "one process makes batches": (8, "if one process made all batches"),
        "one worker": (29, "that is one worker's loss"),
        "nothing": (0, "how many rows does one worker read"),
    },
    "numbers_of_row": {
        "a sum": (by_sum, "draw the same numbers"),
        "decimal digits": (by_digits, "draw the same numbers"),
        "the lowest bits of the row": (by_low_bits, "draw the same numbers"),
        "the same in each epoch": (by_row_alone, "draw the same numbers"),
        "a text without gaps": (by_text_without_gaps, "draw the same numbers"),
        "seeds everybody": (by_seeding_everybody, "changes the state of a generator"),
        "a generator without a seed": (by_the_shared_one, "asked a second time"),
        "by worker": (by_worker, "has other numbers in a worker"),
        "by rank": (by_rank, "has other numbers in a worker"),
        "one number": (three_times_one, "know each other"),
        "two numbers": (two_numbers, "three numbers from 0 to 1"),
        "not uniform": (not_uniform, "not 0.5"),
    },
    "rows_left": {
        "worker 0 is worker 0": (without_turning, "next come the right rows in other batches"),
        "all gave as many": (all_the_same, "taken = 1: next come other rows"),
        "each skips all": (skips_batches_in_each, "next come other rows"),
        "deals the rest anew": (deals_the_rest_anew, "next come other rows"),
        "turned the other way": (
            turned_the_other_way,
            "with 3 workers, taken = 1: next come the right rows",
        ),
        "turned too far": (
            turned_too_far,
            "with 4 workers, taken = 2: next come the right rows in",
        ),
        "from the start": (from_the_start, "with 1 worker, taken = 1: next come other rows"),
    },
    "Job": {
        "as given": (Faulty, "1 worker, kept alive, on each rank: the order of an epoch"),
        "split by worker only": (OnlyWorkers, "the order of an epoch is that of the one before"),
        "epochs only": (OnlyEpochs, "2 workers, kept alive, on each rank: 72 of 72 rows come"),
        "counts its epochs": (CountsItself, "the order of epoch 1"),
        "each its own order": (UnseededOrder, "0 workers on each rank: "),
        "not shuffled": (NotShuffled, "the order of an epoch is that of the one before"),
        "seeds everybody": (SeedsEverybody, "changes the state of a generator"),
        "shuffles its own": (ShufflesItsOwn, "a rank gets the same rows in each epoch"),
        "rotates": (Rotates, "most rows come after the same row"),
        "cuts the end": (CutsEnd, "72 of 73 rows come in epoch 0"),
        "needs workers": (NeedsWorkers, "AttributeError"),
        "without ranks": (WithoutRanks, "one of them 2 times"),
        "rank and worker added": (WithOverlap, "of 72 rows come in epoch 0, one of them"),
    },
}
