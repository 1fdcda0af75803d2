"""What lesson 18 claims: sharded Adam has DDP's numbers; what a rank keeps and sends are formulas.

The script knows nothing of this file; see lesson_02.py. While its ranks train, all memory of their
tensors is seen (storages.py), and what each layer computes with, by checksums. DDP's numbers are
those of one process, which adds up the gradients of each rank's rows; lesson 02 has that of DDP.
What activations need is seen here, in one process where nothing is sharded.
"""

from unittest.mock import patch

import lesson_18_sharding as lesson
import numpy as np
import torch
from lockstep.watch import claims, facts
from lockstep.watch.storages import KINDS, Memory
from torch.nn.functional import mse_loss

KEEP_VALUES = 1  # of every update
STORAGES = True
LIMITS = {"--stage": (1, 3), "--steps": (1, 100), "--accumulate": (1, 1000)}
LIMITS |= {"--batch-size": (1, 10**5), "--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if rows_of(args, world_size) % (parts := world_size * args.accumulate) == 0:
        return None  # a mean of means of unequal parts is not the mean
    what = "ranks times --accumulate" if args.accumulate > 1 else "the number of ranks"
    return f"argument --batch-size: must be a multiple of {what}, {parts}"


def rows_of(args, ranks):
    """Return how many rows a step has."""
    return args.batch_size or 4 * ranks * args.accumulate


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    with patch.object(lesson.dist, "get_rank", lambda: 0):  # its model is the one to train
        batches, model = lesson.make_problem(args.seed, args.steps, rows_of(args, started))
    counts, claim = modules_of(model), f"after {args.steps} steps of Adam"
    wrong = [claims.wrong_in_group(job, started), claims.wrong_in_count(job, args.steps)]
    wrong = [*filter(None, wrong)] or wrong_in_shards(job, counts)
    seen = {rank: theirs.of("storages") for rank, theirs in job.items()}
    if wrong or not all(seen.values()):
        return claims.Verdict(claim, wrong or ["a rank did not leave its group"], {}, [])
    seen = {rank: told for rank, (told,) in seen.items()}
    states, sharded = train_as_ddp(model, batches, started), put_together(job, counts)
    off = claims.worst([claims.off(*pair) for pair in zip(sharded, states, strict=True)])
    wrong = [] if claims.off(states[0], states[-1]) > 1e-4 else ["there was nothing to learn"]
    if not off < 1e-10 * max(1, args.steps / 10):  # Adam enlarges rounding where a gradient is 0
        wrong.append("that is more than rounding")
    computed = [checksums(model, numbers) for numbers in sharded]
    need = plain_need(batches[0], started * args.accumulate)
    for rank, told in seen.items():
        faults = wrong_in_rank(told, args, started, counts, need, computed)
        wrong += [f"rank {rank} {fault}" for fault in dict.fromkeys(faults)]
    numbers = {"world_size": started, "backend": job[0].group["backend"], "stage": args.stage}
    numbers |= {"device": job[0].optimizers[0]["device"], "max_diff_to_ddp": off}
    numbers |= numbers_of(seen[0], counts)
    wrong += filter(None, [wrong_in_words(job, args, numbers, model, batches[0])])
    claim += f" off by {off:.2g} from DDP; kept and sent as by the formulas"
    return claims.Verdict(claim, wrong, numbers, lines_of(numbers))


def wrong_in_words(job, args, numbers, model, batch):
    """Rank 0 alone has said where it ran, and the loss of the trained model."""
    with torch.no_grad():
        loss = mse_loss(model(batch[0]), batch[1])
    where = f"{numbers['world_size']} ranks over {numbers['backend']} on {numbers['device']}"
    line = f"stage {args.stage}, {where}: loss {loss:.3g} after {args.steps} steps"
    return claims.wrong_in_words(job, [line])


def numbers_of(told, counts):
    """Return what one rank was seen to have and to send, for --json."""
    sent = {name: told["sent"][-1].get(name, 0) for name in ("reduce_scatter", "all_gather")}
    numbers = {"parameters": sum(counts), "modules": len(counts), "bytes_sent": sent}
    return numbers | {"kept": told["kept"][-1], "peak": told["peak"]}


def lines_of(numbers):
    """Return what a reader wants to know beside the script's own words."""
    lines = [f"{numbers['parameters']:,} parameters in {numbers['modules']} modules, 8 bytes each"]
    for kind in KINDS:
        kept, peak = (numbers[name][kind] for name in ("kept", "peak"))
        lines.append(f"{kind:<10}  a rank keeps {kept:>9,} bytes, and has {peak:>9,} at most")
    ddp = f"DDP keeps {32 * numbers['parameters']:,}; the activations are not in it"
    lines.append(f"together    at most {numbers['peak']['together']:,} bytes; {ddp}")
    sent = ", ".join(f"{name} {nbytes:,} bytes" for name, nbytes in numbers["bytes_sent"].items())
    return [*lines, f"sent in a step: {sent}"]


# --- The numbers ---


def modules_of(model):
    """Return the number of parameters of each module that is gathered by itself."""
    modules = model.embed, *model.blocks, model.head
    return [sum(parameter.numel() for parameter in module.parameters()) for module in modules]


def train_as_ddp(model, batches, ranks):
    """Train in one process with the mean of the ranks' gradients; return all parameters, by step.

    They are those before each update, and those after the last.
    """
    optimizer, states = torch.optim.Adam(model.parameters()), []
    for rows, targets in batches:
        states.append(claims.numbers_of(model, lambda parameter: parameter).copy())
        optimizer.zero_grad()
        for rank in range(ranks):
            (mse_loss(model(rows[rank::ranks]), targets[rank::ranks]) / ranks).backward()
        optimizer.step()
    return [*states, claims.numbers_of(model, lambda parameter: parameter)]


def wrong_in_shards(job, counts):
    """Return what is wrong with what the optimizers have: of each module they have a part."""
    parts = [-(-count // len(job)) for count in counts]
    for rank, seen in job.items():
        has = [len(shard) for shard in seen.values(seen.updates[0])["before"].values()]
        if has != parts:
            return [f"rank {rank} gives its optimizer {sum(has):,} numbers, not {sum(parts):,}"]
    return []


def put_together(job, counts):
    """Return all parameters, the ranks' shards one after the other, before each update and last."""
    values = [[rank.values(update) for update in rank.updates] for rank in job.values()]
    moments = [[kept["before"] for kept in step] for step in zip(*values, strict=True)]
    moments.append([of_rank[-1]["after"] for of_rank in values])
    found = []
    for shards in moments:
        units = zip(counts, zip(*(one.values() for one in shards), strict=True), strict=True)
        found.append(np.concatenate([np.concatenate(parts)[:count] for count, parts in units]))
    return found


def checksums(model, numbers):
    """Return the checksums of all parameters of the model, if it has these numbers."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {facts.checksum(part) for part in torch.from_numpy(numbers).split(sizes)}


# --- The memory, and what is sent ---


def formulas(counts, ranks, stage, pieces=1):
    """Return what a rank keeps, has at most, and sends in a step; counts: parameters by module."""
    parts = [-(-count // ranks) for count in counts]
    wholes, part, biggest = [ranks * part for part in parts], sum(parts), max(parts) * ranks
    kept = {"parameters": part if stage == 3 else sum(wholes)}
    kept |= {"gradients": sum(wholes) if stage == 1 else part, "optimizer": 2 * part, "gathered": 0}
    peak = kept | {"gathered": biggest if stage == 3 else 0}
    together, lasting = [sum(kept.values())], kept["parameters"] + kept["optimizer"]
    if stage > 1:  # backward comes to the first module last
        done = [sum(parts[i:] if pieces == 1 else parts) for i in range(len(parts))]
        grads = [whole + own for whole, own in zip(wholes, done, strict=True)]
        peak["gradients"] = max(grads)
        together += [lasting + g + w * (stage == 3) for g, w in zip(grads, wholes, strict=True)]
    peak["together"] = max(together)
    kept, peak = ({kind: 8 * n for kind, n in numbers.items()} for numbers in (kept, peak))
    for numbers, kind in ((kept, "optimizer"), (peak, "optimizer"), (peak, "together")):
        numbers[kind] += 4 * len(parts)  # Adam counts its steps, in float32
    once = (ranks - 1) * part * 8
    reduced, gathered = (1, 1) if stage == 1 else (pieces, 1 if stage == 2 else 2 * pieces)
    return kept, peak, {"reduce_scatter": once * reduced, "all_gather": once * gathered}


def plain_need(batch, pieces):
    """Return the most bytes of a piece's forward and backward, if nothing is sharded."""
    rows, targets = (part.chunk(pieces)[0].clone() for part in batch)
    with Memory(rows, targets) as memory:
        model = lesson.Transformer().double()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        mse_loss(model(rows), targets).backward()
    crumbs = 100 + 4 * targets.nbytes  # the last loss, and what it was made of
    return memory.told()["peak"] | {"crumbs": crumbs, "batch": sum(x.nbytes for x in batch)}


def wrong_in_rank(told, args, ranks, counts, need, computed):
    """Return what is wrong with what one rank has, sends, and computes with."""
    kept, peak, sent = formulas(counts, ranks, args.stage, args.accumulate)
    part, data = 8 * -(-max(counts) // ranks), args.steps * need["batch"]
    rules = {told["wrong"]: told["wrong"] is None}
    for now in told["kept"]:
        rules |= {
            f"keeps {now[k]:,} bytes of {k}, not {kept[k]:,}": now[k] == kept[k] for k in KINDS
        }
        besides = now["besides"] - data
        rules[f"keeps {besides:,} bytes that are nothing of these"] = besides <= need["crumbs"]
    has = told["peak"] | {"besides": told["peak"]["besides"] - data}
    rules |= {
        f"has {has[k]:,} bytes of {k} at a time, not {peak[k]:,}": has[k] == peak[k] for k in peak
    }
    rooms = {"besides": need["besides"] + part, "piece": max(need["piece"], part)}
    rooms["beside a call"] = need["piece"] + part  # the ring receives a part
    rooms["setup"] = 8 * sum(counts) + 2 * ranks * part + data * 9 // 8 + need["crumbs"]
    for name, room in rooms.items():
        words = f"has {has[name]:,} bytes besides ({name}), where {room:,} are enough"
        rules[words] = has[name] <= room
    names = {"c10d::recv_": 0} if ranks > 1 else {}
    for step in told["sent"]:
        right = {name: n for name, n in (sent | names).items() if n or name in step}
        rules[f"sends {step} in a step, not {sent}"] = step == right
    rules[f"calls {told['setup']} before the first step"] = told["setup"] == ["c10d::broadcast_"]
    equal = [set(sums) == right for sums, right in zip(told["computed"], computed, strict=True)]
    rules["computes with parameters that are not the updated ones"] = all(equal)
    return claims.broken(rules)
