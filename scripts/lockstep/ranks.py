"""Start the ranks of a script with torchrun, on this machine; say in one line what went wrong.

This is torchrun (the function that the command calls), with two things changed.

The meeting: under `torchrun --standalone` the ranks meet at a store that listens on all addresses
of the machine. It has no password; whoever reaches it can read and overwrite what the ranks tell
each other. Here it listens on 127.0.0.1 only.

The report: torchrun prints a page about a rank that failed. Here rank.py writes down why each rank
ended, and the cause is told from its consequences (ending.py).

machine.py calls it on each of several machines, and says by LOCKSTEP_NODES which they are.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from lockstep import ending, imports, joining, lessons, network, proofs
from lockstep.flags import Flags, split_at_dashes, whole

RANK = Path(__file__).with_name("rank.py")


class Job:
    """Which machines run the job, and which of them this one is: what machine.py has set."""

    def __init__(self):
        self.nodes = os.environ.get("LOCKSTEP_NODES", "this machine").split(",")
        self.node_rank = int(os.environ.get("LOCKSTEP_NODE_RANK", 0))
        host, port, seconds = os.environ.get("LOCKSTEP_STORE", "127.0.0.1 0 60").split()
        self.host, self.port, self.seconds = host, int(port), int(seconds)
        self.store = None  # where the machines meet


def main(script, arguments):
    """Start the ranks of a script with its flags and ours; return the exit code."""
    own, flags = read_flags(script, arguments)
    if not ending.verbose():
        logging.disable()  # torchrun's page; and its remark that it sets OMP_NUM_THREADS
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    job = Job()
    imports.import_quickly("torch.distributed.run")
    args = None
    if proofs.of_script(script):
        args = check(script, own.nproc, flags, job)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        proofs.Watch(script, folder, args, own.nproc * len(job.nodes)) as seen,
    ):
        os.environ |= {"LOCKSTEP_SCRIPT": str(script), "LOCKSTEP_ENDS": folder}
        os.environ["TMPDIR"] = folder  # so what a rank leaves that is ended goes with it
        os.environ["LOCKSTEP_PARENT"] = str(os.getpid())
        try:
            start_ranks(own, folder, [f for f in flags if f != "--json" or not seen.proof], job)
        except SignalException as stop:
            joining.end_what_ranks_have_left(folder)
            return 128 + stop.sigval
        except ChildFailedError as error:
            joining.end_what_ranks_have_left(folder)
            proofs.send_nothing(seen, job)
            return tell_failure(error.failures, Path(folder), script, job)
        finally:
            for signal_number in ending.WORDS:  # torchrun's own handlers would raise, too late
                signal.signal(signal_number, signal.SIG_IGN)
        if seen.proof:
            return proofs.judge(seen, args, own, job)
        is_one_of_many = own.nproc * len(job.nodes) > 1 and not lessons.of_script(script)
        if is_one_of_many and job.node_rank == 0 and not joining.has_seen("joined", folder):
            ending.say(f"note: {joining.ALONE}")
    return 0


def tell_failure(failures, folder, script, job):
    """Say in one line which rank is the cause, or that the script starts its own; return a code."""
    codes = ending.own_exit_codes(failures)
    text = ending.explain(codes, ending.read_ends(folder), len(job.nodes) > 1)
    if joining.has_seen("own", folder):
        text = f"{Path(script).name} failed: {joining.STARTS_ITS_OWN}"
    if text:
        ending.say(text)
    return 2 if set(codes.values()) == {2} else 1


def read_flags(script, arguments, fewest=1, default=2):
    """Return (our own flags, those of the script); what follows "--" is the script's as it is."""
    ours, theirs = split_at_dashes(arguments)
    parser = Flags(Path(script).name, add_help=False)
    parser.add_argument("--nproc", type=whole(fewest, 64), default=default)
    parser.add_argument("--launcher", choices=("torchrun", "launch"), default="torchrun")
    own, rest = parser.parse_known_args(ours)
    return own, rest + theirs


def check(script, nproc, flags, job):
    """Let the lesson check its flags, before any rank starts; leave if it finds a mistake.

    It runs in this process, which needs torch as well: importing it takes longer than the check. So
    what is checked must leave no thread and no signal handler here. It returns the flags.
    """
    asks_for_help = bool({"-h", "--help"} & set(flags))
    if asks_for_help and job.node_rank > 0:
        sys.exit()  # the first machine says it
    world_size = int(os.environ.get("LOCKSTEP_RANKS", nproc * len(job.nodes)))
    place = {"RANK": str(job.node_rank), "WORLD_SIZE": str(world_size)}
    place["LOCAL_WORLD_SIZE"] = str(nproc)
    if lessons.of_script(script).start == lessons.LAUNCH_JOB:
        flags = [*flags, f"--nproc={world_size}"]  # rank.py tells it so
    flags = ["--help"] if asks_for_help else flags
    with patch.object(sys, "argv", [str(script)]), patch.dict(os.environ, place):
        return proofs.read_flags(script, flags, world_size, nproc)


def start_ranks(own, folder, flags, job):
    """Run rank.py on each rank under torchrun. Raises ChildFailedError if a rank fails."""
    import torch.distributed.launch
    import torch.distributed.run

    register_rendezvous(job)
    command = ["--rdzv-backend=lockstep", "--rdzv-id=lesson", f"--log-dir={folder}"]
    command += [f"--nnodes={len(job.nodes)}", f"--nproc-per-node={own.nproc}"]
    command += ["--", str(RANK), *flags]  # without "--", torchrun would complain of a flag --nproc
    main = {"torchrun": torch.distributed.run.main, "launch": torch.distributed.launch.main}
    main[own.launcher](command)


def register_rendezvous(job):
    """Tell torchrun of --rdzv-backend=lockstep: a store that listens at one address only.

    That address is 127.0.0.1, if there is only this machine.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneAddress(StaticTCPRendezvous):
        def get_backend(self):
            return "lockstep"

        def next_rendezvous(self):
            host, port = job.host, job.port
            options = {"wait_for_workers": False, "multi_tenant": True}
            if job.node_rank == 0:
                listener = listen(host, port)
                host, port = listener.getsockname()[:2]
                options["master_listen_fd"] = listener.detach()
            else:
                wait_for_first_machine(job)
            store = TCPStore(host, port, is_master=job.node_rank == 0, **options)
            check_in(store, job)
            job.store = store
            place = RendezvousStoreInfo(host, port)
            return RendezvousInfo(store, job.node_rank, len(job.nodes), place)

    def make(parameters):
        place = job.node_rank, len(job.nodes), parameters.run_id
        return OneAddress("", 0, *place, timeout=60)

    rendezvous_handler_registry.register("lockstep", make)


def listen(host, port):
    """Return a socket that listens at this address; leave with one line if it is taken.

    In a rehearsal the one who started us listens already, and hands us the socket.
    """
    if "LOCKSTEP_LISTENER" in os.environ:
        return socket.socket(fileno=int(os.environ.pop("LOCKSTEP_LISTENER")))
    try:
        return network.listen_at(host, port)
    except OSError as error:
        sys.exit(f"can't listen at {host}, port {port}: {error.strerror}; take another --port")


def wait_for_first_machine(job):
    """Return when it listens. TCPStore would wait as well, and longer, and write forty lines."""
    end = time.monotonic() + job.seconds
    while True:
        try:
            socket.create_connection((job.host, job.port), 5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                why = f"no answer at {job.host}, port {job.port}, in {job.seconds} s ({error})"
                sys.exit(f"machine 0 ({job.nodes[0]}): {why}; is it started, with this --port?")
        time.sleep(0.2)


def check_in(store, job):
    """Return when all machines are here; else leave with one line that names those that are not."""
    names = [f"machine/{number}" for number in range(len(job.nodes))]
    store.set(names[job.node_rank], "")
    end = time.monotonic() + job.seconds
    with contextlib.suppress(RuntimeError):  # machine 0 has left
        while not store.check(names) and time.monotonic() < end:
            time.sleep(0.1)  # in store.wait no signal would be heard
        if store.check(names):
            return
    sys.exit(who_is_late(store, job, names))


def who_is_late(store, job, names):
    """Return the line that names the machines that have not come."""
    try:
        late = [n for n, name in enumerate(names) if not store.check([name])]
    except RuntimeError:  # machine 0 has waited in vain as well, and has taken the store with it
        return f"machine 0 ({job.nodes[0]}) has left: look at what it says itself"
    late = ", ".join(f"machine {n} ({job.nodes[n]})" for n in late)
    why = f"not here after {job.seconds} s: {late}"
    return f"{why}; start it, and look at what it says itself"
