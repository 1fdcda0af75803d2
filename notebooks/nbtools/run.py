"""Call a function in several real processes that have joined one process group."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle


class RankFailed(RuntimeError):
    """One or more ranks raised, died, or did not finish. `details` has the ranks' tracebacks."""

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
IF_USED = ["sklearn.datasets", "tqdm"]


def run(fn, nproc, *args, deadline=60):
    """Call `fn(rank, world_size, *args)` in `nproc` processes and return the values, by rank.

    The processes have joined one process group (gloo, on the CPU) before `fn` is called. `fn` may
    be defined in a notebook cell. What the ranks printed is printed here, in the order of ranks.

    Raises ValueError for a bad `nproc`, and RankFailed when a rank raises or dies, or when the
    ranks have not finished after `deadline` seconds. The ranks have ended in any case, and with a
    rank that fails or is late, the processes that it has started.
    """
    if not isinstance(nproc, int) or not 1 <= nproc <= 64:
        raise ValueError(f"nproc must be a whole number from 1 to 64, not {nproc!r}")
    _context.set_forkserver_preload(ALWAYS + [name for name in IF_USED if name in sys.modules])
    payload = cloudpickle.dumps((fn, args, dict(os.environ)))
    ranks, values, failures = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(nproc):
                receiver, sender = _context.Pipe(duplex=False)
                process = _context.Process(
                    target=_rank_main, args=(rank, nproc, payload, folder, deadline, sender)
                )
                ranks.append((process, receiver))
                process.start()
                sender.close()
            _collect(ranks, values, failures, time.monotonic() + deadline)
        finally:
            for process, _ in ranks:
                _kill(process)
            for rank in range(len(ranks)):
                _print_output(folder, rank)
        if failures:
            # The first failure is the cause. The other ranks only lost their neighbour.
            rank = min(failures, key=lambda rank: failures[rank][0])
            raise RankFailed(f"rank {rank}: {failures[rank][1]}", failures[rank][2])
    late = [str(rank) for rank in range(nproc) if rank not in values]
    if late:
        message = f"no answer after {deadline} s from rank {', '.join(late)}; all ranks were ended"
        raise RankFailed(message)
    return [values[rank] for rank in range(nproc)]


def _collect(ranks, values, failures, end):
    """Fill `values` and `failures` until every rank has answered, one has failed, or time is up."""
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while waiting and time.monotonic() < end:
        for receiver in wait(list(waiting), max(0, end - time.monotonic())):
            rank = waiting.pop(receiver)
            try:
                kind, *content = cloudpickle.loads(receiver.recv_bytes())
            except EOFError:  # the process is gone and has not said why
                ranks[rank][0].join(5)
                code = ranks[rank][0].exitcode or 0
                cause = (
                    f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                )
                failures[rank] = (0.0, cause, "")  # time 0: nothing else can be the cause
                continue
            if kind == "value":
                values[rank] = content[0]
            else:
                failures[rank] = content
        if failures:  # allow the true cause a moment to arrive, then stop
            end = min(end, time.monotonic() + 0.3)


def _kill(process):
    """End a rank and whatever it has started (the members of its process group)."""
    if process.pid is None:
        return
    if process.is_alive():
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(process.pid, signal.SIGKILL)
    process.join()


def _print_output(folder, rank):
    """Print what a rank wrote, with its rank in front of each line."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        path = Path(folder, f"{name}_{rank}")
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            print(f"[rank {rank}] {line}", file=stream)


def _rank_main(rank, world_size, payload, folder, deadline, sender):
    """Be one rank: join the group, call the function, send back its value or its error."""
    os.setpgid(0, 0)  # a process group of our own, so that _kill gets our children as well
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for number, name in ((1, "stdout"), (2, "stderr")):  # also what C++ code writes
        os.dup2(os.open(Path(folder, f"{name}_{rank}"), os.O_WRONLY | os.O_CREAT), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))
    try:
        import torch
        import torch.distributed as dist

        fn, args, environment = cloudpickle.loads(payload)
        os.environ.update(environment)  # the forkserver may be older than the notebook's changes
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
        torch.seed()  # forks of one process would all draw the same "random" numbers
        loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
        if loopback:  # all ranks are here: do not depend on the host's name or network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        store = dist.FileStore(str(Path(folder, "rendezvous")), world_size)
        limit = timedelta(seconds=deadline)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        dist.barrier()  # a rank that left before all have met would break the meeting
        answer = cloudpickle.dumps(("value", fn(rank, world_size, *args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        cause = f"{text} (in {frame.name}, line {frame.lineno})"
        answer = cloudpickle.dumps(("error", time.monotonic(), cause, traceback.format_exc()))
    sender.send_bytes(answer)


def _leave_with_parent():
    """End this process when the notebook's kernel is gone, however it ended."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
