"""Wrong attempts at the tasks of lesson 04, and words that their verdict must contain."""

import os
import time
from functools import partial

from solutions.lesson_04 import check_barrier, check_take_rank

SLEEP = time.sleep  # as with `from time import sleep`: no check can make it shorter

# --- Task 1 ---


def as_given(store, world_size):
    if store.add("arrived", 1) == world_size:
        store.set("open", "")
    store.wait(["open"])


def clears_up(store, world_size):
    if store.add("arrived", 1) == world_size:
        store.set("arrived", "0")
        store.set("open", "")
    store.wait(["open"])
    store.delete_key("open")


def asks_again(store, world_size):
    number = (store.add("arrived", 1) - 1) // world_size
    while store.add("arrived", 0) < (number + 1) * world_size:
        time.sleep(0.001)


def waits_for_each(store, world_size):
    arrived = store.add("arrived", 1)
    number = (arrived - 1) // world_size
    store.set(f"arrived {arrived}", "")
    for other in range(world_size):
        store.wait([f"arrived {number * world_size + other + 1}"])


def counts_in_itself(store, world_size, seen=[0]):  # noqa: B006
    seen[0] += 1
    number = (seen[0] - 1) // world_size
    if store.add(f"arrived {number}", 1) == world_size:
        store.set(f"open {number}", "")


def adds_then_sleeps(store, world_size):
    store.add("arrived", 1)
    SLEEP(1)


def sleeps_too_long(store, world_size):
    store.add("arrived", 1)
    SLEEP(4)


# --- Task 3 ---


def meet(store, rank, count):
    """Say that this rank is here, and wait for so many."""
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here" for other in range(count)])


def from_the_environment(store, world_size):
    return int(os.environ["RANK"]) if "RANK" in os.environ else 0


def by_process_id(store, world_size):
    number = waits_for_nobody(store, world_size) + 1
    store.set(f"id {number}", str(os.getpid()))
    store.wait([f"id {other + 1}" for other in range(world_size)])
    ids = sorted(int(store.get(f"id {other + 1}")) for other in range(world_size))
    return ids.index(os.getpid())


def waits_for_three(store, world_size):
    rank = waits_for_nobody(store, world_size)
    meet(store, rank, min(world_size, 3))
    return rank


def counted_from_1(store, world_size):
    return waits_for_nobody(store, world_size) + 1


def everybody_is_0(store, world_size):
    return 0


def as_bytes(store, world_size):
    waits_for_nobody(store, world_size)
    return store.get("processes")


def nobody_is_refused(store, world_size):
    rank = (store.add("processes", 1) - 1) % world_size
    meet(store, rank, world_size)
    return rank


def waits_for_nobody(store, world_size):
    rank = store.add("processes", 1) - 1
    if rank >= world_size:
        raise RuntimeError("too many")
    return rank


def sleeps(store, world_size):
    rank = waits_for_nobody(store, world_size)
    SLEEP(1.5)
    return rank


def waits_in_vain(store, world_size):
    rank = store.add("processes", 1) - 1
    meet(store, rank, world_size)
    if rank >= world_size:
        store.wait(["a place is free"])
    return rank


def reads_then_writes(store, world_size):
    rank = int(store.get("processes")) if store.check(["processes"]) else 0
    if rank >= world_size:
        raise RuntimeError("too many")
    store.set("processes", str(rank + 1))
    meet(store, rank, world_size)
    return rank


def asks_again_and_again(store, world_size):
    rank = waits_for_nobody(store, world_size)
    while store.add("processes", 0) < world_size:
        time.sleep(0.05)
    return rank


def the_last_need_not_wait(store, world_size):
    number, place = divmod(store.add("arrived", 1) - 1, world_size)
    if place == world_size - 1:
        store.set(f"open {number}", "")
    else:
        store.get(f"open {number}")


IMPATIENT = partial(check_take_rank, patience=3)  # for one that waits for who never comes
EARLY = "before the last process had come"

WRONG = {
    "barrier": {
        "as given": (as_given, "in round 2 a rank went on before all had come"),
        "clears up": (clears_up, "not yet"),
        "asks again and again": (asks_again, "requests to the store in 4 rounds"),
        "waits for each in turn": (waits_for_each, "are enough"),
        "does not wait": (counts_in_itself, "went on before all had come"),
        "adds, then sleeps": (adds_then_sleeps, "went on before all had come"),
        "sleeps too long": (
            sleeps_too_long,
            "a rank does not wait at the store",
            partial(check_barrier, patience=0.5),
        ),
    },
    "take_rank": {
        "from the environment": (from_the_environment, "the ranks are [0, 0]"),
        "by process id": (by_process_id, "not each of"),
        "waits for three": (waits_for_three, f"world of 5, one returned a rank {EARLY}"),
        "counted from 1": (counted_from_1, "the ranks are [1, 2], not each of [0, 1]"),
        "everybody is 0": (everybody_is_0, "the ranks are [0, 0]"),
        "as bytes": (as_bytes, "a rank must be an int"),
        "nobody is refused": (nobody_is_refused, "got a RuntimeError; it must be 1"),
        "waits for nobody": (waits_for_nobody, EARLY),
        "sleeps": (sleeps, EARLY),
        "waits in vain": (waits_in_vain, "waited for a key that nobody sets", IMPATIENT),
        "reads, then writes": (
            reads_then_writes,
            "two read the same number before either wrote",
            IMPATIENT,
        ),
    },
    "connections": {
        "one group": (28, "one of the groups"),
        "both ways in one group": (56, "a pair has one connection in a group"),
        "each end": (168, "count the pairs"),
    },
}

RIGHT = {"barrier": [the_last_need_not_wait], "take_rank": [asks_again_and_again]}
