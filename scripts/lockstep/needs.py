"""What a lesson needs before it is started: its packages, and memory for its ranks."""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

from lockstep.lessons import IMPORT_NAMES, ONE_PROCESS, pins

# What one rank takes, in GB, that it does not share with the others. Measured with the CPU build of
# torch: 0.15 in lesson 04, 0.16 in 08, 0.21 in 02, 06 and 09, 0.22 in 05, 0.27 in 10, 0.28 in 03,
# and 0.32 in 11, where rank 0 takes 1.
GB_PER_RANK = 0.3


def problem(lesson, flags):
    """Return one line that says what a lesson lacks, with these flags, or None.

    --force among the flags: the memory is not looked at.
    """
    found = missing_packages(lesson)
    if not found and lesson.start != ONE_PROCESS and "--force" not in flags:
        found = too_little_memory(asked_ranks(flags))
    return found and f"{lesson.script.name}: error: {found}"


def missing_packages(lesson, also=()):
    """Return one line that says which packages are missing and how to get them, or None.

    Those that a lesson only compares with are not missed, but for those in `also`.
    """
    names = [
        name
        for name in lesson.packages + tuple(one for one in lesson.compares_with if one in also)
        if importlib.util.find_spec(IMPORT_NAMES.get(name, name)) is None
    ]
    if not names:
        return None
    wanted = " ".join(pins()[name] for name in names)
    python = shlex.quote(sys.executable)
    return f"needs {', '.join(names)}: {python} -m pip install {wanted}"


def asked_ranks(flags):
    """Return the number behind --nproc, or 0: whether it may be, the lesson says."""
    asked = re.findall(r"--nproc[= ]([0-9]{1,2})(?= |$)", " ".join(flags))
    return int(asked[-1]) if asked else 0


def read(path):
    """Return the text of a file, or "" if it can't be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def free_memory():
    """Return the memory that new processes can have, in bytes: what the machine and our job have.

    Slurm and Kubernetes put a job into a control group, and the limits of those above it count as
    well. A group also counts the files that it has read lately; they go when memory is needed.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available := re.search(r"MemAvailable: *(\d+) kB", read("/proc/meminfo")):
        free = int(available[1]) * 1024
    own = Path(read("/proc/self/cgroup").rpartition("::/")[2]).parts
    for depth in range(len(own) + 1):
        group = Path("/sys/fs/cgroup", *own[:depth])
        limit, used = read(group / "memory.max"), read(group / "memory.current")
        cache = re.search(r"(?m)^inactive_file (\d+)", read(group / "memory.stat"))
        if limit.isdigit() and used.isdigit():
            free = min(free, max(0, int(limit) - int(used) + int(cache[1] if cache else 0)))
    return free


def too_little_memory(ranks):
    """Return one line that says why so many ranks don't fit into the memory, or None if they do."""
    needed, free = ranks * GB_PER_RANK, free_memory() / 1e9
    if needed <= free:
        return None
    return (
        f"argument --nproc: {ranks} ranks need about {needed:.1f} GB of memory, and "
        f"{free:.1f} GB are free; take fewer, or add --force"
    )
