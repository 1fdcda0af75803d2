"""Lesson 19: it hangs: which rank is it, and how do I find out?

New: six tools look at ten jobs that hang or fail; the proof judges whom they name, by the truth.

Run it:  bash scripts/lesson_19.sh --patient early_stop [--tool stacks] [--nproc 3]
By hand: torchrun --standalone --nproc-per-node=3 lessons/lesson_19_hang_clinic.py --patient ...
Of your own job, or of one by hand with --files: bash scripts/lesson_19.sh --files FOLDER

Output to expect on a CPU:

    early_stop on 3 ranks, which wait 3 s for each other: who is it?
        timeout ... stacks      guilty    ... s   rank 2 stands at ..., in barrier, and ...
    PASS early_stop: rank 2, named by stacks, recorder, ...; line ... by stacks, recorder, ...
"""

import argparse
import atexit
import contextlib
import faulthandler
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

# --- The technique ---
# In each rank, after init_process_group: leave_stacks(f"{folder}/stacks_{rank}") and
# leave_calls(f"{folder}/calls_{rank}"), with fewer seconds than the timeout. When the job stands
# still, tell(folder) reads what all ranks have left. A roll call goes before a suspected line.

# Files of Python and of installed packages, in whatever environment the job has run.
LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/|/(site|dist)-packages/|^<")
PAIRS = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list"}
MEETINGS = {*dist.distributed_c10d.__all__, "backward", "forward", "Work.wait"} - PAIRS
UNLISTED = {"new_group", "monitored_barrier"}  # all must come to these; in no list, or too late
LOADER = "DataLoader"  # there a rank waits for a process that reads its data
NEW = "new"  # stands for a group's name where a group is made: each new_group has its number
NOTES, NOTE_OF = deque(maxlen=2000), weakref.WeakKeyDictionary()  # of take_notes


def leave_stacks(path, seconds=300):
    """Write to `path` where this process stands: every `seconds`, and at `kill -USR1 PID`.

    And when it is ended by C++ or a launcher. The first line says how many ranks there are.
    """
    file = open(path, "w")  # noqa: SIM115  (it stays open)
    print(dist.get_world_size(), "ranks", file=file, flush=True)
    faulthandler.enable(file)  # if C++ aborts the process
    faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)  # a launcher ends it
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    faulthandler.dump_traceback_later(seconds, repeat=True, file=file)
    os.register_at_fork(after_in_child=leave_no_stacks)


def leave_no_stacks():
    """Write no more: a fork is not this rank, and where a process ends says nothing.

    A fork has to end by os._exit, as those of multiprocessing do: else Python 3.11 waits for the
    thread of faulthandler's clock, which a fork has not.
    """
    faulthandler.disable()
    faulthandler.unregister(signal.SIGTERM)
    faulthandler.unregister(signal.SIGUSR1)


def way_of(frames):
    """Return the way through (file, line, function) that are yours, as "train.py:41"."""
    own = [(f, line) for f, line, name in frames if name != "noted" and not LIBRARY.search(f)]
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
            elif not LIBRARY.search(file):
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


def leave_calls(path, seconds=300):
    """Write to `path` the last calls of this rank: every `seconds`, and when Python ends."""
    Path(path).unlink(missing_ok=True)  # of an earlier job
    take_notes()

    def write_again_and_again():
        while not time.sleep(seconds):
            write_calls(path)

    threading.Thread(target=write_again_and_again, daemon=True).start()
    atexit.register(leave_last_calls, path)  # after an error, too


def take_notes():
    """Note what the recorder leaves out: messages, the root of a collective, new groups."""
    for name in ("send", "recv", "broadcast", "reduce", "gather", "scatter"):
        setattr(dist.ProcessGroup, name, noting(name, getattr(dist.ProcessGroup, name)))
    dist.Work.wait = noting_waits(dist.Work.wait)
    dist.new_group = noting_groups(dist.new_group)
    dist.distributed_c10d.new_group = dist.new_group


def noting(name, call):
    """Return a process group's call that also notes whom it is for, or from."""

    def noted(group, *given, **options):
        work = call(group, *given, **options)
        if threading.current_thread() is not threading.main_thread():
            return work  # a listener may wait for ever
        with contextlib.suppress(Exception):  # no note is worth a job
            peer = given[1] if name in PAIRS else given[-1].rootRank
            note = {"name": name, "peer": dist.get_global_rank(group, peer), "waits": False}
            note |= {"group": group.group_name, "frames": frames_from(sys._getframe())}
            note |= {"time_created_ns": time.time_ns()}
            note["number"] = group._get_sequence_number_for_group()
            NOTES.append(note)
            NOTE_OF[work] = note
        return work

    return noted


def frames_from(frame):
    """Return (file, line, function) of a frame and of all that have called it."""
    frames = []
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def noting_groups(make):
    """Return new_group that also notes who shall be in it: all ranks make the same ones in turn."""
    made = []

    def noted(ranks=None, *given, **options):
        if options.get("use_local_synchronization"):  # then its members make it, and nobody else
            return make(ranks, *given, **options)
        ranks = None if ranks is None else list(ranks)  # we look at them before torch does
        members = range(dist.get_world_size()) if ranks is None else ranks
        made.append(members)
        name = f"new_group of {who(sorted(members))}"
        note = {"name": name, "group": NEW, "number": len(made), "waits": True}
        note["members"] = tuple(members)
        note |= {"frames": frames_from(sys._getframe()), "time_created_ns": time.time_ns()}
        NOTES.append(note)
        group = make(ranks, *given, **options)
        note["waits"] = False
        return group

    return noted


def noting_waits(wait):
    """Return a Work's wait() that also notes that this rank waits, and stands in a Python frame."""

    def noted(work, *given, **options):
        note = NOTE_OF.get(work, {})
        note["waits"] = True
        came = wait(work, *given, **options)
        note["waits"] = False
        return came

    return noted


def leave_last_calls(path):
    """Write the calls of a rank that ends: in good order, or by an error after more calls."""
    faulthandler.cancel_dump_traceback_later()  # not in a fork: it would wait for ever there
    leave_no_stacks()
    ended = not hasattr(sys, "last_value")  # that would be the error which has ended it
    before = os.path.getmtime(path) if os.path.exists(path) else 0
    write_calls(path, ended, None if ended else before)


def write_calls(path, ended=False, before=None):
    """Write recorder and notes of this rank to `path`, if it has called since `before` (or None).

    The recorder is on unless TORCH_FR_BUFFER_SIZE=0.
    """
    began = time.time()
    unfinished = Path(f"{path}.{threading.get_ident()}")  # we may be ended while we write
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()) | {"notes": list(NOTES)}
    if before is not None and max(moments(dump), default=1) <= before:
        return  # the list of the standstill is the better one
    groups = dict(dist.distributed_c10d._world.pg_names)
    groups = {name: dist.get_process_group_ranks(group) for group, name in groups.items()}
    dump |= {"groups": groups, "ended": ended}
    unfinished.write_bytes(pickle.dumps(dump))
    os.utime(unfinished, (began, began))  # later calls are not in it; the first dump takes seconds
    unfinished.rename(path)


class Call(NamedTuple):
    """A call of one rank: the number-th of a group, or a message, which has no number."""

    way: tuple
    operation: str
    group: str
    what: str  # what must be alike on all ranks: size, type, and root
    number: int | None
    peers: tuple  # who has to come
    waits: bool  # it has not come to its end


def history(dump):
    """Return the calls of one rank in their order: of groups by the recorder, the rest by notes."""
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
        if note["name"] in PAIRS:
            way = "to" if note["name"] == "send" else "from"
            operation = f"{note['name']} {way} {note['peer']}"
            call = operation, note["group"], "", None, (note["peer"],), note["waits"]
        if note["name"] in PAIRS or note["group"] == NEW:
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
    calls = {rank: history(dump) for rank, dump in dumps.items()}
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


def tell(folder):
    """Print where the ranks of one job stand and who holds up the others; return whom it names."""
    left = read_left(folder)
    named, words = judge(left)
    print("\n".join([*standing(left), *words]))
    return named


def all_waits(left):
    """Return waits_in(...) of each rank; {} if the calls of a rank are missing."""
    complete = all(own.calls is not None for own in left.values())
    return {rank: waits_in(rank, left) for rank in left} if complete else {}


def standing(left):
    """Return lines: where each rank stands, and for whom it waits, or what it has called last."""
    lines, waits = [], all_waits(left)
    row = conflict(left) if waits else {}
    for rank, own in left.items():
        way, called = own.looks[-1] if own.looks else ((), "")
        stands = f"stands at {shown(way)}, in {called or 'its own code'}" if way else "has no stack"
        lines.append(f"rank {rank} {'has ended' if own.ended else stands}")
        call, whom = waits.get(rank, (None, ()))
        last = f"its last call: {told(own.calls[-1]) if own.calls else '-'}"
        lines.append(f"    {waiting(call, whom, call in row.values()) if call else last}")
    return lines


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
            lines.append("the cause is the rank that should have given it back, or made it")
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
    named, why = against(row, waits, left)
    return named, lines + why


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
        always = "has always called before it came here, and not this time:"
        lines = [f"rank {rank} {always} {'; '.join(missing[rank])}" for rank in named]
        if 2 * len(named) < len(row) or len(row) == 2:
            return named, lines
        return [], [*lines, "or should all have left it out? They are not the fewer ones"]
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
    return [], read_all(row)


def alone(few, many, row, left):
    """Return (the one against many, why); nobody if it is where it has been, and they elsewhere."""
    call = parting(few[0], row, left)
    elsewhere = all(row[rank].way != call.way for rank in many if rank in row)
    if been(few[0], call, left) and elsewhere:
        return [], read_all(row)
    hint = f"rank {few[0]} is alone against {len(many)}, a strong hint: "
    hint += f"it differs from here on: {told(call)}"
    return few, [hint, "it is here, or before, that it has made a call too many, or left one out"]


def read_all(row):
    """Return the line that says that nobody can be named."""
    if not row:
        return ["no rank holds up another one, as far as their calls tell"]
    return [f"which of {who(list(row))} is it? Their calls can't tell: read all their lines"]


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
    for depth in range(len(last.way), 0, -1):
        if missing := missing_between(turns(calls, last.way[:depth])):
            return missing
    return []


def turns(calls, way):
    """Return [[calls that begin by this way, the calls after them], ...], one for each round."""
    rounds = []
    for call in calls:
        inside = call.way[: len(way)] == way
        if inside and (not rounds or rounds[-1][1]):
            rounds.append([[], []])
        if rounds:
            rounds[-1][0 if inside else 1].append(told(call))
    return rounds


def missing_between(rounds):
    """Return the calls that are missing in the last round, or just before it.

    Only what all rounds before had counts, and there must be two of them at least.
    """
    *before, now = rounds or [[[], []]]
    own = before[0][0] if len(before) > 1 else []
    if own and all(inside == own for inside, _ in before):
        parted = next((n for n, call in enumerate(now[0][: len(own)]) if call != own[n]), None)
        if parted is not None:
            return [own[parted]]
        if len(now[0]) > len(own):  # two rounds in one: nothing has come between them
            return list(always_after(before))
    if len(before) > 2:
        return list(always_after(before[:-1]) - Counter(before[-1][1]))
    return []


def always_after(rounds):
    """Return the calls that came after the others in each of these rounds, as a Counter."""
    always = Counter(rounds[0][1])
    for _, after in rounds:
        always &= Counter(after)
    return always


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


def call_the_roll(seconds, gloo_group=None):
    """Wait for all ranks; rank 0 names those that have not come after `seconds`. Only over gloo."""
    dist.monitored_barrier(gloo_group, timedelta(seconds=seconds), wait_all_ranks=True)


# --- The patients ---
# Each is one rank of a job. Nothing in it knows that it is watched.


def healthy(rank, world_size, steps, rows):
    """Train, and nothing is wrong: no tool may find anything here."""
    model = nn.Linear(4, 1)
    for _ in range(steps):
        model(torch.randn(rows, 4)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / world_size
            parameter.grad = None
    dist.barrier()


def rank_zero_only(rank, world_size, steps, rows):
    """Train, then let rank 0 print the mean loss."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.randn(rows, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    if rank == 0:
        total = loss.detach()
        dist.all_reduce(total)
        print(f"mean loss {total / world_size:.3f}")
    dist.barrier()


def uneven_batches(rank, world_size, steps, rows):
    """Train on rows that are dealt out like cards; the last batch may be smaller."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(world_size * steps * rows + 1, 4)
    mine = data[rank::world_size]
    for batch in mine.split(rows):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        print("the epoch is over")


class TwoHeads(nn.Module):
    """A model with a head for rare rows, which is not called if there are none."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, batch, rare):
        out = self.usual(batch)
        if rare.any():
            out = out + self.rare(batch) * rare
        return out


def unused_branch(rank, world_size, steps, rows):
    """Train the model with two heads; one row in four is rare, if there is one at all."""
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        batch = torch.randn(rows, 4)
        rare = (torch.arange(rows) % 4 == 0).float()[:, None]
        if step == 1 and rank == world_size - 1:
            rare.zero_()
        loss = model(batch, rare).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()


def early_stop(rank, world_size, steps, rows):
    """Train until the loss is small enough."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scale = 0.01 if rank == world_size - 1 else 1.0
    for step in range(2 * steps):
        batch = scale * torch.randn(rows, 4)
        loss = (model(batch) - scale).square().mean()
        if step >= steps and loss < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.barrier()


def validation(rank, world_size, steps, rows):
    """Train with BatchNorm; after each epoch rank 0 looks at rows that it has not trained on."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held_back = torch.randn(rows, 4)
    for _ in range(2):
        for _ in range(steps):
            loss = model(torch.randn(rows, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            print(f"validation loss {model(held_back).square().mean():.3f}")
            model.train()
    dist.barrier()


def both_send(rank, world_size, steps, rows):
    """Two neighbours swap the edges of their parts; then all add up what is left to do."""
    part, edge = torch.randn(rows, 4), torch.empty(4)
    for _ in range(steps):
        residual = part.square().mean()
        if rank < 2:
            neighbour = 1 - rank
            dist.send(part[-1], neighbour)
            dist.recv(edge, neighbour)
            part[-1] = (part[-1] + edge) / 2
        dist.all_reduce(residual)
        part *= 0.9
    if rank == 0:
        print(f"residual {residual.item():.3f}")
    dist.barrier()


def group_order(rank, world_size, steps, rows):
    """Add up two kinds of gradients, each in a group of its own."""
    limit = timedelta(seconds=2.5)  # else half an hour: a new group does not inherit the limit
    dense, sparse = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    work = [(dense, torch.randn(rows)), (sparse, torch.randn(rows))]
    if rank == world_size - 1:
        work.reverse()
    for _ in range(steps):
        for group, gradient in work:
            dist.all_reduce(gradient, group=group)
            gradient /= world_size
    if rank == 0:
        print(f"gradient {work[0][1].norm():.3f}")
    dist.barrier()


def other_shape(rank, world_size, steps, rows):
    """Predict each rank's part of the rows, and gather the predictions everywhere."""
    model, data = nn.Linear(4, 1), torch.randn(world_size * rows + 1, 4)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    first = rank * rows
    last = first + rows if rank < world_size - 1 else len(data)
    for _ in range(steps):
        with torch.no_grad():
            predicted = model(data[first:last])
        parts = [torch.empty_like(predicted) for _ in range(world_size)]
        dist.all_gather(parts, predicted)
    if rank == 0:
        print(f"{sum(len(part) for part in parts)} predictions")
    dist.barrier()


class Rows(Dataset):
    """Rows of a file. One of them takes long to decode, and needs more memory than there is."""

    def __init__(self, count, too_large):
        self.count, self.too_large = count, too_large

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.too_large:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is full
        return torch.randn(4)


def dead_loader(rank, world_size, steps, rows):
    """Train on rows that a worker process reads."""
    model = nn.Linear(4, 1)
    count = (steps + 1) * rows
    data = Rows(count, count - 1 if rank == world_size - 1 else None)
    loader = DataLoader(data, rows, num_workers=1)
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / world_size
            parameter.grad = None
    dist.barrier()
    if rank == 0:
        print(f"loss {loss.item():.3f}")


def read(name):
    """Return the rows of a file, which takes a moment."""
    time.sleep(0.25)  # the disk turns
    return torch.randn(8, 4)


def score(rows):
    """Return how good the rows are, which takes a moment."""
    time.sleep(0.25)  # numbers are crunched
    return rows.square().mean()


def slow_rank(rank, world_size, steps, rows):
    """Train; one rank also has files to look at, and takes the time that it takes."""
    gradient = torch.randn(rows)
    for step in range(steps):
        if step == 1 and rank == world_size - 1:
            for number in range(20):
                batch = read(f"file_{number}")
                best = score(batch)
        dist.all_reduce(gradient)
        gradient /= world_size
    if rank == world_size - 1 and steps > 1:
        print(f"the last score is {best:.3f}")
    dist.barrier()


class Patient(NamedTuple):
    """A job, the ranks that are guilty (-1: the last one), the line that gives them away, and why.

    The line is where a guilty rank does what the others do not, or does not do what they do.
    """

    job: object
    guilty: tuple
    line: str
    why: str


PATIENTS = {
    "early_stop": Patient(
        early_stop, (-1,), "dist.barrier()", "a rank leaves the loop by its own loss"
    ),
    "rank_zero_only": Patient(
        rank_zero_only, (0,), "dist.all_reduce(total)", "only rank 0 adds up the losses"
    ),
    "uneven_batches": Patient(
        uneven_batches, (0,), "loss.backward()", "rank 0 has a batch more than the others"
    ),
    "unused_branch": Patient(
        unused_branch, (-1,), "loss = model(", "a rank leaves out a part of DDP's model"
    ),
    "validation": Patient(
        validation, (0,), "model(held_back)", "rank 0 validates through DDP with buffers"
    ),
    "both_send": Patient(both_send, (0, 1), "dist.send(", "two neighbours both send first"),
    "group_order": Patient(
        group_order, (-1,), "dist.all_reduce(", "a rank takes two groups in the other order"
    ),
    "other_shape": Patient(
        other_shape, (-1,), "dist.all_gather(", "a rank gathers one row more than the others"
    ),
    "dead_loader": Patient(
        dead_loader, (-1,), "for batch in loader", "a process that reads a rank's rows is killed"
    ),
    "slow_rank": Patient(slow_rank, (), "", "nobody is guilty: a rank is at work, for long"),
}


# --- The proof ---
# The doctor starts a patient's ranks, lets the tools look, and judges what they have printed. One
# run serves four tools: what a rank says when it ends, its stacks, its recorder for two. `detail`
# and `roll_call` change the job, so each has a run of its own.

TOOLS = ("timeout", "stacks", "recorder", "analyzer", "detail", "roll_call")
RUN_OF = dict.fromkeys(TOOLS, "plain") | {"detail": "detail", "roll_call": "roll_call"}
EXPECTED = {  # in the order of TOOLS; measured with torch 2.13 over gloo, on 3 and 4 ranks
    "early_stop": "nothing guilty guilty guilty guilty guilty",
    "rank_zero_only": "nothing guilty guilty victim guilty nothing",
    "uneven_batches": "nothing guilty guilty victim crash nothing",
    "unused_branch": "guilty nothing guilty guilty crash nothing",
    "validation": "nothing guilty guilty victim crash nothing",
    "both_send": "nothing guilty guilty guilty nothing victim",
    "group_order": "nothing nothing guilty guilty guilty nothing",
    "other_shape": "victim nothing nothing guilty guilty nothing",
    "dead_loader": "guilty nothing guilty guilty guilty guilty",
    "slow_rank": "nothing nothing victim victim victim victim",
}
FRAME = r'File "(.*)", line (\d+), in (?!noted)'
WAITED = re.compile("timed out|timeout|Connection (closed|reset) by peer|Broken pipe", re.I)


class Finding(NamedTuple):
    """What a tool says: whom it names, with which line of theirs, in which words, and when."""

    ranks: list
    line: int | None
    words: str
    seconds: float | None


class Run(NamedTuple):
    """The ranks of one patient under some tools."""

    name: str
    kind: str
    folder: Path
    ids: list  # of the processes, by rank
    ends: dict  # {rank: (seconds, exit code)} of those that have ended by themselves
    begin: float

    def text(self, rank, what="said"):
        """Return what a rank has printed, or another file that it has left."""
        path = self.folder / f"{what}_{rank}"
        return path.read_text(errors="replace") if path.exists() else ""


# --- Start ranks, and end them ---


@contextlib.contextmanager
def ward():
    """Yield (folder, process group); whatever becomes of this process, both are gone after it."""
    with tempfile.TemporaryDirectory() as folder:
        away = 'mv "$0" "$0.end"; rm -rf "$0.end"'  # first away from ranks that still write
        farewell = f"trap '' TERM; read line; {away}; kill -KILL 0"
        options = {"stdin": subprocess.PIPE, "process_group": 0}
        nurse = subprocess.Popen(["/bin/sh", "-c", farewell, folder], **options)
        try:
            yield Path(folder), nurse
        finally:
            os.killpg(nurse.pid, signal.SIGKILL)
            nurse.stdin.close()
            nurse.wait()


def treat(jobs, args, folder, nurse):
    """Run [(patient, kind of run, job)], all at once; return {(patient, kind): Run}."""
    runs = []
    for name, kind, job in jobs:
        run = Run(name, kind, folder / f"{name} {kind}", [], {}, time.time())
        run.folder.mkdir()
        runs.append(run)
        for rank in range(args.nproc):
            run.ids.append(os.fork() or be_forked(job, rank, run, args, nurse))
            with contextlib.suppress(OSError):  # it is there already, or it has ended
                os.setpgid(run.ids[-1], nurse.pid)
    for moment in ("start", "here"):  # before they join, and when all have joined
        let_all_go(moment, runs, args.nproc)
    runs = [run._replace(begin=time.time()) for run in runs]
    wait_for(runs, args.limit)
    return {(run.name, run.kind): run for run in runs}


def let_all_go(moment, runs, nproc, deadline=300):
    """Wait until each rank of all runs waits for this moment, then let them go on."""
    marks = [run.folder / f"{moment}_{rank}" for run in runs for rank in range(nproc)]
    while not all(mark.exists() for mark in marks):
        time.sleep(0.01)
        if time.time() > runs[0].begin + deadline:
            raise TimeoutError(f"not all ranks have started after {deadline} s")
    for run in runs:
        (run.folder / f"go_{moment}").touch()


def wait_for(runs, limit):
    """Wait for ranks, 3 s longer than they wait for each other; look at them four times."""
    begin, looks = time.time(), [limit - 1 + 0.2 * number for number in range(4)]
    living = {pid: (run, rank) for run in runs for rank, pid in enumerate(run.ids)}
    while living and time.time() < begin + limit + 3:
        time.sleep(0.01)
        for pid, (run, rank) in list(living.items()):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                run.ends[rank] = time.time() - begin, os.waitstatus_to_exitcode(ended[1])
                del living[pid]
        if looks and time.time() > begin + looks[0]:
            del looks[0]
            for pid in living:
                os.kill(pid, signal.SIGUSR1)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none may see another one die, and say so
        for pid in living:
            os.kill(pid, number)
    for pid in living:
        os.waitpid(pid, 0)


def be_forked(job, rank, run, args, nurse):
    """Be one rank of a run, in a fork of the doctor, to its end."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until it leaves its stacks
        os.close(nurse.stdin.fileno())
        said = os.open(run.folder / f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(said, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        be_a_rank(job, rank, run, args, lambda moment: wait_for_go(moment, rank, run.folder))
        code = 0
    except BaseException:
        faulthandler.unregister(signal.SIGUSR1)  # who says why it ends does not move
        sys.excepthook(*sys.exc_info())
        path = run.folder / f"calls_{rank}"
        if run.kind == "plain" and (run.folder / "go_here").exists() and not path.exists():
            write_calls(path)  # it has failed before its clock rang
    finally:
        os._exit(code)


def wait_for_go(moment, rank, folder):
    """Say that this rank has come to this moment, and wait until all ranks of all runs have."""
    (folder / f"{moment}_{rank}").touch()
    while not (folder / f"go_{moment}").exists():
        time.sleep(0.01)


def be_a_rank(job, rank, run, args, meet):
    """Join the group, meet the others, let the tools in, and do the patient's job."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if run.kind == "detail" else "OFF"
    dist.set_debug_level_from_env()  # a rank that torchrun starts has read it at its import
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)
    store = dist.FileStore(str(run.folder / "store"), args.nproc)
    place = {"store": store, "rank": rank, "world_size": args.nproc}
    meet("start")  # who starts late is not ill
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.limit), **place)
    meet("here")  # all clocks begin when all have joined
    if run.kind == "plain":
        leave_stacks(run.folder / f"stacks_{rank}")
        leave_calls(run.folder / f"calls_{rank}", 0.8 * args.limit)  # once in a run
    job(rank, args.nproc, args.steps, args.batch_size)


def with_roll_call(job, line, seconds):
    """Return the job with a roll call before this line of the script, as a reader would type it."""
    source, first = inspect.getsourcelines(job)
    here = source[line - first]
    indent = here[: len(here) - len(here.lstrip())]
    source.insert(line - first, f"{indent}call_the_roll({seconds})\n")
    space = dict(globals())
    exec(compile("\n" * (first - 1) + "".join(source), inspect.getfile(job), "exec"), space)
    return space[job.__name__]


# --- Read what the tools say ---


def read_timeout(run, args):
    """An error names its rank if it is about itself, and not about waiting for another."""
    own = {}
    for rank, (seconds, code) in run.ends.items():
        if code and not WAITED.search(words := last_words(run.text(rank), code)):
            own[rank] = words, seconds
    if not own:
        late = f"{len(run.ends)} ranks ended with an error, and none of them is about itself"
        ends = [seconds for seconds, _ in run.ends.values()]
        return Finding([], None, late if ends else "not a word", max(ends, default=None))
    first = min(own)
    return Finding(sorted(own), line_of_error(run.text(first)), *own[first])


def last_words(text, code):
    """Return the line that says why a rank has ended."""
    if code < 0:
        thrown = re.search(r"what\(\): *(.*)", text)
        return f"{signal.Signals(-code).name} {thrown[1] if thrown else ''}".strip()
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)", text, re.MULTILINE)
    return errors[-1] if errors else "timed out without a word"


def line_of_error(text):
    """Return the line of the script at which a traceback ends."""
    frames = re.findall(FRAME, text.rpartition("Traceback (most recent call last)")[2])
    lines = [int(line) for file, line in frames if not LIBRARY.search(file)]
    return lines[-1] if lines else None


def not_arrived(places):
    """Return the ranks of {rank: where(...)} that do not wait for all; if all do, the odd one."""
    away = [rank for rank, place in places.items() if not place or place[1] not in MEETINGS]
    return away if 0 < len(away) < len(places) else odd(places)


def who_moves(seen, last):
    """Return who has not arrived, but was elsewhere in its `last` looks; of {rank: looks(...)}."""
    places = {rank: own[-1] if own else None for rank, own in seen.items()}
    away = [r for r in not_arrived(places) if places[r] and places[r][1] not in MEETINGS]
    return [rank for rank in away if len({way for way, _ in seen[rank][-last:]}) > 1]


def read_stacks(run, args):
    """The stacks name who has not arrived, or stands at another line; who moves is at work."""
    seen = {rank: looks(run.text(rank, "stacks")) for rank in range(args.nproc)}
    places = {rank: own[-1] if own else None for rank, own in seen.items()}
    if not all(places.values()):  # it has ended before it was asked; others may have by now
        gone = [rank for rank in places if not places[rank]]
        return Finding([], None, f"rank {gone[0]} is not there any more", None)
    seconds = max((run.folder / f"stacks_{rank}").stat().st_mtime for rank in seen) - run.begin
    named = not_arrived(places)
    if moving := who_moves(seen, 3):
        words = f"rank {moving[0]} is not there, but moves: slow, or in a circle"
        return Finding([], None, words, seconds)
    return Finding(named, *at(named, places), seconds)


def at(named, places):
    """Return (line, words): where the first of the named ranks stands, and one of the others."""
    if not named:
        return None, "no rank is the odd one"
    other = next(rank for rank in places if rank not in named)
    told = {r: places[r] or ((), "nothing that it says") for r in (named[0], other)}
    (way, call), (others_way, others_call) = told[named[0]], told[other]
    words = f"rank {named[0]} stands at {shown(way[-1:])}, in {call or 'its own code'}, "
    words += f"and rank {other} at {shown(others_way[-1:])}, in {others_call}"
    return line_in(way), words


def line_in(way):
    """Return the number of the last line of a way, or None."""
    return int(way[-1].rpartition(":")[2]) if way else None


def odd(said):
    """Return the ranks that say something else than most do; [] if there is no majority."""
    counts = Counter(said.values()).most_common()
    if len(counts) < 2 or 2 * counts[0][1] <= len(said):
        return []
    most = counts[0][0]
    return [rank for rank in said if said[rank] != most]


def calls_in(dump):
    """Return {number: (way, operation, group, sizes)} of the calls in a recorder's bytes."""
    calls = {}
    for entry in pickle.loads(dump).get("entries", []):
        operation = entry["profiling_name"].partition(":")[2]
        sizes = f"{entry['input_sizes']} {entry['input_dtypes']}"
        way = way_of([(f["filename"], f["line"], f["name"]) for f in entry["frames"]])
        calls[entry["record_id"]] = way, operation, entry["process_group"][0], sizes
    return calls


def first_difference(calls, part=slice(None)):
    """Return {rank: call} where this part of the calls first differs: None, a rank is not there."""
    first = max(min(own, default=0) for own in calls.values())  # older ones may be forgotten
    for number in range(first, max(max(own, default=-1) for own in calls.values()) + 1):
        row = [own.get(number) for own in calls.values()]
        if len({call and call[part] for call in row}) > 1:
            return dict(zip(calls, row, strict=True))
    return {}


def parted(calls):
    """Return (the ranks that are behind, or else the odd one; {rank: call} where they parted).

    Operation, group and sizes must agree, except in a scatter and the like. Ways may differ
    rightly, as where rank 0 does something first. But who stands alone at a call that can't be
    right, and has taken a way of its own before, may have parted there.
    """
    here, ways = first_difference(calls, slice(1, None)), first_difference(calls, slice(0, 1))
    behind = [rank for rank in here if here[rank] is None]
    named = behind or odd({rank: call[1:] for rank, call in here.items()})
    alone = odd({rank: call and call[0] for rank, call in ways.items()})
    return named, ways if named and alone == named else here


def read_recorder(run, args):
    """The recorder names who has not come to the first call that is not the same on all ranks."""
    paths = [run.folder / f"calls_{rank}" for rank in range(args.nproc)]
    if not all(path.exists() for path in paths):
        gone = [rank for rank, path in enumerate(paths) if not path.exists()]
        return Finding([], None, f"rank {gone[0]} has left no calls", None)
    seconds = max(path.stat().st_mtime for path in paths) - run.begin
    calls = {rank: calls_in(path.read_bytes()) for rank, path in enumerate(paths)}
    named, here = parted(calls)
    if not named:
        return Finding([], None, "no rank is the odd one", seconds)
    line = here[named[0]] and line_in(here[named[0]][0])
    other = next(rank for rank in here if rank not in named)
    words = ["nothing"] * args.nproc
    for rank, call in here.items():
        if call:
            words[rank] = f"{call[1]} at {shown(call[0][-1:])} in group {call[2]}"
    told = f"rank {named[0]} calls {words[named[0]]}, and rank {other} {words[other]}"
    return Finding(named, line, told, seconds)


def read_analyzer(run, args):
    """PyTorch's own analyzer names culprits, and ranks that are missing."""
    paths = [run.folder / f"calls_{rank}" for rank in range(args.nproc)]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return Finding([], None, "no rank has left calls", None)
    begin, report = time.time(), run.folder / "analysis"
    if (pid := os.fork()) == 0:
        analyze(paths, report, args.nproc)
    os.waitpid(pid, 0)
    text = report.read_text()
    named = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}
    if missing := re.search(r"missing ranks: \{(.*)\}", text):  # in the first group that lacks any
        named |= {int(rank) for rank in missing[1].split(", ")}
    words = re.findall("Culprit rank.*|missing ranks.*|^\\w+Error.*", text, re.MULTILINE)
    dumped = max(path.stat().st_mtime for path in paths) - run.begin
    seconds = dumped + time.time() - begin
    lines = re.findall(rf"at {re.escape(__file__)}:(\d+)", text)
    line = int(lines[0]) if lines else None
    return Finding(sorted(named), line, "; ".join(words) or "it finds nothing", seconds)


def analyze(paths, report, world_size):
    """Let torch.distributed.flight_recorder read the ranks' calls, in their order; then leave.

    gloo writes down its groups without their names, and the analyzer stops with a KeyError: we add
    the names first.
    """
    for number in (1, 2):
        os.dup2(os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        from torch.distributed.flight_recorder.components import builder, config_manager, loader

        details = {path.name: loader.read_dump("calls_", str(path)) for path in paths}
        for dump in details.values():
            groups = {tuple(entry["process_group"]) for entry in dump["entries"]}
            ranks = str(list(range(world_size)))
            dump["pg_config"] = {n: {"name": n, "desc": d, "ranks": ranks} for n, d in groups}
        flags = ["--allow-incomplete-ranks"] if len(paths) < world_size else []
        arguments = config_manager.JobConfig().parse_args(flags)
        builder.build_db(details, arguments, str(dump["version"]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def read_words(run, args):
    """PyTorch's words name ranks: those in every pair that differs, or those that did not come.

    "Please check rank 0 logs" is said of rank 0 whoever did not come, so it names nobody.
    """
    pairs, missing = [], []
    for rank in range(args.nproc):
        text = run.text(rank)
        pairs += re.findall(r"Rank (\d+) is running collective.*but Rank (\d+) is", text)
        missing += re.findall(r"Ranks ([\d, ]+) failed to pass|Rank (\d+) failed to pass", text)
    everywhere = set.intersection(*map(set, pairs)) if pairs else set()
    named = everywhere or set(re.findall(r"\d+", str(missing)))
    named = sorted(map(int, named))
    ends = [seconds for seconds, _ in run.ends.values()]
    pattern = r"Detected mismatch.*|\[Rank 0\]: Rank.*|Rank \d+ successfully reached.*"
    words = re.findall(pattern, "\n".join(run.text(rank) for rank in range(args.nproc)))
    crashed = [c for _, c in run.ends.values() if c < 0]
    other = f"killed by {signal.Signals(-crashed[0]).name}" if crashed else "nothing of its own"
    line = line_of_error(run.text(named[0])) if everywhere and named else None
    return Finding(named, line, words[0] if words else other, max(ends, default=None))


READERS = (read_timeout, read_stacks, read_recorder, read_analyzer, read_words, read_words)


# --- Examine patients, and judge the tools ---


def examine(names, tools, args):
    """Return {patient: {tool: Finding}}, and the patients whose ranks have all come to the end."""
    import warnings

    import torch._dynamo  # noqa: F401  optimizers and DDP want it: once here, and not in each rank

    warnings.filterwarnings("ignore", ".*use of fork")  # no thread of ours holds a lock
    kinds = dict.fromkeys(["plain", *(RUN_OF[tool] for tool in tools)])
    kinds.pop("roll_call", None)  # it needs to know the line before which to call the roll
    jobs = [(name, kind, job_of(name)) for name in names for kind in kinds]
    runs = {}
    with ward() as (folder, nurse):
        for first in range(0, len(jobs), 4):  # more at once would get in each other's way
            runs |= treat(jobs[first : first + 4], args, folder, nurse)
        if "roll_call" in tools:
            jobs = [called_in(runs[name, "plain"], args) for name in names]
            for first in range(0, len(jobs), 4):
                runs |= treat(jobs[first : first + 4], args, folder, nurse)
        read = dict(zip(TOOLS, READERS, strict=True))
        found = {n: {t: read[t](runs[n, RUN_OF[t]], args) for t in tools} for n in names}
    ends = {name: runs[name, "plain"].ends.values() for name in names}
    return found, [name for name in names if [code for _, code in ends[name]] == [0] * args.nproc]


def job_of(name):
    """Return the job of a patient, or the healthy one."""
    return PATIENTS[name].job if name in PATIENTS else healthy


def called_in(run, args):
    """Return (patient, kind of run, job): the roll is called before the line where most stand."""
    job = job_of(run.name)
    source, first = inspect.getsourcelines(job)
    places = [where(run.text(rank, "stacks")) for rank in range(args.nproc)]
    lines = [line_in(p[0]) if p else line_of_error(run.text(r)) for r, p in enumerate(places)]
    lines = Counter(line for line in lines if line and first <= line < first + len(source))
    line = lines.most_common(1)[0][0] if lines else first + len(source) - 1
    return run.name, "roll_call", with_roll_call(job, line, args.limit - 1)


def truth(name, world_size):
    """Return (the guilty ranks, the number of the line that gives them away)."""
    if name not in PATIENTS:
        return set(), None
    source, first = inspect.getsourcelines(PATIENTS[name].job)
    text = PATIENTS[name].line
    lines = [first + index for index, line in enumerate(source) if text and text in line]
    return {rank % world_size for rank in PATIENTS[name].guilty}, lines[0] if lines else None


def verdict(finding, guilty, world_size):
    """Return what a tool's words are worth: it names guilty ranks only, an innocent, or nobody.

    Or it has ended the job itself.
    """
    if finding.words == "killed by SIGSEGV":  # no patient does that by itself
        return "crash"
    if not finding.ranks or len(finding.ranks) == world_size:
        return "nothing"
    return "guilty" if guilty.issuperset(finding.ranks) else "victim"


def advice(findings):
    """Return (ranks, line, words). Who moves is at work; else ask the recorder, then the stacks.

    The recorder's line is that of the mistake, if it has one: a stack may show what came of it.
    """
    if "moves" in (stacks := findings.get("stacks", Finding([], None, "", None))).words:
        return [], None, stacks.words
    order = ("recorder", "stacks", "detail", "timeout")
    named = [findings[tool] for tool in order if tool in findings and findings[tool].ranks]
    if not named:
        return [], None, "no tool names anybody"
    errors_first = sorted(named, key=lambda found: found is findings.get("timeout"), reverse=True)
    lines = [f.line for f in [named[0], *errors_first] if f.line and f.ranks == named[0].ranks]
    return named[0].ranks, lines[0] if lines else None, named[0].words


def cells(name, findings, guilty, world_size):
    """Return {tool: its cell of the matrix}, if these ranks are the guilty ones."""
    rows = {}
    for tool, found in findings.items():
        rows[tool] = {"verdict": verdict(found, guilty, world_size)} | found._asdict()
    return rows


def wrong_in(name, findings, world_size, ended):
    """Return what is wrong with the tools' findings about a patient: a list of sentences."""
    guilty, line = truth(name, world_size)
    row = cells(name, findings, guilty, world_size)
    turned = cells(name, findings, set(range(world_size)) - guilty, world_size)
    wrong = []
    if (name in ended) != (name == "healthy"):
        wrong.append(f"{name} {'comes' if name in ended else 'does not come'} to its end")
    for tool, cell in row.items():
        right = EXPECTED.get(name, "nothing " * len(TOOLS)).split()[TOOLS.index(tool)]
        if cell["verdict"] != right:
            wrong.append(f"{name}: {tool} says {cell['verdict']}, and not {right} as measured")
        if cell["verdict"] == "guilty" and turned[tool]["verdict"] != "victim":
            wrong.append(f"{name}: the verdict on {tool} does not depend on who is guilty")
    ranks, advised, _ = advice(findings)
    if len(row) == len(TOOLS) and (set(ranks), advised) != (guilty, line):
        wrong.append(f"{name}: the advice is line {advised} of {ranks}, not {line} of {guilty}")
    return wrong


def main(args):
    """Be one rank of a patient, or the doctor; return the verdict, the claim, and the numbers."""
    if "RANK" in os.environ:
        return be_one_of_a_job(args)
    if args.files:
        sys.exit(read_files(args.files))
    names = list(PATIENTS) if args.patient == "all" else [args.patient]
    tools = TOOLS if args.tool == "all" else (args.tool,)
    found, ended = examine(dict.fromkeys(["healthy", *names]), tools, args)
    wrong, matrix, told = [], {}, {}
    for name, findings in found.items():
        wrong += wrong_in(name, findings, args.nproc, ended)
        if name in names:
            matrix[name] = cells(name, findings, truth(name, args.nproc)[0], args.nproc)
            advised = advice(findings) if tools == TOOLS else None
            told |= {name: advised[0]} if advised else {}
            print_row(name, matrix[name], advised, args)
    named = [n for n, row in matrix.items() if any(c["verdict"] == "guilty" for c in row.values())]
    numbers = {"lesson": 19, "world_size": args.nproc, "backend": "gloo", "device": "cpu"}
    numbers |= {"matrix": matrix, "named": named, "advice": told}
    return not wrong, "; ".join(wrong) or claim_of(names, matrix, args), numbers


def print_row(name, row, advised, args):
    """Print what each tool says about a patient, and the advice."""
    print(f"{name} on {args.nproc} ranks, which wait {args.limit} s for each other: who is it?")
    for tool, cell in row.items():
        when = "never" if cell["seconds"] is None else f"{cell['seconds']:.1f} s"
        print(f"    {tool:11} {cell['verdict']:9} {when:7} {cell['words'][:100]}")
    if not advised:  # one tool alone gives none: it may know the rank, and not the line
        return
    ranks, line, words = advised
    who = f"rank {', '.join(map(str, ranks))}, line {line}" if ranks else "nobody"
    print(f"    advice: {who}: {words[:100]}")
    if name in PATIENTS:
        print(f"    truth: {PATIENTS[name].why}", flush=True)


def claim_of(names, matrix, args):
    """Return the claim that holds: which tools name the guilty rank, and which of them the line."""
    parts = []
    for name in names:
        guilty, line = truth(name, args.nproc)
        tools = [tool for tool, c in matrix[name].items() if c["verdict"] == "guilty"]
        exact = [tool for tool in tools if matrix[name][tool]["line"] == line]
        who = f"rank {', '.join(map(str, sorted(guilty)))}" if guilty else "nobody guilty"
        by = f"named by {', '.join(tools)}" if tools else f"not named by {', '.join(matrix[name])}"
        part = f"{name}: {who}, {by}"
        parts.append(part + (f"; line {line} by {', '.join(exact)}" if exact else ""))
    return "; ".join(parts)


def read_files(folder):
    """Print what the ranks of any job have left in a folder; return 0, or 1 if it names nobody."""
    named = tell(folder)
    print(who(named, "is named", "are named") if named else "nobody is named")
    return 0 if named else 1


def be_one_of_a_job(args):
    """Be one rank of a patient that torchrun has started; it hangs, or fails, as in life."""
    import torch._dynamo  # as above: its import may take longer than our clocks

    dist.init_process_group("gloo", timeout=timedelta(seconds=args.limit))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.files:
        os.makedirs(args.files, exist_ok=True)
        leave_stacks(f"{args.files}/stacks_{rank}", 0.5 * args.limit)
        leave_calls(f"{args.files}/calls_{rank}", 0.5 * args.limit)
    torch.manual_seed(args.seed + rank)
    job_of(args.patient)(rank, world_size, args.steps, args.batch_size)
    dist.destroy_process_group()
    numbers = {"lesson": 19, "world_size": world_size, "matrix": {}, "named": [], "advice": {}}
    return not truth(args.patient, world_size)[0], f"{args.patient} has come to its end", numbers


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    one = {"choices": [*PATIENTS, "healthy", "all"], "metavar": "NAME", "default": "early_stop"}
    parser.add_argument("--patient", **one, help=f"{', '.join(PATIENTS)}, or all: %(default)s")
    one = {"choices": [*TOOLS, "all"], "metavar": "NAME", "default": "all"}
    parser.add_argument("--tool", **one, help=f"{', '.join(TOOLS)}, or all: %(default)s")
    ranks = "ranks, three at least: of two that differ, neither is the odd one: %(default)s"
    parser.add_argument("--nproc", type=whole(3, 4), default=3, help=ranks)
    files = "folder in which ranks by torchrun leave their files; else: read those of any job"
    parser.add_argument("--files", metavar="FOLDER", help=files)
    wait = "seconds that ranks wait for each other: %(default)s"
    parser.add_argument("--limit", type=whole(2, 60), default=3, help=wait)
    steps = "steps before the trouble: %(default)s"
    parser.add_argument("--steps", type=whole(2, 10**4), default=3, help=steps)
    rows = "rows of a batch: %(default)s"
    parser.add_argument("--batch-size", type=whole(2, 10**4), default=8, help=rows)
    parser.add_argument("--seed", type=whole(0, 2**31), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if "RANK" in os.environ and args.patient == "all":
        parser.error("argument --patient: one rank of a job has one patient, and not all")
    if args.files and "RANK" not in os.environ and not Path(args.files, "stacks_0").is_file():
        parser.error(f"argument --files: rank 0 has left no stacks_0 in {args.files}")
    return args


# --- The frame: the same in every lesson ---


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            limits = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{limits}, not {text[:40]!r}")
        return int(text)

    return number


def conclude(passed, claim, numbers, as_json):
    """Let rank 0 print the verdict as the last line, or before the JSON; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("PASS" if passed else "FAIL", claim)
        if as_json:
            print(json.dumps(numbers | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse_args()
    sys.exit(conclude(*main(args), args.json))
