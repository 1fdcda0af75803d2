"""Wrong attempts at the tasks of lesson 14, and words that their verdict must contain."""

import time
from functools import partial

from solutions.lesson_14 import (
    check_flags_on,
    check_number_the_ranks,
    flags_on,
    number_the_ranks,
)

# --- Task 2 ---


def flags(nodes, node, ranks, address, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]


def as_given(machine, machines, ranks_here, first, own, port):
    return flags(1, 0, ranks_here, own, port)


def all_wrong(machine, machines, ranks_here, first, own, port):
    return flags(machines * ranks_here, machine + 1, ranks_here, own, port)


def own_address(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, ranks_here, own, port)


def counted_from_one(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine + 1, ranks_here, first, port)


def too_many_nodes(machine, machines, ranks_here, first, own, port):
    return flags(machines + 1, machine, ranks_here, first, port)


def backwards(machine, machines, ranks_here, first, own, port):
    return flags(machines, machines - 1 - machine, ranks_here, first, port)


def other_ports(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, ranks_here, first, port + machine)


def one_rank_each(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, 1, first, port)


def misspelt(machine, machines, ranks_here, first, own, port):
    return [f"--nodes={machines}", *flags_on(machine, machines, ranks_here, first, own, port)[1:]]


def by_c10d(machine, machines, ranks_here, first, own, port):
    return [*flags_on(machine, machines, ranks_here, first, own, port), "--rdzv-backend=c10d"]


def by_localhost(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, ranks_here, "127.0.0.1", port)


def by_any_address(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, ranks_here, "0.0.0.0", port)


def by_another_loopback(machine, machines, ranks_here, first, own, port):
    return flags(machines, machine, ranks_here, "127.1", port)


def no_address(machine, machines, ranks_here, first, own, port):
    right = flags_on(machine, machines, ranks_here, first, own, port)
    return [flag for flag in right if "master-addr" not in flag]


def alone(machine, machines, ranks_here, first, own, port):
    return [*flags_on(machine, machines, ranks_here, first, own, port), "--standalone"]


def other_endpoint(machine, machines, ranks_here, first, own, port):
    return [*flags_on(machine, machines, ranks_here, first, own, port), f"--rdzv-endpoint={own}:1"]


def other_names_of_the_job(machine, machines, ranks_here, first, own, port):
    right = flags_on(machine, machines, ranks_here, first, own, port)
    return [*right, f"--rdzv-id=machine{machine}"]


def right_with_underscores(machine, machines, ranks_here, first, own, port):
    """Not wrong: the spelling of the old launcher."""
    right = flags_on(machine, machines, ranks_here, first, own, port)
    return [flag.replace("node-rank", "node_rank").replace("master-", "master_") for flag in right]


# --- Task 3 ---


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
IMPATIENT = partial(check_flags_on, patience=1)
IMPATIENT_NUMBERS = partial(check_number_the_ranks, deadline=2)

RIGHT = {"flags_on": [right_with_underscores]}  # other right answers

WRONG = {
    "rank_there": {
        "node rank times ranks here": (9, "the machines that come before it"),
        "node rank times ranks there": (7, "the machines that come before it"),
        "the local rank": (1, "the machines that come before it"),
        "counted from one": (7, "the machines that come before it"),
        "the node rank": (2, "the machines that come before it"),
    },
    "flags_on": {
        "as given": (as_given, "machine 1 believes that it is node 0 of 1"),
        "all wrong": (all_wrong, "machine 0 says DistNetworkError: The client socket", IMPATIENT),
        "own address": (own_address, "1/2 clients joined", IMPATIENT),
        "from one": (counted_from_one, "machine 0 says DistNetworkError", IMPATIENT),
        "too many nodes": (too_many_nodes, "2/3 clients joined"),
        "backwards": (backwards, "machine 0 believes that it is node 1 of 2"),
        "other ports": (other_ports, "1/2 clients joined", IMPATIENT),
        "one rank each": (one_rank_each, "machine 0 would start 1 ranks, and not 2"),
        "misspelt": (misspelt, "torchrun refuses the flags"),
        "c10d": (by_c10d, "no --rdzv-backend"),
        "localhost": (by_localhost, "1/2 clients joined", IMPATIENT),
        "0.0.0.0": (by_any_address, "1/2 clients joined", IMPATIENT),
        "127.1": (by_another_loopback, "1/2 clients joined", IMPATIENT),
        "no address": (no_address, "1/2 clients joined", IMPATIENT),
        "standalone": (alone, "a job of this machine alone"),
        "other names": (
            other_names_of_the_job,
            "with 2 machines: machine 0 says DistStoreError",
            IMPATIENT,
        ),
        "other endpoint": (other_endpoint, "with 2 machines: machine 0 says", IMPATIENT),
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
}
