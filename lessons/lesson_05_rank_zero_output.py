"""Lesson 05: who may speak, and which number is true?

Every rank runs the whole script: each prints, logs, warns, draws a bar, writes event files for
TensorBoard, and knows only the loss of its own rows. Here rank 0 speaks alone, and says the loss
of all rows: 16 bytes from each rank. The launcher listens to all ranks; the last lines are its own.

Run it:    bash scripts/lesson_05.sh --nproc 2 [--output all|rank0] [--log-dir FOLDER]
Or alone:  torchrun --standalone --nproc-per-node=2 lessons/lesson_05_rank_zero_output.py

Output to expect on a CPU:

    ...
    step 10: loss 0.115
    step 10, loss by rank: 0.0752 0.157; sum 0.232, mean 0.115
    lines by rank: {'rank0': [1..., 0]}; event files: {'rank0': 1}
    PASS rank 0 alone speaks, and logs the loss of all rows (off by ...)
"""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
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


# --- The example ---

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


def make_rows(seed, device):
    """Return 100 rows, what to learn from them, and a layer that talks; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator).double().to(device)
    model = Library(5, 1, dtype=torch.float64, device=device)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    return rows, rows.sum(1, keepdim=True) + 3, model


def main(args):
    """Train on this rank."""
    rank, _, device = join_group()
    rows, targets, model = make_rows(args.seed, device)
    training = {"all": train_as_before, "rank0": train}[args.output]
    with tempfile.TemporaryDirectory() as folder:
        if args.log_dir:
            made = [tempfile.mkdtemp(prefix="run_", dir=args.log_dir) if rank == 0 else None]
            dist.broadcast_object_list(made)  # all ranks write where rank 0 says
            folder = made[0]
        training(model, rows, targets, args.steps, args.batch_size, folder)
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=10, help="%(default)s")
    size = {"type": int, "default": 31}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    speakers = {"choices": ("all", "rank0"), "default": "rank0"}
    parser.add_argument("--output", **speakers, help="who speaks: %(default)s")
    parser.add_argument("--log-dir", help="a folder; event files go into a new folder in it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
