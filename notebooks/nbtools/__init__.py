"""The tools of the notebooks. Importing this package imports no framework.

run(fn, nproc, *args)             call fn(rank, world_size, *args) in `nproc` real processes
launch(3, nproc=2, steps=5)       run scripts/lesson_03.sh, return its JSON
show(fn), show_difference(a, b)   the source of functions, as the lesson has it
measured(value, low, high)        a number that the run has measured, as ≈0.412
judge(check, attempt)             what the check of a task says about an attempt
free_ports(count)                 ports for those who have to name one

Two modules are imported by name, because they need torch or matplotlib:

nbtools.wire       Wire: the collectives that PyTorch calls, with their bytes
nbtools.pictures   record, lanes, strip: pictures of what ranks do and send, from a real run
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT / "lessons") not in sys.path:
    sys.path.insert(0, str(ROOT / "lessons"))  # so that notebooks can import the lessons

from nbtools.judge import judge  # noqa: E402
from nbtools.launch import LaunchFailed, launch  # noqa: E402
from nbtools.measured import OutOfBounds, measured  # noqa: E402
from nbtools.ports import free_ports  # noqa: E402
from nbtools.run import RankFailed, run  # noqa: E402
from nbtools.show import show, show_difference  # noqa: E402

__all__ = [
    "ROOT",
    "LaunchFailed",
    "OutOfBounds",
    "RankFailed",
    "free_ports",
    "judge",
    "launch",
    "measured",
    "run",
    "show",
    "show_difference",
]
