"""Lesson 03: how does one script start its own ranks, and train on real data?

In lesson 02 a launcher started the ranks. Now the script does, with mp.spawn: that suits
one machine, a notebook's helper, a test. (torchrun also knows several machines, and can
restart a job.) The ranks meet in a file that only this job knows, so two jobs never take
each other's port. The data are handwritten digits; every test image is counted once.

Run it:     bash scripts/lesson_03.sh --nproc 2     (watched; the last two lines say what was seen)
Or alone:   python lessons/lesson_03_spawn_ddp.py --nproc 2

Output to expect on a CPU:

    digits, 2 ranks over gloo on cpu
    mean loss 2.3... at first, 0... in step 300; by rank 0..., 0...
    accuracy 0.9..., macro F1 0.9..., from the same counts of 297 images
    a parameter differs between ranks by 0.0 at most
    PASS accuracy 0.9... on 297 images, asked for: 0.95
"""

import argparse
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

# --- The technique ---


def launch_job(func, nproc, *arguments):
    """Call func(rank, world_size, device, *arguments) on each rank; return what rank 0 returned.

    The return value travels as JSON, which makes lists of tuples and strings of a dict's keys.
    With one rank no process is started.
    """
    with tempfile.TemporaryDirectory() as folder:
        if nproc > 1:
            mp.spawn(be_rank, (func, nproc, arguments, folder), nprocs=nproc)  # raises if one fails
        else:
            with patch.dict(os.environ):  # be_rank writes there, and the caller goes on
                try:
                    be_rank(0, func, nproc, arguments, folder)
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
        return json.loads(Path(folder, "result.json").read_text())


def be_rank(rank, func, nproc, arguments, folder):
    """Be one rank: meet the others in a file in `folder`, then call func."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))  # the ranks share the cores
    store = dist.FileStore(str(Path(folder, "meeting_place")), nproc)
    rank, world_size, device = join_group(store=store)
    result = func(rank, world_size, device, *arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()  # not in a `finally`: another rank's error might come first


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


def train(model, data, steps, batch_size, device, seed=0, workers=0):
    """Train `model` on this rank's share of `data`; return this rank's loss in every step.

    `workers` processes load the data of each rank. In a spawned rank they are spawned as well, so
    each of them takes the time of another `import torch` to start.
    """
    sampler = DistributedSampler(data, seed=seed)  # which rank, of how many: it asks the group
    share = batch_size // dist.get_world_size()
    loader = DataLoader(data, share, sampler=sampler, num_workers=workers)
    replica = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, steps)
    epoch, losses = 0, []
    while len(losses) < steps:
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())  # of this rank's images: lesson 05 is about that
            if len(losses) == steps:
                break
        epoch += 1
    return losses


@torch.no_grad()
def evaluate(model, data, device, classes=10):
    """Return counts[label, answer] over all ranks: every image once, whatever their number."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    was_training = model.training
    model.eval()
    mine = Subset(data, range(rank, len(data), world_size))  # a DistributedSampler would repeat
    for images, labels in DataLoader(mine, 100):
        answers = model(images.to(device)).argmax(1)
        pairs = labels.to(device) * classes + answers
        counts += torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    model.train(was_training)
    dist.all_reduce(counts)  # 800 bytes from each rank: add counts, never scores
    return counts


def accuracy(counts):
    """Return the share of right answers of counts[label, answer]."""
    return (counts.trace() / counts.sum()).item()


def macro_f1(counts):
    """Return the mean over the classes of 2 * right / (images of the class + answers with it).

    nan, if a class has neither images nor answers.
    """
    scores = 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))
    return scores.mean().item()


# --- The example ---


def load_data():
    """Return (training set, test set): lists of (image (1, 8, 8), label), 1,500 and 297 long.

    scikit-learn brings the digits; nothing is downloaded. All ranks get the same order.
    """
    from sklearn.datasets import load_digits  # only here: each rank's start would take longer

    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pairs = list(zip(images[order], torch.tensor(digits.target)[order], strict=True))
    return pairs[:1500], pairs[1500:]


class Residual(nn.Sequential):
    """Layers, and a shortcut around them."""

    def forward(self, x):
        return torch.relu(x + super().forward(x))


def make_model(seed=0):
    """Return a small residual network that maps images (n, 1, 8, 8) to scores (n, 10)."""
    torch.manual_seed(seed)
    layers, channels = [], 1
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.ReLU()]
        first, last = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        layers += [Residual(first, nn.GroupNorm(4, width), nn.ReLU(), last)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def measure(rank, world_size, device, steps, batch_size, seed=0, workers=0):
    """Train and evaluate on this rank; return what rank 0 will tell, as a dict."""
    train_set, test_set = load_data()
    model = make_model(seed).to(device)
    losses = train(model, train_set, steps, batch_size, device, seed, workers)
    counts = evaluate(model, test_set, device)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, losses)
    where = f"{world_size} ranks over {dist.get_backend()} on {device.type}"
    return {"where": where, "losses": everyone, "counts": counts.tolist()}


def main(args):
    """Train on the ranks, and print what rank 0 tells."""
    flags = args.steps, args.batch_size, args.seed, args.workers
    result = launch_job(measure, args.nproc, *flags)
    losses, counts = torch.tensor(result["losses"]), torch.tensor(result["counts"])
    print(f"digits, {result['where']}")
    first, last = losses.mean(0)[[0, -1]]
    by_rank = ", ".join(f"{loss:.3f}" for loss in losses[:, -1])
    print(f"mean loss {first:.3f} at first, {last:.3f} in step {args.steps}; by rank {by_rank}")
    scores = f"accuracy {accuracy(counts):.3f}, macro F1 {macro_f1(counts):.3f}"
    print(f"{scores}, from the same counts of {counts.sum()} images")


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=60, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--workers", type=int, default=0, help="of each rank: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
