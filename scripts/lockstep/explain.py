"""Read the log of a job that has failed; say which rank failed first, why, and what to do.

    bash scripts/explain.sh [log.txt ...]

Without a file it reads what is piped into it. Nothing is installed, and nothing is sent anywhere.

Exit codes: 0, or 2 if there is no log to read.
"""

import re
import signal
import sys
import textwrap
from functools import partial
from pathlib import Path

from lockstep import errors, launched
from lockstep.flags import Flags
from lockstep.job_log import Log, Said

PAGE = "docs/errors.md"
WIDTH = 100
UNKNOWN = "a process that does not tell its rank"


def main(arguments):
    """Explain logs; return the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # explain.sh log.txt | head -1
    parser = Flags("explain", description=__doc__)
    parser.add_argument("logs", nargs="*", metavar="log.txt", help="or - for what is piped in")
    args = parser.parse_args(arguments)
    if not args.logs and sys.stdin.isatty():
        parser.error("no log: name its file, or pipe it in")
    log = Log(errors.read_page())
    for name in args.logs or ["-"]:
        try:
            read(log, name)
        except (OSError, ValueError) as problem:
            parser.error(str(problem))
    print("\n".join(tell(log)))
    return 0


def read(log, name):
    """Read a file, or "-"; raise ValueError if it is no log, and OSError if it can't be read."""
    if name != "-" and Path(name).is_dir():
        raise ValueError(f"{name} is a folder: name the files in it")
    shown = "what is piped in" if name == "-" else name
    with open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-") as stream:
        begin = stream.peek(4096)[:4096]
        if not begin:
            raise ValueError(f"{shown} is empty")
        if begin.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")):
            raise ValueError(f"{shown} is compressed: unpack it first")
        if b"\0" in begin:
            raise ValueError(f"{shown} is no text")
        log.read(stream, shown)


# --- The verdict ---

HEADS = {
    errors.CAUSE: "failed",
    errors.MISMATCH: "met another rank in the wrong call; either of them can be the wrong one",
    errors.WAIT: "waited in vain, and no rank in this log says why",
    errors.ECHO: "told only what follows from something else, and that is not in this log",
}


def tell(log):
    """Return the lines that a reader sees."""
    ended = list(ended_by_signals(log))
    follows = [said for said in ended if said.role == errors.ECHO]  # -6: its last words say why
    failed = [*(said for said in ended if said not in follows), *log.said, *follows]
    most = 2 if log.is_short else 1  # in a piece that was pasted, words of the page are meant
    failed = [said for said in failed if said.role != errors.WARNING and said.doubt <= most]
    warned = [said for said in log.said if said.role == errors.WARNING and said.entry]
    if not failed:
        return [*nothing(log), *warnings(warned)]
    cause = min(failed, key=partial(order, log))
    same = [said for said in failed if alike(said, cause)]
    known = {said.who for said in same}
    rest = [said for said in failed if not alike(said, cause)]
    rest = [said for said in rest if said.role == errors.CAUSE or said.who not in known]
    return [
        *of_cause(cause, same, log),
        *also([said for said in rest if said.role == errors.CAUSE], "also said"),
        *also([said for said in rest if said.role != errors.CAUSE], "only felt it"),
        *warnings(warned),
    ]


def order(log, said):
    """Sort the cause first.

    An error with a traceback comes before a line, and one after which its process went on (it has
    another traceback, which did not follow from this one) before what is only a word in a line.
    """
    last = not said.who or said.chain == log.chains[said.who]
    return (said.doubt, errors.ROLES.index(said.role), not said.chain, not last)


UNKNOWN_HERE = "Nothing is known here of this message."
OF_SPAWN = (
    "The message is not known here. But a process of mp.spawn imports the script anew: what its"
    ' parent has done under if __name__ == "__main__", such as to register or to set something, is'
    " not done in it."
)


def ended_by_signals(log):
    """Return what launchers say of processes that a signal has ended, as Said."""
    for who, code in log.launchers.order.items():
        entry = log.find(launched.named(code)) if code < 0 else None
        if code < 0:
            role = entry.role if entry else errors.CAUSE
            chain = 0 if role == errors.ECHO else log.chains[who] or 1
            yield Said(who, launched.named(code), role, entry, chain=chain)


def alike(one, other):
    """Return whether two processes say the same."""
    if one.entry or other.entry:
        return one.entry is other.entry
    return re.sub(r"\d+", "", one.text) == re.sub(r"\d+", "", other.text)


def of_cause(cause, same, log):
    """Return the lines on what has failed, and what to do."""
    does = "may have failed" if cause.doubt else HEADS[cause.role]
    head = f"{listed(said.who for said in same)} {does}: {cause.text[:300]}"
    lines = [*wrapped(head, indent=""), *wrapped(seen(cause))]
    if cause.role in (errors.WAIT, errors.ECHO):
        lines += silent(log)
    if not cause.entry:
        known = OF_SPAWN if cause.who.startswith("process") else UNKNOWN_HERE
        return [*lines, *wrapped(known)]
    entry = cause.entry
    lessons = f"lesson {', '.join(entry.lessons)}; " if entry.lessons else ""
    where = f"  see: {lessons}{PAGE}, {entry.group}"
    return [*lines, *wrapped(entry.happened), *wrapped(f"do: {entry.cure}"), where]


def silent(log):
    """Return a line on the processes that have said nothing in this log."""
    heard = {said.who for said in log.said if said.role != errors.WARNING}
    if "" in heard:  # who knows whose words these are
        return []
    ranks = [int(who.split()[1]) for who in heard if who.startswith("rank ")]
    all_ranks = [f"rank {rank}" for rank in range(max(ranks, default=-1))]
    quiet = [who for who in [*log.launchers.order, *all_ranks] if who not in heard]
    if not quiet:
        return []
    return wrapped(f"not a word of {listed(quiet)}: if this is the log of all, look there first")


def nothing(log):
    """Return the lines on a log in which no process tells of an error."""
    found = f"no process tells of an error in {log.lines:,} lines"
    first = next(iter(log.launchers.order), None)
    if first:
        code = launched.named(log.launchers.order[first])
        return [
            f"{first} ended first ({code}), and says nothing in this log: look for its own output"
        ]
    if log.launchers.trouble:
        return [f"{found}, but the job has failed:", *wrapped(log.launchers.trouble[:300])]
    if log.open:
        return [f"{found}, but the log ends in the middle of a traceback"]
    return [
        found,
        "  A job that stands still says nothing for half an hour (gloo) or ten minutes (nccl):",
        f"  lesson 19 finds out who waits for whom; {PAGE}, Hanging",
    ]


def also(said, what):
    """Return a line for each message that is not the cause, the first six of them."""
    lines = []
    while said and len(lines) < 6:
        first = said[0]
        who = listed(other.who for other in said if alike(other, first))
        lines.append(shortened(f"{who} {what}: {in_short(first)}"))
        said = [other for other in said if not alike(other, first)]
    return lines


def warnings(warned):
    """Return a line on the messages that are in jobs that train well, too."""
    told = dict.fromkeys(in_short(said) for said in warned)
    return [shortened(f"only warnings, and no cause: {'; '.join(told)}")] if told else []


# --- Words ---


def seen(said):
    """Return where a message stands in the log, and the line of yours that led to it."""
    places = [said.place, f"line {said.line:,} of {said.log}" if said.line else ""]
    return f"({'; '.join(place for place in places if place)})" if any(places) else ""


def listed(names):
    """Return "rank 0, 2" for "rank 2" and "rank 0"; "" is somebody who does not tell."""
    kinds = {}
    for name in dict.fromkeys(names):
        kind, _, number = name.rpartition(" ")
        kinds.setdefault(kind or UNKNOWN, []).extend([number] if number else [])
    told = [f"{kind} {', '.join(sorted(kinds[kind], key=by_number))}".strip() for kind in kinds]
    return " and ".join(told)


def by_number(name):
    """Sort 2 before 10."""
    return (len(name), name)


def in_short(said):
    """Return the words of a message that the page knows, with its lessons; or the message."""
    words = said.entry.words_in(said.text) if said.entry else said.text[:WIDTH]
    lessons = f"lesson {', '.join(said.entry.lessons)}" if said.entry and said.entry.lessons else ""
    where = "; ".join(part for part in (said.place, lessons) if part)
    return f"{words} ({where})" if where else words


def wrapped(text, indent="  "):
    """Return the lines of a paragraph."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent="  ")


def shortened(text):
    """Return a text as one line that fits."""
    return textwrap.shorten(text, 2 * WIDTH, placeholder=" ...")
