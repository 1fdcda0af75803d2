"""Solutions of the tasks of lesson 08, and their checks, which start no other process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import lesson_08_paddle_parallel_do as lesson
import numpy as np
import paddle

# --- Task 1: predict ---

gradient_of_means = 14.5 / 3  # (1.5 + 5 + 8) / 3; one process with all rows gets 4.5


def check_gradient_of_means(guess):
    """Return None if `guess` is right, else a hint."""
    if abs(guess - gradient_of_means) < 0.005:
        return None
    if abs(guess - 4.5) < 1e-9:
        return "that would be the mean over all rows; but a place knows only its own"
    if abs(guess - 3 * gradient_of_means) < 0.01:
        return "that is the sum of the places' means: what does the second mean do with the three?"
    return (
        "write down what each place returns for w = 1, and what the second mean makes of the three"
    )


# --- Task 2: build ---


def parallel_do_at_once(body, places, weights, *inputs):
    """Do what parallel_do does, with a thread for each place; each has copies of its own."""
    parts = [np.array_split(array, len(places)) for array in inputs]

    def work(number):
        place = places[number]  # not set_device: that is for the whole process
        mine = [paddle.to_tensor(part[number], place=place) for part in parts]
        copies = {
            name: paddle.to_tensor(w, place=place, stop_gradient=False)
            for name, w in weights.items()
        }
        output = body(copies, *mine)
        output.sum().backward()
        return output.numpy(), {name: copy.grad.numpy() for name, copy in copies.items()}

    with ThreadPoolExecutor(len(places)) as pool:
        answers = list(pool.map(work, range(len(places))))  # in their order; raises errors
    outputs, gradients = zip(*answers, strict=True)
    return np.concatenate(outputs), {n: sum(found[n] for found in gradients) for n in weights}


# A thread that ends with an error prints it; the verdict says in one line what that means.
QUIET = patch.object(threading, "excepthook", lambda *_: None)


def make_body(count, late, look=lambda *tensors: None):
    """Return a body that waits until `count` of them run; the first places are the slowest.

    Each changes its copy of the weights before it uses it: nobody else may see that. If the
    backward passes do not run at the same time, `late` gets a line.
    """
    gate = threading.Barrier(count)

    def meet(first):
        try:
            gate.wait(3)
        except threading.BrokenBarrierError:  # an error may not leave a hook
            late.append("forward they run at the same time, but backward one after the other")
        time.sleep(0.6 / (1 + first))  # behind the last meeting: so the last place ends first

    def body(copies, rows, number):
        first = float(number.min())
        look(first, *copies.values(), rows, number)
        gate.wait(3)
        copies["w"].set_value(copies["w"].detach() + 1)
        copies["w"].register_hook(lambda gradient: meet(first))
        gate.wait(3)
        return (rows @ copies["w"]) ** 2 + copies["b"] * number

    return body


def watched(attempt, places, weights, *inputs):
    """Return what the attempt returns, and what it did that it should not: a list."""
    made, seen, wrong, to_tensor = {}, {}, [], paddle.to_tensor

    def make(data, dtype=None, place=None, stop_gradient=True):
        tensor = to_tensor(data, dtype, place, stop_gradient)
        made[tensor.data_ptr()] = place
        return tensor

    def choose(place):
        wrong.append("set_device was called: it is for the whole process, not for a thread")

    def look(first, *tensors):
        seen[first] = [tensor.data_ptr() for tensor in tensors]

    body = make_body(len(places), wrong, look)
    with patch.multiple(paddle, to_tensor=make, set_device=choose), QUIET:
        found = attempt(body, places, weights, *inputs)
    used = [pointer for pointers in seen.values() for pointer in pointers]
    if len(set(used)) < len(used):
        wrong.insert(0, "not each place has a copy of the weights for itself")
    homes = zip((seen[first] for first in sorted(seen)), places, strict=False)
    if not all(made.get(pointer) is place for pointers, place in homes for pointer in pointers):
        wrong.append("not each tensor of a part was made with to_tensor(..., place=its place)")
    if np.ptp(np.diff([*sorted(seen), len(inputs[0])])) >= len(places):  # Fluid's rest is right
        wrong.append("they do not share the rows evenly")
    return found, wrong


def check_parallel_do_at_once(attempt):
    """Return None if the attempt equals parallel_do, all places at once, else what is wrong."""
    generator = np.random.default_rng(0)
    weights = {"w": generator.normal(size=2), "b": np.ones(1)}
    for count in (2, 3):
        rows, number = generator.normal(size=(3 * count + 1, 2)), np.arange(3.0 * count + 1)
        places, where = [paddle.CPUPlace() for _ in range(count)], f"with {count} places"
        one = lesson.parallel_do(make_body(1, []), places[:1], weights, rows, number)
        try:
            found, wrong = watched(attempt, places, weights, rows, number)
        except threading.BrokenBarrierError:
            return f"{where} they do not run at the same time: one waits until another has ended"
        problem = wrong_answer(found, one) or next(iter(wrong), None)
        if problem:
            return f"{where} {problem}"
    return wrong_after_an_error(attempt, 7.0) or wrong_after_an_error(attempt, 0.0)


def wrong_answer(found, one):
    """Return what is wrong with (outputs, gradients), compared with those of one place, or None."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        return "it does not return a pair: outputs, and {name: gradient}"
    outputs, right = np.asarray(found[0]), one[0]
    if outputs.shape != right.shape:
        return f"the outputs have the shape {outputs.shape}, not {right.shape}"
    if not np.allclose(outputs, right, rtol=1e-9):
        if np.allclose(np.sort(outputs), np.sort(right), rtol=1e-9):
            return "the outputs are not in the order of the rows: the first place is the slowest"
        return "the outputs are wrong: does each place have a copy of the weights for itself?"
    for name in one[1]:
        gradient = np.asarray(found[1].get(name, np.nan))
        if not np.allclose(gradient, one[1][name], rtol=1e-9):
            return f"the gradient of {name!r} is not the sum over the places"
    return None


def wrong_after_an_error(attempt, damaged):
    """Return what is wrong if the body of the place with this row raises an error, or None."""

    def body(copies, rows):
        if damaged in rows.numpy():
            raise ValueError(f"row {damaged} is damaged")
        return rows * copies["b"]

    try:
        with QUIET:
            attempt(body, [paddle.CPUPlace()] * 2, {"b": np.ones(1)}, np.arange(8.0))
    except ValueError:
        return None
    except Exception as error:
        return f"a body raised a ValueError; what came out is {type(error).__name__}"
    return "a body raised an error, and nobody heard of it: it must come out of your function"


# --- Task 3: build ---


def scale_loss(loss_sum, words, world_size, all_reduce_sum):
    """Return this rank's loss, a scalar tensor, for a framework that averages gradients.

    `loss_sum` is the sum over this rank's `words` real words. `all_reduce_sum(number)` returns the
    sum of that number over all ranks; every rank has to call it.
    """
    return loss_sum * world_size / all_reduce_sum(words)


def average_gradient(attempt, rows, masks):
    """Let the attempt be each rank in turn; return average gradient and loss, or what is wrong.

    Each rank is asked twice. The first time we learn what it adds to the sums; the second time
    `all_reduce_sum` returns the sums of all ranks.
    """
    added, gradients, losses = [], [], []
    for totals in (None, added):
        for rank, (part, mask) in enumerate(zip(rows, masks, strict=True)):
            calls = []

            def all_reduce_sum(number, calls=calls, totals=totals):
                calls.append(float(number))
                if totals is None:
                    return calls[-1] or 1.0  # not yet a sum, but no 0 that nobody can divide by
                return sum(ours[len(calls) - 1] for ours in totals)

            weight = paddle.to_tensor(np.ones(3), stop_gradient=False)
            loss_sum = ((paddle.to_tensor(part) @ weight).exp() * paddle.to_tensor(mask)).sum()
            loss = attempt(loss_sum, float(mask.sum()), len(rows), all_reduce_sum)
            if not isinstance(loss, paddle.Tensor) or loss.stop_gradient:
                return f"rank {rank} returned no tensor that depends on loss_sum"
            if totals is None:
                added.append(calls)
            else:
                losses.append(float(loss.sum()))
                loss.sum().backward()
                gradients.append(weight.grad.numpy())
        if len({len(calls) for calls in added}) > 1:
            return "all_reduce_sum was not called by every rank: who calls it waits for the others"
    return sum(gradients) / len(rows), sum(losses) / len(rows)


def check_scale_loss(attempt, nproc=2):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    return check_ranks(attempt, nproc) or check_ranks(attempt, nproc + 1)


def check_ranks(attempt, nproc):
    """Return None if the attempt is right for so many ranks, else what is wrong."""
    generator = np.random.default_rng(0)
    none = [0, *[3] * (nproc - 1)] if nproc > 1 else [3]  # rank 0 of several has no words
    for lengths in (range(4, 4 + nproc), range(1, 1 + 5 * nproc, 5), [3] * nproc, none):
        rows = [generator.normal(size=(8 * nproc, 3)) for _ in lengths]
        masks = [(np.arange(8 * nproc) < length).astype("f8") for length in lengths]
        found = average_gradient(attempt, rows, masks)
        place = f"with {nproc} ranks that have {' + '.join(map(str, lengths))} words"
        if isinstance(found, str):
            return f"{place}: {found}"
        found, loss = found
        all_rows, mask = np.concatenate(rows), np.concatenate(masks)
        outputs = np.exp(all_rows.sum(1)) * mask
        expected = outputs @ all_rows / mask.sum()
        if not np.allclose(found, expected, rtol=1e-9, atol=0):
            ratio = float(found @ expected / (expected @ expected))
            hint = "some words count more than others"
            if np.isnan(found).any():
                hint = "it is nan"
            if np.allclose(found, ratio * expected):
                hint = f"it is {ratio:.3g} times the right one"
            return f"{place} the average of the gradients is not that of one process: {hint}"
        if not np.isclose(loss, outputs.sum() / mask.sum(), rtol=1e-9, atol=0):
            return f"{place} the gradients are right, but the average of the losses is {loss:.3g}"
    return None


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "gradient_of_means": (check_gradient_of_means, gradient_of_means),
    "parallel_do_at_once": (check_parallel_do_at_once, parallel_do_at_once),
    "scale_loss": (check_scale_loss, scale_loss),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "gradient_of_means": (
        "All of it is linear in w. So the gradient is what comes out for w = 1. What does each "
        "place return then? And what does the second mean do with three numbers?"
    ),
    "parallel_do_at_once": (
        "Which lines of parallel_do belong to one place alone? Put them into a function that "
        "returns what this place has found. Which way of asking a pool of threads gives answers in "
        "the order of the places, and raises what went wrong?"
    ),
    "scale_loss": (
        "Write down the gradient of the whole batch's mean, and under it what the ranks' average "
        "makes of `loss_sum`. In which two numbers do they differ, and which of them does no "
        "rank know by itself?"
    ),
}
