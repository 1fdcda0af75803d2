"""Lesson 14: how do ranks on several machines become one job?

Start a launcher on each machine, and tell it how many machines there are and where the
first one is. The launchers meet there and number all ranks; the training loop stays as it
is. Here two launchers rehearse it on one machine, at the addresses 127.0.0.1 and 127.0.0.2.

Run it:   bash scripts/lesson_14.sh --nproc 4   (ranks on both together; an odd one is on the first)
For real: torchrun --nnodes=2 --node-rank=K --nproc-per-node=2 --master-addr=ADDRESS_OF_0
              --master-port=29500 lessons/lesson_14_several_machines.py   (one line; K is 0, then 1)

Output to expect on a CPU:

    4 ranks on 2 machines, over gloo on cpu, brought together by static
    rank 0: node 0, local rank 0, at 127.0.0.1; meets 1, 2, 3 at 127.0.0.1
    rank 1: node 0, local rank 1, at 127.0.0.1; meets 0, 2, 3 at 127.0.0.1
    rank 2: node 1, local rank 0, at 127.0.0.2; meets 0, 1 at 127.0.0.1, 3 at 127.0.0.2
    rank 3: node 1, local rank 1, at 127.0.0.2; meets 0, 1 at 127.0.0.1, 2 at 127.0.0.2
    the store is at 127.0.0.1, in the launcher of node 0
    PASS 4 ranks hold the same parameters: off by 0.0 among them, by ... from one process
"""

import argparse
import inspect
import itertools
import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import time
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss

# --- The technique ---


def what_to_type(node, nodes, ranks_here, first, port, rendezvous="static"):
    """Return the arguments of Python on machine `node`; `first` is machine 0's address (B6, E13).

    static  torchrun; you number the machines
    launch  the same by the launcher of 2019, which torchrun has replaced
    c10d    torchrun; the machines number themselves, and may come again after a failure
    """
    size = [f"--nnodes={nodes}", f"--nproc-per-node={ranks_here}"]
    if rendezvous == "c10d":
        meeting = [f"--rdzv-endpoint={first}:{port}", "--rdzv-id=any-name"]
        return ["-m", "torch.distributed.run", *size, "--rdzv-backend=c10d", *meeting]
    if rendezvous == "launch":
        size = [f"--nnodes={nodes}", f"--node_rank={node}", f"--nproc_per_node={ranks_here}"]
        meeting = [f"--master_addr={first}", f"--master_port={port}"]
        return ["-m", "torch.distributed.launch", *size, *meeting]
    meeting = [f"--node-rank={node}", f"--master-addr={first}", f"--master-port={port}"]
    return ["-m", "torch.distributed.run", *size, *meeting]


def train(rank, world_size, device, rows, targets, model, steps, batch_size):
    """Train `model` on this rank's share of each batch; yield the share after every update.

    Nothing in it knows of machines: a rank is a rank, wherever it runs.
    """
    replica = nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = batch_size // world_size
    for step in range(steps):
        first = (step * world_size + rank) * share  # the next batch, and of it our part
        mine = torch.arange(first, first + share) % len(rows)
        optimizer.zero_grad()
        loss = mse_loss(replica(rows[mine].to(device)), targets[mine].to(device))
        loss.backward()  # over the network too: as fast as its slowest link
        optimizer.step()
        yield mine


# --- The proof ---


def make_toy(seed):
    """Return the article's toy: 100 rows of 5 numbers, targets of width 2, and a layer 5 -> 2.

    The targets are a fixed linear function of the rows, plus noise: there is something to learn.
    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    targets += 0.5 * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rows, targets, model


def train_alone(rows, targets, model, batches):
    """Train `model` in one process, on these batches of row numbers; return its parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        mse_loss(model(rows[batch]), targets[batch]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def sockets_of_this_process():
    """Return (where it listens, its connections as (here, there)): ends are (address, port)."""
    listens, connections = [], []
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if number < 3 or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # (to make a socket object of a file fails, and leaves its copy open)
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listens.append(copy.getsockname()[:2])
                else:
                    connections.append((copy.getsockname()[:2], copy.getpeername()[:2]))
        except OSError:
            pass  # closed since, or not connected
    return listens, connections


def own_place():
    """Return where this rank runs, as its launcher has told it, and its sockets."""
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    node, local_rank, ranks_here, nodes = (int(os.environ[name]) for name in names)
    place = {"node": node, "local_rank": local_rank, "ranks_here": ranks_here, "nodes": nodes}
    place["holds_store"] = os.environ.get("LESSON_14_STORE") == os.environ["MASTER_PORT"]
    place["listens"], place["connections"] = sockets_of_this_process()
    return place


def who_called(places):
    """Return {(rank, other): (who of the two has called, at which address)} for each pair."""
    calls = {}
    for (rank, one), (other, two) in itertools.combinations(enumerate(places), 2):
        reversed_ends = [(there, here) for here, there in two["connections"]]
        for here, there in set(one["connections"]).intersection(reversed_ends):
            if here in one["listens"]:
                calls[rank, other] = (other, here[0])
            else:
                calls[rank, other] = (rank, there[0])
    return calls


def numbered_in_order(places):
    """Return whether the ranks count through machine 0, then 1, and so on (B2)."""
    counted = [place["ranks_here"] for place in places if place["local_rank"] == 0]
    expected = [(node, local) for node, ranks in enumerate(counted) for local in range(ranks)]
    return [(place["node"], place["local_rank"]) for place in places] == expected


def batches_in_order(count, steps, batch_size):
    """Return the row numbers of each step's batch: the next `batch_size` of `count` rows."""
    first_rows = range(0, steps * batch_size, batch_size)
    return [[(first + row) % count for row in range(batch_size)] for first in first_rows]


def round_trip(rank, pair, device, repeats=5):
    """Return the seconds that 8 bytes need from the first rank of `pair` to the other and back."""
    ball, seconds = torch.zeros(1, device=device, dtype=torch.float64), []
    for _ in range(repeats):
        start = time.perf_counter()
        for turn in (pair, pair[::-1]):
            if rank == turn[0]:
                dist.send(ball, turn[1])
            elif rank == turn[1]:
                dist.recv(ball, turn[0])
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(rank, world_size, device, steps, batch_size, seed=0):
    """Train on all ranks of all machines; return what they found together, the same on each."""
    rows, targets, model = make_toy(seed)
    _, _, one_process = make_toy(seed)
    loss_first = mse_loss(one_process(rows), targets).item()
    start = time.perf_counter()
    training = train(rank, world_size, device, rows, targets, model, steps, batch_size)
    batches = [mine.tolist() for mine in training]
    seconds = time.perf_counter() - start
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    trips = {}
    for pair in itertools.combinations(range(world_size), 2):
        trips[pair] = round_trip(rank, pair, device)
        dist.barrier()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (own_place(), parameters, batches, trips))
    places, replicas, shares, trips = zip(*everyone, strict=True)
    together = [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)]
    batches = batches_in_order(len(rows), steps, batch_size // world_size * world_size)
    alone = train_alone(rows, targets, one_process, batches)
    loss_last = mse_loss(one_process(rows), targets).item()
    facts = {"loss_first": loss_first, "loss_last": loss_last}
    facts["seconds_per_step"] = seconds / steps
    facts["rows_dealt_once"] = together == batches  # no rank has computed another's rows
    facts["max_param_diff"] = (parameters - alone).abs().max().item()
    return facts | describe(places, replicas, trips)


def describe(places, replicas, trips):
    """Return the table of ranks and of pairs of ranks, as lists of dicts."""
    calls, pairs, ranks = who_called(places), [], []
    for one, other in itertools.combinations(range(len(places)), 2):
        caller, address = calls.get((one, other), (None, None))
        facts = {"ranks": [one, other], "caller": caller, "met_at": address}
        facts["differ_by"] = (replicas[one] - replicas[other]).abs().max().item()
        pairs.append(facts | {"round_trip": trips[one][one, other]})
    for place in places:
        names = ("node", "local_rank", "ranks_here", "holds_store")
        at = [address for address, _ in place["listens"] if address not in ("::", "0.0.0.0")]
        ranks.append({name: place[name] for name in names} | {"address": at[0] if at else "?"})
    table = {"ranks": ranks, "pairs": pairs, "nodes": places[0]["nodes"]}
    return table | {"store": os.environ["MASTER_ADDR"], "in_order": numbered_in_order(places)}


def be_rank(steps, batch_size, seed):
    """Be one rank of the job, wherever this is; return what all ranks found."""
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # Linux: we end with torchrun
    address = os.environ.get("LESSON_14_ADDRESS")
    if address:
        listen_at_one_address()
    rank, world_size, device = join_group(gloo_at(address) if address else None)
    facts = measure(rank, world_size, device, steps, batch_size, seed)
    backend = "gloo" if address else dist.get_backend()
    dist.destroy_process_group()
    facts |= {"lesson": 14, "world_size": world_size, "backend": backend, "device": device.type}
    return facts | {"rendezvous": "the launchers"}


def report(result):
    """Print who is where, and which ranks meet at which address."""
    where = f"over {result['backend']} on {result['device']}"
    ranks = f"{result['world_size']} ranks on {result['nodes']} machines"
    print(f"{ranks}, {where}, brought together by {result['rendezvous']}")
    for rank, place in enumerate(result["ranks"]):
        by_address = {}
        for pair in result["pairs"]:
            if rank in pair["ranks"]:
                others = by_address.setdefault(pair["met_at"] or "?", [])
                others.append(str(sum(pair["ranks"]) - rank))
        meets = ", ".join(f"{', '.join(found)} at {at}" for at, found in by_address.items())
        who = f"node {place['node']}, local rank {place['local_rank']}"
        print(f"rank {rank}: {who}, at {place['address']}; meets {meets}")
    holders = {place["node"] for place in result["ranks"] if place["holds_store"]}
    holder = "".join(f", in the launcher of node {node}" for node in holders)
    print(f"the store is at {result['store']}{holder}")


# --- The rehearsal: two machines on this one ---


def two_addresses():
    """Return the addresses of the two machines; a Mac has only 127.0.0.1, so both get that."""
    try:
        socket.create_server(("127.0.0.2", 0)).close()
    except OSError:
        print("this system has no address 127.0.0.2: both machines have 127.0.0.1")
        return "127.0.0.1", "127.0.0.1"
    return "127.0.0.1", "127.0.0.2"


def rehearse(nproc, rendezvous, flags):
    """Start the launchers of two machines; return what rank 0 of their job printed as JSON.

    Raises SystemExit with the cause if the job failed.
    """
    addresses, launchers = two_addresses(), []  # (a fork is safe: nothing was computed here)
    listener = socket.create_server((addresses[0], 0))  # the store's, before others take the port
    port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for node, address in enumerate(addresses):
                ranks_here = (nproc + 1 - node) // 2
                typed = what_to_type(node, 2, ranks_here, addresses[0], port, rendezvous)
                if rendezvous == "c10d":  # each would find that this address is its own
                    typed += [f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr={address}"]
                typed += [f"--log-dir={folder}"]  # torchrun's own folder for logs would stay
                place = (address, listener if node == 0 else None, f"{folder}/{node}")
                job = mp.Process(target=be_launcher, args=([*typed, __file__, *flags], *place))
                launchers.append(job)
                job.start()
                listener.close()  # only launcher 0 needs it
            printed = read_when_over(launchers, folder)
        finally:
            end(launchers)
    results = re.findall(r"^{.*}$", printed, re.MULTILINE)
    if not results:
        sys.exit(f"{printed}\n{cause(printed)}")
    return json.loads(results[-1]) | {"rendezvous": rendezvous}


def read_when_over(launchers, folder):
    """Wait until all launchers have ended, or one has failed; return what they have printed."""
    while any(job.is_alive() for job in launchers):
        if any(job.exitcode for job in launchers):
            break  # the others would wait for it, perhaps for minutes
        time.sleep(0.05)
    return "".join(open(f"{folder}/{node}").read() for node in range(len(launchers)))


def end(launchers):
    """End the launchers, which end their ranks."""
    for job in launchers:
        job.terminate()
    for job in launchers:
        job.join(10)
        job.kill()  # Linux then ends the ranks
        job.join()


def be_launcher(command, address, listener, output):
    """Be the launcher of one machine: do what `python -m torch.distributed.run ...` does."""
    mp._prctl_pr_set_pdeathsig(signal.SIGTERM)
    if os.getppid() != mp.parent_process().pid:
        sys.exit(1)  # who started us has ended already
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["LESSON_14_ADDRESS"] = address  # for our ranks
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listen_at_one_address(listener)
    from torch.distributed import launch, run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    popen, us = subprocess_handler.Popen, os.getpid()
    end_with_us = {"preexec_fn": lambda: end_with_launcher(us)}
    subprocess_handler.Popen = lambda **options: popen(**options, **end_with_us)
    {"torch.distributed.run": run, "torch.distributed.launch": launch}[command[1]].main(command[2:])


def end_with_launcher(launcher):
    """Linux: let this rank, which does not run its script yet, be killed when its launcher ends."""
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it has ended already


def listen_at_one_address(listener=None):
    """Let PyTorch's stores listen at the address that they are given; by default it is at all.

    A store has no password, so this machine's neighbours must not reach it. The first store can be
    given a `listener`, a socket that listens already.
    """
    from torch.distributed import rendezvous
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

    listeners = [listener] if listener else []

    class Store(dist.TCPStore):
        def __init__(self, host_name, port, world_size=None, is_master=False, *args, **options):
            if is_master:
                ours = listeners.pop() if listeners else socket.create_server((host_name, port))
                port = ours.getsockname()[1]
                os.environ["LESSON_14_STORE"] = str(port)  # our ranks will see it
                options["master_listen_fd"] = ours.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    for module in (dist, rendezvous, static, c10d):
        module.TCPStore = Store


def gloo_at(address):
    """Let gloo listen at `address`; return the name that it has for join_group.

    It asks for an interface (GLOO_SOCKET_IFNAME) or looks the host's name up; both are the same
    for our two machines.
    """

    def create(store, rank, size, timeout):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend("gloo_at_address", create, devices=["cpu"])
    return "gloo_at_address"


# What gloo and the stores say to a rank whose neighbour has gone: a consequence, not the cause.
LOST = "Connection (closed|reset) by peer|Connection refused|Broken pipe|connectFullMesh failed"


def cause(printed):
    """Return one line with the first error of a rank in what the launchers have printed."""
    errors = re.findall(r"^\[rank(\d+)\]: (\w+(?:Error|Exception): .*)$", printed, re.MULTILINE)
    errors.sort(key=lambda error: bool(re.search(LOST, error[1])))
    if errors:
        return f"rank {errors[0][0]} failed: {errors[0][1]}"
    return (printed.strip() or "the launchers have said nothing").splitlines()[-1]


def refuse(nproc, batch_size, **others):
    """Return what is wrong with the flags, or None."""
    ranks = int(os.environ.get("WORLD_SIZE", nproc))
    if batch_size < ranks:
        return f"--batch-size: must be at least the number of ranks, {ranks}"
    return None


def main(
    nproc: range(2, 65) = 4,
    steps: range(1, 10**6) = 20,
    batch_size: range(1, 10**6) = 24,
    seed: range(2**32) = 0,
    rendezvous: Literal["static", "c10d", "launch"] = "static",
    local_rank: range(-1, 64) = -1,
):
    """Be a rank, or rehearse; return whether the claim holds, the claim, and the numbers."""
    if "RANK" in os.environ:  # a launcher has started us, perhaps on one of two real machines
        result = be_rank(steps, batch_size, seed)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up, as after Ctrl-C
        flags = ["--json", f"--steps={steps}", f"--batch-size={batch_size}", f"--seed={seed}"]
        result = rehearse(nproc, rendezvous, flags)
    if os.environ.get("RANK", "0") == "0":
        report(result)
    spread = torch.tensor([pair["differ_by"] for pair in result["pairs"]]).max().item()
    met = result["device"] != "cpu" or all(pair["met_at"] for pair in result["pairs"])
    trained = result["max_param_diff"] < 1e-12 and result["loss_last"] < result["loss_first"]
    dealt = result["in_order"] and result["rows_dealt_once"] and result["nodes"] > 1
    passed = spread == 0.0 and trained and met and dealt
    off = f"off by {spread} among them, by {result['max_param_diff']:.3g} from one process"
    return passed, f"{result['world_size']} ranks hold the same parameters: {off}", result


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    enough_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here
    backend = backend or ("nccl" if enough_gpus else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()  # alone, nobody has to be found
    place = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    return rank, world_size, device


def start(main, refuse=lambda **flags: None):
    """Run main with flags made from its arguments; return 0 (PASS) or 1 (FAIL), or exit with 2."""
    rank_0 = os.environ.get("RANK", "0") == "0"  # it speaks for all
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text[:300]}\n" * rank_0)
    arguments = inspect.signature(main).parameters
    for name, argument in arguments.items():
        options = {"type": type(argument.default), "default": argument.default, "metavar": "X"}
        parser.add_argument("--" + name.replace("_", "-"), **options, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    values = vars(parser.parse_args())
    flags = {name: values[name] for name in arguments}
    for name, value in flags.items():
        allowed = get_args(arguments[name].annotation) or arguments[name].annotation
        if value not in allowed:
            parser.error(f"argument --{name.replace('_', '-')}: must be in {allowed}, not {value}")
    if problem := refuse(**flags):
        parser.error(f"argument {problem}")
    if values["check"]:
        return 0
    passed, claim, result = main(**flags)
    if rank_0:
        print("PASS" if passed else "FAIL", claim)
        print(json.dumps(result | {"passed": passed}) + "\n" if values["json"] else "", end="")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(start(main, refuse))
