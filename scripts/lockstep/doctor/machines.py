"""What is each of several machines, and what differs between them?"""

import os
import socket
import sys

import torch

from lockstep.doctor import machine
from lockstep.doctor.report import Row


def my_name():
    """Return the name of this machine, as --nodes has it; else its own, with its number."""
    node = os.environ.get("GROUP_RANK", "0")
    if "LOCKSTEP_NODES" in os.environ:  # set by lockstep/machine.py
        return os.environ["LOCKSTEP_NODES"].split(",")[int(node)]
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return socket.gethostname() + f"/{node}" * (not alone)


def my_facts(on_several):
    """Return what the other ranks are to know of this one, and of its machine."""
    one_looks = on_several and os.environ.get("LOCAL_RANK", "0") == "0"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rows = machine.look_at_machine(ranks_here) if one_looks else ()
    built_for = torch.version.cuda and f"CUDA {torch.version.cuda}"
    return {
        "machine": my_name(),
        "Python": "{}.{}".format(*sys.version_info),
        "torch": f"{torch.__version__.split('+')[0]} for {built_for or 'CPUs'}",
        "cores": machine.count_cores(),
        "GPUs": torch.cuda.device_count(),
        "troubles": [row for row in rows if row.state != "ok"],
    }


def compare(everyone):
    """Return a row for each machine, for its troubles, and for what is not the same on all."""
    machines, rows = {}, []
    for one in everyone:
        machines.setdefault(one["machine"], []).append(one)
    for name, (one, *others) in machines.items():
        text = f"ranks: {1 + len(others)}, cores: {one['cores']}, GPUs: {one['GPUs']}"
        rows.append(Row(f"machine {name}", "ok", f"{text}; gloo at {one['address'][0]}"))
        for row in (Row(*fields) for fields in one["troubles"]):
            rows.append(row._replace(check=f"{row.check} of {name}"))
    different = []
    for fact in ("Python", "torch"):
        values = {name: ranks[0][fact] for name, ranks in machines.items()}
        if len(set(values.values())) > 1:
            text = "; ".join(f"{value} on {name}" for name, value in values.items())
            different.append(Row(fact, "not ok", text, f"take the same {fact} on all machines"))
    different += compare_gpus(machines)
    if not different:
        text = "Python {Python}, torch {torch} on all".format(**everyone[0])
        different = [Row("versions", "ok", text)]
    return rows + different


def compare_gpus(machines):
    """Return a row if ranks take GPUs and nccl on some machines only, where they never meet."""
    have = {(ranks[0]["GPUs"] > 0, ranks[0]["GPUs"] >= len(ranks)) for ranks in machines.values()}
    if len(have) == 1:
        return []
    each = [
        f"{ranks[0]['GPUs']} on {name} (ranks: {len(ranks)})" for name, ranks in machines.items()
    ]
    cure = "look at nvidia-smi and CUDA_VISIBLE_DEVICES where they lack, or take a smaller --nproc"
    return [Row("GPUs", "not ok", "; ".join(each), cure)]


def not_tried(everyone):
    """Return the row that says what the report says nothing about."""
    cure = ""
    if any(one["GPUs"] for one in everyone):
        cure = "run lesson 02 in the same way, with NCCL_DEBUG=INFO: it says which way nccl takes"
    return Row("nccl, InfiniBand", "unknown", "not tried: all this is gloo, over TCP", cure)
