"""Wrong answers to the task of lesson 04, each with what the check must say about it."""

import os
import time
from functools import partial

from solutions.lesson_04 import check


def from_the_environment(store, world_size):
    return int(os.environ["RANK"])


def counted_from_1(store, world_size):
    rank = store.add("processes", 1)
    if rank > world_size:
        raise RuntimeError("too many")
    return rank


def everybody_is_0(store, world_size):
    return 0


def as_bytes(store, world_size):
    if store.add("processes", 1) > world_size:
        raise RuntimeError("too many")
    return store.get("processes")


def nobody_is_refused(store, world_size):
    return (store.add("processes", 1) - 1) % world_size


def waits_for_nobody(store, world_size):
    rank = store.add("processes", 1) - 1
    if rank >= world_size:
        raise RuntimeError("too many")
    return rank


def sleeps(store, world_size):
    rank = waits_for_nobody(store, world_size)
    time.sleep(1.5)
    return rank


def waits_for_itself(store, world_size):
    rank = waits_for_nobody(store, world_size)
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {rank} is here"])
    return rank


def reads_then_writes(store, world_size):
    rank = int(store.get("processes")) if store.check(["processes"]) else 0
    if rank >= world_size:
        raise RuntimeError("too many")
    store.set("processes", str(rank + 1))
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here" for other in range(world_size)])
    return rank


def asks_again_and_again(store, world_size):
    rank = waits_for_nobody(store, world_size)
    while store.add("processes", 0) < world_size:
        time.sleep(0.05)
    return rank


IMPATIENT = partial(check, patience=3)  # for an attempt that waits for who never comes

WRONG = {
    "take_rank": {
        "from the environment": (from_the_environment, "got a RuntimeError; it must be 1"),
        "counted from 1": (counted_from_1, "the ranks are [1, 2], not each of [0, 1]"),
        "everybody is 0": (everybody_is_0, "the ranks are [0, 0]"),
        "as bytes": (as_bytes, "a rank must be an int"),
        "nobody is refused": (nobody_is_refused, "got a RuntimeError; it must be 1"),
        "waits for nobody": (waits_for_nobody, "before the last process had come"),
        "sleeps": (sleeps, "before the last process had come"),
        "waits for itself": (waits_for_itself, "before the last process had come"),
        "reads, then writes": (
            reads_then_writes,
            "two read the same number before either wrote",
            IMPATIENT,
        ),
    }
}

RIGHT = {"take_rank": [asks_again_and_again]}
