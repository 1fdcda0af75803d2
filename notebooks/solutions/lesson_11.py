"""Solutions of the tasks of lesson 11, and their checks."""

import math
import numbers
import time
import timeit
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import lesson_11_how_fast as lesson

# --- Task 1: repair ---


def seconds_of(work, wait, rounds):
    """Return the seconds of each of `rounds` steps; `work` starts one, `wait` waits for its end."""
    work()
    wait()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return seconds


class MadeUpTime:
    """A clock on which the first step takes 60 s, later ones 3 s or more, and 2 s until done.

    Who reads it after a step that began after a reading has timed this step: then other work takes
    7 s.
    """

    def __init__(self):
        self.now, self.left, self.steps = 100.0, 0.0, 0
        self.was_read = self.is_timed = False

    def read(self):
        told = self.now
        self.now += 7 * self.is_timed
        self.was_read, self.is_timed = True, False
        return told

    def work(self):
        self.steps, self.is_timed = self.steps + 1, self.was_read
        self.now += 57 if self.steps == 1 else 3 + self.steps % 3 / 8
        self.left += 3 if self.steps == 1 else 2

    def wait(self):
        self.now, self.left = self.now + self.left, 0.0


def by_clock(clock, attempt):
    """Return a context in which all clocks are `clock`; time.time() is set back in the second step.

    Also where a module, or the attempt's, has taken a clock by its name.
    """
    names = ("perf_counter", "monotonic", "time", "clock_gettime")  # Windows has not the last
    names = {f"{name}{ns}" for name in names for ns in ("", "_ns")} & {*dir(time)}

    def stand_in(name):
        def now(which=None):
            can_be_set = name.startswith("time") or which == 0  # 0: CLOCK_REALTIME
            seconds = clock.read() - 3600 * (can_be_set and clock.steps > 1)
            return round(seconds * 1e9) if name.endswith("_ns") else seconds

        return now

    new = {name: stand_in(name) for name in names}
    old = {getattr(time, name): new[name] for name in names}
    stack = ExitStack()
    for space in (vars(timeit), getattr(attempt, "__globals__", {})):
        taken = {key: old[it] for key, it in space.items() if callable(it) and is_in(it, old)}
        if taken:
            stack.enter_context(patch.dict(space, taken))
    for function in (timeit.timeit, timeit.repeat, timeit.Timer.__init__):
        defaults = tuple(old[it] if is_in(it, old) else it for it in function.__defaults__)
        stack.enter_context(patch.object(function, "__defaults__", defaults))
    stack.enter_context(patch.multiple(time, **new))
    return stack


def is_in(thing, old):
    """Return whether a thing is one of the clocks."""
    return any(thing is clock for clock in old)


def check_seconds_of(attempt):
    """Return None if the attempt measures each step, and nothing else, by a clock of ours."""
    for rounds in (1, 4):
        clock = MadeUpTime()
        with by_clock(clock, attempt):
            found = attempt(clock.work, clock.wait, rounds)
        if not isinstance(found, list) or len(found) != rounds:
            return f"of {rounds} steps it must return a list of {rounds} times"
        problem = wrong_times(found, clock.steps, rounds)
        if problem:
            return problem
    return None


def wrong_times(found, steps, rounds):
    """Return what is wrong with the times of `rounds` steps, of `steps` that were made, or None."""
    if min(found) < 0:
        return (
            "a time is negative: time.time() can be set back; take a clock that only goes forward"
        )
    if max(found) >= 57:
        return "one of the times is that of the first step, which also warms up"
    right = [5 + step % 3 / 8 for step in range(steps - rounds + 1, steps + 1)]
    if max(found) - min(found) < 0.01 < max(right) - min(right):
        return "all times are equal, and the steps were not: no mean, please"
    if min(found) < 5 - 1e-6:
        return "a time ends before its step has ended: the call has come back, the work goes on"
    if not all(map(math.isclose, found, right)):
        mixed = all(map(math.isclose, sorted(found), sorted(right)))
        order = "the times are not in the order of the steps"
        if max(found) > 12 - 1e-6:
            return "a time contains other work between two steps: read the clock before each step"
        return order if mixed else "a time contains a part of the step before it"
    return None if steps <= rounds + 3 else f"{steps} steps were made, for {rounds} times"


# --- Task 2: predict ---

share_of_limit = 192 / 216


def check_share_of_limit(guess):
    """Return None if `guess` is right to half a percent, else a hint."""
    if abs(guess - share_of_limit) < 0.005:
        return None
    if abs(guess - 48 / 72) < 0.005:
        return "that is the share with 512 rows; which of the three bars grow with the rows?"
    if not 0 <= guess <= 1:
        return "the share is below 1, and it changes: not all bars grow with the rows"
    return (
        "divide the new limit by the new step; what a rank hands in is its gradient, not its rows"
    )


# --- Task 3: build ---


def best_number(link, compute, size, most):
    """Return the number of workers, 1 to `most`, with the shortest step if nothing overlaps.

    link: (seconds per message, seconds per byte); compute: seconds of the whole batch on one
    worker, which n workers divide evenly; size: bytes of the gradient.
    """

    def seconds(n):
        return compute / n + lesson.predict_all_reduce(link, n, size)

    return min(range(1, most + 1), key=seconds)


# What decides, seconds per message, seconds per byte, seconds of computing, bytes.
CASES = [
    ("a link that costs nothing", 0.0, 0.0, 0.1, 4e6),
    ("a slow link: sending takes longer than computing", 0.0, 1e-6, 0.1, 4e6),
    ("the latency of the messages", 1e-3, 0.0, 0.1, 4e6),
    ("latency and bytes together", 5e-4, 1e-9, 0.2, 5e7),
    ("the latency at which a second worker is just worth it", 15e-3, 0.0, 0.1, 4e6),
    ("a second worker needs two messages", 30e-3, 0.0, 0.1, 4e6),
    ("a formula that is rounded is not enough: compare", 23.5e-3, 0.0, 0.1, 4e6),
    ("each rank sends 2 (n - 1) / n of the bytes, not 2 n or 2 times", 0.0, 1e-9, 0.083, 4.1e7),
    ("many workers are allowed", 1e-6, 0.0, 0.1, 4e6),
]


def check_best_number(attempt, limits=(16, 3, 1000)):
    """Return None if the attempt is right for each limit of workers, else what is wrong."""
    for most, (what, latency, per_byte, compute, size) in product(limits, CASES):
        answer = attempt((latency, per_byte), compute, size, most)
        wanted = best_number((latency, per_byte), compute, size, most)
        if isinstance(answer, bool) or not isinstance(answer, numbers.Integral):
            return f"the answer is {type(answer).__name__}, not a whole number of workers"
        if not 1 <= answer <= most:
            return f"of {most} workers at most you take {answer}"
        if answer != wanted:
            better = "more" if wanted > answer else "fewer"
            return f"of {most} workers at most you take {answer}; {better} are faster: {what}"
    return None


# --- Task 4: predict ---

bus_bandwidth = 2 * 7 / 8 * 1e9 / 5e-3 / 1e9


def check_bus_bandwidth(guess):
    """Return None if `guess`, in GB/s, is right to half a percent, else a hint."""
    if abs(guess - bus_bandwidth) < 0.005 * bus_bandwidth:
        return None
    if abs(guess - 200) < 1:
        return "that is the size by the time; how many bytes does each GPU send for it?"
    if abs(guess - 400) < 1:
        return "twice the size would be right for very many GPUs"
    return "take the bytes that each GPU sends, by the formula of the ring, and divide by the time"


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "seconds_of": (check_seconds_of, seconds_of),
    "share_of_limit": (check_share_of_limit, share_of_limit),
    "best_number": (check_best_number, best_number),
    "bus_bandwidth": (check_bus_bandwidth, bus_bandwidth),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "seconds_of": (
        "Draw one step as a bar from `work()` to the end of `wait()`. Where do the two readings of "
        "the clock belong? And which step should have come before the first reading?"
    ),
    "share_of_limit": (
        "Write down the three bars for the new number of rows. A bar grows only if its cause does: "
        "rows are computed, but what is copied and sent has the size of the model."
    ),
    "best_number": (
        "Write the time of a step with n workers as a sum of two parts; the lesson has a "
        "function for one of them. You need no formula for the best n: how many candidates are "
        "there?"
    ),
    "bus_bandwidth": (
        "Start from `all_reduce_cost`: which of its two numbers is a number of bytes, and for how "
        "many GPUs must you ask it?"
    ),
}
