"""What happened in a run: the events that nbtools.pictures draws.

`record` is used by the ranks themselves, so this module imports no matplotlib.
"""

import contextlib
import itertools
import os
import time
from typing import NamedTuple


class Span(NamedTuple):
    """Something that took time in one lane (a rank, a thread, a device)."""

    lane: str
    kind: str  # "compute", "send" or "wait"
    name: str
    begin: float  # seconds on a clock that all processes of this machine share
    end: float
    nbytes: int | None = None  # what the lane handed over, if it sent something


class Message(NamedTuple):
    """A tensor that went from one rank (or device) to another, in a step of the story."""

    step: str
    source: str
    target: str
    nbytes: int


class Collective(NamedTuple):
    """A collective that several ranks called together.

    `nbytes` is what each of them handed in; with a `source`, as in a broadcast, only that one did.
    """

    step: str
    name: str
    ranks: tuple
    nbytes: int
    source: str | None = None


class Recorder:
    """Collects the spans of this rank. `calls` are the collectives, as nbtools.wire has them."""

    def __init__(self, rank):
        self.rank = rank
        self.spans = []
        self.calls = []

    @contextlib.contextmanager
    def span(self, kind, name, nbytes=None, lane=None):
        """Record the block as one span in this rank's lane."""
        begin = time.monotonic()
        try:
            yield
        finally:
            lane = lane or f"rank {self.rank}"
            self.spans.append(Span(lane, kind, name, begin, time.monotonic(), nbytes))


@contextlib.contextmanager
def record(rank):
    """Record what this rank does in the block; yields a Recorder, which is filled at its end.

    From torch.profiler come DDP's forward, the functions of backward (lane "rank 0"), and gloo's
    collectives, which run on threads of their own (lane "rank 0, gloo"). From `Wire` come the
    bytes. Blocks that you mark with recorder.span(kind, name) are added as they are.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    from nbtools.wire import Wire

    recorder = Recorder(rank)
    with _quiet(), contextlib.ExitStack() as stack:
        profiler = stack.enter_context(
            profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        )
        with Wire() as wire:
            anchors = []
            for _ in range(5):  # another process may run between the two clocks: take the best
                before = time.monotonic()
                with record_function("nbtools: anchor"):
                    pass
                anchors.append((before, time.monotonic()))
            yield recorder
    recorder.calls = wire.calls
    recorder.spans += _read_spans(rank, profiler.events(), anchors, wire.calls)
    recorder.spans.sort(key=lambda span: span.begin)


def _read_spans(rank, events, anchors, calls):
    """Translate the profiler's events; its clock is shifted to time.monotonic().

    `anchors`: when each mark began and ended by time.monotonic(). The shortest one is the best.
    """
    marks = [event.time_range.start / 1e6 for event in events if event.name == "nbtools: anchor"]
    pairs = zip(anchors, sorted(marks), strict=True)
    (begin, end), mark = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
    shift = (begin + end) / 2 - mark
    item_size = {call.numbers: call.nbytes // call.numbers for call in calls}
    prefix = "autograd::engine::evaluate_function: "
    spans = []
    for event in events:
        begin, end = (event.time_range.start / 1e6 + shift, event.time_range.end / 1e6 + shift)
        if event.name.startswith("gloo:"):
            numbers = _product(event.input_shapes[0])
            nbytes = numbers * item_size.get(numbers, 0) or None
            name = event.name.removeprefix("gloo:")
            spans.append(Span(f"rank {rank}, gloo", "send", name, begin, end, nbytes))
        elif event.name == "DistributedDataParallel.forward":
            spans.append(Span(f"rank {rank}", "compute", "forward", begin, end))
        elif event.name.startswith(prefix):
            name = event.name.removeprefix(prefix).removeprefix("torch::autograd::")
            spans.append(Span(f"rank {rank}", "compute", f"backward: {name}", begin, end))
        elif event.name.startswith("Optimizer.step"):
            spans.append(Span(f"rank {rank}", "compute", "optimizer.step", begin, end))
    return spans


def _product(shape):
    product = 1
    for size in shape:
        product *= size
    return product


@contextlib.contextmanager
def _quiet():
    """Keep the profiler's own lines off stderr: its C++ code writes two at each use."""
    with open(os.devnull, "w") as nowhere:
        keep = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(keep, 2)
            os.close(keep)


def waits(spans):
    """Return `spans` and, in each rank's lane, the times in which it only waits for gloo.

    A rank waits where one of its collectives runs, nothing of its own does, and it goes on
    afterwards: between the last function of backward() and optimizer.step(), for example. Gaps
    below 0.1 ms are left out: they are Python's, not gloo's.
    """
    found = list(spans)
    for lane in {span.lane for span in spans if not span.lane.endswith(", gloo")}:
        own = sorted((span.begin, span.end) for span in spans if span.lane == lane)
        sends = [span for span in spans if span.lane == f"{lane}, gloo"]
        for (_, idle), (busy, _) in itertools.pairwise(own):
            overlap = [span for span in sends if span.begin < busy and span.end > idle]
            if busy - idle > 1e-4 and overlap:
                end = min(busy, max(span.end for span in overlap))
                begin = max(idle, min(span.begin for span in overlap))
                found.append(Span(lane, "wait", "waits for gloo", begin, end))
    return sorted(found, key=lambda span: span.begin)
