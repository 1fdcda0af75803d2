"""Lesson 14: two launchers make one job. (test_two_machines.py: on two real networks.)"""

import contextlib
import io
import os
import re
import signal
import sys
import time
from unittest.mock import patch

import cloudpickle
import lesson_14_several_machines as lesson
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, finish, start_lesson, start_program
from nbtools import RankFailed, free_ports, run
from torch import nn

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


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
@pytest.mark.parametrize("rendezvous, nproc", [("c10d", 3), ("launch", 2)])
def test_the_other_ways_work_too(lesson_run, rendezvous, nproc):
    finished = lesson_run(14, "--nproc", nproc, "--rendezvous", rendezvous)
    assert finished.returncode == 0, finished.stderr
    places = [(rank["node"], rank["local_rank"]) for rank in finished.json["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0)] if nproc == 3 else [(0, 0), (1, 0)]
    assert (finished.json["rendezvous"], finished.open_ports) == (rendezvous, [])


def measure_three_times(rank, world_size):
    """Call measure() on a rank that nbtools has started: as it is, without DDP, with one's rows."""
    names = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= names | {"MASTER_PORT": "0", "MASTER_ADDR": "nowhere"}
    train = lesson.train
    changes = [contextlib.nullcontext()]
    changes += [patch.object(nn.parallel, "DistributedDataParallel", lambda model: model)]
    changes += [patch.object(lesson, "train", lambda rank, *others: train(0, *others))]
    found = []
    for change in changes:
        with change:
            found.append(lesson.measure(rank, world_size, CPU, steps=4, batch_size=12))
    return found


@pytest.mark.claim("B1", "E13")
def test_main_fails_for_each_part_of_the_claim(capsys):
    good, without_ddp, same_rows = run(measure_three_times, 3)[0]
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
def test_the_machines_share_the_rows_and_none_is_computed_twice():
    shares = run(rows_of, 4)
    assert sorted(row for steps in shares for share in steps for row in share) == list(range(100))
    assert {len(share) for steps in shares for share in steps} == {5}


def test_the_rank_that_fails_is_named_in_one_line(tmp_path):
    script = tmp_path / "lesson_14.py"
    text = (ROOT / "lessons" / "lesson_14_several_machines.py").read_text()
    broken = (
        "    if rank == 1:\n        raise ValueError('no such row')\n    rows, targets, model ="
    )
    script.write_text(text.replace("    rows, targets, model =", broken, 1))
    command = [sys.executable, ROOT / "scripts" / "lockstep", "inside", "rehearsal", script]
    finished = finish(start_program(*command, "--nproc", 2))
    line = "rank 1 failed: ValueError: no such row\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", line)


@LINUX
@pytest.mark.parametrize("ended", ["by Ctrl-C", "lesson is killed", "launchers are killed"])
def test_a_rehearsal_that_is_ended_leaves_nobody_behind(ended):
    launcher = start_lesson(14, "--steps", 10**5, "--nproc", 2)
    family, end = [], time.monotonic() + 200
    try:
        while len(family) < 5:  # the lesson, two launchers, two ranks
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.02)
            family = psutil.Process(launcher.pid).children(recursive=True)
        if ended == "by Ctrl-C":
            launcher.send_signal(signal.SIGINT)
        else:  # the ranks import torch
            inside = next(each for each in family if each.ppid() == launcher.pid)
            for process in [inside] if ended == "lesson is killed" else inside.children():
                process.kill()
        assert launcher.wait(60) == {"by Ctrl-C": 130, "lesson is killed": 137}.get(ended, 1)
        assert psutil.wait_procs(family, timeout=60)[1] == []
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def run_lines(rank, world_size, lines, port):
    """Run a script as torchrun would start it on this rank; return what it prints."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lesson.listen_at_one_address()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(lines, {})
    return printed.getvalue().split()


@pytest.mark.claim("E13")
def test_the_five_lines_of_the_page_take_lesson_03_to_two_machines():
    page = (ROOT / "docs" / "several_machines.md").read_text()
    lines = re.search(r"```python\n(import lesson_03.*?)```", page, re.DOTALL)[1]
    notebook = (ROOT / "notebooks" / "lesson_14_several_machines.ipynb").read_text()
    five = [line for line in lines.splitlines() if line]
    assert len(five) == 5
    assert all(line.replace('"', '\\"') in notebook for line in five)
    printed = run(run_lines, 2, lines.replace("steps=300", "steps=3"), *free_ports(1), deadline=120)
    assert [rank for rank, _ in printed] == ["0", "1"]
    assert printed[0][1] == printed[1][1] and 0 < float(printed[0][1]) < 1


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
