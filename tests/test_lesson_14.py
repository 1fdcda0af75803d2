"""Lesson 14: two launchers make one job; two real network namespaces, where root may make them."""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import patch

import cloudpickle
import lesson_03_spawn_ddp
import lesson_14_several_machines as lesson
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, finish, start_lesson, watch_ports
from nbtools import RankFailed, free_ports, run
from torch import nn

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
TWO = ["bash", str(ROOT / "scripts" / "two_machines.sh")]


@pytest.mark.claim("B2", "B6", "E10", "E13")
def test_two_launchers_make_one_job(default_run):
    result = default_run(14).json
    places = [(rank["node"], rank["local_rank"], rank["holds_store"]) for rank in result["ranks"]]
    assert places == [(0, 0, True), (0, 1, True), (1, 0, False), (1, 1, False)]
    assert len({tuple(pair["ranks"]) for pair in result["pairs"]}) == 6
    assert {pair["differ_by"] for pair in result["pairs"]} == {0.0}
    assert result["max_param_diff"] < 1e-12 and result["nodes"] == 2
    for pair in result["pairs"]:  # connected at the address of one of them
        assert pair["met_at"] in [result["ranks"][rank]["address"] for rank in pair["ranks"]]
    if sys.platform == "linux":
        addresses = [rank["address"] for rank in result["ranks"]]
        assert addresses == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
        between = [pair for pair in result["pairs"] if pair["ranks"] not in ([0, 1], [2, 3])]
        assert {(pair["met_at"], pair["caller"] > 1) for pair in between} == {("127.0.0.1", True)}


@pytest.mark.claim("E13")
@pytest.mark.parametrize("rendezvous", ["c10d", "launch"])
def test_the_other_ways_work_too_with_an_odd_number_of_ranks(rendezvous):
    launcher = start_lesson(14, "--nproc", 3, "--rendezvous", rendezvous, "--json")
    open_ports = set()
    threading.Thread(target=watch_ports, args=(launcher, open_ports)).start()
    finished = finish(launcher)
    assert finished.returncode == 0, finished.stderr
    places = [(rank["node"], rank["local_rank"]) for rank in finished.json["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0)] and finished.json["rendezvous"] == rendezvous
    assert open_ports == set()


def measure_here(rank, world_size, technique):
    """Call measure() on a rank that nbtools has started, with one technique removed."""
    names = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= names | {"MASTER_PORT": "0", "MASTER_ADDR": "nowhere"}
    train = lesson.train
    changes = {"ddp": (nn.parallel, "DistributedDataParallel", lambda model: model)}
    changes["rows"] = (lesson, "train", lambda rank, *others: train(0, *others))  # all as rank 0
    changes = changes.get(technique)
    with patch.object(*changes) if changes else contextlib.nullcontext():
        return lesson.measure(rank, world_size, CPU, steps=4, batch_size=12)


@pytest.mark.claim("B1", "E13")
def test_main_fails_for_each_part_of_the_claim(capsys):
    good, without_ddp, same_rows = (run(measure_here, 3, t)[0] for t in ("none", "ddp", "rows"))
    good |= {"nodes": 2, "device": "cpu", "backend": "gloo", "world_size": 3, "rendezvous": ""}
    assert len(good["pairs"]) == 3 and all(pair["met_at"] for pair in good["pairs"])
    changes = {name: {name: without_ddp[name]} for name in ("max_param_diff", "pairs")}
    changes |= {"same rows": {name: same_rows[name] for name in ("max_param_diff", "pairs")}}
    changes |= {"dealt": {"rows_dealt_once": same_rows["rows_dealt_once"]}}
    changes |= {"one machine": {"nodes": 1}, "numbering": {"in_order": False}}
    changes |= {"nan": {"max_param_diff": float("nan")}, "loss": {"loss_last": 99.0}}
    changes["unseen"] = {"pairs": [pair | {"met_at": None} for pair in good["pairs"]]}

    def verdict(change):
        with patch.object(lesson, "rehearse", lambda *_: good | change):
            return lesson.main()[0]

    with patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()):
        os.environ.pop("RANK", None)
        assert verdict({})
        assert [name for name in changes if verdict(changes[name])] == []


def test_a_look_at_the_sockets_leaves_none_open():
    before = os.listdir("/dev/fd")
    lesson.sockets_of_this_process()
    assert os.listdir("/dev/fd") == before


def test_numbers_that_are_not_in_order_are_seen():
    place = lambda node, local, here: {"node": node, "local_rank": local, "ranks_here": here}  # noqa: E731
    right = [place(0, 0, 2), place(0, 1, 2), place(1, 0, 1)]
    assert lesson.numbered_in_order(right)
    assert not lesson.numbered_in_order([right[0], right[2], right[1]])
    assert not lesson.numbered_in_order([right[2], right[0], right[1]])


def rows_of(rank, world_size):
    shares = lesson.train(rank, world_size, CPU, *lesson.make_toy(0), 5, 20)
    return [share.tolist() for share in shares]


@pytest.mark.claim("B1")
@pytest.mark.parametrize("nproc", [2, 4])
def test_the_machines_share_the_rows_and_none_is_computed_twice(nproc):
    shares = run(rows_of, nproc)
    assert sorted(row for steps in shares for share in steps for row in share) == list(range(100))
    assert {len(share) for steps in shares for share in steps} == {20 // nproc}


def test_the_rank_that_fails_is_named_in_one_line(tmp_path):
    script = tmp_path / "lesson_14.py"
    text = (ROOT / "lessons" / "lesson_14_several_machines.py").read_text()
    broken = (
        "    if rank == 2:\n        raise ValueError('no such row')\n    rows, targets, model ="
    )
    script.write_text(text.replace("    rows, targets, model =", broken, 1))
    command = [sys.executable, ROOT / "scripts" / "run_lesson.py", script, "--nproc", "3"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    line = "rank 2 failed: ValueError: no such row\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", line)


@LINUX
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL, "launchers are killed"])
def test_a_rehearsal_that_is_ended_leaves_nobody_behind(sign):
    launcher = start_lesson(14, "--steps", 10**5, "--nproc", 2)
    family, end = [], time.monotonic() + 200
    try:
        while len(family) < 5:  # the lesson, two launchers, two ranks
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.02)
            family = psutil.Process(launcher.pid).children(recursive=True)
        if isinstance(sign, str):  # the ranks import torch
            for process in [p for p in family if p.children() and p.ppid() != launcher.pid]:
                process.kill()
        else:
            launcher.send_signal(sign)
        assert launcher.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -9}.get(sign, 1)
        assert psutil.wait_procs(family, timeout=60)[1] == []
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def be_machine(node, nodes, folder, port):
    """Start the script of the test with torchrun, as on one of two machines."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT / "lessons")
    lesson.listen_at_one_address()
    from torch.distributed import run as torchrun

    typed = lesson.what_to_type(node, nodes, 1, "127.0.0.1", port)
    torchrun.main([*typed[2:], f"--log-dir={folder}/{node}", "--redirects=1", f"{folder}/five.py"])


@pytest.mark.claim("E13")
def test_the_five_lines_of_readme_take_lesson_03_to_two_machines(tmp_path):
    readme = (ROOT / "docs" / "several_machines.md").read_text()
    lines = re.search(r"```python\n(import lesson_03.*?)```", readme, re.DOTALL)[1]
    notebook = (ROOT / "notebooks" / "lesson_14_several_machines.ipynb").read_text()
    five = [line for line in lines.splitlines() if line]
    assert len(five) == 5
    assert all(line.replace('"', '\\"') in notebook for line in five)
    (tmp_path / "five.py").write_text(lines.replace("steps=300", "steps=3"))
    run(be_machine, 2, str(tmp_path), free_ports(1)[0], deadline=120)
    printed = [path.read_text().split() for path in sorted(tmp_path.glob("*/*/*/0/stdout.log"))]
    assert [rank for rank, _ in printed] == ["0", "1"]
    assert printed[0][1] == printed[1][1] and 0 < float(printed[0][1]) < 1


# --- Two network namespaces ---


def cannot_make_machines():
    """Return whether this process may not make a network namespace."""
    command = "unshare --net --uts --mount --pid --fork ip link add one type veth peer name two"
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip", "tc")))
    return not tools or subprocess.run(command.split(), capture_output=True).returncode != 0


ROOT_ONLY = pytest.mark.skipif(cannot_make_machines(), reason="needs root, and ip")


def two_machines(*arguments, **options):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*TWO, *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **streams, **options)


def test_without_root_or_ip_one_line_says_what_is_missing(tmp_path):
    for name in ("bash", "id", "uname", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    options = {"capture_output": True, "text": True, "env": {"PATH": str(tmp_path)}}
    finished = subprocess.run([*TWO, "14"], **options)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert re.fullmatch(r".*error: it needs .*the program ip, .*\n", finished.stderr)
    (tmp_path / "id").unlink()
    (tmp_path / "id").write_text("#!/bin/bash\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    finished = subprocess.run([*TWO, "14"], **options)
    assert finished.returncode == 2 and "root (sudo), the program ip" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


@ROOT_ONLY
@pytest.mark.parametrize("flags", ["01", "99", "14 --nproc 1", "14 --rate fast", "14 --steps 0"])
def test_bad_flags_cost_one_line(flags):
    process = two_machines(*flags.split())
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout, len(stderr.splitlines())) == (2, "", 1), stderr


@ROOT_ONLY
@pytest.mark.claim("B6", "E13")
def test_two_runs_at_once_each_on_two_machines_of_their_own():
    jobs = [two_machines(14, "--nproc", 3, "--json")]
    jobs += [two_machines("03", "--nproc", 2, "--steps", 3, "--rendezvous", "c10d", "--json")]
    (first, _), (second, _) = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert "rank 2: node 1, local rank 0, at 10.14.0.2; meets 0, 1 at 10.14.0.1" in first
    assert "digits, 2 ranks over gloo" in second and "ranks by 0.0 at most" in second


@ROOT_ONLY
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_machines_that_are_interrupted_are_gone(sign):
    job = two_machines(14, "--steps", 10**5, "--nproc", 2)
    family, ranks, end = {}, 0, time.monotonic() + 200
    try:
        while ranks < 2:
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.2)
            for process in psutil.Process(job.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    family[process] = " ".join(process.cmdline())
            ranks = sum("rank.py" in c and "distributed.run" not in c for c in family.values())
        assert list(family.values()).count("sleep infinity") == 2  # process 1 of each machine
        job.send_signal(sign)
        assert job.wait(60) == (-9 if sign == signal.SIGKILL else 128 + sign)
        assert psutil.wait_procs(list(family), timeout=20)[1] == []
    finally:
        job.kill()  # the machines end with it
        job.communicate()


@ROOT_ONLY
@pytest.mark.claim("B7")
def test_a_slow_cable_makes_every_step_wait():
    job = two_machines("03", "--nproc", 2, "--steps", 4, "--rate", 2, "--json")
    result = finish(job).json
    parameters = nn.utils.parameters_to_vector(lesson_03_spawn_ddp.make_model().parameters())
    bits = 4 * parameters.numel() * 32  # four steps, each rank sends its gradients once
    assert result["seconds_training"] > 0.8 * bits / 2e6


@ROOT_ONLY
@pytest.mark.claim("B7", "C9")
def test_faults_say_what_the_lesson_says():
    stdout, _ = two_machines("faults", "localhost", "killed", "debian-cured").communicate(
        timeout=390
    )
    assert "machine 1, launcher, after" in stdout and "to connect to (127.0.0.1, 29500)" in stdout
    assert re.search(r"machine 0, rank 0, after .* Connection (reset|closed) by peer", stdout)
    assert "machine 1, rank 1: came to its end" in stdout.partition("debian-cured: ")[2]


@ROOT_ONLY
@pytest.mark.claim("B7", "E13")
def test_a_machine_that_dies_is_replaced_and_the_job_goes_on():
    stdout, _ = two_machines("faults", "replaced").communicate(timeout=390)
    step = re.search(r"killed after step (\d+)", stdout)[1]
    assert f"resumed from step {step}" in stdout
    assert "PASS the parameters of 2 ranks differ by 0.0" in stdout


# --- On a GPU ---


def share_one_gpu(rank, world_size):
    """Let two ranks of an nccl group use GPU 0."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.claim("E8")
def test_nccl_refuses_two_ranks_on_one_gpu():
    with pytest.raises(RankFailed) as failure:
        run(share_one_gpu, 2, deadline=120)
    assert re.search("Duplicate GPU detected|using the same GPU", failure.value.details)
