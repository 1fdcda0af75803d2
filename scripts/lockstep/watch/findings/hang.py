"""A job that stands still: who waits where."""

import re

from lockstep.watch import facts
from lockstep.watch.findings import WRONG


def judge(job, report):
    """Say where each rank stands or was, in the order of the ranks."""
    words, places, gone = [], [], []
    for rank, seen in job.items():
        least = "at least " if "updates" in seen.left_out else ""
        made = f"after {least}{seen.count()} updates"
        if seen.error:
            words.append(f"rank {rank} waited in vain at {seen.error['where']} {made}")
            places.append(seen.error["where"])
        elif seen.ended:
            words.append(f"rank {rank} had ended {made}")
            gone.append(rank)
        else:
            what, place = stands(seen)
            words.append(f"rank {rank} {what} {place or 'no line of yours'} {made}")
            places.append(place)
    apart = [one.place for one in report.findings if one.kind == "messages differ"]
    place = next((place for place in apart + places if place), None)
    report.found("hang", WRONG, f"the ranks wait for each other: {'; '.join(words)}", place, gone)


def stands(rank):
    """Return (what a rank does, the line): from its stack, or from its last call."""
    own, called = read(rank.stack)
    last = next((e for e in reversed(rank.events) if e["what"] in ("call", "called")), None)
    if last and last["what"] == "call":
        return f"waits in {last['name']} at", last["where"]
    if own:
        return f"stands {f'in {called} ' if called else ''}at", own
    seen = next((e["where"] for e in reversed(rank.events) if e.get("where")), None)
    return "was last seen at", seen


def read(stack):
    """Return (the innermost line of the reader's own or None, the library's function called)."""
    called = ""
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', stack):
        if facts.is_own(file):
            return f"{file.rpartition('/')[2]}:{line}", called
        if not function.startswith("_") and function != "wrapper":
            called = function
    return None, called
