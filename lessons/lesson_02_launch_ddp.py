"""Lesson 02: how does DistributedDataParallel keep separate processes in step?

In lesson 01 one process drove all replicas, and the master sent the parameters
out in every step. Now a launcher starts one process per replica. Each process
has its own data loader and its own optimizer. Parameters are sent once, when the
model is wrapped. In every step DDP sends only gradients: an all-reduce inside
backward() leaves their average on every rank. All ranks then make the same
update. After every step this script gathers the parameters, to check that they did.

Run it:         bash scripts/lesson_02.sh --nproc 2 [--launcher torchrun|launch]
What that does: torchrun --standalone --nproc-per-node=2 lessons/lesson_02_launch_ddp.py
In 2019:        python -m torch.distributed.launch --nproc_per_node=2 --nnodes=1 ...
A world of one: python lessons/lesson_02_launch_ddp.py

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
import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


def make_loader(rank, world_size, rows, targets, batch_size, seed=0):
    """Return a loader of this rank's share: batches of (rows, targets, row numbers).

    The sampler deals out row numbers, so every rank must hold the same `rows` (claims B5, A19).
    Each rank takes `batch_size // world_size` rows in a step (claim A13).
    """
    data = TensorDataset(rows, targets, torch.arange(len(rows)))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=seed)
    return DataLoader(data, batch_size // world_size, sampler=sampler)


def gather_from_ranks(tensor):
    """Return the tensors of all ranks, stacked: shape (world_size, *tensor.shape)."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def parameter_spread(model):
    """Return the largest difference of any parameter between rank 0 and any rank (claim A18)."""
    copies = gather_from_ranks(nn.utils.parameters_to_vector(model.parameters()).detach())
    return (copies - copies[0]).abs().max().item()


def train(rank, world_size, device, steps, batch_size=30, seed=0, wrap=DistributedDataParallel):
    """Train the toy on all ranks; return this rank's measurements as a dict.

    `wrap(model)` makes the replicas cooperate. After each step the parameters of all ranks are
    compared, and this rank's gradient with that of the whole batch: the rows of all ranks together.
    """
    rows, targets, model = make_toy(seed)
    loader = make_loader(rank, world_size, rows, targets, batch_size, seed)
    rows, targets, model = rows.to(device), targets.to(device), model.to(device)
    mean_loss = nn.functional.mse_loss
    loss_first = mean_loss(model(rows), targets).item()
    replica = wrap(model)  # DDP sends rank 0's parameters to all ranks here, and never again (A9)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    rows_per_step, spread, grad_diff = [], [], 0.0

    for step in range(steps):
        if step % len(loader) == 0:
            loader.sampler.set_epoch(step // len(loader))  # else each epoch has the same order
            batches = iter(loader)
        batch, wanted, numbers = (part.to(device) for part in next(batches))

        whole = copy.deepcopy(model)
        whole.zero_grad()
        everyone = gather_from_ranks(numbers).flatten()
        mean_loss(whole(rows[everyone]), targets[everyone]).backward()

        optimizer.zero_grad()
        mean_loss(replica(batch), wanted).backward()  # the all-reduce of DDP happens in here
        optimizer.step()

        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        grad_diff = max(grad_diff, *((a.grad - b.grad).abs().max().item() for a, b in pairs))
        spread.append(parameter_spread(model))
        if step < len(loader):
            rows_per_step.append(len(batch))

    loss_last = mean_loss(model(rows), targets).item()
    facts = {"rows": rows_per_step, "param_spread": spread, "max_grad_diff": grad_diff}
    return facts | {"loss_first": loss_first, "loss_last": loss_last}


# --- The experiment ---

ENVIRONMENT = """RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
OMP_NUM_THREADS"""


def check_backend(parser, backend, local_world_size):
    """End with one line on stderr if `backend` can't work here (claim A11)."""
    gpus = torch.cuda.device_count()
    if backend not in (None, "gloo", "nccl"):
        parser.error(f"argument --backend: must be gloo or nccl, not {backend!r}")
    if backend == "nccl" and (gpus < local_world_size or not dist.is_nccl_available()):
        parser.error(f"--backend nccl needs a GPU per rank: {local_world_size}, there are {gpus}")


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, steps=40, batch_size=30)
    parser.add_argument("--backend", help="gloo or nccl (default: what the machine allows)")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch's `launch`")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    args = parser.parse_args(argv)

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size < world_size:
        parser.error(f"argument --batch-size: must be at least the number of ranks, {world_size}")
    check_backend(parser, args.backend, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if args.check:
        return 0
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "none"
    if args.local_rank is not None:  # claim A12: how `launch` tells a process its number
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
        launcher = "launch"

    if launcher != "none":  # Linux: if the launcher is killed, its ranks end as well
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    rank, world_size, device = setup(args.backend)
    facts = {name: os.environ.get(name) for name in ENVIRONMENT.split()}
    ours = train(rank, world_size, device, args.steps, args.batch_size, args.seed)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (facts, ours))
    backend = dist.get_backend()
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03

    result = {
        "rows_per_rank": [theirs.pop("rows") for _, theirs in everyone],
        "launcher": launcher,
        "environment": [facts for facts, _ in everyone],
        **everyone[0][1],
        "max_grad_diff": max(theirs["max_grad_diff"] for _, theirs in everyone),
    }
    in_step = max(result["param_spread"]) == 0.0 and result["max_grad_diff"] < 1e-12
    passed = in_step and ours["loss_last"] < ours["loss_first"]
    if rank != 0:
        return 0 if passed else 1
    print(f"ranks: {world_size}, over {backend} on {device.type}, started by {result['launcher']}")
    for number, facts in enumerate(result["environment"]):
        shown = " ".join(f"{n}={facts[n]}" for n in ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
        rows = " ".join(map(str, result["rows_per_rank"][number]))
        print(f"rank {number}: {shown}, rows per step {rows}")
    print(f"gradient against the whole batch's: max difference {result['max_grad_diff']:.3g}")
    losses = f"{result['loss_first']:.3g} before, {result['loss_last']:.3g} after"
    print(f"loss on all 100 rows: {losses} {args.steps} steps")
    print(
        f"{'PASS' if passed else 'FAIL'} the parameters of {world_size} ranks differ by "
        f"{max(result['param_spread'])} after each of {args.steps} steps"
    )
    if args.json:
        common = {"lesson": 2, "world_size": world_size, "backend": backend, "device": device.type}
        print(json.dumps({**common, "passed": passed, **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
