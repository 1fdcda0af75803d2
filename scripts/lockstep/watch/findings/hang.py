"""A job that stands still: who waits where, and who holds up the others (by the clinic)."""

import pickle
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
    text = f"the ranks wait for each other: {'; '.join(words)}"
    named, why = held_up_by(job)
    if named:
        text += f"; {why}; look first at rank {', '.join(map(str, named))}"
        place = places[list(job).index(named[0])] or place
    report.found("hang", WRONG, text, place, named or gone)


def held_up_by(job):
    """Return (the ranks that hold up the others, why), or ([], "") if nothing proves it."""
    if not any(rank.last_calls for rank in job.values()):
        return [], ""
    from lockstep.watch import clinic  # only here: it imports torch

    left = {}
    for number, rank in job.items():
        calls = [] if rank.ended else None
        if rank.last_calls:
            calls = clinic.history(pickle.loads(rank.last_calls), number)
        left[number] = clinic.Left(clinic.looks(rank.stack), calls, bool(rank.ended))
    named, lines = clinic.judge(left)
    own = [line for line in lines if named and line.startswith(f"rank {named[0]} ")]
    return named, (own or lines)[0]


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
