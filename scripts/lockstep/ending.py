"""How what was started comes to an end: signals, the parent's death, and who is the cause.

nbtools.run, the launchers, the doctor and the rehearsals on two machines use the same words here.
"""

from __future__ import annotations  # the doctor says goodbye where Python is too old as well

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import NamedTuple

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

# --- Signals ---


def end_with_parent(signal_number):
    """Linux: be sent this signal when our parent ends, however it ends; leave if it has already.

    It may have ended while Python was starting here. Its process id is in LOCKSTEP_PARENT.
    """
    parent = os.environ.pop("LOCKSTEP_PARENT", None)
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)
        if parent and os.getppid() != int(parent):
            sys.exit(1)


def say(text):
    """Write a text and the end of its line to stderr, at once.

    print makes two writes of it, and then lines of two processes in one pipe mix.
    """
    sys.stderr.write(f"{text}\n")


def say_goodbye(signal_number):
    """Say the one line that a command says when it was asked to end, and has ended."""
    say(f"{WORDS[signal_number]}: all that was started has ended")


def leave(signal_number, frame):
    """Handle a signal: raise SystemExit; during an import or the start of a process, a bit later.

    A module in C that is interrupted while it is imported may swallow a SystemExit, so that the
    program would go on, or make an ImportError of it. A process that multiprocessing has started,
    but not yet told what to do, would print a traceback.
    """
    asked.append(signal_number)
    if not _is_busy(frame):
        sys.exit(128 + signal_number)
    signal.signal(signal.SIGALRM, lambda _, later: leave(signal_number, later))
    signal.setitimer(signal.ITIMER_REAL, 0.1)


asked = []  # the signals by which we were asked to end, as leave() has heard them


def _is_busy(frame):
    """Return whether an import, or the start of a process, is going on in this stack."""
    while frame:
        importing = frame.f_code.co_filename.startswith("<frozen importlib")
        starting = frame.f_code.co_qualname == "Popen._launch"
        if importing or starting:
            return True
        frame = frame.f_back
    return False


def run_script(script):
    """Run a script as Python would; raise what it raises, or OSError if nobody takes its output.

    What it has made stays until this process ends, and so does the stack of an error. A DDP object
    that dies after its group waits for gloo's threads with Python's lock held, and for ever if one
    of them wants that lock (~Reducer, and in it ~ProcessGroupGloo: seen in PyTorch 2.13).
    """
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = str(script)
    _kept.append(main)
    try:
        if Path(script).is_dir():  # a package of ours, with its __main__.py
            _kept.append(runpy.run_path(str(script), run_name="__main__"))
        else:
            text = Path(script).read_bytes()
            exec(compile(text, str(script), "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        _kept.append(error)
        raise
    finally:
        sys.stdout.flush()


_kept = []


def leave_with(code):
    """End this process as Python does, but for the C++ objects that are still alive.

    A group that has failed, or that DTensor still holds, keeps gloo's threads. If they live until
    these objects go, C++ now and then aborts the process: "terminate called without an active
    exception". And when all is well, to take torch apart costs half a second of the processor.
    """
    threading._shutdown()  # waits for threads of the script: a file may not be written yet
    atexit._run_exitfuncs()
    for thing in gc.get_objects():  # also files that the script has left open
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # nobody takes it; it is closed
                thing.flush()
    ctypes.CDLL(None).fflush(None)  # what C has printed
    os._exit(code)


# --- Why a rank has failed ---

# What gloo and the stores say to a rank whose neighbour has gone, or does not come.
LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Connection was likely closed"
    "|Broken pipe|Socket closed|connectFullMesh failed"
)
LATE = re.compile("timed out|timeout", re.IGNORECASE)
WAITED = "it waited: another did not come, or it called once too often"  # says nothing of guilt


def tells(words, error):
    """Return whether an error says one of LOST or LATE, and comes from torch.distributed.

    The errors of its collectives and stores are RuntimeErrors. A BrokenPipeError is about
    something else.
    """
    return isinstance(error, RuntimeError) and bool(words.search(str(error)))


def innermost(error):
    """Return the error that a CheckpointException of torch only passes on: that of its first rank.

    Its own first line names ranks, and no reason.
    """
    while type(error).__name__ == "CheckpointException" and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def of_spawned(error):
    """Return "rank N failed: " for an error that mp.spawn raises of a process; "" for others."""
    number = getattr(error, "error_index", None)
    return "" if number is None else f"rank {number} failed: "


def told_by_spawned(error):
    """Return the line with the error of a process, of the text that mp.spawn raises."""
    lines = str(error).strip().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[places[-1] + 1 :] if places else lines
    return next(line for line in after if not line.startswith(" "))


def reason(error):
    """Return the type of an exception and the first line of its message, at most 300 letters."""
    if of_spawned(error):
        return in_plain_words(told_by_spawned(error))[:300]
    lines = traceback.format_exception_only(innermost(error))
    text = next(line for line in lines if not line.startswith(" "))  # a SyntaxError's place
    text = re.sub(r"^(\S+:)\s*\n\s*", r"\1 ", text.strip())  # its first line may be empty
    return in_plain_words(text.splitlines()[0])[:300]


def in_plain_words(text):
    """Return what C++ code said, without the place in its source."""
    sizes = re.search(r"(\d+) vs (\d+)\. Received data size doesn't match expected size", text)
    if sizes:
        received, expected = sizes.groups()
        return (
            f"{received} bytes came where {expected} were expected:"
            " do all ranks pass tensors of the same size and type?"
        )
    counts = re.search(r"has (\d+) params, while rank (\d+) has inconsistent (-?\d+) params", text)
    if counts:
        own, rank, sent = counts.groups()
        return (
            f"DDP: this rank has {own} parameters, and rank {rank} has sent {sent}:"
            " do their models differ, or was one of them in another collective?"
        )
    return re.sub(r"\[[^][]*\.(cc|cpp|h):\d+\] ", "", text)


def verbose():
    """Return whether the reader wants to see whole tracebacks."""
    return os.environ.get("LOCKSTEP_VERBOSE") == "1"


# --- Which rank is the cause ---


class End(NamedTuple):
    """How a rank ended. The least of several failed ones is the cause.

    So a rank that only lost its connection, or that waited in vain, is never the cause if there is
    another; and of two that are alike, it is the one that ended first.
    """

    lost: bool
    late: bool
    time: float
    rank: int
    reason: str | None  # None: it came to its end, or left with an exit code of its own


def write_end(text, lost=False, late=False):
    """Write down when and why this rank ended, for the launcher; None: see End.

    A text that begins with "rank 1: " is about rank 1, whoever says it: the others may have been
    told why rank 1 can't go on.
    """
    rank = os.environ["RANK"]
    named = re.match(r"rank (\d+)(?: failed)?: (.*)", text or "")
    cause, text = named.groups() if named else (rank, text)
    end = End(lost, late, time.monotonic(), int(cause), text)
    path = Path(os.environ["LOCKSTEP_ENDS"], f"{rank}.json")
    unfinished = path.with_suffix(".part")  # we may be ended while we write
    unfinished.write_text(json.dumps(end))
    unfinished.rename(path)


def read_ends(folder):
    """Return {rank: End} of all ranks that have written down how they ended."""
    return {int(path.stem): End(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def own_exit_codes(failures):
    """Return {rank: exit code} of the ranks that torchrun has not ended, the first one first.

    `failures` is torchrun's {rank: how its process ended}, in the order in which it saw them end.
    When it has seen the first, it sends SIGTERM to the others, and after 30 s SIGKILL.
    """
    codes, end = {}, float("inf")
    for rank, failure in failures.items():
        terminated = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)  # or by a handler
        killed = failure.exitcode == -signal.SIGKILL and failure.timestamp >= end
        if not codes:
            end = failure.timestamp + 30
        if not codes or not (terminated or killed):
            codes[rank] = failure.exitcode
    return codes


def explain(codes, ends, on_several_machines=False):
    """Return "rank N failed: ..." for the cause, or None if the ranks have said it themselves.

    `codes` is what own_exit_codes() returns, `ends` what read_ends() returns.
    """
    for rank, code in codes.items():
        if code == 128 + signal.SIGTERM:
            return f"rank {rank} failed: killed by SIGTERM"  # its handler has cleaned up
        if code < 0:
            return f"rank {rank} failed: killed by {signal.Signals(-code).name}"
        if rank not in ends:
            return f"rank {rank} failed: exit code {code}"
    cause = min((end for end in ends.values() if end.reason), default=None)
    if cause is None or cause.lost:
        for rank, code in codes.items():
            has_spoken = code in (1, 2) and not cause  # FAIL, or what is wrong with a flag
            if not ends[rank].reason and not has_spoken:
                return f"rank {rank} failed: exit code {code}"
    return cause and f"rank {cause.rank} failed: {_consequences(cause, ends, on_several_machines)}"


def _consequences(cause, ends, on_several_machines):
    """Return what to say of the rank that is the cause, or that comes next to it."""
    if cause.late:
        return f"{cause.reason} ({WAITED})"
    if not cause.lost:
        return cause.reason
    if on_several_machines:
        return "it lost a rank of another machine, which says why"
    returned = [str(rank) for rank in sorted(ends) if not ends[rank].reason]
    others = f"rank {', '.join(returned)} had already returned" if returned else "nobody knows why"
    return f"it lost the connection to another rank; {others}"
