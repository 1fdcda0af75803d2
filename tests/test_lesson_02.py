"""Lesson 02: one process per replica, started by a launcher, kept in step by DDP."""

import argparse
import contextlib
import doctest
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import lesson_02_launch_ddp as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Finished
from nbtools import RankFailed, free_ports, judge, run
from solutions.lesson_02 import check, solution
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from wire import Wire

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
SCRIPT = ROOT / "lessons" / "lesson_02_launch_ddp.py"
LAUNCHER = ["bash", ROOT / "scripts" / "lesson_02.sh"]
SAYS_OMP = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
RANK_VARIABLES = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


BAD_FOR_LAUNCHER = [
    ("--nproc", 0),
    ("--nproc", "two"),
    ("--nproc", 65),
    ("--nproc",),
    ("--launcher", "mpirun"),
    ("--steps", 0),  # the launcher asks the lesson
]
BAD_FOR_LESSON = [
    ("--batch-size", -1),
    ("--steps", 0),
    ("--seed", -1),
    ("--no-such-flag",),
]


# --- Starting things ---


def execute(*command, cwd=ROOT, **variables):
    """Run a command to its end, with these environment variables; leave no process behind.

    What could come from our own environment and change the result is removed first.
    """
    environment = {**os.environ, "LOCKSTEP_PYTHON": sys.executable}
    for name in [*RANK_VARIABLES.split(), "OMP_NUM_THREADS"]:
        environment.pop(name, None)
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return Finished(process.args, process.returncode, stdout, stderr)


BY_HAND = """
import sys, torch
import lesson_02_launch_ddp as lesson
print("drew", torch.randn(1).item(), file=sys.stderr)  # unseeded
sys.exit(lesson.main(sys.argv[1:]))
"""

ENVIRONMENT = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
assert parser.parse_args().local_rank is None  # torchrun passes no flag
names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS".split()
os.write(1, (json.dumps([int(os.environ[name]) for name in names]) + "\\n").encode())
"""

OLD_SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
print("flag", args.local_rank, "variable", os.environ["LOCAL_RANK"])
"""

GLOO_THREADS = """
import glob, sys
import lesson_02_launch_ddp as lesson

def gloo_threads():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    return [name for name in names if "gloo" in name]

train = lesson.train
def watched(*args, **kwargs):
    result = train(*args, **kwargs)
    print("during", len(gloo_threads()), file=sys.stderr)
    return result

lesson.train = watched
code = lesson.main(sys.argv[1:])
print("after", len(gloo_threads()), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return {name: finished process} of all that the tests of this file start.

    Three at a time: most of a launcher's life is the import of torch.
    """
    folder = tmp_path_factory.mktemp("a folder with a space")
    (folder / "old.py").write_text(OLD_SCRIPT)
    (folder / "environment.py").write_text(ENVIRONMENT)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    launch = [sys.executable, "-m", "torch.distributed.launch"]
    here, few = {"cwd": folder}, ["--json", "--steps", 6]
    old = ["--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=1", "old.py"]
    node = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    node += [f"--master-port={free_ports(1)[0]}", "environment.py"]
    by_hand = [sys.executable, "-c", BY_HAND, *few]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    world["PYTHONPATH"] = str(SCRIPT.parent)
    jobs = {
        # name: (command, options of execute)
        "node 0": ([*torchrun, "--node-rank=0", *node], here | {"OMP_NUM_THREADS": "3"}),
        "node 1": ([*torchrun, "--node-rank=1", *node], here | {"OMP_NUM_THREADS": "3"}),
        "by hand 0": (by_hand, here | world | {"RANK": "0"}),
        "by hand 1": (by_hand, here | world | {"RANK": "1"}),
        "default": ([*LAUNCHER, "--json"], here | {"CUDA_VISIBLE_DEVICES": ""}),
        "launch": ([*LAUNCHER, "--nproc=2", "--launcher", "launch", *few], here),
        "torchrun 1": ([*LAUNCHER, "--nproc", 1, *few], here),
        "no launcher": ([sys.executable, "-c", GLOO_THREADS, *few], {"cwd": SCRIPT.parent}),
        "old by launch": ([*launch, *old], here),
        "--help": ([*LAUNCHER, "--help"], here),
    }
    jobs |= {spelled(flags): ([*LAUNCHER, *flags], here) for flags in BAD_FOR_LAUNCHER}
    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(execute, *job, **how) for name, (job, how) in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


def passed(finished):
    """Assert that a lesson run has passed; return its JSON."""
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-2].startswith("PASS ")
    assert finished.json["passed"] is True
    return finished.json


# --- The whole script ---


@pytest.mark.claim("A10", "A12", "A18")
@pytest.mark.parametrize("nproc, name", [(1, "torchrun 1"), (2, "default")])
def test_torchrun_passes(started, nproc, name):
    result = passed(started[name])
    assert (result["lesson"], result["world_size"], result["launcher"]) == (2, nproc, "torchrun")
    steps = 40 if name == "default" else 6
    assert result["param_spread"] == [0.0] * steps  # exactly 0, after each step
    assert result["max_grad_diff"] < 1e-12
    assert result["loss_last"] < result["loss_first"] / 2
    ranks = [(facts["RANK"], facts["LOCAL_RANK"]) for facts in result["environment"]]
    assert ranks == [(str(rank), str(rank)) for rank in range(nproc)]  # nobody else set it


@pytest.mark.claim("A12")
def test_the_launcher_of_2019_still_works_and_passes_a_flag(started):
    result = passed(started["launch"])
    assert (result["world_size"], result["launcher"]) == (2, "launch")  # "launch": the flag came
    assert [facts["LOCAL_RANK"] for facts in result["environment"]] == ["0", "1"]
    assert "torch.distributed.launch is deprecated" in started["launch"].stderr


@pytest.mark.claim("A12")
def test_launch_kills_a_parser_that_knows_only_the_underscore(started):
    launch = started["old by launch"]
    assert launch.returncode != 0
    assert "unrecognized arguments: --local-rank=0" in launch.stderr
    for node in ("node 0", "node 1"):  # the same parser, started by torchrun
        assert started[node].returncode == 0, started[node].stderr


@pytest.mark.claim("A12")
def test_one_parser_can_accept_both_spellings(capsys):
    old, both = argparse.ArgumentParser(), argparse.ArgumentParser()
    old.add_argument("--local_rank", type=int)
    both.add_argument("--local-rank", "--local_rank", type=int)
    assert old.parse_args(["--local_rank=1"]).local_rank == 1
    with pytest.raises(SystemExit):
        old.parse_args(["--local-rank=1"])
    assert "unrecognized arguments: --local-rank=1" in capsys.readouterr().err
    for flag in ("--local-rank=1", "--local_rank=1"):
        assert both.parse_args([flag]).local_rank == 1


@pytest.mark.claim("A12")
@pytest.mark.parametrize("flag", ["--local-rank=0", "--local_rank=0", "--local-rank=3"])
def test_the_lesson_accepts_both_spellings(flag, capsys):
    with contextlib.suppress(SystemExit):  # its message is in the comparison below
        assert lesson.main(["--check", flag]) == 0
    assert capsys.readouterr() == ("", "")


def test_world_of_one_needs_no_launcher(started):
    result = passed(started["no launcher"])
    assert (result["world_size"], result["launcher"]) == (1, "none")
    assert result["environment"][0]["MASTER_PORT"] is None
    assert result["rows_per_rank"] == [[30, 30, 30, 10]]


def test_docstring_shows_the_default_run(started):
    lines = started["default"].stdout.splitlines(keepends=True)[:-1]  # the last one is the JSON
    wanted = textwrap.dedent(lesson.__doc__.split("Output to expect on a CPU:")[1].lstrip("\n"))
    assert wanted.startswith("ranks: 2") and "\nPASS " in wanted
    checker = doctest.OutputChecker()
    assert checker.check_output(wanted, "".join(lines), doctest.ELLIPSIS), "".join(lines)


def test_help_starts_nothing(started):
    shown = started["--help"]
    assert shown.returncode == 0 and shown.stderr == ""
    assert lesson.__doc__.splitlines()[0] in shown.stdout
    for flag in ("--steps", "--batch-size", "--seed", "--json", "--backend", "--local-rank"):
        assert flag in shown.stdout


def spelled(flags):
    return " ".join(map(str, flags))


@pytest.mark.parametrize("flags", BAD_FOR_LAUNCHER, ids=spelled)
def test_bad_values_cost_one_line_and_start_nothing(started, flags):
    finished = started[spelled(flags)]
    assert finished.returncode == 2
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert "error: " in line and str(flags[0]) in line  # the line names the flag


@pytest.mark.parametrize("flags", BAD_FOR_LESSON, ids=spelled)
def test_bad_values_of_the_lesson_cost_one_line(monkeypatch, capsys, flags):
    monkeypatch.setattr(lesson, "setup", None)  # calling it would be a TypeError
    with pytest.raises(SystemExit) as stop:
        lesson.main([*map(str, flags)])
    stdout, stderr = capsys.readouterr()
    assert (stop.value.code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert "error: " in line and flags[0] in line


def test_fewer_rows_than_ranks_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert lesson.main(["--check", "--batch-size", "4"]) == 0
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--check", "--batch-size", "3"])
    assert stop.value.code == 2
    assert "at least the number of ranks, 4" in capsys.readouterr().err


@pytest.mark.claim("A11")
def test_nccl_without_gpus_costs_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--backend", "nccl"])
    stdout, stderr = capsys.readouterr()
    assert (stop.value.code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert line.endswith("error: --backend nccl needs a GPU per rank: 2, there are 0")


@pytest.mark.claim("A11")
def test_mpi_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--backend", "mpi"])
    assert stop.value.code == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert line.endswith("error: argument --backend: must be gloo or nccl, not 'mpi'")


@pytest.mark.claim("A11")
def test_backend_is_compared_with_what_the_machine_has(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for gpus, possible in ((0, False), (1, False), (2, True), (8, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert lesson.main(["--check", "--backend", "gloo"]) == 0
        if possible:
            assert lesson.main(["--check", "--backend", "nccl"]) == 0
        else:
            with pytest.raises(SystemExit) as stop:
                lesson.main(["--check", "--backend", "nccl"])
            assert stop.value.code == 2
            assert f"needs a GPU per rank: 2, there are {gpus}\n" in capsys.readouterr().err
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # GPUs, but a CPU build
    with pytest.raises(SystemExit):
        lesson.main(["--check", "--backend", "nccl"])


def test_only_rank_0_writes_the_error(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            lesson.main(["--steps", "0"])
        assert stop.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_check_starts_nothing(monkeypatch, capsys):
    def forbidden(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(lesson, "setup", forbidden)
    monkeypatch.setattr(dist, "init_process_group", forbidden)
    assert lesson.main(["--check", "--steps", "3"]) == 0
    assert capsys.readouterr() == ("", "")
    with pytest.raises(AssertionError, match="something was started"):
        lesson.main(["--steps", "3"])


@pytest.mark.claim("A14")
def test_launcher_sets_omp_num_threads_only_if_unset_and_says_so(started):
    def threads(name):
        return [facts["OMP_NUM_THREADS"] for facts in passed(started[name])["environment"]]

    for unset in ("default", "launch"):
        assert threads(unset) == ["1", "1"]
        assert SAYS_OMP in started[unset].stderr
    assert threads("torchrun 1") == [None]  # one process: left alone
    for line in started["node 0"].stdout.splitlines():
        assert json.loads(line)[-1] == 3  # it was set to 3: kept
    for name in ("torchrun 1", "node 0"):
        assert "OMP_NUM_THREADS" not in started[name].stderr


@pytest.mark.claim("B2")
def test_rank_is_the_number_of_a_process_not_of_a_node(started):
    """Two launchers play two nodes, with two processes each."""
    nodes = [started["node 0"], started["node 1"]]
    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    tables = [sorted(json.loads(line) for line in node.stdout.splitlines()) for node in nodes]
    # rank, local rank, node rank, world size, local world size, threads
    assert tables[0] == [[0, 0, 0, 4, 2, 3], [1, 1, 0, 4, 2, 3]]
    assert tables[1] == [[2, 0, 1, 4, 2, 3], [3, 1, 1, 4, 2, 3]]
    facts = passed(started["default"])["environment"]  # and what the lesson reports of one node
    assert [int(ours["GROUP_RANK"]) for ours in facts] == [0, 0]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_no_gloo_thread_outlives_the_group(started):
    """Else the process can abort at its exit: "terminate called without an active exception"."""
    finished = started["no launcher"]
    assert finished.returncode == 0, finished.stderr
    counts = dict(line.split() for line in finished.stderr.splitlines() if len(line.split()) == 2)
    assert int(counts["during"]) > 0  # so we know what to look for
    assert int(counts["after"]) == 0


# --- Joining the group ---


@pytest.mark.claim("E12", "A10")
def test_env_init_with_four_variables_by_hand(started):
    result = passed(started["by hand 0"])
    assert (result["world_size"], result["launcher"]) == (2, "none")
    assert [facts["RANK"] for facts in result["environment"]] == ["0", "1"]
    assert {facts["LOCAL_RANK"] for facts in result["environment"]} == {None}
    assert started["by hand 1"].returncode == 0, started["by hand 1"].stderr
    assert started["by hand 1"].stdout == ""


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
            missing[name] = str(error)
    os.environ.update(variables)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)  # the two as arguments
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    return missing, (dist.get_rank(), dist.get_world_size(), total.item())


@pytest.mark.claim("E12")
def test_env_init_needs_four_variables_two_of_which_can_be_arguments():
    for rank, (missing, joined) in enumerate(run(join_by_environment, 2, free_ports(1)[0])):
        for name, message in missing.items():
            assert f"environment variable {name} expected" in message
        assert len(missing) == 4
        assert joined == (rank, 2, 3.0)


@pytest.mark.claim("B3")
@pytest.mark.parametrize("nproc", [1, 3])
def test_setup_returns_rank_world_size_and_device(nproc):
    answers = run(lambda rank, world_size: lesson.setup(), nproc)
    assert answers == [(rank, nproc, CPU) for rank in range(nproc)]


def join_with_setup(rank, world_size, port):
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    joined = lesson.setup()
    dist.barrier()  # rank 0 holds the store: it must not leave before the others have joined
    return joined, dist.get_backend(), lesson.setup()  # the second call keeps the group


@pytest.mark.claim("B3", "A10")
def test_setup_joins_the_group_that_the_environment_names():
    for rank, answer in enumerate(run(join_with_setup, 2, free_ports(1)[0])):
        assert answer == ((rank, 2, CPU), "gloo", (rank, 2, CPU))


# --- What goes over the wire ---


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def listen(rank, world_size, steps):
    """Return the collectives of each phase, and what this rank's tensors were after it."""
    rows, targets, _ = lesson.make_toy(seed=0)
    _, _, model = lesson.make_toy(seed=rank)  # other weights on each rank
    calls, seen = {}, {"start": flat(model.parameters())}
    with Wire() as wire:
        replica = DistributedDataParallel(model)
    calls["wrapping"] = wire.calls
    seen["wrapped"] = flat(model.parameters())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with Wire() as wire:
            part = slice(rank, 24, world_size)
            loss = nn.functional.mse_loss(replica(rows[part]), targets[part])
        calls["forward", step] = wire.calls
        alone = flat(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))
        with Wire() as wire:
            loss.backward()
        calls["backward", step] = wire.calls
        seen["before step", step] = flat(model.parameters())
        seen["alone", step] = alone
        seen["gradient", step] = flat(parameter.grad for parameter in model.parameters())
        with Wire() as wire:
            optimizer.step()
        calls["step", step] = wire.calls
        seen["after step", step] = flat(model.parameters())
    return calls, seen


@pytest.fixture(scope="module", params=[2, 3])
def heard(request):
    """Return (world size, [(collectives, tensors) of each rank]) of four steps with DDP."""
    return request.param, run(listen, request.param, 4)


@pytest.mark.claim("A9")
def test_parameters_are_sent_once_when_the_model_is_wrapped(heard):
    _, ranks = heard
    starts = [seen["start"] for _, seen in ranks]
    assert all((start - starts[0]).abs().max() > 1 for start in starts[1:])  # they differed
    for calls, seen in ranks:
        assert torch.equal(seen["wrapped"], starts[0])  # now all have rank 0's
        parameters = ("broadcast", "float64", 12, 96)  # 12 numbers of 8 bytes
        assert calls["wrapping"].count(parameters) == 1
        later = [call for phase, made in calls.items() if phase != "wrapping" for call in made]
        # What is broadcast later is one table of buckets, in integers: no parameters.
        broadcasts = [call for call in later if call.name != "allreduce"]
        assert {call.name for call in broadcasts} <= {"broadcast"}
        assert {call.kind for call in broadcasts} <= {"int32"}
        assert sum(call.nbytes for call in broadcasts) <= 16
        assert calls["forward", 0] == calls["forward", 2] == calls["forward", 3] == []


@pytest.mark.claim("A9")
def test_gradients_are_averaged_in_backward_and_not_in_step(heard):
    world_size, ranks = heard
    for step in range(4):
        mean = sum(seen["alone", step] for _, seen in ranks) / world_size
        for calls, seen in ranks:
            assert calls["backward", step] == [("allreduce", "float64", 12, 96)]
            assert calls["step", step] == []
            assert torch.equal(seen["gradient", step], ranks[0][1]["gradient", step])
            assert (seen["gradient", step] - mean).abs().max() < 1e-12
            assert (seen["alone", step] - mean).abs().max() > 1e-3  # they had been different
            # The update is this rank's own arithmetic.
            updated = seen["before step", step] - 0.1 * seen["gradient", step]
            assert (seen["after step", step] - updated).abs().max() < 1e-12
            assert torch.equal(seen["after step", step], ranks[0][1]["after step", step])


# --- Training ---


def not_wrapped(model):
    return model


@pytest.mark.claim("A9", "A10", "A18")
@pytest.mark.parametrize("nproc", [2, 4])
def test_replicas_stay_equal_with_ddp_and_drift_without(nproc):
    for facts in run(lesson.train, nproc, CPU, 40):
        assert facts["param_spread"] == [0.0] * 40
        assert facts["max_grad_diff"] < 1e-12
        assert facts["loss_last"] < facts["loss_first"] / 10
    for facts in run(lesson.train, nproc, CPU, 40, 30, 0, not_wrapped):
        assert min(facts["param_spread"]) > 0.01
        assert facts["max_grad_diff"] > 0.1


def spread_of_one_change(rank, world_size, where):
    _, _, model = lesson.make_toy(seed=0)
    with torch.no_grad():
        if rank == where:
            model.bias[1] += 2**-40
    return lesson.parameter_spread(model)


@pytest.mark.claim("A18")
@pytest.mark.parametrize("where", [0, 1, 2])
def test_spread_sees_one_changed_parameter_on_any_rank(where):
    for spread in run(spread_of_one_change, 3, where):
        assert 0.5 * 2**-40 < spread < 2 * 2**-40
    assert run(spread_of_one_change, 3, None) == [0.0] * 3


def main_without(rank, world_size, technique, *flags):
    """Run the lesson's main() on a rank, with one technique removed; return exit code, output."""
    train, output = lesson.train, io.StringIO()
    if technique == "ddp":
        lesson.train = lambda *args: train(*args, wrap=not_wrapped)
    elif technique == "learning":
        lesson.train = lambda *args: train(*args) | {"loss_last": 99.0}
    elif technique == "same data":
        make_toy = lesson.make_toy
        lesson.make_toy = lambda seed: make_toy(seed + rank)
    with contextlib.redirect_stdout(output):
        code = lesson.main(["--steps", "4", *flags])
    return code, output.getvalue()


@pytest.mark.claim("A18", "A19")
@pytest.mark.parametrize("technique", [None, "ddp", "learning", "same data"])
def test_main_fails_when_a_technique_is_removed(technique):
    (code, output), (code_1, output_1) = run(main_without, 2, technique)
    verdict = "PASS " if technique is None else "FAIL "
    assert code == code_1 == (0 if technique is None else 1)
    assert output.splitlines()[-1].startswith(verdict)
    assert output_1 == ""  # only rank 0 prints


@pytest.mark.claim("A13")
def test_a_rank_takes_batch_size_over_world_size_rows(started):
    assert passed(started["default"])["rows_per_rank"] == [[15, 15, 15, 5]] * 2
    assert passed(started["torchrun 1"])["rows_per_rank"] == [[30, 30, 30, 10]]
    for nproc, rows in ((3, [10, 10, 10, 4]), (4, [7, 7, 7, 4])):  # 4 ranks: 28 rows, not 30
        code, output = run(main_without, nproc, None, "--json")[0]
        result = json.loads(output.splitlines()[-1])
        assert (code, result["passed"], result["world_size"]) == (0, True, nproc)
        assert result["rows_per_rank"] == [rows] * nproc


# --- Data ---


def dealt(loader):
    """Return the row numbers of one epoch, in order."""
    return [number for _, _, numbers in loader for number in numbers.tolist()]


def shares(world_size, seed=0):
    rows, targets, _ = lesson.make_toy(0)
    return [
        lesson.make_loader(rank, world_size, rows, targets, 30, seed) for rank in range(world_size)
    ]


@pytest.mark.claim("B5", "A10")
@pytest.mark.parametrize("world_size, repeated", [(1, 0), (2, 0), (3, 2), (4, 0), (7, 5)])
def test_sampler_deals_every_row_and_pads_by_repeating(world_size, repeated):
    loaders = shares(world_size)
    assert all(isinstance(loader.sampler, DistributedSampler) for loader in loaders)
    parts = [dealt(loader) for loader in loaders]
    times = Counter(number for part in parts for number in part)
    assert sorted(times) == list(range(100))
    assert times.total() == 100 + repeated
    assert sorted(times.values())[-repeated - 1 :] == [1] + [2] * repeated
    assert {len(part) for part in parts} == {(100 + repeated) // world_size}


@pytest.mark.claim("B5")
def test_padding_falsifies_an_evaluation():
    """Count a property of rows: over padded shares, the share of rows that have it is wrong."""
    has_it = set(range(0, 100, 3))  # 34 of 100 rows
    counted = [number in has_it for loader in shares(3) for number in dealt(loader)]
    assert len(counted) == 102
    assert sum(counted) / len(counted) != pytest.approx(0.34, abs=1e-6)
    even = [number in has_it for loader in shares(4) for number in dealt(loader)]
    assert sum(even) / len(even) == pytest.approx(0.34)


@pytest.mark.claim("B5")
def test_without_set_epoch_the_order_never_changes():
    loader = shares(2)[0]
    epochs = [dealt(loader) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    loader.sampler.set_epoch(1)
    assert dealt(loader) != epochs[0]
    assert dealt(shares(2, seed=5)[0]) != epochs[0]  # the flag --seed


def epochs_of_train(rank, world_size):
    """Return the row numbers that train() used in each of 3 epochs."""
    used, gather = [], lesson.gather_from_ranks

    def watched(tensor):
        if tensor.dtype == torch.int64:
            used.extend(tensor.tolist())
        return gather(tensor)

    lesson.gather_from_ranks = watched
    lesson.train(rank, world_size, CPU, 12)
    return [used[first : first + 50] for first in (0, 50, 100)]


@pytest.mark.claim("B5")
def test_train_shuffles_anew_in_every_epoch():
    ranks = run(epochs_of_train, 2)
    first = ranks[0]
    assert first[0] != first[1] != first[2] != first[0]
    for epoch in zip(*ranks, strict=True):
        assert sorted(epoch[0] + epoch[1]) == list(range(100))


def first_epoch(rank, world_size, distributed):
    rows, targets, _ = lesson.make_toy(seed=0)
    loader = lesson.make_loader(rank, world_size, rows, targets, 30)
    if not distributed:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(loader.dataset, 15, shuffle=True, generator=generator)
    return dealt(loader)


@pytest.mark.claim("C3")
def test_without_a_distributed_sampler_all_ranks_get_the_same_rows():
    zero, one = run(first_epoch, 2, False)
    assert zero == one and sorted(zero) == list(range(100))  # twice the work, nothing shared
    zero, one = run(first_epoch, 2, True)
    assert not set(zero) & set(one) and len(zero) == len(one) == 50


def train_on_own_data(rank, world_size):
    """The article's trap: each process draws its own data; the sampler deals row numbers."""
    make_toy = lesson.make_toy
    lesson.make_toy = lambda seed: make_toy(seed + rank)
    rows = lesson.make_toy(0)[0]
    numbers = dealt(lesson.make_loader(rank, world_size, *lesson.make_toy(0)[:2], 30))
    return lesson.train(rank, world_size, CPU, 40), rows, numbers


@pytest.mark.claim("A19")
def test_own_data_on_each_rank_breaks_the_gradient_but_not_the_spread():
    (right, _) = run(lesson.train, 2, CPU, 40)
    (zero, rows_0, numbers_0), (one, rows_1, numbers_1) = run(train_on_own_data, 2)
    assert sorted(numbers_0 + numbers_1) == list(range(100))  # the sampler dealt as always
    assert not (rows_0 == rows_1).any()  # but these are the numbers of other rows
    for facts in (zero, one):
        assert facts["param_spread"] == [0.0] * 40  # so this check sees nothing
        assert facts["max_grad_diff"] > 0.1
    assert zero["loss_last"] > 2 * right["loss_last"]


@pytest.mark.claim("A19")
def test_fresh_processes_draw_different_data_unless_seeded(started):
    lines = [started[f"by hand {rank}"].stderr.splitlines() for rank in (0, 1)]
    drawn = [float(line.split()[1]) for line in (lines[0][0], lines[1][0])]
    assert drawn[0] != drawn[1]
    toys = run(lambda rank, world_size: lesson.make_toy(3), 2)
    for ours, theirs in zip(toys[0][:2], toys[1][:2], strict=True):
        assert torch.equal(ours, theirs)  # the lesson's toy is the same on every rank


def forward_only(rank, world_size):
    rows, _, model = lesson.make_toy(seed=0)
    replica = DistributedDataParallel(model)
    before = flat(model.parameters())
    with Wire() as wire:
        for _ in range(4):
            replica(rows[rank::world_size])
    unchanged = torch.equal(before, flat(model.parameters()))
    return wire.calls, [parameter.grad for parameter in model.parameters()], unchanged


@pytest.mark.claim("A19")
def test_a_loop_without_backward_sends_nothing():
    assert run(forward_only, 2) == [([], [None, None], True)] * 2


# --- The exercise ---


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_solution_is_right(nproc):
    assert check(solution, nproc) is None


def test_ddp_itself_is_right():
    assert check(DistributedDataParallel) is None


def hook_all(model, hook):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def stub(model):
    raise NotImplementedError


def only_start(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return model


def only_average(model):
    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    return hook_all(model, average)


def sum_instead_of_mean(model):
    return hook_all(only_start(model), lambda parameter: dist.all_reduce(parameter.grad) and None)


def start_from_the_last_rank(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=dist.get_world_size() - 1)
    return only_average(model)


def average_only_once(model):
    done = set()

    def average(parameter):
        if parameter not in done:
            done.add(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return hook_all(only_start(model), average)


def returns_nothing(model):
    solution(model)


@pytest.mark.parametrize(
    "attempt, verdict",
    [
        (stub, "not attempted"),
        (not_wrapped, "not yet: after the wrapping, rank 1"),
        (only_average, "not yet: after the wrapping, rank 1"),
        (start_from_the_last_rank, "not yet: after the wrapping, rank 0"),
        (only_start, "not yet: after backward(), rank 0"),
        (sum_instead_of_mean, "not yet: after backward(), rank 0"),
        (average_only_once, "not yet: over 8 steps, a gradient is"),
        (returns_nothing, "not yet: RankFailed: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_attempts_are_not_right(attempt, verdict):
    assert judge(check, attempt).startswith(verdict)


def test_an_attempt_that_raises_names_the_rank():
    def fails(model):
        raise ValueError("my own mistake")

    with pytest.raises(RankFailed, match=r"rank \d: ValueError: my own mistake"):
        check(fails)


# --- GPUs ---


@pytest.mark.gpu
@pytest.mark.claim("A11", "A12")
def test_on_gpus_each_rank_has_its_own():
    gpus = min(2, torch.cuda.device_count())
    result = passed(execute(*LAUNCHER, "--json", "--nproc", gpus, "--backend", "nccl"))
    assert (result["backend"], result["device"], result["world_size"]) == ("nccl", "cuda", gpus)
    assert result["param_spread"] == [0.0] * 40
