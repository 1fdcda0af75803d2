"""Start the ranks of a lesson with torchrun, on this machine; say in one line what went wrong.

    python torchrun.py LESSON.py [--nproc RANKS] [--launcher torchrun|launch] [lesson's flags]

This is torchrun (the function that the command calls), with two things changed.

The meeting: under `torchrun --standalone` the ranks meet at a store that listens on all addresses
of the machine. It has no password; whoever reaches it can read and overwrite what the ranks tell
each other. Here it listens on 127.0.0.1 only.

The report: torchrun prints a page about a rank that failed. Here rank.py writes down why each rank
ended, and the cause is told from its consequences: a rank that only lost its connection to another
one is never the cause, if there is another.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")


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
    nothing to check.
    """
    asks_for_help = bool({"-h", "--help"} & set(flags))
    if asks_for_help or nproc > 8 or set(flags) - {"--json"}:
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(nproc)}
        command = [sys.executable, lesson, *(["--help"] if asks_for_help else ["--check", *flags])]
        code = subprocess.run(command, env=environment).returncode
        if code or asks_for_help:
            sys.exit(code)


def start_ranks(launcher, nproc, folder, flags):
    """Run rank.py on each rank under torchrun. Raises ChildFailedError if a rank fails."""
    import torch.distributed.launch
    import torch.distributed.run
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class LoopbackRendezvous(StaticTCPRendezvous):
        """One machine, and a store that listens on 127.0.0.1 and on no other address."""

        def get_backend(self):
            return "loopback"

        def next_rendezvous(self):
            listener = socket.create_server(("127.0.0.1", 0))
            host, port = listener.getsockname()
            listening = {"multi_tenant": True, "master_listen_fd": listener.detach()}
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, **listening)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(host, port))

    def make(parameters):
        return LoopbackRendezvous("127.0.0.1", 0, 0, 1, parameters.run_id, timeout=60)

    rendezvous_handler_registry.register("loopback", make)
    command = ["--rdzv-backend=loopback", "--rdzv-id=lesson", f"--log-dir={folder}"]
    command += [f"--nproc-per-node={nproc}", str(RANK), *flags]
    main = {"torchrun": torch.distributed.run.main, "launch": torch.distributed.launch.main}
    main[launcher](command)


def explain(failures, folder):
    """Return "rank N failed: ..." for the cause, or None if the ranks have said it themselves.

    `failures` is torchrun's {rank: how its process ended}.
    """
    ends = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    for rank, failure in failures.items():
        number = -failure.exitcode
        if number > 0 and number != signal.SIGTERM:  # SIGTERM came from torchrun itself
            return f"rank {rank} failed: killed by {signal.Signals(number).name}"
        if number < 0 and rank not in ends:
            return f"rank {rank} failed: exit code {failure.exitcode}"
    failed = {rank: end for rank, end in ends.items() if end["reason"]}
    if not failed:
        return None
    rank = min(failed, key=lambda rank: (failed[rank]["lost"], failed[rank]["time"]))
    if not failed[rank]["lost"]:
        return f"rank {rank} failed: {failed[rank]['reason']}"
    returned = [str(other) for other in sorted(ends) if not ends[other]["reason"]]
    others = f"rank {', '.join(returned)} had already returned" if returned else "nobody knows why"
    return f"rank {rank} failed: it lost the connection to another rank; {others}"


def main():
    """Start the ranks; return the exit code."""
    lesson, nproc, launcher, flags = read_flags(sys.argv[1:])
    check(lesson, nproc, flags)
    if os.environ.get("LOCKSTEP_VERBOSE") != "1":
        logging.disable()  # torchrun's page; and its remark that it sets OMP_NUM_THREADS
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
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
