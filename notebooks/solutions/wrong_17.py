"""Wrong attempts at the tasks of lesson 17, and words that their verdict must contain."""

import contextlib

import lesson_17_ddp_from_scratch as lesson
import torch
import torch.distributed as dist
from solutions.lesson_17 import all_reduce, average_each, overlapped
from torch.nn.parallel import DistributedDataParallel


def copy_back(bucket, flat):
    """Make the parts of a flat sum the gradients of its bucket."""
    flat /= dist.get_world_size()
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        p.grad.copy_(part.view_as(p))


# --- Task 2 ---


def after_backward(model, limit):
    def finish():
        for bucket in lesson.into_buckets([*model.parameters()][::-1], limit):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat)
            copy_back(bucket, flat)

    return finish


def one_by_one(model, limit):
    return average_each(model)


def in_forward_order(model, limit):
    class Turned:
        parameters = staticmethod(lambda: [*model.parameters()][::-1])

    return overlapped(Turned, limit)


def nobody_waits(model, limit):
    overlapped(model, limit)
    return lambda: None


def synchronous(flat, async_op):
    dist.all_reduce(flat)
    return torch.futures.collect_all([])


def waited_for(flat, async_op):
    dist.all_reduce(flat, async_op=True).wait()
    return torch.futures.collect_all([])


def by_another_name(flat, async_op):
    return all_reduce(flat, async_op=async_op)  # as after `from … import all_reduce`


def hooked(send=None, hold=0, largest=None, forgets=False):
    """Return an answer to task 3 that sends by `send`, and when `hold` gradients are here."""

    def pausable(model, limit):
        buckets = lesson.into_buckets([*model.parameters()][::-1], largest or limit)
        ready, sent, paused = set(), [], []

        @contextlib.contextmanager
        def no_sync():
            paused.append(1)
            try:
                yield
            except ValueError:
                if not forgets:
                    paused.clear()
                raise
            paused.clear()

        def on_gradient(p):
            if not paused:
                ready.add(p)
            for bucket in buckets[len(sent) :] if len(ready) >= hold else []:
                if not ready.issuperset(bucket):
                    break
                flat = torch.cat([p.grad.flatten() for p in bucket])
                sent.append((bucket, flat, (send or dist.all_reduce)(flat, async_op=True)))

        def finish():
            for bucket, flat, work in sent:
                work.wait()
                copy_back(bucket, flat)
            ready.clear(), sent.clear()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(on_gradient)
        return finish, no_sync

    return pausable


def without_pause(pausable):
    """Return it as an answer to task 2."""
    return lambda model, limit: pausable(model, limit)[0]


def only_once(model, limit):
    finish, calls = overlapped(model, limit), []
    return lambda: calls.append(1) or (finish() if len(calls) == 1 else None)


def times(factor):
    """Return an answer whose gradients are wrong by factor(number of ranks)."""

    def attempt(model, limit):
        finish = overlapped(model, limit)

        def multiplied():
            finish()
            for p in model.parameters():
                p.grad *= factor(dist.get_world_size())

        return multiplied

    return attempt


def the_library(model, limit):
    DistributedDataParallel(model)
    return lambda: None


def right_with_counters(model, limit):
    """Count what is missing in each bucket, in place of a set."""
    buckets = lesson.into_buckets([*model.parameters()][::-1], limit)
    number = {p: n for n, bucket in enumerate(buckets) for p in bucket}
    missing, sent = [len(bucket) for bucket in buckets], []

    def on_gradient(p):
        missing[number[p]] -= 1
        while len(sent) < len(buckets) and missing[len(sent)] == 0:
            flat = torch.cat([p.grad.flatten() for p in buckets[len(sent)]])
            sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, (flat, work) in zip(buckets, sent, strict=True):
            work.wait()
            copy_back(bucket, flat)
        missing[:] = [len(bucket) for bucket in buckets]
        sent.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return finish


# --- Task 3 ---


def sends_each_time(model, limit):
    finish = overlapped(model, limit)

    @contextlib.contextmanager
    def no_sync():
        yield
        finish()

    return finish, no_sync


def never_again(model, limit):
    finish = after_backward(model, limit)
    return finish, contextlib.nullcontext


def throws_away(model, limit):
    finish = overlapped(model, limit)

    @contextlib.contextmanager
    def no_sync():
        kept = dist.all_reduce
        dist.all_reduce = lambda tensor, async_op=False: torch.futures.collect_all([])
        try:
            yield
        finally:
            dist.all_reduce = kept
            finish()
            model.zero_grad()

    return finish, no_sync


# --- Task 4 ---


def as_given(model):
    works = []

    def on_gradient(p):
        works.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p, work in works:
            work.wait()
            p.grad /= dist.get_world_size()
        works.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return finish


def at_the_end(copies):
    """Return an answer that sends each gradient so often, after backward()."""

    def average_each(model):
        def finish():
            for p in model.parameters():
                flat = torch.stack([p.grad] * copies)
                dist.all_reduce(flat)
                p.grad = flat[0] / dist.get_world_size()

        return finish

    return average_each


def each_by(send=None, hold=0, learns=False):
    """Return an answer to task 4, which may learn the order from rank 0's first step."""

    def average_each(model):
        order, ready, works = [*model.parameters()][::-1], [], []
        known = [] if learns else [1]

        def begin(p):
            works.append((p, (send or dist.all_reduce)(p.grad, async_op=True)))

        def on_gradient(p):
            ready.append(p)
            while known and len(ready) >= hold and len(works) < 12:
                if not any(p is order[len(works)] for p in ready):
                    break
                begin(order[len(works)])

        def finish():
            if not known:
                names = list(map(id, model.parameters()))
                numbers = torch.tensor([names.index(id(p)) for p in ready])
                dist.broadcast(numbers, 0)
                order[:] = [[*model.parameters()][n] for n in numbers]
                known.append(1)
                for p in order:
                    begin(p)
            for p, work in works:
                work.wait()
                p.grad /= dist.get_world_size()
            ready.clear(), works.clear()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(on_gradient)
        return finish

    return average_each


# Other right answers.
RIGHT = {"overlapped": [right_with_counters], "average_each": [each_by(learns=True)]}

WRONG = {
    "buckets_of_ddp": {
        "all bytes by the limit": (10, "close the first bucket by its own limit"),
        "without the first": (8, "close the first bucket by its own limit"),
        "closed before the limit": (13, "how many layers reach the other one"),
    },
    "overlapped": {
        "after backward": (after_backward, "lets a bucket wait"),
        "one by one": (one_by_one, "begins 12 all-reduces"),
        "from the first layer on": (in_forward_order, "lets a bucket wait"),
        "nobody waits": (nobody_waits, "away from the mean"),
        "not asynchronous": (without_pause(hooked(synchronous)), "waits before all buckets"),
        "waits in the hook": (without_pause(hooked(waited_for)), "waits before all buckets"),
        "held back": (without_pause(hooked(hold=11)), "lets a bucket wait"),
        "one bucket": (without_pause(hooked(largest=2**40)), "begins 1 all-reduces"),
        "by another name": (without_pause(hooked(by_another_name)), "calls nothing by the name"),
        "only once": (only_once, "step 2: rank 0's gradient is"),
        "the sum": (times(lambda n: n), "with 2 ranks: step 1: rank 0's gradient is"),
        "for two ranks": (times(lambda n: n / 2), "with 3 ranks: step 1: rank 0's gradient is"),
        "the library": (the_library, "DDP, or OwnDDP, is not an answer"),
    },
    "pausable": {
        "sends each time": (sends_each_time, "bytes inside no_sync"),
        "without overlap": (never_again, "lets a bucket wait"),
        "not asynchronous": (hooked(synchronous), "waits before all buckets"),
        "in the last hook": (hooked(hold=12), "lets a bucket wait"),
        "one bucket": (hooked(largest=2**40), "begins 1 all-reduces"),
        "forgets after an error": (hooked(forgets=True), "after an error inside no_sync"),
        "throws gradients away": (throws_away, "away from the mean"),
    },
    "average_each": {
        "as given": (as_given, "another order: rank 0's gradient is"),
        "all at the end": (at_the_end(1), "begins only 0 all-reduces"),
        "not asynchronous": (each_by(synchronous), "waits before all have left"),
        "waits in the hook": (each_by(waited_for), "waits before all have left"),
        "held back": (each_by(hold=11), "begins only 0 all-reduces"),
        "twice the bytes": (at_the_end(2), "it needs 13056"),
    },
}
