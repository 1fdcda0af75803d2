"""What ranks find out together: who is here, who reaches whom, and how fast is the way?

Who reaches whom is asked with plain sockets: they name a bad pair, where a group only fails. How
fast it is, is asked over gloo, as a job would.
"""

import contextlib
import json
import os
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep import ending, network
from lockstep.doctor.row import Row

BIG = 4 * 2**20  # bytes, for the bandwidth
TRIPS = 100  # there and back, for the latency
SLOW = 5  # times slower than the median of its kind: such a pair holds up every all-reduce
NOISE_MS = 1  # a machine that is busy with other things adds as much to a latency


class Missing(Exception):
    """Not all ranks have left a value in the store. Arguments: those that have, and in how long."""


class Peers(NamedTuple):
    """All ranks that look for something together, and which of them this one is."""

    store: dist.Store  # each rank has left the name of its machine there, at machine/RANK
    rank: int
    world_size: int
    timeout: int

    def gather(self, key, value, seconds):
        """Leave a value in the store; return those of all ranks. Raises Missing."""
        names = [f"{key}/{rank}" for rank in range(self.world_size)]
        self.store.set(names[self.rank], json.dumps(value))
        try:
            self.store.wait(names, timedelta(seconds=seconds))
        except dist.DistStoreError:
            here = [rank for rank, name in enumerate(names) if self.store.check([name])]
            raise Missing(here, seconds) from None
        return [json.loads(text) for text in self.store.multi_get(names)]

    def row_of(self, missing):
        """Return the row that says who is missing, and where the others are."""
        here, seconds = missing.args
        lost = [rank for rank in range(self.world_size) if rank not in here]
        came = self.store.check([f"machine/{rank}" for rank in lost])
        why = "went away in the middle" if came else f"not here after {seconds} s"
        places = {}
        for rank in here:
            machine = self.store.get(f"machine/{rank}").decode()
            places.setdefault(machine, []).append(rank)
        text = f"rank {in_words(lost)} of {self.world_size} {why}; here: "
        text += ", ".join(f"{in_words(ranks)} on {machine}" for machine, ranks in places.items())
        cure = "start it with the same command, and look at what its own machine says"
        return Row("ranks", "not ok", text, cure)

    def cause(self, key, problem):
        """Return the problem of the rank that is the cause, or None if none has one.

        Who lost a connection, or waited in vain, is not the cause if somebody else has a problem.
        """

        def is_consequence(problem):
            return bool(ending.LOST.search(problem) or ending.LATE.search(problem))

        problems = self.gather(key, problem, 6 * self.timeout)
        return min(filter(None, problems), key=is_consequence, default=None)


def in_words(ranks):
    """Return the numbers of ranks, with commas between them."""
    return ", ".join(map(str, ranks))


def look_at_pairs(peers, facts):
    """Return (the facts of all ranks, a row for each pair); the same on each rank.

    `facts` has the name of this rank's "machine"; others are handed on. Raises Missing.
    """
    listener, place = listen()
    with listener:
        everyone = peers.gather("here", {**facts, **place}, peers.timeout)
        problems = reach_all(everyone, min(peers.timeout, 5))
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
    """Return a row for each two machines whose ranks do not reach each other: the first pair.

    `problems`: of each rank, what reach_all has returned.
    """
    found = {}
    for rank, theirs in enumerate(problems):
        for other, problem in theirs:
            way = everyone[rank]["machine"], everyone[other]["machine"]
            found.setdefault(tuple(sorted(way)), {}).setdefault(way, (rank, other, problem))
    rows = []
    for ways in found.values():
        texts, cures = [], []
        for rank, other, problem in ways.values():
            address = everyone[other]["address"][0]
            texts.append(f"rank {rank} does not reach rank {other} at {address}: {problem}")
            cures.append(remedy(everyone[rank], everyone[other], problem))
        text, cure = "; ".join(texts), "; ".join(dict.fromkeys(cures))
        rows.append(row_of(sorted((rank, other)), everyone, "not ok", text, cure))
    return rows


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
    problem = peers.cause("group", problem)
    if problem:
        return [Row("group over gloo", "not ok", problem, "look at the first line that is not ok")]
    timed = dict.fromkeys(chosen_pairs(everyone))
    mine = [[*pair, value] for pair, value in time_pairs(peers.rank, timed).items()]
    for theirs in peers.gather("timed", mine, 3 * peers.timeout):
        timed |= {(a, b): value for a, b, value in theirs}
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return judge(timed, everyone)


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


def judge(timed, everyone):
    """Return a row for each pair. A pair between machines is slow if the others are much faster."""
    far = {p for p in timed if everyone[p[0]]["machine"] != everyone[p[1]]["machine"]}
    rows = []
    for pair, value in timed.items():
        if value is None:
            text = "not tried, because another pair failed"
            rows.append(row_of(pair, everyone, "unknown", text))
        elif isinstance(value, str):
            text = f"they connect, but do not exchange data: {value}"
            cure = "compare the MTU of the two interfaces (ip link), try ping -s 8000"
            rows.append(row_of(pair, everyone, "not ok", text, cure))
        else:
            others = [timed[other] for other in far - {pair}] if pair in far else []
            others = [numbers for numbers in others if isinstance(numbers, list | tuple)]
            rows.append(compare(pair, everyone, value, others))
    return rows


def compare(pair, everyone, numbers, others):
    """Return the row of a pair that was timed. `others`: the numbers of pairs of its kind."""
    latency, bandwidth = numbers
    text = f"{latency:.2g} ms, {bandwidth:.2g} GB/s"
    row = row_of(pair, everyone, "ok", text, latency_ms=latency, gb_per_s=bandwidth)
    if len(others) < 2:
        return row
    usual_latency, usual_bandwidth = map(statistics.median, zip(*others, strict=True))
    if bandwidth * SLOW >= usual_bandwidth and latency <= SLOW * max(usual_latency, NOISE_MS):
        return row
    text += f", usual here: {usual_latency:.2g} ms, {usual_bandwidth:.2g} GB/s"
    cure = "look at the cable, switch or load of the slower machine"
    return row._replace(state="not ok", text=text, remedy=cure)
