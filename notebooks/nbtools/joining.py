"""Ranks of run() that join anew: what comes of it, what they ask a store, and who calls whom."""

import os
import re
import socket
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from lockstep.run import OF_A_JOB

from nbtools.run import wait_for_all


def begin_anew():
    """On a rank of run(): leave its group, and be a process that was not told who it is.

    What the library logs, ports and times, goes nowhere.
    """
    dist.destroy_process_group()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for name in OF_A_JOB:
        os.environ.pop(name, None)


def try_to_join(number, count, arguments_of, seconds=1):
    """Be process `number`: call init_process_group; return (what came of it, seconds, rank).

    Its arguments are arguments_of(number).
    """
    begin_anew()
    arguments, begin = {"timeout": timedelta(seconds=seconds)} | arguments_of(number), time.time()
    try:
        dist.init_process_group("gloo", **arguments)
        dist.all_reduce(total := torch.tensor([number + 1]))
        said = f"we have met, the sum is {total.item()}"
        took = time.time() - begin
        wait_for_all(number, count)
    except Exception as error:
        took = time.time() - begin
        text = re.sub(r"\[/\S+\] ", "", str(error).splitlines()[0])  # a place in the C++ code
        said = f"{type(error).__name__}: " + re.sub(r"\d{5}", "...", text)  # a port
        wait_for_all(number, count)  # with the error goes the store: others may still ask it
    return said, took, arguments.get("rank")


def wait_for_process_0(number, port):
    """Return when process 0 listens: who calls before is refused, and calls again too late."""
    while number > 0 and socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.01)


def taking_notes(store):
    """Return a store that passes everything on, and its notes: (request, key, bytes)."""
    notes = []

    def passing_on(name):
        def request(self, keys, *values):
            answer = getattr(store, name)(keys, *values)
            data = answer if name == "get" else values[-1] if values else b""
            size = 0 if name == "wait" else len(data) if hasattr(data, "__len__") else 8
            notes.append((name, keys if isinstance(keys, str) else keys[0], size))
            return answer

        return request

    names = ("set", "get", "add", "compare_set", "wait")
    requests = {name: passing_on(name) for name in names}
    return type("Notes", (dist.Store,), requests)(), notes


def own_links():
    """Return the ports at which this process listens, and (own port, other port) of its calls."""
    found = psutil.Process().net_connections("tcp")
    listens = {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return listens, {(c.laddr.port, c.raddr.port) for c in found if c.raddr}


def calls(met, port):
    """Return who has called whom, as (caller, called) ranks: at the store's port, and elsewhere.

    met: what each rank has returned, the last of it its own_links().
    """
    listens, linked = zip(*(rank[-1] for rank in met), strict=True)
    owner = {ends: rank for rank, every in enumerate(linked) for ends in every}
    both = [(rank, owner[b, a], b) for (a, b), rank in owner.items() if (b, a) in owner]
    both = [(caller, called, at) for caller, called, at in both if at in listens[called]]
    to_store = sorted((caller, called) for caller, called, at in both if at == port)
    return to_store, sorted((caller, called) for caller, called, at in both if at != port)
