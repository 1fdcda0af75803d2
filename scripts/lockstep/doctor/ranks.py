"""One rank of the doctor, as torchrun has started it: on this machine alone, or on several."""

import contextlib
import json
import os
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lockstep import ending
from lockstep.doctor import machine, machines, pairs
from lockstep.doctor.report import Report, Row


def main(timeout, as_json):
    """Be one rank; return the exit code, the same on all. One rank alone tells the report."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    known = os.environ.get("LOCKSTEP_ROWS")  # what the doctor has seen, if there is one machine
    store, speaks = None, os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        store = open_store(rank, world_size, timeout)
        rows, speaks = examine(Peers(store, rank, world_size, timeout), on_several=not known)
    except Exception as error:
        text = f"rank {rank} on {machines.my_name()}: {machine.first_line(error)}"
        cure = "on that machine: bash scripts/doctor.sh, without torchrun, says more"
        rows = [Row("ranks", "not ok", text, cure)]
    report = Report(as_json, [Row(*fields) for fields in json.loads(known or "[]")], speaks)
    report.tell(rows)
    code = report.end()
    if store:
        leave(store, world_size)
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


def examine(peers, on_several):
    """Return (rows, whether this rank is to tell them)."""
    try:
        everyone, rows = pairs.look_at_pairs(peers, machines.my_facts(on_several))
    except Missing as missing:
        return [peers.row_of(missing)], peers.rank == missing.args[0][0]
    if on_several:
        rows = [*machines.compare(everyone), *rows, machines.not_tried()]
    return rows, peers.rank == 0


def leave(store, world_size):
    """Return when all ranks may end: torchrun ends the others when one ends with exit code 1."""
    end = time.monotonic() + 10
    with contextlib.suppress(RuntimeError):  # the store has gone, and who held it was the last
        store.add("left", 1)
        while store.add("left", 0) < world_size and time.monotonic() < end:
            time.sleep(0.05)


class Missing(Exception):
    """Not all ranks have left a value in the store. Arguments: those that have, and in how long."""


class Peers(NamedTuple):
    """All ranks that look for something together, and which of them this one is."""

    store: dist.Store
    rank: int
    world_size: int
    timeout: int

    def gather(self, key, value, seconds):
        """Leave a value in the store; return those of all ranks. Raises Missing."""
        names = [f"{key}/{rank}" for rank in range(self.world_size)]
        self.store.set(names[self.rank], json.dumps(value))
        try:
            self.store.wait(names, timedelta(seconds=seconds))
        except dist.DistStoreError:
            here = [rank for rank, name in enumerate(names) if self.store.check([name])]
            raise Missing(here, seconds) from None
        return [json.loads(text) for text in self.store.multi_get(names)]

    def row_of(self, missing):
        """Return the row that says who is missing."""
        here, seconds = missing.args
        lost = ", ".join(str(rank) for rank in range(self.world_size) if rank not in here)
        text = f"rank {lost} of {self.world_size} does not answer within {seconds} s"
        cure = "start it with the same command, and look at what its own machine says"
        return Row("ranks", "not ok", text, cure)
