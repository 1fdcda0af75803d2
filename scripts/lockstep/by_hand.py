"""Start each rank of lesson 04 by a line that a person could type; tell the lines, and the cause.

A rank is run by rank.py, as under torchrun, so that it writes down how it ended.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep import ending, lessons, network, proofs
from lockstep.run import OF_A_JOB

RANK = Path(__file__).with_name("rank.py")
METHODS = ("env", "tcp", "file", "store")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOST_AND_PORT = r"(\[[^][/]+\]|[^][/:]+):(\d{1,5})"  # [::1]:29500, or host:29500


# --- Flags ---


def by_environment(args):
    """Return whether variables make this process one rank of a job."""
    return args.init == "env" and args.rank is None and "RANK" in os.environ


def told(args):
    """Return the rank that this process is to be, or None if it is to start them all."""
    return int(os.environ["RANK"]) if by_environment(args) else args.rank


def problem(args):
    """Return why nobody can meet with these flags, or in this environment; or None."""
    method, _, place = args.init.partition("://")
    if by_environment(args):
        return wrong_in_variables(*(os.environ.get(name, "") for name in VARIABLES))
    if method not in METHODS:
        return f"argument --init: must be {', '.join(METHODS)} or METHOD://PLACE"
    if args.rank is not None and args.init.startswith("env://"):
        return "argument --rank: --init env takes it from RANK"
    if args.rank is not None and args.rank >= args.nproc:
        return f"argument --rank: must be from 0 to {args.nproc - 1}"
    wrong = None
    if method == "file" and place:
        wrong = wrong_in_file(place, args.rank is None)
    elif place or args.rank is not None:
        found = re.fullmatch(HOST_AND_PORT, place)
        wrong = None if found and 0 < int(found[2]) < 65536 else "nobody can meet at {}"
    return wrong and f"argument --init: {wrong.format(repr(place[:80]))}"


def wrong_in_file(place, is_new):
    """Return what is wrong with the path of a file, or None."""
    folder, name = os.path.split(place)
    if not (folder.startswith("/") and name and os.access(folder, os.W_OK | os.X_OK)):
        return "nobody can meet at {}"
    if os.path.exists(place) and not os.path.isfile(place):
        return "{} is a folder or a device; name a file"
    left = os.path.exists(place) and is_new
    return "{} is left from an earlier run; remove it" if left else None


def wrong_in_variables(rank, size, host, port):
    """Return what is wrong with the variables of one rank, or None."""
    if not (rank.isdecimal() and size.isdecimal() and host and port.isdecimal()):
        missing = "WORLD_SIZE (a number), MASTER_ADDR and MASTER_PORT"
        return f"RANK makes this one rank of a job: set {missing}, or unset RANK"
    return None if int(rank) < int(size) else f"RANK: must be from 0 to {int(size) - 1}"


# --- Ranks ---


def start_all(script, args):
    """Start a process for each rank, and wait for all; leave with the cause if one fails."""
    method, _, place = args.init.partition("://")
    with tempfile.TemporaryDirectory() as folder:
        own = f"127.0.0.1:{network.free_ports(1)[0]}"
        place = place or (f"{folder}/meeting_place" if method == "file" else own)
        lines = [what_is_typed(args, method, place, rank) for rank in range(args.nproc)]
        for rank, (variables, flags) in enumerate(lines):
            words = [sys.executable, script, *flags]
            if variables:  # `env` sets them, and then becomes the command that follows
                words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
            print(f"terminal {rank}: {shlex.join(words)}", flush=True)
        codes, ranks = {}, []
        with a_store_for(script, method, place, args.nproc) as more:
            try:
                for rank, (variables, flags) in enumerate(lines):
                    variables |= more | {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": args.nproc}
                    variables |= {"RANK": rank, "WORLD_SIZE": args.nproc}
                    ranks.append(start(script, folder, variables, flags))
                codes = wait(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
            if codes:
                sys.exit(ending.explain(codes, ending.read_ends(Path(folder))) or 1)


@contextlib.contextmanager
def a_store_for(script, method, place, nproc):
    """Hold the store of "store", as torchrun does, and that of "file"; yield variables for ranks.

    A file goes with the last one who closes it; when two do so at once, it may stay.
    """
    script, store = proofs.of_lesson(lessons.of_script(script)).lesson, None
    if method in ("store", "file"):
        store = script.open_store(place, 0, nproc)
    try:
        yield {"TORCHELASTIC_USE_AGENT_STORE": True} if method == "store" else {}
    finally:
        del store
        left = method == "file" and os.path.exists(place)
        if left:  # ranks that were killed could not remove it
            os.unlink(place)
    if left:
        sys.exit("the file was left behind: a rank has not closed its store")


def what_is_typed(args, method, place, rank):
    """Return ({variable: value}, flags) by which a process becomes this rank."""
    flags = [f"--steps={args.steps}", f"--batch-size={args.batch_size}", f"--seed={args.seed}"]
    if method != "env":
        return {}, [f"--init={method}://{place}", f"--rank={rank}", f"--nproc={args.nproc}", *flags]
    host, _, port = place.rpartition(":")
    variables = {"RANK": rank, "WORLD_SIZE": args.nproc, "MASTER_ADDR": host, "MASTER_PORT": port}
    return variables, ["--init=env", *flags]


def start(script, folder, variables, flags):
    """Start one rank; return its process. How it ends it writes into `folder`."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    environment |= {"LOCKSTEP_SCRIPT": str(script), "LOCKSTEP_ENDS": folder}
    environment |= {"LOCKSTEP_PARENT": str(os.getpid())}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, RANK, *flags], env=environment)


def wait(ranks):
    """Return when all have ended, or one has failed: {rank: exit code} of those that have."""
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        codes = {number: rank.returncode for number, rank in enumerate(ranks) if rank.returncode}
        if codes or not running:
            return codes
        time.sleep(0.05)
