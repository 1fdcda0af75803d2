"""Wrong answers to the task of lesson 11, each with what the check must say about it."""

from solutions.lesson_11 import solution


def all_workers(link, compute, size, most):
    return most


def one_worker(link, compute, size, most):
    return 1


def no_latency(link, compute, size, most):
    return solution((0, link[1]), compute, size, most)


def no_bytes(link, compute, size, most):
    return solution((link[0], 0), compute, size, most)


def half_the_messages(link, compute, size, most):
    return solution((link[0] / 2, link[1]), compute, size, most)


def best(seconds, most):
    return min(range(1, most + 1), key=seconds)


def bytes_of_the_master(link, compute, size, most):
    return best(lambda n: compute / n + 2 * (n - 1) * (link[0] + link[1] * size), most)


def twice_the_bytes(link, compute, size, most):
    def seconds(n):
        return compute / n + (n > 1) * (2 * (n - 1) * link[0] + 2 * link[1] * size)

    return best(seconds, most)


def sending_is_hidden(link, compute, size, most):
    def seconds(n):
        return max(compute / n, 2 * (n - 1) * link[0] + 2 * (n - 1) / n * link[1] * size)

    return best(seconds, most)


def always_16(link, compute, size, most):
    return solution(link, compute, size, 16)


def without_the_last(link, compute, size, most):
    return solution(link, compute, size, max(1, most - 1))


def twice_n_messages(link, compute, size, most):
    def seconds(n):
        return compute / n + (n > 1) * 2 * n * link[0] + 2 * (n - 1) / n * link[1] * size

    return best(seconds, most)


def rounds_the_formula(link, compute, size, most):
    gain = compute - 2 * link[1] * size
    if gain <= 0:
        return 1
    if link[0] == 0:
        return most
    return min(most, max(1, round((gain / (2 * link[0])) ** 0.5)))


def a_text(link, compute, size, most):
    return "4"


def nothing(link, compute, size, most):
    return None


WRONG = {
    "best_number": {
        "all": (all_workers, "a slow link: sending takes longer than computing"),
        "one": (one_worker, "a link that costs nothing"),
        "no latency": (no_latency, "the latency of the messages"),
        "no bytes": (no_bytes, "a slow link: sending takes longer than computing"),
        "half the messages": (half_the_messages, "the latency of the messages"),
        "the master's bytes": (bytes_of_the_master, "latency and bytes together"),
        "twice the bytes": (twice_the_bytes, "latency and bytes together"),
        "all overlaps": (sending_is_hidden, "fewer are faster: the latency of the messages"),
        "ignores the limit": (always_16, "of 3 workers at most you take 16"),
        "without the last": (without_the_last, "you take 15; more are faster: a link that costs"),
        "2 n messages": (twice_n_messages, "you take 1; more are faster: the latency at which"),
        "rounds the formula": (rounds_the_formula, "you take 1; more are faster: a formula that"),
        "a text": (a_text, "the answer is str, not a whole number of workers"),
        "None": (nothing, "the answer is NoneType, not a whole number of workers"),
    }
}
