"""What a run did: its collectives, the memory that autograd kept, and who did what when.

Wire      the collectives that PyTorch calls, with their bytes
spread    how far numbers differ between ranks that should be equal
Saved     how much memory autograd keeps between forward and backward
record    what a rank does, as spans of time; the events here are what nbtools.pictures draws

Ranks use this module, so it imports no matplotlib; and torch only when one of these is used: the
notebooks of lessons 07 and 08 draw with another framework, and two in one process can crash it.
"""

import contextlib
import itertools
import math
import time
from typing import NamedTuple
from unittest.mock import patch

from lockstep.imports import quiet

# --- Wire ---


class Call(NamedTuple):
    """One collective, and the first tensor that a rank handed over."""

    name: str
    kind: str
    numbers: int
    nbytes: int

    def __str__(self):
        return f"{self.name} of {self.numbers} {self.kind} = {self.nbytes} bytes"


def Wire():
    """Write down every collective inside `with Wire() as wire`: `wire.calls`, a list of Call.

    A call has the collective's name, and the type, the count of numbers and the bytes of the first
    tensor that a rank hands over. It is not what a cable carries.
    """
    from lockstep.watch import wire

    return wire.Wire(_call)


def _call(function, args):
    """Return the Call of a collective with these arguments."""
    from lockstep.watch import wire

    names = [argument.name for argument in function._schema.arguments]
    given = [one for one, name in zip(args, names, strict=False) if name.startswith("input")]
    first = wire.tensors_in([given, args])[0]  # what goes in, if it has a name of its own
    name = function._schema.name.split("::")[-1].rstrip("_")
    kind = str(first.dtype).removeprefix("torch.")
    return Call(name, kind, first.numel(), first.nbytes)


def spread(tensors):
    """Return the largest difference between ranks of numbers that all of them have."""
    import torch
    import torch.distributed as dist

    lowest = torch.cat([tensor.detach().flatten() for tensor in tensors])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return (highest - lowest).max().item()


# --- Saved ---


class Saved:
    """Counts what autograd keeps for backward inside `with Saved(...) as saved`.

    saved.most: the most bytes that were kept at a time. Memory that two functions keep counts once,
    and that of the tensors `there_anyway` (parameters, the batch) does not count.
    """

    def __init__(self, *there_anyway):
        self.ignored = {_address(tensor) for tensor in there_anyway}
        self.users = {}  # address of some memory: how many functions keep it
        self.now = self.most = 0

    def __enter__(self):
        from torch.autograd.graph import saved_tensors_hooks

        self._hooks = saved_tensors_hooks(lambda tensor: _Kept(self, tensor), _Kept.get)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)


class _Kept:
    """A tensor that a function of autograd keeps, until autograd forgets it."""

    def __init__(self, saved, tensor):
        self.saved, self.tensor, self.address = saved, tensor, _address(tensor)
        self.nbytes = 0 if self.address in saved.ignored else tensor.untyped_storage().nbytes()
        users = saved.users.get(self.address, 0)
        saved.users[self.address] = users + 1
        if users == 0:
            saved.now += self.nbytes
            saved.most = max(saved.most, saved.now)

    def get(self):
        return self.tensor

    def __del__(self):
        self.saved.users[self.address] -= 1
        if self.saved.users[self.address] == 0:
            self.saved.now -= self.nbytes


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


# --- Events ---


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
    """Collects the spans of this rank. `calls` are the collectives, as Wire has them."""

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

    def timed(self, kind, name, function):
        """Return this function, whose calls are recorded as spans."""

        def call(*args, **kwargs):
            with self.span(kind, name):
                return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def record(rank):
    """Record what this rank does in the block; yields a Recorder, which is filled at its end.

    From torch.profiler come DDP's forward, the functions of backward (lane "rank 0"), and gloo's
    collectives, which run on threads of their own (lane "rank 0, gloo"). From `Wire` come the
    bytes. Blocks that you mark with recorder.span(kind, name) are added as they are.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    recorder = Recorder(rank)
    activities = [ProfilerActivity.CPU]
    profiler = profile(activities=activities, record_shapes=True)
    with quiet(), profiler, Wire() as wire:  # the profiler's C++ code writes two lines at each use
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


@contextlib.contextmanager
def all_reduces(recorder, ddp, send, average):
    """Record each all-reduce in the block: those of a DDP model, and those that Python calls.

    Their kinds are "average" and "send"; their names are given, and a number follows. A hook takes
    the place of DDP's all-reduce, which C++ calls, and does the same.
    """
    import torch
    import torch.distributed as dist

    add_up, names = dist.all_reduce, {"send": send, "average": average}

    def recorded(tensor, group, kind="send"):
        with recorder.span(kind, f"{names[kind]} {len(recorder.spans) + 1}", tensor.nbytes):
            add_up(tensor, group=group)

    def hook(group, bucket):
        recorded(bucket.buffer(), group, "average")
        done = torch.futures.Future()
        done.set_result(bucket.buffer() / group.size())
        return done

    ddp.register_comm_hook(ddp.process_group, hook)
    with patch.object(dist, "all_reduce", recorded):
        yield


def without(span, others):
    """Return the parts of a span that lie between these others, which are in it, in order."""
    edges = [span.begin, *(edge for one in others for edge in (one.begin, one.end)), span.end]
    pieces = zip(edges[::2], edges[1::2], strict=True)
    return [span._replace(begin=begin, end=end) for begin, end in pieces]


def _read_spans(rank, events, anchors, calls):
    """Translate the profiler's events; its clock is shifted to time.monotonic().

    `anchors`: when each mark began and ended by time.monotonic(). The shortest one is the best.
    """
    marks = [event.time_range.start / 1e6 for event in events if event.name == "nbtools: anchor"]
    pairs = zip(anchors, sorted(marks), strict=True)
    (begin, end), mark = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
    shift = (begin + end) / 2 - mark
    item_size = {call.numbers: call.nbytes // call.numbers for call in calls}
    spans = []
    for event in events:
        lane, kind, nbytes, name = f"rank {rank}", "compute", None, _name(event)
        if event.name.startswith("gloo:"):
            numbers = math.prod(event.input_shapes[0])
            nbytes = numbers * item_size.get(numbers, 0) or None
            lane, kind = f"{lane}, gloo", "send"
        if name:
            begin, end = event.time_range.start / 1e6 + shift, event.time_range.end / 1e6 + shift
            spans.append(Span(lane, kind, name, begin, end, nbytes))
    return over_before_the_update(spans)


def over_before_the_update(spans):
    """Return the spans of a rank, with each collective cut where an optimizer.step begins.

    gloo's thread first hands its result on, and only then says that it has ended: sometimes later
    than the rank begins to use the result.
    """
    updates = [span.begin for span in spans if span.name == "optimizer.step"]
    found = []
    for span in spans:
        end = min((at for at in updates if span.begin < at < span.end), default=span.end)
        found.append(span._replace(end=end) if span.kind == "send" else span)
    return found


def _name(event):
    """Return what an event of the profiler is called in a picture, or None if it is not drawn."""
    prefix = "autograd::engine::evaluate_function: "
    if event.name.startswith("gloo:"):
        return event.name.removeprefix("gloo:")
    if event.name == "DistributedDataParallel.forward":
        return "forward"
    if event.name.startswith(prefix):
        return "backward: " + event.name.removeprefix(prefix).removeprefix("torch::autograd::")
    if event.name.startswith("Optimizer.step"):
        return "optimizer.step"
    return None


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


def until_all_have_come(spans):
    """Return `spans` with each collective cut in two: a wait until the last lane has begun it too.

    The first collective of one lane is the first of all others, and so on: they get a number.
    """
    lanes = {span.lane: [] for span in spans if span.kind == "send"}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.kind == "send":
            lanes[span.lane].append(span)
    found = [span for span in spans if span.kind != "send"]
    for number, same in enumerate(zip(*lanes.values(), strict=True), 1):
        last = max(span.begin for span in same)
        for span in same:
            if span.begin < last:
                wait = Span(span.lane, "wait", f"waits {number}", span.begin, last)
                found.append(wait)
            found.append(span._replace(name=f"{span.name} {number}", begin=last))
    return sorted(found, key=lambda span: span.begin)
