"""Lesson 01: what does nn.DataParallel do in every step?

One process trains one model on several devices. Each device holds a copy of the
model, a replica. In every step the master (the first device) cuts the batch into
parts, sends the parameters to the other replicas, collects their outputs, and
adds up their gradients. This script writes these moves out and counts the bytes.

Run it:     bash scripts/lesson_01.sh --nproc 2
Or alone:   python lessons/lesson_01_data_parallel.py --nproc 2

--nproc is the number of replicas. With that many GPUs, each replica has its own
GPU, and nn.DataParallel itself runs beside the hand-written version. Otherwise
the replicas are threads on the CPU, where nn.DataParallel would split nothing.

Output to expect on a CPU:

    replicas: 2, on cpu (nn.DataParallel itself needs 2 GPUs)
    step 1: inside, the model saw 15 + 15 rows; outside, the caller sees 30
    step 2: inside, the model saw 15 + 15 rows; outside, the caller sees 30
    step 3: inside, the model saw 15 + 15 rows; outside, the caller sees 30
    step 4: inside, the model saw 5 + 5 rows; outside, the caller sees 10
    step 1: the master sends 96 bytes of parameters, and receives 96 bytes of gradients
    loss on all 100 rows: 15.3 before, 0.251 after 40 steps
    PASS with --nproc 2 every gradient is that of one device (max difference ...)
"""

import argparse
import collections
import copy
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


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


def make_toy(seed):
    """Return the article's toy: 100 rows of 5 numbers, targets of width 2, and a layer 5 -> 2.

    The targets are a fixed linear function of the rows, plus noise: there is something to learn.
    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    targets += 0.5 * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rows, targets, model


# --- New in this lesson ---


def send(tensor, device, traffic, what):
    """Return a copy of `tensor` on `device`; add its size in bytes to `traffic[what]`."""
    traffic[what] += tensor.nbytes
    return tensor.detach().to(device, copy=True)


def scatter(batch, devices, traffic, what):
    """Cut `batch` along dimension 0 into at most `len(devices)` parts, one per device.

    The cut is torch.chunk, as in nn.DataParallel: every part but the last has
    ceil(rows / devices) rows, so there can be fewer parts than devices (claim A5).
    The first part stays where it is: the first device is the master.
    """
    first, *others = batch.chunk(len(devices))
    pairs = zip(others, devices[1:], strict=False)
    return [first] + [send(part, device, traffic, what) for part, device in pairs]


def replicate(model, devices, traffic):
    """Return one replica of `model` per device; the first one is `model` itself (claim A6)."""
    replicas = [model]
    for device in devices[1:]:
        replica = copy.deepcopy(model).to(device)
        for tensor in [*replica.parameters(), *replica.buffers()]:
            traffic["parameters"] += tensor.nbytes
        replicas.append(replica)
    return replicas


def parallel_apply(replicas, parts):
    """Call every replica on its own part, each in a thread of its own; return the outputs."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda replica, part: replica(part), replicas, parts))


def gather(outputs, traffic):
    """Return the outputs as one batch on the master, where the loss will be computed."""
    first, *others = outputs
    received = [send(output, first.device, traffic, "outputs") for output in others]
    return torch.cat([first.detach(), *received]).requires_grad_()


def add_gradients(model, replicas, traffic):
    """Add the gradients of all other replicas to those of `model`, the master (claim A1)."""
    for replica in replicas[1:]:
        for ours, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            ours.grad += send(theirs.grad, ours.device, traffic, "gradients")


def data_parallel_step(model, rows, targets, devices, traffic):
    """Leave the gradient of the whole batch in `model`; return (rows inside, rows outside, loss).

    model on devices[0]; rows (n, 5) and targets (n, 2) on devices[0]. `traffic` is a Counter of
    bytes. Claims A1, A5, A6; the same order of moves as torch/nn/parallel/data_parallel.py.
    """
    parts = scatter(rows, devices, traffic, "rows")
    replicas = replicate(model, devices[: len(parts)], traffic)
    outputs = parallel_apply(replicas, parts)
    gathered = gather(outputs, traffic)
    loss = nn.functional.mse_loss(gathered, targets)
    loss.backward()  # stops at `gathered`: from here the gradient has to travel back
    gradients = scatter(gathered.grad, devices, traffic, "gradients of the outputs")
    torch.autograd.backward(outputs, gradients)
    add_gradients(model, replicas, traffic)
    return [len(output) for output in outputs], len(gathered), loss.item()


# --- The experiment ---


def largest_difference(model, other):
    """Return the largest absolute difference between the gradients of two equal models."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.grad - b.grad.to(a.device)).abs().max().item() for a, b in pairs)


def train(devices, steps, batch_size, seed=0, step=data_parallel_step):
    """Train the toy for `steps` updates on `devices`; return a dict of what was measured.

    After every step the gradient is compared with that of one device and the whole batch, and,
    where the devices are GPUs, with the gradient that nn.DataParallel computes.
    """
    rows, targets, model = make_toy(seed)
    rows, targets, model = rows.to(devices[0]), targets.to(devices[0]), model.to(devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(rows.split(batch_size), targets.split(batch_size), strict=True))
    loss_first = nn.functional.mse_loss(model(rows), targets).item()
    result = {"rows_per_replica": [], "rows_outside": [], "max_grad_diff": 0.0}
    library_diff = 0.0 if devices[0].type == "cuda" else None
    bytes_per_step = []

    for number in range(steps):
        batch, wanted = batches[number % len(batches)]
        reference = copy.deepcopy(model)
        nn.functional.mse_loss(reference(batch), wanted).backward()

        traffic = collections.Counter()
        optimizer.zero_grad()
        inside, outside, _ = step(model, batch, wanted, devices, traffic)
        result["max_grad_diff"] = max(result["max_grad_diff"], largest_difference(model, reference))
        if library_diff is not None:
            library = copy.deepcopy(model)
            wrapped = nn.DataParallel(library, [device.index for device in devices])
            nn.functional.mse_loss(wrapped(batch), wanted).backward()
            library_diff = max(library_diff, largest_difference(model, library))
        optimizer.step()

        if number < len(batches):  # the first epoch
            result["rows_per_replica"].append(inside)
            result["rows_outside"].append(outside)
        bytes_per_step.append(dict(traffic))

    return result | {
        "bytes_broadcast_per_step": bytes_per_step[0].get("parameters", 0),
        "bytes_gathered_per_step": bytes_per_step[0].get("gradients", 0),
        "bytes_per_step": bytes_per_step[: len(batches)],
        "max_diff_to_data_parallel": library_diff,
        "loss_first": loss_first,
        "loss_last": nn.functional.mse_loss(model(rows), targets).item(),
    }


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=40, batch_size=30)
    args = parser.parse_args(argv)
    enough_gpus = torch.cuda.device_count() >= args.nproc
    kind = "cuda" if enough_gpus else "cpu"
    devices = [torch.device(kind, index if enough_gpus else 0) for index in range(args.nproc)]

    print(f"replicas: {args.nproc}, on {kind}", end=" ")
    print(f"(nn.DataParallel itself {'runs too' if enough_gpus else f'needs {args.nproc} GPUs'})")
    result = train(devices, args.steps, args.batch_size, args.seed)

    pairs = zip(result["rows_per_replica"], result["rows_outside"], strict=True)
    for number, (inside, outside) in enumerate(pairs, start=1):
        idle = args.nproc - len(inside)
        print(f"step {number}: inside, the model saw {' + '.join(map(str, inside))} rows;", end=" ")
        print(
            f"outside, the caller sees {outside}" + f"; replicas without rows: {idle}" * (idle > 0)
        )
    print(
        f"step 1: the master sends {result['bytes_broadcast_per_step']} bytes of parameters, "
        f"and receives {result['bytes_gathered_per_step']} bytes of gradients"
    )
    print(
        f"loss on all 100 rows: {result['loss_first']:.3g} before, "
        f"{result['loss_last']:.3g} after {args.steps} steps"
    )
    differences = [result["max_grad_diff"], result["max_diff_to_data_parallel"] or 0.0]
    passed = max(differences) < 1e-12 and result["loss_last"] < result["loss_first"]
    print(
        f"{'PASS' if passed else 'FAIL'} with --nproc {args.nproc} every gradient is that of one "
        f"device (max difference {max(differences):.3g})"
    )
    if args.json:
        common = {"lesson": 1, "world_size": args.nproc, "backend": "threads", "device": kind}
        print(json.dumps({**common, "passed": passed, **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
