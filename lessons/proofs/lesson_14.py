"""What lesson 14 claims: the ranks of all machines are one job, and hold one model.

The script knows nothing of this file; see lesson_02.py. The watcher has looked at the sockets of
each rank that has joined: who is connected with whom, and at which address? What rank 0 tells
people to type is read by torchrun's own parser.
"""

import os
from collections import defaultdict
from itertools import combinations

import lesson_14_several_machines as lesson
import torch
from lockstep.watch import claims
from torch.distributed.run import get_args_parser
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

KEEP_VALUES = 10**9  # the last ones are enough: one process makes all updates again
LIMITS = {"--steps": (1, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
LIMITS["--local-rank"] = (0, 63)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    rows, targets, model = lesson.make_toy(args.seed)
    if wrong := claims.wrong_in_optimizer(job, model):
        return claims.Verdict("the ranks of all machines train one model", [wrong], {}, [])
    numbers = numbers_of(job, started) | compare_with_one_process(job, rows, targets, model)
    spread = claims.worst([pair["differ_by"] for pair in numbers["pairs"]])
    rules = {
        "two replicas differ": spread == 0.0,
        "one process gets other parameters": numbers["max_param_diff"] < 1e-12,
        "the loss has not fallen": numbers["loss_last"] < numbers["loss_first"],
    }
    wrong = [sentence for sentence, holds in rules.items() if not holds]
    wrong += [claims.wrong_in_count(job, args.steps), claims.wrong_in_group(job, started)]
    wrong += [claims.wrong_in_replicas(job), claims.wrong_in_rows(job, 100, args.batch_size)]
    wrong += [wrong_in_order(job, args.seed), wrong_in_places(numbers), wrong_in_pairs(numbers)]
    wrong += [wrong_in_typed(job, numbers), wrong_in_words(job, numbers, args.steps)]
    off = f"off by {spread} among them, by {numbers['max_param_diff']:.3g} from one process"
    claim = f"{started} ranks hold the same parameters: {off}"
    return claims.Verdict(claim, list(filter(None, wrong)), numbers, lines_of(numbers))


def numbers_of(job, started):
    """Return what was seen of the ranks and of each pair of them, for --json."""
    said = [event["text"] for event in job[0].of("said")]
    return {
        "world_size": started,
        "backend": job[0].group["backend"],
        "device": job[0].optimizers[0]["device"],
        "nodes": len({rank.group["environment"]["GROUP_RANK"] for rank in job.values()}),
        "ranks": [place_of(rank.group) for rank in job.values()],
        "pairs": [pair_of(job, *pair) for pair in combinations(job, 2)],
        "typed": [line.split()[5:] for line in said if line.startswith("to type on node ")],
    }


def place_of(group):
    """Return where a rank is, as its launcher has told it, and where gloo listens for it."""
    told = group["environment"]
    names = {"node": "GROUP_RANK", "local_rank": "LOCAL_RANK", "ranks_here": "LOCAL_WORLD_SIZE"}
    place = {name: int(told[variable]) for name, variable in names.items()}
    ports = [str(there[1]) for _, there in group["connections"]]
    own = [address for address, _ in group["listens"] if address not in ("::", "0.0.0.0")]
    return place | {"at_store": told["MASTER_PORT"] in ports, "address": own[0] if own else "?"}


def pair_of(job, one, other):
    """Return what was seen of two ranks: who has called the other, where, and how far apart."""
    caller, address = call_between(job, one, other)
    off = claims.off(*(claims.as_vector(job[rank].values_at_end()) for rank in (one, other)))
    return {"ranks": [one, other], "caller": caller, "met_at": address, "differ_by": off}


def call_between(job, one, other):
    """Return (who of two ranks has called the other, at which address); None if nobody has."""
    for here, there in job[one].group["connections"]:
        if [there, here] in job[other].group["connections"]:
            return (other, here[0]) if here in job[one].group["listens"] else (one, there[0])
    return None, None


def wrong_in_pairs(numbers):
    """Over gloo each pair of ranks is connected, unless it may wait until they have to talk."""
    eager = numbers["backend"] == "gloo" and "TORCH_GLOO_LAZY_INIT" not in os.environ
    missing = [pair["ranks"] for pair in numbers["pairs"] if pair["met_at"] is None]
    return f"ranks {missing[0]} have no connection" if eager and missing else None


def ranks_by_machine(numbers):
    """Return how many ranks each machine has, as its first rank was told."""
    return [place["ranks_here"] for place in numbers["ranks"] if place["local_rank"] == 0]


def wrong_in_places(numbers):
    """There are several machines; the ranks count through the first, then the next, and so on."""
    places = [(place["node"], place["local_rank"]) for place in numbers["ranks"]]
    counts = ranks_by_machine(numbers)
    if places != [(node, local) for node, count in enumerate(counts) for local in range(count)]:
        return "the ranks do not count through machine 0, then machine 1, and so on"
    return None if len(counts) >= 2 else f"ranks of {len(counts)} machines are here"


def wrong_in_typed(job, numbers):
    """torchrun reads in the line of each machine what this machine was told, and nothing else."""
    told, parser = job[0].group["environment"], get_args_parser()
    counts = ranks_by_machine(numbers)
    if len(numbers["typed"]) != len(counts):
        return f"it tells what to type on {len(numbers['typed'])} of {len(counts)} machines"
    wanted = vars(parser.parse_args(["train.py"])) | {"nnodes": str(len(counts))}
    wanted |= {"master_addr": told["MASTER_ADDR"], "master_port": int(told["MASTER_PORT"])}
    for node, typed in enumerate(numbers["typed"]):
        wanted |= {"node_rank": node, "nproc_per_node": str(counts[node])}
        try:
            read = vars(parser.parse_args([*typed, "train.py"]))
        except SystemExit:
            return f"torchrun refuses the line for node {node}"
        for name, value in read.items():
            if value != wanted[name]:
                line = f"the line for node {node} tells torchrun {name} = {value}"
                return f"{line}, and it is {wanted[name]}"
    return None


def wrong_in_order(job, seed):
    """The order of the rows in the first epoch comes from the seed, and the share from the rank."""
    for rank, seen in job.items():
        asked = [row for update in seen.updates for row in update["asked"]]
        order = list(DistributedSampler(range(100), len(job), rank, seed=seed))
        if asked[: len(order)] != order[: len(asked)]:
            return "the first epoch's order of the rows does not come from the seed"
    return None


def compare_with_one_process(job, rows, targets, model):
    """Let one process make all updates, with the rows of all ranks; return what comes of it."""
    numbers = {"loss_first": mse_loss(model(rows), targets).item()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in claims.steps(job):
        batch = [row for update in step for row in update["asked"]]
        sgd.zero_grad()
        mse_loss(model(rows[batch]), targets[batch]).backward()
        sgd.step()
    alone, end = claims.numbers_of(model, lambda parameter: parameter), job[0].values_at_end()
    claims.fill(model, end)
    numbers["loss_last"] = mse_loss(model(rows), targets).item()
    return numbers | {"max_param_diff": claims.off(claims.as_vector(end), alone)}


def wrong_in_words(job, numbers, steps):
    """Rank 0 has told who is where, and the losses; nobody else has told anything."""
    where = f"over {numbers['backend']} on {numbers['device']}"
    lines = [f"ranks: {numbers['world_size']}, machines: {numbers['nodes']}, {where}"]
    for rank, place in enumerate(numbers["ranks"]):
        who = f"node {place['node']}, local rank {place['local_rank']}"
        lines.append(f"rank {rank}: {who}, on {job[rank].group['host']}")
    losses = f"{numbers['loss_first']:.3g} before, {numbers['loss_last']:.3g} after {steps} steps"
    return claims.wrong_in_words(job, [*lines, f"loss on all 100 rows: {losses}"])


def lines_of(numbers):
    """Return which ranks meet at which address, rank by rank."""
    lines = []
    for rank, place in enumerate(numbers["ranks"]):
        met = defaultdict(list)
        for pair in numbers["pairs"]:
            if rank in pair["ranks"]:
                met[pair["met_at"] or "?"].append(str(sum(pair["ranks"]) - rank))
        meets = ", ".join(f"{', '.join(others)} at {address}" for address, others in met.items())
        lines.append(f"rank {rank} is at {place['address']} and meets {meets}")
    return lines
