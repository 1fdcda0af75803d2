"""For a proof of times: while the script's clock runs, nobody watches, so no hook is measured.

The script warms up, waits at a barrier, reads time.perf_counter() and time.process_time(), works,
and reads both again. What it does to warm up is watched; then all hooks sleep until the last of
these readings. A turn is noted with the readings, and with what was seen before them.
"""

import math
import os
import sys
import time
import types
import weakref
from pathlib import Path

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.watch import facts
from lockstep.watch.hooks import around
from lockstep.watch.wire import Wire

READINGS = ("perf_counter", "process_time") * 2  # of one turn, in this order
now = types.SimpleNamespace(written=0, hook=None)
_inner = weakref.WeakSet()  # modules inside others, DDP's and Sequential's


def watch():
    """Put the hooks in place."""
    for name, hook in (("barrier", barrier), ("all_reduce", all_reduce)):
        around(c10d, name, hook)
        setattr(torch.distributed, name, getattr(c10d, name))
    around(torch.Tensor, "backward", backward)
    for name in READINGS[:2]:
        around(time, name, read)
    wake()


def wake():
    """Forget what was seen, and look at what comes: who warms up for a turn is seen."""
    now.forwards, now.calls, now.readings = [], [], []
    now.warm = {"models": [], "calls": [], "written": 0}
    now.hook = now.hook or register_module_forward_pre_hook(forward)


def forward(module, inputs):
    """A module is called. Threads may do that side by side."""
    if module not in _inner:
        _inner.update(part for part in module.modules() if part is not module)
        now.forwards.append((module, torch.get_num_threads(), len(inputs[0])))


def backward(function, loss, args, kwargs):
    """What is sent inside backward() is seen, by whomever it is sent."""
    if not now.hook:
        return function(*args, **kwargs)
    with Wire() as wire:
        function(*args, **kwargs)
    now.calls += wire.calls


def all_reduce(function, instance, args, kwargs):
    """The script sends; [name, bytes, whether it waits] is seen."""
    work = function(*args, **kwargs)
    if now.hook:
        now.calls.append([function.__name__, args[0].nbytes, work is None])
    return work


def barrier(function, instance, args, kwargs):
    """All ranks are warm, or have ended their turn: what they send from here on is the next one's.

    Of each model that was called, the gradient is told as facts.projection of each parameter.
    """
    if now.forwards or now.calls:
        written = written_so_far()
        now.warm["models"] = [tell(*seen) for seen in now.forwards]
        now.warm["calls"] = now.calls
        now.warm["written"] = None if written is None else written - now.written
        return function(*args, **kwargs)  # the clock is read next, and nothing may come between
    result = function(*args, **kwargs)
    now.written = written_so_far()
    return result


def tell(module, threads, rows):
    """Return what a model was called with, and what gradient it has now."""
    gradients = [p.grad for p in module.parameters()]
    sums = [math.nan if grad is None else facts.projection(grad) for grad in gradients]
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    settings = [name for name in names if getattr(module, name, False)]
    return {"threads": threads, "rows": rows, "gradient": sums, "settings": settings}


def read(clock, instance, args, kwargs):
    """A clock is read; between the first of READINGS and the last, nobody watches."""
    if not facts.is_own(sys._getframe(1).f_code.co_filename):
        return clock()
    if not now.readings:
        now.hook.remove()
        now.hook = None
    now.readings.append(told := clock())
    if len(now.readings) == len(READINGS):
        spent = [now.readings[n + 2] - now.readings[n] for n in (0, 1)]
        facts.note("turn", spent=spent, then=processors(), **now.warm)
        wake()
    return told


def written_so_far():
    """Return how many bytes this process has written, gloo's too; None without /proc.

    gloo writes to its sockets by `write` and `writev`. What goes out by `send` is not counted.
    """
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[3]) if counts.exists() else None


def processors():
    """Return seconds: on the clock, of all processors while they worked, and of this process.

    Where Linux does not tell, no processor has ever worked.
    """
    stat, ticks = Path("/proc/stat"), [0]
    if stat.exists():
        user, nice, system, _, _, *interrupts = map(int, stat.read_text().split()[1:9])
        ticks = [user, nice, system, *interrupts]
    return time.monotonic(), sum(ticks) / os.sysconf("SC_CLK_TCK"), time.process_time()
