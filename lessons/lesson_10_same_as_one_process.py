"""Lesson 10: what must hold so that N ranks train exactly as one process?

One process takes a whole batch and the mean loss over its tokens. N ranks cut the batch, each
cuts its part into micro-batches, and backward() adds up. After each update both must hold the
same parameters. Eleven conditions for that are also removed, one at a time: what does each spoil?

Run it:     bash scripts/lesson_10.sh --nproc 2 [--micro-batches 4]
Or alone:   python lessons/lesson_10_same_as_one_process.py    (a world of one)

Output to expect on a CPU:

    2 ranks over gloo on cpu, 16 texts in a step; parameters off by, if kept, and if removed:
    ...
    bytes for the all-reduce of an update, 3 micro-batches: 640 with no_sync, 1920 without
    PASS 2 ranks equal one process (off by ...); a removed condition is off by ... or more
"""

import argparse
import contextlib
import json
import math
import os
import sys
from datetime import timedelta
from itertools import chain
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --- The technique ---


def deal(rows, epoch, batch_size, rank, world_size, seed=0):
    """Return this rank's part of each batch of an epoch: row numbers, each row on one rank."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
    return [batch[rank::world_size] for batch in order.split(batch_size)]  # 15 rows: 8 and 7


def loss_sum(outputs, targets):
    """Return the sum of the losses of all tokens; a target of -100 is padding, and counts 0."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def count_everywhere(count, device):
    """Return the sum of the counts of all ranks; every rank must call this."""
    total = torch.tensor(count, dtype=torch.float64, device=device)  # exact, in 8 bytes
    dist.all_reduce(total)
    return total.item()


def train_step(replica, optimizer, micro_batches):
    """Make one update with the mean loss over the tokens of all ranks and micro-batches.

    `replica` is a DistributedDataParallel. Every rank must call this, with at least one
    micro-batch, which may be empty; the ranks need not have equally many.
    """
    mine = sum(int((targets != -100).sum()) for _, targets in micro_batches)
    total = max(1, count_everywhere(mine, micro_batches[0][1].device))  # 0: nobody has a token
    # DDP will divide the sum over ranks by their number. So each token is left with 1 / total.
    weight = dist.get_world_size() / total
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():  # the forward, too
            (loss_sum(replica(inputs), targets) * weight).backward()  # the last one sends
    optimizer.step()


def train(replica, optimizer, texts, targets, steps, batch_size, micro_batches, seed=0):
    """Train on all ranks; `batch_size` texts of all ranks make a step."""
    rank, world_size, epoch, done = dist.get_rank(), dist.get_world_size(), 0, 0
    while done < steps:
        for mine in deal(len(texts), epoch, batch_size, rank, world_size, seed)[: steps - done]:
            parts = mine.tensor_split(micro_batches)  # some may be empty
            train_step(replica, optimizer, [(texts[part], targets[part]) for part in parts])
            done += 1
        epoch += 1


# --- The proof ---


class Model(nn.Module):
    """Predicts the next token from this one. `mask`, if there is one, drops some features."""

    def __init__(self, seed, device, mask=None):
        super().__init__()
        torch.default_generator.manual_seed(seed)  # the CPU's; the model is made there
        self.embed = nn.Embedding(8, 5, dtype=torch.float64)
        self.predict = nn.Linear(5, 8, bias=False, dtype=torch.float64)
        self.mask = mask
        self.to(device)

    def forward(self, texts):
        features = self.embed(texts)
        return self.predict(features if self.mask is None else features * self.mask(texts))


def make_texts(seed, device):
    """Return 35 texts of 1 to 9 tokens, filled up to 9, and the targets; no two are alike."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, 8, (35, 9), generator=generator)
    texts[:, -2:] = torch.stack([torch.arange(35) // 8, torch.arange(35) % 8], 1)  # its number
    targets = (3 * texts + torch.randint(0, 2, texts.shape, generator=generator)) % 8
    lengths = torch.randint(1, 10, (35, 1), generator=generator)
    targets[torch.arange(9) >= lengths] = -100
    return texts.to(device), targets.to(device)


def numbers_of(texts):
    """Return the numbers of these texts, a list."""
    return (8 * texts[:, -2] + texts[:, -1]).tolist()


def mask_of_text(texts):
    """Return a dropout mask of 0 and 2 that depends on the text, and on no rank."""
    random = [torch.Generator().manual_seed(number) for number in numbers_of(texts)]
    masks = [torch.rand(9, 5, generator=generator) for generator in random]
    return 2.0 * (torch.stack([torch.empty(9, 5), *masks])[1:] < 0.5).to(texts.device)


def mask_of_process(texts):
    """Return a dropout mask of 0 and 2 from the random state of this process, as nn.Dropout."""
    return nn.functional.dropout(torch.ones(len(texts), 9, 5, device=texts.device))


def contrast_sum(outputs, targets):
    """Return a sum over texts in which each is compared with all others: not a sum over rows."""
    if len(outputs) == 0:
        return outputs.sum()
    features, own = normalize(outputs.mean(1), dim=1), torch.arange(len(outputs))
    return cross_entropy(5 * features @ features.T, own.to(outputs.device), reduction="sum")


def make_optimizer(model, rate=0.3):
    """Return the optimizer of every rank, and of the one process."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)


def vector(tensors):
    """Return a copy of these tensors, as one vector on the CPU."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# What is wrong first, when each of the eleven conditions is removed.
SPOILED = ["texts"] * 3 + ["gradients"] * 6 + ["updates", "gradients"]


def one_process(args, data, mask=None, loss=None):
    """Train in one process with whole batches; return [(texts, gradient, parameters)] by step.

    It knows no ranks, no micro-batches and no weights: PyTorch's mean over all tokens.
    """
    (texts, targets), seen, epoch = data, [], 0
    model = Model(args.seed, texts.device, mask)
    optimizer = make_optimizer(model)
    while len(seen) < args.steps:
        order = torch.randperm(35, generator=torch.Generator().manual_seed(args.seed + epoch))
        for batch in order.split(args.batch_size)[: args.steps - len(seen)]:
            outputs, wanted = model(texts[batch]), targets[batch]
            mean = cross_entropy(outputs.flatten(0, 1), wanted.flatten())
            mean = mean if loss is None else loss(outputs, wanted) / (wanted != -100).sum()
            optimizer.zero_grad()
            mean.backward()
            gradient = vector(p.grad for p in model.parameters())
            optimizer.step()
            seen.append((sorted(batch.tolist()), gradient, vector(model.parameters())))
        epoch += 1
    return seen


class Calls(TorchDispatchMode):
    """Writes down this process's collectives and their bytes; it makes each operation slower."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:  # PyTorch has two libraries of collectives
            sent = sum(leaf.nbytes for leaf in tree_leaves(args) if torch.is_tensor(leaf))
            self.names.append(f"{function.overloadpacket.__name__} {sent}")
        return function(*args, **(kwargs or {}))


def watch(replica, calls):
    """Return a list of each update's (texts, gradient, parameters, bytes, calls), and its end."""
    seen, now, sent = [], [], []

    def before_forward(_, inputs):
        now.extend(numbers_of(inputs[0]))
        calls.append("forward")

    def before_sending(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)  # what DDP does without a hook

    def after_update(*_):
        own = list(replica.module.parameters())
        gradient = vector(torch.zeros_like(p) if p.grad is None else p.grad for p in own)
        seen.append((now.copy(), gradient, vector(own), sum(sent), calls.copy()))
        now.clear(), sent.clear(), calls.clear()

    replica.module.register_forward_pre_hook(before_forward)
    replica.register_comm_hook(None, before_sending)
    return seen, register_optimizer_step_post_hook(after_update)


def ranks(args, data, seed=0, mask=None, rate=0.3, init_sync=True, calls=None, **replaced):
    """Train on all ranks with parts of this script `replaced`; return what each has seen."""
    model = Model(args.seed + seed, data[0].device, mask)
    torch.manual_seed(args.seed + dist.get_rank())  # for dropout
    replica = DistributedDataParallel(model, init_sync=init_sync)
    seen, handle = watch(replica, calls.names if calls else [])
    sizes = args.steps, args.batch_size, args.micro_batches, args.seed
    with calls or contextlib.nullcontext(), patch.dict(globals(), replaced):
        train(replica, make_optimizer(model, rate), *data, *sizes)
    handle.remove()
    return from_all_ranks(seen)


def distance(everyone, alone, part=2):
    """Return how far any rank ever is from the one process: nan, if they can't be compared."""
    if not alone or {len(seen) for seen in everyone} != {len(alone)}:
        return math.nan
    right = torch.stack([step[part] for step in alone])
    theirs = [torch.stack([step[part] for step in seen]) for seen in everyone]
    return torch.stack([(one - right).abs().max() for one in theirs]).max().item()


def spoiled(everyone, alone):
    """Return what first differs from the one process: texts, gradients, updates, or nothing."""
    for *steps, right in zip(*everyone, alone, strict=False):
        if sorted(chain(*(step[0] for step in steps))) != right[0]:
            return "texts"
        for part, name in ((1, "gradients"), (2, "updates")):
            if not all((step[part] - right[part]).abs().max() < 1e-12 for step in steps):
                return name
    return "nothing"


def step_with(weight_of=None, sends=None):
    """Return a train_step with another weight for a micro-batch, or another choice of who sends."""

    def step(replica, optimizer, micro_batches):
        counts, parts = [int((t != -100).sum()) for _, t in micro_batches], len(micro_batches)
        right = dist.get_world_size() / count_everywhere(sum(counts), micro_batches[0][1].device)
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(micro_batches):
            now = sends(number) if sends else number == parts - 1
            weight = weight_of(max(1, counts[number]), parts) if weight_of else right
            with contextlib.nullcontext() if now else replica.no_sync():
                (loss_sum(replica(inputs), targets) * weight).backward()
        optimizer.step()

    return step


def removals(rank):
    """Return {condition: what the ranks do without it}: arguments of `ranks`."""
    technique = deal

    def deal_with(change):  # change(batch, rank, world_size) takes a rank's part of a batch
        def dealt(rows, epoch, size, *place):
            batches = technique(rows, epoch, size, 0, 1, place[-1])
            return [change(batch, *place[:2]) for batch in batches]

        return {"deal": dealt}

    per_micro_batch = {"train_step": step_with(lambda count, parts: 1 / count / parts)}
    return {
        "a part of its own for each rank": deal_with(lambda batch, _, n: batch[::n]),
        "each row once": deal_with(lambda batch, r, n: torch.cat([batch, batch[:1]])[r::n]),
        "a new order in each epoch": {"deal": lambda rows, _, *rest: technique(rows, 0, *rest)},
        "one count for all ranks": {"count_everywhere": lambda own, _: own * dist.get_world_size()},
        "one count for all micro-batches": per_micro_batch,
        "losses divided": {"train_step": step_with(lambda count, parts: 1 / count)},
        "the last micro-batch sends": {"train_step": step_with(sends=lambda number: number == 0)},
        "the loss is a sum over rows": {"loss_sum": contrast_sum},
        "the same first weights": {"seed": rank, "init_sync": False},
        "the same optimizer settings": {"rate": 0.3 * (1 + rank)},
        "nothing random but by row": {"mask": mask_of_process},
    }


def keep_apart(args, data, alone, kept):
    """Return {condition: (how far off if it is kept, one process)}; `kept`: how far off mostly."""
    by_row = one_process(args, data, mask=mask_of_text)
    of_seed, by_text = ranks(args, data, seed=dist.get_rank()), ranks(args, data, mask=mask_of_text)
    return dict.fromkeys(removals(0), (kept, alone)) | {
        "the loss is a sum over rows": (kept, one_process(args, data, loss=contrast_sum)),
        "the same first weights": (distance(of_seed, alone), alone),
        "nothing random but by row": (distance(by_text, by_row), by_row),
    }


def remove_each(args, data, kept):
    """Return {condition: [how far off if it is kept, if it is removed]}, and {it: wrong first}."""
    found, first = {}, {}
    for name, changes in removals(dist.get_rank()).items():
        everyone, (off, alone) = ranks(args, data, **changes), kept[name]
        found[name] = [off, distance(everyone, alone)]
        first[name] = spoiled(everyone, alone)
    return found, first


def wrong_in_training(everyone, alone, micro_batches):
    """Return what is wrong with the training, and with what is sent: a list of sentences."""
    first, off, size = spoiled(everyone, alone), distance(everyone, alone), 8 * len(alone[0][2])
    rules = {
        f"wrong first: {first}, off by {off:.2g}": first == "nothing" and off < 1e-12,
        "the ranks' parameters differ": distance(everyone, everyone[0]) == 0,
        "an update is not: count, all micro-batches forward, send the gradient": all(
            step[4] == ["allreduce_ 8", *["forward"] * micro_batches, f"allreduce_ {size}"]
            for step in chain(*(seen[2:] for seen in everyone))  # DDP tells its buckets before
        ),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def off_with_few(texts, tokens):
    """Return how far an update is off if rank 0 has 0 or 1 tokens, and nobody else has any."""
    model, right = Model(0, texts.device), Model(0, texts.device)
    few = torch.full_like(texts, -100)
    few[0, :tokens] = 0
    cross_entropy(right(texts).flatten(0, 1), few.flatten(), reduction="sum").backward()
    make_optimizer(right).step()
    few = few if dist.get_rank() == 0 else torch.full_like(texts, -100)
    with contextlib.suppress(ZeroDivisionError):
        train_step(DistributedDataParallel(model), make_optimizer(model), [(texts, few)])
        return (vector(model.parameters()) - vector(right.parameters())).abs().max().item()
    return math.nan


def wrong_in_pieces(texts):
    """Return what is wrong with conditions, counts, orders and masks, each by itself: a list."""
    first, world_size = 2**24 + 1, dist.get_world_size()  # more than float32 can hold
    counted = count_everywhere(first + dist.get_rank(), texts.device)
    right = sum(range(first, first + world_size))
    orders = [deal(35, e, 35, 0, 1, seed)[0].tolist() for seed in (0, 50) for e in range(50)]
    masks = from_all_ranks(mask_of_process(texts).flatten().tolist())
    few = off_with_few(texts, 0) + off_with_few(texts, 1)
    rules = {
        f"not {len(SPOILED)} conditions are tried": len(removals(0)) == len(SPOILED),
        f"the ranks count {counted:.0f}, not {right}": counted == right,
        f"with one token in all, or none, an update is off by {few:.2g}": few < 1e-12,
        "in 50 epochs with seed 0 and 50 with seed 50 an order comes twice": not_twice(orders),
        "two ranks draw the same dropout masks": not_twice(masks),
        "two texts have the same mask": not_twice(mask_of_text(texts).tolist()),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def not_twice(values):
    """Return whether all of these values differ."""
    return len({str(value) for value in values}) == len(values)


def report(numbers, micro_batches):
    """Print what a reader wants to know."""
    where, texts = f"over {numbers['backend']} on {numbers['device']}", numbers["rows_per_step"]
    print(f"{numbers['world_size']} ranks {where}, {texts} texts in a step", end="; ")
    print("parameters off by, if kept, and if removed:")
    for name, (kept, removed) in numbers["off"].items():
        print(f"{name:34} {kept:7.1e} {removed:7.3g}")
    once, always = numbers["bytes"]
    print(f"bytes for the all-reduce of an update, {micro_batches} micro-batches:", end=" ")
    print(f"{once} with no_sync, {always} without")


def wrong_in_removals(off, first):
    """Return what is wrong with the damage of removed conditions: a list of sentences."""
    wrong = []
    for (name, (_, removed)), wanted in zip(off.items(), SPOILED, strict=True):
        if first[name] != wanted or not removed > 1e-6:
            wrong.append(f"{name}: if removed, off by {removed:.2g}; wrong first: {first[name]}")
    if not not_twice([removed for _, removed in off.values()]):
        wrong.append("two conditions do the same damage: are they one?")
    return wrong


def verdict(off, world_size):
    """Return the claim: how far off is the worst of those kept, and the least of those removed."""
    kept, removed = zip(*off.values(), strict=True)
    damage = f"is off by {min(removed):.1e} or more" if world_size > 1 else "can't be seen by one"
    claim = f"{world_size} ranks equal one process (off by {max(kept):.1e})"
    return f"{claim}; a removed condition {damage}"


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    rank, world_size, device = join_group()
    data = make_texts(args.seed, device)
    alone, everyone = one_process(args, data), ranks(args, data, calls=Calls())
    wrong = from_all_ranks(
        wrong_in_training(everyone, alone, args.micro_batches) + wrong_in_pieces(data[0])
    )
    wrong, off, always = list(dict.fromkeys(chain(*wrong))), {}, []
    if not wrong:
        kept = keep_apart(args, data, alone, distance(everyone, alone))
        wrong = [f"{name}: off by {gap:.2g}" for name, (gap, _) in kept.items() if not gap < 1e-12]
    if not wrong:
        always = ranks(args, data, train_step=step_with(sends=lambda number: True))
        off, first = remove_each(args, data, kept)
        wrong = wrong_in_removals(off, first) if world_size > 1 else []
    change = alone[-1][2] - vector(Model(args.seed, device).parameters())
    numbers = {"lesson": 10, "world_size": world_size, "backend": dist.get_backend()}
    numbers |= {"device": device.type, "rows_per_step": args.batch_size, "off": off}
    sent = [[0, *(step[3] for step in chain(*seen))] for seen in (everyone, always)]
    numbers |= {"bytes": list(map(max, sent)), "param_change": change.abs().max().item()}
    dist.destroy_process_group()
    if rank == 0:
        report(numbers, args.micro_batches)
    return not wrong, "; ".join(wrong) or verdict(off, world_size), numbers


def sweep(batch_size, rates, adam=False, seeds=5, epochs=15):
    """Train a network in one process for each rate and seed; return accuracies (rates, seeds).

    1,024 digits to learn from, 773 to be tested with; all networks train at the same time.
    """
    from sklearn.datasets import load_digits

    digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    torch.manual_seed(0)
    layers = [torch.randn(seeds, 64, 32) / 8, torch.randn(seeds, 32, 10) / 6]
    networks = [[layer.clone().requires_grad_() for layer in layers] for _ in rates]
    groups = [{"params": one, "lr": rate} for one, rate in zip(networks, rates, strict=True)]
    optimizer = torch.optim.Adam(groups) if adam else torch.optim.SGD(groups, 0, momentum=0.9)

    def outputs(inputs):  # (seeds, rows, 64) becomes (rates * seeds, rows, 10)
        first, second = (torch.cat(layers) for layers in zip(*networks, strict=True))
        return torch.relu(inputs.repeat(len(rates), 1, 1) @ first) @ second

    for _ in range(epochs):
        dealt = torch.stack([torch.randperm(1024) for _ in range(seeds)])
        for batch in dealt.split(batch_size, 1):
            wanted = labels[batch].repeat(len(rates), 1).flatten()
            loss = cross_entropy(outputs(images[batch]).flatten(0, 1), wanted, reduction="sum")
            optimizer.zero_grad()
            (loss / batch.shape[1]).backward()
            optimizer.step()
    right = outputs(images[1024:].expand(seeds, -1, -1)).argmax(2) == labels[1024:]
    return right.float().mean(1).view(len(rates), seeds)


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(1, 300), default=12, help="%(default)s")
    size = {"type": whole(1, 32), "default": 16}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--micro-batches", type=whole(2, 16), default=3, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size < 2 * world_size:
        parser.error(f"argument --batch-size: must be at least two for a rank, {2 * world_size}")
    epoch = math.ceil(35 / args.batch_size)
    if args.steps <= epoch:
        parser.error(f"argument --steps: must be more than an epoch has, {epoch}")
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
