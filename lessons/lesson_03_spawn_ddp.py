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
import json
import os
import sys
import tempfile
import time
import zlib
from datetime import timedelta
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

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


class Witness:
    """Writes down, from outside, which images a model is shown, and where each update starts.

    It knows an image by its bytes: so it also sees what workers have loaded, in their processes.
    """

    def __init__(self, model, data, progress=None):
        self.model, self.progress = model, progress
        self.numbers = {image.numpy().tobytes(): n for n, (image, _) in enumerate(data)}
        self.shown, self.modes = [], set()  # since the last update
        self.updates = []  # before each: the images, a checksum of the parameters
        self.starts = {}  # before some: the parameters, their gradient
        self.rates = []

    def __enter__(self):
        self.hooks = [self.model.register_forward_pre_hook(self.before_forward)]
        self.hooks.append(register_optimizer_step_pre_hook(self.before_update))
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def before_forward(self, model, inputs):
        self.shown += [self.numbers.get(image.numpy().tobytes(), -1) for image in inputs[0].cpu()]
        self.modes.add((model.training, torch.is_grad_enabled()))

    def before_update(self, optimizer, *_):
        parameters = vector_of(self.model.parameters())
        step = len(self.updates)
        if step < 2 or zlib.crc32(b"%d" % step) % 10 == 0:  # without a period
            self.starts[step] = parameters, gradient_of(self.model)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.updates.append((self.shown, zlib.crc32(parameters.numpy())))
        self.shown = []
        self.progress.update()


def vector_of(tensors):
    """Return a copy of all numbers in these tensors, one after the other, on the CPU."""
    return parameters_to_vector(tensors).detach().cpu()


def gradient_of(model):
    """Return the gradient of all parameters as one vector; zeros where there is none."""
    everything = list(model.parameters())
    return vector_of(torch.zeros_like(p) if p.grad is None else p.grad for p in everything)


def joined(lists):
    """Return one list with all that is in these."""
    return list(chain.from_iterable(lists))


def from_all_ranks(value):
    """Return the values of all ranks, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(rank, world_size, device, steps, batch_size, seed=0, workers=0):
    """Train and evaluate on this rank; return what all ranks measured together, as a dict."""
    train_set, test_set = load_data()
    model = make_model(seed).to(device)
    before = vector_of(model.parameters())
    progress = tqdm(total=steps, desc="rank 0", disable=rank != 0)
    start = time.perf_counter()
    with progress, Witness(model, train_set, progress) as training:
        losses = train(model, train_set, steps, batch_size, device, seed, workers)
    seconds = time.perf_counter() - start
    with Witness(model, test_set) as testing:
        counts = evaluate(model, test_set, device)
    after = vector_of(model.parameters())
    everyone = from_all_ranks((training.updates, losses, testing.shown, after))
    updates, losses, tested, afters = zip(*everyone, strict=True)
    wrong = wrong_in_images(updates, steps, batch_size, len(train_set))
    wrong += wrong_in_updates(training.starts, updates, losses, train_set)
    wrong += wrong_in_scores(tested, counts, after, test_set)
    wrong += wrong_on_this_rank(training, testing, model, before, after)
    return {
        "backend": dist.get_backend(),
        "device": device.type,
        "counts": counts.tolist(),
        "seconds_training": seconds,
        "images_per_second": steps * (batch_size // world_size) * world_size / seconds,
        "loss_per_rank": losses,
        "param_change": (after - before).abs().max().item(),
        "param_spread": max((theirs - after).abs().max().item() for theirs in afters),
        "wrong": list(dict.fromkeys(joined(from_all_ranks(wrong)))),
    }


def wrong_in_images(updates, steps, batch_size, images):
    """Return what is wrong with the images of each step; updates[rank][step] begins with them."""
    if {len(of_rank) for of_rank in updates} != {steps}:
        return [f"the ranks made {[len(of_rank) for of_rank in updates]} steps, not {steps}"]
    world_size, share = len(updates), batch_size // len(updates)
    each = -(-images // world_size)  # of an epoch, so that all ranks have as many
    per_epoch = -(-each // share)
    numbers = []
    for step, of_ranks in enumerate(zip(*updates, strict=True)):
        parts = [shown for shown, _ in of_ranks]
        wanted = min(share, each - step % per_epoch * share)
        if [len(part) for part in parts] != [wanted] * world_size:
            return [
                f"step {step + 1} had {list(map(len, parts))} images, not {wanted} on each rank"
            ]
        numbers.append(joined(parts))
    epochs = [joined(numbers[at : at + per_epoch]) for at in range(0, steps, per_epoch)]
    return wrong_in_epochs(epochs, images, each * world_size)


def wrong_in_epochs(epochs, images, dealt):
    """Return what is wrong with the images of each epoch; the last one may be cut short."""
    for epoch in epochs:
        if len(epoch) == dealt and set(epoch) != set(range(images)):
            return ["an epoch is not made of all images"]
        if len(epoch) < dealt and len(set(epoch)) < len(epoch):
            return ["an epoch has images twice"]
    beginnings = {tuple(epoch[: len(epochs[-1])]) for epoch in epochs}
    return ["two epochs have the same order"] if len(beginnings) < len(epochs) else []


def wrong_in_updates(starts, updates, losses, train_set):
    """Return what is wrong with what the updates were made of; each rank looks at its share."""
    rank, world_size, wrong = dist.get_rank(), len(updates), []
    for step, replicas in enumerate(zip(*updates, strict=False)):
        if len({checksum for _, checksum in replicas}) > 1:
            wrong.append(f"the replicas were not equal before step {step + 1}")
    for step, (parameters, gradient) in list(starts.items())[rank::world_size]:
        numbers = joined(of_rank[step][0] for of_rank in updates)
        alone = make_model()
        vector_to_parameters(parameters, alone.parameters())
        images, labels = map(torch.stack, zip(*(train_set[n] for n in numbers), strict=True))
        loss = nn.functional.cross_entropy(alone(images), labels)
        loss.backward()
        expected = gradient_of(alone)
        off = ((gradient - expected).abs().max() / expected.abs().max()).item()
        if not off < 0.01:  # a GPU rounds to 10 bits; one image of 60 weighs more
            wrong.append(f"in step {step + 1} the gradient is {off:.2g} off one process's")
        mean = sum(of_rank[step] for of_rank in losses) / world_size
        if not abs(mean - loss.item()) < 0.01 * loss.item() + 1e-3:
            wrong.append(f"in step {step + 1} the mean loss is {mean:.3g}, not {loss:.3g}")
    return wrong[:1]


def wrong_in_scores(tested, counts, parameters, test_set):
    """Return what is wrong with the evaluation; `tested` are the images that each rank used."""
    if sorted(joined(tested)) != list(range(len(test_set))):
        return [f"{sum(map(len, tested))} images were evaluated, not {len(test_set)} once"]
    sizes = [len(numbers) for numbers in tested]
    if max(sizes) - min(sizes) > 1:
        return [f"the ranks evaluated {sizes} images, not equal shares"]
    alone = make_model().eval()
    vector_to_parameters(parameters, alone.parameters())
    images, labels = map(torch.stack, zip(*test_set, strict=True))
    pairs = labels * 10 + alone(images).argmax(1)
    expected = torch.bincount(pairs, minlength=100).reshape(10, 10)
    moved = (counts.cpu() - expected).abs().sum().item()
    if moved > 4 or counts.sum() != len(test_set):  # a tie may go either way
        return ["the counts are not those of one process"]
    given = torch.tensor((accuracy(expected), macro_f1(expected)))
    if not (given - scores_by_definition(expected)).abs().max() < 1e-5:
        return ["accuracy or macro F1 is not what its definition says"]
    return []


def scores_by_definition(counts):
    """Return accuracy and macro F1 of counts[label, answer], from precision and recall."""
    table, scores = counts.tolist(), []
    for digit, answers in enumerate(table):
        right, given = answers[digit], sum(row[digit] for row in table)
        precision, recall = right / max(given, 1), right / max(sum(answers), 1)
        scores.append(2 * precision * recall / ((precision + recall) or 1))
    right = sum(table[digit][digit] for digit in range(len(table)))
    return torch.tensor((right / sum(joined(table)), sum(scores) / len(scores)))


def wrong_on_this_rank(training, testing, model, before, after):
    """Return what is wrong with the model's mode, or with what the training has moved."""
    wrong = []
    if training.modes != {(True, True)} or testing.modes - {(False, False)}:
        wrong.append("it trains or evaluates in the wrong mode")
    if not model.training:
        wrong.append("the evaluation has left the model in another mode")
    sizes = [parameter.numel() for parameter in model.parameters()]
    moved = [part.abs().max().item() for part in (after - before).split(sizes)]
    if not 0 < min(moved) <= max(moved) < float("inf"):
        wrong.append("not every parameter was trained")
    if sorted(set(training.rates), reverse=True) != training.rates:
        wrong.append("the learning rate did not fall in every step")
    return wrong


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


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    flags = args.steps, args.batch_size, args.seed, args.workers
    try:
        result = launch_job(measure, args.nproc, *flags)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nrank {error.error_index} failed: {reason(error)}")
    os.environ.pop("RANK", None)  # inherited, if at all: this process is no rank of another job
    counts, wrong = torch.tensor(result.pop("counts")), result.pop("wrong")
    means = torch.tensor(result["loss_per_rank"]).mean(0).tolist()
    result |= {"lesson": 3, "world_size": len(result["loss_per_rank"])}
    result |= {"loss_first": means[0], "loss_last": means[-1]}
    result |= {"accuracy": accuracy(counts), "images_evaluated": counts.sum().item()}
    report(result, counts, args.steps)
    long_enough = args.steps >= 300 and args.batch_size >= 60
    wanted = 0.95 if long_enough else 0.0  # a short run can't learn as much
    if result["world_size"] != args.nproc:
        wrong.append(f"{args.nproc} ranks were started; the group has {result['world_size']}")
    if result["param_spread"] != 0:
        wrong.append("the replicas are not equal")
    claim = f"accuracy {result['accuracy']:.3f} on {result['images_evaluated']} images"
    claim = "; ".join([f"{claim}, asked for: {wanted}", *wrong])
    return result["accuracy"] >= wanted and not wrong, claim, result


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--nproc", type=whole(1, 64), default=2, help="ranks: %(default)s")
    parser.add_argument("--steps", type=whole(1, 10**6), default=300, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=60, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--workers", type=whole(0, 16), default=0, help="of each rank: %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if args.batch_size < args.nproc:
        parser.error(f"argument --batch-size: must be at least --nproc, {args.nproc}")
    if importlib.util.find_spec("sklearn") is None:  # load_data imports it, when the ranks run
        parser.error("needs scikit-learn: pip install scikit-learn")
    return args


# --- The frame: the same in every lesson ---


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
