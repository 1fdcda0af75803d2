"""Solutions of the tasks of lesson 04, and their checks."""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep
from unittest.mock import patch

import torch
import torch.distributed as dist
from nbtools import run

# --- Task 1: repair ---


def barrier(store, world_size):
    """Return when all ranks have called this as often as we have.

    The counter never goes back, so it tells the round as well: each round has a key of its own.
    """
    arrived = store.add("arrived", 1)
    number, last = divmod(arrived - 1, world_size)
    if last == world_size - 1:
        store.set(f"open {number}", "")
    store.wait([f"open {number}"])


class Counting(dist.PrefixStore):
    """A store that counts requests, and in which a wait that nobody ends is given up."""

    def __init__(self, store, patience):
        super().__init__("attempt", store)
        self.asked, self.patience, self.lock = 0, timedelta(seconds=patience), threading.Lock()
        self.waiting = 0  # ranks that are held by the store
        self.set_timeout(self.patience)

    def get(self, key):
        return self.hold(super().get, key)

    def wait(self, keys, limit=None):
        return self.hold(super().wait, keys, min(limit or self.patience, self.patience))

    def hold(self, method, *args):
        with self.lock:
            self.asked, self.waiting = self.asked + 1, self.waiting + 1
        try:
            return method(*args)
        finally:
            with self.lock:
                self.waiting -= 1


def counted(name):
    """Return a request that counts, and passes on to the PrefixStore's."""

    def request(self, *args):
        with self.lock:
            self.asked += 1
        return getattr(super(Counting, self), name)(*args)

    return request


for one in ("set", "add", "compare_set", "check", "multi_get", "multi_set", "delete_key"):
    setattr(Counting, one, counted(one))


def cross(attempt, world_size, rounds, patience):
    """Let ranks, which are threads here, cross the barrier; return what is wrong, or None."""
    store, came, wrong = Counting(dist.HashStore(), patience), [0] * world_size, []
    allowed = rounds * (2 * world_size + 1)

    def come_late(number):  # when all others wait at the store, however long they sleep before
        end = monotonic() + 5 * patience
        while store.waiting < world_size - 1 and not wrong and store.asked <= allowed:
            if monotonic() > end:
                wrong.append(f"in round {number + 1} a rank does not wait at the store")
            sleep(0.01)
        sleep(0.3)

    def be_a_rank(rank):
        for number in range(rounds):
            if rank == number % world_size:  # another one is late in each round
                come_late(number)
            came[rank] += 1
            attempt(store, world_size)
            if min(came) <= number:
                wrong.append(f"in round {number + 1} a rank went on before all had come")
            if wrong:
                return

    with ThreadPoolExecutor(world_size) as pool:
        ends = [pool.submit(be_a_rank, rank) for rank in range(world_size)]
        errors = [end.exception() for end in ends]
    error = next(filter(None, errors), None)
    if isinstance(error, NotImplementedError):
        raise error
    if wrong or error:
        return min(wrong) if wrong else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if store.asked > allowed:
        return f"{store.asked} requests to the store in {rounds} rounds; {allowed} are enough"
    return None


def check_barrier(attempt, patience=2):
    """Return None if nobody passes early in four rounds, with few requests, else a sentence."""
    for world_size in (2, 3, 5):
        if problem := cross(attempt, world_size, 4, patience):
            return f"with {world_size} ranks: {problem}"
    return None


# --- Task 2: predict ---

connections = 3 * (8 * 7 // 2)


def check_connections(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == connections:
        return None
    if guess == connections // 3:
        return "that is one of the groups"
    if guess == 2 * connections // 3:
        return "a pair has one connection in a group, and is in a group before you make any"
    return "count the pairs of ranks first, then the groups"


# --- Task 3: build ---


def take_rank(store, world_size):
    """Return a rank that no other process has: 0 to the first that comes, 1 to the next, ..."""
    rank = store.add("processes", 1) - 1  # add is atomic, and returns the new value
    if rank >= world_size:
        raise RuntimeError(f"all {world_size} ranks are taken")
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here" for other in range(world_size)])
    return rank


class Slow(dist.PrefixStore):
    """A store that pauses after each read, so that others read the same before this one writes."""

    def __init__(self, store, patience):
        super().__init__("attempt", store)
        self.set_timeout(timedelta(seconds=patience))
        self.held, self.in_vain, self.asked = False, False, 0.0

    def get(self, key):
        return self._pause(self._hold(super().get, key))

    def wait(self, *args):
        return self._hold(super().wait, *args)

    def multi_get(self, keys):
        return self._pause(super().multi_get(keys))

    def check(self, keys):
        return self._pause(super().check(keys))

    def add(self, key, amount):
        value = super().add(key, amount)
        return value if amount else self._pause(value)

    def _hold(self, method, *args):
        self.held = True
        try:
            return method(*args)
        except RuntimeError:
            self.in_vain = True
            raise
        finally:
            self.held = False

    def _pause(self, answer):
        self.asked = monotonic()
        sleep(0.1)
        return answer

    def is_waiting(self):
        """Return whether the store holds its user, or was asked by it just now: again and again."""
        return self.held or monotonic() - self.asked < 0.5


def deal(attempt, world_size, processes, patience):
    """Let threads play the processes; return (answers, whether one had its rank too early).

    Half of them are on another machine, where the same process ids are given away again.
    """
    shared, answers, numbers = dist.HashStore(), {}, {}
    stores = [Slow(shared, patience) for _ in range(processes)]

    def come_late():  # when all others have waited at the store for a while
        begin = since = monotonic()
        while not answers and monotonic() - since < 1 and monotonic() - begin < 10:
            if not all(store.is_waiting() for store in stores[:-1]):
                since = monotonic()
            sleep(0.01)
        early.extend(answers)

    def come(index):
        numbers[threading.get_ident()] = 1000 - index // 2
        if index == processes - 1 and processes == world_size:
            come_late()
        try:
            answers[index] = attempt(stores[index], world_size)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            how = " after a wait in vain" if stores[index].in_vain else ""
            answers[index] = f"RuntimeError{how}: {error}"

    early = []
    unwilling = patch("time.sleep", lambda seconds: sleep(min(seconds, 0.02)))  # it is no waiting
    ids = patch.object(os, "getpid", lambda: numbers.get(threading.get_ident(), 1))
    with unwilling, ids, ThreadPoolExecutor(processes) as pool:
        ends = [pool.submit(come, index) for index in range(processes)]
        for end in ends:
            end.result()
    return [answers[index] for index in range(processes)], bool(early)


def wrong_deal(answers, early, world_size):
    """Return what is wrong with the answers of these processes, or None."""
    place = f"when {len(answers)} processes come for a world of {world_size},"
    refused = [answer for answer in answers if str(answer).startswith("RuntimeError")]
    surplus = len(answers) - world_size
    if len(refused) != surplus:
        same = "perhaps two read the same number before either wrote; "
        return (
            f"{place} {len(refused)} got a RuntimeError; it must be {surplus}: "
            f"{same if len(refused) > surplus else ''}the answers were {sorted(map(str, answers))}"
        )
    if any("after a wait in vain" in answer for answer in refused):
        return f"{place} one waited for a key that nobody sets, and must be refused at once"
    given = [answer for answer in answers if answer not in refused]
    if any(type(rank) is not int for rank in given):
        return f"{place} a rank must be an int, not {given[0]!r}"
    if sorted(given) != list(range(world_size)):
        return f"{place} the ranks are {sorted(given)}, not each of {list(range(world_size))}"
    return f"{place} one returned a rank before the last process had come" if early else None


def join_with(index, world_size, attempt, path):
    """Take a rank in a real process, join the group with it, and add up 2 ** rank."""
    dist.destroy_process_group()
    store = dist.FileStore(path, world_size)
    rank = attempt(dist.PrefixStore("attempt", store), world_size)
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size)
    total = torch.tensor([2**rank])
    dist.all_reduce(total)
    return total.item()


def check_take_rank(attempt, patience=5):
    """Return None if the attempt is right in worlds of 2, 3 and 5, else one sentence about it.

    Then one process too many comes: it must be refused, and the others must not be disturbed.
    """
    for world_size in (2, 3, 5):
        for processes in (world_size, world_size + 1):
            if problem := wrong_deal(*deal(attempt, world_size, processes, patience), world_size):
                return problem
    with tempfile.TemporaryDirectory() as folder:
        sums = run(join_with, 3, attempt, f"{folder}/store", deadline=30)
    return None if sums == [7] * 3 else f"three real processes got the sums {sums} by their ranks"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "barrier": (check_barrier, barrier),
    "connections": (check_connections, connections),
    "take_rank": (check_take_rank, take_rank),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "barrier": (
        "The counter goes on rising. What does dividing it by the world size tell a rank about "
        "the round it is in, and which key should it wait for?"
    ),
    "connections": (
        "Gloo opens one connection for each pair of ranks, and does so again for every group. "
        "How many pairs do eight ranks have?"
    ),
    "take_rank": (
        "Two processes may come in the same instant: which operation of the store reads and "
        'changes a number in one step? For "when all have come", think of the barrier.'
    ),
}
