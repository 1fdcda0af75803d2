"""Be one rank of a lesson; torchrun.py starts it. Write down how it ended, for torchrun.py to read.

The lesson and the folder come in the environment, because torch.distributed.launch puts a flag of
its own, --local-rank, in front of ours.
"""

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
    """Write down when and why this rank ended; text is None if the lesson came to its end."""
    end = {"reason": text, "lost": lost, "time": time.monotonic()}
    path = Path(os.environ["LOCKSTEP_ENDS"], f"{os.environ['RANK']}.json")
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
            last_line = stop.code.strip().splitlines()[-1]
            write_end(re.sub(r"^rank \d+( failed)?: ", "", last_line))
            return 1
        write_end(None)
        raise
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


if __name__ == "__main__":
    sys.exit(main())
