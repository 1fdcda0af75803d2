"""Solutions of the tasks of lesson 07, and their checks. TensorFlow is imported when needed."""

from itertools import pairwise

import numpy as np

# --- Task 1: predict ---

result_of_the_graph = 42


def check_result_of_the_graph(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == result_of_the_graph:
        return None
    if guess == 2100:
        return "this takes the last value of `step` for all three; when did Python multiply?"
    if guess == 21:
        return "`step` has changed within the loop as well"
    return "write down the three multiplications of the loop, each with the number in its node"


# --- Task 2: build ---


def split_rows(value, num_devices):
    """Return `num_devices` tensors: the rows of `value`, in order, shared out evenly.

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
        value = tf.compat.v1.placeholder(batch.dtype, [None, None])
        parts = attempt(value, num_devices)
        if any("PyFunc" in node.type for node in session.graph.get_operations()):
            raise TypeError("the parts are made by Python in each step, not by the graph")
        if not isinstance(parts, (list, tuple)) or len(parts) != num_devices:
            return None
        return session.run([tf.identity(part) for part in parts], {value: batch})


def explain(error):
    """Return what an error of the attempt means, in one sentence."""
    if "evenly divi" in str(error):
        return "tf.split with one number divides only rows that the number divides"
    if "NoneType" in str(error):
        return "in the graph, the number of rows is tf.shape(value)[0]; value.shape has None"
    if "Python `bool`" in str(error):
        return "a node has no value yet, so Python's if and min can't ask it: calculate with nodes"
    if any(words in str(error) for words in ("same size", "should match", "must be equal")):
        return "matrices of different lengths can be neither added nor joined by rows"
    lines = [line for line in str(error).splitlines() if line and "execution error" not in line]
    return (lines or ["no message"])[0]


def check_split_rows(attempt, num_devices=4):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    return check_rows(attempt, num_devices) or check_rows(attempt, num_devices + 1)


def check_rows(attempt, num_devices):
    """Return None if the attempt is right for so many towers, else what is wrong."""
    numbers = {2 * num_devices, 2 * num_devices + 1, 3 * num_devices - 1, num_devices, 1}
    for rows in sorted(numbers, reverse=True):
        kind = "int32" if rows > 1 else "float32"
        batch = np.arange(1, rows * 3 + 1, dtype=kind).reshape(rows, 3)
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
        run_in_graph(attempt, 0, batch)
    except ValueError as error:
        if "num_devices" in str(error):
            return None
    except Exception as error:
        return (
            f"no device: {type(error).__name__}, but a ValueError that names num_devices is needed"
        )
    return "no device: a ValueError that names num_devices is needed"


# --- Task 3: repair ---


def loss_per_word(losses, masks):
    """Return the loss of a batch, a scalar: its sum over all towers, divided by all real words."""
    import tensorflow as tf

    total = tf.add_n([tf.reduce_sum(part) for part in losses])
    return total / tf.add_n([tf.reduce_sum(mask) for mask in masks])


def make_cases(towers):
    """Return [(words, masks)]: what the towers have, one mask each, (rows, time)."""
    ragged = [np.arange(5) < length for length in (5, 2, 3)]
    long, short = np.stack(ragged * 2)[:4], np.stack(ragged)[1:, :3]
    none = np.zeros((2, 3), bool)
    return [
        ("no padding at all", [np.ones((2, 3), bool)] * towers),
        ("padding in each tower", [long[number:][:2] for number in range(towers)]),
        ("towers of different lengths", [long[:2], *[short] * (towers - 1)]),
        ("a tower of padding only", [*[short] * (towers - 1), none[:, :3]]),
    ]


def check_loss_per_word(attempt):
    """Return None if the attempt is right for 2 and 3 towers, else what is wrong."""
    for towers in (2, 3):
        for words, masks in make_cases(towers):
            masks = [mask.astype("float32") for mask in masks]
            numbers = enumerate(masks, 1)
            losses = [
                number * np.arange(mask.size).reshape(mask.shape) * mask  # a real loss can be 0
                for number, mask in numbers
            ]
            right = sum(map(np.sum, losses)) / sum(map(np.sum, masks))
            problem = wrong_loss(attempt, losses, masks, right)
            if problem:
                return f"{towers} towers, {words}: {problem}"
    return None


def wrong_loss(attempt, losses, masks, right):
    """Return what is wrong with the attempt's loss of these arrays, or None."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        nodes = [[v1.placeholder("float32", [None, None]) for _ in masks] for _ in range(2)]
        feed = dict(zip(nodes[0] + nodes[1], losses + masks, strict=True))
        try:
            loss = attempt(*nodes)
            slopes = tf.gradients(loss, nodes[0])
            found = [tf.convert_to_tensor(slope) for slope in slopes if slope is not None]
            answer = np.asarray(session.run(loss, feed))
            found = session.run(found, feed)
        except NotImplementedError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {explain(error)}"
    if answer.shape != ():
        return f"a scalar is wanted, and this has the shape {list(answer.shape)}"
    words = sum(map(np.sum, masks))
    if len(found) < len(masks) or not any(np.any(slope) for slope in found):
        return "the gradient does not get through it, so a tower would not learn"
    if abs(answer - right) < 1e-5 * right:
        pairs = zip(found, masks, strict=True)
        fine = all(np.allclose(slope * mask, mask / words, 1e-4) for slope, mask in pairs)
        return None if fine else "the loss is right, but its gradient is another one's"
    means = [np.sum(loss) / max(np.sum(mask), 1) for loss, mask in zip(losses, masks, strict=True)]
    why = "which words, of which towers, should the sum be divided by?"
    if abs(answer - sum(map(np.sum, losses)) / sum(mask.size for mask in masks)) < 1e-5 * right:
        why = "padding is counted as words"
    elif abs(answer - np.mean(means)) < 1e-5 * right:
        why = "that is a mean of the towers' means"
    elif np.isnan(answer):
        why = "a tower without words was divided by its own number of words"
    return f"{answer:.4g}, not {right:.4g}: {why}"


# --- Task 4: predict ---

bytes_of_rows = 20 * 35 * 200 * 4


def check_bytes_of_rows(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == bytes_of_rows:
        return None
    if guess == 10_000 * 200 * 4:
        return "that is the whole table; what does the look-up send?"
    if guess == 2 * bytes_of_rows:
        return "that is too much by two: for both towers, or for the way back as well"
    if guess == bytes_of_rows // 4:
        return "those are numbers; how many bytes has each?"
    return "it is one row of the table for each position that this tower has, padding as well"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "result_of_the_graph": (check_result_of_the_graph, result_of_the_graph),
    "split_rows": (check_split_rows, split_rows),
    "loss_per_word": (check_loss_per_word, loss_per_word),
    "bytes_of_rows": (check_bytes_of_rows, bytes_of_rows),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "result_of_the_graph": (
        "Python has finished before the session begins. Go through its lines as Python does, and "
        "note, at each multiplication, which number stands in the node."
    ),
    "split_rows": (
        "Think of the edges between the parts, not of the parts: there is one edge more than "
        "there are devices. Can you compute each edge from the number of rows, so that rounding "
        "spreads the rest?"
    ),
    "loss_per_word": (
        "Make one number from each tower before you add anything: then their shapes no longer "
        "matter. You need two such numbers, and only one division."
    ),
    "bytes_of_rows": (
        "How many positions does one tower have? For each of them, the look-up sends one row of "
        "the table. How many numbers is a row, and how many bytes a number?"
    ),
}
