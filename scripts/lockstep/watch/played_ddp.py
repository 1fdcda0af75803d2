"""Ranks that are threads of one process: a script is played, with an average of ours for DDP's.

So a proof can run a script that it has edited, and compare: a play with ranks that were watched,
both with one process. What nobody has edited must be the same in a play and in real ranks.
"""

import contextlib
import math
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from lockstep.watch import claims, facts
from lockstep.watch.threads import Ranks


class Update(NamedTuple):
    """One update of a rank, or of one process."""

    rows: list  # checksums of what its model was given
    gradients: np.ndarray  # all of them, as one vector
    after: np.ndarray  # the parameters
    nbytes: int = 0  # what it handed to DDP's all-reduces, in a play


def updates_of(rank):
    """Return what a rank was seen to do, as a list of Update."""
    seen = []
    for update in rank.updates:
        kept = rank.values(update)
        vectors = [claims.as_vector(kept[what]) for what in ("gradients", "after")]
        seen.append(Update(update["given"], *vectors))
    return seen


def update_of(model, rows, nbytes=0):
    """Return the Update that a model in this process has just made."""
    gradients = claims.numbers_of(model, lambda parameter: parameter.grad)
    return Update(rows, gradients, claims.numbers_of(model, lambda p: p), nbytes)


def distance(everyone, alone, what="after"):
    """Return how far any rank ever is from one process: nan, if they can't be compared."""
    if {len(seen) for seen in everyone} != {len(alone)}:
        return math.nan
    pairs = chain(*(zip(seen, alone, strict=True) for seen in everyone))
    return claims.worst([claims.off(getattr(a, what), getattr(b, what)) for a, b in pairs])


def spoiled(everyone, alone):
    """Return what first differs from one process: rows, gradients, updates, or nothing."""
    for *ranks, right in zip(*everyone, alone, strict=False):
        if sorted(chain(*(update.rows for update in ranks))) != sorted(right.rows):
            return "rows"
        for what, name in (("gradients", "gradients"), ("after", "updates")):
            if not distance([[update] for update in ranks], [right], what) < 1e-12:
                return name
    return "nothing"


# --- A play ---


class Replica:
    """DDP, as a rank has it that is a thread of these."""

    def __init__(self, ranks, model, init_sync=True):
        self.ranks, self.module, self.waits = ranks, model, False
        self.rows, self.nbytes = [], 0  # since the last update
        own = [parameter.detach().clone() for parameter in model.parameters()]
        first = ranks.exchange("the first weights", own)[0]
        for parameter, value in zip(model.parameters(), first, strict=True):
            parameter.register_post_accumulate_grad_hook(self.average)
            if init_sync:
                parameter.data.copy_(value)

    def __call__(self, rows):
        self.rows += facts.row_checksums(rows)
        self.sends = not self.waits  # as DDP does: the forward decides
        return self.module(rows)

    @contextlib.contextmanager
    def no_sync(self):
        self.waits = True
        yield
        self.waits = False

    def average(self, parameter):
        """Take the mean over the ranks, if this backward sends."""
        if self.sends:
            self.nbytes += parameter.grad.nbytes
            parameter.grad = torch.stack(self.ranks.exchange("average", parameter.grad)).mean(0)

    def take_update(self):
        """Return the Update that was made, and begin the next one."""
        update = update_of(self.module, self.rows, self.nbytes)
        self.rows, self.nbytes = [], 0
        return update


def play(load, args, world_size):
    """Let so many threads run main(args) of load(rank), a script; return a list of Update for each.

    A script is a dictionary of its names. What it must have is join_group, dist, of which it may
    use what is here, DistributedDataParallel, and train_step(replica, ...), which makes an update.
    """
    ranks = Ranks(world_size)
    return ranks.play(lambda rank: play_rank(load(rank), args, rank, ranks))


def play_rank(script, args, rank, ranks):
    """Run a script's main(args) as one rank; return a list of Update."""
    seen, step = [], script["train_step"]

    def watched_step(replica, *others):
        step(replica, *others)
        seen.append(replica.take_update())

    world_size = len(ranks.given)
    place = {"get_rank": lambda: rank, "get_world_size": lambda: world_size}
    place |= {"all_reduce": ranks.all_reduce}
    place |= {"get_backend": lambda: "threads", "destroy_process_group": lambda: None}
    script["dist"] = SimpleNamespace(**place)
    script["DistributedDataParallel"] = partial(Replica, ranks)
    script["join_group"] = lambda: (rank, world_size, torch.device("cpu"))
    script |= {"train_step": watched_step, "print": lambda *words: None}
    script["main"](args)
    return seen
