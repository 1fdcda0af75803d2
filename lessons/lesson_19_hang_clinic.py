"""Lesson 19: it hangs: which rank is it, and how do I find out?

A job that stands still says nothing. So each rank writes down where it stands and what it has
called last, again and again; nothing is sent. Who reads the files of all ranks sees where their
ways part. Here each rank trains until its own loss is small; six tools look at ten such jobs.

Run it:  bash scripts/lesson_19.sh --patient early_stop [--tool stacks] [--nproc 3]
By hand: torchrun --standalone --nproc-per-node=3 lessons/lesson_19_hang_clinic.py --files FOLDER
Then, of this job or of your own: bash scripts/lesson_19.sh --files FOLDER

Output to expect on a CPU:

    early_stop on 3 ranks, which wait 3 s for each other: who is it?
        timeout ... stacks      guilty    ... s   rank 2 stands at ..., in barrier, and ...
    PASS early_stop: rank 2, named by stacks, recorder, ...; line ... by stacks, recorder, ...
"""

import argparse
import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn

# --- The technique ---
# In each rank, after init_process_group: leave_stacks(f"{folder}/stacks_{rank}") and
# leave_calls(f"{folder}/calls_{rank}"), sooner than the timeout. Then: lesson_19.sh --files FOLDER.

MESSAGES = ("send", "recv", "recv_anysource")
NOTES, NOTE_OF = deque(maxlen=2000), weakref.WeakKeyDictionary()  # of take_notes


def leave_stacks(path, seconds=300):
    """Write to `path` where this rank stands: every `seconds`, at `kill -USR1 PID`, at its end."""
    file = open(path, "w")  # noqa: SIM115  (it stays open)
    print(dist.get_world_size(), "ranks", file=file, flush=True)
    faulthandler.enable(file)  # if C++ aborts the process
    faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)  # a launcher ends it
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    threading.Thread(target=lambda: write_stacks(file, seconds), daemon=True).start()
    os.register_at_fork(after_in_child=leave_no_stacks)


def write_stacks(file, seconds):
    """Write all stacks, again and again, with Python's lock: so no thread moves meanwhile."""
    while True:
        # This clock takes no lock: a rank that computes can die of it. So it is wound up anew, and
        # rings only if this thread does not get the lock for long: then no other one moves either.
        faulthandler.dump_traceback_later(seconds + 30, repeat=True, file=file)
        time.sleep(seconds)
        print("Stacks of all threads", file=file, flush=True)
        faulthandler.dump_traceback(file)


def leave_no_stacks():
    """Write no more: a fork is not this rank, and where a process ends says nothing."""
    # A fork has to end by os._exit, as those of multiprocessing do: Python 3.11 would wait for the
    # thread of faulthandler's clock, which a fork has not.
    faulthandler.disable()
    faulthandler.unregister(signal.SIGTERM)
    faulthandler.unregister(signal.SIGUSR1)


def leave_calls(path, seconds=300):
    """Write to `path` the last calls of this rank: every `seconds`, and when Python ends."""
    importlib.import_module("torch._dynamo")  # the first list does: no optimizer may get half of it
    Path(path).unlink(missing_ok=True)  # of an earlier job
    take_notes()
    writing = threading.Lock()

    def write_again_and_again():
        while not time.sleep(seconds):
            with writing:
                write_calls(path)

    threading.Thread(target=write_again_and_again, daemon=True).start()
    atexit.register(leave_last_calls, path, writing)  # after an error, too


def take_notes():
    """Note what the recorder leaves out: messages, the root of a collective, new groups."""
    for name in (*MESSAGES, "broadcast", "reduce", "gather", "scatter"):
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
            note = {"name": name, "waits": False, "group": group.group_name}
            note |= {"frames": way_here(), "time_created_ns": time.time_ns()}
            if name != "recv_anysource":
                peer = given[1] if name in MESSAGES else given[-1].rootRank
                note["peer"] = dist.get_global_rank(group, peer)
            note["number"] = group._get_sequence_number_for_group()
            NOTES.append(note)
            NOTE_OF[work] = note
        return work

    return noted


def way_here():
    """Return (file, line, function) of the calling frame, and of all that have called it."""
    frames = traceback.walk_stack(sys._getframe(1))
    return [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]


def noting_groups(make):
    """Return new_group that also notes who shall be in it: all ranks make the same ones in turn."""
    made = []

    def noted(ranks=None, *given, **options):
        if options.get("use_local_synchronization"):  # then its members make it, and nobody else
            return make(ranks, *given, **options)
        ranks = None if ranks is None else list(ranks)  # we look at them before torch does
        members = range(dist.get_world_size()) if ranks is None else ranks
        made.append(members)
        note = {"name": "new_group", "group": "new", "number": len(made), "waits": True}
        note |= {"members": tuple(members), "frames": way_here(), "time_created_ns": time.time_ns()}
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


def leave_last_calls(path, writing):
    """Write the calls of a rank that ends: in good order, or by an error after more calls."""
    writing.acquire()  # for good: what the clock writes later would not know of the end
    faulthandler.cancel_dump_traceback_later()  # not in a fork: it would wait for ever there
    leave_no_stacks()
    ended = not hasattr(sys, "last_value")  # that would be the error which has ended it
    before = os.path.getmtime(path) if os.path.exists(path) else 0
    write_calls(path, ended, None if ended else before)


def write_calls(path, ended=False, before=None):
    """Write recorder and notes of this rank to `path`, if it has called since `before`, or None."""
    began = time.time()
    recorded = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # on by default
    dump = {"entries": []} | recorded | {"notes": list(NOTES)}  # before a call, it has no entries
    times = [call["time_created_ns"] / 1e9 for call in dump["entries"] + dump["notes"]]
    if before is not None and max(times, default=1) <= before:
        return  # the list of the standstill is the better one
    groups = dict(dist.distributed_c10d._world.pg_names)
    groups = {name: dist.get_process_group_ranks(group) for group, name in groups.items()}
    dump |= {"groups": groups, "ended": ended}
    unfinished = Path(f"{path}.{threading.get_ident()}")  # we may be ended while we write
    unfinished.write_bytes(pickle.dumps(dump))
    os.utime(unfinished, (began, began))  # later calls are not in it; the first dump takes seconds
    unfinished.rename(path)


def call_the_roll(seconds, gloo_group=None):
    """Wait for all ranks; rank 0 names those that have not come after `seconds`. Only over gloo."""
    dist.monitored_barrier(gloo_group, timedelta(seconds=seconds), wait_all_ranks=True)


# --- The example ---


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
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    dist.barrier()


def be_one_of(job, args):
    """Be one rank of a job that may hang, and leave files, if there is a folder for them."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = {"store": None if world_size > 1 else dist.HashStore()}  # alone, nobody has to be found
    place |= {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=args.limit)}
    dist.init_process_group("gloo", **place)
    if args.files:
        os.makedirs(args.files, exist_ok=True)
        leave_stacks(f"{args.files}/stacks_{rank}", 0.5 * args.limit)
        leave_calls(f"{args.files}/calls_{rank}", 0.5 * args.limit)
    torch.manual_seed(args.seed + rank)
    job(rank, world_size, args.steps, args.batch_size)
    dist.destroy_process_group()
    print(f"rank {rank} of {world_size} has come to the end of {job.__name__}")


def main(args):
    """Be one rank of a job that hangs, if it has several ranks."""
    be_one_of(early_stop, args)


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--files", metavar="FOLDER", help="for what ranks leave; it is read after")
    parser.add_argument("--limit", type=int, default=3, help="seconds of waiting: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="before the trouble: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="rows: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
