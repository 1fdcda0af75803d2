"""Start the ranks of a lesson with torchrun, on this machine; say in one line what went wrong.

    python torchrun.py LESSON.py [--nproc RANKS] [--launcher torchrun|launch] [lesson's flags]

This is torchrun (the function that the command calls), with two things changed.

The meeting: under `torchrun --standalone` the ranks meet at a store that listens on all addresses
of the machine. It has no password; whoever reaches it can read and overwrite what the ranks tell
each other. Here it listens on 127.0.0.1 only.

The report: torchrun prints a page about a rank that failed. Here rank.py writes down why each rank
ended, and the cause is told from its consequences: a rank that only lost its connection to another
one is never the cause, if there is another.

node.py calls it on each of several machines, and says by LOCKSTEP_NODES which they are.
"""

import json
import logging
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

RANK = Path(__file__).with_name("rank.py")
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes; the second by a handler
NODES = os.environ.get("LOCKSTEP_NODES", "this machine").split(",")
NODE_RANK = int(os.environ.get("LOCKSTEP_NODE_RANK", 0))


def read_flags(arguments):
    """Return (lesson, ranks, launcher, the lesson's flags); leave with one line if one is wrong."""
    lesson, *rest = arguments
    own, flags = {"--nproc": "2", "--launcher": "torchrun"}, []
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in own:
            flags.append(name + equals + value)
        elif equals or rest:
            own[name] = value if equals else rest.pop(0)
        else:
            refuse(lesson, f"{name}: expected one argument")
    nproc, launcher = own.values()
    if not re.fullmatch("[1-9][0-9]?", nproc) or int(nproc) > 64:
        refuse(lesson, f"--nproc: must be a whole number from 1 to 64, not '{nproc[:40]}'")
    if launcher not in ("torchrun", "launch"):
        refuse(lesson, f"--launcher: must be torchrun or launch, not '{launcher[:40]}'")
    return lesson, int(nproc), launcher, flags


def refuse(lesson, text):
    """Leave with one line and exit code 2."""
    print(f"{Path(lesson).name}: error: argument {text}", file=sys.stderr)
    sys.exit(2)


def check(lesson, nproc, flags):
    """Let the lesson check its flags, before any rank starts; leave if it finds a mistake.

    Without flags, and with no more ranks than the smallest default batch has rows for, there is
    nothing to check. It runs in this process, which needs torch as well: importing it takes longer
    than the check. So what is checked must leave no thread and no signal handler here.
    """
    asks_for_help = bool({"-h", "--help"} & set(flags))
    world_size = nproc * len(NODES)
    if not asks_for_help and world_size <= 8 and not set(flags) - {"--json"}:
        return
    place = {"RANK": str(NODE_RANK), "WORLD_SIZE": str(world_size)}
    arguments = [lesson, *(["--help"] if asks_for_help else ["--check", *flags])]
    with patch.object(sys, "argv", arguments), patch.dict(os.environ, place):
        try:
            runpy.run_path(lesson, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise
    if asks_for_help:
        sys.exit()


def start_ranks(launcher, nproc, folder, flags):
    """Run rank.py on each rank under torchrun. Raises ChildFailedError if a rank fails."""
    import torch.distributed.launch
    import torch.distributed.run
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OwnRendezvous(StaticTCPRendezvous):
        """A store that listens at one address: 127.0.0.1, if there is only this machine."""

        def get_backend(self):
            return "lockstep"

        def next_rendezvous(self):
            host, port, seconds = os.environ.get("LOCKSTEP_STORE", "127.0.0.1 0 60").split()
            options = {"wait_for_workers": False, "multi_tenant": True}
            if NODE_RANK == 0:
                listener = listen(host, int(port))
                host, port = listener.getsockname()[:2]
                options["master_listen_fd"] = listener.detach()
            else:
                wait_for_first_machine(host, int(port), int(seconds))
            store = TCPStore(host, int(port), is_master=NODE_RANK == 0, **options)
            check_in(store, int(seconds))
            place = RendezvousStoreInfo(host, int(port))
            return RendezvousInfo(store, NODE_RANK, len(NODES), place)

    def make(parameters):
        return OwnRendezvous("", 0, NODE_RANK, len(NODES), parameters.run_id, timeout=60)

    rendezvous_handler_registry.register("lockstep", make)
    command = ["--rdzv-backend=lockstep", "--rdzv-id=lesson", f"--log-dir={folder}"]
    command += [f"--nnodes={len(NODES)}", f"--nproc-per-node={nproc}", str(RANK), *flags]
    main = {"torchrun": torch.distributed.run.main, "launch": torch.distributed.launch.main}
    main[launcher](command)


def listen(host, port):
    """Return a socket that listens at this address; leave with one line if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        sys.exit(f"can't listen at {host}, port {port}: {error.strerror}; take another --port")


def wait_for_first_machine(host, port, seconds):
    """Return when it listens. TCPStore would wait as well, and longer, and write forty lines."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), 5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                why = f"no answer at {host}, port {port}, in {seconds} s ({error})"
                sys.exit(f"machine 0 ({NODES[0]}): {why}; is it started, with this --port?")
        time.sleep(0.2)


def check_in(store, seconds):
    """Return when all machines are here; else leave with one line that names those that are not."""
    names = [f"machine/{number}" for number in range(len(NODES))]
    store.set(names[NODE_RANK], "")
    try:
        store.wait(names, timedelta(seconds=seconds))
    except RuntimeError:
        late = [n for n, name in enumerate(names) if not store.check([name])]
        late = ", ".join(f"machine {n} ({NODES[n]})" for n in late)
        sys.exit(f"not here after {seconds} s: {late}; start it, and look at what it says itself")


def explain(failures, folder):
    """Return "rank N failed: ..." for the cause, or None if the ranks have said it themselves.

    `failures` is torchrun's {rank: how its process ended}, in the order in which it saw them end.
    When it has seen one, it ends the others by SIGTERM; so only the first can be somebody else's.
    """
    ends = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    for place, (rank, failure) in enumerate(failures.items()):
        if failure.exitcode in TERMINATED:
            if place == 0:
                return f"rank {rank} failed: killed by SIGTERM"
        elif failure.exitcode < 0:
            return f"rank {rank} failed: killed by {signal.Signals(-failure.exitcode).name}"
        elif rank not in ends:
            return f"rank {rank} failed: exit code {failure.exitcode}"
    failed = {rank: end for rank, end in ends.items() if end["reason"]}
    if not failed:
        return None
    for end in failed.values():
        end["late"] = "timed out" in end["reason"].lower()
    rank = min(failed, key=lambda rank: [failed[rank][key] for key in ("lost", "late", "time")])
    if failed[rank]["late"]:
        waited = "rank {rank} failed: {reason} (it waited for another rank, which did not come)"
        return waited.format_map(failed[rank])
    if not failed[rank]["lost"]:
        return "rank {rank} failed: {reason}".format_map(failed[rank])
    if len(NODES) > 1:
        return f"rank {rank} failed: it lost a rank of another machine, which says why"
    returned = [str(other) for other in sorted(ends) if not ends[other]["reason"]]
    others = f"rank {', '.join(returned)} had already returned" if returned else "nobody knows why"
    return f"rank {rank} failed: it lost the connection to another rank; {others}"


def main():
    """Start the ranks; return the exit code."""
    lesson, nproc, launcher, flags = read_flags(sys.argv[1:])
    if os.environ.get("LOCKSTEP_VERBOSE") != "1":
        logging.disable()  # torchrun's page; and its remark that it sets OMP_NUM_THREADS
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    check(lesson, nproc, flags)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LOCKSTEP_LESSON": lesson, "LOCKSTEP_ENDS": folder}
        try:
            start_ranks(launcher, nproc, folder, flags)
        except SignalException as stop:
            return 128 + stop.sigval
        except ChildFailedError as error:
            if text := explain(error.failures, Path(folder)):
                print(text, file=sys.stderr)
            codes = {failure.exitcode for failure in error.failures.values()}
            return 2 if codes == {2} else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
