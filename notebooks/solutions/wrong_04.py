"""Wrong answers to the task of lesson 04, each with what the check must say about it."""

import os


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


WRONG = {
    "take_rank": {
        "from the environment": (from_the_environment, "got a RuntimeError; it must be 1"),
        "counted from 1": (counted_from_1, "the ranks are [1, 2], not each of [0, 1]"),
        "everybody is 0": (everybody_is_0, "the ranks are [0, 0]"),
        "as bytes": (as_bytes, "a rank must be an int"),
        "nobody is refused": (nobody_is_refused, "got a RuntimeError; it must be 1"),
    }
}
