"""What is each of several machines, and what differs between them?"""

import os
import socket
import sys

import torch

from lockstep.doctor import machine
from lockstep.doctor.report import Row

MUST_BE_THE_SAME = {  # what, and the cure; ranks with a GPU each use nccl, and the others gloo
    "Python": "take the same Python on all machines",
    "torch": "take the same torch on all machines",
    "GPUs": "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or take a smaller --nproc",
}


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
    gpus = torch.cuda.device_count()
    return {
        "machine": my_name(),
        "Python": "{}.{}".format(*sys.version_info),
        "torch": f"{torch.__version__.split('+')[0]} for {built_for or 'CPUs'}",
        "GPUs": "one for each rank" if gpus >= ranks_here else "too few",
        "has": f"ranks: {ranks_here}, cores: {machine.count_cores()}, GPUs: {gpus}",
        "troubles": [row for row in rows if row.state != "ok"],
    }


def compare(everyone):
    """Return a row for each machine, for its troubles, and for what is not the same on all."""
    machines, rows = {}, []
    for one in everyone:
        machines.setdefault(one["machine"], one)
    for name, one in machines.items():
        text = f"{one['has']}; gloo at {one['address'][0]}"
        rows.append(Row(f"machine {name}", "ok", text))
        for row in (Row(*fields) for fields in one["troubles"]):
            rows.append(row._replace(check=f"{row.check} of {name}"))
    for fact, cure in MUST_BE_THE_SAME.items():
        values = {name: one[fact] for name, one in machines.items()}
        if len(set(values.values())) > 1:
            text = "; ".join(f"{value} on {name}" for name, value in values.items())
            rows.append(Row(fact, "not ok", text, cure))
    return rows


def not_tried():
    """Return the row that says what the report says nothing about."""
    cure = ""
    if torch.cuda.is_available():
        cure = "run lesson 02 in the same way, with NCCL_DEBUG=INFO: it says which way nccl takes"
    return Row("nccl, InfiniBand", "unknown", "not tried: all this is gloo, over TCP", cure)
