"""Lesson 20: who gets which row, when ranks and workers multiply?

Two ranks with two workers each train each row of a stream four times, unless somebody deals. Here
batches are dealt: no number of workers changes a bit, and a pair of numbers is everybody's place.

Run it:    bash scripts/lesson_20.sh --nproc 2 [--workers 2]
Or alone:  torchrun --standalone --nproc-per-node=2 lessons/lesson_20_feed_ranks.py

Output to expect on a CPU:

    the stream, 2 ranks, 2 workers each: step 6, batch 2 of epoch 1; error on 37 texts: 0...
    ...
    PASS 2 ranks: each row once in an epoch; with 2, 1 or 0 workers, ... the same bits
"""

import argparse
import os
import random
import tempfile
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

# --- The technique ---


def stream(files, epoch, seed=0):
    """Yield the lines of all files in the order of this epoch, the same in each process."""
    chance = random.Random(f"{seed} {epoch}")
    for path in chance.sample(files, len(files)):  # the files in a new order
        lines = path.read_text().splitlines()
        chance.shuffle(lines)  # and the lines of each, which stay together
        yield from lines


class Dealt(IterableDataset):
    """Batches of a stream: a row goes to one rank, and there to one worker.

    `read(epoch)`: all rows, alike in each process. `make(rows, chance)`: a batch, by own chance.
    """

    def __init__(self, read, make, batch_size, rank, world_size, seed=0):
        self.read, self.make, self.seed = read, make, seed
        self.batch_size = max(1, batch_size // world_size) * world_size  # all ranks get as many
        self.rank, self.world_size = rank, world_size
        self.place = torch.zeros(2, dtype=torch.int64).share_memory_()  # workers that stay see it

    def start_at(self, epoch, first=0):
        """Let the next loop over the loader be of this epoch, without its `first` batches."""
        self.place.copy_(torch.tensor([epoch, first]))

    def __iter__(self):
        worker = get_worker_info()  # None where the rank itself reads
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, first = self.place.tolist()
        rows, number = iter(self.read(epoch)), 0
        while len(batch := list(islice(rows, self.batch_size))) == self.batch_size:
            if number >= first and (number - first) % workers == turn:  # the loader asks in turn
                own = random.Random(f"{self.seed} {epoch} {number} {self.rank}")
                yield self.make(batch[self.rank :: self.world_size], own)
            number += 1


class LikeLengths(Sampler):
    """Batches of row numbers for `batch_sampler`; in a step all ranks have rows of like length."""

    def __init__(self, lengths, batch_size, rank, world_size, seed=0):
        self.lengths, self.seed = torch.tensor(lengths), seed
        self.batch_size = max(1, batch_size // world_size) * world_size
        self.rank, self.world_size = rank, world_size
        self.epoch = self.first = 0  # workers need not see it: the rank asks for rows

    def start_at(self, epoch, first=0):
        self.epoch, self.first = epoch, first

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # the same on all ranks
        count = len(self.lengths) // self.batch_size
        rows = torch.randperm(len(self.lengths), generator=generator)[: count * self.batch_size]
        rows = rows[self.lengths[rows].argsort(stable=True)].view(count, self.batch_size)
        for batch in rows[torch.randperm(count, generator=generator)][self.first :]:
            yield batch[self.rank :: self.world_size].tolist()


def make_loader(workers, seed, **options):
    """Return a loader whose workers draw from this seed: give each rank another one."""
    own = torch.Generator().manual_seed(seed)  # else it draws from torch's, where dropout draws
    return DataLoader(generator=own, num_workers=workers, persistent_workers=workers > 0, **options)


def train(model, optimizer, loader, source, now, steps, device):
    """Train from where we are `now` to step `steps`; `source` is what the loader asks for rows."""
    while now["step"] < steps:
        source.start_at(now["epoch"], now["batch"])
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            now["step"] += 1
            now["batch"] += 1  # trained; the workers have read more
            if now["step"] == steps:
                return
        if now["batch"] == 0:
            raise ValueError(f"no batch in epoch {now['epoch']}: fewer rows than a batch has")
        now |= {"epoch": now["epoch"] + 1, "batch": 0}


@torch.no_grad()
def evaluate(model, rows, make, device):
    """Return the mean squared error of all rows, and their number; each is on one rank, once."""
    mine = range(dist.get_rank(), len(rows), dist.get_world_size())  # not as many on each rank
    found = torch.zeros(2, dtype=torch.float64, device=device)  # a sum, and a count
    for inputs, targets in DataLoader(rows, 8, sampler=mine, collate_fn=make):
        found[0] += (model(inputs.to(device)) - targets.to(device)).double().square().sum()
        found[1] += len(targets)
    dist.all_reduce(found)  # 16 bytes, also from a rank that has no row
    return (found[0] / found[1]).item(), int(found[1])


def resume(path, now, **parts):
    """Load the parts from the file of rank 0; return where it was saved, or `now` without one."""
    there = dist.get_rank() == 0 and Path(path).exists()
    saved = [torch.load(path, map_location="cpu", weights_only=True) if there else None]
    dist.broadcast_object_list(saved)  # the other ranks need no file
    if saved[0] is None:
        return now
    if saved[0]["now"]["batch_size"] != now["batch_size"]:
        raise ValueError(f"{path} counts batches of {saved[0]['now']['batch_size']} rows")
    for name, part in parts.items():
        part.load_state_dict(saved[0][name])
    return saved[0]["now"]


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


def make_lines(count, seed):
    """Return so many lines, "0.52 abcah": a number that is to be learnt, and 1 to 20 letters."""
    chance = random.Random(seed)
    texts = [chance.choices("abcdefgh", k=chance.randint(1, 20)) for _ in range(count)]
    means = [sum(map(ord, text)) / len(text) - 100 + chance.gauss(0, 0.01) for text in texts]
    return [f"{mean} {''.join(text)}\n" for mean, text in zip(means, texts, strict=True)]


def make_batch(lines, chance=random, left_out=0.1):
    """Return letters as numbers from 1 on, 0 is padding, and targets; some letters are left out."""
    targets, texts = zip(*(line.split() for line in lines), strict=True)
    kept = [[ord(c) - 96 for c in text if chance.random() >= left_out] for text in texts]
    letters = pad_sequence([torch.tensor(one or [1]) for one in kept], batch_first=True)
    return letters, torch.tensor([[float(target)] for target in targets])


def make_source(args, files, rank, world_size):
    """Return what knows who gets which row, and a loader's options."""
    how = args.batch_size, rank, world_size, args.seed
    if not args.by_length:
        source = Dealt(partial(stream, files, seed=args.seed), make_batch, *how)
        return source, {"dataset": source, "batch_size": None}
    lines = [line for path in files for line in path.read_text().splitlines()]
    source = LikeLengths([len(line.split()[1]) for line in lines], *how)
    return source, {"dataset": lines, "batch_sampler": source, "collate_fn": make_batch}


def train_on(args, files, rank, world_size, device):
    """Train from the beginning or a checkpoint on; return the model, and how far it came."""
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=0, mode="mean"), nn.Linear(4, 1))
    replica = nn.parallel.DistributedDataParallel(model.to(device))
    replica(torch.ones(1, 1, dtype=int, device=device)).backward()  # DDP sorts its bucket now
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    source, options = make_source(args, files, rank, world_size)
    now = {"step": 0, "epoch": 0, "batch": 0, "batch_size": source.batch_size}
    if args.checkpoint:
        now = resume(args.checkpoint, now, model=model, optimizer=optimizer)
    own = now["step"] * world_size + rank  # a seed for each rank, and another after each stop
    random.seed(own)  # by length and without a worker, the rank draws itself
    loader = make_loader(args.workers, own, **options)
    train(replica, optimizer, loader, source, now, args.steps, device)
    if args.checkpoint and rank == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "now": now}
        torch.save(parts, args.checkpoint)
    return model, now


def main(args):
    """Train on this rank, and evaluate; rank 0 says what came of it."""
    rank, world_size, device = join_group()
    lines = make_lines(args.rows, args.seed)
    with tempfile.TemporaryDirectory() as folder:  # each rank writes all files for itself
        for n in range(0, len(lines), 16):
            Path(folder, f"{n:05}.txt").write_text("".join(lines[n : n + 16]))
        files = sorted(Path(args.data or folder).glob("*.txt"))
        model, now = train_on(args, files, rank, world_size, device)
    make = partial(make_batch, left_out=0)
    error, count = evaluate(model, make_lines(37, args.seed + 1), make, device)
    if rank == 0:
        way = "by length" if args.by_length else "the stream"
        at = "step {step}, batch {batch} of epoch {epoch}".format(**now)
        who = f"{world_size} ranks, {args.workers} workers each"
        print(f"{way}, {who}: {at}; error on {count} texts: {error:.6f}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--workers", type=int, default=2, help="of each rank, %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=24, help="of all ranks, %(default)s")
    parser.add_argument("--rows", type=int, default=96, help="%(default)s")
    parser.add_argument("--by-length", action="store_true", help="rows of like length meet")
    parser.add_argument("--data", metavar="FOLDER", help="of *.txt; else some are made")
    parser.add_argument("--checkpoint", metavar="FILE", help="go on from it, and save in the end")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
