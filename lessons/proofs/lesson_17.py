"""What lesson 17 claims: OwnDDP leaves DDP's gradients, with its bytes, messages and overlap.

The script knows nothing of this file; see lesson_02.py. What its ranks send, and that they train
with the mean of their gradients, is seen. Not seen is which gradient is there when a bucket leaves,
and who waits too early; and DDP trains nowhere in it. So threads play as many ranks, over gloo
(played_gloo.py): they have the class beside DDP, layers that a rank leaves out, and errors.
"""

import contextlib
import copy
from collections import Counter
from itertools import chain
from unittest.mock import patch

import lesson_17_ddp_from_scratch as lesson
import torch
from lockstep.watch import claims
from lockstep.watch.played_gloo import here, is_call, note, play, sent, taken, waits_early
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

KEEP_VALUES = 20  # of the first two updates, and of one in twenty after them
LIMITS = {"--steps": (2, 1000), "--batch-size": (8, 10**5), "--bucket-mb": (1, 1000)}
LIMITS |= {"--seed": (0, 2**32 - 1)}
CLAIM = "OwnDDP's gradients are those of DDP"


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < 8 * world_size:
        return f"argument --batch-size: must be at least {8 * world_size}, eight for each rank"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    torch.manual_seed(args.seed)
    model = lesson.Model().double()  # rank 0's, and by the wrapper everybody's
    if wrong := claims.wrong_in_optimizer(job, nn.ModuleDict({"module": model})):
        return claims.Verdict(CLAIM, [wrong], {}, [])
    numbers = {"world_size": started, "backend": job[0].group["backend"]}
    numbers |= {"device": job[0].optimizers[0]["device"]}
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong += [claims.wrong_in_replicas(job)]
    try:
        played = play(lesson, started, lambda rank: beside_ddp(args, model))
        faults, offs, (trained, *_), (seen, *_) = zip(*played, strict=True)
        numbers |= seen
        off = claims.off(claims.as_vector(job[0].values_at_end()), trained)
        wrong += claims.broken({f"the parameters end {off:.2g} off DDP's": off <= 1e-9})
        wrong += [*chain(*faults), wrong_in_sent(job, model, seen["buckets"])]
        wrong = list(filter(None, [*wrong, wrong_in_words(job, args, numbers)]))
        if not wrong:
            wrong = [*chain(*play(lesson, started, lambda rank: wrong_elsewhere(rank, args)))]
    except Exception as error:
        return claims.Verdict(CLAIM, [f"played by threads: {error}"], numbers, [])
    off = {name: claims.worst([of_rank[name] for of_rank in offs]) for name in offs[0]}
    numbers |= {"bytes_sent": sum(numbers["buckets"]), "max_grad_diff_to_ddp": off}
    begun = "{overlapped} of {all_reduces}".format(**numbers)
    told = ", ".join(f"{value:.3g} {name}" for name, value in off.items())
    lines = [f"all-reduces begun before the last gradient was there: {begun}"]
    lines.append(f"gradients, largest difference to DDP's: {told}")
    return claims.Verdict(CLAIM, list(dict.fromkeys(wrong)), numbers, lines)


# --- What the ranks did ---


def wrong_in_sent(job, model, sizes):
    """The state is sent once, buffers once a step, and gradients in the second micro-batch."""
    calls = [f"all_reduce [[{size // 8}], 'float64']" for size in sizes]
    buffers = calls_for(model.buffers())
    state = calls_for(chain(model.parameters(), model.buffers()))
    for rank, seen in job.items():
        for number, actions in enumerate(claims.done_for_updates(seen)):
            first = ["forward", *buffers] if number else [*state, "forward"]
            called = [one for one in actions if not one.startswith("allreduce_")]  # seen twice
            if called != (wanted := [*first, "forward", *calls]):
                return f"for an update, rank {rank} does {called}, and not {wanted}"
    return None


def calls_for(tensors):
    """Return the calls that send tensors from rank 0: one for each type."""
    numbers = Counter()
    for tensor in tensors:
        numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return [f"broadcast {[[count], kind]}" for kind, count in numbers.items()]


def wrong_in_words(job, args, numbers):
    """Rank 0 has told who trains, how large its buckets are, and its loss."""
    told = " ".join(f"{size:,}" for size in numbers["buckets"])
    lines = ["{world_size} ranks over {backend} on {device}".format(**numbers)]
    lines += [f"buckets of {args.bucket_mb} MiB or a little more: {told} bytes"]
    losses = [event["value"] for event in job[0].of("loss")][1::2]
    for step in (1, args.steps):
        lines.append(f"step {step}: loss {losses[step - 1]:.3g} on rank 0")
    return claims.wrong_in_words(job, lines)


# --- Gradients ---


def apart(ones, others):
    """Return the largest difference between two lists of tensors; nan if one is not a number."""
    pairs = zip(ones, others, strict=True)
    return torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max().item()


def gradients(model):
    """Return the gradients that there are."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def difference(one, other):
    """Return the largest difference of a gradient; inf where only one of the models has it."""
    has = [[p.grad is None for p in model.parameters()] for model in (one, other)]
    return apart(gradients(one), gradients(other)) if has[0] == has[1] else torch.inf


def rounding(model):
    """Return by how much gradients may differ that are added up in another order."""
    return 1e-12 * max(grad.abs().max().item() for grad in gradients(model))


def storages(model):
    """Return the bytes of each piece of memory in which gradients lie."""
    pieces = [grad.untyped_storage() for grad in gradients(model)]
    return list({piece.data_ptr(): piece.nbytes() for piece in pieces}.values())


# --- What threads play ---


def replicas(model, count):
    """Return copies of a model; all but the first note when a parameter has its gradient."""
    copies = [copy.deepcopy(model) for _ in range(1 + count)]
    for p in chain(*(other.parameters() for other in copies[1:])):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(note)  # before an OwnDDP learns of it
    return copies


def ddp_of(model, megabytes, unused=False):
    """Return the library's DDP of a model, in the group of this thread's rank."""
    options = {"process_group": here.group, "find_unused_parameters": unused}
    return DistributedDataParallel(model, bucket_cap_mb=megabytes, **options)


def sorted_ddp(model, megabytes, rows):
    """Return DDP after three steps, names of parameters in its buckets' order, and their bytes.

    It has sorted its buckets anew, and says so.
    """
    ddp = ddp_of(model, megabytes).eval()  # so its buffers stay
    for _ in range(3):
        mse_loss(ddp(rows), rows).backward()
    told = ddp._get_ddp_logging_data()
    numbers = told["rebuilt_per_bucket_param_indices"].replace(",", "").split()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    sizes = [int(size) for size in told["rebuilt_bucket_sizes"].split(",")]
    return ddp.train(), [trained[int(number)] for number in numbers], sizes


def own_of(model, megabytes, order):
    """Return OwnDDP of a model, whose buckets have the parameters in this order of their names."""
    named = dict(model.named_parameters())
    listed = [p for name, p in named.items() if name not in order]
    listed += [named[name] for name in reversed(order)]
    with patch.object(model, "parameters", lambda recurse=True: iter(listed)):
        return lesson.OwnDDP(model, megabytes)


def step(replica, micro_batches):
    """Make a step's gradients, sent with the last of [(rows, named arguments)].

    Return what happened in backward: gradients, as parameters, and (what was called, bytes).
    """
    events = []
    for number, (rows, named) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            with contextlib.nullcontext() if last else replica.no_sync():
                pass  # leaving the inner one must not end the outer one
            loss = mse_loss(replica(rows, **named), rows.flip(1))
            taken()
            loss.backward()
            events += [event for event in taken() if last or is_call(event)]
    return events


def wrong_in_order(events, buckets, more=0):
    """Return what is wrong with a step in which buckets leave, and so many all-reduces more."""
    ready, begun, late, count = set(), 0, 0, len(sent(events))
    for event in events:
        if is_call(event):
            begun += event[0] == "all_reduce"
        else:
            late += begun < len(buckets) and ready.issuperset(buckets[begun])
            ready.add(event)
    rules = {f"all-reduces in a step: {count}": count == len(buckets) + more}
    rules["a full bucket does not leave at once"] = not late
    rules["backward waits before all have left"] = not waits_early(events)
    return claims.broken(rules)


def wrong_beside(own, theirs, nbytes, sizes):
    """Return what is wrong with gradients beside those of DDP's model; all-reduces had `nbytes`.

    With the `sizes` of DDP's buckets, in its order, all bits are DDP's.
    """
    off, buffers = difference(own.module, theirs), apart(own.module.buffers(), theirs.buffers())
    limit = 0.0 if sizes or here.group.size() <= 2 else rounding(theirs)
    rules = {f"gradients are off by {off:.2g}": off <= limit}
    rules[f"buffers are off by {buffers:.2g}"] = buffers <= limit
    rules[f"it sends {nbytes} bytes, and DDP {sizes}"] = nbytes == (sizes or nbytes)
    rules["gradients do not live in the buckets"] = sorted(storages(own.module)) == sorted(nbytes)
    return claims.broken(rules)


def share(steps, args):
    """Return this rank's rows: [step][micro-batch]."""
    rows = lesson.make_rows(steps, args.batch_size, args.seed)
    return rows[:, :, here.group.rank() :: here.group.size()]


def beside_ddp(args, model):
    """Train with DDP, and with OwnDDP in two orders.

    Return (all that is wrong, {order: how far a gradient is ever off}, parameters, numbers).
    """
    theirs, *ours = replicas(model, 2)
    batches, megabytes = share(args.steps, args), args.bucket_mb
    ddp, order, sizes = sorted_ddp(theirs, megabytes, batches[0][0])
    owns = {"in DDP's order": (own_of(ours[1], megabytes, order), sizes)}
    owns["in reverse order"] = lesson.OwnDDP(ours[0], megabytes), None  # as in the run
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    off, wrong = dict.fromkeys(reversed(owns), 0), []
    for micro_batches in ([(part, {}) for part in rows] for rows in batches):
        optimizer.zero_grad()
        step(ddp, micro_batches)
        for name, (own, sizes) in owns.items():
            own.zero_grad()
            events = step(own, micro_batches)
            off[name] = claims.worst([off[name], difference(own.module, theirs)])
            found = wrong_beside(own, theirs, sent(events), sizes)
            wrong += [f"{name}: {fault}" for fault in found + wrong_in_order(events, own.buckets)]
        optimizer.step()
        for own, _ in owns.values():  # what it rounds differently is that of one step, not of all
            own.module.load_state_dict(theirs.state_dict())
    last = max(number for number, event in enumerate(events) if not is_call(event))
    numbers = {"buckets": sent(events), "all_reduces": len(sent(events))}
    numbers["overlapped"] = len(sent(events[:last]))
    wrong += wrong_in_evaluation(own, batches[0][0])
    return wrong, off, claims.numbers_of(theirs, lambda p: p), numbers


def wrong_in_evaluation(own, rows):
    """After a step buffers are sent once, before the first of two forwards without gradients."""
    own.eval(), taken()
    with torch.no_grad():
        calls = [len(taken()) for _ in range(2) if own(rows) is not None]
    kinds = len({buffer.dtype for buffer in own.module.buffers()})
    return claims.broken({f"evaluating sends {calls} messages": calls == [kinds, 0]})


# --- What the model of the script does not have ---


def wrong_elsewhere(rank, args):
    """Return what is wrong with other models, and after errors."""
    rows = share(1, args)[0][0]
    return wrong_in_cases(rank, rows) + wrong_after_errors(rows) + wrong_in_float16()


class Branches(nn.ModuleDict):
    """Layers of the same size, of which a call uses some, in the order of their names."""

    def __init__(self):  # the spare one is in the last bucket, and holds no other one up
        names = "spare", "trunk", "one", "other"
        super().__init__({name: nn.Linear(252, 252).double() for name in names})

    def forward(self, rows, names=()):
        for name in ("trunk", *names):
            rows = torch.tanh(self[name](rows))
        return rows


# What ranks call in turn: the layers of Branches in each of two micro-batches, by rank.
BOTH, SWAPPED, ONE = ("one", "other"), ("other", "one"), ("one",)
CASES = {
    "unused on all ranks": lambda rank: [ONE] * 2,
    "called in another order on each rank": lambda rank: [(BOTH, SWAPPED)[rank % 2]] * 2,
    "unused but on rank 0": lambda rank: [(ONE, BOTH)[rank == 0]] * 2,
    "unused in the last micro-batch": lambda rank: [BOTH, ONE],
    "used again": lambda rank: [BOTH] * 2,
}


def wrong_in_cases(rank, rows):
    """Return what is wrong where ranks use other layers, or in another order."""
    theirs, model = replicas(Branches(), 1)
    ddp = ddp_of(theirs, 0.25, unused=True)
    own, wrong = lesson.OwnDDP(model, 0.25, find_unused=True), []
    for case, layers in CASES.items():
        micro_batches = [(rows, {"names": names}) for names in layers(rank)]
        theirs.zero_grad(), model.zero_grad()
        step(ddp, micro_batches)
        found = wrong_in_order(step(own, micro_batches), own.buckets, more=1)  # who has used what
        off = difference(model, theirs)
        found += claims.broken({f"off by {off:.2g}": off <= rounding(theirs)})
        wrong += [f"a layer {case}: {fault}" for fault in found]
    return wrong


def wrong_after_errors(rows):
    """Return what is wrong after errors in no_sync, in backward and at its end."""
    branches = Branches()
    branches["spare"].requires_grad_(False)
    theirs, model = replicas(branches, 1)
    ddp, own, told = ddp_of(theirs, 0.25), lesson.OwnDDP(model, 0.25), "nothing"
    with contextlib.suppress(ValueError), own.no_sync():
        raise ValueError
    own.no_sync()  # not entered, so it does nothing
    try:  # all ranks leave out a layer: nothing has been sent when it is found
        mse_loss(own(rows, ONE), rows).backward()
    except RuntimeError as error:
        told = str(error)
    model.zero_grad()
    hook = model["trunk"].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):  # all ranks, when some buckets have left
        mse_loss(own(2 * rows, BOTH), rows).backward()
    hook.remove()
    model.zero_grad()
    mse_loss(model(rows, BOTH), rows).backward()  # not called through the wrapper
    mse_loss(ddp(rows, BOTH), rows).backward()
    off, right = difference(model, theirs), "other.weight" in told and "one.weight" not in told
    rules = {f"of a parameter without gradient, other.weight, it says: {told}": right}
    return claims.broken(rules | {f"after errors, it is off by {off:.2g}": off <= rounding(theirs)})


def wrong_in_float16():
    """Return what is wrong with parameters of two types, and a sum that one can't hold."""
    kinds = torch.float16, torch.float64
    model = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds)
    try:
        lesson.OwnDDP(model)
        sum((60_000 * p).sum().double() for p in model).backward()
    except RuntimeError as error:
        return [f"with two types of parameters: {error}"]
    mean = torch.cat([grad.double() for grad in gradients(model)])
    right = (mean - 60_000).abs().max() < 100
    return claims.broken({f"float16 and float64: a mean of 60,000 is {mean.tolist()}": right})
