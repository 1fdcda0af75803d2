"""Lesson 01: what does nn.DataParallel do in every step?

One process trains one model on several devices. In every step nn.DataParallel cuts the
batch into parts, copies the parameters to all devices, runs one thread per device,
collects the outputs, and adds up the gradients. Here it is written out, in twenty lines,
and compared with one device and with nn.DataParallel itself.

Run it:     bash scripts/lesson_01.sh --nproc 2
Or alone:   python lessons/lesson_01_data_parallel.py --nproc 2

--nproc is the number of devices. With that many GPUs the lesson uses them. Otherwise it
uses stand-ins: devices that PyTorch takes for real, and that compute on the CPU.

Output to expect on a CPU:

    devices: 2 stand-ins for GPUs, which compute on the CPU
    step 1: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 2: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 3: inside, the model sees 15 + 15 rows; outside, the caller sees 30
    step 4: inside, the model sees 5 + 5 rows; outside, the caller sees 10
    in step 1 the master sends 96 bytes of parameters and receives 96 bytes of gradients
    loss on all 100 rows: 15.3 before, 0.251 after 40 steps
    PASS gradients are those of one device and of nn.DataParallel (max difference ...)
"""

import argparse
import contextlib
import copy
import functools
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
        loss = mse_loss(outputs, targets)  # on the master, over the whole batch
        loss.backward()  # each copy above sends its gradient back the way it came
        optimizer.step()  # only here: the replicas are thrown away


# --- The proof ---


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


class Copies(TorchDispatchMode):
    """Writes down the copies between devices that its thread makes: (source, target, bytes).

    Copies of the tensors in `apart` get a list of their own.
    """

    def __init__(self, apart=()):
        super().__init__()
        self.apart = {id(tensor) for tensor in apart}
        self.found, self.found_apart = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        moves = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        if function in moves:
            moved = args[moves[function]]
            found = self.found_apart if id(moved) in self.apart else self.found
            copied = moved.device.index, result.device.index, result.nbytes
            found += [copied] if moved.device != result.device else []
        return result


class Step(NamedTuple):
    """A step that was watched, without its update."""

    visits: list  # a Visit for each replica, by device
    outputs: torch.Tensor
    sent: dict  # what: [(source, target, bytes)]
    gradient: torch.Tensor


class Visit(NamedTuple):
    """One call of a replica: on which device, with which rows; were all called at that time?"""

    device: int
    rows: torch.Tensor
    together: bool


@contextlib.contextmanager
def visits_of(model, expected, patience=5):
    """Write down the calls of `model` and of its replicas in the block, by a hook that they share.

    The hook lets nobody compute before `expected` replicas have been called, or `patience` seconds
    have passed.
    """
    visits, meeting = [], threading.Barrier(expected, timeout=patience)

    def arrive(replica, inputs):
        together = True
        try:
            meeting.wait()
        except threading.BrokenBarrierError:
            together = False
        visits.append(Visit(inputs[0].device.index, inputs[0].detach(), together))

    handle = model.register_forward_pre_hook(arrive)
    yield visits
    handle.remove()
    there = sorted(visits, key=lambda visit: visit.device)
    visits[:] = [visit._replace(rows=visit.rows.cpu()) for visit in there]


def gradient(model):
    """Return the gradient that the last backward() left, as one vector on the CPU."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([each.cpu().flatten() for each in gradients])


def gradient_of(model, forward, rows, targets):
    """Compute the gradient of the loss of forward(rows), and return it."""
    model.zero_grad()
    mse_loss(forward(rows), targets).backward()
    return gradient(model)


def watch_step(model, rows, targets, devices, patience=5):
    """Do a step without its update, and watch it; return a Step."""
    model.zero_grad()
    watching = visits_of(model, len(parts_of(rows, devices)), patience)
    with watching as visits, Copies(apart=model.parameters()) as forward:
        outputs = data_parallel(model, rows, devices)
    with Copies() as backward:
        if outputs.shape == targets.shape and outputs.requires_grad:
            mse_loss(outputs, targets).backward()
    sent = {"rows": [copy for copy in forward.found if copy[0] == 0]}
    sent["parameters"] = forward.found_apart
    sent["outputs"] = [copy for copy in forward.found if copy[0] != 0]
    sent["gradients of the outputs"] = [copy for copy in backward.found if copy[0] == 0]
    sent["gradients"] = [copy for copy in backward.found if copy[0] != 0]
    return Step(visits, outputs.detach().cpu(), sent, gradient(model))


def parts_of(rows, devices):
    """Return the parts as they should be: the rows in order, the size of a part rounded up."""
    return rows.split(-(-len(rows) // len(devices)))


def mistake_in(step, alone, rows, targets, devices):
    """Return what is wrong in a Step with these rows, or None. `alone`: the model of one device."""
    parts, wanted = parts_of(rows, devices), alone(rows).detach()
    inside = [(visit.device, len(visit.rows)) for visit in step.visits]
    if inside != list(enumerate(map(len, parts))):
        right = list(map(len, parts))
        return f"inside, (device, rows) are {inside}; the parts of {len(rows)} rows are {right}"
    if not all(
        torch.equal(visit.rows, part) for visit, part in zip(step.visits, parts, strict=True)
    ):
        return "the parts are not the rows of the batch, in order"
    if not all(visit.together for visit in step.visits):
        return "the replicas do not compute at the same time"
    if step.outputs.shape != wanted.shape or is_far(step.outputs - wanted):
        return "the outputs are not those of one device"
    if is_far(step.gradient - gradient_of(alone, alone, rows, targets)):
        return "the gradient is not that of one device"
    by_hand = bytes_by_hand(alone, rows, targets, devices)
    bytes_sent = add_up(step.sent)
    if list(bytes_sent.values()) != by_hand:
        return f"of {len(rows)} rows, the bytes sent are {bytes_sent}; counted by hand: {by_hand}"
    return wrong_with_a_buffer(rows, devices)


def wrong_with_a_buffer(rows, devices):
    """Return what is wrong with a step of a model whose outputs depend on a buffer, or None."""
    alone = nn.BatchNorm1d(5, dtype=torch.float64).eval()
    alone.running_mean += rows[0]
    try:
        outputs = data_parallel(place(alone, devices[0]), place(rows, devices[0]), devices)
        off = outputs.detach().cpu() - alone(rows).detach()
    except RuntimeError as error:  # for example: tensors of several devices were mixed
        return f"a model with a buffer does not run: {error}"
    return "with a buffer, the outputs are not those of one device" if is_far(off) else None


def bytes_by_hand(alone, rows, targets, devices):
    """Return the bytes of each thing that a step must send; an output is as large as a target."""
    first, *others = parts_of(rows, devices)
    of_model = len(others) * sum(parameter.nbytes for parameter in alone.parameters())
    replies = targets[len(first) :].nbytes
    return [rows[len(first) :].nbytes, of_model, replies, replies, of_model]


def is_far(differences):
    """Return whether one of these is more than rounding; also when it is nan."""
    return not differences.abs().max() < 1e-12


def add_up(sent):
    """Return {what was sent: bytes} of {what was sent: [(source, target, bytes)]}."""
    return {what: sum(nbytes for _, _, nbytes in copies) for what, copies in sent.items()}


def train_plainly(model, forward, batches, steps):
    """Train `model` as train() does, with forward(rows) in place of data_parallel."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        mse_loss(forward(rows), targets).backward()
        optimizer.step()


def record_updates(train, model, *arguments):
    """Call train(model, ...); return for each update of `model` its gradient and parameters."""
    updates = []

    def after_update(optimizer, args, kwargs):
        parameters = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
        updates.append(torch.stack([gradient(model), parameters]))

    handle = register_optimizer_step_post_hook(after_update)
    train(model, *arguments)
    handle.remove()
    return torch.stack(updates) if updates else torch.zeros(0, 2, 1)


def compare_trainings(model, alone, batches, devices, steps):
    """Train three times; return how far our gradients are from one device's and the library's.

    And what is wrong, or None.
    """
    placed = [tuple(place(part, devices[0]) for part in batch) for batch in batches]
    twin = place(alone, devices[0])
    library = nn.DataParallel(twin, [device.index for device in devices])
    assert len(library.device_ids) == len(devices), "nn.DataParallel does not use these devices"
    with visits_of(model, 1) as visits, Copies() as copies:
        ours = record_updates(train, model, placed, devices, steps)
    inside = sorted((visit.device, len(visit.rows)) for visit in visits)
    dealt = [parts_of(batches[step % len(batches)][0], devices) for step in range(steps)]
    if inside != sorted((i, len(part)) for parts in dealt for i, part in enumerate(parts)):
        return [0.0, 0.0], "while it trains, not every device computes its part of every batch"
    needed = sum(
        sum(bytes_by_hand(alone, *batches[step % len(batches)], devices)) for step in range(steps)
    )
    sent = sum(nbytes for *ends, nbytes in copies.found if None not in ends)  # None: to the CPU
    if sent != needed:
        return [0.0, 0.0], f"while it trains, {sent} bytes are sent, not {needed}"
    off = []
    for other in ((alone, alone, batches), (twin, library, placed)):
        theirs = record_updates(train_plainly, *other, steps)
        if len(ours) != len(theirs):
            return [0.0, 0.0], f"{len(ours)} updates in {steps} steps"
        off.append((ours - theirs).abs().amax(dim=(0, 2)))  # of gradients, of parameters
    found = {"a gradient": torch.stack(off)[:, 0], "a parameter": torch.stack(off)[:, 1]}
    wrong = [f"{what} is off by {far.max():.3g}" for what, far in found.items() if is_far(far)]
    return found["a gradient"].tolist(), wrong[0] if wrong else None


def measure(devices, steps, batch_size, seed=0):
    """Watch the steps of an epoch, then train; return the numbers, and what is wrong or None."""
    rows, targets, alone = make_toy(seed)
    model = place(alone, devices[0])
    loss_first = mse_loss(alone(rows), targets).item()
    batches = list(zip(rows.split(batch_size), targets.split(batch_size), strict=True))
    few = [(rows[:size], targets[:size]) for size in (1, len(devices) + 1)]  # some devices idle
    watched = batches[:steps] + few
    seen, problem, off = [], None, [0.0, 0.0]
    for batch in watched:
        placed = [place(part, devices[0]) for part in batch]
        patience = 5 if problem is None else 0.1  # seconds: once is enough to know
        seen.append(watch_step(model, *placed, devices, patience))
        problem = problem or mistake_in(seen[-1], alone, *batch, devices)
    if problem is None:
        off, problem = compare_trainings(model, alone, batches, devices, steps)
    epoch = seen[: -len(few)]
    bytes_per_step = [add_up(step.sent) for step in epoch]
    numbers = {
        "rows_per_replica": [[len(visit.rows) for visit in step.visits] for step in epoch],
        "rows_outside": [len(step.outputs) for step in epoch],
        "bytes_per_step": bytes_per_step,
        "bytes_broadcast_per_step": bytes_per_step[0]["parameters"],
        "bytes_gathered_per_step": bytes_per_step[0]["gradients"],
        "max_grad_diff": off[0],
        "max_diff_to_data_parallel": off[1],
        "loss_first": loss_first,
        "loss_last": mse_loss(model(place(rows, devices[0])).cpu(), targets).item(),
    }
    return numbers, problem


def report(result, nproc, steps):
    """Print what a reader wants to know."""
    for step, inside in enumerate(result["rows_per_replica"]):
        parts = " + ".join(map(str, inside))
        idle = f" ({nproc - len(inside)} devices get none)" if len(inside) < nproc else ""
        outside = f"outside, the caller sees {result['rows_outside'][step]}"
        print(f"step {step + 1}: inside, the model sees {parts} rows{idle}; {outside}")
    sent, received = result["bytes_broadcast_per_step"], result["bytes_gathered_per_step"]
    print(f"in step 1 the master sends {sent} bytes of parameters", end=" ")
    print(f"and receives {received} bytes of gradients")
    losses = f"{result['loss_first']:.3g} before, {result['loss_last']:.3g} after"
    print(f"loss on all 100 rows: {losses} {steps} steps")


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    devices = find_devices(args.nproc)
    kind = "GPUs" if devices[0].type == "cuda" else "stand-ins for GPUs, which compute on the CPU"
    print(f"devices: {args.nproc} {kind}")
    with torch.autograd.set_multithreading_enabled(False):  # the stand-ins need it
        numbers, problem = measure(devices, args.steps, args.batch_size, args.seed)
    if problem is None:
        report(numbers, args.nproc, args.steps)
    numbers |= {"lesson": 1, "world_size": args.nproc, "backend": "threads"}
    numbers["device"] = "cuda" if devices[0].type == "cuda" else "cpu"
    worst = max(numbers["max_grad_diff"], numbers["max_diff_to_data_parallel"])
    claim = f"gradients are those of one device and of nn.DataParallel (max difference {worst:.2g})"
    return problem is None, problem or claim, numbers


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before anything is computed."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--nproc", type=whole(1, 64), default=2, help="devices: %(default)s")
    parser.add_argument("--steps", type=whole(1, 10**6), default=40, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=30, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(argv)


# --- Stand-ins: devices for a machine without GPUs ---


class StandIn(torch.Tensor):
    """A tensor that PyTorch believes to be on a device of its own; it computes on the CPU."""

    @staticmethod
    def __new__(cls, on_cpu, device):
        layout = {"strides": on_cpu.stride(), "dtype": on_cpu.dtype, "device": device}
        tensor = torch.Tensor._make_wrapper_subclass(cls, on_cpu.shape, **layout)
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Do one operation of PyTorch: open the tensors, compute, say where the result is."""
        if function is torch.ops.aten.copy_.default:
            return write_into(*args)
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        inputs = [tensor.device for tensor in tensors if isinstance(tensor, cls)]
        others = {t.device for t in tensors if t.dim() > 0 or isinstance(t, cls)}  # as CUDA does:
        if len(others) > 1:  # a single number on the CPU may be mixed with a device, no other
            raise RuntimeError(f"{function}: all tensors must be on the same device")
        device = torch.device(options.pop("device", None) or inputs[0])
        result = function(*tree_map(opened, args), **tree_map(opened, options))
        if function is torch.ops.aten._to_copy.default:
            result = result.clone()  # from one device to another nothing is shared
        if device.type == "cpu":
            return result
        return tree_map(lambda x: cls(x, device) if isinstance(x, torch.Tensor) else x, result)


def opened(thing):
    """Return what a stand-in tensor holds; anything else as it is."""
    return thing.on_cpu if isinstance(thing, StandIn) else thing


def write_into(target, source, non_blocking=False):
    """Copy the numbers of `source` into `target`, from whatever device to whatever device."""
    opened(target).copy_(opened(source))
    return target


@functools.cache  # PyTorch takes a kind of device once in a process
def register_stand_ins():
    """Make the kind of device known, and what makes new tensors on it, or moves tensors there."""
    registry = torch.utils.backend_registration
    if not hasattr(registry, "_setup_privateuseone_for_python_backend"):
        problem = f"torch {torch.__version__} can't make stand-ins for GPUs"
        sys.exit(f"{problem}: take the version in requirements.txt")

    class Backend(registry._DummyBackendModule):  # what PyTorch asks a device about
        def device_count(self):
            return 64

        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    def empty(size, stride=None, *, dtype=None, device=None, **options):
        stride = stride or torch.empty(size, device="meta").stride()
        return StandIn(torch.empty_strided(size, stride, dtype=dtype), device)

    setup = registry._setup_privateuseone_for_python_backend  # marked experimental
    setup("standin", backend_module=Backend())
    operations = torch.library.Library("aten", "IMPL")
    operations.impl("empty.memory_format", empty, "PrivateUse1")
    operations.impl("empty_strided", empty, "PrivateUse1")
    operations.impl("_copy_from", lambda source, to, *_: write_into(to, source), "PrivateUse1")
    replace_what_needs_cuda()
    return operations


def replace_what_needs_cuda():
    """Give nn.DataParallel in Python what it has in C++, for CUDA only; and say: no nccl."""

    def copy_to(tensor, index):
        return tensor.to(torch.device("standin", index))

    def scatter_in_python(tensor, devices, sizes, dim, streams):
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        return [copy_to(part, device) for part, device in zip(parts, devices, strict=False)]

    def gather_in_python(tensors, dim, device):
        return torch.cat([copy_to(tensor, device) for tensor in tensors], dim)

    def broadcast_in_python(tensors, devices, buffer_size):
        return [[copy_to(tensor, device) for tensor in tensors] for device in devices]

    library = sys.modules["torch.nn.parallel.data_parallel"]
    library._get_available_device_type = lambda: "standin"  # where there is another kind as well
    torch._C._scatter = scatter_in_python
    torch._C._gather = gather_in_python
    torch._C._broadcast_coalesced = broadcast_in_python
    torch.cuda.nccl.is_available = lambda tensors: False


def find_devices(count):
    """Return `count` devices: GPUs if there are that many, else stand-ins, from then on."""
    stand_ins_are_in_use = register_stand_ins.cache_info().currsize > 0
    if torch.cuda.device_count() >= count and not stand_ins_are_in_use:
        return [torch.device("cuda", index) for index in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # too few GPUs: none, for the rest of this process
    register_stand_ins()
    return [torch.device("standin", index) for index in range(count)]


def place(thing, device):
    """Return a copy of a model, or of a tensor, on `device`."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().to(device, copy=True)
    sent = {id(buffer): place(buffer, device) for buffer in thing.buffers()}
    sent |= {id(p): nn.Parameter(place(p, device), p.requires_grad) for p in thing.parameters()}
    return copy.deepcopy(thing, memo=sent)  # what is used twice is one tensor again


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
