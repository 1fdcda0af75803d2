"""Be one rank of a lesson that starts its ranks itself, when torchrun has started them already.

two_machines.py uses it: mp.spawn starts processes on one machine, so a lesson that calls it can't
reach two. Its launch_job(func, nproc, ...) is replaced by one that starts nothing.
"""

import importlib
import os
import sys
from pathlib import Path

SCRIPT = Path(os.environ["LOCKSTEP_LAUNCHES"])
sys.path.insert(0, str(SCRIPT.parent))
lesson = importlib.import_module(SCRIPT.stem)


def launch_job(func, nproc, *args):
    """Call func(rank, world_size, device, *args) as the rank that we are."""
    rank, world_size, device = lesson.join_group()
    result = func(rank, world_size, device, *args)
    lesson.dist.destroy_process_group()
    if rank > 0:
        sys.exit()  # rank 0 goes on, and judges what all have found
    return result


lesson.launch_job = launch_job
sys.argv += ["--nproc", os.environ["WORLD_SIZE"]]
sys.exit(lesson.start(lesson.main, lesson.refuse))
