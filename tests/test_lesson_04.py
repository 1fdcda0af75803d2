"""Lesson 04: how ranks find each other, how that fails, and what cures it."""

import argparse
import contextlib
import fcntl
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import cloudpickle
import lesson_04_init_methods as lesson
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, run_lesson, start_lesson
from nbtools import RankFailed, free_ports, run

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = ROOT / "lessons" / "lesson_04_init_methods.py"
LOOPBACK = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


# --- Helpers ---


def quiet():
    """Send the library's own log of this rank, which holds ports and times, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def add_up(rank):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return total.item()


def join_raw(rank, world_size, arguments_of, hold=0):
    """Call init_process_group with arguments_of(rank); return the sum, or the error's text."""
    dist.destroy_process_group()
    quiet()
    os.environ.pop("MASTER_ADDR", None)
    arguments = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=3)}
    try:
        dist.init_process_group("gloo", **(arguments | arguments_of(rank)))
        return add_up(rank)
    except Exception as error:
        time.sleep(hold if rank == 0 else 0)  # rank 0 has the store: the others need it
        return f"{type(error).__name__}: {error}"


def patient(arguments_of):
    """Return the same arguments with a long timeout: what has to succeed may be slow."""
    return lambda rank: {"timeout": timedelta(seconds=60)} | arguments_of(rank)


def join_by(rank, world_size, method, place, changes=None, timeout=20):
    """Join as the lesson does, perhaps with other numbers; return the sum, or the error's text."""
    dist.destroy_process_group()
    quiet()
    rank, size = (changes or {}).get(rank, (rank, world_size))
    if method == "env":
        address, _, port = place.rpartition(":")
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    try:
        lesson.join(method, place, rank, size, timeout)
        total = add_up(rank)
        dist.barrier()
        return total
    except Exception as error:
        time.sleep(0.5 if rank == 0 else 0)
        return f"{type(error).__name__}: {error}"


def tcp(port, **more):
    return lambda rank: {"init_method": f"tcp://127.0.0.1:{port}"} | more


def cell_function(name):
    """Return a function that stands in a cell of the lesson's notebook."""
    notebook = json.loads((ROOT / "notebooks" / f"{SCRIPT.stem}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (source,) = [cell for cell in cells if f"def {name}(" in cell]
    source = re.search(rf"def {name}\(.*?(?=^\S|\Z)", source, re.DOTALL | re.MULTILINE).group()
    names = {"torch": torch, "dist": dist, "timedelta": timedelta}
    exec(source, names)
    return names[name]


def quick_main(monkeypatch, capsys, *flags):
    """Run main() in this process; return its exit code, stdout and stderr."""
    try:
        code = lesson.main([*map(str, flags)])
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    stdout, stderr = capsys.readouterr()
    return code, stdout, stderr


@pytest.fixture(scope="module", autouse=True)
def no_slow_names():
    """Wait for 1 second, not 5, when a TCPStore looks a name up and no name server answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        patch.setitem(ENVIRONMENT, "RES_OPTIONS", "timeout:1 attempts:1")
        yield


@pytest.fixture(autouse=True)
def no_rank_of_our_own(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# --- The script, as a reader runs it ---

RUNS = {"env": 2, "tcp": 3, "file": 2, "store": 1}


@pytest.fixture(scope="module")
def scripts(default_run, tmp_path_factory):
    """Run the script with each method, two at a time: {method: Finished}. By default it is env."""
    folder = tmp_path_factory.mktemp("a folder with a space")

    def execute(method):
        flags = ["--init", method, "--nproc", RUNS[method], "--json"]
        flags += ["--steps", 2, "--batch-size", 3, "--seed", 5] if method == "tcp" else []
        return run_lesson(4, *flags, cwd=folder)

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "TMPDIR", str(folder))
        patch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")
        others = [method for method in RUNS if method != "env"]
        finished = dict(zip(others, pool.map(execute, others), strict=True))
    assert list(folder.iterdir()) == []  # nothing is left behind
    return finished | {"env": default_run(4)}


@pytest.mark.claim("B6", "E7", "E9", "E11", "E12", "E14", "C9")
@pytest.mark.parametrize("method", RUNS)
def test_ranks_started_by_hand_meet_by_each_method(scripts, method):
    finished, nproc = scripts[method], RUNS[method]
    assert finished.returncode == 0, finished.stderr
    *_, verdict, last = finished.stdout.splitlines()
    facts = json.loads(last)
    total = nproc * (nproc + 1) // 2 + (nproc * 5 if method == "tcp" else 0)
    assert verdict.startswith("PASS ") and f"met by {method}" in verdict
    assert (facts["lesson"], facts["init"], facts["passed"]) == (4, method, True)
    assert facts["ranks_seen"] == list(range(nproc)) and facts["world_size"] == nproc
    assert facts["all_reduce"] == total
    assert 0 < facts["seconds_to_meet"] < 60


@pytest.mark.claim("B6", "B2", "E12")
def test_printed_lines_can_be_typed_into_terminals(scripts, tmp_path):
    """Each line, run by a shell of its own, is one rank; the rank is the number of the process."""
    lines = re.findall(r"^terminal \d+: (.*)$", scripts["env"].stdout, re.MULTILINE)
    lines = lines[-2:]  # the lesson prints them again when its port was taken meanwhile
    assert len(lines) == 2 and all("MASTER_PORT=" in line for line in lines)
    port = free_ports(1)[0]
    lines = [re.sub(r"MASTER_PORT=\d+", f"MASTER_PORT={port}", line) for line in lines]
    lines = [line.removesuffix(" --json") for line in lines]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    terminals = [
        subprocess.Popen(
            ["bash", "-c", line], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for line in lines
    ]
    try:
        said = [terminal.communicate(timeout=300)[0] for terminal in terminals]
    finally:
        for terminal in terminals:
            terminal.kill()
    assert said == [f"PASS rank {rank} met all 2 by env: the sum is 3\n" for rank in (0, 1)]
    assert [terminal.returncode for terminal in terminals] == [0, 0]


@pytest.mark.claim("E10")
def test_torchrun_sets_the_variables_as_well():
    """Its agent has the store, and listens at MASTER_PORT: rank 0 does not try to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--log-dir=/dev/null", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*command, lesson.__file__],
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert "failed to bind" not in finished.stderr
    lines = [f"PASS rank {rank} met all 2 by env: the sum is 3" for rank in (0, 1)]
    assert sorted(finished.stdout.splitlines()) == lines


def report_of_many_steps(rank, world_size, path):
    dist.destroy_process_group()
    quiet()
    flags = ["--init", f"file://{path}", "--rank", rank, "--nproc", world_size, "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        lesson.main([*map(str, flags), "--steps", "200"])
    return output.getvalue()


def test_a_report_does_not_grow_with_the_steps(tmp_path):
    """The one who started the ranks reads when they have ended: a pipe holds 64 KiB."""
    for report in run(report_of_many_steps, 2, tmp_path / "rendezvous"):
        assert json.loads(report)["sums"] == [3]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--init", "carrier-pigeon"], "--init"),
        (["--init", "carrier-pigeon://roof"], "--init"),
        (["--steps", "10001"], "--steps"),
        (["--batch-size", "10001"], "--batch-size"),
        (["--init", "tcp", "--rank", "0"], "--init"),
        (["--init", "env://127.0.0.1:29500", "--rank", "0", "--nproc", "1"], "--rank"),
        (["--init", "tcp://127.0.0.1", "--rank", "0"], "--init"),
        (["--init", "tcp://127.0.0.1:0"], "--init"),
        (["--init", "store://127.0.0.1:65536"], "--init"),
        (["--init", "env://:29500"], "--init"),
        (["--init", "file://relative/path"], "--init"),
        (["--init", "file:///no/such/folder/file"], "--init"),
        (["--init", "file:///tmp/file#1"], "--init"),
        (["--init", "file:///dev"], "'/dev' is a folder"),
        (["--init", "file:///dev/null", "--rank", "0"], "'/dev/null' is a device"),
        (["--init", "tcp://::1:29500"], "--init"),
        (["--init", "tcp://127.0.0.1:29500", "--rank", "2"], "--rank"),
        (["--init", "tcp://127.0.0.1:29500", "--rank", "-1"], "--rank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_value_costs_one_line(monkeypatch, capsys, flags, named):
    monkeypatch.setattr(lesson, "be_one_rank", None)  # calling it would be a TypeError
    monkeypatch.setattr(lesson.subprocess, "Popen", None)
    code, stdout, stderr = quick_main(monkeypatch, capsys, *flags)
    assert (code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert named in line


@pytest.mark.claim("E12")
def test_env_needs_numbers_and_an_address(monkeypatch, capsys):
    monkeypatch.setattr(lesson, "be_one_rank", lambda *_: 0)
    for name in lesson.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in good.items():
        monkeypatch.setenv(name, value)
    code, _, stderr = quick_main(monkeypatch, capsys)
    assert code == 0 and re.fullmatch("this is rank 0 of 2, .*; unset RANK to start .*\n", stderr)
    for name, bad in [*((name, "") for name in good), ("WORLD_SIZE", "two"), ("MASTER_PORT", "x")]:
        with monkeypatch.context() as patch:
            patch.setenv(name, bad)
            code, stdout, stderr = quick_main(monkeypatch, capsys)
        assert (code, stdout) == (2, ""), (name, bad)
        assert len(stderr.splitlines()) == 1, (name, stderr)
        assert bad or "makes this one rank of a job: set " in stderr
    monkeypatch.setenv("RANK", "2")  # there are 2: a rank that was started by hand says so
    assert quick_main(monkeypatch, capsys)[2].endswith("argument --rank: must be from 0 to 1\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # one terminal for all ranks: rank 0 speaks
    assert quick_main(monkeypatch, capsys)[::2] == (2, "")


@pytest.mark.claim("E11")
def test_an_old_file_is_refused_before_any_rank_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lesson.subprocess, "Popen", None)
    (tmp_path / "old").write_text("x")
    code, stdout, stderr = quick_main(monkeypatch, capsys, "--init", f"file://{tmp_path}/old")
    assert (code, stdout) == (2, "") and "left from an earlier run" in stderr


# --- The parent: processes of a test that only look like ranks ---

FAKE_RANK = """
import json, os, signal, sys, time
rank, mode = int(os.environ["RANK"]), {mode!r}
report = {{"rank": rank, "pid": os.getpid(), "backend": "gloo", "device": "cpu"}}
report |= {{"seconds": [0.1, 0.1], "sums": [3]}}
if mode == "wrong sum":
    report["sums"] = [4]
if mode == "same rank":
    report["rank"] = 0
if mode == "error" and rank == 1:
    report |= {{"error": "OSError: no luck", "time": time.time()}}
if mode == "error" and rank == 0:  # it loses rank 1, and is the first to end
    while not os.path.exists(__file__ + ".lost"):
        time.sleep(0.02)
    report |= {{"error": "RuntimeError: Connection closed", "time": time.time()}}
if mode == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if mode in ("killed", "hang") and rank == 0:
    time.sleep(1000)
print(json.dumps(report), flush=True)
if mode == "error" and rank == 1:
    open(__file__ + ".lost", "w").close()
    time.sleep(3)
sys.exit("error" in report)
"""


@pytest.fixture
def fake_ranks(monkeypatch, tmp_path):
    """Return a function: start_by_hand starts processes of this mode; it returns their list."""

    def use(mode):
        (tmp_path / "fake.py").write_text(FAKE_RANK.format(mode=mode))
        started, popen = [], subprocess.Popen

        def start(command, **options):
            if str(SCRIPT) not in command:  # of another thread: a tool of the notebooks
                return popen(command, **options)
            command = [str(tmp_path / "fake.py") if str(SCRIPT) == w else w for w in command]
            started.append(popen(command, **options))
            return started[-1]

        monkeypatch.setattr(lesson.subprocess, "Popen", start)
        return started

    return use


@pytest.mark.parametrize("mode", ["right", "wrong sum", "same rank"])
def test_main_passes_only_if_each_rank_was_seen_and_the_sum_is_right(
    fake_ranks, monkeypatch, capsys, mode
):
    fake_ranks(mode)
    code, stdout, stderr = quick_main(monkeypatch, capsys, "--json")
    verdict, facts = stdout.splitlines()[-2], json.loads(stdout.splitlines()[-1])
    assert (code, facts["passed"]) == ((0, True) if mode == "right" else (1, False)), stderr
    assert verdict.startswith("PASS " if mode == "right" else "FAIL ")


@pytest.mark.parametrize(
    ("mode", "last_line"),
    [
        ("error", "rank 1 failed: OSError: no luck"),
        ("killed", "rank 1 failed: exit code -9"),
        ("hang", "rank 0 failed: no answer in 2 s"),
    ],
)
def test_first_failure_ends_all_and_is_named(fake_ranks, monkeypatch, capsys, mode, last_line):
    started = fake_ranks(mode)
    monkeypatch.setattr(lesson, "TIMEOUT", 1 if mode == "hang" else 60)
    code, _, stderr = quick_main(monkeypatch, capsys)
    assert (code, stderr.splitlines()) == (1, [last_line])
    assert len(started) == 2 and None not in [process.poll() for process in started]


def test_the_file_of_ranks_that_were_ended_is_removed(fake_ranks, tmp_path):
    fake_ranks("right")
    (tmp_path / "meeting").write_text("")
    with pytest.raises(RuntimeError, match="rank 0 failed: exit code 1"):  # it finds no RANK
        lesson.start_by_hand("file", str(tmp_path / "meeting"), 1, [])
    assert not (tmp_path / "meeting").exists()


@pytest.mark.claim("C9")
def test_a_port_that_was_taken_in_the_meantime_is_replaced(monkeypatch, capsys):
    places = []

    def start_by_hand(method, place, world_size, flags):
        places.append(place)
        raise RuntimeError("rank 0 failed: EADDRINUSE" if len(places) < wanted else "no luck")

    monkeypatch.setattr(lesson, "start_by_hand", start_by_hand)
    wanted = 3
    assert quick_main(monkeypatch, capsys, "--init", "tcp")[::2] == (1, "no luck\n")
    assert len(set(places)) == 3
    places.clear()
    wanted = 9
    assert "EADDRINUSE" in quick_main(monkeypatch, capsys, "--init", "tcp")[2]
    assert len(places) == 3  # and then it gives up
    places.clear()
    quick_main(monkeypatch, capsys, "--init", "tcp://127.0.0.1:29500")
    assert places == ["127.0.0.1:29500"]  # yours is not replaced


@pytest.mark.claim("C9")
def test_a_fixed_port_that_is_taken_fails_with_a_cure(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        port = other_job.getsockname()[1]
        finished = run_lesson(4, "--init", f"tcp://127.0.0.1:{port}")
    assert finished.returncode == 1
    assert re.match("rank 0 failed: .*Address already in use.*", finished.stderr.splitlines()[-1])
    assert finished.stderr.strip().endswith("Take a free port for each job.")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_ended_leaves_no_rank(monkeypatch, tmp_path, number):
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    process = start_lesson(4, "--init", "file", "--steps", 10**4, "--batch-size", 10**4)
    family, end = [], time.monotonic() + 180
    try:
        while len(family) < 2 and time.monotonic() < end:
            time.sleep(0.05)
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid).children(recursive=True)
                family = [child for child in family if "--rank=" in " ".join(child.cmdline())]
        assert len(family) == 2
        process.send_signal(number)
        process.communicate(timeout=60)
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []
    finally:
        for one in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


# --- How ranks meet ---


@pytest.mark.claim("E10")
@pytest.mark.parametrize("method", ["env", "tcp", "file", "store"])
def test_who_connects_to_whom(method, tmp_path):
    place = f"{tmp_path}/a file" if method == "file" else f"127.0.0.1:{free_ports(1)[0]}"
    answers = run(look_at_connections, 4, method, place)
    port = place.rpartition(":")[2]
    ends = {pair: rank for rank, (_, _, linked) in enumerate(answers) for pair in linked}
    pairs = [(rank, ends[there, here], there) for (here, there), rank in ends.items()]
    listeners = [{at.port for at in listens} for _, listens, _ in answers]
    if method != "file":  # a file does not say on which machines the ranks are
        assert {at.ip for _, listens, _ in answers for at in listens} == {"127.0.0.1"}
    calls = [(caller, called, at) for caller, called, at in pairs if at in listeners[called]]
    to_store = sorted((caller, called) for caller, called, at in calls if str(at) == port)
    mesh = sorted(tuple(sorted(call[:2])) for call in calls if str(call[2]) != port)
    assert mesh == [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert to_store == ([] if method == "file" else [(rank, 0) for rank in range(4)])
    assert [total for total, _, _ in answers] == [10] * 4
    assert list(tmp_path.iterdir()) == []  # a clean run removes its file


def look_at_connections(rank, world_size, method, place):
    dist.destroy_process_group()
    quiet()
    if method == "env":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.split(":")
    lesson.join(method, place, rank, world_size, timeout=30)
    total = add_up(rank)
    found = psutil.Process().net_connections("tcp")
    dist.barrier()
    listens = {c.laddr for c in found if c.status == psutil.CONN_LISTEN}
    return total, listens, [(c.laddr.port, c.raddr.port) for c in found if c.raddr]


def meet_a_dead_rank(rank, world_size, port):
    """Join as rank 0, when the store holds an address of rank 1, at which nobody is any more."""
    dist.destroy_process_group()
    quiet()
    store, who = dist.HashStore(), {"rank": 0, "world_size": 2}

    def leave_address():
        while not (keys := [key for key in store.list_keys() if key.endswith("/0")]):
            time.sleep(0.01)
        own = store.get(keys[0])  # the length of the host's name, the name, 8 bytes, the address
        port_at = 8 + int.from_bytes(own[:8], sys.byteorder) + 8 + 2
        store.set(keys[0][:-1] + "1", own[:port_at] + port + own[port_at + 2 :])

    threading.Thread(target=leave_address, daemon=True).start()
    start = time.monotonic()
    try:
        dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=1), **who)
    except RuntimeError as error:
        return str(error), time.monotonic() - start


@pytest.mark.claim("E9", "E10")
def test_the_rank_that_is_called_waits_for_five_times_its_timeout():
    """Whose address and port are greater (by gloo's comparison), calls; the other one waits."""
    ((said, _),) = run(meet_a_dead_rank, 1, b"\x01\x00")
    assert "Connection refused" in said
    ((said, seconds),) = run(meet_a_dead_rank, 1, b"\xff\xff")
    assert "Connect timeout" in said and seconds >= 5


@pytest.mark.claim("E10")
def test_every_rank_leaves_its_address_in_the_store():
    first, second = run(keys_after_joining, 2, free_ports(1)[0])
    assert first == second
    assert len(first) == 2 and [key.split("/")[-1] for key in sorted(first)] == ["0", "1"]


def keys_after_joining(rank, world_size, port):
    dist.destroy_process_group()
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    keys = store.list_keys()
    dist.barrier()
    return [key for key in keys if "cpu" in key]


@pytest.mark.claim("E4", "E2")
def test_backend_is_nccl_only_if_each_rank_has_a_gpu(monkeypatch, capsys):
    args = argparse.Namespace(steps=1, batch_size=1, seed=0, json=True, init="tcp")
    joined = []

    def join(*arguments):
        joined.append(arguments[-1])
        raise RuntimeError("enough")

    monkeypatch.setattr(lesson, "join", join)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for nccl in (True, False):
        monkeypatch.setattr(dist, "is_nccl_available", lambda nccl=nccl: nccl)
        for gpus in (0, 1, 2, 8):
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            assert lesson.be_one_rank(args, "tcp", "127.0.0.1:1", 1, 2) == 1
    assert joined == ["gloo", "gloo", "nccl", "nccl"] + ["gloo"] * 4
    assert "RuntimeError: enough" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.claim("E1", "E2", "E4")
def test_on_gpus_the_script_uses_nccl():
    gpus = torch.cuda.device_count()
    finished = run_lesson(4, "--nproc", gpus, "--json")
    assert finished.returncode == 0, finished.stderr
    assert (finished.json["backend"], finished.json["device"]) == ("nccl", "cuda")
    if gpus > 1:
        for answers in run(cell_function("try_collectives"), 2, "nccl", "cuda"):
            assert set(answers.values()) == {"yes"}
    for answers in run(cell_function("try_collectives"), 2, "gloo", "cuda"):
        assert answers["broadcast"] == answers["all_reduce"] == "yes"


# --- Stores ---


@pytest.mark.claim("E14")
def test_stores_do_the_same_operations(tmp_path):
    stores = {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    stores["prefix"] = dist.PrefixStore("p", dist.HashStore())
    for name, store in stores.items():
        store.set("a", "1")
        assert store.get("a") == b"1", name
        assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5"), name
        assert store.compare_set("c", "", "x") == b"x" and store.get("c") == b"x", name
        assert store.compare_set("c", "y", "z") == b"x" and store.get("c") == b"x", name
        assert store.compare_set("c", "x", "z") == b"z" and store.get("c") == b"z", name
        assert store.check(["a", "c"]) and not store.check(["a", "never"]), name
        assert store.delete_key("a") is True and not store.check(["a"]), name
        assert store.delete_key("never") is (name == "file"), name
        other = store.clone() if name == "tcp" else store  # a TCPStore does one thing at a time
        late = threading.Timer(0.1, other.set, ("late", "1"))
        late.start()
        store.wait(["late"], timedelta(seconds=20))
        assert store.get("late") == b"1", name
        late.join()


@pytest.mark.claim("E14")
def test_prefixes_keep_two_users_of_a_store_apart():
    store = dist.HashStore()
    one, other = dist.PrefixStore("one", store), dist.PrefixStore("other", store)
    one.set("key", "1")
    assert one.check(["key"]) and not other.check(["key"]) and not store.check(["key"])


@pytest.mark.claim("E14")
def test_barrier_of_the_notebook_lets_nobody_pass_early_and_can_be_used_again():
    barrier, world_size = cell_function("barrier"), 4
    store, came, seen = dist.HashStore(), [], []

    def cross(rank):
        for number in (1, 2, 3):
            time.sleep(0.1 if rank == number else 0)
            came.append(number)
            barrier(store, world_size, number)
            seen.append(came.count(number))

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(cross, range(world_size)))
    assert seen == [world_size] * 3 * world_size


# --- Failures, each for real, and each with its cure: {name: (what to call, its cure)} ---


def both(rank):
    return {"init_method": "tcp://127.0.0.1:1", "store": dist.HashStore()}


def interfaces(names, port):
    def arguments_of(rank):
        os.environ["GLOO_SOCKET_IFNAME"] = names
        return {"init_method": f"tcp://127.0.0.1:{port}"}

    return arguments_of


@pytest.fixture(scope="module", autouse=True)
def failing(tmp_path_factory, no_slow_names):
    """Start all failures of the raw library, in the background: they wait, and need no processor.

    Return {name: future}. The other tests of this file run meanwhile.
    """
    free = free_ports(12)
    other_job = socket.create_server(("127.0.0.1", 0))
    no_folder = f"file://{tmp_path_factory.mktemp('x')}/no/file"
    jobs = {
        # name: (ranks, arguments by rank, seconds that rank 0 stays)
        "port taken": (1, tcp(other_job.getsockname()[1]), 0),
        "never comes": (1, tcp(free[0], world_size=2), 0),
        "same rank": (3, lambda r: tcp(free[1], rank=min(r, 1))(r), 2),
        # Rank 0 may wait five times its timeout. It stays for longer than rank 1's 3 seconds.
        "sizes differ": (
            2,
            lambda r: tcp(free[2], world_size=2 + r, timeout=timedelta(seconds=3 if r else 1))(r),
            4,
        ),
        "rank 0 is missing": (1, tcp(free[3], rank=1, world_size=2), 0),
        "both": (1, both, 0),
        "no rank": (1, tcp(free[4], rank=-1), 0),
        "unknown scheme": (1, lambda r: {"init_method": "carrier-pigeon://roof"}, 0),
        "no variables": (1, lambda r: {"init_method": "env://"}, 0),
        "nothing": (1, lambda r: {}, 0),
        "no interface": (1, interfaces("nosuch0", free[5]), 0),
        "one of two interfaces": (1, interfaces(f"{LOOPBACK},nosuch0", free[6]), 0),
        "two interfaces": (2, patient(interfaces(f"{LOOPBACK},{LOOPBACK}", free[7])), 0),
        "multicast": (1, lambda r: {"init_method": f"tcp://239.255.0.1:{free[8]}"}, 0),
        "all is well": (2, patient(tcp(free[9])), 0),
        "group names differ": (2, patient(lambda r: tcp(free[10], group_name=f"group {r}")(r)), 0),
        "IPv6 or name": (2, patient(lambda r: {"init_method": f"tcp://localhost:{free[11]}"}), 0),
    }
    hangs = {"no folder": (1, lambda r: {"init_method": no_folder}, 0)}

    def answers(job):
        nproc, arguments_of, hold = job
        return run(join_raw, nproc, arguments_of, hold, deadline=60)

    def hangs_for_6_seconds(job):
        try:
            return run(join_raw, *job, deadline=6)
        except RankFailed as error:
            return [str(error)]

    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        slow = {name: pool.submit(hangs_for_6_seconds, job) for name, job in hangs.items()}
        yield {name: pool.submit(answers, job) for name, job in jobs.items()} | slow
    other_job.close()


@pytest.fixture(scope="module")
def failures(failing):
    """Return {name: the answers by rank} of all failures."""
    return {name: future.result() for name, future in failing.items()}


FAILURES = {  # name: (sign in the text of the last rank's error, a word of its explanation)
    "port taken": ("EADDRINUSE", "free port"),
    "never comes": ("1/2 clients joined", "did not come"),
    "same rank": ("wait timeout", "Start each rank once"),
    "sizes differ": ("wait timeout", "all with one world size"),
    "rank 0 is missing": ("trying to connect", "Start rank 0"),
    "both": ("both init_method and store", "Pass only one"),
    "no rank": ("rank parameter missing", "Pass rank="),
    "unknown scheme": ("No rendezvous handler for carrier-pigeon://", "Use env://"),
    "no variables": ("MASTER_ADDR expected, but not set", "torchrun"),
    "nothing": ("MASTER_ADDR expected, but not set", "torchrun"),
    "no interface": ("Unable to find address for: nosuch0", "GLOO_SOCKET_IFNAME"),
    "one of two interfaces": ("Unable to find address for: nosuch0", "GLOO_SOCKET_IFNAME"),
    "multicast": ("connect", "Start rank 0; check host and port"),
}


@pytest.mark.claim("E5", "E7", "E9", "E12", "B4", "B2", "C9")
@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_recognised_and_explained(failures, name):
    sign, advice = FAILURES[name]
    answer = failures[name][-1]
    assert sign in str(answer)
    assert advice in lesson.explain(answer)
    assert 2 <= lesson.explain(answer).count(". ") + 1 <= 3


@pytest.mark.claim("E5", "E7", "E9")
@pytest.mark.parametrize("name", ["all is well", "two interfaces", "IPv6 or name"])
def test_right_numbers_meet(failures, name):
    assert failures[name] == [3, 3]


@pytest.mark.claim("E7", "E9")
def test_group_name_is_ignored(failures):
    assert failures["group names differ"] == [3, 3]
    assert "This argument is ignored" in dist.init_process_group.__doc__


@pytest.mark.claim("E11")
def test_without_the_folder_the_library_waits_longer_than_its_timeout(failures):
    """The timeout was 3 seconds. The lesson refuses such a file before a rank starts."""
    (answer,) = failures["no folder"]
    assert answer.startswith("no answer after 6 s: rank 0 ")


def test_unknown_errors_are_not_explained():
    assert lesson.explain("ValueError: something else") == ""


@pytest.mark.parametrize("sign", ["already checked in", "connectFullMesh failed", "has world size"])
def test_only_at_a_file_the_cure_is_to_remove_a_file(sign, capsys):
    for place, cure in [("file:///x", "remove the file"), ("tcp://h:1", "end all and start again")]:
        args = argparse.Namespace(init=place, json=False)
        assert lesson.fail(args, {"rank": 0}, RuntimeError(sign)) == 1
        assert capsys.readouterr().out.endswith(f"{cure}.\n")


RESTARTED = """
import os, sys, time
import lesson_04_init_methods as lesson
code = lesson.main([])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000 * (os.environ["RANK"] == "0"))
    code = 3
sys.exit(code)
"""


@pytest.mark.parametrize(("own_store", "second"), [("0", "FAIL"), ("1", "PASS")])
def test_after_a_restart_by_torchrun_the_cure_is_a_new_store(tmp_path, own_store, second):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--local-addr=127.0.0.1", "--log-dir=/dev/null", "--nproc-per-node=2"]
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    finished = subprocess.run(
        [*command, tmp_path / "restarted.py"],
        env=ENVIRONMENT | more | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store},
        capture_output=True,
        text=True,
        timeout=300,
    )
    *first, one, other = sorted(finished.stdout.splitlines(), key=lambda line: line[:4] == second)
    assert len(first) == 2 and {line[:4] for line in [one, other]} == {second}, finished.stdout
    if second == "FAIL":
        assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in one and "file" not in one


@pytest.mark.claim("E7")
def test_defaults():
    assert dist.is_available() is True
    names = [*inspect.signature(dist.init_process_group).parameters]
    documented = "backend, init_method, timeout, world_size, rank, store, group_name"
    assert ", ".join(names[:7]) == documented
    assert dist.constants.default_pg_timeout == timedelta(minutes=30)
    assert "10 minutes for NCCL and 30 minutes for other" in dist.init_process_group.__doc__
    if dist.is_nccl_available():
        assert dist.constants.default_pg_nccl_timeout == timedelta(minutes=10)
    assert dist.HashStore().timeout == timedelta(minutes=5)


# --- The check-in ---


def try_check_in(store, rank, world_size, timeout=1):
    try:
        return lesson.check_in(store, rank, world_size, timeout)
    except RuntimeError as error:
        return str(error)


@pytest.mark.claim("E9", "E14")
def test_check_in_names_what_is_wrong(tmp_path):
    def store_of(name):
        return dist.FileStore(str(tmp_path / name), 2)

    with ThreadPoolExecutor(2) as pool:
        pair = [pool.submit(try_check_in, store_of("pair"), rank, 2, 20) for rank in (0, 1)]
        assert [future.result() for future in pair] == [None, None]
    store = store_of("other")
    assert try_check_in(store, 0, 3) == "not here after 1 s: rank 1, 2"
    assert try_check_in(store, 0, 3) == "rank 0 has already checked in at this place"
    assert try_check_in(store, 1, 4) == "rank 1 has world size 4, the others have 3"
    for text in ("not here after 1 s: rank 1", "rank 0 has already checked in", "has world size 4"):
        assert lesson.explain(text)


@pytest.mark.claim("E9", "E14", "B2")
@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("tcp", {2: (1, 3)}, "rank 1 has already checked in at this place"),
        ("store", {2: (2, 4)}, "has world size"),
        ("file", {2: (1, 3)}, "rank 1 has already checked in at this place"),
    ],
)
def test_join_names_a_wrong_rank_in_real_processes(tmp_path, method, changes, said):
    place = f"{tmp_path}/file" if method == "file" else f"127.0.0.1:{free_ports(1)[0]}"
    answers = run(join_by, 3, method, place, changes, 10, deadline=60)
    assert [str(answer) for answer in answers if said in str(answer)]
    assert 6 not in answers  # nobody goes on without the others


@pytest.mark.claim("E9")
def test_join_names_a_rank_that_never_comes():
    (answer,) = run(join_by, 1, "tcp", f"127.0.0.1:{free_ports(1)[0]}", {0: (0, 3)}, 2, deadline=40)
    assert "not here after 2 s: rank 1, 2" in answer


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_join_takes_an_address_of_ipv6():
    assert run(join_by, 2, "tcp", f"[::1]:{free_ports(1)[0]}") == [3, 3]


def test_without_rank_0_the_lesson_s_own_limit_holds():
    """A TCPStore would try once more, and say "The client socket has timed out"."""
    (answer,) = run(join_by, 1, "tcp", f"127.0.0.1:{free_ports(1)[0]}", {0: (1, 2)}, 1, deadline=60)
    assert answer.startswith("TimeoutError: failed to connect to 127.0.0.1")
    assert lesson.explain(answer).startswith("Nobody listens there.")


def test_a_place_that_accepts_and_says_nothing_costs_one_line():
    """A TCPStore waits for its answer without any limit."""
    limited = "import lesson_04_init_methods as lesson; lesson.TIMEOUT = 2; lesson.main()"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        finished = subprocess.run(
            [sys.executable, "-c", limited, "--init", place, "--rank", "1"],
            env=ENVIRONMENT | {"PYTHONPATH": str(SCRIPT.parent)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert (finished.returncode, finished.stderr) == (1, "")
    cure = "Another rank has left, or does not answer. Look at its error."
    assert finished.stdout == f"FAIL rank 1: TimeoutError: Timed out waiting for 3 s. {cure}\n"


def test_a_mark_that_a_dead_rank_left_ends_the_wait_of_all():
    """Rank 0 is alone with it at first, and takes it for a rank that has come."""
    store = dist.HashStore()
    store.set("world size", "2")
    store.add("rank 1", 1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(try_check_in, store, 0, 2, 60)
        store.wait(["rank 0 saw all"], timedelta(seconds=30))
        answers = [try_check_in(store, 1, 2, 60), first.result(timeout=30)]
    assert answers == ["rank 1 has already checked in at this place"] * 2


def join_and_die(rank, world_size, path):
    dist.destroy_process_group()
    lesson.join("file", path, rank, world_size, timeout=10)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.claim("E11")
def test_a_clean_run_removes_its_file_and_a_killed_one_does_not(tmp_path):
    path = tmp_path / "a file"
    assert run(join_by, 2, "file", str(path)) == [3, 3] and not path.exists()
    assert run(join_by, 2, "file", str(path)) == [3, 3] and not path.exists()  # twice in a row
    with pytest.raises(RankFailed, match="SIGKILL"):
        run(join_and_die, 2, str(path))
    assert path.exists()
    for rank, answer in enumerate(run(join_by, 2, "file", str(path), deadline=60)):
        assert f"rank {rank} has already checked in at this place" in answer
        assert "remove the file" in lesson.explain(answer, "file")
    path.unlink()
    assert run(join_by, 2, "file", str(path)) == [3, 3]


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
    assert run(set_and_get, 1, file.name) == [b"1"]


# --- Backends ---


@pytest.mark.claim("E1")
def test_gloo_does_all_collectives_on_the_cpu():
    collectives = "send, recv|broadcast|all_reduce|reduce|all_gather|gather|scatter|reduce_scatter"
    expected = [*collectives.split("|"), "all_to_all", "barrier"]
    for answers in run(cell_function("try_collectives"), 2, "gloo", "cpu"):
        assert answers == dict.fromkeys(expected, "yes")


def sabotage(rank, world_size, try_collectives):
    """Measure with a broadcast that does nothing, and a gather that raises."""

    def gather(*_):
        raise RuntimeError("gather is not supported\nmore")

    dist.broadcast, dist.gather = lambda *_: None, gather
    return try_collectives(rank, world_size, "gloo", "cpu")


@pytest.mark.claim("E1")
def test_the_table_would_show_what_does_not_work():
    first, second = run(sabotage, 2, cell_function("try_collectives"))
    assert first["gather"] == second["gather"] == "gather is not supported"
    assert second["broadcast"] == "wrong: [2.0, 0.0, 0.0]"
    assert first["all_reduce"] == second["all_reduce"] == "yes"


def init_backend(rank, world_size, backend):
    dist.destroy_process_group()
    quiet()
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        return str(error)


@pytest.mark.claim("E2")
def test_which_backends_come_with_the_wheels():
    assert dist.is_gloo_available()
    if dist.is_mpi_available():
        pytest.skip("this PyTorch was built with MPI")
    (said,) = run(init_backend, 1, "mpi")
    assert "only included if you build PyTorch from source" in said
    if torch.version.cuda is None:
        assert not dist.is_nccl_available()
        assert "doesn't have NCCL built in" in run(init_backend, 1, "nccl")[0]


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
    return add_up(rank), libuv


@pytest.mark.claim("E3")
def test_tcp_is_not_excluded_on_windows_any_more(monkeypatch):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert run(join_as_on_windows, 2, free_ports(1)[0]) == [(3, [False])] * 2
