"""Lesson 03: how does one script start its own ranks, and train on real data?

In lesson 02 a launcher started the ranks. Now the script does, with mp.spawn: that suits
one machine, a notebook's helper, a test. (torchrun also knows several machines, and can
restart a job.) The ranks meet in a file that only this job knows, so two jobs never take
each other's port. The data are handwritten digits; every test image is counted once.

Run it:     bash scripts/lesson_03.sh --nproc 2
Or alone:   python lessons/lesson_03_spawn_ddp.py --nproc 2

Output to expect on a CPU:

    digits, 2 ranks over gloo on cpu
    mean loss 2.3... at first, 0... in step 300; by rank 0..., 0...
    a parameter differs between ranks by 0.0 at most
    macro F1 0.9..., from the same counts as the accuracy
    PASS accuracy 0.9... on 297 images, asked for: 0.95
"""

import argparse
import importlib.util
import inspect
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

# --- The technique ---


def launch_job(func, nproc, *args):
    """Call func(rank, world_size, device, *args) on `nproc` ranks; return what rank 0 returned.

    The return value travels as JSON. With one rank no process is started (claims B4, C2).
    """
    with tempfile.TemporaryDirectory() as folder:
        others = mp.active_children()
        try:
            if nproc == 1:
                be_rank(0, func, nproc, args, folder)
            else:
                # Raises the error of the first rank that fails.
                mp.spawn(be_rank, (func, nproc, args, folder), nprocs=nproc)
        finally:
            for process in set(mp.active_children()) - set(others):
                process.kill()  # nobody stays behind, also after an interrupt
        return json.loads(Path(folder, "result.json").read_text())


def be_rank(rank, func, nproc, args, folder):
    """Be one rank: meet the others in a file in `folder`, then call func (not port 9999, C9)."""
    if nproc > 1:  # we are a process of our own
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_RANK=str(rank))
        torch.set_num_threads(max(1, torch.get_num_threads() // nproc))  # the ranks share the cores
        end_with_parent()
    store = dist.FileStore(str(Path(folder, "rendezvous")), nproc)
    rank, world_size, device = join_group(store=store)
    try:
        result = func(rank, world_size, device, *args)
    except Exception:
        if nproc > 1:
            time.sleep(1)  # mp.spawn names who leaves first: who lost us leaves a second later
        else:
            dist.destroy_process_group()  # the caller goes on
        raise
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()  # not in a `finally`: the others would fail before us


def end_with_parent(*_):
    """Make this process end when the process that started it ends or is killed (Linux)."""
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != mp.parent_process().pid:
        sys.exit(1)  # it has ended already, while we were importing


def train(rank, world_size, device, data, model, steps, batch_size, seed=0, workers=0):
    """Train `model` on this rank's share of `data`; yield this rank's loss after every update.

    `workers` processes load the data of each rank. In a spawned rank they are spawned as well, so
    each of them takes the time of another `import torch` to start.
    """
    sampler = DistributedSampler(data, world_size, rank, seed=seed)
    share = batch_size // world_size
    loader = DataLoader(
        data, share, sampler=sampler, num_workers=workers, worker_init_fn=end_with_parent
    )
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, steps)
    for epoch in range(steps):  # more than enough: an epoch has at least one step
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()  # of this rank's images: lesson 05 is about that


@torch.no_grad()
def evaluate(rank, world_size, device, model, test_set):
    """Return counts[label, answer] over all ranks: every image once, whatever their number (C3).

    test_set is a list of (image, label). (For other data sets: Subset(data, range(rank, ...)).)
    """
    counts = torch.zeros(10, 10, dtype=torch.int64, device=device)
    was_training = model.training
    model.eval()
    mine = test_set[rank::world_size]  # not a DistributedSampler: it would repeat some images
    for images, labels in DataLoader(mine, 100):
        answers = model(images.to(device)).argmax(1)
        pairs = labels.to(device) * 10 + answers
        counts += torch.bincount(pairs, minlength=100).reshape(10, 10)
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


# --- The proof ---


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
    """Train and evaluate on this rank; return what all ranks measured together, as a dict."""
    train_set, test_set = load_data()
    model = make_model(seed).to(device)
    before = parameters_to_vector(model.parameters()).detach().cpu()
    start = time.perf_counter()
    training = train(rank, world_size, device, train_set, model, steps, batch_size, seed, workers)
    progress = tqdm(range(steps), desc="rank 0", disable=rank != 0)
    losses = [next(training) for _ in progress]
    seconds = time.perf_counter() - start
    counts = evaluate(rank, world_size, device, model, test_set)
    after = parameters_to_vector(model.parameters()).detach().cpu()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (losses, after))
    return {
        "backend": dist.get_backend(),
        "device": device.type,
        "counts": counts.tolist(),
        "seconds_training": seconds,
        "images_per_second": steps * (batch_size // world_size) * world_size / seconds,
        "loss_per_rank": [losses for losses, _ in everyone],
        "param_change": (after - before).abs().max().item(),
        "param_spread": max((theirs - after).abs().max().item() for _, theirs in everyone),
    }


def report(result, counts, steps):
    """Print what a reader wants to know."""
    where = f"over {result['backend']} on {result['device']}"
    print(f"digits, {result['world_size']} ranks {where}")
    by_rank = ", ".join(f"{losses[-1]:.3f}" for losses in result["loss_per_rank"])
    means = f"{result['loss_first']:.3f} at first, {result['loss_last']:.3f} in step {steps}"
    print(f"mean loss {means}; by rank {by_rank}")
    print(f"a parameter differs between ranks by {result['param_spread']} at most")
    print(f"macro F1 {macro_f1(counts):.3f}, from the same counts as the accuracy")


def reason(error):
    """Return the line that says what went wrong in a rank, from the error that mp.spawn raised."""
    lines = str(error).strip().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[places[-1] + 1 :] if places else lines
    return next(line for line in after if not line.startswith(" "))


def refuse(nproc, batch_size, **others):
    """Return what is wrong with the flags, or None."""
    if batch_size < nproc:
        return f"--batch-size: must be at least --nproc, {nproc}"
    return None


def main(
    nproc: range(1, 65) = 2,
    steps: range(1, 10**6) = 300,
    batch_size: range(1, 10**6) = 60,
    seed: range(2**32) = 0,
    workers: range(17) = 0,
):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up, as after Ctrl-C
    try:
        result = launch_job(measure, nproc, steps, batch_size, seed, workers)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nrank {error.error_index} failed: {reason(error)}")
    counts = torch.tensor(result.pop("counts"))
    means = torch.tensor(result["loss_per_rank"]).mean(0).tolist()
    result |= {"lesson": 3, "world_size": nproc, "loss_first": means[0], "loss_last": means[-1]}
    result |= {"accuracy": accuracy(counts), "images_evaluated": counts.sum().item()}
    report(result, counts, steps)
    wanted = 0.95 if steps >= 300 and batch_size >= 60 else 0.0  # a short run can't learn as much
    trained = result["param_spread"] == 0.0 < result["param_change"] < float("inf")
    counted = result["images_evaluated"] == 297
    passed = trained and counted and result["accuracy"] >= wanted
    claim = f"accuracy {result['accuracy']:.3f} on {result['images_evaluated']} images"
    return passed, f"{claim}, asked for: {wanted}", result


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU.
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


def start(main, refuse=lambda **flags: None):
    """Run main with flags made from its arguments; return 0 (PASS) or 1 (FAIL), or exit with 2."""
    rank_0 = os.environ.get("RANK", "0") == "0"  # it speaks for all
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text[:300]}\n" * rank_0)
    arguments = inspect.signature(main).parameters
    for name, argument in arguments.items():
        options = {"type": type(argument.default), "default": argument.default, "metavar": "X"}
        parser.add_argument("--" + name.replace("_", "-"), **options, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    values = vars(parser.parse_args())
    flags = {name: values[name] for name in arguments}
    for name, value in flags.items():
        allowed = get_args(arguments[name].annotation) or arguments[name].annotation
        if value not in allowed:
            parser.error(f"argument --{name.replace('_', '-')}: must be in {allowed}, not {value}")
    if problem := refuse(**flags):
        parser.error(f"argument {problem}")
    if values["check"]:
        return 0
    passed, claim, result = main(**flags)
    if rank_0:
        print("PASS" if passed else "FAIL", claim)
        print(json.dumps(result | {"passed": passed}) + "\n" if values["json"] else "", end="")
    return 0 if passed else 1


if __name__ == "__main__":
    if importlib.util.find_spec("sklearn") is None:  # load_data imports it, when the ranks run
        print("error: needs scikit-learn: pip install scikit-learn", file=sys.stderr)
        sys.exit(2)
    sys.exit(start(main, refuse))
