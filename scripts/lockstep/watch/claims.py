"""What several lessons claim, judged by what their ranks were seen to do: proofs are made of it.

A function that is called wrong_... returns what is wrong as a sentence, or None.
"""

import contextlib
import math
import os
from collections import Counter
from itertools import chain
from typing import NamedTuple
from unittest.mock import patch

import numpy as np


class Verdict(NamedTuple):
    """What a proof says: the claim with its number, all that is wrong, what else is to be told."""

    claim: str
    wrong: list  # of sentences
    numbers: dict  # for --json
    lines: list  # to be printed before the verdict

    @property
    def passed(self):
        """Whether nothing is wrong."""
        return not self.wrong

    @property
    def words(self):
        """What follows PASS or FAIL."""
        return "; ".join([self.claim, *self.wrong])


def steps(job):
    """Return the updates of all ranks: [[update of rank 0, of rank 1, ...] of each step]."""
    return [list(step) for step in zip(*(rank.updates for rank in job.values()), strict=False)]


def broken(rules):
    """Return the sentences of {sentence that says what is wrong: whether all is well}."""
    return [sentence for sentence, holds in rules.items() if not holds]


# --- The group ---


def wrong_in_group(job, started):
    """All ranks that were started train together: is the group as large as their number?"""
    sizes = sorted({rank.group["world"] for rank in job.values() if rank.group})
    if list(job) == list(range(started)) and sizes == [started]:
        return None
    return f"{started} processes were started; the group has {', '.join(map(str, sizes)) or 'none'}"


def wrong_in_count(job, wanted):
    """Every rank makes as many updates."""
    made = [len(rank.updates) for rank in job.values()]
    return None if set(made) == {wanted} else f"updates, rank by rank: {made}, and not {wanted}"


# --- The rows ---


def steps_per_epoch(length, world_size, batch_size):
    """Return how many steps an epoch has: all ranks get as many rows, in batches of their own."""
    return math.ceil(math.ceil(length / world_size) / (batch_size // world_size))


def wrong_in_rows(job, length, batch_size):
    """Each epoch deals all rows out, none twice but to fill the last places, in a new order."""
    batches = [[update["asked"] for update in step] for step in steps(job)]
    world_size = len(job)
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


# --- The replicas ---


def wrong_in_replicas(job):
    """The parameters of all ranks are equal after each update, to the last bit."""
    for number, step in enumerate(steps(job)):
        if any(update["after"] != step[0]["after"] for update in step):
            return f"the replicas are not equal after step {number + 1}"
    return None


def spreads(job):
    """Return how far parameters differ between ranks after each update of which values are kept."""
    found = []
    for step in steps(job):
        of_ranks = [r.values(u) for r, u in zip(job.values(), step, strict=True)]
        if None not in of_ranks:
            stacked = np.stack([as_vector(values["after"]) for values in of_ranks])
            found.append(float(np.ptp(stacked, axis=0).max()))
    return found


def wrong_in_optimizer(job, model):
    """The optimizer of each rank has all parameters of this model, by name and in its order."""
    alike = [name for name, _ in model.named_parameters()]
    trained = [rank.names(update) for rank in job.values() for update in rank.updates[:1]]
    if len(trained) < len(job):
        return "a rank has made no update"
    return None if all(names == alike for names in trained) else "some parameters are not trained"


def as_vector(values):
    """Return {name: vector or None} as one vector; nan where there is none."""
    return np.concatenate([np.array([math.nan]) if v is None else v for v in values.values()])


# --- What is sent ---


def done_for_updates(rank):
    """Return what a rank has done for each update: [what it called, "forward", what DDP sent, ...].

    A call has the shape of its tensor, as in "all_reduce [[2], 'float64']"; what was sent inside
    backward() has its bytes, as in "allreduce_ 640"; it is known of updates whose values are kept.
    """
    done = [[]]
    for event in rank.events:
        if event["what"] == "call":
            done[-1].append(f"{event['name']} {event['shape']}")
        elif event["what"] == "forward" and event["grad"]:
            done[-1].append("forward")
        elif event["what"] == "sent":
            done[-1] += [f"{name} {nbytes}" for name, nbytes in event["calls"]]
        elif event["what"] == "update":
            done.append([])
    return done[:-1]


# --- What is printed ---


@contextlib.contextmanager
def hear():
    """Yield a list of the lines that this process prints meanwhile; they are printed as well."""
    said, show = [], print

    def say(*words):
        said.append(" ".join(map(str, words)))
        show(*words)

    with patch("builtins.print", say):
        yield said


def wrong_in_words(job, lines, speaker=0):
    """One rank has printed these lines, in this order, and the others nothing."""
    said = {rank: [event["text"] for event in seen.of("said")] for rank, seen in job.items()}
    for line, wanted in zip([*said.pop(speaker), *[""] * len(lines)], lines, strict=False):
        if line != wanted:
            return f"rank {speaker} says {line!r}, and not {wanted!r}"
    loud = [rank for rank, lines in said.items() if lines]
    return f"rank {loud[0]} prints, too" if loud else None


# --- What is written ---


def wrong_on_disk(events):
    """A power cut leaves the old file or the new: the data are on the disk before the name is.

    When a file is renamed, it was just sent there, and next its folder is; both are on one disk.
    """
    padded = [{}, *events, {}]
    for data, name, entry in zip(padded, padded[1:], padded[2:], strict=False):
        if name.get("what") == "rename":
            if data.get("what") != "sync" or any(
                data[key] != name[key] for key in ("file", "bytes")
            ):
                return f"{os.path.basename(name['new'])} could be there before its data"
            if (entry.get("what"), entry.get("file")) != ("sync", name["home"]) or name["stray"]:
                return "a new name is not sent to the disk, or comes from another folder"
    return None


def same_bits(one, other):
    """Return whether two states, dictionaries and lists of tensors and numbers, are equal."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


# --- One process ---


@contextlib.contextmanager
def one_thread():
    """Let torch compute in one thread: with small tensors the others only wait, at full speed."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fill(model, values):
    """Give a model these parameters, {name: vector}; raises KeyError if one of them is missing."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values[name]).reshape(parameter.shape))


def numbers_of(model, what):
    """Return what(parameter) of each parameter of a model, as one vector of numpy."""
    vectors = [what(parameter).detach().reshape(-1).numpy() for parameter in model.parameters()]
    return np.concatenate(vectors)


def off(theirs, ours):
    """Return the largest difference of two vectors; nan if they have not as many numbers."""
    return float(np.abs(theirs - ours).max()) if theirs.shape == ours.shape else math.nan


def worst(differences):
    """Return the largest; nan if one of them is, or if there is none."""
    return float(np.max(differences)) if differences else math.nan
