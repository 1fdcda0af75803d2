"""Wrong attempts at the tasks of lesson 08, and words that their verdict must contain.

No process is started here: the check of scale_loss lets the attempt be each rank in turn.
"""

import collections
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import lesson_08_paddle_parallel_do as lesson
import numpy as np
import paddle

LOCK = threading.Lock()

# --- Task 2 ---


def on_place(body, place, weights, part, backward=lambda output: output.sum().backward()):
    mine = [paddle.to_tensor(array, place=place) for array in part]
    make = paddle.to_tensor
    copies = {n: make(w, place=place, stop_gradient=False) for n, w in weights.items()}
    output = body(copies, *mine)
    backward(output)
    return output.numpy(), {name: copy.grad.numpy() for name, copy in copies.items()}


def own_place(places, number):
    return places[number]


def threaded(collect, gradients=sum, one=on_place, place_of=own_place, cut=np.array_split):
    """Return an attempt that asks a pool, and gets its answers by collect(pool, work, places)."""

    def attempt(body, places, weights, *inputs):
        parts = list(zip(*(cut(a, len(places)) for a in inputs), strict=True))

        def work(number):
            return one(body, place_of(places, number), weights, parts[number])

        with ThreadPoolExecutor(len(places)) as pool:
            outputs, found = zip(*collect(pool, work, range(len(places))), strict=True)
        return np.concatenate(outputs), {n: gradients([g[n] for g in found]) for n in weights}

    return attempt


def as_they_end(pool, work, numbers):
    return [done.result() for done in as_completed([pool.submit(work, n) for n in numbers])]


def in_order(pool, work, numbers):
    return list(pool.map(work, numbers))


def by_parallel_do(body, place, weights, part):
    return lesson.parallel_do(body, [place], weights, *part)


def backward_in_turn(body, place, weights, part, lock=LOCK):
    def backward(output):
        with lock:
            output.sum().backward()

    return on_place(body, place, weights, part, backward)


def one_copy_for_all(body, places, weights, *inputs):
    copies = {n: paddle.to_tensor(w, stop_gradient=False) for n, w in weights.items()}
    parts = zip(*(np.array_split(array, len(places)) for array in inputs), strict=True)
    with ThreadPoolExecutor(len(places)) as pool:
        outputs = list(pool.map(lambda part: body(copies, *map(paddle.to_tensor, part)), parts))
    paddle.concat(outputs).sum().backward()
    outputs = [output.numpy() for output in outputs]
    return np.concatenate(outputs), {name: copy.grad.numpy() for name, copy in copies.items()}


def deaf(pool, work, numbers):
    jobs = [pool.submit(work, number) for number in numbers]
    nothing = np.zeros(1), collections.defaultdict(int)
    return [nothing if job.exception() else job.result() for job in jobs]


# --- Task 3 ---


def only_long_parts_call(loss_sum, words, world_size, all_reduce_sum):
    total = all_reduce_sum(words) if words > 4 else 2 * words
    return loss_sum * world_size / total


WRONG = {
    "gradient_of_means": {
        "the mean over all rows": (4.5, "but a place knows only its own"),
        "the sum of the means": (14.5, "what does the second mean do"),
        "the sum of all rows": (45, "write down what each place returns"),
    },
    "parallel_do_at_once": {
        "one after the other": (lesson.parallel_do, "they do not run at the same time"),
        "in the order in which they end": (threaded(as_they_end), "not in the order of the rows"),
        "an average": (
            threaded(in_order, lambda found: sum(found) / len(found)),
            "is not the sum over the places",
        ),
        "the last place only": (threaded(in_order, lambda found: found[-1]), "is not the sum"),
        "one copy for all": (one_copy_for_all, "a copy of the weights for itself"),
        "errors are lost": (threaded(deaf), "nobody heard of it"),
        "set_device in threads": (threaded(in_order, one=by_parallel_do), "the whole process"),
        "backward in turn": (threaded(in_order, one=backward_in_turn), "backward one after"),
        "a row each, and the rest": (
            threaded(in_order, cut=lambda array, count: np.split(array, range(1, count))),
            "share the rows evenly",
        ),
        "all on the first place": (
            threaded(in_order, place_of=lambda places, number: places[0]),
            "place=its place",
        ),
    },
    "scale_loss": {
        "the mean over its own words": (
            lambda loss, words, ranks, add: loss / words,
            "some words count more than others",
        ),
        "forgets that an average follows": (
            lambda loss, words, ranks, add: loss / add(words),
            "it is 0.5 times the right one",
        ),
        "reduces the loss, too": (
            lambda loss, words, ranks, add: add(loss.item()) / add(words),
            "returned no tensor",
        ),
        "multiplies twice": (
            lambda loss, words, ranks, add: loss * ranks**2 / add(words),
            "it is 2 times the right one",
        ),
        "2 ranks, always": (
            lambda loss, words, ranks, add: loss * 2 / add(words),
            "with 3 ranks that have 4 + 5 + 6 words",
        ),
        "another loss, the same gradient": (
            lambda loss, words, ranks, add: loss * ranks / add(words) + 7,
            "the gradients are right, but the",
        ),
        "0 divided by 0": (
            lambda loss, words, ranks, add: loss / words * (words * ranks / add(words)),
            "with 2 ranks that have 0 + 3 words the average",
        ),
        "only long parts take part": (
            only_long_parts_call,
            "all_reduce_sum was not called by every rank",
        ),
    },
}
