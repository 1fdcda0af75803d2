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
import copy
import functools
import inspect
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# --- The technique ---


def data_parallel(model, rows, devices):
    """Return model(rows), computed in parts. The model and the rows are on devices[0] (A1)."""
    parts = scatter(rows, devices)
    replicas = [replicate(model, device) for device in devices[: len(parts)]]
    outputs = parallel_apply(replicas, parts)
    return gather(outputs, devices[0])


def scatter(rows, devices):
    """Cut the rows as torch.chunk does, and send each part to its device: at most one each (A5)."""
    parts = rows.chunk(len(devices))
    return [part.to(device) for part, device in zip(parts, devices, strict=False)]


def replicate(model, device):
    """Return a copy of the model on `device`; autograd knows whose copies its tensors are (A6)."""
    tensors = [*model.parameters(), *model.buffers()]
    sent = {id(tensor): tensor.to(device) for tensor in tensors}
    return copy.deepcopy(model, memo=sent)  # copies the modules; for these tensors it takes `sent`


def parallel_apply(replicas, parts):
    """Run each replica on its own part, each in a thread of its own; return the outputs.

    (nn.DataParallel also hands on to its threads whether autograd and autocast are on.)
    """
    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(lambda replica, part: replica(part), replicas, parts))


def gather(outputs, device):
    """Return the outputs as one batch on `device`, where the caller computes the loss."""
    return torch.cat([output.to(device) for output in outputs])


def train(model, batches, devices, steps):
    """Train `model`; yield the batch after every step. batches: a list of (rows, targets).

    A generator, for the proof: nothing runs until somebody asks for the next step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        outputs = data_parallel(model, rows, devices)  # nn.DataParallel(model)(rows)
        loss = mse_loss(outputs, targets)  # on the master, over the whole batch
        loss.backward()  # each copy above sends its gradient back the way it came
        optimizer.step()  # only here: the replicas are thrown away
        yield rows, targets


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
    """Writes down the copies between devices that its thread makes: (source, target, bytes)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].device != result.device:
            self.found.append((args[0].device.index, result.device.index, result.nbytes))
        return result


def watch_step(model, rows, targets, devices):
    """Do a step move by move; return {what: [(source, target, bytes)]}, rows inside, outside."""
    with Copies() as rows_sent:
        parts = scatter(rows, devices)
    with Copies() as parameters_sent:
        replicas = [replicate(model, device) for device in devices[: len(parts)]]
    outputs = parallel_apply(replicas, parts)
    with Copies() as outputs_sent:
        gathered = gather(outputs, devices[0])
    with Copies() as sent_back:
        mse_loss(gathered, targets).backward()
    sent = {"rows": rows_sent.found, "parameters": parameters_sent.found}
    sent["outputs"] = outputs_sent.found
    sent["gradients of the outputs"] = [copy for copy in sent_back.found if copy[0] == 0]
    sent["gradients"] = [copy for copy in sent_back.found if copy[0] != 0]
    return sent, [len(output) for output in outputs], len(gathered)


def gradient(model):
    """Return the gradient that the last backward() left, as one vector on the CPU."""
    return torch.cat([parameter.grad.cpu().flatten() for parameter in model.parameters()])


def backward(model, forward, rows, targets):
    """Compute the gradient of the loss of forward(rows), and return it."""
    model.zero_grad()
    mse_loss(forward(rows), targets).backward()
    return gradient(model)


def compare_gradients(model, alone, batches, placed, devices, steps):
    """Train `model`; return how far a gradient is from one device's, and from nn.DataParallel's."""
    library = nn.DataParallel(model, [device.index for device in devices])
    assert len(library.device_ids) == len(devices), "nn.DataParallel does not use these devices"
    off, off_library = [], []
    training = train(model, placed, devices, steps)
    for step in range(steps):
        by_one_device = backward(alone, alone, *batches[step % len(batches)])
        by_library = backward(model, library, *placed[step % len(batches)])
        next(training)
        off.append((gradient(model) - by_one_device).abs().max())
        off_library.append((gradient(model) - by_library).abs().max())
        for ours, theirs in zip(alone.parameters(), model.parameters(), strict=True):
            ours.data = theirs.detach().cpu()  # one device follows, for the next comparison
    return torch.stack(off).max().item(), torch.stack(off_library).max().item()


def measure(devices, steps, batch_size, seed=0):
    """Train the toy on `devices`; return what was measured.

    Rows and bytes are those of an epoch that is watched move by move before the training.
    """
    rows, targets, alone = make_toy(seed)
    model = place(alone, devices[0])
    batches = list(zip(rows.split(batch_size), targets.split(batch_size), strict=True))
    placed = [(place(part, devices[0]), place(goal, devices[0])) for part, goal in batches]
    loss_first = mse_loss(alone(rows), targets).item()
    epoch = [watch_step(model, *batch, devices) for batch in placed[:steps]]
    bytes_per_step = [add_up(sent) for sent, _, _ in epoch]
    off, off_library = compare_gradients(model, alone, batches, placed, devices, steps)
    return {
        "rows_per_replica": [inside for _, inside, _ in epoch],
        "rows_outside": [outside for _, _, outside in epoch],
        "bytes_per_step": bytes_per_step,
        "bytes_broadcast_per_step": bytes_per_step[0]["parameters"],
        "bytes_gathered_per_step": bytes_per_step[0]["gradients"],
        "max_grad_diff": off,
        "max_diff_to_data_parallel": off_library,
        "loss_first": loss_first,
        "loss_last": mse_loss(alone(rows), targets).item(),
    }


def add_up(sent):
    """Return {what was sent: bytes} of {what was sent: [(source, target, bytes)]}."""
    return {what: sum(nbytes for _, _, nbytes in copies) for what, copies in sent.items()}


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


def main(
    nproc: range(1, 65) = 2,
    steps: range(1, 10**6) = 40,
    batch_size: range(1, 10**6) = 30,
    seed: range(2**32) = 0,
):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for --json."""
    devices = find_devices(nproc)
    kind = "GPUs" if devices[0].type == "cuda" else "stand-ins for GPUs, which compute on the CPU"
    print(f"devices: {nproc} {kind}")
    with torch.autograd.set_multithreading_enabled(False):  # the stand-ins need it
        result = measure(devices, steps, batch_size, seed)
    report(result, nproc, steps)
    result |= {"lesson": 1, "world_size": nproc, "backend": "threads"}
    result["device"] = "cuda" if devices[0].type == "cuda" else "cpu"
    worst = max(result["max_grad_diff"], result["max_diff_to_data_parallel"])
    passed = worst < 1e-12 and result["loss_last"] < result["loss_first"]
    claim = "gradients are those of one device and of nn.DataParallel"
    return passed, f"{claim} (max difference {worst:.2g})", result


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
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = [tensor for tensor in tensors if isinstance(tensor, cls)]
        if len({tensor.device for tensor in tensors if tensor.dim() > 0}) > 1:
            raise RuntimeError(f"{function}: all tensors must be on the same device")
        args, kwargs = tree_map(lambda x: x.on_cpu if isinstance(x, cls) else x, (args, kwargs))
        options = dict(kwargs or {})
        device = torch.device(options.pop("device", None) or inputs[0].device)
        result = function(*args, **options)
        if function is torch.ops.aten._to_copy.default:
            result = result.clone()  # from one device to another nothing is shared
        if device.type == "cpu":
            return result
        return tree_map(lambda x: cls(x, device) if isinstance(x, torch.Tensor) else x, result)


class StandInBackend(backend_registration._DummyBackendModule):
    """What PyTorch asks a kind of device about."""

    def device_count(self):
        return 64

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


@functools.cache  # PyTorch takes a kind of device once in a process
def register_stand_ins():
    """Make the kind of device known, and add what a build without CUDA lacks for DataParallel."""
    backend_registration._setup_privateuseone_for_python_backend(
        "standin", backend_module=StandInBackend()
    )

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
    if device.type == "cuda":
        return copy.deepcopy(thing).to(device)
    if isinstance(thing, torch.Tensor):
        return StandIn(thing.detach().clone(), device)
    tensors = {id(p): nn.Parameter(place(p, device)) for p in thing.parameters()}
    tensors |= {id(buffer): place(buffer, device) for buffer in thing.buffers()}
    return copy.deepcopy(thing, memo=tensors)


# --- The frame: the same in every lesson ---


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
    sys.exit(start(main))
