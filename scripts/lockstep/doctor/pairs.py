"""What ranks find out together: who is here, who reaches whom, and how fast is the way?

Who reaches whom is asked with plain sockets: they name a bad pair, where a group only fails. How
fast it is, is asked over gloo, as a job would.
"""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import ending, network
from lockstep.doctor.report import Row

BIG = 4 * 2**20  # bytes, for the bandwidth
TRIPS = 100  # there and back, for the latency


def look_at_pairs(peers, facts):
    """Return (the facts of all ranks, a row for each pair); the same on each rank.

    `facts` has the name of this rank's "machine"; others are handed on. Raises Missing.
    """
    listener, place = listen()
    with listener:
        everyone = peers.gather("here", {**facts, **place}, peers.timeout)
        problems = reach_all(everyone, peers.timeout)
        problems = peers.gather("reached", problems, 3 * peers.timeout)
    return everyone, unreached(everyone, problems) or time_all(peers, everyone)


def row_of(pair, everyone, state, text, remedy="", **facts):
    """Return a row about two ranks."""
    machines = [everyone[rank]["machine"] for rank in pair]
    places = [f" on {machine}" * (machines[0] != machines[1]) for machine in machines]
    check = f"rank {pair[0]}{places[0]} - rank {pair[1]}{places[1]}"
    return Row(check, state, text, remedy, {"ranks": [*pair], "machines": machines, **facts})


# --- Who reaches whom? ---


def listen():
    """Return (listener, how others find it): at the address that gloo would choose."""
    listener = network.listen_at(network.gloo_address())
    word = os.urandom(8).hex()
    threading.Thread(target=answer, args=(listener, word), daemon=True).start()
    place = {"address": listener.getsockname()[:2], "word": word}
    return listener, {**place, "interfaces": network.outward()}


def answer(listener, word):
    """Tell everyone who connects which rank this is, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            connection.sendall(word.encode())


def try_to_reach(peer, seconds):
    """Return None if the rank that `peer` describes answers at its address; else what is wrong."""
    try:
        with socket.create_connection(peer["address"], seconds) as connection:
            connection.settimeout(seconds)
            heard = connection.makefile().read()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return None if heard == peer["word"] else "somebody else answered"


def reach_all(everyone, seconds):
    """Try all ranks at once; return [[rank, what is wrong]] of those not reached."""
    with ThreadPoolExecutor(len(everyone)) as pool:
        problems = pool.map(lambda peer: try_to_reach(peer, seconds), everyone)
    return [[rank, problem] for rank, problem in enumerate(problems) if problem]


def unreached(everyone, problems):
    """Return a row for each machine that does not reach another: the first pair of their ranks.

    `problems`: of each rank, what reach_all has returned.
    """
    rows = {}
    for rank, theirs in enumerate(problems):
        for other, problem in theirs:
            here, there = everyone[rank], everyone[other]
            text = f"rank {rank} does not reach rank {other} at {there['address'][0]}: {problem}"
            row = row_of((rank, other), everyone, "not ok", text, remedy(here, there, problem))
            rows.setdefault((here["machine"], there["machine"]), row)
    return [*rows.values()]


def remedy(here, there, problem):
    """Return what to do when the rank `here` did not reach the one `there`."""
    if network.is_loopback(there["address"][0]):
        if here["machine"] == there["machine"]:
            return "look at what filters 127.0.0.1 on this machine"
        name = (there["interfaces"] or ["eth0"])[0]
        return f"on {there['machine']}: export GLOO_SOCKET_IFNAME={name}"
    if problem == "somebody else answered":
        return "two machines have this address: take another interface by GLOO_SOCKET_IFNAME"
    return (
        f"let {here['machine']} reach {there['machine']} on all TCP ports (firewall, security "
        "group), or choose the interface that joins them: export GLOO_SOCKET_IFNAME=..."
    )


# --- How fast is the way? ---


def time_all(peers, everyone):
    """Join a group over gloo and time the pairs; return rows. Raises Missing."""
    problem, limit = None, timedelta(seconds=peers.timeout)
    who = {"rank": peers.rank, "world_size": peers.world_size, "timeout": limit}
    try:
        dist.init_process_group("gloo", store=dist.PrefixStore("group", peers.store), **who)
    except Exception as error:
        problem = ending.reason(error)
    problems = [text for text in peers.gather("joined", problem, 6 * peers.timeout) if text]
    if problems:
        cause = min(problems, key=is_consequence)
        return [Row("group over gloo", "not ok", cause, "look at the first line that is not ok")]
    timed = dict.fromkeys(chosen_pairs(everyone))
    mine = [[*pair, value] for pair, value in time_pairs(peers.rank, timed).items()]
    for theirs in peers.gather("timed", mine, 3 * peers.timeout):
        timed |= {(a, b): value for a, b, value in theirs}
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return [row_of_times(pair, everyone, value) for pair, value in timed.items()]


def is_consequence(problem):
    """Return whether a rank has lost another, or waited in vain: it is not the cause."""
    return bool(ending.LOST.search(problem) or ending.LATE.search(problem))


def chosen_pairs(everyone):
    """Return all pairs of at most 8 ranks; of more, those of the first ranks of each machine."""
    ranks = range(len(everyone))
    if len(everyone) > 8:
        machines = [one["machine"] for one in everyone]
        ranks = sorted({machines.index(machine) for machine in machines})
    return [(a, b) for a in ranks for b in ranks if a < b]


def time_pairs(rank, pairs):
    """Time one pair after the other; return {pair: numbers or what is wrong} of this rank's pairs.

    After the first error the group can't be used any more, so the pairs that follow are left out.
    """
    found = {}
    for pair in pairs:
        try:
            if rank in pair:
                found[pair] = time_pair(rank, pair)
            dist.barrier()  # nobody else sends while a pair is timed
        except Exception as error:
            if rank in pair:
                found[pair] = ending.reason(error)
            break
    return found


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


def row_of_times(pair, everyone, value):
    """Return the row of a pair: (ms, GB/s), or what is wrong, or None if it was not timed."""
    if value is None:
        return row_of(pair, everyone, "unknown", "not tried, because another pair failed")
    if isinstance(value, str):
        text = f"they connect, but do not exchange data: {value}"
        cure = "compare the MTU of the two interfaces (ip link), try ping -s 8000"
        return row_of(pair, everyone, "not ok", text, cure)
    latency, bandwidth = value
    text = f"{latency:.2g} ms, {bandwidth:.2g} GB/s"
    return row_of(pair, everyone, "ok", text, latency_ms=latency, gb_per_s=bandwidth)
