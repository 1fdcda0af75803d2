"""Lesson 05: who may speak, and which number is true?

Every rank runs the whole script: each prints, logs, warns, draws a progress bar, writes
event files for TensorBoard, and reports the loss of its own rows. Here rank 0 speaks alone,
and its number is true: an all-reduce of 24 bytes in each step gives the loss of all rows.
Both kinds of --output first run into a buffer: their lines are counted. Then you see one.

Run it: bash scripts/lesson_05.sh --nproc 2 [--output all|rank0] [--log-dir FOLDER]

Output to expect on a CPU:

    step 1: loss 12.5
    ...
    step 10, loss by rank: 0.087 0.14; sum 0.227, mean 0.114
    lines by rank: {'all': [14, 14], 'rank0': [13, 0]}; event files: {'all': 2, 'rank0': 1}
    PASS rank 0 alone speaks, and logs the loss of all rows (off by ...)
"""

import argparse
import builtins
import contextlib
import importlib.util
import io
import json
import logging
import os
import signal
import sys
import tempfile
import textwrap
import threading
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm


class Arguments(argparse.ArgumentParser):
    """The flags of all lessons. A bad value: one line on stderr, from rank 0, and exit code 2."""

    def __init__(self, text, **defaults):
        super().__init__(description=text, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, value in {**defaults, "seed": 0}.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
        self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        limits = {"nproc": (1, 64), "seed": (0, 2**32 - 1)}
        for name in ("nproc", "steps", "batch_size", "seed"):
            low, high = limits.get(name, (1, 10**6))
            if not low <= getattr(args, name, low) <= high:
                self.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" * (os.environ.get("RANK", "0") == "0"))

    def exit(self, status=0, message=""):
        if len(message) > 300:  # it repeats a long value
            message = f"{message[:200]} ... {message[-50:]}"
        super().exit(status, message)


def setup(backend=None, store=None):
    """Join the process group; return (rank, world_size, device) (claims A10, A12, B3, E12).

    The launcher's variables say who we are; without them we are a world of one, no address needed.
    nccl where each rank of this machine has its own GPU, else gloo. A group joined before is kept.
    """
    import torch.distributed.nn  # DDP would do it later, and then no gloo thread could ever end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            rank, world_size, store = 0, 1, dist.HashStore()
        backend = backend or ("nccl" if enough_gpus and dist.is_nccl_available() else "gloo")
        place = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    if dist.get_backend() != "nccl":
        return dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


# --- New in this lesson ---


@contextlib.contextmanager
def one_voice(rank, speakers=(0,), prefix=False):
    """Inside, only the ranks in `speakers` print, warn and log; all may log errors (claim C6).

    Yields `say`, a print for a rank that must speak; it puts the rank before each line. With
    `prefix`, print does so too. At the end all is put back, also after an exception.
    A print into a file of yours is left alone, and a log file gets what its rank may log.
    What C++ code writes is not stopped, nor what Python code writes to sys.stdout itself.
    """
    real_print, root = builtins.print, logging.getLogger()
    before = root.handlers, root.level, root.manager.disable
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    log_files = [one for one in root.handlers if getattr(one, "stream", None) not in screens]

    def say(*values, file=None, mark=f"[rank {rank}] ", **options):
        stream, text = file or sys.stdout, io.StringIO()
        real_print(*values, file=text, **options)
        # torchrun starts Python with -u: print would write the values and the newline one by one.
        # This is one write. In a pipe, up to PIPE_BUF bytes (Linux: 4096), nobody gets into it.
        with tqdm.external_write_mode(file=stream):  # takes our own bar away, and draws it again
            stream.flush()
            erase = "\r\033[K" * stream.isatty()  # another rank's bar may stand in this line
            stream.write(erase + textwrap.indent(text.getvalue(), mark, bool))
            stream.flush()

    def print_on_screen(*values, file=None, **options):
        if file not in (None, sys.stdout, sys.stderr):
            real_print(*values, file=file, **options)
        elif rank in speakers:
            say(*values, file=file, mark=f"[rank {rank}] " * prefix, **options)

    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: say(record.levelname, handler.format(record), file=sys.stderr)
    with warnings.catch_warnings():  # at its end, showwarning is put back
        try:
            warnings.showwarning = lambda *w: root.warning(warnings.formatwarning(*w[:4]).rstrip())
            builtins.print, root.handlers = print_on_screen, [*log_files, handler]
            if before[:2] == ([], logging.WARNING):  # as Python begins: nobody has configured it
                root.setLevel(logging.INFO)
            logging.disable(before[2] if rank in speakers else max(before[2], logging.WARNING))
            yield say
        finally:
            builtins.print, root.handlers = real_print, before[0]
            root.setLevel(before[1])
            logging.disable(before[2])


def masters(rank, local_rank, num_gpus=8):
    """Return whether a process is (global master, local master, the article's master) (C7)."""
    return rank == 0, local_rank == 0, rank % num_gpus == 0


def reduce_loss(loss, row_count):
    """Return (sum, mean of means, mean): the loss over all ranks in three ways (claims C4, C8).

    `loss`: the mean over this rank's `row_count` > 0 rows, a float64 tensor of shape (). Each rank
    gives three numbers, 24 bytes, and waits for all others. The article logs the sum. The mean of
    means, which `op=dist.ReduceOp.AVG` gives without our division, is right if the ranks have
    equally many rows; the mean, weighted by rows, always is.
    On a GPU `.tolist()` makes the host wait until the GPU has finished that work. Where time
    counts, don't do it at each step: add up on the GPU, and read every 50 steps, for example.
    """
    numbers = torch.stack([loss, loss * row_count, torch.full_like(loss, row_count)])
    dist.all_reduce(numbers)
    total, weighted, rows = numbers.tolist()
    return total, total / dist.get_world_size(), weighted / rows


def read_events(folder):
    """Return (number of event files in `folder`, the losses as TensorBoard reads them) (C5)."""
    sys.modules.setdefault("tensorboard.compat.notf", sys)  # see train
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()  # 0: keep all values
    return len(os.listdir(folder)), [event.value for event in events.Scalars("loss")]


def train(rank, world_size, device, output, folder, steps=10, batch_size=30, seed=0):
    """Train, report as `output` says; return (own, *reduce_loss(), that of all rows) by step."""
    rows = torch.randn(100, 5, generator=torch.Generator().manual_seed(seed)).double().to(device)
    targets = rows.sum(1, keepdim=True) + 3  # what the model has to learn
    model = nn.Linear(5, 1, dtype=torch.float64, device=device)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    everyone, mean_loss, losses = output == "all", nn.functional.mse_loss, []
    writer = contextlib.nullcontext()
    if everyone or rank == 0:
        # TensorBoard imports TensorFlow if it finds it: seconds, many lines. This says: don't.
        sys.modules.setdefault("tensorboard.compat.notf", sys)
        from torch.utils.tensorboard import SummaryWriter  # slow: only ranks that write import it

        writer = SummaryWriter(folder)
    with writer, contextlib.nullcontext() if everyone else one_voice(rank):
        # disable=None: a bar on a terminal only. range has a length, so the bar has a total.
        for step in tqdm(range(1, steps + 1), disable=False if everyone else rank != 0 or None):
            numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(rows)
            mine = numbers[rank::world_size]  # 30 rows for 4 ranks: 8, 8, 7, 7
            loss = mean_loss(replica(rows[mine]), targets[mine])
            reduced = reduce_loss(loss.detach(), len(mine))
            truth = mean_loss(model(rows[numbers]), targets[numbers])
            losses.append((loss.item(), *reduced, truth.item()))
            optimizer.zero_grad()  # below: DDP averages over ranks; the weight makes it over rows
            (loss * len(mine) * world_size / batch_size).backward()
            optimizer.step()
            shown = loss.item() if everyone else reduced[-1]
            print(f"step {step}: loss {shown:.3g}")
            if everyone or rank == 0:
                writer.add_scalar("loss", shown, step)
        logging.getLogger("train").warning("%d steps are few", steps)
        warnings.warn("the learning rate was never tuned", stacklevel=1)
    return losses


@contextlib.contextmanager
def one_line_if_the_disk_is_full(rank):
    """Inside, an OSError ends this rank with one line and exit code 1."""
    shown = threading.excepthook  # by TensorBoard's thread, whose error is raised here as well
    threading.excepthook = lambda raised: None if raised.exc_type is OSError else shown(raised)
    try:
        yield
    except OSError as error:
        sys.exit(f"rank {rank}: can't write event files: {error}")
    finally:
        threading.excepthook = shown


def remove_when_ended(folder):
    """On SIGTERM remove `folder`, a TemporaryDirectory, and end with exit code 143.

    The usual handler, `sys.exit`, raises an exception wherever the rank is just then. Inside
    TensorBoard's queue.put() it loses a wake-up of the thread that writes events, and closing the
    writer waits for this thread, up to its `flush_secs`: 120 seconds (in 3 of 120 trials).
    """

    def handle(number, frame):
        folder.cleanup()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, handle)


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    parser = Arguments(__doc__, steps=10, batch_size=30)
    parser.add_argument("--output", choices=["all", "rank0"], default="rank0", help="who speaks")
    parser.add_argument("--log-dir", help="a folder; event files go into a new folder in it")
    args = parser.parse_args(argv)
    if args.batch_size < int(os.environ.get("WORLD_SIZE", 1)):
        parser.error("argument --batch-size: must be at least the number of ranks")
    if args.log_dir is not None and not os.access(os.path.join(args.log_dir, ""), os.W_OK):
        parser.error("argument --log-dir: must be a folder in which we may write")
    if importlib.util.find_spec("tensorboard") is None:  # train imports it, when the ranks run
        parser.error("needs tensorboard: pip install tensorboard")
    return args


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    args = parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux: if the launcher is killed, its ranks end too
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    (rank, world_size, device), flags = setup(), (args.steps, args.batch_size, args.seed)
    backend, everyone, lines, files = dist.get_backend(), [None] * world_size, {}, {}
    scratch_folder = contextlib.nullcontext()
    if rank == 0:
        scratch_folder = tempfile.TemporaryDirectory()
        remove_when_ended(scratch_folder)
    with one_line_if_the_disk_is_full(rank), scratch_folder as scratch:
        places = [scratch, rank or tempfile.mkdtemp(prefix="run_", dir=args.log_dir or scratch)]
        dist.broadcast_object_list(places)  # all ranks write where rank 0 says
        for mode in ("all", "rank0"):
            folder, text = f"{places[0]}/{mode}", io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                train(rank, world_size, device, mode, folder, *flags)
            dist.all_gather_object(everyone, text.getvalue().count("\n"))  # all have finished
            lines[mode] = everyone[:]
            files[mode], values = read_events(folder) if rank == 0 else (0, [])
        losses = train(rank, world_size, device, args.output, places[1], *flags)  # for all to see
        dist.all_gather_object(everyone, losses)
    dist.destroy_process_group()
    if rank != 0:
        return 0
    by_rank = [[step[0] for step in theirs] for theirs in everyone]
    _, sums, _, means, truth = map(list, zip(*losses, strict=True))
    gap = max(abs(mean - right) for mean, right in zip(means, truth, strict=True))
    alone = lines["rank0"][0] > 0 == sum(lines["rank0"][1:])
    written = files["rank0"] == 1 and values == torch.tensor(means).tolist()  # in float32
    learned = truth[-1] < truth[0] or args.steps < 10 or args.batch_size < 30  # else too short
    passed = gap < 1e-12 and alone and written and learned
    last = " ".join(f"{theirs[-1]:.3g}" for theirs in by_rank)
    print(f"step {args.steps}, loss by rank: {last}; sum {sums[-1]:.3g}, mean {means[-1]:.3g}")
    print(f"lines by rank: {lines}; event files: {files}")
    verdict = "PASS" if passed else "FAIL"
    print(f"{verdict} rank 0 alone speaks, and logs the loss of all rows (off by {gap:.2g})")
    if args.json:
        result = {"lesson": 5, "world_size": world_size, "backend": backend, "device": device.type}
        result |= {"passed": passed, "lines_per_rank": lines, "event_files": files}
        result |= {"loss_per_rank": by_rank, "loss_sum": sums, "loss_mean": means}
        print(json.dumps(result | {"loss_all_data": truth}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
