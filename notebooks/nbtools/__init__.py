"""The tools of the notebooks. Importing this package imports no framework.

run(fn, nproc, *args)             call fn(rank, world_size, *args) in `nproc` real processes
wait_for_all(rank, world_size)    on such a process: go on when all have come, without a group
launch(3, nproc=2, steps=5)       run scripts/lesson_03.sh, return its JSON
check(script, edits)              what scripts/check.sh finds in a script after these edits
check_each(script, [edits, ...])  the same for several, sooner, of a script that torchrun starts
show(fn), show_difference(a, b)   the source of functions, as the lesson has it
measured(value, low, high)        a number that the run has measured, as ≈0.412
judge(check, attempt)             what the check of a task says about an attempt
hint(check)                       the next thought for someone who is stuck with this task
free_ports(count)                 ports for those who have to name one

Two modules are imported by name:

nbtools.record     Wire: the collectives that PyTorch calls; Saved: the memory that autograd keeps
nbtools.pictures   record, lanes, strip: pictures of what ranks do and send, from a real run
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in ("scripts", "lessons"):  # the notebooks import the lessons, and we import lockstep
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

from lockstep.network import free_ports  # noqa: E402

from nbtools.blame import RankFailed  # noqa: E402
from nbtools.cell import (  # noqa: E402
    OutOfBounds,
    explain_missing_frameworks,
    hint,
    judge,
    measured,
    show,
    show_difference,
)
from nbtools.launch import LaunchFailed, check, check_each, launch  # noqa: E402
from nbtools.run import run, wait_for_all  # noqa: E402

__all__ = [
    "ROOT",
    "LaunchFailed",
    "OutOfBounds",
    "RankFailed",
    "check",
    "check_each",
    "free_ports",
    "hint",
    "judge",
    "launch",
    "measured",
    "run",
    "show",
    "show_difference",
    "wait_for_all",
]

explain_missing_frameworks()
