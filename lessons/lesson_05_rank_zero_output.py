"""Lesson 05: who may speak, and which number is true?

Every rank runs the whole script: each prints, logs, warns, draws a bar, writes event files for
TensorBoard, and knows only the loss of its own rows. Here rank 0 speaks alone, and says the loss
of all rows: 16 bytes from each rank. Both kinds of --output first run where nobody sees them.

Run it: bash scripts/lesson_05.sh --nproc 2 [--output all|rank0] [--log-dir FOLDER]

Output to expect on a CPU:

    ...
    step 10, loss by rank: 0.0752 0.157; sum 0.232, mean 0.115
    lines by rank: {'all': [14, 14], 'rank0': [14, 0]}; event files: {'all': 2, 'rank0': 1}
    PASS rank 0 alone speaks, and logs the loss of all rows (off by ...)
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from itertools import chain
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

# --- The technique ---


@contextlib.contextmanager
def one_voice(rank):
    """Within `with one_voice(rank):` rank 0 prints, logs and warns; the others only log errors.

    Handlers of the root logger whose stream is sys.stdout or sys.stderr are replaced; others stay,
    and get what they would get without it, and warnings. A file into which you print gets its
    lines. At the end, also after an error, print and handlers are put back, and warnings are no
    longer captured.
    """
    root = logging.getLogger()
    before = root.handlers
    screen = logging.StreamHandler()  # stderr
    screen.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(message)s"))
    screen.addFilter(lambda record: rank == 0 or record.levelno >= logging.ERROR)
    old_screens = sys.stdout, sys.stderr
    files = [h for h in before if getattr(h, "stream", None) not in old_screens]
    try:
        root.handlers = [screen, *files]
        logging.captureWarnings(True)  # warnings.warn(...) goes to the handlers as well
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere),
        ):
            yield
    finally:
        logging.captureWarnings(False)
        root.handlers = before


def open_writer(rank, folder):
    """Return a context with TensorBoard's writer on rank 0, and with None on the other ranks."""
    if rank != 0:
        return contextlib.nullcontext()
    from torch.utils.tensorboard import SummaryWriter  # slow: only who writes imports it

    return SummaryWriter(folder)


def mean_over_rows(total, count):
    """Return the mean over the rows of all ranks; every rank must call this, and waits in it.

    `total`, a tensor, is the sum over this rank's `count` rows. Each rank hands in 16 bytes.
    """
    total = total.detach().double()  # float32 counts only up to 16,777,216 exactly
    numbers = torch.stack((total, torch.full_like(total, count)))
    dist.all_reduce(numbers)  # adds up
    total, count = numbers.tolist()  # on a GPU this waits until the sum is there
    return total / count


def train(model, rows, targets, steps, batch_size, folder, every=1):
    """Train on all ranks; rank 0 shows and writes the loss of all rows since it last did."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, count = 0.0, 0
    with one_voice(rank), open_writer(rank, folder) as writer:
        for step in tqdm(range(1, steps + 1), disable=rank != 0 or None):  # None: on a terminal
            numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(rows)
            mine = numbers[rank::world_size]  # 31 rows on 2 ranks: 16 and 15
            loss = mse_loss(replica(rows[mine]), targets[mine])
            optimizer.zero_grad()  # below: DDP takes the mean over ranks; this makes it over rows
            (loss * world_size * len(mine) / batch_size).backward()
            optimizer.step()
            total, count = total + loss.detach() * len(mine), count + len(mine)
            if step % every == 0 or step == steps:
                mean = mean_over_rows(total, count)  # not under `if rank == 0`: all meet here
                total, count = 0.0, 0
                tqdm.write(f"step {step}: loss {mean:.3g}")  # a print that spares the bar
                if rank == 0:
                    writer.add_scalar("loss", mean, step)


# --- The proof ---

# TensorBoard imports TensorFlow if it finds it: seconds, and many lines. This says: don't.
sys.modules.setdefault("tensorboard.compat.notf", sys)


def train_as_before(model, rows, targets, steps, batch_size, folder):
    """Train on all ranks, each of which speaks as if it were alone."""
    from torch.utils.tensorboard import SummaryWriter

    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter(folder) as writer:
        for step in tqdm(range(1, steps + 1)):
            numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(rows)
            mine = numbers[rank::world_size]
            loss = mse_loss(replica(rows[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss:.3g}")
            writer.add_scalar("loss", loss, step)


class Library(nn.Linear):
    """A layer that logs and warns when it is called for the first time, as libraries do."""

    spoken = False

    def forward(self, rows):
        if not self.spoken:
            logging.getLogger("library").warning("this layer is slow on rows of %d", rows.shape[1])
            warnings.warn("its learning rate was never tuned", stacklevel=1)
        self.spoken = True
        return super().forward(rows)


class Stream(io.StringIO):
    """A stream that keeps what is written, and says whether it goes to a terminal."""

    def __init__(self, is_terminal, together):
        super().__init__()
        self.is_terminal, self.together = is_terminal, together

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.together.append(text)  # in the order in which all streams of the screen get it
        return super().write(text)


class EagerBar(tqdm):
    """A bar that is drawn in each step, and not only after a tenth of a second."""

    def __init__(self, *args, **options):
        super().__init__(*args, mininterval=0, **options)


class Witness:
    """Sees from outside, on this rank, each forward, each update, and each mean that is logged."""

    def __init__(self, model, rows, targets):
        self.rows, self.targets = rows, targets
        self.numbers = {row.numpy().tobytes(): number for number, row in enumerate(rows.cpu())}
        self.steps = []  # (row numbers, loss, parameters before, gradient, parameters after)
        self.means, self.technique, self.graphs = [], mean_over_rows, False
        self.model, self.now = model, None
        model.register_forward_hook(self.after_forward)

    def after_forward(self, model, inputs, answers):
        mine = [self.numbers[row.numpy().tobytes()] for row in inputs[0].detach().cpu()]
        loss = mse_loss(answers.detach(), self.targets[mine]).item()
        self.now = mine, loss, self.vector(model.parameters())

    def after_update(self, *_):
        gradients = [p.grad for p in self.model.parameters()]
        self.steps.append((*self.now, self.vector(gradients), self.vector(self.model.parameters())))

    def mean_over_rows(self, total, count):
        self.graphs = self.graphs or total.requires_grad
        self.means.append(self.technique(total, count))
        return self.means[-1]

    def vector(self, tensors):
        return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def make_rows(seed, device):
    """Return 100 rows, what to learn from them, and a layer that talks; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator).double().to(device)
    model = Library(5, 1, dtype=torch.float64, device=device)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    return rows, rows.sum(1, keepdim=True) + 3, model


@contextlib.contextmanager
def on_a_screen(is_terminal=True):
    """Keep what goes to stdout and stderr, as on a screen of this rank's own machine; yield both.

    Every warning is shown, and each bar in each step.
    """
    together = []
    out, err = Stream(is_terminal, together), Stream(is_terminal, together)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.dict(os.environ, LOCAL_RANK="0"),
        patch.dict(globals(), tqdm=EagerBar),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        yield out, err


@contextlib.contextmanager
def level(number):
    """Let the root logger log what has this level or a higher one; put its own level back."""
    before = logging.root.level
    logging.root.setLevel(number)
    yield
    logging.root.setLevel(before)


def state():
    """Return what a training may not leave changed: where prints, logs and warnings go."""
    return [print, sys.stdout, sys.stderr, list(logging.root.handlers), warnings.showwarning]


def hear(rank):
    """Speak in all ways inside one_voice(rank), then fail; return what is heard where.

    It sends nothing, so a rank can try what it would hear as another one, also as rank 8. There are
    handlers for the screen, and one for a file, before one_voice comes.
    """
    said, told, noted, logged, warned, failed = VOICES
    own, file, root = io.StringIO(), io.StringIO(), logging.root
    with on_a_screen() as (out, err), level(logging.INFO), patch.object(root, "handlers", []):
        root.handlers += [logging.StreamHandler(stream) for stream in (out, err, file)]
        before = state()
        with contextlib.suppress(ValueError), one_voice(rank):
            print(said)
            print(said, file=own)
            print(told, file=sys.stderr)
            logging.info(noted)
            logging.warning(logged)
            warnings.warn(warned, stacklevel=1)
            logging.error(failed)
            raise ValueError("training failed")
        same = state() == before
    texts = [stream.getvalue() for stream in (out, err, file, own)]
    heard = [[word for word in VOICES for _ in range(text.count(word))] for text in texts]
    return *heard, same, f"[rank {rank}] ERROR FAILED" in texts[1]


VOICES = ["SAID", "TOLD", "NOTED", "LOGGED", "WARNED", "FAILED"]


def wrong_in_voices():
    """Return what is wrong with one_voice, tried for ranks 0, 1 and 8: a list of sentences."""
    wrong = []
    for rank in (0, 1, 8):
        out, err, file, own, same, numbered = hear(rank)
        wanted = VOICES if rank == 0 else ["TOLD", "FAILED"]
        if out + err != wanted or out != wanted[: rank == 0]:
            wrong.append(f"as rank {rank} one hears {out} and {err}, not {wanted}")
        if file != VOICES[2:] or own != VOICES[:1]:
            wrong.append(f"as rank {rank} a file does not get what is its own")
        if not numbered:
            wrong.append(f"a line of rank {rank} has not its number")
        if not same:
            wrong.append("print, logging or warnings are not put back")
    with tempfile.TemporaryDirectory() as folder, open_writer(8, folder):
        if os.listdir(folder):
            wrong.append("rank 8 writes event files")
    return wrong


def wrong_in_mean(device):
    """Return what is wrong with mean_over_rows, if rank r has 2r + 1 rows, each with loss r."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [2 * number + 1 for number in range(world_size)]
    total = torch.tensor(rank * rows[rank], dtype=torch.float64, device=device)
    mean = mean_over_rows(total, rows[rank])
    right = sum(number * count for number, count in enumerate(rows)) / sum(rows)
    half = torch.ones((), dtype=torch.bfloat16, device=device)
    close = abs(mean - right) < 1e-12
    if mean_over_rows(half, 1001) != 1 / 1001:  # bfloat16 knows 1000 and 1004
        return ["in bfloat16 the rows are not counted exactly"]
    if where_sums_travel("meta") != ["meta"]:
        return ["the sums leave their device, and nccl sends only from there"]
    return [] if close else [f"of {rows} rows the mean is {mean:.4g}, and not {right:.4g}"]


def where_sums_travel(device):
    """Return the devices of what mean_over_rows hands to all_reduce, if `total` is on `device`.

    Nothing is sent. A tensor on the device "meta" has no numbers, so what asks for them fails.
    """
    devices, total = [], torch.zeros((), device=device)
    with (
        patch.object(dist, "all_reduce", lambda numbers, **_: devices.append(numbers.device.type)),
        contextlib.suppress(RuntimeError),
    ):
        mean_over_rows(total, 1)
    return devices


def wrong_in_seldom(args, device, folder):
    """Return what is wrong if the loss is logged in each second of five steps, on no terminal."""
    args = argparse.Namespace(**vars(args) | {"steps": 5})
    training = functools.partial(train, every=2)
    everyone = observe(training, args, device, folder, is_terminal=False)
    losses, _ = compare(everyone, *make_rows(args.seed, device))
    right = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, *losses[4:]]
    pairs = [zip(theirs["means"], right, strict=False) for theirs in everyone]
    off = [abs(mean - loss) for mean, loss in chain(*pairs)]
    fine = len(off) == 3 * len(everyone) and max(off) < 1e-12
    wrong = [] if fine else ["with every=2, a mean is not that of two steps, or of the last one"]
    bars = "".join(theirs["err"] for theirs in everyone).count("%|")
    return [*wrong, "a bar is drawn where there is no terminal"] if bars else wrong


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def observe(training, args, device, folder, shown=False, is_terminal=True):
    """Train on this rank under observation; return what all ranks have seen, by rank."""
    rows, targets, model = make_rows(args.seed, device)
    witness, before = Witness(model, rows, targets), state()
    handle = register_optimizer_step_post_hook(witness.after_update)
    nothing_kept = contextlib.nullcontext([Stream(is_terminal, [])] * 2)
    screens = nothing_kept if shown else on_a_screen(is_terminal)
    with screens as (out, err), patch.dict(globals(), mean_over_rows=witness.mean_over_rows):
        training(model, rows, targets, args.steps, args.batch_size, folder)
    handle.remove()
    same = state() == before
    seen = {"steps": witness.steps, "means": witness.means, "same": same}
    seen |= {"graphs": witness.graphs, "together": "".join(out.together)}
    return from_all_ranks(seen | {"out": out.getvalue(), "err": err.getvalue()})


def compare(everyone, rows, targets, model):
    """Compare the ranks with one process on all their rows; return its losses, and what differs."""
    losses, off, model.spoken = [], [0.0], True
    for seen in zip(*(theirs["steps"] for theirs in everyone), strict=False):
        numbers = list(chain(*(step[0] for step in seen)))
        nn.utils.vector_to_parameters(seen[0][2].to(rows.device), model.parameters())
        model.zero_grad()
        loss = mse_loss(model(rows[numbers]), targets[numbers])
        loss.backward()
        right = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        off += [(step[3] - right).abs().max().item() for step in seen]
        off += [(step[part] - seen[0][part]).abs().max().item() for step in seen for part in (2, 4)]
        losses.append(loss.item())
    return losses, max(off) if all(map(math.isfinite, off)) else math.nan


def wrong_in_training(everyone, args, losses, off):
    """Return what is wrong with the rows, the gradients and the means: a list of sentences."""
    batches = zip(*([step[0] for step in theirs["steps"]] for theirs in everyone), strict=False)
    batches = [list(chain(*parts)) for parts in batches]
    often = [max(Counter(batch).values()) for batch in batches]
    once = {len(batch) for batch in batches} == {args.batch_size}
    once = once and max(often) == math.ceil(args.batch_size / 100)
    all_rows = len(set(chain(*batches))) == min(args.steps * args.batch_size, 100)
    pairs = [pair for theirs in everyone for pair in zip(theirs["means"], losses, strict=False)]
    gap = max((abs(mean - right) for mean, right in pairs), default=math.nan)
    made = {len(theirs[kind]) for theirs in everyone for kind in ("steps", "means")}
    short = args.steps < 10 or args.batch_size < 30  # too short to learn
    rules = {
        f"steps and means, rank by rank: {sorted(made)}, not {args.steps}": made == {args.steps},
        "the rows of a batch do not come once each": once and all_rows,
        f"a gradient or a replica is off by {off:.2g}": off < 1e-12,
        f"a mean is off by {gap:.2g}": gap < 1e-12,
        "the sum to be logged keeps its steps' graphs": not any(t["graphs"] for t in everyone),
        "the model has not learned": short or losses[-1:] < losses[:1],
    }
    return gap, [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_output(everyone, steps, written):
    """Return what is wrong with what was said and written while rank 0 spoke: a list.

    The means are examined elsewhere: here, what is said must be they.
    """
    means = everyone[0]["means"]
    wanted = [f"step {step}: loss {right:.3g}" for step, right in enumerate(means, 1)]
    files, events = written
    close = events == [*enumerate(torch.tensor(means).tolist(), 1)]  # as float32
    others = "".join(theirs["out"] + theirs["err"] for theirs in everyone[1:])
    library = all(word in everyone[0]["err"] for word in ("slow on rows", "never tuned"))
    rules = {
        "rank 0 does not say each mean": everyone[0]["out"].splitlines() == wanted,
        "a warning of rank 0 is not heard": library,
        "a bar is torn": not re.search(r"[^\r\n]step \d+: ", everyone[0]["together"]),
        "rank 0 has no bar on a terminal": f"{steps}/{steps}" in everyone[0]["err"],
        f"another rank says {others[:40]!r}": not others,
        f"there are {files} event files": files == 1,
        "the event file has not each mean": close,
        "print, logging or warnings are not put back": all(theirs["same"] for theirs in everyone),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def read_events(folder):
    """Return (number of event files in `folder`, [(step, loss)] as TensorBoard reads them)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = os.listdir(folder) if os.path.isdir(folder) else []
    if not files:
        return 0, []
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()  # 0: keep all values
    losses = events.Scalars("loss") if "loss" in events.Tags()["scalars"] else []
    return len(files), [(event.step, event.value) for event in losses]


def lines_of(seen):
    """Return how many lines a rank has put on its screens; what a bar redraws is one line."""
    return sum(bool(line.strip()) for line in (seen["out"] + seen["err"]).split("\n"))


@contextlib.contextmanager
def folders(rank, log_dir):
    """Yield a folder that goes at the end, and the one for the training that you see.

    Rank 0 makes them and tells the others. The second goes as well, unless it is in `log_dir`.
    """
    with contextlib.ExitStack() as stack:
        places = [None, None]
        if rank == 0:
            places[0] = stack.enter_context(tempfile.TemporaryDirectory())
            places[1] = tempfile.mkdtemp(prefix="run_", dir=log_dir or places[0])
        dist.broadcast_object_list(places)  # all ranks write where rank 0 says
        yield places


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    ways = {"all": train_as_before, "rank0": train}
    numbers = {"lesson": 5, "world_size": world_size, "backend": dist.get_backend()}
    numbers |= {"device": device.type, "lines_per_rank": {}, "event_files": {}}
    with folders(rank, args.log_dir) as (scratch, shown):
        for mode, training in ways.items():
            everyone = observe(training, args, device, f"{scratch}/{mode}")
            numbers["lines_per_rank"][mode] = [lines_of(seen) for seen in everyone]
            written = read_events(f"{scratch}/{mode}")
            numbers["event_files"][mode] = written[0]
        seldom = wrong_in_seldom(args, device, f"{scratch}/seldom")
        observe(ways[args.output], args, device, shown, shown=True)  # for all to see
        dist.barrier()  # before the folder goes
    losses, off = compare(everyone, *make_rows(args.seed, device))
    gap, wrong = wrong_in_training(everyone, args, losses, off)
    wrong += seldom + wrong_in_output(everyone, args.steps, written)
    wrong += chain(*from_all_ranks(wrong_in_voices() + wrong_in_mean(device)))
    dist.destroy_process_group()
    numbers |= losses_of(everyone, losses)
    if rank == 0:
        report(numbers)
    claim = f"rank 0 alone speaks, and logs the loss of all rows (off by {gap:.2g})"
    return not wrong, "; ".join([claim, *dict.fromkeys(wrong)]), numbers


def losses_of(everyone, losses):
    """Return the losses by step: of each rank's rows, their sum, what is logged, of all rows."""
    by_rank = [[step[1] for step in seen["steps"]] for seen in everyone]
    facts = {
        "loss_per_rank": by_rank,
        "loss_sum": [sum(step) for step in zip(*by_rank, strict=False)],
    }
    return facts | {"loss_mean": everyone[0]["means"], "loss_all_data": losses}


def report(numbers):
    """Print what a reader wants to know."""
    last = " ".join(f"{losses[-1]:.3g}" for losses in numbers["loss_per_rank"] if losses)
    total, mean = (numbers[name][-1:] for name in ("loss_sum", "loss_mean"))
    told = f"sum {total[0]:.3g}, mean {mean[0]:.3g}" if total and mean else "no mean was logged"
    print(f"step {len(numbers['loss_all_data'])}, loss by rank: {last}; {told}")
    print(f"lines by rank: {numbers['lines_per_rank']}; event files: {numbers['event_files']}")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=10, help="%(default)s")
    size = {"type": whole(1, 10**6), "default": 31}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    speakers = {"choices": ("all", "rank0"), "default": "rank0"}
    parser.add_argument("--output", **speakers, help="who speaks in the training that you see")
    parser.add_argument("--log-dir", help="a folder; event files go into a new folder in it")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size < world_size:
        parser.error(f"argument --batch-size: must be at least the number of ranks, {world_size}")
    if args.log_dir is not None and not os.access(os.path.join(args.log_dir, ""), os.W_OK):
        parser.error("argument --log-dir: must be a folder in which we may write")
    if importlib.util.find_spec("tensorboard") is None:  # open_writer imports it, later
        parser.error("needs tensorboard: pip install tensorboard")
    return args


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU. If only
    some machines have GPUs, pass `backend`. If a rank may keep the others waiting for more than
    two minutes, raise `timeout`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    enough_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here
    backend = backend or ("nccl" if enough_gpus else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()  # alone, nobody has to be found
    place = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    return rank, world_size, device


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
