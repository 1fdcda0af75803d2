"""Lesson 03: how does one script start its own ranks, and train on real data?

In lesson 02 a launcher started the ranks. Now the script does: launch_job -> mp.spawn
-> run -> train. The ranks meet in a file of their own, so no job takes another's port.
The data are handwritten digits; every test image is counted exactly once.

Run it:     bash scripts/lesson_03.sh --nproc 2
Or alone:   python lessons/lesson_03_spawn_ddp.py --nproc 2

Output to expect on a CPU:

    digits, 2 ranks over gloo on cpu
    mean loss 2.3... at first, 0... in step 300; by rank 0..., 0...
    a parameter differs between ranks by 0.0 at most
    PASS accuracy 0.9... on 297 images, asked for: 0.95
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
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


def make_random_images(numbers):
    """Return the article's images (n, 3, 224, 224), made from their numbers, and labels (C10)."""
    seeds = [torch.Generator().manual_seed(number) for number in numbers]
    images = torch.stack([torch.rand(3, 224, 224, generator=seed) for seed in seeds])
    return images, (images.mean((1, 2, 3)) < 0.5).float()


def make_data(name):
    """Return (training set, test set, function that makes a batch or None for the usual one)."""
    if name == "random-images":
        return range(900), range(900, 1000), make_random_images
    digits = load_digits()  # 1,797 images, 8x8, values 0 to 16
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))  # same on all ranks
    pairs = list(zip(images[order], torch.tensor(digits.target)[order], strict=True))
    return pairs[:1500], pairs[1500:], None


class Residual(nn.Sequential):
    """Layers, and a shortcut around them."""

    def forward(self, x):
        return torch.relu(x + super().forward(x))


def make_model(name, channels, outputs):
    """Return a network that maps images (n, channels, height, width) to (n, outputs)."""
    if name == "resnet50":
        resnet = importlib.import_module("torchvision.models").resnet50(num_classes=outputs)
        return resnet if channels == 3 else nn.Sequential(nn.Conv2d(channels, 3, 1), resnet)
    layers = []
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.ReLU()]
        first, last = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        layers += [Residual(first, nn.GroupNorm(4, width), nn.ReLU(), last)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs))


# --- New in this lesson ---


def launch_job(cfg, func):
    """Call `func(cfg)` on `cfg.nproc` ranks; return what rank 0 returned (claims B4, C2)."""
    if cfg.nproc == 1:  # one device: no other process is needed
        result = func(cfg)
        dist.destroy_process_group()
        return result
    with tempfile.TemporaryDirectory() as cfg.folder:
        mp.spawn(run, args=(func, cfg), nprocs=cfg.nproc, join=True, daemon=True)
        return json.loads(Path(cfg.folder, "result.json").read_text())


def run(local_rank, func, cfg):
    """Be one rank: join the group in a file that only this job knows (not port 9999, C9)."""
    mp._prctl_pr_set_pdeathsig(9)  # Linux: SIGKILL for this rank if the launcher is killed
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(cfg.nproc))
    torch.set_num_threads(max(1, torch.get_num_threads() // cfg.nproc))  # share the cores
    setup(store=dist.FileStore(os.path.join(cfg.folder, "rendezvous"), cfg.nproc))
    try:
        result = func(cfg)
    except Exception:
        # mp.spawn names the rank that leaves first. The others lose this one, fail, and wait too.
        time.sleep(1)  # so the rank with the true cause leaves first
        raise
    if local_rank == 0:
        Path(cfg.folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()  # not in a `finally`: it would make the others fail first


def train(cfg):
    """Train and evaluate on this rank; return what all ranks measured together, as a dict."""
    rank, world_size, device = setup()
    torch.manual_seed(cfg.seed)
    train_set, test_set, collate = make_data(cfg.data)
    digits = cfg.data == "digits"
    model = make_model(cfg.model, *((1, 10) if digits else (3, 1))).to(device)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    replica = nn.parallel.DistributedDataParallel(model)
    compute_loss = nn.functional.cross_entropy if digits else nn.functional.mse_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003 if digits else 0.001)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, cfg.steps)
    sampler = DistributedSampler(train_set, world_size, rank, seed=cfg.seed)
    load = functools.partial(DataLoader, collate_fn=collate)
    loader = load(train_set, cfg.batch_size // world_size, sampler=sampler)
    losses, images_seen, start = [], 0, time.perf_counter()
    for step in tqdm(range(cfg.steps), desc="rank 0", disable=rank != 0):
        if step % len(loader) == 0:
            sampler.set_epoch(step // len(loader))  # a new order in each epoch
            batches = iter(loader)
        images, labels = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        loss = compute_loss(replica(images).squeeze(1), labels)
        loss.backward()  # gradients are averaged in here
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        images_seen += len(images) * world_size
    seconds = time.perf_counter() - start
    for buffer in model.buffers():  # resnet50's BatchNorm: DDP does not average its statistics
        dist.broadcast(buffer, 0)
    # Each rank takes every world_size-th test image: none twice, none left out, no padding.
    counts = evaluate(model, load(test_set[rank::world_size], 100), device)
    dist.all_reduce(counts)  # two integers from each rank, 16 bytes: the sums over all ranks
    after = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    facts = [None] * world_size
    dist.all_gather_object(facts, (losses, after))
    return {
        "backend": dist.get_backend(),
        "device": device.type,
        "accuracy": counts[0].item() / counts[1].item(),
        "images_evaluated": counts[1].item(),
        "seconds_training": seconds,
        "images_per_second": images_seen / seconds,
        "loss_per_rank": [losses for losses, _ in facts],
        "param_change": (after - before).abs().max().item(),
        "param_spread": max((theirs - after).abs().max().item() for _, theirs in facts),
    }


@torch.no_grad()
def evaluate(model, loader, device):
    """Return a tensor of two integers: images classified correctly, images seen."""
    counts = torch.zeros(2, dtype=torch.int64)
    for images, labels in loader:
        outputs = model.eval()(images.to(device)).cpu()
        answers = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0] > 0.5
        counts += torch.tensor([(answers == labels).sum(), len(labels)])
    return counts.to(device)


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=300, batch_size=60)
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
        sys.exit(f"{reason}\nrank {error.error_index} failed: {reason.splitlines()[-1]}")
    means = [sum(step) / args.nproc for step in zip(*result["loss_per_rank"], strict=True)]
    expected = 297 if args.data == "digits" else 100
    fully_trained = args.data == "digits" and args.steps >= 300 and args.batch_size >= 60
    wanted = 0.95 if fully_trained else 0.0  # a shorter run checks only the rest of the claim
    trained = result["param_spread"] == 0.0 < result["param_change"] < float("inf")
    passed = trained and result["images_evaluated"] == expected and result["accuracy"] >= wanted
    print(f"{args.data}, {args.nproc} ranks over {result['backend']} on {result['device']}")
    last = "by rank " + ", ".join(f"{losses[-1]:.3f}" for losses in result["loss_per_rank"])
    print(f"mean loss {means[0]:.3f} at first, {means[-1]:.3f} in step {args.steps}; {last}")
    print(f"a parameter differs between ranks by {result['param_spread']} at most")
    verdict = f"{'PASS' if passed else 'FAIL'} accuracy {result['accuracy']:.3f}"
    print(f"{verdict} on {result['images_evaluated']} images, asked for: {wanted}")
    if args.json:
        result |= {"loss_first": means[0], "loss_last": means[-1], "passed": passed}
        print(json.dumps({"lesson": 3, "world_size": args.nproc} | result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
