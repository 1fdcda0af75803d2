"""Wrong attempts at the tasks of lesson 11, and words that their verdict must contain."""

import time
from itertools import pairwise

from solutions.lesson_11 import best_number as solution

# --- Task 1 ---


def counts_the_warm_up(work, wait, rounds):
    return [one_step(work, wait) for _ in range(rounds)]


def one_step(work, wait):
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def by_the_time_of_day(work, wait, rounds):
    work(), wait()
    begin = time.time()
    work(), wait()
    return [time.time() - begin, *(one_step(work, wait) for _ in range(rounds - 1))]


def does_not_wait(work, wait, rounds):
    work(), wait()
    return [one_step(work, lambda: None) for _ in range(rounds)]


def waits_after_the_clock(work, wait, rounds):
    work(), wait()
    seconds = []
    for _ in range(rounds):
        seconds.append(one_step(work, lambda: None))
        wait()
    return seconds


def lets_the_clock_run_on(work, wait, rounds):
    work(), wait()
    laps = [time.perf_counter()]
    for _ in range(rounds):
        work(), wait()
        laps.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(laps)]


def times_the_warm_up_too(work, wait, rounds):
    begin, seconds = time.perf_counter(), []
    for _ in range(rounds + 1):
        work(), wait()
        end = time.perf_counter()
        seconds.append(end - begin)
        begin = end
    return seconds[1:]


def never_sets_it_back(work, wait, rounds):
    work(), wait()
    begin, seconds = time.perf_counter(), []
    for _ in range(rounds):
        work(), wait()
        seconds.append(time.perf_counter() - begin)
    return seconds


def waits_at_the_end(work, wait, rounds):
    work(), wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        work()
    wait()
    return [(time.perf_counter() - begin) / rounds] * rounds


def warms_up_without_waiting(work, wait, rounds):
    work()
    return [one_step(work, wait) for _ in range(rounds)]


def sorts_them(work, wait, rounds):
    work(), wait()
    return sorted(one_step(work, wait) for _ in range(rounds))


def a_mean(work, wait, rounds):
    work(), wait()
    seconds = [one_step(work, wait) for _ in range(rounds)]
    return [sum(seconds) / rounds] * rounds


def the_fastest(work, wait, rounds):
    work(), wait()
    return min(one_step(work, wait) for _ in range(rounds))


def drops_the_first_of_many(work, wait, rounds):
    return [one_step(work, wait) for _ in range(10 * rounds)][-rounds:]


# --- Task 3 ---


def all_workers(link, compute, size, most):
    return most


def one_worker(link, compute, size, most):
    return 1


def with_other(link=lambda a, b: (a, b), most=lambda most: most):
    """Return an attempt that is right for another link, or another limit."""
    return lambda own, compute, size, limit: solution(link(*own), compute, size, most(limit))


def by(sending):
    """Return an attempt that takes sending(n, a, b * size) for the seconds of an all-reduce."""

    def attempt(link, compute, size, most):
        return min(range(1, most + 1), key=lambda n: seconds(n, compute, link[0], link[1] * size))

    def seconds(n, compute, *link):
        return compute / n + (n > 1) * sending(n, *link)

    return attempt


def sending_is_hidden(link, compute, size, most):
    def seconds(n):
        return max(compute / n, 2 * (n - 1) * link[0] + 2 * (n - 1) / n * link[1] * size)

    return min(range(1, most + 1), key=seconds)


def rounds_the_formula(link, compute, size, most):
    gain = compute - 2 * link[1] * size
    if gain <= 0:
        return 1
    if link[0] == 0:
        return most
    return min(most, max(1, round((gain / (2 * link[0])) ** 0.5)))


no_latency = with_other(lambda a, b: (0, b))
no_bytes = with_other(lambda a, b: (a, 0))
half_the_messages = with_other(lambda a, b: (a / 2, b))
always_16 = with_other(most=lambda most: 16)
never_more_than_16 = with_other(most=lambda most: min(16, most))
without_the_last = with_other(most=lambda most: max(1, most - 1))
bytes_of_the_master = by(lambda n, a, b: 2 * (n - 1) * (a + b))
twice_the_bytes = by(lambda n, a, b: 2 * (n - 1) * a + 2 * b)
twice_n_messages = by(lambda n, a, b: 2 * n * a + 2 * (n - 1) / n * b)
one_message_less = by(lambda n, a, b: (2 * n - 3) * a + 2 * (n - 1) / n * b)


def a_text(link, compute, size, most):
    return "4"


def nothing(link, compute, size, most):
    return None


WRONG = {
    "seconds_of": {
        "warm-up": (counts_the_warm_up, "the first step, which also warms up"),
        "no waiting": (does_not_wait, "before its step has ended"),
        "waits too late": (waits_after_the_clock, "before its step has ended"),
        "its clock runs on": (lets_the_clock_run_on, "other work between two steps"),
        "also from the warm-up": (times_the_warm_up_too, "other work between two steps"),
        "since the beginning": (never_sets_it_back, "other work between two steps"),
        "waits once, at the end": (waits_at_the_end, "no mean, please"),
        "the warm-up goes on": (warms_up_without_waiting, "a part of the step before it"),
        "sorted": (sorts_them, "not in the order of the steps"),
        "a mean": (a_mean, "no mean, please"),
        "the fastest": (the_fastest, "must return a list of 1 times"),
        "wasteful": (drops_the_first_of_many, "10 steps were made, for 1 times"),
        "a clock that is set": (by_the_time_of_day, "a time is negative"),
        "the stub of the notebook": (counts_the_warm_up, "the first step"),
    },
    "share_of_limit": {
        "as before": (48 / 72, "the share with 512 rows"),
        "all bars grow": (2.67, "below 1, and it changes"),
        "nan": (float("nan"), "below 1, and it changes"),
        "the limit": (1.0, "divide the new limit by the new step"),
        "sending is halved": (192 / 204, "its gradient, not its rows"),
    },
    "best_number": {
        "all": (all_workers, "a slow link: sending takes longer than computing"),
        "one": (one_worker, "a link that costs nothing"),
        "no latency": (no_latency, "the latency of the messages"),
        "no bytes": (no_bytes, "a slow link: sending takes longer than computing"),
        "half the messages": (half_the_messages, "the latency of the messages"),
        "the master's bytes": (bytes_of_the_master, "latency and bytes together"),
        "twice the bytes": (twice_the_bytes, "latency and bytes together"),
        "all overlaps": (sending_is_hidden, "fewer are faster: the latency of the messages"),
        "never more than 16": (never_more_than_16, "of 1000 workers at most you take 16; more"),
        "ignores the limit": (always_16, "of 3 workers at most you take 16"),
        "without the last": (without_the_last, "you take 15; more are faster: a link that costs"),
        "2 n messages": (twice_n_messages, "you take 1; more are faster: the latency at which"),
        "one message less": (one_message_less, "you take 2; fewer are faster: a second worker"),
        "rounds the formula": (rounds_the_formula, "you take 1; more are faster: a formula that"),
        "a text": (a_text, "the answer is str, not a whole number of workers"),
        "None": (nothing, "the answer is NoneType, not a whole number of workers"),
    },
    "bus_bandwidth": {
        "size by time": (200.0, "how many bytes does each GPU send"),
        "twice": (400.0, "very many GPUs"),
        "one phase only": (175.0, "by the formula of the ring"),
        "in gigabits": (2800.0, "by the formula of the ring"),
    },
}
