"""What lesson 04's claims need from PyTorch: how ranks meet without the lesson's own code."""

import fcntl
import inspect
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from nbtools import RankFailed, free_ports, run, wait_for_all

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def quiet():
    """Send the library's own log of this rank, which holds ports and times, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def join(number, count, arguments_of):
    """Call init_process_group with arguments_of(number); return the sum, or the error's text."""
    dist.destroy_process_group()
    quiet()
    os.environ.pop("MASTER_ADDR", None)
    arguments = {"rank": number, "world_size": count, "timeout": timedelta(seconds=1)}
    wait_for_all(number, count)
    try:
        dist.init_process_group("gloo", **(arguments | arguments_of(number)))
        dist.all_reduce(total := torch.tensor([number + 1]))
        said = total.item()
        wait_for_all(number, count, "is through")
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        wait_for_all(number, count, "is through")  # with the error goes the store, which others use
    return said


def tcp(**more):
    url, limit = f"tcp://127.0.0.1:{free_ports(1)[0]}", timedelta(seconds=60 if "ok" in more else 1)
    more.pop("ok", None)
    return lambda number: (
        {"init_method": url, "timeout": limit}
        | {name: value(number) if callable(value) else value for name, value in more.items()}
    )


def on_interface(names):
    def arguments_of(number):
        os.environ["GLOO_SOCKET_IFNAME"] = names
        return meet(number)

    meet = tcp(ok=True)
    return arguments_of


LO = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
CASES = {  # name: (processes, arguments by process, what the last one says)
    "never comes": (1, tcp(world_size=2), "1/2 clients joined"),
    "a rank twice": (3, tcp(rank=lambda n: min(n, 1)), "wait timeout"),
    "both": (1, tcp(store=lambda n: dist.HashStore()), "both init_method and store"),
    "no rank": (1, tcp(rank=-1), "rank parameter missing"),
    "unknown scheme": (1, lambda n: {"init_method": "pigeon://roof"}, "No rendezvous handler"),
    "no variables": (1, lambda n: {"init_method": "env://"}, "MASTER_ADDR expected, but not set"),
    "nothing": (1, lambda n: {}, "MASTER_ADDR expected, but not set"),
    "no interface": (1, on_interface("nosuch0"), "Unable to find address for: nosuch0"),
    "one of two": (1, on_interface(f"{LO},nosuch0"), "Unable to find address for: nosuch0"),
    "two interfaces": (2, on_interface(f"{LO},{LO}"), 3),
    "all is well": (2, tcp(ok=True), 3),
    "group names differ": (2, tcp(ok=True, group_name=lambda n: f"group {n}"), 3),
}


@pytest.fixture(scope="module")
def said():
    """Return {name: what the last process says}; the cases wait side by side."""
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda case: run(join, *case[:2])[-1], CASES.values())
        return dict(zip(CASES, answers, strict=True))


@pytest.mark.claim("E5", "E7", "E9", "E12", "B4", "B2", "C9")
@pytest.mark.parametrize("name", CASES)
def test_what_the_library_says(said, name):
    *_, words = CASES[name]
    assert said[name] == words if isinstance(words, int) else words in str(said[name])


@pytest.mark.claim("E7")
def test_defaults():
    names = [*inspect.signature(dist.init_process_group).parameters]
    documented = "backend, init_method, timeout, world_size, rank, store, group_name"
    assert dist.is_available() and ", ".join(names[:7]) == documented
    assert dist.constants.default_pg_timeout == timedelta(minutes=30)
    assert "10 minutes for NCCL and 30 minutes for other" in dist.init_process_group.__doc__
    assert "This argument is ignored" in dist.init_process_group.__doc__
    assert dist.HashStore().timeout == timedelta(minutes=5)


# --- Who calls whom ---


def look(rank, world_size, port, groups):
    """Join by tcp://; return the ports where this rank listens, its connections, its keys."""
    dist.destroy_process_group()
    quiet()
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    keys = sorted(key.split("/")[-1] for key in store.list_keys() if "cpu" in key)
    dist.barrier()
    for _ in range(groups - 1):
        dist.new_group()
    dist.all_reduce(torch.tensor([rank]))
    dist.barrier()
    found = psutil.Process().net_connections("tcp")
    dist.barrier()
    listens = {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return listens, {(c.laddr.port, c.raddr.port) for c in found if c.raddr}, keys


@pytest.mark.claim("E10")
@pytest.mark.parametrize("world_size, groups", [(3, 1), (4, 2)])
def test_all_call_the_store_and_each_pair_connects_once_in_each_group(world_size, groups):
    (port,) = free_ports(1)
    seen = run(look, world_size, port, groups)
    owner = {ends: rank for rank, (_, linked, _) in enumerate(seen) for ends in linked}
    calls = [(rank, owner[b, a], b) for (a, b), rank in owner.items() if (b, a) in owner]
    calls = [(caller, called, at) for caller, called, at in calls if at in seen[called][0]]
    to_store = sorted((caller, called) for caller, called, at in calls if at == port)
    pairs = sorted(tuple(sorted(call[:2])) for call in calls if call[2] != port)
    every = [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    assert to_store == [(rank, 0) for rank in range(world_size)]
    assert pairs == sorted(every * groups)
    assert seen[-1][2] == [str(rank) for rank in range(world_size)]  # an address from each


def meet_a_dead_rank(rank, world_size, port):
    """Be rank 0, and read for rank 1 an address at which nobody is: (what is said, seconds)."""
    dist.destroy_process_group()
    quiet()

    class Forged(dist.Store):
        def set(self, key, value):
            self.own = bytes(value)

        def get(self, key):
            at = self.own.index(socket.inet_aton("127.0.0.1"))
            return self.own if key.endswith("/0") else self.own[: at - 2] + port + self.own[at:]

        def wait(self, keys, *limit):
            pass

    start, limit = time.monotonic(), timedelta(seconds=0.5)
    try:
        dist.init_process_group("gloo", store=Forged(), rank=0, world_size=2, timeout=limit)
    except RuntimeError as error:
        return str(error), time.monotonic() - start


@pytest.mark.claim("E9", "E10")
def test_the_rank_that_is_called_waits_for_five_times_its_timeout():
    """Whose address and port are greater (by gloo's comparison), calls; the other one waits."""
    ((said, _),) = run(meet_a_dead_rank, 1, b"\x01\x00")
    assert "Connection refused" in said
    ((said, seconds),) = run(meet_a_dead_rank, 1, b"\xff\xff")
    assert "Connect timeout" in said and seconds >= 2.5


# --- Stores ---


@pytest.mark.claim("E14")
def test_stores_do_the_same_operations(tmp_path):
    stores = {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "prefix": dist.PrefixStore("p", dist.HashStore()),
    }
    for name, store in stores.items():
        store.set("a", "1")
        assert store.get("a") == b"1", name
        assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5"), name
        changes = [("", "x", b"x"), ("y", "z", b"x"), ("x", "z", b"z")]
        for old, new, after in changes:
            assert store.compare_set("c", old, new) == after == store.get("c"), name
        assert store.check(["a", "c"]) and not store.check(["a", "never"]), name
        other = store.clone() if name == "tcp" else store  # a TCPStore does one thing at a time
        late = threading.Timer(0.1, other.set, ("late", "1"))
        late.start()
        store.wait(["late"], timedelta(seconds=20))
        late.join()


@pytest.mark.claim("E14")
def test_prefixes_keep_two_users_of_a_store_apart():
    store = dist.HashStore()
    one, other = dist.PrefixStore("one", store), dist.PrefixStore("other", store)
    one.set("key", "1")
    assert one.check(["key"]) and not other.check(["key"]) and not store.check(["key"])


def meet_in_a_file(rank, world_size, path, die):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    dist.barrier()
    if die:
        os.kill(os.getpid(), 9)
    dist.destroy_process_group()


@pytest.mark.claim("E11")
def test_who_leaves_a_file_last_removes_it_and_a_killed_run_does_not(tmp_path):
    """Of two ranks that leave at once, both may leave the file: so we leave it last."""
    path = tmp_path / "a file"
    for _ in range(2):
        store = dist.FileStore(str(path), 2)
        run(meet_in_a_file, 2, path, False)
        assert path.exists()
        del store
        assert not path.exists()
    with pytest.raises(RankFailed, match="SIGKILL"):
        run(meet_in_a_file, 2, path, True)
    assert path.exists()


def set_and_get(rank, world_size, path):
    store = dist.FileStore(path, 1)
    store.set("a", "1")
    return store.get("a")


@pytest.mark.claim("E11")
@pytest.mark.skipif(sys.platform != "linux", reason="on Linux the two kinds of lock are separate")
def test_a_file_store_locks_with_flock_and_not_with_fcntl(tmp_path):
    with open(tmp_path / "fcntl", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert run(set_and_get, 1, file.name) == [b"1"]
    with open(tmp_path / "flock", "w") as file, pytest.raises(RankFailed, match="no answer"):
        fcntl.flock(file, fcntl.LOCK_EX)
        run(set_and_get, 1, file.name, deadline=2)


# --- Backends ---


def collectives(rank, world_size):
    """Return the collectives of article E that bring wrong numbers on this rank of two, or fail."""
    mine, at_0 = rank + 1.0, rank == 0
    x, both = torch.zeros(1), torch.zeros(2)
    parts = list(both.split(1))
    two = [torch.ones(1), torch.full((1,), 2.0)]
    tries = {  # name: (the call, the tensor to look at, what must be in it on rank 0, on rank 1)
        "send, recv": (lambda: (dist.send, dist.recv)[rank](x, 1 - rank), x, ([1], [1])),
        "broadcast": (lambda: dist.broadcast(x, 1), x, ([2], [2])),
        "all_reduce": (lambda: dist.all_reduce(x), x, ([3], [3])),
        "reduce": (lambda: dist.reduce(x, 0), x, ([3], None)),
        "all_gather": (lambda: dist.all_gather(parts, x), both, ([1, 2], [1, 2])),
        "gather": (lambda: dist.gather(x, parts if at_0 else None), both, ([1, 2], [0, 0])),
        "scatter": (lambda: dist.scatter(x, two if at_0 else None), x, ([1], [2])),
        "reduce_scatter": (lambda: dist.reduce_scatter(x, two), x, ([2], [4])),
        "all_to_all": (lambda: dist.all_to_all(parts, two), both, ([1, 1], [2, 2])),
        "barrier": (dist.barrier, x, ([1], [2])),
    }
    wrong = []
    for name, (call, result, wanted) in tries.items():
        x.fill_(mine)
        both.zero_()
        call()
        if wanted[rank] not in (None, result.tolist()):
            wrong.append((name, result.tolist()))
    return wrong


@pytest.mark.claim("E1")
def test_gloo_does_all_collectives_on_the_cpu():
    assert run(collectives, 2) == [[], []]


def without_broadcast(rank, world_size):
    dist.broadcast = lambda *_: None
    return collectives(rank, world_size)


@pytest.mark.claim("E1")
def test_a_collective_that_does_nothing_would_be_seen():
    assert run(without_broadcast, 2)[0] == [("broadcast", [1.0])]


@pytest.mark.claim("E2")
def test_which_backends_come_with_the_wheels():
    assert dist.is_gloo_available()
    if dist.is_mpi_available():
        pytest.skip("this PyTorch was built with MPI")
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with pytest.raises(RuntimeError, match="only included if you build PyTorch from source"):
        dist.init_process_group("mpi", **alone)
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="doesn't have NCCL built in"):
            dist.init_process_group("nccl", **alone)


def join_as_on_windows(rank, world_size, port):
    """Let PyTorch's rendezvous believe that this is Windows; return the sum, and its server."""
    dist.destroy_process_group()
    rendezvous, libuv = sys.modules["torch.distributed.rendezvous"], []

    class Windows:
        platform = "win32"

    def watch(*args, **options):
        libuv.append(options["use_libuv"])
        return dist.TCPStore(*args, **options)

    rendezvous.sys, rendezvous.TCPStore = Windows, watch
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    dist.all_reduce(total := torch.tensor([rank + 1]))
    return total.item(), libuv


@pytest.mark.claim("E3")
def test_tcp_is_not_excluded_on_windows_any_more(monkeypatch):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert run(join_as_on_windows, 2, free_ports(1)[0]) == [(3, [False])] * 2
