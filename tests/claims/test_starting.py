"""Evidence about launchers, mp.spawn and joining a group, for claims of articles A to C and E."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run_lesson, run_warm
from nbtools import free_ports, run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAYS_OMP = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
ENVIRONMENT_OF_RANK = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
assert parser.parse_args().local_rank is None  # torchrun passes no flag
names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS".split()
os.write(1, (json.dumps([int(os.environ.get(name, -1)) for name in names]) + "\\n").encode())
"""


def be_a_launcher(number, _, jobs):
    """Be one of several launchers, each a fork; return (exit code, stdout, stderr)."""
    dist.destroy_process_group()  # the one that run() has joined
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    module, sys.argv[1:], variables = jobs[number]
    os.environ.update(variables)
    code = 0
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        try:
            importlib.import_module(module).main()
        except Exception:
            traceback.print_exc()
            code = 1
        for stream in (stdout, stderr):
            stream.seek(0)
        return code, stdout.read(), stderr.read()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return {name: (exit code, stdout, stderr)} of all launchers."""
    script = tmp_path_factory.mktemp("a folder") / "environment.py"
    script.write_text(ENVIRONMENT_OF_RANK)
    torchrun, launch = "torch.distributed.run", "torch.distributed.launch"
    here = ["--standalone", "--local-addr=127.0.0.1", str(script)]
    two, port = "--nproc-per-node=2", f"--master-port={free_ports(1)[0]}"
    node = [two, "--nnodes=2", "--master-addr=127.0.0.1", port]
    jobs = {
        "node 0": (torchrun, [*node, "--node-rank=0", str(script)], {"OMP_NUM_THREADS": "3"}),
        "node 1": (torchrun, [*node, "--node-rank=1", str(script)], {"OMP_NUM_THREADS": "3"}),
        "launch": (launch, ["--nproc_per_node=1", *here], {}),
        "two": (torchrun, [two, *here], {}),
        "one": (torchrun, here, {}),
    }
    return dict(
        zip(jobs, run(be_a_launcher, len(jobs), list(jobs.values()), deadline=1500), strict=True)
    )


@pytest.mark.claim("A12")
def test_launch_ends_a_parser_that_knows_only_the_underscore(started):
    code, _, stderr = started["launch"]
    assert code != 0 and "unrecognized arguments: --local-rank=0" in stderr
    assert started["two"][0] == 0  # the same parser under torchrun


@pytest.mark.claim("A12")
def test_the_launcher_of_2019_still_runs_lesson_02():
    finished = run_lesson(2, "--launcher", "launch", "--steps", 4, "--json")
    assert finished.returncode == 0, finished.stderr
    assert finished.json["launcher"] == "launch" and finished.json["passed"] is True
    assert [facts["LOCAL_RANK"] for facts in finished.json["environment"]] == ["0", "1"]
    assert "torch.distributed.launch is deprecated" in finished.stderr


@pytest.mark.claim("A14")
def test_torchrun_sets_omp_num_threads_only_if_unset_and_says_so(started):
    threads = {
        name: {json.loads(line)[-1] for line in stdout.splitlines()}
        for name, (_, stdout, _) in started.items()
    }
    assert threads["two"] == {1} and SAYS_OMP in started["two"][2]
    assert threads["node 0"] == {3}  # it was set to 3: kept
    assert threads["one"] == {-1}  # one process: left alone
    assert SAYS_OMP not in started["one"][2] + started["node 0"][2]


@pytest.mark.claim("B2")
def test_rank_is_the_number_of_a_process_not_of_a_node(started):
    """Two launchers play two nodes, with two processes each."""
    assert [started[f"node {n}"][0] for n in (0, 1)] == [0, 0], started["node 0"][2]
    tables = [
        sorted(json.loads(line)[:5] for line in started[f"node {n}"][1].splitlines())
        for n in (0, 1)
    ]
    # rank, local rank, node rank, world size, local world size
    assert tables == [[[0, 0, 0, 4, 2], [1, 1, 0, 4, 2]], [[2, 0, 1, 4, 2], [3, 1, 1, 4, 2]]]


@pytest.mark.claim("A10", "E12")
def test_four_variables_by_hand_are_enough_for_lesson_02():
    script = ROOT / "lessons" / "lesson_02_launch_ddp.py"
    more = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    zero, one = run_warm(script, 2, "--steps", 4, unset=more)
    assert zero[0] == 0 and one == (0, "")
    first, second = zero[1].splitlines()
    assert first == "ranks: 2, over gloo on cpu" and second.endswith("the replicas agree")


def join_by_environment(rank, world_size, port):
    dist.destroy_process_group()  # the one that run() has joined
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    missing = {}
    for name in variables:
        os.environ.update(variables)
        del os.environ[name]
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            missing[name] = f"environment variable {name} expected" in str(error)
    os.environ.update(variables)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)  # the two as arguments
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    return list(missing.values()), total.item()


@pytest.mark.claim("E12")
def test_env_init_needs_four_variables_two_of_which_can_be_arguments():
    assert run(join_by_environment, 2, free_ports(1)[0]) == [([True] * 4, 3.0)] * 2


def join_as_printed(rank, world_size, folder=None):
    """Do as article B prints it, without an address, or with our cure, a file in `folder`."""
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    store = folder and dist.FileStore(str(folder / "rendezvous"), world_size)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    except ValueError as error:
        return str(error)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return total.item()


@pytest.mark.claim("B4")
def test_snippet_without_an_address_fails_and_a_file_cures_it(tmp_path):
    for answer in run(join_as_printed, 2):
        assert "environment variable MASTER_ADDR expected, but not set" in answer
    assert run(join_as_printed, 2, tmp_path) == [3, 3]


def join_at_port(rank, world_size, port):
    """Join a group at a fixed port, as article C does; return the kind of error, and its text."""
    dist.destroy_process_group()
    place = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=3)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **place)
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.claim("C9")
def test_fixed_port_belongs_to_the_first_job():
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (answer,) = run(join_at_port, 1, first.port)
    assert answer[0] == "DistNetworkError" and "EADDRINUSE" in answer[1]
    del first


@pytest.mark.claim("C10")
def test_the_mean_of_a_random_image_is_nearly_one_half():
    seeds = [torch.Generator().manual_seed(number) for number in range(150)]
    means = torch.stack([torch.rand(3, 224, 224, generator=s).double().mean() for s in seeds])
    assert (means - 0.5).abs().max() < 0.005  # nothing but noise decides the label
    assert 0.35 < (means < 0.5).double().mean() < 0.65


FORK = """
import multiprocessing
import torch

def use():
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        print(error)

torch.ones(1, device="cuda")
child = multiprocessing.get_context("{method}").Process(target=use)
if __name__ == "__main__":
    child.start()
    child.join()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("method, words", [("fork", "Cannot re-initialize CUDA"), ("spawn", "")])
def test_cuda_can_not_be_used_after_a_fork(tmp_path, method, words):
    (tmp_path / "job.py").write_text(FORK.format(method=method))
    job = subprocess.run([sys.executable, tmp_path / "job.py"], capture_output=True, text=True)
    assert job.returncode == 0 and words in job.stdout and (words or job.stdout == ""), job.stderr
