"""How long processes have been at it by their own clocks, and whether they stand still.

On a busy machine a process waits for a processor, and that is nobody's fault. So a deadline counts
a rank's own time: the time that passes, less the time in which it could have gone on and was not
let. And ranks that wait for each other for ever show it: they use no processor, and want none.
"""

import contextlib
import time
from pathlib import Path

import psutil

STILL = 0.01  # of a processor, at most: a thread of torch wakes up ten times a second


class OwnTime:
    """Counts for some processes: `seconds` of own time, and `still`, how long none has moved.

    `still` is own time, too. How long a process was not let is told by Linux; elsewhere own time is
    the time that passes (https://docs.kernel.org/scheduler/sched-stats.html, schedstat of a task).
    """

    def __init__(self):
        self.seconds = self.still = 0.0
        self._moment = time.monotonic()
        self._before = {}  # process id: (seconds of the processor, {thread: seconds not let})

    def look(self, pids):
        """Look at the processes that are at it now, and count on; return `seconds`."""
        passed, now = time.monotonic() - self._moment, {pid: _times(pid) for pid in pids}
        self._moment += passed
        used, not_let = [0.0], [0.0]
        for pid, (busy, waited) in now.items():
            busy_before, waited_before = self._before.get(pid, (0.0, {}))
            used.append(busy - busy_before if pid in self._before else passed)
            not_let += [seconds - waited_before.get(one, 0.0) for one, seconds in waited.items()]
        own = max(0.0, passed - max(not_let)) if self._before else passed
        self._before = now
        self.seconds += own
        self.still = self.still + own if max(used) <= STILL * passed + 0.01 else 0.0
        return self.seconds


def _times(pid):
    """Return (seconds of the processor, {thread: seconds in which it was not let}), so far."""
    busy, waited = 0.0, {}
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        busy = times.user + times.system
    for file in Path("/proc", str(pid), "task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # this thread has just ended
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return busy, waited
