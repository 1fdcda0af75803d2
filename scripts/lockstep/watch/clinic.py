"""The clinic: who holds up the others in a job that hangs? It reads what all ranks have left.

Each rank has left its stacks and its calls, by leave_stacks and leave_calls of lesson 19, whose
page says what is evidence here and why. `tell(folder)` prints it for a person, bash
scripts/lesson_19.sh --files FOLDER calls that, and `judge` is what the check of a script takes.
"""

import contextlib
import functools
import itertools
import operator
import os
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.watch import facts

HIDDEN = set()  # files that are not yours either: of a proof, on the way to the job that it starts
PAIRS = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list"}
NOBODY = "no rank holds up another one, as far as their calls tell"
ANY = "recv_anysource"  # of recv without `src`: its note has no peer
MEETINGS = {*dist.distributed_c10d.__all__, "backward", "forward", "Work.wait"} - PAIRS
UNLISTED = {"new_group", "monitored_barrier"}  # all must come to these; in no list, or too late
LOADER = "DataLoader"  # there a rank waits for a process that reads its data
NEW = "new"  # stands for a group's name where a group is made: each new_group has its number

# --- What a rank has left ---


def in_library(file):
    """Return whether a file is none of yours."""
    return file in HIDDEN or not facts.is_own(file)


def way_of(frames):
    """Return the way through (file, line, function) that are yours, as "train.py:41"."""
    own = [(f, line) for f, line, name in frames if name != "noted" and not in_library(f)]
    way = [f"{os.path.basename(file)}:{line}" for file, line in reversed(own)]
    return tuple(dict.fromkeys(way))  # [f(x) for x in y] has two frames at one line


def where(text):
    """Return (the way, the library's function that was called at its end) of the last stack.

    The way has the caller first. A stack without a line of yours, as of a process that ends, does
    not count.
    """
    for stack in reversed(text.split("(most recent call first):")):
        frames, called = re.findall(r'File "(.*)", line (\d+) in (.*)', stack), ""
        if not (way := way_of(frames)):
            continue
        for file, _, function in frames:
            if function == "noted":
                called = called or "Work.wait"  # the innermost: C++ has no frame of its own
            elif not in_library(file):
                break
            elif file.endswith("torch/utils/data/dataloader.py"):
                called = LOADER
            elif function != "wrapper" and not function.startswith("_"):
                known = called in MEETINGS | PAIRS and function not in MEETINGS | PAIRS
                called = called if known else function
        return way, called
    return None


def looks(text):
    """Return where(...) of each time at which the process has written where it stands.

    Of several threads the main one is written last.
    """
    parts = re.split("^(?:Stack|Timeout|Fatal)", text, flags=re.MULTILINE)[1:]
    stacks = [part.rpartition("(most recent call first):") for part in parts]
    return [place for _, begin, main in stacks if (place := where(begin + main))]


# --- Who waits for whom ---


class Call(NamedTuple):
    """A call of one rank: the number-th of a group, or a message, which has no number."""

    way: tuple
    operation: str
    group: str
    what: str  # what must be alike on all ranks: size, type, and root
    number: int | None
    peers: tuple  # who has to come
    waits: bool  # it has not come to its end


def history(dump, rank):
    """Return the calls of a rank in their order: of groups by the recorder, the rest by notes."""
    groups = dump["groups"]
    rooted = [note for note in dump["notes"] if "peer" in note]
    roots = {(note["group"], note["number"]): f"root {note['peer']}" for note in rooted}
    calls = []
    for entry in dump["entries"]:
        group, operation = entry["process_group"][0], entry["profiling_name"].partition(":")[2]
        data = [str(torch.Size(size).numel()) for size in entry["input_sizes"]] + entry[
            "input_dtypes"
        ]
        data = [] if re.search("scatter|^gather|to_all", operation) else data  # may differ rightly
        what = " ".join([*data, roots.get((group, entry["op_id"]), "")]).strip()
        call = operation, group, what, entry["collective_seq_id"], groups.get(group, ())
        way = way_of([(f["filename"], f["line"], f["name"]) for f in entry["frames"]])
        calls.append((entry["time_created_ns"], Call(way, *call, not entry["retired"])))
    for note in dump["notes"]:
        members = note.get("members", ())
        call = note["name"], note["group"], "", note["number"], members, note["waits"]
        if note["group"] == NEW:
            call = (f"new_group of {who(sorted(members))}", *call[1:])
        if note["name"] in PAIRS:
            way = "to" if note["name"] == "send" else "from"
            operation = f"{note['name']} {way} {note['peer']}"
            call = operation, note["group"], "", None, (note["peer"],), note["waits"]
        if note["name"] == ANY:
            others = tuple(other for other in groups.get(note["group"], ()) if other != rank)
            call = "recv from any", note["group"], "", None, others, note["waits"]
        if note["name"] in {*PAIRS, ANY} or note["group"] == NEW:
            calls.append((note["time_created_ns"], Call(way_of(note["frames"]), *call)))
    return [call for _, call in sorted(calls, key=lambda each: each[0])]


class Left(NamedTuple):
    """What one rank has left: its looks(...), its calls (None: no list counts), has it ended?"""

    looks: list
    calls: list | None
    ended: bool


def read_left(folder):
    """Return {rank: Left} of what a job has left in a folder.

    Files of more ranks than rank 0 has counted are of an earlier job. A list says nothing if the
    job may still have run when it was written.
    """
    counted = re.match(r"(\d+) ranks\n", Path(folder, "stacks_0").read_text())
    seen, dumps = {}, {}
    for rank in range(int(counted[1]) if counted else 0):
        path = Path(folder, f"stacks_{rank}")
        seen[rank] = looks(path.read_text()) if path.exists() else []
        path = Path(folder, f"calls_{rank}")
        with contextlib.suppress(Exception):  # it is not there, or torn
            dump = pickle.loads(path.read_bytes())
            if dump["ended"] or stood_still(dump, path.stat().st_mtime):
                dumps[rank] = dump
    calls = {rank: history(dump, rank) for rank, dump in dumps.items()}
    ended = [rank for rank, dump in dumps.items() if dump["ended"]]
    return {r: Left(own, calls.get(r), r in ended) for r, own in seen.items()}


def moments(dump):
    """Return when the calls of a rank were made, in order, in seconds since 1970."""
    return sorted(call["time_created_ns"] / 1e9 for call in dump["entries"] + dump["notes"])


def stood_still(dump, moment):
    """Return whether the last call of a recorder was long before this moment.

    Long is a second, and twice as long as the rank has ever been silent between two calls.
    """
    times = moments(dump)
    gaps = [times[n + 1] - times[n] for n in range(len(times) - 1)]
    return moment - max(times, default=0) > max(1, 2 * max(gaps, default=0))


def waits_in(rank, left):
    """Return (the call in which a rank waits, for whom); or (None, ()), if it stands elsewhere.

    A collective waits for those of its group that have not called it so often, a message for its
    other end.
    """
    own = left[rank]
    way, called = own.looks[-1] if own.looks and not own.ended else ((), "")
    calls = [call for call in own.calls if call.waits]
    if called not in MEETINGS | PAIRS or (not calls and called in {"forward", "backward", *PAIRS}):
        return None, ()
    here = [call for call in calls if call.way == way]
    calls = here or [call for call in calls if call.number is None] or calls
    if not calls:  # a list that does not fit says nothing
        away = [r for r in left if not left[r].looks or left[r].looks[-1][1] != called]
        return Call(way, called, "-", "", None, (), True), away if called in UNLISTED else ()
    call = calls[0 if called in ("forward", "backward", "Work.wait") else -1]
    if call.number is None:
        return call, call.peers
    come = {r for r in left for c in left[r].calls if c[2] == call.group and (c[4] or 0) >= call[4]}
    return call, tuple(r for r in call.peers if r not in come)


# --- Whom that names ---


def all_waits(left):
    """Return waits_in(...) of each rank; {} if the calls of a rank are missing."""
    complete = all(own.calls is not None for own in left.values())
    return {rank: waits_in(rank, left) for rank in left} if complete else {}


def judge(left):
    """Return (the ranks that hold up the others, why, in lines); of nobody if nothing proves it."""
    waits = all_waits(left)
    if not any(own.calls for own in left.values()) or not waits:
        gone = [rank for rank, own in left.items() if own.calls is None]
        lines = [f"{who(gone or list(left))}: no list of calls, or one of a job that still ran"]
        lines.append("read the errors of all ranks; if there are none, let the job hang for longer")
        ended = [rank for rank, own in left.items() if own.ended]
        if gone and ended:
            lines.append(f"{who(ended)} came to the end of the program, the others did not: why?")
        return [], lines
    if row := conflict(left):
        return named_in_conflict(row, waits, left)
    awaited = {rank for _, whom in waits.values() for rank in whom}
    ends = [
        r for r in left if r in awaited and not waits[r][0] and (left[r].looks or left[r].ended)
    ]
    return named_at_the_end(ends, waits, left) if ends else named_in_a_circle(waits, left)


def conflict(left):
    """Return {rank: call} of the first call that hangs and is not alike on all ranks, or {}.

    Of a group; or a new group, which is wrong if it differs, whether it hangs or not.
    """
    rows = {}
    for rank, own in left.items():
        for call in own.calls:
            if call.number is not None:
                rows.setdefault((call.number, call.group), {})[rank] = call
    for (_, group), row in sorted(rows.items(), key=lambda each: (each[0][1] != NEW, each[0][0])):
        hangs = group == NEW or any(call.waits for call in row.values())
        if hangs and len({call[1:4] for call in row.values()}) > 1:
            return row
    return {}


def named_in_conflict(row, waits, left):
    """Return (whom a call names that is not alike on all ranks, why)."""
    lines = [f"{place(next(iter(row.values())))} is not the same on all ranks:"]
    for rank, own in row.items():
        data = "" if own.group == NEW else f": {own.what or 'no data'}"
        lines.append(f"    rank {rank}: {told(own)}{data}")
    named, why = against(row, waits, left)
    return named, lines + why


def named_at_the_end(ends, waits, left):
    """Return (those that wait for nobody and that others wait for, why), if that is evidence."""
    named, lines = [], []
    for end in ends:
        callers = [rank for rank, (_, whom) in waits.items() if end in whom]
        call, whom = waits[callers[0]]
        lines.append(f"{who(callers, 'waits', 'wait')} for rank {end}: {told(call)}")
        if len({way for way, _ in left[end].looks[-2:]}) > 1 and not left[end].ended:
            moves = f"rank {end} was elsewhere a look before: slow, or in a circle? Look again"
            return [], [*lines, moves]
        if pending := [call for call in left[end].calls if call.waits]:
            lines.append(f"rank {end} has not finished {told(pending[0])}: does it wait for that?")
            continue
        usual = been(callers[0], call, left) or any(c.way == call.way for c in left[end].calls)
        if len(callers) > len(whom) or (usual and not left[end].ended):
            named.append(end)
        else:
            or_has = "or has" if len(callers) == 1 else "or have"
            too_many = f"{or_has} {who(callers)} made a call too many"
            lines.append(f"has rank {end} left this call out, {too_many}?")
        if called_at_last(left[end]) == LOADER:
            lines.append(f"rank {end} waits for a worker of its loader: see `py-spy dump` of that")
        elif not left[end].ended:
            lines.append(f"if rank {end} waits for something there, a lock, a file, a queue: then")
            lines.append("the cause is who should have given it: another rank, or another thread")
            lines.append("(or it is only slow: then it will be elsewhere when you look again)")
    return named if len(named) == len(ends) else [], lines


def called_at_last(own):
    """Return the library's function in which a rank stands, or ""."""
    return own.looks[-1][1] if own.looks else ""


def named_in_a_circle(waits, left):
    """Return (whom it names that ranks wait for each other, why)."""
    row, lines = {}, []
    for a in waits:
        for b in waits[a][1]:
            if a < b and a in waits[b][1]:
                row |= {a: waits[a][0], b: waits[b][0]}
                lines.append(f"rank {a} and rank {b} wait for each other: {told(row[a])}")
                lines.append(f"    and {told(row[b])}")
    if not row and not any(call for call, _ in waits.values()):
        return named_in_other_threads(left)
    named, why = against(row, waits, left)
    return named, lines + why


def named_in_other_threads(left):
    """Return (who has not come to a collective that hangs in another thread, why)."""
    rows = {}
    for rank, own in left.items():
        for call in own.calls:
            if call.waits and call.number is not None:
                rows.setdefault((call.group, call.number), {})[rank] = call
    for (group, number), row in rows.items():
        call = next(iter(row.values()))
        come = {r for r in left for c in left[r].calls if c[2] == group and (c[4] or 0) >= number}
        if missing := [rank for rank in call.peers if rank not in come]:
            waiting = f"{who(list(row), 'waits', 'wait')} for {who(missing)}"
            lines = [f"in another thread {waiting}: {told(call)}"]
            if all(been(rank, call, left) for rank in missing):
                return missing, [*lines, f"{who(missing)} came there before: has the thread ended?"]
            return [], [*lines, "have they left this call out, or the others made one too many?"]
    ended = all(own.ended for own in left.values())
    return [], ["all ranks have come to the end of the program" if ended else NOBODY]


def against(row, waits, left):
    """Return (who is wrong if {rank: call} stand against each other, why): who strayed or is alone.

    Who has strayed is named only if it is one of two, or fewer than half: the others may be right
    to do what they have never done. One against two that agree is a strong hint, unless they may
    have left a loop in which it goes on. A rank of all these groups that waits for one side only
    counts with the other side.
    """
    missing = {rank: left_out(left[rank].calls, call) for rank, call in row.items()}
    named = [rank for rank in row if missing[rank]]
    if named and len(named) < len(row):
        always = "has always called before it came here, and not as often this time:"
        lines = [f"rank {rank} {always} {'; '.join(missing[rank])}" for rank in named]
        if 2 * len(named) < len(row) or len(row) == 2:
            return named, [*lines, "it has left that out, or has come here once too often"]
        others = who([rank for rank in row if rank not in named])
        return [], [*lines, f"or should {others} have left it out, too? Most have"]
    sides = {}
    for rank, call in row.items():
        sides.setdefault(call[1:5], []).append(rank)
    members = set.intersection(*(set(call.peers) for call in row.values())) if row else ()
    for rank in set(members) - set(row):
        opposite = [side for side in sides.values() if not set(side) & set(waits[rank][1])]
        if len(opposite) == 1 < len(sides):
            opposite[0].append(rank)
    few, many = sorted(sides.values(), key=len) if len(sides) == 2 else ([], [])
    if len(few) == 1 < len(many) and all(call.number or call.peers for call in row.values()):
        return alone(few, many, row, left)
    return [], read_all(row, left)


def alone(few, many, row, left):
    """Return (the one against many, why); nobody if it is where it has been, and they elsewhere."""
    call = parting(few[0], row, left)
    elsewhere = all(row[rank].way != call.way for rank in many if rank in row)
    if been(few[0], call, left) and elsewhere:
        return [], read_all(row, left)
    hint = f"rank {few[0]} is alone against {len(many)}, a strong hint: "
    hint += f"it differs from here on: {told(call)}"
    return few, [hint, "it is here, or before, that it has made a call too many, or left one out"]


def read_all(row, left):
    """Return the lines that say that nobody can be named, and where the ways have parted."""
    if not row:
        return [NOBODY]
    calls = {rank: parting(rank, row, left) for rank in row}
    earlier = [rank for rank in row if calls[rank] != row[rank]]
    lines = [f"which of {who(list(row))} is it? Their calls can't tell: read all their lines"]
    if len(earlier) == 1:
        (rank,) = earlier
        lines.append(f"rank {rank} was alone at {told(calls[rank])}, {place(calls[rank])}:")
        lines.append("has it made that call too many there, or have the others left one out?")
    return lines


def been(rank, call, left):
    """Return whether a rank has called by the same way before."""
    calls = left[rank].calls
    before = calls[: calls.index(call)] if call in calls else calls
    return any(other.way == call.way for other in before)


def left_out(calls, last):
    """Return what a rank has called each time before it came by this way again, but not now.

    A loop may be around any line of the way, so the inner ones are tried first.
    """
    calls = calls[: calls.index(last) + 1] if last in calls else []
    if last.way not in {call.way for call in calls[:-1]}:
        return []  # that it comes here at all is what is new
    for depth in range(len(last.way), 0, -1):
        if missing := missing_between(*turns(calls, last.way[:depth])):
            return missing
    return []


def turns(calls, way):
    """Return (the calls before the first round, the rounds).

    A round is [calls that begin by this way, the calls after them].
    """
    begin, rounds = [], []
    for call in calls:
        inside = call.way[: len(way)] == way
        if inside and (not rounds or rounds[-1][1]):
            rounds.append([[], []])
        (rounds[-1][0 if inside else 1] if rounds else begin).append(told(call))
    return begin, rounds


def missing_between(begin, rounds):
    """Return the calls that are missing in the last round, or just before it.

    Only what was there each time before counts, and that must have been twice at least.
    """
    *before, now = rounds or [[[], []]]
    own = before[-1][0] if before else []
    alike = list(itertools.takewhile(lambda each: each[0] == own, reversed(before)))
    if own and (len(alike) > 1 or len(alike) == len(before)):  # those of DDP's first epoch differ
        parted = next((n for n, call in enumerate(now[0][: len(own)]) if call != own[n]), None)
        if parted is not None and len(alike) > 1:
            return [own[parted]]
        if parted is None and len(now[0]) > len(own):  # two rounds in one: nothing came between
            return list(always_after(begin, alike))
    return list(always_after(begin, before[:-1]) - Counter(before[-1][1])) if before else []


def always_after(begin, rounds):
    """Return the calls that came after the others in each of these rounds, as a Counter.

    There must be two. If there is one, what came before the first round counts as another.
    """
    segments = [Counter(after) for _, after in rounds]
    if len(segments) == 1:
        segments.append(Counter(begin))
    return functools.reduce(operator.and_, segments) if segments else Counter()


def parting(rank, row, left):
    """Return the call of the odd rank at which it parted from the others, or that of this row.

    There it stood at a line where no other has been, and the others at one where it has been, too.
    """
    own, *others = (
        [call for call in left[r].calls if call.group == row[r].group]
        for r in sorted(row, key=lambda r: r != rank)
    )
    theirs = {call.way for calls in others for call in calls}
    for call in own:
        ways = {other.way for calls in others for other in calls if other.number == call.number}
        if call.way not in theirs and ways <= {other.way for other in own} and len(ways) == 1:
            return call
    return row[rank]


# --- In words ---


def tell(folder):
    """Print where the ranks of one job stand and who holds up the others; return whom it names."""
    left = read_left(folder)
    named, words = judge(left)
    print("\n".join([*standing(left), *words]))
    return named


def standing(left):
    """Return lines: where each rank stands, and for whom it waits, or what it has called last."""
    lines, waits = [], all_waits(left)
    row = conflict(left) if waits else {}
    for rank, own in left.items():
        way, called = own.looks[-1] if own.looks else ((), "")
        where = stands(way, called) if way else "has no stack"
        lines.append(f"rank {rank} {'has ended' if own.ended else where}")
        call, whom = waits.get(rank, (None, ()))
        last = f"its last call: {told(own.calls[-1]) if own.calls else '-'}"
        lines.append(f"    {waiting(call, whom, call in row.values()) if call else last}")
    return lines


def stands(way, called):
    """Return in words where a rank stands."""
    return f"stands at {shown(way)}, in {called or 'its own code'}"


def listed(ranks):
    """Return some ranks as "0, 1"."""
    return ", ".join(map(str, ranks))


def who(ranks, one="", more=""):
    """Return some ranks in words, and a verb: "rank 0 waits", "ranks 0, 1 wait"."""
    many = len(ranks) > 1
    return f"rank{'s' if many else ''} {listed(ranks)} {more if many else one}".strip()


def told(call):
    """Return a call in words, with its lines."""
    group = "" if call.group == NEW else f" in group {call.group}"
    return f"{call.operation}{group} at {shown(call.way)}"


def place(call):
    """Return in words which of all calls it is."""
    if call.group == NEW:
        return f"new_group number {call.number}"
    return f"call {call.number} of group {call.group}"


def waiting(call, whom, differs):
    """Return in words for whom a call waits; or that ranks have another call in its place."""
    if call.group == NEW:
        what = call.operation.replace("new_group", place(call))
    elif call.number is None:
        what = f"{call.operation} in group {call.group}"
    else:
        what = f"{call.operation}, {place(call)} ({who(call.peers)})"
    all_here = "all have come, but not with the same call" if differs else "all have come"
    all_here = all_here if call.group != "-" else "for whom is unknown"
    ends = f"waits for {who(whom)}" if whom else all_here
    return f"{what}: {ends}"


def shown(way):
    """Return a way in words: your own lines in the order of a traceback, the last call last."""
    return " > ".join(way) or "no line"
