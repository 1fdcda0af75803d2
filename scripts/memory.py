"""Is the memory enough for a number of ranks? Asked before they are started."""

import os
import re
from pathlib import Path

# What one rank takes, in GB, that it does not share with the others. Measured with the CPU build of
# torch: 0.15 in lesson 04, 0.16 in 08, 0.21 in 02, 06 and 09, 0.22 in 05, 0.27 in 10, 0.28 in 03,
# and 0.32 in 11, where rank 0 takes 1.
GB_PER_RANK = 0.3


def free_memory():
    """Return the memory that new processes can have, in bytes; where only Linux says it, all."""
    meminfo = Path("/proc/meminfo")
    available = meminfo.exists() and re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
    if available:
        return int(available[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def too_little(ranks):
    """Return one line that says why so many ranks don't fit into the memory, or None if they do."""
    needed, free = ranks * GB_PER_RANK, free_memory() / 1e9
    if needed <= free:
        return None
    return (
        f"error: argument --nproc: {ranks} ranks need about {needed:.1f} GB of memory, and "
        f"{free:.1f} GB are free; take fewer, or add --force"
    )
