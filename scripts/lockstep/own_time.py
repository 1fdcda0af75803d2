"""How long ranks have been at it by their own clocks, and whether they stand still.

On a busy machine a rank waits for a processor, and that is nobody's fault. So a deadline counts the
ranks' own time: the time that passes, less the time in which one of them could have gone on, and
other programs had the processors. And ranks that wait for each other for ever can be seen: they use
next to nothing of a processor.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

MOVES = 0.05  # of a processor, and more: a rank that waits may look at a file 100 times a second
TICKS = 0.02  # seconds of a processor: Linux counts them in steps of 0.01


class OwnTime:
    """Counts for some processes: `seconds` of own time, and `still`, how long none has moved.

    `still` is own time, too. How long a process was not let go on is told by Linux; elsewhere own
    time is the time that passes (https://docs.kernel.org/scheduler/sched-stats.html, schedstat of a
    task). What the processes take from each other counts as theirs, and a twentieth of the time
    that passes always does. What a process has started is not looked at: who waits for it is still.
    """

    def __init__(self):
        self.seconds = self.still = 0.0
        self._moment, self._before = time.monotonic(), {}
        self._used = 0.0  # of a processor by the busiest one, since any has moved

    def look(self, pids):
        """Look at the processes that are at it now, and count on; return `seconds`."""
        passed = time.monotonic() - self._moment
        if passed < 0.05:
            return self.seconds
        now = {pid: _times(pid) for pid in pids}
        used, not_let = [0.0], [0.0]
        for pid, (busy, waited) in now.items():
            busy_before, waited_before = self._before.get(pid, (busy, waited))
            used.append(busy - busy_before)
            not_let += [seconds - waited_before.get(one, 0.0) for one, seconds in waited.items()]
        own = max(passed - max(not_let), sum(used) / (os.cpu_count() or 1), passed / 20)
        self._moment, self._before = self._moment + passed, now
        self.seconds += own
        self.still += own
        self._used += max(used)
        if self._used > TICKS + MOVES * self.still:
            self.still = self._used = 0.0
        return self.seconds


def _times(pid):
    """Return (seconds of the processor, {thread: seconds in which it was not let}), so far."""
    busy, waited = 0.0, {}
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        busy = times.user + times.system
    with contextlib.suppress(OSError):  # this process, or one of its threads, has just ended
        for file in Path("/proc", str(pid), "task").glob("*/schedstat"):
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return busy, waited
