"""What lesson 05 claims: rank 0 alone speaks, and what it says is the loss of all rows.

The script knows nothing of this file; see lesson_02.py. All that its ranks say is heard. What can't
be heard of them is tried here, in one process that plays one rank of nine and sends nothing: a
terminal, and none; rank 8, which is a second machine's first; an error in the middle.
"""

import contextlib
import importlib.util
import io
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from itertools import chain
from unittest.mock import patch

import lesson_05_rank_zero_output as lesson
import torch
from lockstep.watch import claims, facts

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (1, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    if args.log_dir is not None and not os.access(os.path.join(args.log_dir, ""), os.W_OK):
        return "argument --log-dir: must be a folder in which we may write"
    if importlib.util.find_spec("tensorboard") is None:  # open_writer imports it, later
        return "needs tensorboard: pip install tensorboard"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    rows, targets, model = lesson.make_rows(args.seed, torch.device("cpu"))
    shares = rows_of_each_step(job, rows)
    if wrong := claims.wrong_in_optimizer(job, model) or wrong_in_rows(shares, args):
        return claims.Verdict("the ranks train one model", [wrong], {}, [])
    by_rank, of_all, off = in_one_process(job, shares, rows, targets, model)
    pairs = chain(*(zip(values_of(rank), of_all, strict=False) for rank in job.values()))
    gap = claims.worst([abs(logged - loss) for logged, loss in pairs])
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong += [claims.wrong_in_replicas(job)]
    if args.output == "all":
        claim = f"{started} ranks speak, and each logs the loss of its own rows"
        wrong += wrong_in_output(job, by_rank)
    else:
        claim = "rank 0 alone speaks, and logs the loss of all rows"
        wrong += wrong_in_output(job, [of_all] + [[]] * (len(job) - 1))
        wrong += [wrong_in_training(args, of_all, off), wrong_in_sent(job)]
    wrong = list(filter(None, wrong))
    if args.output == "rank0" and not wrong:
        wrong = wrong_in_mean() + wrong_in_voices() + wrong_in_loop()
    numbers = numbers_of(job, args, started) | {"loss_per_rank": by_rank, "loss_all_data": of_all}
    numbers["loss_sum"] = [sum(step) for step in zip(*by_rank, strict=True)]
    return claims.Verdict(f"{claim} (off by {gap:.2g})", wrong, numbers, lines_to_tell(numbers))


# --- The losses ---


def rows_of_each_step(job, rows):
    """Return the numbers of the rows that each rank's model was given: [[of rank 0, ...], ...].

    A row that is none of them has the number None.
    """
    known = {mark: number for number, mark in enumerate(facts.row_checksums(rows))}
    steps = claims.steps(job)
    return [[[known.get(mark) for mark in update["given"]] for update in step] for step in steps]


def in_one_process(job, shares, rows, targets, model):
    """Make each step again; return its losses, of each rank's rows and of all, and what is off.

    The last is how far each rank's gradient is from that of all rows.
    """
    model.spoken = True
    by_step, of_all, off = [], [], []
    for step, parts in zip(claims.steps(job), shares, strict=True):
        values = [rank.values(update) for rank, update in zip(job.values(), step, strict=True)]
        claims.fill(model, values[0]["before"])
        model.zero_grad()
        batch = [*chain(*parts)]
        errors = (model(rows[batch]) - targets[batch]) ** 2
        errors.mean().backward()
        of_all.append(errors.mean().item())
        by_step.append([part.mean().item() for part in errors.split([*map(len, parts)])])
        gradient = claims.numbers_of(model, lambda parameter: parameter.grad)
        off += [claims.off(claims.as_vector(theirs["gradients"]), gradient) for theirs in values]
    return [list(losses) for losses in zip(*by_step, strict=True)], of_all, off


def values_of(rank):
    """Return what a rank has written for TensorBoard."""
    return [scalar["value"] for scalar in rank.of("scalar")]


def numbers_of(job, args, started):
    """Return the numbers for --json that need no second look."""
    lines = [lines_of(rank.heard("stdout") + rank.heard("stderr")) for rank in job.values()]
    files = sum(len(rank.of("board")) for rank in job.values())
    return {
        "world_size": started,
        "backend": job[0].group["backend"],
        "device": job[0].optimizers[0]["device"],
        "lines_per_rank": {args.output: lines},
        "event_files": {args.output: files},
        "loss_mean": values_of(job[0]),
    }


def lines_of(text):
    """Return how many lines a screen shows; what a bar redraws is one line."""
    return sum(bool(line.strip()) for line in text.split("\n"))


def lines_to_tell(numbers):
    """Return what a reader wants to know beside the script's own words."""
    last = " ".join(f"{losses[-1]:.3g}" for losses in numbers["loss_per_rank"])
    told = f"sum {numbers['loss_sum'][-1]:.3g}, mean {numbers['loss_all_data'][-1]:.3g}"
    heard = f"lines by rank: {numbers['lines_per_rank']}; event files: {numbers['event_files']}"
    return [f"step {len(numbers['loss_sum'])}, loss by rank: {last}; {told}", heard]


# --- What the ranks did ---


def wrong_in_rows(shares, args):
    """Each batch is full, and no row comes again before all have come."""
    come = Counter()
    for step, parts in enumerate(shares, 1):
        come.update(chain(*parts))
        count = step * args.batch_size
        if None in come or come.total() != count or max(come.values()) > math.ceil(count / 100):
            return f"step {step}: the ranks have other rows, or one comes again before all have"
    return None


def wrong_in_training(args, of_all, off):
    """Each gradient is that of all rows, and the model learns."""
    if not claims.worst(off) < 1e-12:
        return f"a gradient is off by {claims.worst(off):.2g}"
    long = args.steps >= 10 and args.batch_size >= 30
    return "the model has not learned" if long and of_all[-1] >= of_all[0] else None


def wrong_in_sent(job):
    """For each loss that is logged, each rank hands in 16 bytes, and gets the sum."""
    for number, rank in job.items():
        sums = [call["shape"] for call in rank.calls if call["name"] == "all_reduce"]
        if sums != [[[2], "float64"]] * len(rank.updates):
            return f"rank {number} does not add up two numbers of float64 for each loss"
    return None


def wrong_in_output(job, losses):
    """A rank with losses to tell says and writes each, and its library logs; others are silent."""
    wrong = []
    for (number, rank), wanted in zip(job.items(), losses, strict=True):
        out, err = rank.heard("stdout"), rank.heard("stderr")
        logs = "this layer is slow" in err if wanted else not err
        lines = [f"step {step}: loss {loss:.3g}" for step, loss in enumerate(wanted, 1)]
        steps = [scalar["step"] for scalar in rank.of("scalar")]
        rules = {
            f"says {out[:40]!r}": out.splitlines() == lines,
            f"logs {err[:40]!r}": logs,
            f"has {len(rank.of('board'))} event files": len(rank.of("board")) == bool(wanted),
            "does not write each loss": steps == [*range(1, len(wanted) + 1)]
            and all(abs(a - b) < 1e-12 for a, b in zip(values_of(rank), wanted, strict=True)),
        }
        wrong += [f"rank {number} {words}" for words in claims.broken(rules)]
    return wrong


# --- What one process plays ---


@contextlib.contextmanager
def on_a_screen(is_terminal=True):
    """Keep what goes to stdout and stderr, with every warning; yield the two streams.

    It is the screen of a machine on which this rank is the first.
    """
    out, err = io.StringIO(), io.StringIO()
    out.isatty = err.isatty = lambda: is_terminal
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.dict(os.environ, LOCAL_RANK="0"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        yield out, err
        logging.captureWarnings(False)  # if what was played has forgotten it


def state():
    """Return what a training may not leave changed: where prints, logs and warnings go."""
    return [print, sys.stdout, sys.stderr, list(logging.root.handlers), warnings.showwarning]


VOICES = ["SAID", "TOLD", "NOTED", "LOGGED", "WARNED", "FAILED"]
logger = logging.getLogger("a library of lesson 05")
logger.setLevel(logging.INFO)


def hear(rank):
    """Speak in all ways inside one_voice(rank), then fail; return what is heard where.

    There are handlers for the screen, and one for a file, before one_voice comes.
    """
    said, told, noted, logged, warned, failed = VOICES
    own, file, root = io.StringIO(), io.StringIO(), logging.root
    with on_a_screen() as (out, err), patch.object(root, "handlers", []):
        root.handlers += [logging.StreamHandler(stream) for stream in (out, err, file)]
        before = state()
        with contextlib.suppress(ValueError), lesson.one_voice(rank):
            print(said)
            print(said, file=own)
            print(told, file=sys.stderr)
            logger.info(noted)
            logger.warning(logged)
            warnings.warn(warned, stacklevel=1)
            logger.error(failed)
            raise ValueError("training failed")
        same = state() == before
    texts = [stream.getvalue() for stream in (out, err, file, own)]
    heard = [[word for word in VOICES for _ in range(text.count(word))] for text in texts]
    return *heard, same, f"[rank {rank}] ERROR FAILED" in texts[1]


def wrong_in_voices():
    """Rank 0 is heard in all ways, the others in an error; files get theirs; all is put back."""
    wrong = []
    for rank in (0, 1, 8):
        out, err, file, own, same, numbered = hear(rank)
        screen = (VOICES[:1], VOICES[1:]) if rank == 0 else ([], ["TOLD", "FAILED"])
        rules = {
            f"one hears {out} and {err}, not {screen}": (out, err) == screen,
            "a file does not get what is its own": (file, own) == (VOICES[2:], VOICES[:1]),
            "a line has not the rank's number": numbered,
            "print, logging or warnings are not put back": same,
        }
        wrong += [f"as rank {rank}: {words}" for words in claims.broken(rules)]
    return wrong


def wrong_in_mean():
    """The rows are counted exactly for any loss, and the sums stay on their device."""
    sent = []
    with patch.object(lesson.dist, "all_reduce", sent.append):
        half = lesson.mean_over_rows(torch.ones((), dtype=torch.bfloat16), 1001)
        with contextlib.suppress(RuntimeError):  # on this device a tensor has no numbers
            lesson.mean_over_rows(torch.zeros((), device="meta"), 1)
    devices = [numbers.device.type for numbers in sent]
    rules = {
        "in bfloat16 the rows are not counted exactly": half == 1 / 1001,  # it has 1000, and 1004
        "the sums leave their device, and nccl sends only from there": devices == ["cpu", "meta"],
    }
    return claims.broken(rules)


def play(rank, every=1, is_terminal=True):
    """Make five steps as one of nine ranks; return its screen, its files, and what it averages.

    Files are (their number, [(step, loss)]). A loss is that of its own rows: nothing is sent.
    """
    rows, targets, model = lesson.make_rows(0, torch.device("cpu"))
    model.spoken = True  # else its words would tear the bar
    alone = {"get_rank": lambda: rank, "get_world_size": lambda: 9, "all_reduce": lambda _: None}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(lesson.dist, **alone),
        patch.object(lesson, "DistributedDataParallel", lambda model: model),
        patch.object(lesson, "mean_over_rows", wraps=lesson.mean_over_rows) as mean,
        on_a_screen(is_terminal) as (_, screen),
        contextlib.redirect_stdout(screen),
    ):
        lesson.train(model, rows, targets, 5, 31, folder, every)
        sums = [call.args[0] for call in mean.call_args_list]
        return screen.getvalue(), read_events(folder), sums


def wrong_in_loop():
    """There is one bar, on a terminal; one writer; and with every=2 no step is lost."""
    shown, (_, events), sums = play(0)
    seldom, (_, means), _ = play(0, every=2, is_terminal=False)
    hidden, (files, _), _ = play(8)
    one, two, three, four, five = (loss for _, loss in events)
    wanted = [(2, (one + two) / 2), (4, (three + four) / 2), (5, five)]
    lost = len(means) != 3 or not torch.allclose(torch.tensor(means), torch.tensor(wanted))
    rules = {
        "rank 0 has no bar on a terminal": "5/5" in shown,
        "a bar is torn": not re.search(r"[^\r\n]step \d+: ", shown),
        "a bar is drawn where there is no terminal": "%|" not in seldom,
        f"rank 8 says {hidden[:40]!r}": not hidden,
        "rank 8 writes event files": files == 0,
        "the sum to be logged keeps its steps' graphs": not any(s.requires_grad for s in sums),
        "with every=2, a mean is not that of two steps, or of the last one": not lost,
    }
    return claims.broken(rules)


def read_events(folder):
    """Return (number of event files in `folder`, [(step, loss)] as TensorBoard reads them)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()  # 0: keep all values
    losses = events.Scalars("loss") if "loss" in events.Tags()["scalars"] else []
    return len(os.listdir(folder)), [(event.step, event.value) for event in losses]
