"""One rank of the doctor, as torchrun has started it: on this machine alone, or on several."""

import contextlib
import io
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from lockstep import ending
from lockstep.doctor import machine, machines, methods, pairs
from lockstep.doctor.row import Row


def main(timeout, report):
    """Be one rank; return the exit code, the same on all. One rank alone tells the report."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, speaks = None, os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        store = open_store(rank, world_size, timeout)
        rows, speaks = examine(pairs.Peers(store, rank, world_size, timeout))
    except Exception as error:
        text = f"rank {rank} on {machines.my_name()}: {machine.first_line(error)}"
        cure = "on that machine: bash scripts/doctor.sh, without torchrun, says more"
        rows = [Row("ranks", "not ok", text, cure)]
    with contextlib.redirect_stdout(sys.stdout if speaks else io.StringIO()):
        report.tell(rows)
        code = report.end()
    if store:
        leave(store, rank, world_size, speaks)
    if "LOCKSTEP_ENDS" not in os.environ:
        ending.leave_with(code)  # as rank.py does it: a group that has failed may keep threads
    return code


def open_store(rank, world_size, timeout):
    """Return the store at MASTER_ADDR: torchrun's own, or one that rank 0 opens there."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = {"wait_for_workers": False, "multi_tenant": True}
    store = dist.TCPStore(address, port, world_size, opens, timedelta(seconds=timeout), **options)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def examine(peers):
    """Return (rows, whether this rank is to tell them)."""
    by_doctor = "LOCKSTEP_ENDS" in os.environ and "LOCKSTEP_NODES" not in os.environ
    rows = []
    peers.store.set(f"machine/{peers.rank}", machines.my_name())
    try:
        if by_doctor:  # it has looked at the machine itself, and wants to know about its ranks
            folder = os.environ["LOCKSTEP_ENDS"]
            rows = [methods.meet(peers, method, folder) for method in methods.METHODS]
        everyone, found = pairs.look_at_pairs(peers, machines.my_facts(peers.world_size))
    except pairs.Missing as missing:
        return [peers.row_of(missing)], peers.store.add("speaker", 1) == 1
    if not by_doctor:
        rows = machines.compare(everyone)
        found.append(machines.not_tried(everyone))
    return rows + found, peers.rank == 0


def leave(store, rank, world_size, speaks):
    """Return when this rank may end. Rank 0, which may hold the store, does so last.

    First the report is told: torchrun ends all ranks when one has ended with exit code 1.
    """
    try:
        if speaks:
            store.set("told", "")
        store.wait(["told"], timedelta(seconds=10))
        store.add("left", 1)
        end = time.monotonic() + 5
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError:
        pass  # the store has gone, and everybody with it
