"""Lesson 01: what does nn.DataParallel do in every step?

One process trains one model on several devices. In every step nn.DataParallel cuts the
batch into parts, copies the parameters to all devices, runs one thread per device,
collects the outputs, and adds up the gradients. Here it is written out, in twenty lines.
The launcher watches from outside, and compares with one device and with nn.DataParallel
itself; the lines that begin with "step 1" are its own.

Run it:     bash scripts/lesson_01.sh --nproc 2
Or alone:   python lessons/lesson_01_data_parallel.py --nproc 2

--nproc is the number of devices. With that many GPUs the lesson uses them. Otherwise the
launcher lends it stand-ins: devices that PyTorch takes for real, and that compute on the
CPU. Alone, it takes the CPU for each of its devices.

Output to expect on a CPU:

    devices: standin:0 standin:1
    loss on all 100 rows: 15.3 before, 0.251 after 40 steps
    step 1: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 2: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 3: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 4: inside, the model sees 5 + 5 rows; outside, the caller sees 10
    in step 1 the master sends 96 bytes of parameters and receives 96 bytes of gradients
    PASS gradients are those of one device and of nn.DataParallel (max difference ...)
"""

import argparse
import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.functional import mse_loss

# --- The technique ---


def data_parallel(model, rows, devices):
    """Return model(rows), computed in parts. The model and the rows are on devices[0]."""
    parts = scatter(rows, devices)
    replicas = [replicate(model, device) for device in devices[: len(parts)]]
    outputs = parallel_apply(replicas, parts)
    return gather(outputs, devices[0])


def scatter(rows, devices):
    """Cut the rows as torch.chunk does, and send each part to its device: at most one each."""
    parts = rows.chunk(len(devices))
    return [part.to(device) for part, device in zip(parts, devices, strict=False)]


def replicate(model, device):
    """Return a copy of the model on `device`; autograd knows whose copies its tensors are."""
    tensors = [*model.parameters(), *model.buffers()]
    sent = {id(tensor): tensor.to(device) for tensor in tensors}
    return copy.deepcopy(model, memo=sent)  # copies the modules; for these tensors it takes `sent`


def parallel_apply(replicas, parts):
    """Run all replicas at the same time, each on its own part, in threads; return the outputs."""
    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(lambda replica, part: replica(part), replicas, parts))


def gather(outputs, device):
    """Return the outputs as one batch on `device`, where the caller computes the loss."""
    return torch.cat([output.to(device) for output in outputs])


def train(model, batches, devices, steps):
    """Train `model` on `batches`, a list of (rows, targets), again and again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        outputs = data_parallel(model, rows, devices)  # nn.DataParallel(model)(rows)
        loss = mse_loss(outputs, targets)  # on the master, over all rows
        loss.backward()  # each copy above sends its gradient back the way it came
        optimizer.step()  # only here: the replicas are thrown away


def find_devices(count):
    """Return `count` devices: accelerators, if there are so many, else the CPU so many times."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "mps" or torch.accelerator.device_count() < count:
        return [torch.device("cpu")] * count  # mps, a Mac's, has no float64
    return [torch.device(kind.type, index) for index in range(count)]


# --- The example ---


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


def main(args):
    """Train the toy on the devices, and say what came of it."""
    devices = find_devices(args.nproc)
    print("devices:", *devices)
    rows, targets, model = make_toy(args.seed)
    before = mse_loss(model(rows), targets)
    parts = (part.to(devices[0]).split(args.batch_size) for part in (rows, targets))
    train(model.to(devices[0]), list(zip(*parts, strict=True)), devices, args.steps)
    after = mse_loss(model.cpu()(rows), targets)
    print(f"loss on all 100 rows: {before:.3g} before, {after:.3g} after {args.steps} steps")


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nproc", type=int, default=2, help="devices: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=30, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
