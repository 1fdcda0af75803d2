"""Be one rank of a lesson; torchrun.py starts it. Write down how it ended, for torchrun.py to read.

The lesson and the folder come in the environment, because torch.distributed.launch puts a flag of
its own, --local-rank, in front of ours.
"""

import atexit
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from run_lesson import end_with_parent, reason, verbose

# What gloo and the stores say to a rank whose neighbour has gone: a consequence, never the cause.
LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Connection was likely closed"
    "|Broken pipe|Socket closed|connectFullMesh failed"
)


def write_end(text, lost=False):
    """Write down when and why this rank ended; text is None if the lesson came to its end.

    A text that begins with "rank 1: " is about rank 1, whoever says it: the others may have been
    told why rank 1 can't go on.
    """
    rank = os.environ["RANK"]
    named = re.match(r"rank (\d+)(?: failed)?: (.*)", text or "")
    cause, text = named.groups() if named else (rank, text)
    end = {"rank": int(cause), "reason": text, "lost": lost, "time": time.monotonic()}
    path = Path(os.environ["LOCKSTEP_ENDS"], f"{rank}.json")
    path.write_text(json.dumps(end))


def main():
    """Run the lesson as this rank; return the exit code."""
    parent = os.getppid()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is for torchrun.py to handle
    lesson = os.environ["LOCKSTEP_LESSON"]
    sys.argv[0] = lesson
    sys.path[0] = os.path.dirname(os.path.abspath(lesson))
    try:
        runpy.run_path(lesson, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            write_end(stop.code.strip().splitlines()[-1])
            return 1
        if stop.code != 128 + signal.SIGTERM:  # with this one it has been ended, and cleans up
            write_end(None)
        return stop.code or 0
    except Exception as error:
        if verbose():
            traceback.print_exc()
        lost = bool(LOST.search(str(error)))
        write_end(reason(error), lost)
        if lost:
            time.sleep(2)  # the rank that is the cause leaves before us, and torchrun sees it first
        return 1
    write_end(None)
    return 0


def leave(code):
    """End this process as Python does, but for the C++ objects that are still alive.

    A group that has failed, or that DTensor still holds, keeps gloo's threads. If they live until
    these objects go, C++ now and then aborts the process: "terminate called without an active
    exception". Then torchrun would see a rank that SIGABRT has killed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
