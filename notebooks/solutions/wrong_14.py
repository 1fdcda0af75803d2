"""Wrong attempts at the tasks of lesson 14, and words that their verdict must contain."""

import time
from functools import partial

from solutions.lesson_14 import (
    check_number_the_ranks,
    number_the_ranks,
    what_to_change,
)

# --- Task 2 ---


def all_have_as_many(store, node, nodes, ranks_here):
    return node * ranks_here, nodes * ranks_here


def in_order_of_coming(store, node, nodes, ranks_here):
    first = store.add("ranks", ranks_here) - ranks_here
    store.set(f"{node} has come", "")
    store.wait([f"{other} has come" for other in range(nodes)])
    return first, store.add("ranks", 0)


def who_is_here_now(store, node, nodes, ranks_here):
    store.set(f"ranks on {node}", str(ranks_here))
    known = [other for other in range(nodes) if store.check([f"ranks on {other}"])]
    counts = {other: int(store.get(f"ranks on {other}")) for other in known}
    return sum(counts[other] for other in known if other < node), sum(counts.values())


def sleeps_then_counts(store, node, nodes, ranks_here):
    store.set(f"ranks on {node}", str(ranks_here))
    time.sleep(1)
    return who_is_here_now(store, node, nodes, ranks_here)


def counts_itself(store, node, nodes, ranks_here):
    first, world_size = number_the_ranks(store, node, nodes, ranks_here)
    return first + ranks_here, world_size


def numbers_machines(store, node, nodes, ranks_here):
    return node, nodes


def says_nothing_itself(store, node, nodes, ranks_here):
    counts = [int(store.get(f"ranks on {other}")) for other in range(nodes)]
    return sum(counts[:node]), sum(counts)


def only_the_first_rank(store, node, nodes, ranks_here):
    return number_the_ranks(store, node, nodes, ranks_here)[0]


# Checks for attempts that wait for who never comes: they have less patience.
IMPATIENT_NUMBERS = partial(check_number_the_ranks, deadline=2)

WRONG = {
    "rank_there": {
        "node rank times ranks here": (9, "the machines that come before it"),
        "node rank times ranks there": (7, "the machines that come before it"),
        "the local rank": (1, "the machines that come before it"),
        "counted from one": (7, "the machines that come before it"),
        "the node rank": (2, "the machines that come before it"),
    },
    "number_the_ranks": {
        "as many": (all_have_as_many, "with 2 + 1 ranks: machine 0 believes in a world of 4"),
        "in order of coming": (in_order_of_coming, "with 2 + 1 ranks: machine 0 begins with rank"),
        "who is here now": (who_is_here_now, "machine 0 believes in a world of 2"),
        "sleeps, then counts": (sleeps_then_counts, "machine 0 believes in a world of 2"),
        "counts itself": (counts_itself, "machine 0 begins with rank 2"),
        "numbers machines": (numbers_machines, "machine 0 believes in a world of 2"),
        "says nothing": (says_nothing_itself, "no answer after 2 s", IMPATIENT_NUMBERS),
        "the first rank only": (only_the_first_rank, "not two numbers"),
    },
    "what_to_change": {
        "nothing yet": (dict.fromkeys("ABC"), "nothing is said of job A"),
        "one word": (["--node-rank"], "a dictionary is wanted"),
        "no such word": (dict.fromkeys("ABC", "port"), "job A: take one of --nnodes"),
        "an address for all": (dict.fromkeys("ABC", "--master-addr"), "job A: that would look"),
        "a firewall": (what_to_change | {"B": "firewall"}, "job B: that would look different"),
        "a port": (what_to_change | {"C": "--master-port"}, "job C: that would look different"),
    },
}
