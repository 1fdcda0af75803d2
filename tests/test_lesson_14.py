"""Lesson 14: two launchers make one job. (test_two_machines.py: on two real networks.)"""

import contextlib
import io
import os
import re
import signal
import sys
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks
from conftest import ROOT, finish, start_lesson, start_program
from lockstep.watch import sockets
from nbtools import RankFailed, free_ports, run

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


BREAKS = {
    "127.0.0.1 as everybody's first machine": ("--master-addr={first}", "--master-addr=127.0.0.1"),
    "localhost as everybody's first machine": ("--master-addr={first}", "--master-addr=localhost"),
    "a node rank twice": ('f"--node-rank={node}"', '"--node-rank=0"'),
    "node ranks from one": ("--node-rank={node}", "--node-rank={node + 1}"),
    "ranks counted as machines": ("--nnodes={nodes}", "--nnodes={nodes * ranks_here}"),
    "one rank on each machine": ("--nproc-per-node={ranks_here}", "--nproc-per-node=1"),
    "another port on each machine": ("--master-port={port}", "--master-port={port + node}"),
    "local rank taken for rank": (
        'int(os.environ.get("RANK", 0))',
        'int(os.environ["LOCAL_RANK"])',
    ),
    "rows by local rank": (
        "DistributedSampler(data, seed=seed)",
        'DistributedSampler(data, rank=int(os.environ["LOCAL_RANK"]), seed=seed)',
    ),
    "rows as if each machine were alone": (
        "DistributedSampler(data, seed=seed)",
        'DistributedSampler(data, int(os.environ["LOCAL_WORLD_SIZE"]), '
        'int(os.environ["LOCAL_RANK"]), seed=seed)',
    ),
    "the batch not divided": ("batch_size // world_size, sampler", "batch_size, sampler"),
    "no new order": ("sampler.set_epoch(epoch)", "pass"),
    "no DDP": ("DistributedDataParallel(model.to(device))", "model.to(device)"),
    "a sum of gradients": ("loss.backward()", "(loss * world_size).backward()"),
    "every machine alone": ('f"--nnodes={nodes}"', '"--standalone", f"--nnodes={nodes}"'),
    "another rendezvous": ('f"--nnodes={nodes}"', '"--rdzv-backend=c10d", f"--nnodes={nodes}"'),
    "a flag that puts the others out of force": (
        'f"--nnodes={nodes}"',
        'f"--rdzv-endpoint=127.0.0.1:{port}", f"--nnodes={nodes}"',
    ),
    "not by the seed": ("DistributedSampler(data, seed=seed)", "DistributedSampler(data)"),
    "a step too few": ("if done == steps:", "if done == steps - 1:"),
    "all ranks on one machine": ('os.environ.get("GROUP_RANK", 0)', "0"),
    "the places in another order": ("return everyone\n", "return everyone[::-1]\n"),
    "a flag that torchrun does not know": ('f"--nnodes={nodes}"', 'f"--nodes={nodes}"'),
    "a rank that goes on alone": (
        "places = who_is_where()",
        "places = who_is_where(); model.bias.data += places[rank]['node']",
    ),
}


@pytest.mark.parametrize("nproc", (3, 4))
def test_each_break_ends_in_fail(nproc):
    check_breaks(14, BREAKS, nproc, "--steps", 10, "--seed", 5, machines=2)


@pytest.mark.claim("B1", "B2", "B6", "E10", "E13")
def test_two_launchers_make_one_job(default_run):
    result = default_run(14).json
    places = [(rank["node"], rank["local_rank"], rank["at_store"]) for rank in result["ranks"]]
    assert places == [(0, 0, True), (0, 1, True), (1, 0, True), (1, 1, True)]
    assert len({tuple(pair["ranks"]) for pair in result["pairs"]}) == 6
    assert {pair["differ_by"] for pair in result["pairs"]} == {0.0}
    assert result["max_param_diff"] < 1e-12 and result["nodes"] == 2
    for pair in result["pairs"]:  # connected at the address of one of them
        assert pair["met_at"] in [result["ranks"][rank]["address"] for rank in pair["ranks"]]
    if sys.platform == "linux":
        addresses = [rank["address"] for rank in result["ranks"]]
        assert addresses == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
        between = [pair for pair in result["pairs"] if pair["ranks"] not in ([0, 1], [2, 3])]
        assert {(pair["met_at"], pair["caller"] > 1) for pair in between} == {("127.0.0.2", True)}


@pytest.mark.slow
@pytest.mark.claim("E13")
def test_the_launcher_of_2019_works_too(lesson_run):
    finished = lesson_run(14, "--nproc", 3, "--launcher", "launch", "--batch-size", 3)
    assert finished.returncode == 0, finished.stderr
    places = [(rank["node"], rank["local_rank"]) for rank in finished.json["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0)] and finished.open_ports == []


def test_a_look_at_the_sockets_leaves_none_open():
    before = os.listdir("/dev/fd")
    sockets.of_this_process()
    assert os.listdir("/dev/fd") == before


def test_the_rank_that_fails_is_named_and_who_has_lost_it_says_so(tmp_path):
    script = tmp_path / "lesson_14.py"
    text = (ROOT / "lessons" / "lesson_14_several_machines.py").read_text()
    begin = "    rows, targets, model ="
    broken = f"    if rank == 1:\n        raise ValueError('no such row')\n{begin}"
    script.write_text(text.replace(begin, broken, 1))
    command = [sys.executable, ROOT / "scripts" / "lockstep", "inside", "rehearsal", script]
    finished = finish(start_program(*command, "--nproc", 2))
    lines = sorted(finished.stderr.splitlines())
    lost = "rank 0 failed: it lost a rank of another machine, which says why"
    assert (finished.returncode, finished.stdout) == (1, "")
    assert lines == [lost, "rank 1 failed: ValueError: no such row"]


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
