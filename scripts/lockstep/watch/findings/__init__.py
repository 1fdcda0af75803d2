"""Compares what the ranks have seen, and says what is wrong, in three strengths.

WRONG: the ranks do not train one model on all rows, or they wait for each other for ever.
NOT_MEANT: probably not meant; there is another explanation, and it is said.
TO_KNOW: right as it is, and worth knowing.
"""

from collections import Counter
from typing import NamedTuple

WRONG, NOT_MEANT, TO_KNOW = "wrong", "probably not meant", "to know"
STRENGTHS = (WRONG, NOT_MEANT, TO_KNOW)


class Finding(NamedTuple):
    """One thing that was found. `kind` is a key of KINDS, `place` a line such as "train.py:41"."""

    kind: str
    strength: str
    text: str
    ranks: list
    place: str | None


SAMPLER = (
    "give the loader sampler=DistributedSampler(data), in place of shuffle=True; without a loader,"
    " let each rank take another part, or draw with another seed"
)
NO_GRADIENT = (
    "is the loss the same whatever the model says? Or was the optimizer made before its"
    " parameters were replaced?"
)

OUTSIDE = (
    "is a parameter unfrozen after wrapping, or outside of the wrapped model? Is a gradient changed"
    " after the average? Is a block in two checkpoints with use_reentrant=True?"
)

DATA = "give all ranks the same data and the same split: from one file, or with one fixed seed"
OUTSIDE_OF_NO_SYNC = (
    "the last forward and backward before an update must stand outside of no_sync()"
)
SETTINGS = "let it follow what all ranks know alike: of a loss, all-reduce the sum and the rows"
BUFFERS = "all-reduce what each batch adds to them, before it is added; not the buffers themselves"

MASTER = "keep the weights in float32, and compute in 16 bits under torch.autocast"
COMMON = "all-reduce whether a rank found inf or nan (ReduceOp.MAX), and let that decide for all"
UNSCALE = "call scaler.unscale_(optimizer), or divide by the factor, and clip then"
FACTOR = "multiply the loss before backward(): torch.amp.GradScaler; or take bfloat16"
FINITE = "skip such an update on all ranks; divide before a sum in float16, not after it"

# kind: (what to do, the lesson that tells why)
KINDS = {
    "same rows": (SAMPLER, "02"),
    "all rows on each rank": (SAMPLER, "02"),
    "rows twice": ("let all ranks deal from one order: the same seed, the same data", "02"),
    "rows left out": ("", "05"),
    "order repeats": ("call set_epoch(epoch) before each epoch, where workers see it", "02"),
    "not shuffled": ("", "02"),
    "epoch left early": ("", "10"),
    "uneven rows": ("weigh the loss by the rows, or leave the last batch out", "10"),
    "other data": (DATA, "02"),
    "workers repeat rows": ("share the rows by get_worker_info() and by rank", "20"),
    "no exchange": ("wrap the model in DistributedDataParallel, or all-reduce each gradient", "02"),
    "past DDP": ("call the wrapped model, not the one inside", "02"),
    "no_sync": (OUTSIDE_OF_NO_SYNC, "10"),
    "gradients differ": (OUTSIDE, "17"),
    "sum of gradients": ("divide by the number of ranks, or let DDP do it", "10"),
    "clipped too early": ("clip after the gradients are averaged", "10"),
    "not the mean": ("", "10"),
    "gradients pile up": ("call optimizer.zero_grad() before each backward", "10"),
    "replaced after wrapping": ("change the model first, then wrap it; or copy_() into it", "17"),
    "replicas start apart": ("leave init_sync=True, or load the same weights on all ranks", "02"),
    "replicas differ": (
        "change parameters on all ranks alike; load a checkpoint on all ranks",
        "02",
    ),
    "unequal updates": ("give all ranks as many batches, or use model.join()", "19"),
    "skipped alone": (COMMON, "21"),
    "settings differ": (SETTINGS, "02"),
    "optimizer states differ": ("load the optimizer's state on all ranks", "06"),
    "in no optimizer": ("give it to the optimizer, or freeze it before wrapping", "02"),
    "no gradient at all": (NO_GRADIENT, "18"),
    "never a gradient": ("use it in the loss, or freeze it before wrapping", "02"),
    "never changes": ("", "02"),
    "updates lost": (MASTER, "21"),
    "clipped while scaled": (UNSCALE, "21"),
    "still scaled": (
        "let the scaler make the update: scaler.step(optimizer), scaler.update()",
        "21",
    ),
    "lost in float16": (FACTOR, "21"),
    "inf or nan": (FINITE, "21"),
    "buffers differ": ("with few rows for each rank use SyncBatchNorm; rank 0's are saved", "09"),
    "buffers of one's own": (BUFFERS, "09"),
    "trains in eval mode": ("call model.train() after the evaluation", "09"),
    "tests in train mode": ("call model.eval() before the evaluation", "09"),
    "rows tested twice": ("give its loader sampler=range(rank, len(data), world_size)", "05"),
    "counts stay at home": ("add the counts of all ranks up by all_reduce", "05"),
    "same random numbers": ("give each rank and each worker a seed of its own", "20"),
    "messages differ": ("call the same collectives in the same order on all ranks", "19"),
    "several boards": ("open it on rank 0 only, or one folder for each rank", "05"),
    "one file, several writers": ("write on rank 0 only, or one file for each rank", "06"),
    "module. in names": ("save model.module.state_dict()", "06"),
    "printed by several ranks": ("print on rank 0 only", "05"),
    "memory differs": ("", "18"),
    "whole beside shards": ("let the optimizer make its states like the local parts", "18"),
    "left out of sharding": ("call fully_shard(model) on the whole model, last", "18"),
    "no group": ("call init_process_group", "04"),
    "another world": ("take rank and world size from the launcher", "04"),
    "hang": ("let all ranks call it, or none", "19"),
}


class Report:
    """Collects findings, each once, and what was looked at, and what could not be."""

    def __init__(self, stopped=False):
        self.findings, self.looked, self.blind = [], [], []
        self.stopped = stopped  # an error or a signal has ended the run

    def found(self, kind, strength, text, place=None, ranks=()):
        """Add a finding, if none of its kind and place was added before."""
        assert kind in KINDS and strength in STRENGTHS, (kind, strength)
        if not any((one.kind, one.place) == (kind, place) for one in self.findings):
            self.findings.append(Finding(kind, strength, text, list(ranks), place))

    def look(self, text):
        """Say what was looked at."""
        if text not in self.looked:
            self.looked.append(text)

    def not_seen(self, text):
        """Say what could not be looked at, and why."""
        if text not in self.blind:
            self.blind.append(text)


def judge(job, report, world):
    """Add to the report what is found in a job {rank: Rank} of which `world` ranks were started."""
    from lockstep.watch.findings import halves, memory, rest, rows, training

    if not rest.group(job, report, world):
        return
    for look in (rows.numbers, rows.contents, training.updates, training.gradients):
        look(job, report)
    for look in (training.replicas_differ, training.optimizers, training.modes, training.buffers):
        look(job, report)
    parts = rest.random_numbers, rest.messages, rest.files, rest.output, rest.left_out
    for look in (halves.halves, rows.evaluation, memory.memory, *parts):
        look(job, report)


def some(names):
    """Return the first names of several, in words."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def odd(values):
    """Return the positions of the values that are not those of the most; [] if none has a majority.

    So of two ranks that differ neither is named.
    """
    texts = list(map(str, values))
    most, times = Counter(texts).most_common(1)[0]
    return [n for n, text in enumerate(texts) if text != most] if 2 * times > len(texts) else []


def replicas(ranks):
    """Return whether the ranks should hold one model.

    It is wrapped in DDP over all ranks; or the parameters have the same names, and are equal
    before the first update, or get the same gradients in it.
    """
    if not all(rank.updates for rank in ranks) or sharded(ranks):
        return False
    first = [rank.updates[0] for rank in ranks]
    wrapped = all(len(w["members"]) == len(ranks) for r in ranks for w in r.wrapped.values())
    if all(rank.wrapped for rank in ranks) and wrapped:
        return True
    if any(rank.names(u) != ranks[0].names(first[0]) for rank, u in zip(ranks, first, strict=True)):
        return False
    return any(all(u[what] == first[0][what] for u in first) for what in ("before", "grads"))


def share_rows(ranks):
    """Return whether the ranks should have rows of their own: one model, or FSDP over all ranks."""
    models = [model for rank in ranks for model in rank.models.values()]
    return replicas(ranks) or any(model["shares_rows"] == len(ranks) for model in models)


def sharded(ranks):
    """Return whether parameters are in parts, one on each rank."""
    return any(m["sharded"] for r in ranks for m in (*r.models.values(), *r.optimizers.values()))
