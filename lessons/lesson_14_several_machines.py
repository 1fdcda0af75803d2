"""Lesson 14: how do ranks on several machines become one job?

Start torchrun on each machine; say how many there are, which one this is, and where the first
is. The launchers meet there and number all ranks. This script finds out who is where.

Run it:   bash scripts/lesson_14.sh --nproc 4   (two machines rehearsed on one; ranks on both)
For real: torchrun --nnodes=2 --node-rank=K --nproc-per-node=2 --master-addr=ADDRESS_OF_0
              --master-port=29500 lessons/lesson_14_several_machines.py   (one line; K is 0, then 1)

Output to expect on a CPU:

    4 ranks on 2 machines, over gloo on cpu
    rank 0: node 0, local rank 0, at 127.0.0.2; meets 1, 2, 3 at 127.0.0.2
    rank 1: node 0, local rank 1, at 127.0.0.2; meets 0, 2, 3 at 127.0.0.2
    rank 2: node 1, local rank 0, at 127.0.0.3; meets 0, 1 at 127.0.0.2, 3 at 127.0.0.3
    rank 3: node 1, local rank 1, at 127.0.0.3; meets 0, 1 at 127.0.0.2, 2 at 127.0.0.3
    to type on node 1: --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=127.0.0.2 ...
    PASS 4 ranks hold the same parameters: off by 0.0 among them, by ... from one process
"""

import argparse
import copy
import json
import math
import os
import socket
import stat
import sys
from collections import Counter
from datetime import timedelta
from itertools import chain, combinations

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


def what_to_type(node, nodes, ranks_here, first, port):
    """Return the flags of torchrun on machine `node`; `first` is the address of machine 0."""
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",  # which machine this is, from 0: the only one that differs
        f"--nproc-per-node={ranks_here}",  # one for each of its GPUs; machines may differ here, too
        f"--master-addr={first}",  # where to meet, and not: who I am
        f"--master-port={port}",
    ]


def train(model, data, steps, batch_size, device, seed=0):
    """Train `model` on this rank's share of `data`: the loop of lesson 02. No machine is in it."""
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, seed=seed)  # which rank, of how many: it asks the group
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)  # 6 rows each, not 24
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


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


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


def watch(data, one_process):
    """Return a list, and a hook that adds the rows of all ranks to it after each update.

    It lets `one_process` make the same update, on these rows of this rank's data.
    """
    batches = []
    alone = torch.optim.SGD(one_process.parameters(), lr=0.1)

    def after_update(optimizer, *_):
        if optimizer is alone:
            return
        batches.append(from_all_ranks(data.asked))  # batches[step][rank]: row numbers
        data.asked.clear()
        rows, targets = (tensor[list(chain(*batches[-1]))] for tensor in data.tensors)
        alone.zero_grad()
        mse_loss(one_process(rows), targets).backward()
        alone.step()

    return batches, after_update


def sockets_of_this_process():
    """Return (where it listens, its connections as (here, there)): ends are (address, port)."""
    listens, connections = [], []
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if number < 3 or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # (to make a socket object of a file fails, and leaves its copy open)
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listens.append(copy.getsockname()[:2])
                else:
                    connections.append((copy.getsockname()[:2], copy.getpeername()[:2]))
        except OSError:
            pass  # closed since, or not connected
    return listens, connections


def own_place(rank):
    """Return where this rank runs, as its launcher has told it, and its sockets."""
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    node, local_rank, ranks_here, nodes = (int(os.environ[name]) for name in names)
    place = {"rank": rank, "node": node, "local_rank": local_rank, "ranks_here": ranks_here}
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place |= {"nodes": nodes, "first": first, "port": port, "rendezvous": "static"}
    place |= {"other flags": [], "typed": what_to_type(node, nodes, ranks_here, first, port)}
    place["listens"], place["connections"] = sockets_of_this_process()
    ends = [there for _, there in place["connections"]]
    place["at_store"] = any(end_port == port for _, end_port in ends)
    return place


def as_torchrun_reads(typed):
    """Return {flag: value} of what stands in a line for torchrun, by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    read, untold = (parser.parse_args([*flags, "train.py"]) for flags in (typed, []))
    known = {"node_rank", "nnodes", "nproc_per_node", "master_addr", "master_port"}
    known |= {"standalone", "rdzv_backend"}
    told = [name for name, value in vars(read).items() if value != getattr(untold, name)]
    return {
        "other flags": sorted(set(told) - known),
        "node": int(read.node_rank),
        "nodes": int(read.nnodes),
        "ranks_here": int(read.nproc_per_node),
        "first": None if read.standalone else read.master_addr,
        "port": int(read.master_port),
        "rendezvous": read.rdzv_backend,
    }


def who_called(places):
    """Return {(rank, other): (who of the two has called, at which address)} for each pair."""
    calls = {}
    for (rank, one), (other, two) in combinations(enumerate(places), 2):
        reversed_ends = [(there, here) for here, there in two["connections"]]
        for here, there in set(one["connections"]).intersection(reversed_ends):
            if here in one["listens"]:
                calls[rank, other] = (other, here[0])
            else:
                calls[rank, other] = (rank, there[0])
    return calls


def hear_from_all(rank, device):
    """Exchange 8 bytes with each other rank; return {rank: what it has sent}: its number."""
    heard = {}
    for one, other in combinations(range(dist.get_world_size()), 2):
        if rank == one:
            dist.send(torch.tensor(rank, device=device), other)
        if rank in (one, other):
            heard[one + other - rank] = torch.tensor(-1, device=device)
        if rank == other:
            dist.recv(heard[one], one)
            dist.send(torch.tensor(rank, device=device), one)
        if rank == one:
            dist.recv(heard[other], other)
    return {peer: number.item() for peer, number in heard.items()}


def wrong_in_places(places):
    """Return what is wrong with who is where, told by all ranks in their order, or None."""
    for rank, place in enumerate(places):
        if place["rank"] != rank:
            return f"rank {rank} believes that it is rank {place['rank']}"
        for name, value in as_torchrun_reads(place["typed"]).items():
            if value != place[name]:
                line = f"the line for node {place['node']}"
                return f"{line} tells torchrun {name} = {value}, and it is {place[name]}"
    counted = [place["ranks_here"] for place in places if place["local_rank"] == 0]
    expected = [(node, local) for node, ranks in enumerate(counted) for local in range(ranks)]
    if [(place["node"], place["local_rank"]) for place in places] != expected:
        return "the ranks do not count through machine 0, then machine 1, and so on"
    if len(counted) != places[0]["nodes"] or len(counted) < 2:
        return f"ranks of {len(counted)} machines are here"
    return None


def wrong_order(batches, length, seed):
    """Return what is wrong if this rank's rows do not come in the order of the seed, or None."""
    rows = list(chain(*(step[dist.get_rank()] for step in batches)))
    order = list(DistributedSampler(range(length), seed=seed))
    same = rows[: len(order)] == order[: len(rows)]
    return None if same else "the first epoch's order of the rows does not come from the seed"


def measure(rank, device, args):
    """Train on all ranks of all machines; return (what they found, what is wrong with it)."""
    rows, targets, model = make_toy(args.seed)
    data, one_process = Watched(rows, targets), copy.deepcopy(model)
    with torch.no_grad():
        model.weight += rank  # the replicas start apart: DDP has to mend that
    batches, after_update = watch(data, one_process)
    loss_first = mse_loss(one_process(rows), targets).item()
    handle = register_optimizer_step_post_hook(after_update)
    train(model, data, args.steps, args.batch_size, device, args.seed)
    handle.remove()
    parameters = parameters_to_vector(model.parameters()).detach().cpu()
    heard = hear_from_all(dist.get_rank(), device)
    everyone = from_all_ranks((own_place(rank), parameters, heard))
    places, replicas, heard = zip(*everyone, strict=True)
    alone = parameters_to_vector(one_process.parameters()).detach()
    numbers = {"loss_first": loss_first, "loss_last": mse_loss(one_process(rows), targets).item()}
    numbers["max_param_diff"] = (parameters - alone).abs().max().item()
    done = None if len(batches) == args.steps else f"{len(batches)} steps, not {args.steps}"
    dealt = wrong_in_rows(batches, len(rows), args.batch_size)
    dealt = dealt or wrong_order(batches, len(rows), args.seed)
    talk = None if all(map(is_right, heard)) else "a rank has heard from another one than it asked"
    return numbers | describe(places, replicas), [done, dealt, wrong_in_places(places), talk]


def is_right(heard):
    """Return whether each rank has sent its own number."""
    return all(peer == number for peer, number in heard.items())


def describe(places, replicas):
    """Return the table of ranks and of pairs of ranks, as lists of dicts."""
    calls, pairs, ranks = who_called(places), [], []
    for one, other in combinations(range(len(places)), 2):
        caller, address = calls.get((one, other), (None, None))
        facts = {"ranks": [one, other], "caller": caller, "met_at": address}
        facts["differ_by"] = (replicas[one] - replicas[other]).abs().max().item()
        pairs.append(facts)
    for place in places:
        names = ("node", "local_rank", "ranks_here", "at_store")
        at = [address for address, _ in place["listens"] if address not in ("::", "0.0.0.0")]
        ranks.append({name: place[name] for name in names} | {"address": at[0] if at else "?"})
    typed = [place["typed"] for place in places if place["local_rank"] == 0]
    return {"ranks": ranks, "pairs": pairs, "nodes": places[0]["nodes"], "typed": typed}


def report(numbers):
    """Print who is where, and which ranks meet at which address."""
    where = f"over {numbers['backend']} on {numbers['device']}"
    print(f"{numbers['world_size']} ranks on {numbers['nodes']} machines, {where}")
    for rank, place in enumerate(numbers["ranks"]):
        by_address = {}
        for pair in numbers["pairs"]:
            if rank in pair["ranks"]:
                others = by_address.setdefault(pair["met_at"] or "?", [])
                others.append(str(sum(pair["ranks"]) - rank))
        meets = ", ".join(f"{', '.join(found)} at {at}" for at, found in by_address.items())
        who = f"node {place['node']}, local rank {place['local_rank']}"
        print(f"rank {rank}: {who}, at {place['address']}; meets {meets}")
    last = len(numbers["typed"]) - 1
    print(f"to type on node {last}: {' '.join(numbers['typed'][last])}")


def wrong_in_numbers(numbers):
    """Yield what is wrong with replicas, connections and the loss."""
    spread = max(pair["differ_by"] for pair in numbers["pairs"])
    if spread != 0.0:
        yield f"two replicas differ by {spread}"
    if not numbers["max_param_diff"] < 1e-12:
        yield f"one process differs by {numbers['max_param_diff']:.3g}"
    if not numbers["loss_last"] < numbers["loss_first"]:
        yield "the loss has not fallen"
    if numbers["device"] == "cpu" and not all(pair["met_at"] for pair in numbers["pairs"]):
        yield "two ranks have no connection"


def main(args):
    """Be one rank; return whether the claim holds, the claim, and the numbers for --json."""
    rank, world_size, device = join_group()
    numbers = {"lesson": 14, "world_size": world_size}
    numbers |= {"backend": dist.get_backend(), "device": device.type}
    measured, wrong = measure(rank, device, args)
    numbers |= measured
    found = from_all_ranks([*filter(None, wrong), *wrong_in_numbers(numbers)])
    dist.destroy_process_group()
    if rank == 0:
        report(numbers)
    wrong = dict.fromkeys(chain(*found))  # of all ranks, each once
    spread = max(pair["differ_by"] for pair in numbers["pairs"])
    off = f"off by {spread} among them, by {numbers['max_param_diff']:.3g} from one process"
    claim = f"{world_size} ranks hold the same parameters: {off}"
    return not wrong, "; ".join([claim, *wrong]), numbers


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 10**6), default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**6), default=24, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--local-rank", type=int, help="given by torch.distributed.launch")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("a launcher starts its ranks: bash scripts/lesson_14.sh; see --help")
    if args.batch_size < int(os.environ["WORLD_SIZE"]):
        ranks = os.environ["WORLD_SIZE"]
        parser.error(f"argument --batch-size: must be at least the number of ranks, {ranks}")
    return args


# --- The frame: the same in every lesson ---


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
