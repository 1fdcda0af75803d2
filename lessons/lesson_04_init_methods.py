"""Lesson 04: how do ranks find each other?

Before the first collective, ranks must learn how to reach each other. They read it at one
meeting place: a store, at a host and a port, or in a file. torchrun keeps one; here we open
our own. New: a roll call, which names the rank that is missing or came twice.

Run it:   bash scripts/lesson_04.sh --init env|tcp|file|store --nproc 2
By hand:  copy each line that it prints into a terminal (with file, name a path of your own)

Output to expect on a CPU:

    terminal 0: env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... --init=env ...
    terminal 1: env RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... --init=env ...
    all were there after ... s, and met in ... s, over gloo on cpu
    PASS ranks 0, 1 met by env, and name who is missing; their all-reduce is 3
"""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# --- The technique ---

TWO_MINUTES = timedelta(minutes=2)


def told_by_environment():
    """Return (host:port, rank, world size): torchrun, a job script or your hand set them."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return place, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def open_store(place, rank, world_size, limit=TWO_MINUTES):
    """Return the store at `place`, where the ranks meet: host:port, or the path of a file.

    At a host and a port rank 0 holds it; under torchrun the launcher does, and rank 0 only calls.
    """
    if "/" in place:
        return dist.FileStore(place, world_size)
    host, _, port = place.rpartition(":")
    options = {"timeout": limit, "wait_for_workers": False}
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host.strip("[]"), int(port)), family=family)
        # There only; by default it is all addresses, and a store has no password.
        options |= {"is_master": True, "master_listen_fd": server.detach()}
    return dist.TCPStore(host.strip("[]"), int(port), world_size, **options)


def join(store, rank, world_size, job="job", backend="gloo", limit=TWO_MINUTES):
    """Call the roll, then join the default group. Jobs that share a store need a name each.

    A rank waits up to `limit` in the roll call, and in each collective of the group as well.
    """
    attempt = 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # this store outlives a restart
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"{job}, attempt {attempt}", store)
    call_the_roll(store, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def call_the_roll(store, rank, world_size, limit=TWO_MINUTES):
    """Return when each rank has come once, all with one world size; else raise RuntimeError."""
    end, problem = time.monotonic() + limit.total_seconds(), ""
    size = store.compare_set("world size", "", str(world_size)).decode()  # the first one sets it
    if size != str(world_size):
        problem = f"rank {rank} has world size {world_size}, another rank has {size}"
    elif not 0 <= rank < world_size:
        problem = f"rank {rank} is none of the {world_size} ranks, 0 to {world_size - 1}"
    elif store.add(f"rank {rank}", 1) > 1:  # in one step: of two, one gets 1 and the other gets 2
        problem = f"rank {rank} is here twice, or its mark is left from an earlier run"
    if problem:
        store.compare_set("verdict", "", problem)  # the others need not wait any longer
    if store.add("here", 1) == world_size:  # the last one lets all go, if nobody has a problem
        store.compare_set("verdict", "", "complete")
    try:
        store.wait(["verdict"], limit)
    except RuntimeError:
        missing = [f"rank {r}" for r in range(world_size) if not store.check([f"rank {r}"])]
        verdict = f"not here after {limit}: {', '.join(missing)}"
        store.compare_set("verdict", "", verdict if missing else "complete")
    verdict = problem or store.get("verdict").decode()
    if verdict != "complete":
        store.add("told", 1)
        if rank == 0:  # who may hold the store, so it leaves last
            stay_until_told(store, world_size, end)
        raise RuntimeError(verdict)


def stay_until_told(store, world_size, end):
    """Return when all ranks are told; after `end`, when all that are here are, or in 10 seconds."""
    while (now := time.monotonic()) < end + 10:
        if store.add("told", 0) >= (world_size if now < end else store.add("here", 0)):
            return
        time.sleep(0.01)


# --- The proof ---

LIMIT = timedelta(seconds=120)  # that a rank waits for the others; each has to import torch first
METHODS = ("env", "tcp", "file", "store")
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_device(rank, ranks_here):
    """Return (backend, device): nccl where each rank of this machine can have a GPU of its own."""
    if dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return "nccl", device
    return "gloo", torch.device("cpu")


@contextlib.contextmanager
def watched(rank, world_size, backend, attempt, report):
    """Watch from outside whom the library is told that we are, and how long it takes to join."""
    library, start = dist.init_process_group, time.perf_counter()

    def init_process_group(*args, **options):
        told = options.get("rank"), options.get("world_size")
        if told != (rank, world_size):
            raise ValueError(f"rank {rank} of {world_size} joins as rank {told[0]} of {told[1]}")
        if args != (backend,):
            raise ValueError(f"the group is asked for {args}, and not for {backend}")
        if "store" not in options:
            raise ValueError("the group meets without the store")
        if options.get("timeout") != LIMIT:
            raise ValueError(f"the group waits for {options.get('timeout')}, and not for {LIMIT}")
        here = time.perf_counter()
        library(*args, **options)
        report.setdefault("seconds", [here - start, time.perf_counter() - here])

    restarted = patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": attempt, AGENT: "True"})
    with restarted, patch.object(dist, "init_process_group", init_process_group):
        yield


def be_one_rank(args, place, rank, world_size, where):
    """Meet the others three times in one store, add up, rehearse trouble; return the report."""
    backend, device = where
    report = {"rank": rank, "pid": os.getpid(), "backend": backend, "device": device.type}
    report |= {"sums": [], "wrong": []}
    told = told_by_environment() if args.method == "env" else (place, rank, world_size)
    store = open_store(*told, LIMIT)
    holds = rank == 0 and args.method != "file" and AGENT not in os.environ
    report["wrong"] += wrong_doors(place, world_size) if holds else []
    if args.method != "file" and store.timeout != LIMIT:
        report["wrong"].append(f"the store waits for {store.timeout}, and not for {LIMIT}")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    again, name = f"{first}, once more", f"{device.type}:{backend}"  # a name that is no default
    for job, attempt in (("a", first), ("b", first), ("a", again)):  # two jobs, one of them twice
        with watched(rank, world_size, name, attempt, report):
            join(store, *told[1:], job, name, LIMIT)
        report["sums"] += add_up(args, rank, device)
        dist.barrier()
        if attempt == again and world_size > 1:
            report["wrong"] += wrong_in_rehearsals(store, rank, world_size)
            report["wrong"] += wrong_in_orders() if rank == 0 else []
        dist.barrier()  # nobody leaves before all are through
        dist.destroy_process_group()
    del store
    if holds and answers(*host_and_port(place)):
        report["wrong"].append("the store still listens after the last rank has left it")
    return report


def add_up(args, rank, device):
    """Return the different numbers that all-reduces of rank + 1 brought: one, if all is well."""
    sums = set()
    for _ in range(args.steps):
        numbers = torch.full((args.batch_size,), rank + 1 + args.seed, device=device)
        dist.all_reduce(numbers)  # 8 bytes for each number; every rank receives the sums
        sums.update(numbers.unique().tolist())
    return sorted(sums)


def wrong_in_rehearsals(store, rank, world_size):
    """Let the last rank do something wrong; return what is wrong with what this rank is told.

    Once rank 0 does not come either. The group exists: without a roll call, other words come.
    """
    last, wrong = world_size - 1, []
    absent = [0] if world_size == 2 else [0, last]
    missing = ", ".join(f"rank {number}" for number in absent)
    sins = {  # what the last rank does: the number that it says; what all must be told
        "comes as rank 0": (0, "rank 0 is here twice"),
        "does not come": (None, f"not here after 0:00:01: {missing}"),
        "comes late, and once more": (last, "is here twice"),
    }
    for sin, (number, words) in sins.items():
        sinner = rank in absent if number is None else rank == last
        who, said = number if sinner else rank, words
        job = "b" if "once more" in sin else sin  # in b all have met already
        limit = timedelta(seconds=1 if number is None else 5)
        dist.barrier()
        begin = time.monotonic()
        if who is not None:
            said = said_to(lambda: join(store, who, world_size, job, limit=limit))  # noqa: B023
        if words not in said:
            wrong.append(f"if a rank {sin}, rank {rank} is told: {said}")
        elif time.monotonic() - begin > 20:
            wrong.append(f"if a rank {sin}, rank {rank} is told too late")
    return wrong[:1]


class Noticed:
    """Passes requests on to a store; before each, `notice` is told its name."""

    def __init__(self, store, notice):
        self.store, self.notice = store, notice

    def __getattr__(self, request):
        self.notice(request)
        return getattr(self.store, request)


ORDERS = (  # two that call the roll, each a rank and a world size; what both must be told
    ((1, 3), (1, 3), "is here twice"),
    ((1, 2), (2, 2), "is none of"),
    ((1, 2), (-1, 2), "is none of"),
    ((1, 3), (1, 4), "has world size"),
)


def wrong_in_orders():
    """Let two call the roll in the orders that chance brings seldom; return what is wrong."""
    for first, second, words in (*ORDERS, *((b, a, words) for a, b, words in ORDERS)):
        for moment in range(1, 5):
            for said in told_in_order(first, second, moment):
                if words not in said:
                    who = "rank {} of {}, and in its midst rank {} of {}".format(*first, *second)
                    return [f"when the roll is called by {who}, one is told: {said}"]
    return wrong_in_leaving()


def told_in_order(first, second, moment):
    """Let `second` do all that it can before this request of `first`; return what both are told."""
    store, asked, said, stands = dist.HashStore(), [], [], threading.Event()

    def come(who, notice):
        limit = timedelta(seconds=2)
        said.append(said_to(lambda: call_the_roll(Noticed(store, notice), *who, limit)))
        stands.set()

    def count(request):
        asked.append(request)
        if len(asked) == moment:
            other.start()
            stands.wait(10)

    def look(request):
        if request == "wait":
            stands.set()

    other = threading.Thread(target=come, args=(second, look))
    come(first, count)
    other.join()
    return said


def wrong_in_leaving():
    """Let ranks 0 and 1 of 3 wait in vain, rank 1 slow to read why; return what is wrong."""
    store, asked, told = dist.HashStore(), [], threading.Event()

    def come(rank, notice):
        limit = timedelta(seconds=0.1)
        said_to(lambda: call_the_roll(Noticed(store, notice), rank, 3, limit))

    def be_slow(request):
        if request == "get":
            told.wait()

    one = threading.Thread(target=come, args=(1, be_slow))
    zero = threading.Thread(target=come, args=(0, asked.append))
    one.start()
    zero.start()
    while zero.is_alive() and len(asked) < 30:  # it asks again and again while it stays
        time.sleep(0.001)
    wrong = [] if zero.is_alive() else ["rank 0 leaves before rank 1 is told"]
    told.set()
    one.join()
    before = len(asked)
    zero.join()
    return wrong if len(asked) < before + 10 else ["rank 0 stays when all have been told"]


def said_to(caller):
    """Return the words of the error that a call ends with."""
    try:
        caller()
    except (RuntimeError, ValueError, OSError) as error:
        return str(error)
    return "nothing"


def wrong_doors(place, world_size):
    """Return what is wrong with where the store of this rank listens: at `place`, nowhere else."""
    host, port = host_and_port(place)
    wrong = [] if answers(host, port) else [f"no store listens at {host}, where all look for it"]
    own = {found[4][0] for found in socket.getaddrinfo(host, port)}
    others = [other for other in ("127.0.0.1", "127.0.0.2", "::1") if other not in own]
    strangers = [other for other in others if answers(other, port)]
    wrong += [f"the store also listens at {other}, for strangers" for other in strangers]
    with patch.dict(os.environ, {AGENT: "True"}):  # as under torchrun, which listens already
        said = said_to(lambda: open_store(place, 0, world_size, LIMIT))
        wrong += [] if said == "nothing" else [f"under torchrun rank 0 is told: {said}"]
    alone = "127.0.0.1"
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        alone = "[::1]"  # as in a URL
    alone = f"{alone}:{free_port()}", 0, world_size, timedelta(seconds=10)
    said = said_to(lambda: open_store(*alone))
    return wrong + ([] if said == "nothing" else [f"before the others come, rank 0 gets: {said}"])


def answers(host, port):
    """Return whether somebody takes a call there."""
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


def host_and_port(place):
    """Return ("::1", 29500) for "[::1]:29500"."""
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


# --- Start all ranks, or be one of them ---


def start_all(args):
    """Start a process for each rank, and wait for all; return (reports, what is wrong)."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, surroundings()):
        own = f"{folder}/meeting_place" if args.method == "file" else f"127.0.0.1:{free_port()}"
        place = args.place or own
        for rank in range(args.nproc):
            print(f"terminal {rank}: {command_line(args, place, rank)}", flush=True)
        server = None
        if args.method == "store":  # as with torchrun, the ranks find a store that another holds
            server = open_store(place, 0, args.nproc)
            os.environ[AGENT] = "True"
        elif args.method == "file":  # closed last: when two close it at once, it may stay
            server = open_store(place, 0, args.nproc)
        try:
            reports, wrong = wait_for_all(args, place, folder)
        finally:
            del server
            left = args.method == "file" and os.path.exists(place)
            if left:
                os.unlink(place)  # ranks that were killed could not remove it
    if left and not wrong:
        wrong = ["the file was left behind: a rank has not closed its store"]
    return reports, wrong


def surroundings():
    """Return the variables for ranks that are all on this machine, unless they are set already."""
    found = {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # a rank says in one line what is wrong
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        found["GLOO_SOCKET_IFNAME"] = name  # or gloo listens at the address of the host's name
    return found | os.environ


def wait_for_all(args, place, folder):
    """Start the ranks; return the reports that they leave in `folder`, and what has ended them."""
    ranks, end = mp.spawn(leave_a_report, (args, place, folder), args.nproc, join=False), []
    deadline = time.monotonic() + 2 * LIMIT.total_seconds()
    try:
        while not ranks.join(1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks have not finished after {2 * LIMIT}")
    except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
        end = [f"rank {getattr(error, 'error_index', 0)}: {str(error).splitlines()[0]}"]
    finally:
        for process in ranks.processes:
            process.kill()
    found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    failed = sorted((report["time"], report["error"]) for report in found if "error" in report)
    return found, [failed[0][1]] if failed else end


def leave_a_report(rank, args, place, folder):
    """Be one of the ranks that start_all has started."""
    where = choose_device(rank, args.nproc)
    names = (*VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    half = -(-args.nproc // 2)  # of the ranks: the others believe to be on a second machine
    here = half if rank < half else args.nproc - half
    address = host_and_port(place) if args.method != "file" else ("", "")
    values = (rank, args.nproc, *address, rank % half, here)
    os.environ.update(zip(names, map(str, values), strict=True))
    try:
        report = be_one_rank(args, place, rank, args.nproc, where)
    except Exception as error:
        report = {"error": f"rank {rank}: {in_one_line(error)}", "time": time.time()}
    Path(folder, f"{rank}.part").write_text(json.dumps(report))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    if "error" in report:
        os._exit(1)  # at once: in a group that has failed, gloo's threads may wait


def in_one_line(error):
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def free_port():
    """Return a port at which nobody listens. Below 32768 the system gives none away by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def command_line(args, place, rank):
    """Return what you would type into a terminal of its own to start this rank by hand."""
    flags = [f"--init={args.method}"]
    if args.method != "env":
        flags = [f"--init={args.method}://{place}", f"--rank={rank}", f"--nproc={args.nproc}"]
    flags += [f"--steps={args.steps}", f"--batch-size={args.batch_size}", f"--seed={args.seed}"]
    words = [sys.executable, os.path.abspath(__file__), *flags]
    if args.method == "env":  # `env` sets variables, and then becomes the command that follows
        values = zip(VARIABLES, (rank, args.nproc, *host_and_port(place)), strict=True)
        words = ["env", *(f"{name}={value}" for name, value in values), words[0], *words[1:]]
    return shlex.join(words)


def be_one_by_hand(args):
    """Be one rank, in a terminal of its own; say how it ended; return its report, what is wrong."""
    os.environ["RANK"] = str(args.rank)  # rank 0 says the verdict
    print(f"rank {args.rank} of {args.nproc} meets the others at {args.place}", flush=True)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", args.nproc))
    where = choose_device(int(os.environ.get("LOCAL_RANK", args.rank)), ranks_here)
    try:
        report = be_one_rank(args, args.place, args.rank, args.nproc, where)
    except Exception as error:
        print(f"rank {args.rank}: {in_one_line(error)}", flush=True)
        return [], [in_one_line(error)]
    print(f"rank {args.rank} has met all {args.nproc}; the sum is {report['sums'][0]}", flush=True)
    return [report], []


def wrong_in_reports(reports, args, ranks):
    """Return what is wrong with the reports of these ranks: a list of sentences."""
    wrong, seen = [], sorted(report["rank"] for report in reports)
    if seen != ranks:
        wrong.append(f"ranks {seen} have met, and {ranks} were started")
    if len({report["pid"] for report in reports}) != len(ranks):
        wrong.append("two ranks are one process")
    right = args.nproc * (args.nproc + 1) // 2 + args.nproc * args.seed
    for report in reports:
        if report["sums"] != [right] * 3:
            wrong.append(f"rank {report['rank']} has the sums {report['sums']}, and not {right}")
    return wrong + list(dict.fromkeys(sentence for r in reports for sentence in r["wrong"]))


def main(args):
    """Start all ranks, or be one; return whether they have met, the claim, and the numbers."""
    alone = args.rank is not None
    reports, wrong = be_one_by_hand(args) if alone else start_all(args)
    ranks = [args.rank] if alone else list(range(args.nproc))
    complete = sorted((r for r in reports if "error" not in r), key=lambda r: r["rank"])
    wrong = wrong or wrong_in_reports(complete, args, ranks)
    numbers = {"lesson": 4, "world_size": args.nproc, "init": args.method}
    numbers["ranks_seen"] = [report["rank"] for report in complete]
    if wrong:
        return False, "; ".join(wrong), numbers
    come, meet = (max(both) for both in zip(*(r["seconds"] for r in complete), strict=True))
    numbers |= {name: complete[0][name] for name in ("backend", "device")}
    numbers |= {"all_reduce": complete[0]["sums"][0]}
    numbers |= {"seconds_to_come": come, "seconds_to_meet": meet}
    where = f"over {numbers['backend']} on {numbers['device']}"
    if not args.rank:  # rank 0, or the one that has started all
        print(f"all were there after {come:.3g} s, and met in {meet:.3g} s, {where}")
    who = f"rank {args.rank}" if alone else f"ranks {', '.join(map(str, ranks))}"
    claim = f"{who} met by {args.method}, and name who is missing"
    return True, f"{claim}; their all-reduce is {numbers['all_reduce']}", numbers


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--init", default="env", help=f"{', '.join(METHODS)}, or METHOD://PLACE")
    parser.add_argument("--rank", type=whole(0, 63), help="be this one only, and meet at PLACE")
    parser.add_argument("--nproc", type=whole(1, 64), default=2, help="ranks: %(default)s")
    parser.add_argument("--steps", type=whole(1, 10**4), default=1, help="%(default)s")
    parser.add_argument("--batch-size", type=whole(1, 10**4), default=1, help="%(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    args.method, _, args.place = args.init.partition("://")
    problem = None
    if args.init == "env" and args.rank is None and "RANK" in os.environ:
        problem = wrong_in_environment(args)
    problem = problem or wrong_in_place(args)
    if problem:
        parser.error(problem)
    return args


def wrong_in_environment(args):
    """Take rank, world size and place from the environment, or return what is wrong there."""
    rank, size, host, port = (os.environ.get(name, "") for name in VARIABLES)
    if not (rank.isdecimal() and size.isdecimal() and host and port):
        missing = "WORLD_SIZE (a number), MASTER_ADDR and MASTER_PORT"
        return f"RANK makes this one rank of a job: set {missing}, or unset RANK"
    args.place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    args.rank, args.nproc = int(rank), int(size)
    return None


HOST_AND_PORT = r"(\[[^][/]+\]|[^][/:]+):(\d{1,5})"  # [::1]:29500, or host:29500


def wrong_in_place(args):
    """Return what is wrong with --init and --rank, or None."""
    where, place = "argument --init:", repr(args.place[:80])
    if args.method not in METHODS:
        return f"{where} must be {', '.join(METHODS)} or METHOD://PLACE"
    if args.rank is not None and args.init.startswith("env://"):
        return "argument --rank: --init env takes it from RANK"
    if args.rank is not None and args.rank >= args.nproc:
        return f"argument --rank: must be from 0 to {args.nproc - 1}"
    if args.method == "file" and args.place:
        folder, name = os.path.split(args.place)
        if not (folder.startswith("/") and name and os.access(folder, os.W_OK | os.X_OK)):
            return f"{where} nobody can meet at {place}"
        if os.path.exists(args.place) and not os.path.isfile(args.place):
            return f"{where} {place} is a folder or a device; name a file"
        if os.path.exists(args.place) and args.rank is None:
            return f"{where} {place} is left from an earlier run; remove it"
    elif args.place or args.rank is not None:
        found = re.fullmatch(HOST_AND_PORT, args.place)
        if not (found and 0 < int(found[2]) < 65536):
            return f"{where} nobody can meet at {place}"
    return None


# --- The frame: the same in every lesson ---


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            limits = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{limits}, not {text[:40]!r}")
        return int(text)

    return number


def conclude(passed, claim, numbers, as_json):
    """Let rank 0 print the verdict as the last line, or before the JSON; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("PASS" if passed else "FAIL", claim)
        if as_json:
            print(json.dumps(numbers | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse_args()
    sys.exit(conclude(*main(args), args.json))
