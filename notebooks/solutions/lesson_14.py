"""Solutions of the tasks of lesson 14, and their checks."""

import contextlib
import io
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from lockstep import network
from nbtools import RankFailed, free_ports, run

# --- Task 1: predict ---

rank_there = 3 + 2 + 1


def check_rank_there(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == rank_there:
        return None
    return "count the processes of the machines that come before it"


# --- Task 2: repair ---


def flags_on(machine, machines, ranks_here, first, own, port):
    """Return what torchrun is told on this machine."""
    return [
        f"--nnodes={machines}",  # of machines, not of ranks
        f"--node-rank={machine}",  # from 0
        f"--nproc-per-node={ranks_here}",
        f"--master-addr={first}",  # where machine 0 is, on all machines
        f"--master-port={port}",
    ]


def parse(flags):
    """Return the flags as torchrun reads them, or one line that says what it does not like."""
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return get_args_parser().parse_args([*map(str, flags), "train.py"])
    except SystemExit:
        return f"torchrun refuses the flags: {said.getvalue().strip().splitlines()[-1]}"


def means_this_machine(host, addresses):
    """Return whether a name means, on each machine, the machine itself: localhost, 127.1, 0.0.0.0.

    Our machines have addresses of that kind, too: these are taken for addresses of a network.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    itself = network.is_loopback(address) or address == "0.0.0.0"
    return itself and address not in addresses


def meet(machine, machines, told, addresses, patience):
    """Be a launcher, up to the moment when it has met the others; return (number, of how many)."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the store writes a page about each failure
    network.let_stores_listen_at_one_address()
    node, nodes, endpoint, job = told[machine]
    host, colon, port = endpoint.rpartition(":")
    if addresses[0] != "127.0.0.1" and means_this_machine(host, addresses):
        endpoint = addresses[machine] + colon + port
    options = {"rank": node, "timeout": patience}
    dist.barrier()  # nobody waits while another process is still being started
    try:
        place = RendezvousParameters("static", endpoint, job, nodes, nodes, **options)
        handler = create_rdzv_handler(place)
        met = handler.next_rendezvous()
        met.store.set(f"machine {met.rank} is here", "")
        for other in range(met.world_size):
            met.store.get(f"machine {other} is here")
        answer = met.rank, met.world_size
    except Exception as error:
        text = re.sub(r", [0-9]+\)", ", its port)", str(error).splitlines()[0])
        answer = f"{type(error).__name__}: {re.sub('after [0-9]+ ?(seconds|ms)', 'in vain', text)}"
    dist.barrier()  # who holds the store stays until all have found out
    return answer


def check_flags_on(attempt, patience=2):
    """Return None if the machines find each other, with 2 and with 3 of them.

    A machine waits `patience` seconds for the others, and then gives up.
    """
    from torch.distributed.run import get_rdzv_endpoint

    for ranks_on in ([2, 2], [1, 3, 2]):
        machines, (port,) = len(ranks_on), free_ports(1)
        last = 2 if sys.platform == "linux" else 1  # a Mac has only 127.0.0.1
        addresses = [f"127.0.0.{machine + last}" for machine in range(machines)]
        told = []
        for machine, own in enumerate(addresses):
            place = (machine, machines, ranks_on[machine], addresses[0], own, port)
            arguments = parse(attempt(*place))
            if isinstance(arguments, str):
                return arguments
            if arguments.standalone:
                return "--standalone makes a job of this machine alone, whatever else is said"
            if arguments.rdzv_backend != "static":
                return "here the machines are numbered by hand: no --rdzv-backend"
            if arguments.nproc_per_node != str(ranks_on[machine]):
                wanted = f"{arguments.nproc_per_node} ranks, and not {ranks_on[machine]}"
                return f"with {machines} machines: machine {machine} would start {wanted}"
            nodes = int(arguments.nnodes.split(":")[-1])
            job = arguments.rdzv_id  # a part of each key in the store
            told.append((arguments.node_rank, nodes, get_rdzv_endpoint(arguments), job))
        answers = run(meet, machines, told, addresses, patience, deadline=60)
        if answers != [(machine, machines) for machine in range(machines)]:
            said = "; ".join(describe(machine, answer) for machine, answer in enumerate(answers))
            return f"with {machines} machines: {said}"
    return None


def describe(machine, answer):
    """Return what a launcher said, in words."""
    if isinstance(answer, tuple):
        return f"machine {machine} believes that it is node {answer[0]} of {answer[1]}"
    return f"machine {machine} says {answer}"


# --- Task 3: build ---


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


# What test_contract.py asks: (check, solution) of each task.
TASKS = {
    "rank_there": (check_rank_there, rank_there),
    "flags_on": (check_flags_on, flags_on),
    "number_the_ranks": (check_number_the_ranks, number_the_ranks),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "rank_there": (
        "The launchers number the processes machine by machine, and ranks and local ranks both "
        "begin at 0. How many processes have got their number before this one?"
    ),
    "flags_on": (
        "Ask of each flag whether it is about the whole job or about this machine. Then compare "
        "with the two lines that were printed above: what is the same on both machines, and what "
        "differs?"
    ),
    "number_the_ranks": (
        "What must each launcher write down for the others before it can know anything itself, "
        "and under which key will they find it? Of all the numbers, which ones lie before this "
        "machine's first rank?"
    ),
}
