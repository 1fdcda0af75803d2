"""The doctor: what it finds in order, what it does not, and what it says to do."""

import ast
import os
import re
import resource
import socket
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, finish, start_program, watch_ports
from lockstep import lessons, needs, network, run
from lockstep import machine as one_of_several
from lockstep.doctor import command, machine, machines, pairs, ranks
from lockstep.doctor.report import Report, Row
from lockstep.two_machines.namespaces import PORT, TwoMachines
from test_cluster import ROOT_ONLY

STATES = ("ok       ", "limited  ", "not ok   ", "unknown  ")


def start(tmp_path, *flags, **environment):
    (tmp_path / "tmp").mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path / "tmp"), **environment}
    return start_program("bash", ROOT / "scripts" / "doctor.sh", *flags, env=environment)


# --- On one machine ---


def test_ranks_meet_and_each_pair_is_timed(tmp_path):
    process, open_ports = start(tmp_path, "--nproc=3", "--json", "--timeout=300"), set()
    threading.Thread(target=watch_ports, args=(process, open_ports)).start()
    run = finish(process)
    checks = {each["check"]: each for each in run.json["checks"]}
    assert (run.returncode, run.json["ok"], run.stderr) == (0, True, "")
    pairs = [each for each in checks.values() if "latency_ms" in each]
    assert [p["ranks"] for p in pairs if p["gb_per_s"] > 0] == [[0, 1], [0, 2], [1, 2]]
    assert {"Python", "versions", "torch", "backends", "GPUs", "cores", "interfaces"} <= set(checks)
    assert set(checks["Python"]) == {"check", "state", "text", "remedy"}
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


def imported_at_the_top(path):
    """Return the modules that a file imports when it is imported, as their full names."""
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    either = [each for each in ast.walk(tree) if isinstance(each, ast.arg | ast.AnnAssign)]
    either = [each for each in either if isinstance(each.annotation, ast.BinOp)]
    assert not either or "__future__.annotations" in names, f"{path}: str | None needs Python 3.10"
    return names


def test_an_old_python_can_read_it_and_needs_no_package():
    """Also what it imports of lockstep, and what that imports, and so on."""
    seen, to_read = set(), ["lockstep.__main__", "lockstep.doctor.command"]
    while to_read:
        name = to_read.pop()
        path = ROOT / "scripts" / f"{name.replace('.', '/')}.py"
        if not path.exists():  # a name in a module
            name = name.rpartition(".")[0]
            path = ROOT / "scripts" / f"{name.replace('.', '/')}.py"
        if name in seen:
            continue
        seen.add(name)
        found = imported_at_the_top(path)
        to_read += [each for each in found if each.startswith("lockstep.")]
        others = {each.partition(".")[0] for each in found} - {"lockstep"}
        assert others <= sys.stdlib_module_names, f"{path} imports {others}"
    few = {"doctor.machine", "doctor.report", "ending", "flags", "needs", "network", "run"}
    assert {f"lockstep.{each}" for each in few} < seen


def test_a_python_that_does_not_start_costs_one_line(tmp_path):
    run = finish(start(tmp_path, LOCKSTEP_PYTHON="/nowhere/python"))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert re.match("not ok   Python: LOCKSTEP_PYTHON=/nowhere/python .*unset it", run.stderr)


PINS = {name: pin.partition("==")[2] for name, pin in lessons.pins().items()}
DOCKER = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)  # its 64 MB
DEBIAN = ["127.0.1.1"]  # the address of its own name, there
ETH7 = "GLOO_SOCKET_IFNAME=eth7"


def installed(**versions):
    """Return a function as metadata.version: all is as pinned, but for these; None: not there."""

    def version(name):
        found = {**PINS, **versions}[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    return version


ONLY_03 = installed(**{name: None for name in PINS if name not in lessons.find("03").packages})
NO_TORCH = {"torch": None, "tensorflow": None}
TROUBLES = [  # what is patched, with what; who looks at it; what is said
    (sys, "version_info", (3, 10, 2), "python", "not ok", "3.10.2.*install Python 3.11"),
    (metadata, "version", installed(torch="2"), "versions", "not ok", "torch 2, .*setup.sh 02$"),
    (metadata, "version", installed(tqdm="2"), "versions", "not ok", "tqdm 2, .*setup.sh$"),
    (metadata, "version", installed(**NO_TORCH), "versions", "not ok", "^there is no torch ->"),
    (metadata, "version", ONLY_03, "versions", "ok", "4 packages.*: tqdm, cloudp.*launcher says"),
    (machine, "count_cores", lambda: 1, "cores", "limited", "for 2 ranks -> .*--cpus-per-task"),
    (needs, "free_memory", lambda: 1e9, "memory", "not ok", "1.0 GB free, 4 .*smaller --nproc"),
    (resource, "getrlimit", lambda _: (256, 9999), "open_files", "limited", "256.* 71 .*-n 4096$"),
    (resource, "getrlimit", lambda _: (256, 999), "open_files", "limited", "limits.conf"),
    (resource, "getrlimit", lambda _: (1024, 4096), "open_files", "ok", "at most 1024"),
    (resource, "getrlimit", lambda _: (-1, -1), "open_files", "ok", "no limit"),
    (os, "statvfs", lambda path: DOCKER, "shared_memory", "limited", "0.067 GB.*--shm-size=1g"),
    (network, "addresses_of", lambda n: DEBIAN, "host_name", "limited", f"ada is 127.*{ETH7}$"),
    (network, "addresses_of", lambda n: [], "host_name", "limited", f"ada is no address.*{ETH7}$"),
    (os, "environ", {"GLOO_SOCKET_IFNAME": "w9"}, "interfaces", "not ok", "IFNAME=w9.*unset it"),
    (machine.Path, "glob", lambda *path: [1], "gpus", "limited", "CPU build -> install the CUDA"),
]
ARGUMENTS = {"cores": [2], "memory": [4], "gpus": [[], None], "shared_memory": [ROOT]}
ARGUMENTS["open_files"] = [4]


@pytest.mark.parametrize("owner, name, value, check, state, words", TROUBLES)
def test_each_trouble_is_named_with_its_cure(monkeypatch, owner, name, value, check, state, words):
    for variable in ("GLOO_SOCKET_IFNAME", "LOCKSTEP_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "ada")
    monkeypatch.setattr(machine, "count_cores", lambda: 3)
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.0.0.7"})
    monkeypatch.setattr(owner, name, value)
    found = getattr(machine, f"look_at_{check}")(*ARGUMENTS.get(check, []))
    assert found.state == state
    assert re.search(words, f"{found.text} -> {found.remedy}"), found


def test_where_there_is_no_dev_shm_nothing_is_said_of_it(tmp_path):
    assert machine.look_at(machine.look_at_shared_memory, tmp_path / "shm") == []


@pytest.mark.parametrize(
    "states, code, line",
    [
        (["ok"], 0, "ok       all that is needed is here"),
        (["limited", "ok", "unknown"], 0, "limited  the course runs; .*: c0 [(]not known: c2[)]"),
        (["limited", "not ok", "not ok"], 1, "not ok   2 to mend: c1; c2"),
    ],
)
def test_the_last_line_says_what_is_to_do(capsys, states, code, line):
    here = Report(as_json=False)
    here.tell(Row(f"c{number}", state, "text") for number, state in enumerate(states))
    assert here.end() == code
    assert re.fullmatch(line, capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("flag", ["--nproc=x", "--nproc=0", "--timeout=0", "--nprocs=2"])
@pytest.mark.parametrize("check", [command.main, command.check])
def test_bad_flags_cost_one_line(capsys, check, flag):
    with pytest.raises(SystemExit, match="2"):
        check([flag])
    assert re.fullmatch(r"doctor.sh: error: .*--(nproc|timeout).*\n", capsys.readouterr().err)


# --- On several machines ---


def facts(*addresses, **more):
    """Return the facts of ranks on machines m0, m1, ... at these addresses."""
    same = {"Python": "3.11", "torch": "2 for CPUs", "GPUs": "too few", "has": "cores: 8"}
    same |= {"troubles": [], "word": "w"}
    return [
        {**same, "machine": f"m{n}", "address": [address, 1], "interfaces": [f"eth{n}"]}
        | {name: values[n] for name, values in more.items()}
        for n, address in enumerate(addresses)
    ]


@pytest.mark.parametrize(
    "fact, values, words",
    [
        ("Python", ["3.11", "3.12"], "3.11 on m0; 3.12 on m1 -> .*same Python"),
        ("torch", ["2 for CUDA 13.0", "2 for CPUs"], "CUDA 13.0 on m0; 2 for CPUs on m1"),
        ("GPUs", ["one for each rank", "too few"], "too few on m1 -> .*nvidia-smi"),
    ],
)
def test_machines_that_differ_are_not_ok(fact, values, words):
    *about_machines, last = machines.compare(facts("10.0.0.1", "10.0.0.2", **{fact: values}))
    assert [row.state for row in about_machines] == ["ok", "ok"]
    assert (last.check, last.state) == (fact, "not ok")
    assert re.search(words, last.as_line())


@pytest.mark.parametrize("gpus, ranks_here, state", [(2, 1, "one"), (2, 3, "too"), (0, 1, "too")])
def test_ranks_take_gpus_only_if_there_is_one_for_each(monkeypatch, gpus, ranks_here, state):
    monkeypatch.setattr(machines.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    assert machines.my_facts(on_several=False)["GPUs"].startswith(state)


def test_troubles_of_each_machine_are_told():
    trouble = list(Row("memory", "limited", "little", "less"))
    rows = machines.compare(facts("10.0.0.1", "10.0.0.2", troubles=[[], [trouble]]))
    assert "limited  memory of m1: little -> less" in [row.as_line() for row in rows]


def test_a_rank_that_does_not_come_is_named_once():
    store = dist.HashStore()
    first, last = (ranks.Peers(store, rank, 3, 1) for rank in (0, 2))
    store.set("here/2", "{}")
    (row,), speaks = ranks.examine(first, on_several=False)
    assert speaks and row.text == "rank 1 of 3 does not answer within 1 s"
    assert not ranks.examine(last, on_several=False)[1]


def test_the_cause_is_not_who_lost_a_connection_or_waited():
    cause = "no interface has this name, or it has no address"
    assert min(["Connection reset by peer", "timed out", cause], key=pairs.is_consequence) == cause


def test_a_pair_that_does_not_connect_is_named_with_direction_and_cure():
    """One for each way between machines: of eight ranks on each, all 64 pairs say the same."""
    everyone = facts("10.0.0.1", "127.0.1.1", "10.0.0.3")
    everyone.append(everyone[0])  # rank 3 is on m0 as well
    problems = [[[1, "refused"]], [], [[0, "no answer"], [1, "refused"]], [[1, "refused"]]]
    rows = pairs.unreached(everyone, problems)
    assert [row.facts["ranks"] for row in rows] == [[0, 1], [2, 0], [2, 1]]
    assert rows[0].remedy == "on m1: export GLOO_SOCKET_IFNAME=eth1"
    assert "rank 2 does not reach rank 0 at 10.0.0.1: no answer" in rows[1].text
    assert "let m2 reach m0" in rows[1].remedy


def test_another_rank_at_the_same_address_is_not_taken_for_the_right_one():
    with network.listen_at("127.0.0.1") as listener:
        threading.Thread(target=pairs.answer, args=(listener, "w"), daemon=True).start()
        peer = {"address": listener.getsockname(), "word": "w"}
        assert pairs.reach_all([peer, {**peer, "word": "x"}], 20) == [[1, "somebody else answered"]]


def test_a_pair_that_exchanges_no_data_is_not_ok():
    times = ((0.1, 1.0), "timed out", None)
    rows = [pairs.row_of_times((0, 1), facts("10.0.0.1", "10.0.0.2"), each) for each in times]
    assert [row.state for row in rows] == ["ok", "not ok", "unknown"]


def test_of_many_ranks_the_first_of_each_machine_are_timed():
    everyone = [{"machine": f"m{rank // 4}"} for rank in range(12)]
    assert pairs.chosen_pairs(everyone) == [(0, 4), (0, 8), (4, 8)]
    assert pairs.chosen_pairs(everyone[:3]) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("advice", ["eth7", None])
def test_what_it_says_to_export_counts_in_the_command_for_one_of_several(monkeypatch, advice):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if advice:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", advice)
    monkeypatch.setattr(run, "start", lambda how, script, flags, environment: environment)
    given = one_of_several.main(["doctor", "--nodes=127.0.0.1", "--node-rank=0", "--port=1"])
    assert given["GLOO_SOCKET_IFNAME"] == (advice or network.loopback())


@ROOT_ONLY
def test_between_two_machines_its_advice_is_what_helps():
    """As on Debian, the name of each machine is 127.0.1.1 for itself."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.14.0.1", "MASTER_PORT": str(PORT)}

    def examine(two, **more):
        command = [sys.executable, ROOT / "scripts" / "lockstep", "doctor", "--timeout=90"]
        found = {**two.environment(), **place, **more}
        enter = [each.enter(*command) for each in two.machines]
        both = [start_program(*enter[n], env={**found, "RANK": str(n)}) for n in (0, 1)]
        return [finish(process) for process in both]

    with TwoMachines() as two:
        for each in two.machines:
            each.names(two.folder, own="127.0.1.1")
        first, second = examine(two)
        assert (first.returncode, second.returncode, second.stdout) == (1, 1, ""), first.stderr
        advice = re.search(r"on machine1: export GLOO_SOCKET_IFNAME=(\w+)", first.stdout)[1]
        first, second = examine(two, GLOO_SOCKET_IFNAME=advice)
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stdout
    assert "ok       rank 0 on machine0 - rank 1 on machine1" in first.stdout
