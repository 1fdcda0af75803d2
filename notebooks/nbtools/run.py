"""Call a function in several real processes that have joined one process group."""

import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from nbtools import where
from nbtools.failure import Failure, NotSent, describe, in_plain_words, pickle, unpickle
from nbtools.group import process_group
from nbtools.rank import rank_main
from nbtools.stream import Stream


class RankFailed(RuntimeError):
    """One or more ranks raised, died, or did not finish. `details` has a rank's traceback."""

    def __init__(self, message, details=""):
        super().__init__(message)
        self.details = details

    def _render_traceback_(self):  # IPython asks for this: one line instead of a page
        return [f"{type(self).__name__}: {self}"]


# A forkserver imports torch once; each rank is then a fork of it, ready in 0.1 s. A plain fork of
# the notebook's kernel can hang, because the kernel has threads; a spawn imports torch every time.
# The forkserver also imports what is slow to import and what the caller has imported by now.
_context = multiprocessing.get_context("forkserver")
ALWAYS = ["torch.distributed", "torch._dynamo", "cloudpickle"]
IF_USED = ["sklearn.datasets", "torch.distributed.tensor.parallel", "tqdm"]

PATIENCE = {False: 0.3, True: 5}  # seconds for the true cause to arrive, if this one is secondary


def run(fn, nproc, *args, deadline=60):
    """Call `fn(rank, world_size, *args)` in `nproc` processes and return the values, by rank.

    The processes have joined one process group (gloo, on the CPU) before `fn` is called. `fn` may
    be defined in a notebook cell. What the ranks printed is printed here, in the order of ranks;
    of a stream of more than 200 kB only the first and the last 100 kB.

    Raises ValueError for a bad `nproc`, and RankFailed when a rank raises or dies, when the ranks
    have not finished after `deadline` seconds (it says where each of them is), and when `fn`, its
    arguments or a value can't be pickled. In any case the ranks have ended, and the processes that
    they have started (unless those have left the ranks' process group).
    """
    if not isinstance(nproc, int) or not 1 <= nproc <= 64:
        raise ValueError(f"nproc must be a whole number from 1 to 64, not {nproc!r}")
    try:
        payload = pickle((fn, args, dict(os.environ)), "the function or one of its arguments")
    except NotSent as error:
        raise RankFailed(str(error)) from None
    _context.set_forkserver_preload(ALWAYS + [name for name in IF_USED if name in sys.modules])
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with process_group(f"rm -rf {shlex.quote(folder)}") as group:
                for number in range(nproc):
                    ranks.append(_Rank(number, folder))
                    ranks[-1].start(nproc, payload, folder, deadline, group)
                _collect(ranks, time.monotonic() + deadline)
                failure = _find_failure(ranks, deadline)
        finally:
            for rank in ranks:
                rank.end()
    if failure is not None:
        raise failure
    return [rank.value for rank in ranks]


class _Rank:
    """A rank, as the notebook's kernel sees it."""

    def __init__(self, number, folder):
        self.number = number
        self.receiver, self.sender = _context.Pipe(duplex=False)
        self.streams = [Stream(name, number, _context) for name in ("stdout", "stderr")]
        self.stacks = Path(folder, f"stacks_{number}")
        self.process = None
        self.answered = False
        self.value = None
        self.failure = None

    def start(self, nproc, payload, folder, deadline, group):
        writers = [stream.writer for stream in self.streams]
        arguments = (self.number, nproc, payload, folder, deadline, group, self.sender, writers)
        self.process = _context.Process(target=rank_main, args=arguments)
        self.process.start()
        for end in (self.sender, *writers):
            end.close()

    def read_answer(self):
        """Set `value` or `failure`; the rank has sent one of them, or is gone."""
        self.answered = True
        try:
            answer = self.receiver.recv() if self.receiver.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            self.failure = self._describe_death()
        elif isinstance(answer, Failure):
            self.failure = answer
        else:
            try:
                self.value = unpickle(answer, "the value that it returned")
            except NotSent as error:
                self.failure = describe(error)

    def _describe_death(self):
        """Say what has ended this process, and where it was if it could write that down."""
        self.process.join(5)
        code = self.process.exitcode or 0
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        place = where.read_place(self.stacks)
        stderr = self.streams[1]
        stderr.read()
        thrown = re.search(r"what\(\): *(.*)", (stderr.head + stderr.tail).decode(errors="replace"))
        message = f": {cause}" + (f" {place}" if place else "")
        message += f": {in_plain_words(thrown[1])}" if thrown else ""
        return Failure(0.0, False, message)  # time 0: nothing else can be the cause

    def end(self):
        """Wait for the end of this process, and print what it has written."""
        if self.process is not None and self.process.pid is not None:
            self.process.join(1)
            if self.process.is_alive():  # it had not yet joined the group that has been killed
                self.process.kill()
            self.process.join()
        for stream in self.streams:
            stream.close()
        self.receiver.close()
        self.sender.close()


def _collect(ranks, end):
    """Read answers until every rank has answered, one has failed, or time is up."""
    waiting = list(ranks)
    while waiting and time.monotonic() < end:
        streams = [stream for rank in ranks for stream in rank.streams if stream.open]
        answers = [end for rank in waiting for end in (rank.receiver, rank.process.sentinel)]
        ready = wait(streams + answers, max(0, end - time.monotonic()))
        for stream in streams:
            if stream in ready:
                stream.read()
        for rank in waiting:
            if rank.receiver in ready or rank.process.sentinel in ready:
                rank.read_answer()
                if rank.failure is not None:  # allow the true cause a moment to arrive, then stop
                    end = min(end, time.monotonic() + PATIENCE[rank.failure.secondary])
        waiting = [rank for rank in waiting if not rank.answered]


def _find_failure(ranks, deadline):
    """Return the exception that tells what has gone wrong, or None."""
    waiting = [rank for rank in ranks if not rank.answered]
    failed = [rank for rank in ranks if rank.failure is not None]
    returned = [rank for rank in ranks if rank.answered and rank.failure is None]
    if not failed and not waiting:
        return None
    states = {rank.number: ("had already returned",) * 2 for rank in returned}
    if not failed:
        return RankFailed(f"no answer after {deadline} s: {where.sentence(_ask(waiting) | states)}")
    # The first failure is the cause. The other ranks only lost their neighbour.
    first = min(failed, key=lambda rank: (rank.failure.secondary, rank.failure.time))
    message = f"rank {first.number}{first.failure.message}"
    if first.failure.secondary and returned:
        message += f", because {where.sentence(states)}"
        message += ": do all ranks call the same collectives, with tensors of the same size?"
    elif first.failure.secondary and waiting:
        message += f"; {where.sentence(_ask(waiting))}"
    return RankFailed(message, first.failure.details)


def _ask(ranks):
    states = where.ask([rank.process for rank in ranks], [rank.stacks for rank in ranks])
    return {rank.number: state for rank, state in zip(ranks, states, strict=True)}
