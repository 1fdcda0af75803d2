"""A job that stands still: who waits where."""

import re

from lockstep.watch import facts
from lockstep.watch.findings import WRONG


def judge(job, report):
    """Say where each rank stands, in the order of the ranks."""
    waiting = [rank for rank, seen in job.items() if not seen.ended and not seen.error]
    gone = [rank for rank in job if rank not in waiting]
    places = {rank: stands(job[rank]) for rank in waiting}
    words = [f"rank {rank} {call} at {place}" for rank, (call, place) in places.items()]
    words += [f"rank {rank} has ended" for rank in gone]
    place = next((place for _, place in places.values() if place), None)
    report.found("hang", WRONG, f"the ranks wait for each other: {'; '.join(words)}", place, gone)


def stands(rank):
    """Return (what a rank does, the line): from its stack, or from its last call."""
    own, called = None, ""
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', rank.stack):
        if facts.is_own(file):
            own = f"{file.rpartition('/')[2]}:{line}"
            break
        if not function.startswith("_") and function != "wrapper":
            called = function
    last = next((e for e in reversed(rank.events) if e["what"] in ("call", "called")), None)
    if last and last["what"] == "call":
        return f"waits in {last['name']}", last["where"]
    return (f"stands in {called}" if called else "stands"), own
