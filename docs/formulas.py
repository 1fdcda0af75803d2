"""The formulas behind the pages cost_model.md and memory.md, in Python.

The pages compute in JavaScript (docs/_static/*_formulas.js). This module is what they must agree
with; tests/test_site_formulas.py compares the two, and this module with lessons 10 to 13.

    python docs/formulas.py      writes docs/formulas.json, the table that the tests compare with

Units: bytes, seconds, bytes per second. A share is from 0 to 1.
"""

import itertools
import json
from pathlib import Path

TABLE = Path(__file__).with_name("formulas.json")

# Bytes for one parameter: (parameter, gradient, its copy in float32).
# Mixed precision as in ZeRO, section 3.1 (Rajbhandari et al. 2020, arXiv:1910.02054).
PRECISIONS = {"float32": (4, 4, 0), "mixed": (2, 2, 4)}
OPTIMIZERS = {"SGD": 0, "momentum": 4, "Adam": 8}  # bytes of state, in float32

STRATEGIES = ("data", "zero1", "zero2", "zero3", "tensor", "gpipe", "1f1b")


def all_reduce_cost(devices, size):
    """Return (messages, bytes) that each device sends when a ring all-reduces `size` bytes.

    Lesson 11 counts the bytes on real sockets.
    """
    return 2 * (devices - 1), 2 * (devices - 1) / devices * size


def data_parallel_step(devices, size, compute, latency, bandwidth, overlap, slowest, divided):
    """Return what a step of data parallel training costs: the model of lesson 11.

    size       bytes of gradient
    compute    seconds in which one device computes one batch
    latency    seconds for each message; bandwidth: bytes per second, in one direction
    overlap    share of the sending that may run beside the computing. With 0 and with 1, and no
               slow device, this is lesson 11's predict_speedup.
    slowest    how many times as long the slowest device computes, 1 or more; one device has nobody
               to wait for it, so there it must be 1
    divided    True: one batch is divided among the devices; False: each has a batch of its own

    All times are in seconds. `late` is what the others wait for the slowest device, `exposed` what
    all wait for the sending; a device that is not the slowest waits for both.
    """
    messages, sent = all_reduce_cost(devices, size)
    sending = latency * messages + sent / bandwidth
    share = compute / devices if divided else compute
    late = share * (slowest - 1)
    hidden = min(overlap * sending, share + late)
    exposed = sending - hidden
    step = share + late + exposed
    work = compute if divided else devices * compute  # the seconds that one device would need
    speedup = work / step
    return {
        "messages": messages,
        "sent": sent,
        "sending": sending,
        "share": share,
        "late": late,
        "hidden": hidden,
        "exposed": exposed,
        "step": step,
        "speedup": speedup,
        "efficiency": speedup / devices,
    }


def bytes_per_parameter(precision, optimizer):
    """Return bytes for one parameter: (itself, its gradient, what the optimizer keeps).

    With "mixed" and "Adam" these are the 2 + 2 + 12 of ZeRO, section 3.1.
    """
    parameter, gradient, copy = PRECISIONS[precision]
    return parameter, gradient, copy + OPTIMIZERS[optimizer]


def alive_micro_batches(schedule, stages, micro_batches, stage=0):
    """Return how many micro-batches a stage keeps at most: all, or by 1F1B stages - stage.

    Lesson 12 measures the bytes. The first stage, number 0, keeps the most.
    """
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)


def shares(strategy, ranks, micro_batches, cut):
    """Return what a rank holds, of the whole: (parameters, gradients, optimizer, activations).

    ZeRO's stages: section 5. The activations are counted in those of one micro-batch of the whole
    model: tensor parallelism cuts a share `cut` of them, a stage keeps its part of several.
    """
    part = 1 / ranks
    if strategy == "tensor":
        return part, part, part, 1 - cut + cut * part
    if strategy in ("gpipe", "1f1b"):
        return part, part, part, alive_micro_batches(strategy, ranks, micro_batches) * part
    cuts = {"data": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    return (
        part if cuts >= 3 else 1,
        part if cuts >= 2 else 1,
        part if cuts >= 1 else 1,
        1,
    )


def rank_memory(strategy, parameters, precision, optimizer, ranks, activations, micro_batches, cut):
    """Return the bytes of the rank that holds the most.

    parameters    how many numbers the model has
    activations   bytes that one micro-batch leaves in the whole model, until its backward
    cut           the share of them that tensor parallelism divides
    """
    weight, gradient, state = bytes_per_parameter(precision, optimizer)
    held = shares(strategy, ranks, micro_batches, cut)
    parts = {
        "parameters": parameters * weight * held[0],
        "gradients": parameters * gradient * held[1],
        "optimizer": parameters * state * held[2],
        "activations": activations * held[3],
    }
    return {**parts, "total": sum(parts.values())}


def named(names, *lists):
    """Return a dict for each combination of a value from each list."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*lists)]


def grid():
    """Return the inputs of the table, for each function: one dict for each row."""
    overlaps, slow = (0, 0.7, 1), (1, 1.3)
    names = ("devices", "overlap", "slowest", "divided")
    steps = named(names, (1, 2, 3, 8, 256), overlaps, slow, (False, True))
    steps = [row for row in steps if row["devices"] > 1 or row["slowest"] == 1]
    nvlink = {"size": 102_228_128, "compute": 0.1, "latency": 10e-6, "bandwidth": 150e9}
    gloo = {"size": 8_404_992, "compute": 0.09, "latency": 984e-6, "bandwidth": 1.3e9}
    names = ("strategy", "precision", "optimizer")
    ways = named(names, STRATEGIES, PRECISIONS, OPTIMIZERS)
    few = {"parameters": 25_557_032, "activations": 3e9, "ranks": 1, "micro_batches": 2, "cut": 0}
    many = {
        "parameters": 8.05e9,
        "activations": 11.4e9,
        "ranks": 6,
        "micro_batches": 32,
        "cut": 0.7,
    }
    return {
        "data_parallel_step": [row | link for row in steps for link in (nvlink, gloo)],
        "rank_memory": [row | job for row in ways for job in (few, many, many | {"ranks": 64})],
    }


def table():
    """Return {function: [{"inputs": ..., "values": ...}]} for the whole grid."""
    return {
        name: [{"inputs": row, "values": globals()[name](**row)} for row in rows]
        for name, rows in grid().items()
    }


def write_table():
    """Write docs/formulas.json, with one row of the table on a line."""
    parts = []
    for name, rows in table().items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write_table()
