"""Lesson 03: how does one script start its own ranks, and train on real data?

In lesson 02 a launcher started the processes. Now the script does it, as detectron2
and SlowFast do: launch_job -> mp.spawn -> run -> train. The ranks meet in a file of
their own, so two jobs can't take each other's port. The data are handwritten digits,
and every test image is counted exactly once. A rank that dies ends the whole job.

Run it:     bash scripts/lesson_03.sh --nproc 2
Or alone:   python lessons/lesson_03_spawn_ddp.py --nproc 2
The set-up of the article, much slower (needs `pip install torchvision==0.28.0`):
            bash scripts/lesson_03.sh --data random-images --model resnet50 --batch-size 12

Output to expect on a CPU:

    digits: 1500 images to train on, 297 to test on; ranks: 2, over gloo on cpu
    step 1: loss 2.3... on rank 0, 2.3... on rank 1; mean 2.3...
    step 125: loss 0.0... on rank 0, 0.0... on rank 1; mean 0.0...
    trained on 7500 images in ... s: ... images per second
    test images evaluated: 297, correct: 2...
    PASS accuracy 0.9... with 2 ranks, whose parameters differ by 0.0
"""

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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
        limits = {"nproc": 64, "steps": 10**6, "batch_size": 10**6, "seed": 2**32 - 1}
        for name, high in limits.items():
            low = 0 if name == "seed" else 1
            if not low <= getattr(args, name, low) <= high:
                flag = "--" + name.replace("_", "-")
                self.error(f"argument {flag}: must be a whole number from {low} to {high}")
        return args

    def error(self, message):
        speaks = os.environ.get("RANK", "0") == "0"  # the other ranks have met the same error
        self.exit(2, f"{self.prog}: error: {message}\n" if speaks else None)


def setup(backend=None, store=None):
    """Join the process group; return (rank, world_size, device) (claims A10, A12, B3, E12).

    The launcher's environment variables say who we are; without them we are a world of one, which
    needs no port. nccl where each rank of this machine has its own GPU, else gloo on the CPU.
    A group that this process has joined already is kept.
    """
    import torch.distributed.nn  # DDP would do it later, and then no gloo thread could ever end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            rank, world_size, store = 0, 1, dist.HashStore()
        backend = backend or ("nccl" if enough_gpus and dist.is_nccl_available() else "gloo")
        limit = timedelta(minutes=2)  # a rank that never comes is an error, not a hang
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
    if dist.get_backend() != "nccl":
        return dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


def make_random_images(numbers):
    """Return a batch of the article's random images, and if each one's mean is below 0.5 (C10).

    Shapes (n, 3, 224, 224) and (n,). An image is made from its number: equal on all ranks.
    """
    seeds = [torch.Generator().manual_seed(number) for number in numbers]
    images = torch.stack([torch.rand(3, 224, 224, generator=seed) for seed in seeds])
    return images, (images.mean((1, 2, 3)) < 0.5).float()


def make_data(name):
    """Return (training set, test set, function that makes a batch or None for the usual one)."""
    if name == "random-images":
        return range(900), range(900, 1000), make_random_images
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # one split, on all ranks
    images = torch.tensor(digits.images[order, None] / 16, dtype=torch.float32)  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target[order])
    return (
        TensorDataset(images[:1500], labels[:1500]),
        TensorDataset(images[1500:], labels[1500:]),
        None,
    )


class Block(nn.Module):
    """A residual block. GroupNorm and not BatchNorm, because it looks at each image alone."""

    def __init__(self, inputs, outputs):
        super().__init__()
        body = [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.GroupNorm(4, outputs), nn.ReLU()]
        self.body = nn.Sequential(*body, nn.Conv2d(outputs, outputs, 3, 1, 1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x):
        return torch.relu(self.shortcut(x) + self.body(x))


def make_model(name, channels, outputs):
    """Return a network that maps images (n, channels, height, width) to (n, outputs)."""
    if name == "resnet50":
        model = __import__("torchvision").models.resnet50(num_classes=outputs)
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        return model
    body = [nn.Conv2d(channels, 16, 3, 1, 1), nn.ReLU(), Block(16, 32), Block(32, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs))


# --- New in this lesson ---


def launch_job(cfg, func):
    """Call `func(cfg)` on `cfg.nproc` ranks; return what rank 0 returned (claims B4, C2).

    Raises mp.ProcessRaisedException or mp.ProcessExitedException, which name the rank.
    """
    if cfg.nproc == 1:  # one device: no other process is needed
        result = func(cfg)
        dist.destroy_process_group()
        return result
    with tempfile.TemporaryDirectory() as folder:
        cfg = argparse.Namespace(**vars(cfg), folder=folder)
        mp.spawn(run, args=(func, cfg), nprocs=cfg.nproc, join=True, daemon=True)
        return json.loads(Path(folder, "result.json").read_text())


def run(local_rank, func, cfg):
    """Be one rank: join the group in a file that only this job knows (not port 9999, C9)."""
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(cfg.nproc))
    torch.set_num_threads(max(1, torch.get_num_threads() // cfg.nproc))  # share the cores
    setup(store=dist.FileStore(os.path.join(cfg.folder, "rendezvous"), cfg.nproc))
    result = func(cfg)
    if local_rank == 0:
        Path(cfg.folder, "result.json").write_text(json.dumps(result))
    # Not in a `finally`: a rank that fails must go at once. If it left the group politely, the
    # others would see a closed connection, fail as well, and could hide the true error.
    dist.destroy_process_group()


def train(cfg):
    """Train and evaluate on this rank; return what all ranks measured, as a dict."""
    rank, world_size, device = setup()
    torch.manual_seed(cfg.seed)
    train_set, test_set, make_batch = make_data(cfg.data)
    digits = cfg.data == "digits"
    model = make_model(cfg.model, *((1, 10) if digits else (3, 1))).to(device)
    replica = DistributedDataParallel(model)
    compute_loss = nn.functional.cross_entropy if digits else nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if digits else 0.001, momentum=0.9)
    sampler = DistributedSampler(train_set, world_size, rank, seed=cfg.seed)
    part = cfg.batch_size // world_size
    loader = DataLoader(train_set, part, sampler=sampler, collate_fn=make_batch)
    losses, images_seen, start = [], 0, time.perf_counter()

    for step in tqdm(range(cfg.steps), desc="rank 0", disable=rank != 0):
        if step % len(loader) == 0:
            sampler.set_epoch(step // len(loader))  # a new order in each epoch
            batches = iter(loader)
        images, labels = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        loss = compute_loss(replica(images).squeeze(1), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        images_seen += len(images) * world_size

    seconds = time.perf_counter() - start
    for buffer in model.buffers():  # BatchNorm's statistics are not averaged by DDP: take rank 0's
        dist.broadcast(buffer, 0)
    # Each rank takes every world_size-th test image: none twice, none left out, no padding.
    mine = [test_set[index] for index in range(rank, len(test_set), world_size)]
    counts = evaluate(model, DataLoader(mine, 100, collate_fn=make_batch), device)
    dist.all_reduce(counts)  # 16 bytes from each rank: the sums of both counts
    (correct, evaluated), vector = (
        counts.tolist(),
        nn.utils.parameters_to_vector(model.parameters()),
    )
    facts = [None] * world_size
    dist.all_gather_object(facts, (torch.stack(losses).tolist(), vector.detach().cpu()))
    return {
        "accuracy": correct / evaluated,
        "images_evaluated": evaluated,
        "seconds_training": seconds,
        "images_per_second": images_seen / seconds,
        "images_seen": images_seen,
        "loss_per_rank": [loss for loss, _ in facts],
        "param_spread": max((vector - facts[0][1]).abs().max().item() for _, vector in facts),
        "backend": dist.get_backend(),
        "device": device.type,
    }


def evaluate(model, loader, device):
    """Return a tensor of two integers: images classified correctly, images seen."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images.to(device)).cpu()
            answers = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0] > 0.5
            counts += torch.tensor([(answers == labels).sum(), len(labels)]).to(device)
    return counts


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=125, batch_size=60)
    parser.add_argument("--data", choices=["digits", "random-images"], default="digits")
    parser.add_argument("--model", choices=["small", "resnet50"], default="small")
    args = parser.parse_args(argv)
    if args.batch_size < args.nproc:
        parser.error(f"argument --batch-size: must be at least --nproc, {args.nproc}")
    if args.model == "resnet50" and importlib.util.find_spec("torchvision") is None:
        parser.error("--model resnet50 needs torchvision: pip install torchvision==0.28.0")
    try:
        result = launch_job(args, train)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip()
        print(
            reason,
            f"rank {error.error_index} failed: {reason.splitlines()[-1]}",
            sep="\n",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130

    means = [sum(losses) / args.nproc for losses in zip(*result["loss_per_rank"], strict=True)]
    result |= {"loss_first": means[0], "loss_last": means[-1]}
    # 95 % is asked of at least the default amount of training on the digits.
    enough = args.data == "digits" and args.steps >= 125 and args.batch_size >= 60
    trained = args.steps == 1 or means[-1] != means[0]
