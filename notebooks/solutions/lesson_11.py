"""The exercise of lesson 11: how many workers are worth it, on a given link?"""

from itertools import product


def solution(link, compute, size, most):
    """Return the number of workers, 1 to `most`, with the shortest step if nothing overlaps.

    link: (seconds per message, seconds per byte); compute: seconds of the whole batch on one
    worker, which n workers divide evenly; size: bytes of the gradient.
    """

    def seconds(n):
        messages, sent = 2 * (n - 1), 2 * (n - 1) / n * size
        return compute / n + link[0] * messages + link[1] * sent

    return min(range(1, most + 1), key=seconds)


# What decides, seconds per message, seconds per byte, seconds of computing, bytes.
CASES = [
    ("a link that costs nothing", 0.0, 0.0, 0.1, 4e6),
    ("a slow link: sending takes longer than computing", 0.0, 1e-6, 0.1, 4e6),
    ("the latency of the messages", 1e-3, 0.0, 0.1, 4e6),
    ("latency and bytes together", 5e-4, 1e-9, 0.2, 5e7),
    ("the latency at which a second worker is just worth it", 15e-3, 0.0, 0.1, 4e6),
    ("a formula that is rounded is not enough: compare", 23.5e-3, 0.0, 0.1, 4e6),
    ("each rank sends 2 (n - 1) / n of the bytes, not 2 n or 2 times", 0.0, 1e-9, 0.083, 4.1e7),
]


def check(attempt, limits=(16, 3)):
    """Return None if the attempt is right for each limit of workers, else what is wrong."""
    for most, (what, latency, per_byte, compute, size) in product(limits, CASES):
        answer = attempt((latency, per_byte), compute, size, most)
        wanted = solution((latency, per_byte), compute, size, most)
        if isinstance(answer, bool) or not isinstance(answer, int):
            return f"the answer is {type(answer).__name__}, not a whole number of workers"
        if not 1 <= answer <= most:
            return f"of {most} workers at most you take {answer}"
        if answer != wanted:
            better = "more" if wanted > answer else "fewer"
            return f"of {most} workers at most you take {answer}; {better} are faster: {what}"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"best_number": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "best_number": (
        "Write the time of a step with n workers as a sum of two parts; the lesson has a "
        "function for one of them. You need no formula for the best n: how many candidates are "
        "there?"
    ),
}
