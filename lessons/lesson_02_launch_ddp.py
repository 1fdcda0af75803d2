"""Lesson 02: how does DistributedDataParallel keep separate processes in step?

A launcher starts one process per device, a rank. Each has its own model, optimizer and
share of the rows. DDP sends rank 0's parameters once, when it wraps the model. In every
step it sends gradients: an all-reduce inside backward() leaves their mean on every rank,
so all ranks make the same update. This script watches from outside that they did, on
rows that nobody else had. (What is sent, the notebook counts.)

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
import json
import math
import os
import sys
from collections import Counter
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


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


def train(model, data, steps, batch_size, device, seed=0):
    """Train `model` on all ranks, each with its share of `data`, which is the same on all ranks."""
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, seed=seed)  # which rank, of how many: it asks the group
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)  # 15 rows each, not 30
    replica = DistributedDataParallel(model.to(device))  # rank 0's parameters go to all, only here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch, done = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(replica(rows.to(device)), targets.to(device))
            loss.backward()  # DDP averages the gradients of all ranks while this runs
            optimizer.step()  # same start, same gradient: the replicas stay equal
            done += 1
            if done == steps:
                break
        epoch += 1


def replicas_agree(model):
    """Return whether all ranks hold the same parameters (not buffers); each sends 16 bytes."""
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
    """Rows and targets that write down which row numbers they are asked for."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        return super().__getitem__(number)


def parameters(model):
    """Return a copy of the parameters, as one vector on the CPU."""
    return parameters_to_vector(model.parameters()).detach().cpu().clone()


def gradient(model):
    """Return the gradient that the last backward() left, as one vector on the CPU."""
    left = [p.new_full(p.shape, math.nan) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in left]).cpu()


def watch(model, data):
    """Return a list, and a hook that adds (rows, gradient, parameters) to it after each update.

    It sends nothing. What one rank has seen is compared with the others' after the training.
    """
    seen = []

    def after_update(*_):
        seen.append((data.asked.copy(), gradient(model), parameters(model)))
        data.asked.clear()

    return seen, after_update


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def spread(vectors):
    """Return the largest difference of any number between any two of these vectors."""
    stacked = torch.stack(vectors)
    return (stacked.amax(0) - stacked.amin(0)).max().item()


def compare(everyone, start, rows, targets):
    """Compare what the ranks have seen with each other, and with one process on all their rows.

    That process takes the rows from the data of this rank: row 7 must be the same row everywhere.
    """
    one_process = copy.deepcopy(start)
    sgd = torch.optim.SGD(one_process.parameters(), lr=0.1)
    facts = {"loss_first": mse_loss(one_process(rows), targets).item(), "param_spread": []}
    grad_diffs, update_diffs = [torch.zeros(())], [torch.zeros(())]
    for seen in zip(*everyone, strict=False):  # of all ranks, after the same update
        numbers, gradients, replicas = zip(*seen, strict=True)
        batch = list(chain(*numbers))
        one_process.zero_grad()
        mse_loss(one_process(rows[batch]), targets[batch]).backward()
        grad_diffs += [(theirs - gradient(one_process)).abs().max() for theirs in gradients]
        sgd.step()
        update_diffs += [(theirs - parameters(one_process)).abs().max() for theirs in replicas]
        facts["param_spread"].append(spread(replicas))
        nn.utils.vector_to_parameters(replicas[0], one_process.parameters())  # for the next step
    facts["max_grad_diff"] = torch.stack(grad_diffs).max().item()  # nan, if one of them is
    facts["max_update_diff"] = torch.stack(update_diffs).max().item()
    facts["worst_spread"] = torch.tensor(facts["param_spread"] or [math.nan]).max().item()
    facts["loss_last"] = mse_loss(one_process(rows), targets).item()
    facts["untrained"] = (parameters(one_process) == parameters(start)).sum().item()
    return facts


def checksum_works(model, equal):
    """Return whether `replicas_agree` is right now, and sees a last bit that one rank changes."""
    world_size = dist.get_world_size()
    answers = [replicas_agree(model) == equal]
    for number in chain(*(parameter.detach().view(-1) for parameter in model.parameters())):
        kept = number.clone()
        if dist.get_rank() == world_size - 1:
            number.copy_(torch.nextafter(number, torch.full_like(number, math.inf)))
        answers.append(replicas_agree(model) == (world_size == 1))
        number.copy_(kept)
    return all(chain(*from_all_ranks(answers)))


def steps_per_epoch(length, world_size, batch_size):
    """Return how many steps an epoch has: all ranks get as many rows, in batches of their own."""
    return math.ceil(math.ceil(length / world_size) / (batch_size // world_size))


def wrong_in_rows(batches, length, batch_size):
    """Return what is wrong with the row numbers of all steps and ranks, or None.

    batches[step][rank] are the row numbers of that rank in that step.
    """
    world_size = len(batches[0]) if batches else 1
    share, each = batch_size // world_size, math.ceil(length / world_size)
    per_epoch, beginnings = steps_per_epoch(length, world_size, batch_size), set()
    for number, step in enumerate(batches):
        sizes, wanted = [len(rows) for rows in step], min(share, each - number % per_epoch * share)
        if sizes != [wanted] * world_size:
            return f"step {number + 1}: {sizes} rows, rank by rank, and not {wanted} each"
    for first in range(0, len(batches), per_epoch):
        epoch = batches[first : first + per_epoch]
        dealt = [*chain(*chain(*epoch))]
        repeated = len(dealt) - len(Counter(dealt))
        if repeated > -length % world_size:  # so many fill the last places: 102 for 100 rows
            return f"epoch {first // per_epoch}: {repeated} rows went to two ranks, or came twice"
        if len(epoch) == per_epoch and len(Counter(dealt)) < length:
            return f"epoch {first // per_epoch}: only {len(Counter(dealt))} of {length} rows came"
        if len(dealt) >= 8 and tuple(dealt[:8]) in beginnings:
            return f"epoch {first // per_epoch}: the order is that of an earlier one"
        beginnings.add(tuple(dealt[:8]))
    return None


def wrong_in_group(world_size):
    """Return what is wrong if a process trains without some of those that were started, or None."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    together = world_size == dist.get_world_size() == started
    return None if together else f"{started} processes were started; the group has {world_size}"


def wrong_in_numbers(facts, made, steps):
    """Return all that is wrong with the numbers: a list of sentences."""
    rules = {
        f"updates, rank by rank: {made}, and not {steps}": set(made) == {steps},
        "the replicas are not equal": facts["worst_spread"] == 0.0,
        "a gradient is not that of the whole batch": facts["max_grad_diff"] < 1e-12,
        "an update is not that of one process": facts["max_update_diff"] < 1e-12,
        "some parameters were never updated": facts["untrained"] == 0,
        "the loss has not fallen": facts["loss_last"] < facts["loss_first"],
        "the checksum does not tell equal replicas from others": facts["checksum_works"],
    }
    return [sentence for sentence, holds in rules.items() if not holds]


ENVIRONMENT = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
ENVIRONMENT += " OMP_NUM_THREADS"


def report(numbers):
    """Print what a reader wants to know, rank by rank."""
    where = f"over {numbers['backend']} on {numbers['device']}"
    print(f"ranks: {numbers['world_size']}, {where}, started by {numbers['launcher']}")
    names = ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    for rank, environment in enumerate(numbers["environment"]):
        shown = " ".join(f"{name}={environment[name]}" for name in names)
        rows = " ".join(map(str, numbers["rows_per_rank"][rank]))
        print(f"rank {rank}: {shown}, rows per step {rows}")
    print(f"gradient against the whole batch's: max difference {numbers['max_grad_diff']:.3g}")
    losses = f"{numbers['loss_first']:.3g} before, {numbers['loss_last']:.3g} after"
    print(f"loss on all 100 rows: {losses} {len(numbers['param_spread'])} steps")


def observe(args, device):
    """Train the toy under observation; return what this rank has seen, and the numbers of all."""
    rows, targets, model = make_toy(args.seed)
    data, start = Watched(rows, targets), copy.deepcopy(model)
    with torch.no_grad():
        model.weight += dist.get_rank()  # the replicas start apart: DDP has to mend that
    seen, after_update = watch(model, data)
    handle = register_optimizer_step_post_hook(after_update)
    train(model, data, args.steps, args.batch_size, device, args.seed)
    handle.remove()
    everyone = from_all_ranks(seen)
    facts = compare(everyone, start, rows, targets)
    off = torch.tensor(from_all_ranks(facts["max_grad_diff"]))  # where the data differ, this does
    facts["max_grad_diff"] = off.max().item()
    facts["checksum_works"] = checksum_works(model, facts["worst_spread"] == 0.0)
    return everyone, facts


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group(None if args.backend == "auto" else args.backend)
    everyone, facts = observe(args, device)
    batches = [[rows for rows, *_ in step] for step in zip(*everyone, strict=False)]
    wrong = wrong_in_numbers(facts, [len(seen) for seen in everyone], args.steps)
    others = wrong_in_group(world_size), wrong_in_rows(batches, 100, args.batch_size)
    wrong += filter(None, others)
    per_epoch = steps_per_epoch(100, world_size, args.batch_size)
    numbers = {"lesson": 2, "world_size": world_size, "launcher": who_started_us(args)}
    numbers |= {"backend": dist.get_backend(), "device": device.type}
    numbers["rows_per_rank"] = [[len(rows) for rows, *_ in seen[:per_epoch]] for seen in everyone]
    numbers["environment"] = from_all_ranks({n: os.environ.get(n) for n in ENVIRONMENT.split()})
    for name in ("param_spread", "max_grad_diff", "loss_first", "loss_last"):
        numbers[name] = facts[name]
    dist.destroy_process_group()  # a rank that failed has left without this: see lesson 03
    if rank == 0:
        report(numbers)
    claim = f"the parameters of {world_size} ranks differ by {facts['worst_spread']}"
    return not wrong, "; ".join([f"{claim} after each of {args.steps} steps", *wrong]), numbers


def who_started_us(args):
    """Return torchrun, launch (which hands over a flag --local-rank) or none."""
    by_torchrun = "torchrun" if args.local_rank is None else "launch"
    return by_torchrun if "TORCHELASTIC_RUN_ID" in os.environ else "none"


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**5), default=40, help="%(default)s")
    size = {"type": whole(1, 10**6), "default": 30}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    backends = {"choices": ("auto", "gloo", "nccl"), "default": "auto"}
    parser.add_argument("--backend", **backends, help="auto is nccl if there are enough GPUs")
    parser.add_argument("--local-rank", type=whole(0, 63), help="torch.distributed.launch adds it")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    world_size, gpus = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.device_count()
    if args.batch_size < world_size:
        parser.error(f"argument --batch-size: must be at least the number of ranks, {world_size}")
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if args.backend == "nccl" and (gpus < needed or not dist.is_nccl_available()):
        answer = f"nccl needs a GPU for each of {needed} ranks; there are {gpus}"
        parser.error(f"argument --backend: {answer}")
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
