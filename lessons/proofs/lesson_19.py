"""What lesson 19 claims: which of six tools names the guilty rank of each patient, and its line.

What hangs can't be watched to its end, so a doctor starts the ranks of the patients himself, as
forks, lets the tools look, and compares whom they name with the truth. One run serves four tools:
what a rank says when it ends, its stacks, its calls for two. `detail` and `roll_call` change the
job, so each has a run of its own.
"""

import contextlib
import faulthandler
import inspect
import io
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import lesson_19_hang_clinic as lesson
import torch
import torch.distributed as dist
from lockstep.flags import whole
from lockstep.watch import claims, clinic
from proofs.patients import PATIENTS, job_of

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
WAITED = re.compile("timed out|timeout|Connection (closed|reset) by peer|Broken pipe", re.I)
clinic.HIDDEN.add(__file__)  # of the way to a patient
LIMITS = {"--limit": (2, 60), "--steps": (2, 10**4), "--batch-size": (2, 10**4)}
LIMITS["--seed"] = (0, 2**31)


def add_flags(parser):
    """Add the doctor's flags to those of the script."""
    one = {"choices": [*PATIENTS, "healthy", "all"], "metavar": "NAME", "default": "early_stop"}
    parser.add_argument("--patient", **one, help=f"{', '.join(PATIENTS)}, or all: %(default)s")
    one = {"choices": [*TOOLS, "all"], "metavar": "NAME", "default": "all"}
    parser.add_argument("--tool", **one, help=f"{', '.join(TOOLS)}, or all: %(default)s")
    ranks = "ranks, three at least: of two that differ, neither is the odd one: %(default)s"
    parser.add_argument("--nproc", type=whole(3, 4), default=3, help=ranks)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work, or None."""
    if args.files and not Path(args.files, "stacks_0").is_file():
        return f"argument --files: rank 0 has left no stacks_0 in {args.files}"
    return None


def examine(args):
    """Look at the patients that are asked for; return the verdict. Or read the files of any job."""
    if args.files:
        sys.exit(read_files(args.files))
    names = list(PATIENTS) if args.patient == "all" else [args.patient]
    tools = TOOLS if args.tool == "all" else (args.tool,)
    found, ended = look_at(dict.fromkeys(["healthy", *names]), tools, args)
    wrong, matrix, told, lines = [], {}, {}, []
    for name, findings in found.items():
        guilty, line = truth(name, args.nproc)
        row = {
            t: {"verdict": verdict(f, guilty, args.nproc)} | f._asdict()
            for t, f in findings.items()
        }
        advised = advice(findings) if tools == TOOLS else None  # one tool may know no line
        wrong += wrong_in(name, row, advised and (set(advised[0]), advised[1]), (guilty, line))
        if (name in ended) != (name == "healthy"):
            wrong.append(f"{name} {'comes' if name in ended else 'does not come'} to its end")
        if name in names:
            matrix[name] = row
            told |= {name: advised[0]} if advised else {}
            lines += row_of(name, row, advised, args)
    named = [n for n, row in matrix.items() if any(c["verdict"] == "guilty" for c in row.values())]
    numbers = {"world_size": args.nproc, "backend": "gloo", "device": "cpu"}
    numbers |= {"matrix": matrix, "named": named, "advice": told}
    return claims.Verdict(claim_of(matrix, args.nproc), wrong, numbers, lines)


def read_files(folder):
    """Print what the ranks of any job have left in a folder; return 0, or 1 if it names nobody."""
    named = clinic.tell(folder)
    print(clinic.who(named, "is named", "are named") if named else "nobody is named")
    return 0 if named else 1


# --- Start ranks, and end them ---


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

    def last_end(self):
        """Return when the last rank has ended by itself, or None."""
        return max((seconds for seconds, _ in self.ends.values()), default=None)


def treat(jobs, args, folder):
    """Run [(patient, kind of run, job)], four at once; return {(patient, kind): Run}."""
    if len(jobs) > 4:  # more at once would get in each other's way
        return treat(jobs[:4], args, folder) | treat(jobs[4:], args, folder)
    runs = [Run(n, kind, folder / f"{n} {kind}", [], {}, 0) for n, kind, _ in jobs]
    meeting = multiprocessing.get_context("fork").Barrier(args.nproc * len(runs) + 1, timeout=300)
    try:
        for run, (_, _, job) in zip(runs, jobs, strict=True):
            run.folder.mkdir()
            for rank in range(args.nproc):
                run.ids.append(os.fork() or be_forked(job, rank, run, args, meeting))
        for _ in ("start", "here"):  # before they join, and when all have joined
            meeting.wait()
        runs = [run._replace(begin=time.time()) for run in runs]
        wait_for(runs, args.limit)
    finally:
        living = [pid for run in runs for rank, pid in enumerate(run.ids) if rank not in run.ends]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none may see another die, and say so
            for pid in living:
                os.kill(pid, number)
        for pid in living:
            os.waitpid(pid, 0)
    return {(run.name, run.kind): run for run in runs}


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


def be_forked(job, rank, run, args, meeting):
    """Be one rank of a run, in a fork of the doctor, to its end."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until it leaves its stacks
        tempfile.tempdir = str(run.folder)  # what its loader makes goes with the doctor's folder
        said = os.open(run.folder / f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(said, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        be_a_rank(job, rank, run, args, lambda moment: meeting.wait())
        code = 0
    except BaseException:
        faulthandler.unregister(signal.SIGUSR1)  # who says why it ends does not move
        sys.excepthook(*sys.exc_info())
        path = run.folder / f"calls_{rank}"
        if run.kind == "plain" and dist.is_initialized() and not path.exists():
            lesson.write_calls(path)  # it has failed before its clock rang
    finally:
        os._exit(code)


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
        lesson.leave_stacks(run.folder / f"stacks_{rank}")
        lesson.leave_calls(run.folder / f"calls_{rank}", 0.8 * args.limit)  # once in a run
    job(rank, args.nproc, args.steps, args.batch_size)


def with_roll_call(job, line, seconds):
    """Return the job with a roll call before this line of its file, as a reader would type it."""
    source, first = inspect.getsourcelines(job)
    here = source[line - first]
    indent = here[: len(here) - len(here.lstrip())]
    source.insert(line - first, f"{indent}call_the_roll({seconds})\n")
    space = vars(sys.modules[job.__module__]) | {"call_the_roll": lesson.call_the_roll}
    exec(compile("\n" * (first - 1) + "".join(source), inspect.getfile(job), "exec"), space)
    return space[job.__name__]


# --- Read what the tools say ---


class Finding(NamedTuple):
    """What a tool says, in which words and when, and whom it names, with which line of theirs."""

    words: str
    seconds: float | None = None
    ranks: tuple = ()
    line: int | None = None


def read_timeout(run, args):
    """An error names its rank if it is about itself, and not about waiting for another."""
    own = {}
    for rank, (seconds, code) in run.ends.items():
        if code and not WAITED.search(words := last_words(run.text(rank), code)):
            own[rank] = words, seconds
    if own:
        first = min(own)
        return Finding(*own[first], sorted(own), line_of_error(run.text(first)))
    late = f"{len(run.ends)} ranks ended with an error, and none of them is about itself"
    return Finding(late if run.ends else "not a word", run.last_end())


def last_words(text, code):
    """Return the line that says why a rank has ended."""
    if code < 0:
        thrown = re.search(r"what\(\): *(.*)", text)
        return f"{signal.Signals(-code).name} {thrown[1] if thrown else ''}".strip()
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)", text, re.MULTILINE)
    return errors[-1] if errors else "timed out without a word"


def line_of_error(text):
    """Return the line of the job at which a traceback ends."""
    last = text.rpartition("Traceback (most recent call last)")[2]
    frames = re.findall(r'File "(.*)", line (\d+), in (?!noted)', last)
    lines = [int(line) for file, line in frames if not clinic.in_library(file)]
    return lines[-1] if lines else None


def read_stacks(run, args):
    """The stacks name who has not arrived, or stands at another line; who moves is at work."""
    seen = {rank: clinic.looks(run.text(rank, "stacks")) for rank in range(args.nproc)}
    places = {rank: own[-1] if own else None for rank, own in seen.items()}
    if not all(places.values()):  # it has ended before it was asked; others may have by now
        gone = [rank for rank in places if not places[rank]]
        return Finding(f"rank {gone[0]} is not there any more")
    seconds = max((run.folder / f"stacks_{rank}").stat().st_mtime for rank in seen) - run.begin
    named = not_arrived(places)
    if moving := who_moves(seen, places, named):
        return Finding(f"rank {moving[0]} is not there, but moves: slow, or in a circle", seconds)
    if not named:
        return Finding("no rank is the odd one", seconds)
    one, other = named[0], next(rank for rank in places if rank not in named)
    ends = {rank: (places[rank][0][-1:], places[rank][1]) for rank in (one, other)}
    words = ", and ".join(f"rank {rank} {clinic.stands(*end)}" for rank, end in ends.items())
    return Finding(words, seconds, named, line_in(places[one][0]))


def not_arrived(places):
    """Return the ranks of {rank: where(...)} that do not wait for all; if all do, the odd one."""
    away = [r for r, place in places.items() if not place or place[1] not in clinic.MEETINGS]
    return away if 0 < len(away) < len(places) else odd(places)


def odd(said):
    """Return the ranks that say something else than most do; [] if there is no majority."""
    counts = Counter(said.values()).most_common()
    if len(counts) < 2 or 2 * counts[0][1] <= len(said):
        return []
    most = counts[0][0]
    return [rank for rank in said if said[rank] != most]


def who_moves(seen, places, named):
    """Return who of these has not arrived, but was elsewhere in its last looks."""
    away = [rank for rank in named if places[rank][1] not in clinic.MEETINGS]
    return [rank for rank in away if len({way for way, _ in seen[rank][-3:]}) > 1]


def line_in(way):
    """Return the number of the last line of a way, or None."""
    return int(way[-1].rpartition(":")[2]) if way else None


def calls_in(dump):
    """Return {number: (way, operation, group, sizes)} of the calls in a recorder's bytes."""
    calls = {}
    for entry in pickle.loads(dump).get("entries", []):
        operation = entry["profiling_name"].partition(":")[2]
        sizes = f"{entry['input_sizes']} {entry['input_dtypes']}"
        way = clinic.way_of([(f["filename"], f["line"], f["name"]) for f in entry["frames"]])
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
    gone = [r for r, path in enumerate(paths) if not path.exists() or not path.stat().st_size]
    if gone:
        return Finding(f"rank {gone[0]} has left no calls")
    seconds = max(path.stat().st_mtime for path in paths) - run.begin
    named, here = parted({rank: calls_in(path.read_bytes()) for rank, path in enumerate(paths)})
    if not named:
        return Finding("no rank is the odd one", seconds)
    one, other = named[0], next(rank for rank in here if rank not in named)
    words = {rank: "nothing" for rank in here}
    for rank, call in here.items():
        if call:
            words[rank] = f"{call[1]} at {clinic.shown(call[0][-1:])} in group {call[2]}"
    told = f"rank {one} calls {words[one]}, and rank {other} {words[other]}"
    return Finding(told, seconds, named, here[one] and line_in(here[one][0]))


def read_analyzer(run, args):
    """PyTorch's own analyzer names culprits, and ranks that are missing."""
    paths = [run.folder / f"calls_{rank}" for rank in range(args.nproc)]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return Finding("no rank has left calls")
    begin, text = time.time(), analyze(paths, args.nproc)
    seconds = max(path.stat().st_mtime for path in paths) - run.begin + time.time() - begin
    named = set(re.findall(r"Culprit rank (\d+)", text))
    if missing := re.search(r"missing ranks: \{(.*)\}", text):  # in the first group that lacks any
        named |= set(missing[1].split(", "))
    words = re.findall("Culprit rank.*|missing ranks.*|^\\w+Error.*", text, re.MULTILINE)
    file = inspect.getsourcefile(job_of(run.name))
    line = re.search(rf"at {re.escape(file)}:(\d+)", text)
    told = "; ".join(words) or "it finds nothing"
    return Finding(told, seconds, sorted(map(int, named)), line and int(line[1]))


def analyze(paths, world_size):
    """Return what torch.distributed.flight_recorder says of the ranks' calls, in their order.

    gloo writes down its groups without their names, and the analyzer stops with a KeyError: we add
    the names first.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # it misses a package for tables
        from torch.distributed.flight_recorder.components import builder, config_manager, loader

    said, logger = io.StringIO(), logging.getLogger("Flight Recorder")
    flags = ["--allow-incomplete-ranks"] if len(paths) < world_size else []
    with patch.object(logger, "handlers", [logging.StreamHandler(said)]):
        try:
            details = {path.name: loader.read_dump("calls_", str(path)) for path in paths}
            for dump in details.values():
                groups = {tuple(entry["process_group"]) for entry in dump["entries"]}
                ranks = str(list(range(world_size)))
                dump["pg_config"] = {n: {"name": n, "desc": d, "ranks": ranks} for n, d in groups}
            arguments = config_manager.JobConfig().parse_args(flags)
            builder.build_db(details, arguments, str(dump["version"]))
        except (Exception, SystemExit) as error:
            said.write(f"{type(error).__name__}: {error}")
    return said.getvalue()


def read_words(run, args):
    """PyTorch's words name ranks: those in every pair that differs, or those that did not come.

    "Please check rank 0 logs" is said of rank 0 whoever did not come, so it names nobody.
    """
    said = "\n".join(run.text(rank) for rank in range(args.nproc))
    pairs = re.findall(r"Rank (\d+) is running collective.*but Rank (\d+) is", said)
    everywhere = set.intersection(*map(set, pairs)) if pairs else set()
    missing = ", ".join(re.findall(r"Ranks? ([\d, ]+) failed to pass", said))
    named = sorted(map(int, everywhere or set(re.findall(r"\d+", missing))))
    pattern = r"Detected mismatch.*|\[Rank 0\]: Rank.*|Rank \d+ successfully reached.*"
    words = re.findall(pattern, said)
    crashed = [code for _, code in run.ends.values() if code < 0]
    words += [f"killed by {signal.Signals(-code).name}" for code in crashed]
    line = line_of_error(run.text(named[0])) if everywhere else None
    return Finding((words or ["nothing of its own"])[0], run.last_end(), named, line)


READERS = (read_timeout, read_stacks, read_recorder, read_analyzer, read_words, read_words)
READERS = dict(zip(TOOLS, READERS, strict=True))


# --- Judge the tools ---


def look_at(names, tools, args):
    """Return {patient: {tool: Finding}}, and the patients whose ranks have all come to the end."""
    import torch._dynamo  # noqa: F401  optimizers and DDP want it: once here, and not in each rank

    warnings.filterwarnings("ignore", ".*use of fork")  # no thread of ours holds a lock
    kinds = dict.fromkeys(["plain", *(RUN_OF[tool] for tool in tools)])
    kinds.pop("roll_call", None)  # it needs to know the line before which to call the roll
    jobs = [(name, kind, job_of(name)) for name in names for kind in kinds]
    with a_folder() as folder:
        runs = treat(jobs, args, folder)
        if "roll_call" in tools:
            runs |= treat([called_in(runs[name, "plain"], args) for name in names], args, folder)
        found = {n: {t: READERS[t](runs[n, RUN_OF[t]], args) for t in tools} for n in names}
    ends = {name: runs[name, "plain"].ends.values() for name in names}
    return found, [name for name in names if [code for _, code in ends[name]] == [0] * args.nproc]


@contextlib.contextmanager
def a_folder():
    """Make a folder for the doctor; it goes in the end, also while a killed rank's loader writes.

    A process that reads rows notices a moment later that its rank is no more.
    """
    folder = tempfile.mkdtemp()
    try:
        yield Path(folder)
    finally:
        end = time.monotonic() + 10
        while os.path.exists(folder) and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.02)


def called_in(run, args):
    """Return (patient, kind of run, job): the roll is called before the line where most stand."""
    job = job_of(run.name)
    source, first = inspect.getsourcelines(job)
    places = [clinic.where(run.text(rank, "stacks")) for rank in range(args.nproc)]
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
    if len(finding.ranks) in (0, world_size):
        return "nothing"
    return "guilty" if guilty.issuperset(finding.ranks) else "victim"


def advice(findings):
    """Return (ranks, line, words). Who moves is at work; else ask the recorder, then the stacks.

    The recorder's line is that of the mistake, if it has one: a stack may show what came of it.
    """
    if (stacks := findings.get("stacks")) and "moves" in stacks.words:
        return (), None, stacks.words
    order = ("recorder", "stacks", "detail", "timeout")
    named = [findings[tool] for tool in order if tool in findings and findings[tool].ranks]
    if not named:
        return (), None, "no tool names anybody"
    errors_first = sorted(named, key=lambda found: found is findings.get("timeout"), reverse=True)
    lines = [f.line for f in [named[0], *errors_first] if f.line and f.ranks == named[0].ranks]
    return named[0].ranks, lines[0] if lines else None, named[0].words


def wrong_in(name, row, advised, right):
    """Return what is wrong with the tools, and their advice, about a patient: sentences."""
    expected = dict(zip(TOOLS, EXPECTED.get(name, "nothing " * len(TOOLS)).split(), strict=True))
    wrong = [
        f"{name}: {tool} says {cell['verdict']}, and not {expected[tool]} as measured"
        for tool, cell in row.items()
        if cell["verdict"] != expected[tool]
    ]
    if advised not in (None, right):
        wrong.append(f"{name}: the advice is {advised} as ranks and line, and not {right}")
    return wrong


def row_of(name, row, advised, args):
    """Return lines: what each tool says about a patient, and the advice."""
    lines = [f"{name} on {args.nproc} ranks, which wait {args.limit} s for each other: who is it?"]
    for tool, cell in row.items():
        when = "never" if cell["seconds"] is None else f"{cell['seconds']:.1f} s"
        lines.append(f"    {tool:11} {cell['verdict']:9} {when:7} {cell['words'][:100]}")
    if advised:
        ranks, line, words = advised
        who = f"rank {', '.join(map(str, ranks))}, line {line}" if ranks else "nobody"
        lines.append(f"    advice: {who}: {words[:100]}")
        lines += [f"    truth: {PATIENTS[name].why}"] if name in PATIENTS else []
    return lines


def claim_of(matrix, world_size):
    """Return the claim that holds: which tools name the guilty rank, and which of them the line."""
    parts = []
    for name, row in matrix.items():
        guilty, line = truth(name, world_size)
        tools = [tool for tool, cell in row.items() if cell["verdict"] == "guilty"]
        exact = [tool for tool in tools if row[tool]["line"] == line]
        who = f"rank {', '.join(map(str, sorted(guilty)))}" if guilty else "nobody guilty"
        by = f"named by {', '.join(tools)}" if tools else f"not named by {', '.join(row)}"
        parts.append(f"{name}: {who}, {by}")
        parts[-1] += f"; line {line} by {', '.join(exact)}" if exact else ""
    return "; ".join(parts)
