"""Lesson 02: how does DistributedDataParallel keep separate processes in step?

A launcher starts one process per device, a rank. Each has its own model, optimizer and
share of the rows. DDP sends rank 0's parameters once, when it wraps the model. In every
step it sends gradients: an all-reduce inside backward() leaves their mean on every rank,
so all ranks make the same update. This script checks after every step that they did.

Run it:         bash scripts/lesson_02.sh --nproc 2 [--launcher torchrun|launch]
What that does: torchrun --standalone --nproc-per-node=2 lessons/lesson_02_launch_ddp.py
Or alone:       python lessons/lesson_02_launch_ddp.py    (a world of one)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu, started by torchrun
    rank 0: LOCAL_RANK=0 WORLD_SIZE=2 OMP_NUM_THREADS=1, rows per step 15 15 15 5
    rank 1: LOCAL_RANK=1 WORLD_SIZE=2 OMP_NUM_THREADS=1, rows per step 15 15 15 5
    gradient against the whole batch's: max difference ...
    loss on all 100 rows: 15.3 before, 0.241 after 40 steps
    PASS the parameters of 2 ranks differ by 0.0 after each of 40 steps
"""

import argparse
import copy
import hashlib
import inspect
import json
import math
import os
import signal
import sys
from datetime import timedelta
from itertools import islice
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


def train(rank, world_size, device, data, model, epochs, batch_size, seed=0):
    """Train `model` on this rank's share of `data`; yield its rows after every update (A9, A10).

    A generator, for the proof: nothing runs until somebody asks for the next step.
    """
    sampler = DistributedSampler(data, world_size, rank, seed=seed)  # the same data on all ranks
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)  # 15 rows each, not 30
    model = DistributedDataParallel(model.to(device))  # rank 0's parameters go to all, only here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(rows.to(device)), targets.to(device))
            loss.backward()  # DDP averages the gradients of all ranks while this runs
            optimizer.step()  # same start, same gradient: the replicas stay equal
            yield rows, targets


def replicas_agree(model):
    """Return whether all ranks hold the same parameters; each sends 16 bytes to find out (A18)."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        numbers = parameter.detach().cpu().contiguous().flatten()
        digest.update(numbers.view(torch.uint8).numpy())
    checksum = int.from_bytes(digest.digest()[:8], "big", signed=True)
    checksum = torch.tensor(checksum, device=parameter.device)
    lowest, highest = checksum.clone(), checksum.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


# --- The proof ---


def train_alone(device, data, model, epochs, batch_size, seed=0):
    """Train `model` on all of `data`, in one process: what `train` looked like before DDP."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, batch_size, shuffle=True, generator=generator)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(rows.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            yield rows, targets


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


class Watched(TensorDataset):
    """Rows and targets that remember which row numbers they were asked for."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.numbers = []

    def __getitem__(self, number):
        self.numbers.append(number)
        return super().__getitem__(number)


def from_all_ranks(tensor):
    """Return the tensors of all ranks, one below the other. They must have the same shape."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


def parameter_spread(model):
    """Return the largest difference of any parameter between any two ranks (A18)."""
    lowest = parameters_to_vector(model.parameters()).detach().clone()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return (highest - lowest).max().item()


def gradient(model):
    """Return the gradient that the last backward() left, as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def measure(rank, world_size, device, steps, batch_size=30, seed=0):
    """Train the toy on all ranks, and look at it after every step; return this rank's numbers.

    The gradient is compared with that of one process, which takes the rows of all ranks from the
    data of this rank: row 7 must be the same row everywhere (A19).
    """
    rows, targets, model = make_toy(seed)
    data = Watched(rows, targets)
    rows, targets = rows.to(device), targets.to(device)
    one_process = copy.deepcopy(model).to(device)
    loss_first = mse_loss(one_process(rows), targets).item()
    row_counts, spread, grad_diffs = [], [], []
    # An epoch has at least one step, so `steps` epochs are enough.
    training = train(rank, world_size, device, data, model, steps, batch_size, seed)
    for part, _ in islice(training, steps):
        batch = from_all_ranks(torch.tensor(data.numbers[-len(part) :], device=device))
        one_process.zero_grad()
        mse_loss(one_process(rows[batch]), targets[batch]).backward()
        grad_diffs.append((gradient(model) - gradient(one_process)).abs().max())
        one_process.load_state_dict(model.state_dict())  # for the next step
        spread.append(parameter_spread(model))
        row_counts.append(len(part))
    per_epoch = math.ceil(math.ceil(len(rows) / world_size) / (batch_size // world_size))
    facts = {"rows": row_counts[:per_epoch], "param_spread": spread}
    facts["max_grad_diff"] = torch.stack(grad_diffs).max().item()
    facts["loss_first"] = loss_first
    facts["loss_last"] = mse_loss(one_process(rows), targets).item()
    return facts


def collect(facts):
    """Gather what all ranks have measured; return one dict, the same on every rank."""
    environment = {name: os.environ.get(name) for name in ENVIRONMENT.split()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (environment, facts))
    result = {name: facts[name] for name in ("param_spread", "loss_first", "loss_last")}
    result["rows_per_rank"] = [theirs["rows"] for _, theirs in everyone]
    result["environment"] = [environment for environment, _ in everyone]
    grad_diffs = torch.tensor([theirs["max_grad_diff"] for _, theirs in everyone])
    result["max_grad_diff"] = grad_diffs.max().item()  # nan, if one of them is
    return result


ENVIRONMENT = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
ENVIRONMENT += " OMP_NUM_THREADS"


def report(result):
    """Print what a reader wants to know, rank by rank."""
    where = f"over {result['backend']} on {result['device']}"
    print(f"ranks: {result['world_size']}, {where}, started by {result['launcher']}")
    names = ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    for rank, environment in enumerate(result["environment"]):
        shown = " ".join(f"{name}={environment[name]}" for name in names)
        rows = " ".join(map(str, result["rows_per_rank"][rank]))
        print(f"rank {rank}: {shown}, rows per step {rows}")
    print(f"gradient against the whole batch's: max difference {result['max_grad_diff']:.3g}")
    losses = f"{result['loss_first']:.3g} before, {result['loss_last']:.3g} after"
    print(f"loss on all 100 rows: {losses} {len(result['param_spread'])} steps")


def refuse(batch_size, backend, **others):
    """Return what is wrong with the flags, or None (A11)."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    gpus, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if batch_size < world_size:
        return f"--batch-size: must be at least the number of ranks, {world_size}"
    if backend == "nccl" and (gpus < needed or not dist.is_nccl_available()):
        return f"--backend: nccl needs a GPU for each of {needed} ranks; there are {gpus}"
    return None


def who_started_us(local_rank):
    """Return torchrun, launch (which adds the flag --local-rank, A12) or none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "none"
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # Linux: we end with it
    return "torchrun" if local_rank < 0 else "launch"


def main(
    steps: range(1, 10**6) = 40,
    batch_size: range(1, 10**6) = 30,
    seed: range(2**32) = 0,
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    local_rank: range(-1, 64) = -1,
):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    launcher = who_started_us(local_rank)
    rank, world_size, device = join_group(None if backend == "auto" else backend)
    facts = measure(rank, world_size, device, steps, batch_size, seed)
    result = {"lesson": 2, "world_size": world_size, "launcher": launcher}
    result |= {"backend": dist.get_backend(), "device": device.type}
    result |= collect(facts)
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03
    if rank == 0:
        report(result)
    worst = torch.tensor(result["param_spread"]).max().item()
    in_step = worst == 0.0 and result["max_grad_diff"] < 1e-12
    passed = in_step and result["loss_last"] < result["loss_first"]
    claim = f"the parameters of {world_size} ranks differ by {worst} after each of {steps} steps"
    return passed, claim, result


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
    sys.exit(start(main, refuse))
