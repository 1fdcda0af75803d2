"""The part of the doctor that needs torch: do ranks meet, and how fast is the way between them?

    python .../doctor/ranks.py RANK WORLD_SIZE TIMEOUT FOLDER PORT,PORT,PORT [FILE DESCRIPTORS]

report.py starts it so, once for each rank on this machine; and it calls `network` under torchrun.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is told in a line of ours

import torch
import torch.distributed as dist

if __name__ == "__main__":  # report.py starts this file by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from lockstep import network as net

METHODS = ("env", "tcp", "store", "file")
BIG = 8 * 2**20  # bytes, for the bandwidth
TRIPS = 100  # there and back, for the latency
SLOW = 5  # times slower than the median of its kind: such a pair holds up every all-reduce
NOISE_MS = 1  # a machine that is busy with other things adds as much to a latency


# --- Do the ranks of one machine meet by each method? ---


def open_store(port, rank, world_size, limit, descriptor):
    """Return a TCPStore on 127.0.0.1; rank 0 takes over a socket that listens there already."""
    options = {"wait_for_workers": False, "multi_tenant": True}
    if rank == 0:
        options["master_listen_fd"] = descriptor
    return dist.TCPStore("127.0.0.1", port, world_size, rank == 0, limit, **options)


def join(method, rank, world_size, limit, folder, port, descriptor):
    """Join the default group by one method; return a store, if one was made for it.

    env:// and tcp:// would let a store listen on all addresses. They find the one that rank 0 has
    opened at that port in the same process, and use it.
    """
    who = {"rank": rank, "world_size": world_size, "timeout": limit}
    if method == "file":
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", **who)
        return None
    store = open_store(port, rank, world_size, limit, descriptor)
    if method == "store":
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), **who)
    elif method == "tcp":
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **who)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", init_method="env://", timeout=limit)
    return store


def meet(method, rank, world_size, limit, *place):
    """Join by one method, add up the ranks, leave; return the seconds, or what was wrong."""
    begin = time.perf_counter()
    try:
        join(method, rank, world_size, limit, *place)
        total = torch.tensor([rank])
        dist.all_reduce(total)
        dist.barrier()  # who leaves first would cut off one that still connects
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return str(error).splitlines()[0][:200]
    if total.item() != sum(range(world_size)):
        return f"the all-reduce of {world_size} ranks was {total.item()}"
    return time.perf_counter() - begin


def on_one_machine(rank, world_size, timeout, folder, ports, descriptors):
    """Try each method, then each pair; rank 0 prints what was found, as one line of JSON."""
    limit = timedelta(seconds=timeout)
    listening = [*zip(ports, descriptors or [None] * len(ports), strict=True), (None, None)]
    found = {}
    for method, (port, descriptor) in zip(METHODS, listening, strict=False):
        found[method] = meet(method, rank, world_size, limit, folder, port, descriptor)
    store = open_store(ports[-1], rank, world_size, limit, (descriptors or [None])[-1])
    result = network(store, rank, world_size, timeout, {"machine": socket.gethostname(), "node": 0})
    if rank == 0:
        print(json.dumps({"methods": found, **result}), flush=True)


# --- Who is here, and who reaches whom? Asked with plain sockets, which can name a bad pair ---


class Missing(Exception):
    """Not all ranks came, or stayed. Arguments: {rank that is here: its facts}, what is wrong."""


def gather(store, key, rank, world_size, value, seconds):
    """Leave a value in the store, and return those of all ranks. Raises Missing, on every rank."""
    names = [f"{key}/{other}" for other in range(world_size)]
    store.set(names[rank], json.dumps(value))
    end = time.monotonic() + seconds
    while not store.check(names):
        if time.monotonic() > end:
            here = [other for other in range(world_size) if store.check([names[other]])]
            here = {number: json.loads(store.get(names[number])) for number in here}
            raise Missing(here, f"not here after {seconds} s")
        time.sleep(0.05)
    return [json.loads(text) for text in store.multi_get(names)]


def answer(listener, text):
    """Tell everyone who connects which rank this is, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            connection.sendall(text.encode())


def try_to_reach(peer, seconds):
    """Return None if the rank that `peer` describes answers at its address; else what is wrong."""
    address, port = peer["address"]
    try:
        with socket.create_connection((address, port), seconds) as connection:
            connection.settimeout(seconds)
            heard = connection.makefile().read()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return None if heard == peer["word"] else "somebody else answered"


def reach_all(rank, everyone, seconds):
    """Try all other ranks at once; return {rank: what is wrong} of those that were not reached."""
    problems = {}

    def reach(other):
        problem = try_to_reach(everyone[other], seconds)
        if problem:
            problems[other] = problem

    threads = [
        threading.Thread(target=reach, args=(other,), daemon=True)
        for other in range(len(everyone))
        if other != rank
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def remedy(rank, other, problem, everyone):
    """Return what to do when `rank` did not reach `other`."""
    there = everyone[other]["machine"]
    if net.is_loopback(everyone[other]["address"][0]):
        if everyone[rank]["machine"] != there:
            name = (everyone[other]["interfaces"] or ["eth0"])[0]
            return f"on {there}: export GLOO_SOCKET_IFNAME={name}"
        return "look at what filters 127.0.0.1 on this machine"
    if problem == "somebody else answered":
        return "two machines have this address: take another interface by GLOO_SOCKET_IFNAME"
    return (
        f"let {everyone[rank]['machine']} reach {there} on all TCP ports (firewall, security "
        "group), or choose the interface that joins them: export GLOO_SOCKET_IFNAME=..."
    )


# --- How fast is it? Asked over gloo, as a job would ---


def time_pair(rank, pair):
    """Return (latency in ms, 10^9 bytes per second) between this rank and the other, over gloo."""
    first = rank == pair[0]
    other = pair[1] if first else pair[0]

    def there_and_back(tensor):
        begin = time.perf_counter()
        for action in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            action(tensor, other)
        return (time.perf_counter() - begin) / 2

    small, big = torch.zeros(1, dtype=torch.uint8), torch.zeros(BIG, dtype=torch.uint8)
    there_and_back(big)  # the first one also makes buffers
    # The fastest tenth, and the best of five: what else a machine does is not the network's fault.
    latency = sorted(there_and_back(small) for _ in range(TRIPS))[TRIPS // 10]
    return 1000 * latency, BIG / min(there_and_back(big) for _ in range(5)) / 1e9


def time_pairs(store, rank, pairs, seconds):
    """Time one pair after the other; return {pair: numbers or what is wrong} of this rank's pairs.

    After the first error the group can't be used any more, so the pairs that follow are left out.
    """
    found = {}
    for number, pair in enumerate(pairs):
        broken = store.check(["broken"])
        if rank in pair and not broken:
            try:
                found[pair] = time_pair(rank, pair)
            except Exception as error:
                found[pair] = str(error).splitlines()[0][:200]
                store.set("broken", "")
        if rank in pair:
            store.add(f"done/{number}", 1)
        end = time.monotonic() + 2 * seconds
        while store.add(f"done/{number}", 0) < 2 and time.monotonic() < end:
            time.sleep(0.002)
    return found


def chosen_pairs(everyone):
    """Return all pairs of at most 8 ranks; of more, those of the first ranks of each machine."""
    ranks = range(len(everyone))
    if len(everyone) > 8:
        machines = [one["machine"] for one in everyone]
        ranks = sorted({machines.index(machine) for machine in machines})
    return [(a, b) for a in ranks for b in ranks if a < b]


def judge_pairs(timed, everyone):
    """Return a row for each pair. A pair between machines is slow if the others are much faster."""
    far = {p for p in timed if everyone[p[0]]["machine"] != everyone[p[1]]["machine"]}
    numbers = {pair: value for pair, value in timed.items() if isinstance(value, list | tuple)}
    rows = []
    for pair, value in timed.items():
        row = {"ranks": list(pair), "machines": [everyone[rank]["machine"] for rank in pair]}
        if value is None:
            row |= {"state": "unknown", "text": "not tried, because another pair failed"}
            rows.append(row)
            continue
        if isinstance(value, str):
            row |= {"state": "not ok", "text": f"they connect, but do not exchange data: {value}"}
            row["remedy"] = "compare the MTU of the two interfaces (ip link), try ping -s 8000"
            rows.append(row)
            continue
        latency, bandwidth = value
        row |= {"state": "ok", "latency_ms": latency, "gb_per_s": bandwidth}
        row["text"] = f"{latency:.2g} ms, {bandwidth:.2g} GB/s"
        others = [numbers[other] for other in far if other in numbers and other != pair]
        if pair in far and len(others) >= 2:
            usual = [statistics.median(column) for column in zip(*others, strict=True)]
            if bandwidth * SLOW < usual[1] or latency > SLOW * max(usual[0], NOISE_MS):
                row["state"] = "not ok"
                row["text"] += f", usual here: {usual[0]:.2g} ms, {usual[1]:.2g} GB/s"
                row["remedy"] = "look at the cable, switch or load of the slower machine"
        rows.append(row)
    return rows


# --- All of it ---


def tell_apart(everyone):
    """Give machines that have the same host name their number as well; return the same list."""
    names = {(one["machine"], one["node"]) for one in everyone}
    for one in everyone:
        if len([name for name, _ in names if name == one["machine"]]) > 1:
            one["machine"] = f"{one['machine']}/{one['node']}"
    return everyone


def listen():
    """Return (listener, how others find it): at the address that gloo would choose."""
    listener = net.listen_at(net.gloo_address())
    word = os.urandom(8).hex()
    threading.Thread(target=answer, args=(listener, word), daemon=True).start()
    return listener, {"address": listener.getsockname()[:2], "word": word}


def unreached(everyone, problems):
    """Return a row for each pair of which one did not reach the other, or neither."""
    rows = {}
    for rank, theirs in enumerate(problems):
        for other, problem in ((int(name), problem) for name, problem in theirs.items()):
            pair = (min(rank, other), max(rank, other))
            machines = [everyone[one]["machine"] for one in pair]
            empty = {"ranks": list(pair), "machines": machines, "state": "not ok"}
            row = rows.setdefault(pair, empty | {"text": [], "remedy": []})
            host = everyone[other]["address"][0]
            row["text"].append(f"rank {rank} does not reach rank {other} at {host}: {problem}")
            row["remedy"].append(remedy(rank, other, problem, everyone))
    for row in rows.values():
        row["text"] = "; ".join(row["text"])
        row["remedy"] = "; ".join(dict.fromkeys(row["remedy"]))
    return [rows[pair] for pair in sorted(rows)]


def measure(store, rank, everyone, timeout):
    """Return {pair: numbers, or what was wrong, or None} of all pairs, the same on each rank."""
    pairs = chosen_pairs(everyone)
    mine = [[*pair, value] for pair, value in time_pairs(store, rank, pairs, timeout).items()]
    timed = {pair: None for pair in pairs}
    for theirs in gather(store, "timed", rank, len(everyone), mine, 6 * timeout):
        timed |= {(a, b): value for a, b, value in theirs}
    return timed


def network(store, rank, world_size, timeout, me, look=lambda world_size: {}):
    """Look at all pairs; return {"ranks": facts of each, "pairs": rows, "group": what is wrong}.

    `me`: {"machine": its name, "node": its number}. `look` returns more facts, to be handed on; it
    is called when all are here. All ranks return the same. Raises Missing if one does not come.
    """
    store = dist.PrefixStore("doctor", store)
    came = gather(store, "came", rank, world_size, me, timeout)
    try:
        return look_at_network(store, rank, world_size, timeout, {**me, **look(world_size)})
    except Missing as missing:
        here = {number: came[number] for number in missing.args[0]}
        raise Missing(here, "went away in the middle") from missing


def look_at_network(store, rank, world_size, timeout, facts):
    """Do what `network` does, when all ranks have come."""
    listener, place = listen()
    with listener:
        mine = {**facts, **place, "interfaces": net.outward()}
        everyone = tell_apart(gather(store, "here", rank, world_size, mine, 60 + timeout))
        problems = reach_all(rank, everyone, min(timeout, 5))
        problems = gather(store, "reached", rank, world_size, problems, 3 * timeout)
    result = {"ranks": everyone, "pairs": unreached(everyone, problems), "group": None}
    if result["pairs"]:
        return result
    limit = timedelta(seconds=timeout)
    try:
        place = {"rank": rank, "world_size": world_size, "timeout": limit}
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), **place)
    except Exception as error:
        result["group"] = str(error).splitlines()[0][:200]
    groups = gather(store, "group", rank, world_size, result["group"], 6 * timeout)
    result["group"] = next((problem for problem in groups if problem), None)
    if result["group"] is None:
        result["pairs"] = judge_pairs(measure(store, rank, everyone, timeout), everyone)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return result


def main():
    """Be one rank on this machine."""
    rank, world_size, timeout = map(int, sys.argv[1:4])
    ports, descriptors = ([int(n) for n in text.split(",") if n] for text in sys.argv[5:7])
    if sys.platform == "linux":
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # we end with the doctor
    torch.set_num_threads(1)
    on_one_machine(rank, world_size, timeout, sys.argv[4], ports, descriptors)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a group that has failed may keep threads that never end
