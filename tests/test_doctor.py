"""The doctor: what it finds in order, what it does not, and what it says to do."""

import ast
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, finish, free_port, start_program, watch_ports

sys.path.append(str(ROOT / "scripts"))
doctor, ranks = map(importlib.import_module, ("doctor", "doctor_ranks"))
net, memory = map(importlib.import_module, ("network", "memory"))
STATES = ("ok       ", "limited  ", "not ok   ", "unknown  ")


def start(tmp_path, *flags, **environment):
    (tmp_path / "tmp").mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path / "tmp"), **environment}
    return start_program("bash", ROOT / "scripts" / "doctor.sh", *flags, env=environment)


def test_ranks_meet_by_each_method_and_each_pair_is_timed(tmp_path):
    process, open_ports = start(tmp_path, "--nproc=3", "--json"), set()
    threading.Thread(target=watch_ports, args=(process, open_ports)).start()
    run = finish(process)
    checks = {each["check"]: each for each in run.json["checks"]}
    assert (run.returncode, run.json["ok"], run.stderr) == (0, True, "")
    assert [checks[f"meeting by {name}"]["state"] for name in doctor.METHODS.values()] == ["ok"] * 4
    pairs = [each for each in checks.values() if "latency_ms" in each]
    assert [p["ranks"] for p in pairs if p["gb_per_s"] > 0] == [[0, 1], [0, 2], [1, 2]]
    assert {"Python", "versions", "torch", "backends", "GPUs", "cores", "interfaces"} <= set(checks)
    assert open_ports == set() and list((tmp_path / "tmp").iterdir()) == []


def test_it_runs_where_torch_is_broken_and_says_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is not here')")
    run = finish(start(tmp_path, PYTHONPATH=str(tmp_path)))
    lines = run.stdout.splitlines()
    assert (run.returncode, run.stderr) == (1, "")
    assert all(line.startswith(STATES) for line in lines), lines
    assert any(re.match("not ok .*libcudart.so is not here -> .*pip install", x) for x in lines)
    assert any(line.startswith("unknown  ranks: not tried, because of torch") for line in lines)
    assert lines[-1] == "not ok   1 to mend: torch"


def test_an_old_python_can_read_it_and_needs_no_package():
    tree = ast.parse((ROOT / "scripts" / "doctor.py").read_text(), feature_version=(3, 8))
    at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in at_the_top for alias in node.names]
    assert not {"torch", "network", "memory", "doctor_ranks"} & set(names)
    assert all(name in sys.stdlib_module_names or name == "Path" for name in names)


def test_a_python_that_does_not_start_costs_one_line(tmp_path):
    run = finish(start(tmp_path, LOCKSTEP_PYTHON="/nowhere/python"))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert re.match("not ok   Python: LOCKSTEP_PYTHON=/nowhere/python .*unset it", run.stderr)


PINS = dict(re.findall(r"(?m)^(\S+)==(\S+)", (ROOT / "requirements.txt").read_text()))
DOCKER = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)  # its 64 MB
ETH7 = "GLOO_SOCKET_IFNAME=eth7"
TROUBLES = [  # what is patched, with what; who looks at it; what is said
    (sys, "version_info", (3, 10, 2), "python", "not ok", "install Python 3.11"),
    (metadata, "version", {**PINS, "torch": "2"}.get, "versions", "not ok", "torch 2, .*setup.sh"),
    (metadata, "version", {**PINS, "tensorflow": "1"}.get, "versions", "limited", "07 and 08"),
    (os, "getloadavg", lambda: (99.0, 0, 0), "cores", "limited", "load 99.0 -> .*too long"),
    (memory, "free_memory", lambda: 1e9, "memory", "not ok", "1.0 GB free, 4 .*smaller --nproc"),
    (os, "statvfs", lambda path: DOCKER, "shared_memory", "limited", "0.067 GB.*--shm-size=1g"),
    (net, "addresses_of", lambda n: ["127.0.1.1"], "host_name", "limited", f"ada is 127.*{ETH7}"),
    (net, "addresses_of", lambda name: [], "host_name", "limited", f"ada is no address.*{ETH7}"),
    (os, "environ", {"GLOO_SOCKET_IFNAME": "w9"}, "interfaces", "not ok", "IFNAME=w9.*unset it"),
    (doctor.Path, "glob", lambda *path: [1], "gpus", "limited", "CPU build -> install the CUDA"),
]
ARGUMENTS = {"memory": [4], "gpus": [[], None], "shared_memory": [ROOT]}


@pytest.mark.parametrize("owner, name, value, check, state, words", TROUBLES)
def test_each_trouble_is_named_with_its_cure(monkeypatch, owner, name, value, check, state, words):
    for variable in ("GLOO_SOCKET_IFNAME", "LOCKSTEP_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "ada")
    monkeypatch.setattr(net, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.0.0.7"})
    monkeypatch.setattr(owner, name, value)
    found = getattr(doctor, f"look_at_{check}")(*ARGUMENTS.get(check, []))
    assert found["state"] == state
    assert re.search(words, f"{found['text']} -> {found['remedy']}"), found


def test_a_rank_that_does_not_come_is_named_in_one_line():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    place["GLOO_SOCKET_IFNAME"] = net.interface_of("127.0.0.1")
    command = [sys.executable, ROOT / "scripts" / "doctor.py", "--timeout=20"]
    here = [start_program(*command, env={**ENVIRONMENT, **place, "RANK": rank}) for rank in "02"]
    runs = [finish(process) for process in here]
    assert [(run.returncode, run.stderr) for run in runs] == [(1, "")] * 2
    said = runs[0].stdout + runs[1].stdout
    assert re.fullmatch(r"not ok   ranks: rank 1 of 3 not here after 20 s; here: 0 2 .*\n", said)


def facts(*addresses):
    return [
        {"machine": f"m{n}", "address": [address, 1], "interfaces": [f"eth{n}"], "word": "w"}
        for n, address in enumerate(addresses)
    ]


def test_a_pair_that_does_not_connect_is_named_with_direction_and_cure():
    everyone = facts("10.0.0.1", "127.0.1.1", "10.0.0.3")
    rows = ranks.unreached(everyone, [{"1": "refused"}, {}, {"0": "no answer", "1": "refused"}])
    assert [row["ranks"] for row in rows] == [[0, 1], [0, 2], [1, 2]]
    assert rows[0]["remedy"] == "on m1: export GLOO_SOCKET_IFNAME=eth1"
    assert "rank 2 does not reach rank 0 at 10.0.0.1: no answer" in rows[1]["text"]
    assert "let m2 reach m0" in rows[1]["remedy"]


def test_another_rank_at_the_same_address_is_not_taken_for_the_right_one():
    with net.listen_at("127.0.0.1") as listener:
        threading.Thread(target=ranks.answer, args=(listener, "w"), daemon=True).start()
        peer = {"address": listener.getsockname(), "word": "w"}
        assert ranks.try_to_reach(peer, 20) is None
        assert ranks.try_to_reach(peer | {"word": "another"}, 20) == "somebody else answered"


def test_slow_and_broken_pairs_are_bad_and_others_are_not():
    everyone = facts("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    timed = {(0, 1): (0.1, 1.0), (0, 2): (0.1, 1.1), (0, 3): (0.1, 0.1), (1, 2): (9.0, 1.0)}
    timed |= {(1, 3): "timed out", (2, 3): None}
    states = [row["state"] for row in ranks.judge_pairs(timed, everyone)]
    assert states == ["ok", "ok", "not ok", "not ok", "not ok", "unknown"]


@pytest.mark.parametrize("flag", ["--nproc=0", "--nproc=x", "--timeout=0", "--nprocs=2"])
def test_a_bad_flag_costs_one_line(tmp_path, flag):
    run = finish(start(tmp_path, flag))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    process, end, family = start(tmp_path, "--nproc=2"), time.monotonic() + 200, []
    while len(family) < 2 or not any((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < end and process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    run = finish(process)
    assert (run.returncode, run.stderr) == (130, "interrupted: all that was started has ended\n")
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list((tmp_path / "tmp").iterdir()) == []
