"""Solutions of the tasks of lesson 14, and their checks."""

import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from nbtools import RankFailed, run

# --- Task 1: predict ---

rank_there = 3 + 2 + 1


def check_rank_there(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == rank_there:
        return None
    return "count the processes of the machines that come before it"


# --- Task 2: build ---


def number_the_ranks(store, node, nodes, ranks_here):
    """Return (the first rank of this machine, the world size)."""
    store.set(f"ranks on {node}", str(ranks_here))
    counts = [int(store.get(f"ranks on {other}")) for other in range(nodes)]  # get waits
    return sum(counts[:node]), sum(counts)


class SharedStore(dist.FileStore):
    """The launchers' store, in which each machine says when it waits for another."""

    def __init__(self, path, nodes, node):
        super().__init__(path, nodes)
        self.node = node

    def says(self, node, words):
        return self.check([f"{node} {words}"])

    def get(self, key):
        self.set(f"{self.node} waits", "")
        return super().get(key)

    def wait(self, keys, *limit):
        self.set(f"{self.node} waits", "")
        return super().wait(keys, *limit)


def examine_number_the_ranks(node, nodes, attempt, path, ranks_on, order):
    """Be the launcher of one machine; return what the attempt says.

    It comes when those before it wait for it, or have gone: however long they slept.
    """
    store = SharedStore(path, nodes, node)
    before, end = order[: order.index(node)], time.monotonic() + 10
    while not all(store.says(other, "waits") or store.says(other, "is done") for other in before):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    answer = attempt(store, node, nodes, ranks_on[node])
    store.set(f"{node} is done", "")
    return answer


def check_number_the_ranks(attempt, deadline=20):
    """Return None if the attempt numbers the ranks of 2 and 3 machines, else what is wrong."""
    for ranks_on, order in (([2, 2], [0, 1]), ([2, 1], [1, 0]), ([1, 3, 2], [2, 0, 1])):
        nodes = len(ranks_on)
        where = f"with {' + '.join(map(str, ranks_on))} ranks"
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "store"))
            try:
                examine = (examine_number_the_ranks, nodes, attempt, path, ranks_on, order)
                answers = run(*examine, deadline=deadline)
            except RankFailed as error:
                if "NotImplementedError" in str(error):
                    raise
                return f"{where}: {error}"
        for node, answer in enumerate(answers):
            if not isinstance(answer, tuple) or len(answer) != 2:
                return f"{where}: machine {node} returned {answer!r:.40}, not two numbers"
            if answer[1] != sum(ranks_on):
                return f"{where}: machine {node} believes in a world of {answer[1]}"
            if answer[0] != sum(ranks_on[:node]):
                return f"{where}: machine {node} begins with rank {answer[0]}"
    return None


# --- Task 3: find the mistake ---

CAUSES = ("--nnodes", "--node-rank", "--master-addr", "--master-port")
CAUSES += ("GLOO_SOCKET_IFNAME", "firewall")

# A: nobody says how many clients have come, so nobody holds the store: no machine is node 0.
# B: the launchers have met, and gloo has offered 172.17.0.1, which is docker's own on each machine.
# C: machine 1 looks for the store at its own address.
what_to_change = {"A": "--node-rank", "B": "GLOO_SOCKET_IFNAME", "C": "--master-addr"}


def check_what_to_change(guess):
    """Return None if all three are right, else a hint to the first that is not."""
    if not isinstance(guess, dict) or guess.keys() != what_to_change.keys():
        return "a dictionary is wanted, with a word for each of A, B and C"
    for job, cause in what_to_change.items():
        if guess[job] is None:
            return f"nothing is said of job {job}"
        if guess[job] not in CAUSES:
            return f"job {job}: take one of {', '.join(CAUSES)}"
        if guess[job] != cause:
            return f"job {job}: that would look different"
    return None


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "rank_there": (check_rank_there, rank_there),
    "number_the_ranks": (check_number_the_ranks, number_the_ranks),
    "what_to_change": (check_what_to_change, what_to_change),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "rank_there": (
        "The launchers number the processes machine by machine, and ranks and local ranks both "
        "begin at 0. How many processes have got their number before this one?"
    ),
    "number_the_ranks": (
        "What must each launcher write down for the others before it can know anything itself, "
        "and under which key will they find it? Of all the numbers, which ones lie before this "
        "machine's first rank?"
    ),
    "what_to_change": (
        "Only who holds the store counts clients: which machine should do that, and does it? "
        "Then compare each address in the logs with the two that the table's machines have."
    ),
}
