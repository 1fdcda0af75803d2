"""The exercise of lesson 07: any number of rows, divided among any number of towers."""

from itertools import pairwise

import numpy as np


def solution(value, num_devices):
    """Return `num_devices` tensors: the rows of `value`, in order, shared out evenly (claim D13).

    The number of rows need not be known when the graph is built. Raises ValueError for no device.
    """
    import tensorflow as tf

    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, not {num_devices}")
    rows = tf.shape(value)[0]  # a tensor: its number is known in each step, not before
    edges = [rows * number // num_devices for number in range(num_devices + 1)]
    return [value[first:last] for first, last in pairwise(edges)]


def run_in_graph(attempt, num_devices, batch):
    """Build the attempt's parts for unknown rows; return their values, or None if not a list."""
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = tf.compat.v1.placeholder("int32", [None, None])
        parts = attempt(value, num_devices)
        if not isinstance(parts, (list, tuple)) or len(parts) != num_devices:
            return None
        return session.run([tf.identity(part) for part in parts], {value: batch})


def explain(error):
    """Return what an error of the attempt means, in one sentence."""
    if "evenly divi" in str(error):
        return "tf.split with one number divides only rows that the number divides"
    if "NoneType" in str(error):
        return "in the graph, the number of rows is tf.shape(value)[0]; value.shape has None"
    lines = [line for line in str(error).splitlines() if line and "execution error" not in line]
    return (lines or ["no message"])[0]


def check(attempt, num_devices=4):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    return check_towers(attempt, num_devices) or check_towers(attempt, num_devices + 1)


def check_towers(attempt, num_devices):
    """Return None if the attempt is right for so many towers, else what is wrong."""
    numbers = {2 * num_devices, 2 * num_devices + 1, 3 * num_devices - 1, num_devices, 1}
    for rows in sorted(numbers, reverse=True):
        batch = np.arange(1, rows * 3 + 1, dtype="int32").reshape(rows, 3)
        place = f"rows: {rows}, towers: {num_devices}:"
        try:
            parts = run_in_graph(attempt, num_devices, batch)
        except NotImplementedError:
            raise
        except Exception as error:
            return f"{place} {type(error).__name__}: {explain(error)}"
        if parts is None:
            return f"{place} a list of {num_devices} tensors is needed"
        sizes = [len(part) if part.ndim else 0 for part in parts]
        if any(part.shape[1:] != (3,) for part in parts):
            return f"{place} the parts have other columns than the value: cut only its rows"
        if sum(sizes) != rows:
            verb = "are lost" if sum(sizes) < rows else "were added"
            return f"{place} the parts have {sizes} rows: some {verb}"
        if max(sizes) - min(sizes) > 1:
            return f"{place} the parts have {sizes} rows: they must differ by one at most"
        if {part.dtype for part in parts} != {batch.dtype}:
            return f"{place} the parts are {parts[0].dtype}, the value is {batch.dtype}"
        if not np.array_equal(np.concatenate(parts), batch):
            return f"{place} the rows, put together again, are in another order"
    try:
        attempt(np.ones((4, 3), "float32"), 0)
    except ValueError as error:
        if "num_devices" in str(error):
            return None
    except Exception as error:
        return (
            f"no device: {type(error).__name__}, but a ValueError that names num_devices is needed"
        )
    return "no device: a ValueError that names num_devices is needed"


# The task of the notebook: its check, and its solution.
TASKS = {"split_rows": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "split_rows": (
        "Think of the edges between the parts, not of the parts: there is one edge more than "
        "there are devices. Can you compute each edge from the number of rows, so that rounding "
        "spreads the rest?"
    ),
}
