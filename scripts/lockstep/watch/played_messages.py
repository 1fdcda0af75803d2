"""Ranks that threads of this process play: what they send each other is seen, and nothing leaves.

For functions that call send, recv, isend, irecv and their batches as dist.send and so on. What is a
race over a network is the same each time here: a message is what its buffer held when it was
posted, who has not waited for it has not got it, and who sends waits until he is asked, as in gloo.
"""

import threading
from collections import defaultdict
from itertools import combinations
from typing import NamedTuple
from unittest.mock import patch

from lockstep.watch.messages import COLLECTIVES


class Stuck(Exception):
    """Nobody can go on: each rank waits for another one, or has ended."""


class Op(NamedTuple):
    """One end of a message, as P2POp makes it."""

    sends: bool
    tensor: object
    other: int  # rank
    tag: int
    group = None  # this, op and peer: for those who read a P2POp, as torch.distributed.pipelining

    @property
    def peer(self):
        return self.other

    group_peer = peer

    @property
    def op(self):
        import torch.distributed as dist

        return dist.isend if self.sends else dist.irecv


class Rank:
    """What one rank has done.

    rounds: what it has started before it waits, [(sends?, other rank, bytes)], in order. held: what
    it had before each of them, and in the end. value: what its function has returned; error: what
    it has raised, also Stuck; wrong: sentences.
    """

    def __init__(self, number):
        self.number, self.rounds, self.wrong, self.works, self.held = number, [], [], [], []
        self.value, self.error, self.posting = None, None, False

    def end(self):
        """Say what is wrong with its messages as a whole."""
        for ops in self.rounds:  # over a slow link it takes up to twice the time: see page 16
            sends = [sends for sends, *_ in ops]
            if sends != sorted(sends):
                self.wrong.append("a send is posted before its receive")
        forgotten = sum(not work.waited for work in self.works)
        if forgotten and not self.error:
            self.wrong.append(f"nobody waits for {forgotten} messages")


class Work:
    """A message that is under way, at one of its ends."""

    def __init__(self, stage, rank, op):
        if not op.tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")  # gloo's words
        self.stage, self.rank, self.op = stage, rank, op
        self.copy, self.partner, self.waited = op.tensor.clone(), None, False

    def wait(self, *timeout):
        """Return when both ends are there; raises Stuck if that will never be."""
        self.stage.meet(self)
        self.rank.posting, first, self.waited = False, not self.waited, True
        if first and not self.op.sends:
            came, place = as_bytes(self.partner.copy), as_bytes(self.op.tensor)
            if len(came) != len(place):
                self.rank.wrong.append("a receive is not as long as its message")
            length = min(len(came), len(place))
            place[:length] = came[:length]
        elif first and not same(self.op.tensor, self.copy):
            self.rank.wrong.append("a buffer is changed while it is being sent")
        self.op = self.op._replace(tensor=None)  # what is through keeps no memory alive
        return True


def as_bytes(tensor):
    """Return the bytes of a contiguous tensor, in the same memory."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def same(one, other):
    """Return whether two tensors have the same bits; -0.0 is not 0.0, and nan is nan."""
    return one.shape == other.shape and as_bytes(one).equal(as_bytes(other))


def overlap(one, other):
    """Return whether two tensors share memory."""
    begin = max(one.data_ptr(), other.data_ptr())
    return begin < min(one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes)


class Stage:
    """Where ranks meet: who waits for whom, and what is posted."""

    def __init__(self, world_size, holds):
        self.ranks, self.here = [Rank(number) for number in range(world_size)], threading.local()
        self.holds = holds
        self.moved = threading.Condition()
        self.posted = defaultdict(list)  # works without a partner, by (source, target, tag, sends?)
        self.blocked, self.ended, self.stuck = {}, 0, False  # blocked: the work, by rank

    def be(self, rank, act):
        """Be one rank, in a thread."""
        self.here.rank = rank
        try:
            rank.value = act(rank.number, len(self.ranks))
        except Exception as error:
            rank.error = error
        rank.held.append(self.holds(rank.number))
        rank.end()
        with self.moved:
            self.ended += 1
            self.look()

    def look(self):
        """End the wait of all, if nobody can go on."""
        if len(self.blocked) + self.ended == len(self.ranks):
            self.stuck = True
            self.moved.notify_all()

    def meet(self, work):
        """Wait until the other end of a message is posted."""
        with self.moved:
            if work.partner is None:
                self.blocked[work.rank.number] = work
                self.look()
            while work.partner is None and not self.stuck:
                self.moved.wait()
            if work.partner is None:
                raise Stuck("each rank waits for another one, or has ended")

    def post(self, ops):
        """Start messages of this rank, all at once; return a Work for each."""
        rank = self.here.rank
        if not rank.posting:
            rank.rounds.append([])
            rank.held.append(self.holds(rank.number))
        rank.posting = True
        works = [Work(self, rank, op) for op in ops]
        rank.rounds[-1] += [(op.sends, op.other, op.tensor.nbytes) for op in ops]
        rank.works += works
        under_way = [work.op for work in rank.works if not work.waited]
        for one, other in combinations(under_way, 2):
            if not (one.sends and other.sends) and overlap(one.tensor, other.tensor):
                rank.wrong.append("a message arrives in memory that another one still uses")
        with self.moved:
            for work in works:
                self.match(work)
            self.moved.notify_all()
        return works

    def match(self, work):
        """Give a new work the first that waits at the other end; else it waits itself."""
        sends, _, other, tag = work.op
        way = (work.rank.number, other) if sends else (other, work.rank.number)
        if not self.posted[*way, tag, not sends]:
            self.posted[*way, tag, sends].append(work)
            return
        work.partner = self.posted[*way, tag, not sends].pop(0)
        work.partner.partner = work
        if self.blocked.get(other) is work.partner:
            del self.blocked[other]

    def functions(self):
        """Return what stands in the place of functions of torch.distributed, by name."""

        def P2POp(op, tensor, peer=None, group=None, tag=0, group_peer=None):
            return Op(op.__name__ == "isend", tensor, group_peer if peer is None else peer, tag)

        def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
            return self.post([P2POp(isend, tensor, dst, group, tag, group_dst)])[0]

        def irecv(tensor, src=None, group=None, tag=0, group_src=None):
            return self.post([P2POp(irecv, tensor, src, group, tag, group_src)])[0]

        def recv(*args, **options):
            work = irecv(*args, **options)
            work.wait()
            return work.op.other

        def forbid(name):
            def forbidden(*args, **options):
                raise RuntimeError(f"beside send and receive it calls {name}")

            return forbidden

        found = {name: forbid(name) for name in COLLECTIVES}
        found |= {"get_rank": lambda group=None: self.here.rank.number}
        found |= {"get_world_size": lambda group=None: len(self.ranks)}
        found |= {"P2POp": P2POp, "isend": isend, "irecv": irecv, "recv": recv}
        found["send"] = lambda *args, **options: isend(*args, **options).wait() and None
        return found | {"batch_isend_irecv": self.post}


def play(world_size, act, holds=lambda rank: None):
    """Let threads play so many ranks, each calls act(rank, world_size); return what each did.

    holds(rank) is what that rank has; it is noted before each of its rounds, and in the end.
    """
    import torch.distributed as dist

    stage = Stage(world_size, holds)
    with patch.multiple(dist, **stage.functions()):
        threads = [threading.Thread(target=stage.be, args=(r, act)) for r in stage.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return stage.ranks


def on_a_clock(everyone):
    """Play messages, the rounds of each rank, again, on a clock on which a message takes 1.

    What a rank starts together, as the two directions of a swap, travels at once. Returns
    [(when it ends: its round, source, target, bytes)]; None, if some messages never meet.
    """
    now, left = [0] * len(everyone), [[list(ops) for ops in rounds] for rounds in everyone]
    ends, found = list(now), []
    while any(left):
        before = [[len(ops) for ops in rounds] for rounds in left]
        for rank, rounds in enumerate(left):
            for op in [op for op in (rounds[0] if rounds else ()) if op[0]]:
                _, other, nbytes = op
                if left[other] and (False, rank, nbytes) in left[other][0]:
                    rounds[0].remove(op), left[other][0].remove((False, rank, nbytes))
                    end = max(now[rank], now[other]) + 1
                    ends[rank], ends[other] = max(ends[rank], end), max(ends[other], end)
                    found.append((end, rank, other, nbytes))
        for rank, rounds in enumerate(left):
            if rounds and not rounds[0]:
                now[rank] = ends[rank]
                rounds.pop(0)
        if [[len(ops) for ops in rounds] for rounds in left] == before:
            return None
    return sorted(found)
