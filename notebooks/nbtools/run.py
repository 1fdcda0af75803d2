"""Call a function in several real processes that have joined one process group."""

import contextlib
import inspect
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from lockstep import ending, network
from lockstep.own_time import OwnTime

from nbtools import blame
from nbtools.blame import Failure, NotSent, RankFailed, describe, pickle, unpickle

# A forkserver imports torch once; each rank is then a fork of it, ready in 0.1 s. A plain fork of
# the notebook's kernel can hang, because the kernel has threads; a spawn imports torch every time.
_context = multiprocessing.get_context("forkserver")
# The forkserver imports these. It finds nbtools if it starts in notebooks/, as Jupyter's kernels
# do; then nbtools.warm has imported the others already.
SLOW = ["nbtools.warm", "torch.distributed", "torch._dynamo", "cloudpickle"]
SLOW_AND_RARE = ["sklearn.datasets", "torch.distributed.pipelining"]  # and these, if ranks will

PATIENCE = {False: 0.3, True: 5}  # seconds for the true cause to arrive, if this one is secondary
MEETING = 300  # seconds that ranks have to start and to meet
STILL = 1  # seconds without a move: those that are left seem to wait for one that has returned
WORKING = 3  # times the deadline, if ranks still move: they work, or run in a circle
MET = True  # what a rank sends when it has met the others
KEPT = 100_000  # bytes at the beginning of what a rank writes, and as many at the end


def run(fn, nproc, *args, deadline=60):
    """Call `fn(rank, world_size, *args)` in `nproc` processes and return the values, by rank.

    The processes have joined one process group (gloo, on the CPU) before `fn` is called. `fn` may
    be defined in a notebook cell. What the ranks printed is printed here, in the order of ranks;
    of a stream of more than 200 kB only the first and the last 100 kB.

    The ranks leave together: one that has returned keeps its groups, because another may still be
    connecting to it. It ends when all have returned, and when no other moves any more, nor makes a
    group: they seem to wait for it, and now lose it. Its threads end with it.

    Time is up when the ranks have met, and then none has moved for `deadline` seconds, or when they
    have worked for three times as long. These seconds are their own time (own_time.py): who is late
    for the meeting takes nothing from them, nor, on Linux, do other programs on a busy machine.

    Several threads may call it at once.

    Raises ValueError for a bad `nproc`, and RankFailed when a rank raises or dies, when time is up
    (it says where each rank is), and when `fn`, its arguments or a value can't be pickled. In any
    case the ranks have ended, and the processes that they have started (unless those have left the
    ranks' process group).
    """
    if not isinstance(nproc, int) or not 1 <= nproc <= 64:
        raise ValueError(f"nproc must be a whole number from 1 to 64, not {nproc!r}")
    try:
        payload = pickle((fn, args, dict(os.environ)), "the function or one of its arguments")
    except NotSent as error:
        raise RankFailed(str(error)) from None
    _context.set_forkserver_preload(SLOW + [name for name in SLOW_AND_RARE if _is_needed(name)])
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            here, away = shlex.quote(folder), shlex.quote(f"{folder}.end")
            # Moved away first: ranks may still write there.
            with process_group(f"mv {here} {away}; rm -rf {away}") as group:
                for number in range(nproc):
                    ranks.append(_Rank(number, folder))
                    ranks[-1].start(nproc, payload, folder, group)
                seconds = _collect(ranks, deadline)
                failure = _find_failure(ranks, seconds)
        finally:
            for rank in ranks:
                rank.end()
    if failure is not None:
        raise failure
    return [rank.value for rank in ranks]


def _is_needed(name):
    """Return whether the caller has imported this module, or a function of one of his lessons will.

    A lesson imports a slow module in the function that uses it. So we see it in that function.
    """
    modules = sys.modules.copy()  # at one stroke, as list() is not: another thread may be importing
    lessons = [module for key, module in modules.items() if key.startswith("lesson_")]
    things = [thing for lesson in lessons for thing in list(vars(lesson).values())]
    functions = filter(inspect.isfunction, things)
    return name in sys.modules or any(name in fn.__code__.co_names for fn in functions)


def wait_for_all(rank, world_size, moment="here"):
    """On a rank of run(): return when all its ranks have called this, for each `moment` once.

    They need no group for it, and keep no connection: it also holds ranks together that have left
    their group, or did not get into one. (Each leaves a file in the folder of this run. So a second
    call with the same moment returns at once.)
    """
    folder = Path(os.environ["TMPDIR"])
    Path(folder, f"{moment} {rank}").touch()
    while len(list(folder.glob(f"{moment} *"))) < world_size:
        time.sleep(0.01)


@contextlib.contextmanager
def process_group(farewell):
    """Yield the number of a new process group. At the end of the block, all that is in it is ended.

    The same happens when this process is gone, even by SIGKILL: the leader of the group is a shell
    that waits for the end of its input, a pipe whose other end only we have. It then runs the
    shell command `farewell` and kills the group.
    """
    script = f"trap '' TERM; read line; {farewell}; kill -KILL 0"
    leader = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, process_group=0)
    try:
        yield leader.pid
    finally:
        # The leader is our child. Before we wait for it, nobody else is given its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.stdin.close()
        leader.wait()


# --- A rank, as the notebook's kernel sees it ---


class _Rank:
    def __init__(self, number, folder):
        self.number = number
        self.receiver, self.sender = _context.Pipe(duplex=False)
        self.streams = [_Stream(name, number) for name in ("stdout", "stderr")]
        self.stacks = Path(folder, f"stacks_{number}")
        self.stacks.touch()
        self.joins = Path(folder, f"joins_{number}")  # is there while it connects to others
        self.process = None
        self.has_met = self.answered = False
        self.value = None
        self.failure = None

    def start(self, nproc, payload, folder, group):
        writers = [stream.writer for stream in self.streams]
        arguments = (self.number, nproc, payload, folder, group, self.sender, writers)
        self.process = _context.Process(target=rank_main, args=arguments)
        self.process.start()
        for end in (self.sender, *writers):
            end.close()

    def read_answer(self):
        """Set `has_met`, `value` or `failure`; the rank has sent one of them, or is gone."""
        try:
            answer = self.receiver.recv() if self.receiver.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is MET:
            self.has_met = True
            return
        self.answered = True
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
        place = blame.read_place(self.stacks)
        stderr = self.streams[1]
        stderr.read()
        thrown = re.search(r"what\(\): *(.*)", (stderr.head + stderr.tail).decode(errors="replace"))
        message = f": {cause}" + (f" {place}" if place else "")
        message += f": {ending.in_plain_words(thrown[1])}" if thrown else ""
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


class _Stream:
    """What a rank writes to stdout or stderr: a pipe of which the first and last part are kept."""

    def __init__(self, name, rank):
        self.name = name
        self.rank = rank
        self.reader, self.writer = _context.Pipe(duplex=False)
        self.open = True
        self.head = b""
        self.tail = b""
        self.left_out = 0
        os.set_blocking(self.reader.fileno(), False)

    def fileno(self):
        return self.reader.fileno()

    def read(self):
        """Read what is there, 1 MB at most: a rank that writes without end must not hold us up."""
        for _ in range(16):
            try:
                data = os.read(self.fileno(), 2**16)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            room = KEPT - len(self.head)
            self.head += data[:room]
            tail = self.tail + data[room:]
            self.tail = tail[-KEPT:]
            self.left_out += len(tail) - len(self.tail)

    def close(self):
        """Print what was kept, with the rank in front of each line, and close our ends."""
        self.read()
        self.reader.close()
        self.writer.close()
        parts = [self.head + self.tail]
        if self.left_out:
            note = f"... {self.left_out:,} bytes were left out here ..."
            parts = [self.head, note.encode(), self.tail]
        lines = [line for part in parts for line in part.decode(errors="replace").splitlines()]
        text = "".join(f"[rank {self.rank}] {line}\n" for line in lines)
        print(text, end="", file=getattr(sys, self.name))


def _collect(ranks, deadline):
    """Read answers until every rank has answered, one has failed, or time is up.

    Return the seconds after which it is up: `deadline`, if no rank has moved.
    """
    waiting, clock, begun, end = list(ranks), OwnTime(), False, MEETING
    while waiting and clock.look(rank.process.pid for rank in waiting) < end:
        if begun and clock.still >= deadline:
            return deadline
        streams = [stream for rank in ranks for stream in rank.streams if stream.open]
        answers = [end for rank in waiting for end in (rank.receiver, rank.process.sentinel)]
        ready = wait(streams + answers, min(0.25, max(0, end - clock.seconds)))
        for stream in streams:
            if stream in ready:
                stream.read()
        for rank in waiting:
            if rank.receiver in ready or rank.process.sentinel in ready:
                rank.read_answer()
                if rank.failure is not None:  # allow the true cause a moment to arrive, then stop
                    end = min(end, clock.seconds + PATIENCE[rank.failure.secondary])
        waiting = [rank for rank in waiting if not rank.answered]
        if not begun and all(rank.has_met for rank in ranks):
            begun, clock.still = True, 0.0
            if not any(rank.failure for rank in ranks):
                end = clock.seconds + WORKING * deadline
        if any(rank.joins.exists() for rank in waiting):
            clock.still = 0.0  # none stands still while a group is made: some may be late for it
        if begun and clock.still > STILL:
            for rank in ranks:
                if rank.answered and rank.process.is_alive():
                    rank.process.kill()  # who waits for it now loses it, and says so
    return WORKING * deadline


def _find_failure(ranks, seconds):
    """Return the exception that tells what has gone wrong, or None."""
    waiting = [rank for rank in ranks if not rank.answered]
    failed = [rank for rank in ranks if rank.failure is not None]
    returned = [rank for rank in ranks if rank.answered and rank.failure is None]
    if not failed and not waiting:
        return None
    states = {rank.number: ("had already returned",) * 2 for rank in returned}
    if not failed:
        late = f"no answer after {seconds} s"
        if not all(rank.has_met for rank in ranks):
            late = f"the ranks have not met after {MEETING} s"
        return RankFailed(f"{late}: {blame.sentence(_ask(waiting) | states)}")
    # The first failure is the cause. The other ranks only lost their neighbour.
    first = min(failed, key=lambda rank: (rank.failure.secondary, rank.failure.time))
    message = f"rank {first.number}{first.failure.message}"
    if first.failure.secondary and returned:
        message += f", because {blame.sentence(states)}"
        message += ": do all ranks call the same collectives, with tensors of the same size?"
    elif first.failure.secondary and waiting:
        message += f"; {blame.sentence(_ask(waiting))}"
    return RankFailed(message, first.failure.details)


def _ask(ranks):
    stacks = blame.ask([rank.process for rank in ranks], [rank.stacks for rank in ranks])
    return {rank.number: blame.state(one) for rank, one in zip(ranks, stacks, strict=True)}


# --- A rank, as it sees itself ---


def rank_main(rank, world_size, payload, folder, group, sender, writers):
    """Be one rank: join the group, call the function, send back its value or its error."""
    os.setpgid(0, group)  # which ends with the notebook's kernel, and with it our children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook to handle
    blame.listen(Path(folder, f"stacks_{rank}"))
    for number, name, writer in ((1, "stdout", writers[0]), (2, "stderr", writers[1])):
        os.dup2(writer.fileno(), number)  # so it gets also what C++ code writes
        writer.close()
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))
    try:
        fn, args, _store = _begin(rank, world_size, payload, folder)
        sender.send(MET)
        answer = _value(fn(rank, world_size, *args))
    except BaseException as error:
        answer = describe(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    _send(sender, answer)
    while not isinstance(answer, Failure):  # its groups stay until run() ends this process
        signal.pause()
    os._exit(1)  # no object of C++ is taken to pieces: that can block, or abort the process


def _value(value):
    return pickle(value, "the value that it returned")


def _send(sender, answer):
    sender.send(answer)


def _begin(rank, world_size, payload, folder):
    """Join the process group; return the function, its arguments and the store."""
    import torch
    import torch.distributed as dist

    fn, args, environment = unpickle(payload, "the function or one of its arguments")
    os.environ.update(environment)  # the forkserver may be older than the notebook's changes
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    torch.seed()  # forks of one process would all draw the same "random" numbers
    loopback = network.loopback()
    if loopback:  # all ranks are here: do not depend on the host's name or network
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # what a rank leaves goes with the folder
    blame.mark_while_it_joins(dist.distributed_c10d, Path(folder, f"joins_{rank}"))
    store = dist.FileStore(str(Path(folder, "rendezvous")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # a rank that left before all have met would break the meeting
    return fn, args, store
