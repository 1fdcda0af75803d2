"""What lesson 04 claims: the ranks meet by each method, and name who is missing or came twice.

The script knows nothing of this file; see lesson_02.py. Its ranks were seen to meet. What goes
wrong in a meeting can't be seen in one that goes well. So it is played here, in one process, with
the script's own functions: on a stage ranks call the roll in many orders, and one opens a store.
"""

import contextlib
import os
import socket
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import lesson_04_init_methods as lesson
from lockstep import by_hand, ending, network
from lockstep.watch import claims, sockets
from lockstep.watch.played_store import Stage, Table

KEEP_VALUES = 1  # there are no updates, but all that is said and called is kept
LIMITS = {"--rank": (0, 63), "--nproc": (1, 64), "--steps": (1, 10**4)}
LIMITS |= {"--batch-size": (1, 10**4), "--seed": (0, 2**32 - 1)}
AGENT = "TORCHELASTIC_USE_AGENT_STORE"


def refuse(args, world_size, ranks_here):
    """Return why nobody can meet with these flags, or in this environment; or None."""
    return by_hand.problem(args)


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it}; by hand, only one rank is seen."""
    method, by_itself = args.init.partition("://")[0], by_hand.told(args)
    size = int(os.environ["WORLD_SIZE"]) if by_hand.by_environment(args) else started
    ranks = [*range(started)] if by_itself is None else [by_itself]
    right = size * (size + 1) // 2 + size * args.seed
    numbers = {"world_size": size, "init": method, "ranks_seen": list(job)}
    if wrong := wrong_in_group(job, ranks, size) or wrong_in_words(job, size, right):
        return claims.Verdict(f"ranks meet by {method}", [wrong], numbers, [])
    backend = job[ranks[0]].group["backend"]
    numbers |= {"backend": backend, "device": "cuda" if backend == "nccl" else "cpu"}
    numbers |= {"all_reduce": right} | seconds(job)
    held = AGENT in os.environ or (method == "store" and by_itself is None)
    wrong = wrong_in_sums(job, args) or wrong_in_place(job, held) or wrong_in_plays()
    come, meet = numbers["seconds_to_come"], numbers["seconds_to_meet"]
    line = f"all were there after {come:.3g} s, and met in {meet:.3g} s"
    who = f"rank{'s' * (by_itself is None)} {', '.join(map(str, ranks))} met by {method}"
    claim = f"{who}, and name who is missing; their all-reduce is {right}"
    lines = [f"{line}, over {backend} on {numbers['device']}"]
    return claims.Verdict(claim, [wrong] if wrong else [], numbers, lines)


# --- What the ranks did ---


def seconds(job):
    """Return how long the roll call took, since the first one looked for others, and to join."""
    begin = min(seen.of("said")[0]["at"] for seen in job.values())
    calls = [(seen.of("joining")[0]["at"], seen.group["at"]) for seen in job.values()]
    meet = max(met - here for here, met in calls)
    return {"seconds_to_come": max(calls)[0] - begin, "seconds_to_meet": meet}


def wrong_in_group(job, ranks, size):
    """All that were started are in one group, of as many as were asked for."""
    sizes = sorted({seen.group["world"] for seen in job.values()})
    right = list(job) == ranks and sizes == [size]
    return None if right else f"{ranks} were started; {list(job)} are in groups of {sizes}"


def wrong_in_words(job, size, right):
    """Each rank says where it looks for the others, all at one place, and what the sum is."""
    for rank, seen in job.items():
        said, place = [event["text"] for event in seen.of("said")], place_of(job)
        wanted = [f"rank {rank} of {size} looks for the others at {place}"]
        wanted += [f"rank {rank} has met all {size}; the sum is {right}"]
        if said != wanted:
            return f"rank {rank} says {said}, and not {wanted}"
    return None


def place_of(job):
    """Return where the first rank looks for the others."""
    said = next(iter(job.values())).of("said")
    return said[0]["text"].rpartition(" looks for the others at ")[2] if said else ""


def wrong_in_sums(job, args):
    """Each rank adds up as many numbers, as often, as it is told to."""
    for rank, seen in job.items():
        sums = [call["shape"] for call in seen.calls if call["name"] == "all_reduce"]
        if sums != [[[args.batch_size], "int64"]] * args.steps:
            return f"rank {rank} adds up {sums}"
    return None


def wrong_in_place(job, held):
    """All call the store at a host and a port; rank 0 alone listens, if nobody else holds it."""
    port = place_of(job).rpartition(":")[2]
    for rank, seen in job.items() if "/" not in place_of(job) else ():
        called = [there for _, there in seen.group["connections"] if str(there[1]) == port]
        listens = [here for here in seen.group["listens"] if str(here[1]) == port]
        if not called or len(listens) != (rank == 0 and not held):
            return f"rank {rank} listens for the others at {listens}, and has called {called}"
    return None


# --- What is played ---

LIMIT = timedelta(seconds=5)


def wrong_in_plays():
    """Return what is wrong with what a rank reads, with its store, and with the roll call."""
    told = dict(zip(by_hand.VARIABLES, ("3", "4", "::1", "29500"), strict=True))
    with patch.dict(os.environ, told | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}):
        if lesson.told_by_environment() != ("::1:29500", 3, 4):
            return "rank 3 of 4, on a second machine, does not read in the environment who it is"
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts.append("[::1]")
    return wrong_in_roll_calls() or next(filter(None, map(wrong_in_door, hosts)), None)


def wrong_in_door(host, tries=2):
    """Rank 0 listens at its own address alone, waits for nobody, and closes; others only call.

    It tries again: when a process opens stores again and again, one in fifty gets no answer.
    """
    port, before = network.free_ports(1)[0], sockets.of_this_process()["listens"]
    place = f"{host}:{port}"
    try:
        stores = [lesson.open_store(place, 0, 2, LIMIT)]
        doors = [end for end in sockets.of_this_process()["listens"] if end not in before]
        stores.append(lesson.open_store(place, 1, 2, LIMIT))
        with patch.dict(os.environ, {AGENT: "True"}):
            stores.append(lesson.open_store(place, 0, 2, LIMIT))
    except (RuntimeError, OSError) as error:
        if tries > 1 and ending.tells(ending.LATE, error):
            return wrong_in_door(host, tries - 1)
        return f"at {place} one is told: {ending.reason(error)}"
    if doors != [(host.strip("[]"), port)] or {store.timeout for store in stores} != {LIMIT}:
        return f"a store of {LIMIT} at {place} listens at {doors}, or is less patient"
    stores.clear()
    closed = sockets.of_this_process()["listens"] == before
    return None if closed else "the store still listens after the last rank has left it"


SCENES = (  # who comes, each a rank and a world size; what all are told, if they are not let in
    (((0, 2), (1, 2)), ""),
    (((0, 3), (1, 3), (2, 3)), ""),
    (((0, 2), (0, 2)), "rank 0 is here twice"),
    (((0, 3), (1, 3), (1, 3)), "rank 1 is here twice"),
    (((0, 3), (2, 3)), "not here after 0:00:05: rank 1"),
    (((1, 4), (2, 4)), "not here after 0:00:05: rank 0, rank 3"),
    (((0, 2), (2, 2)), "rank 2 is none of the 2 ranks"),
    (((0, 2), (-1, 2)), "rank -1 is none of the 2 ranks"),
    (((0, 3), (1, 3), (2, 4)), "has world size"),
)


def wrong_in_roll_calls():
    """All are let in, or all are told why not, in many orders; and a store serves again."""
    for seed in range(20):
        for comers, words in SCENES:
            scene = partial(wrong_in_scene, Stage(seed))
            wrong = scene(comers, words)
            if not words:  # then another job meets there, and this one after a restart
                wrong = wrong or scene(comers, "", "b") or scene(comers, "", attempt="1")
                wrong = wrong or scene(comers[1:2], "is here twice")
            if wrong:
                return wrong
    return None


def wrong_in_scene(stage, comers, words, job="a", attempt="0"):
    """Let these ranks join; return what is wrong with what they are told, and when."""
    joined, begin = [], stage.now

    def init_process_group(*args, store=None, **options):
        joined.append([*args, options])
        if store is None or store.add(f"address of {options['rank']}", 1) > 1:
            raise ValueError("the group does not meet in a part of the store of its own")

    def come(rank, size):
        try:
            lesson.join(stage.store, rank, size, job, "any backend", LIMIT)
            return ""
        except Exception as error:
            if rank == 0 and [one for one, _ in comers].count(0) == 1:
                stage.closed = True  # it holds the store
            return str(error)

    library = SimpleNamespace(PrefixStore=Table, init_process_group=init_process_group)
    restarts = {AGENT: "True", "TORCHELASTIC_RESTART_COUNT": attempt}
    with patch.dict(os.environ, restarts), patch.multiple(lesson, dist=library, time=stage):
        said = stage.play([partial(come, *comer) for comer in comers])
    for comer, told in zip(comers, said, strict=True):
        if words not in told or (told and not words):
            return f"when {comers} come, {comer} is told: {told or 'come in'}"
    wanted = [["any backend", {"rank": r, "world_size": n, "timeout": LIMIT}] for r, n in comers]
    if sorted(joined, key=str) != (wanted if not words else []):
        return f"when {comers} come, they join as {joined}"
    soon = stage.now - begin < 1 + LIMIT.total_seconds() * ("not here" in words)
    return None if soon else f"when {comers} come, they leave too late"
