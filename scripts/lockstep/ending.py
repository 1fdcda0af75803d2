"""How what was started comes to an end: signals, the parent's death, and who is the cause.

nbtools.run, the launchers, the doctor and the rehearsals on two machines use the same words here.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

# --- Signals ---


def end_with_parent(signal_number):
    """Linux: be sent this signal when our parent ends, however it ends."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)


def say_goodbye(signal_number):
    """Say the one line that a command says when it was asked to end, and has ended."""
    print(f"{WORDS[signal_number]}: all that was started has ended", file=sys.stderr)


def leave(signal_number, frame):
    """Handle a signal: raise SystemExit; during an import or the start of a process, a bit later.

    A module in C that is interrupted while it is imported may swallow a SystemExit, so that the
    program would go on, or make an ImportError of it. A process that multiprocessing has started,
    but not yet told what to do, would print a traceback.
    """
    if not _is_busy(frame):
        sys.exit(128 + signal_number)
    signal.signal(signal.SIGALRM, lambda _, later: leave(signal_number, later))
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def _is_busy(frame):
    """Return whether an import, or the start of a process, is going on in this stack."""
    while frame:
        importing = frame.f_code.co_filename.startswith("<frozen importlib")
        starting = frame.f_code.co_qualname == "Popen._launch"
        if importing or starting:
            return True
        frame = frame.f_back
    return False


# --- Why a rank has failed ---

# What gloo and the stores say to a rank whose neighbour has gone, or does not come.
LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Connection was likely closed"
    "|Broken pipe|Socket closed|connectFullMesh failed"
)
LATE = re.compile("timed out|timeout", re.IGNORECASE)


def reason(error):
    """Return the type of an exception and the first line of its message, at most 300 letters."""
    text = traceback.format_exception_only(error)[-1].strip()
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
    return re.sub(r"\[[^][]*\.(cc|cpp|h):\d+\] ", "", text)


def verbose():
    """Return whether the reader wants to see whole tracebacks."""
    return os.environ.get("LOCKSTEP_VERBOSE") == "1"


class End(NamedTuple):
    """How a rank ended. The least of several failed ones is the cause.

    So a rank that only lost its connection, or that waited in vain, is never the cause if there is
    another; and of two that are alike, it is the one that ended first.
    """

    lost: bool
    late: bool
    time: float
    rank: int
    reason: str | None  # None: it came to its end


def write_end(text, lost=False):
    """Write down when and why this rank ended, for the launcher; None: it came to its end.

    A text that begins with "rank 1: " is about rank 1, whoever says it: the others may have been
    told why rank 1 can't go on.
    """
    rank = os.environ["RANK"]
    named = re.match(r"rank (\d+)(?: failed)?: (.*)", text or "")
    cause, text = named.groups() if named else (rank, text)
    late = "timed out" in (text or "").lower()
    end = End(lost, late, time.monotonic(), int(cause), text)
    Path(os.environ["LOCKSTEP_ENDS"], f"{rank}.json").write_text(json.dumps(end))


def read_ends(folder):
    """Return {rank: End} of all ranks that have written down how they ended."""
    return {int(path.stem): End(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def explain(failures, folder, on_several_machines=False):
    """Return "rank N failed: ..." for the cause, or None if the ranks have said it themselves.

    `failures` is torchrun's {rank: how its process ended}, in the order in which it saw them end.
    When it has seen one, it ends the others by SIGTERM; so only the first can be somebody else's.
    """
    ends = read_ends(folder)
    for place, (rank, failure) in enumerate(failures.items()):
        if failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):  # the second by a handler
            if place == 0:
                return f"rank {rank} failed: killed by SIGTERM"
        elif failure.exitcode < 0:
            return f"rank {rank} failed: killed by {signal.Signals(-failure.exitcode).name}"
        elif rank not in ends:
            return f"rank {rank} failed: exit code {failure.exitcode}"
    failed = [end for end in ends.values() if end.reason]
    if not failed:
        return None
    cause = min(failed)
    if cause.late:
        waited = "(it waited for another rank, which did not come)"
        return f"rank {cause.rank} failed: {cause.reason} {waited}"
    if not cause.lost:
        return f"rank {cause.rank} failed: {cause.reason}"
    if on_several_machines:
        return f"rank {cause.rank} failed: it lost a rank of another machine, which says why"
    returned = [str(rank) for rank in sorted(ends) if not ends[rank].reason]
    others = f"rank {', '.join(returned)} had already returned" if returned else "nobody knows why"
    return f"rank {cause.rank} failed: it lost the connection to another rank; {others}"
