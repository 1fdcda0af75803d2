"""Lesson 02: one process per replica, started by a launcher, kept in step by DDP."""

import os
import subprocess
import sys
from unittest.mock import patch

import cloudpickle
import lesson_02_launch_ddp as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, run_lesson
from nbtools import run

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")


@pytest.mark.claim("A10", "A12", "A13", "A18", "B3")
def test_default_run(default_run):
    result = default_run(2).json
    assert (result["world_size"], result["launcher"]) == (2, "torchrun")
    assert (result["backend"], result["device"]) == ("gloo", "cpu")
    assert result["param_spread"] == [0.0] * 40  # exactly 0, after each step
    assert result["max_grad_diff"] < 1e-12
    assert result["loss_last"] < result["loss_first"] / 10
    assert result["rows_per_rank"] == [[15, 15, 15, 5]] * 2
    ranks = [(facts["RANK"], facts["LOCAL_RANK"]) for facts in result["environment"]]
    assert ranks == [("0", "0"), ("1", "1")]


def main_without(rank, world_size, technique):
    """Run main() on a rank, whose group exists already, with one technique removed."""
    make_toy, collect = lesson.make_toy, lesson.collect
    changes = {"join_group": lambda backend: (rank, world_size, CPU), "report": lambda _: None}
    if technique == "ddp":
        changes["DistributedDataParallel"] = lambda model: model
    if technique == "learning":
        changes["collect"] = lambda facts: collect(facts) | {"loss_last": 99.0}
    if technique == "equal parameters":
        changes["collect"] = lambda facts: collect(facts) | {"param_spread": [0.0, 1e-9]}
    if technique == "same data":
        changes["make_toy"] = lambda seed: (*make_toy(seed + rank)[:2], make_toy(seed)[2])
    with patch.multiple(lesson, **changes):
        passed, _, _ = lesson.main(steps=4)
    return passed


@pytest.mark.claim("A18", "A19")
@pytest.mark.parametrize("technique", ["none", "ddp", "learning", "equal parameters", "same data"])
def test_main_fails_when_a_technique_is_removed(technique):
    assert run(main_without, 2, technique) == [technique == "none"] * 2


def rows_of_epochs(rank, world_size):
    """Return the numbers of the rows that train() used, in each of two epochs."""
    numbers = torch.arange(100.0).double().reshape(100, 1)
    data = lesson.TensorDataset(numbers, torch.zeros(100, 1).double())
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    training = lesson.train(rank, world_size, CPU, data, model, epochs=2, batch_size=50)
    used = [int(number) for rows, _ in training for number in rows]
    return used[:50], used[50:]


def test_train_shuffles_anew_in_every_epoch_and_the_shares_are_the_data():
    (first_0, second_0), (first_1, second_1) = run(rows_of_epochs, 2)
    assert sorted(first_0 + first_1) == sorted(second_0 + second_1) == list(range(100))
    assert first_0 != second_0 and sorted(first_0) != sorted(second_0)


def compare_after_one_change(rank, world_size, where):
    """Change one parameter by its last bits on one rank; return what the comparisons say."""
    _, _, model = lesson.make_toy(seed=0)
    with torch.no_grad():
        if rank == where:
            model.bias[1] += 2**-40
    return lesson.parameter_spread(model), lesson.replicas_agree(model)


@pytest.mark.claim("A18")
@pytest.mark.parametrize("where", [None, 0, 2])
def test_comparisons_see_one_changed_parameter_on_any_rank(where):
    for spread, agree in run(compare_after_one_change, 3, where):
        assert agree == (where is None)
        assert spread == 0 if where is None else 0.5 * 2**-40 < spread < 2 * 2**-40


@pytest.mark.claim("A11")
def test_a_backend_that_can_not_work_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for gpus, possible in ((0, False), (1, False), (2, True), (8, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert lesson.refuse(batch_size=30, backend="gloo") is None
        answer = lesson.refuse(batch_size=30, backend="nccl")
        assert answer is None if possible else f"2 ranks; there are {gpus}" in answer
    assert "at least the number of ranks, 2" in lesson.refuse(batch_size=1, backend="gloo")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # GPUs, but a CPU build
    assert lesson.refuse(batch_size=30, backend="nccl") is not None


BAD = {"--nproc 0": "--nproc", "--nproc two": "--nproc", "--nproc 65": "--nproc", "--nproc": "one"}
BAD |= {"--launcher mpirun": "--launcher", "--steps 0": "--steps", "--backend mpi": "not mpi"}
BAD |= {"--backend nccl": "needs a GPU"}  # the last three are answered by the lesson itself


@pytest.mark.claim("A11")
@pytest.mark.parametrize("flags", BAD)
def test_bad_values_cost_one_line_and_no_rank_is_started(flags):
    finished = run_lesson(2, *flags.split(), env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""})
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert "error: " in line and BAD[flags] in line


ALONE = """
import glob, sys
import lesson_02_launch_ddp as lesson

def gloo_threads():
    names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    return sum("gloo" in name for name in names)

collect = lesson.collect
def watched(facts):
    print("during", gloo_threads(), file=sys.stderr)
    return collect(facts)

lesson.collect = watched
code = lesson.start(lesson.main)
print("after", gloo_threads(), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_a_world_of_one_needs_no_launcher_and_no_gloo_thread_outlives_the_group():
    """Else the process can abort at its exit: "terminate called without an active exception"."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    command = [sys.executable, "-c", ALONE, "--steps", "4"]
    options = {"cwd": ROOT / "lessons", "env": environment | {"CUDA_VISIBLE_DEVICES": ""}}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert finished.returncode == 0, finished.stderr
    assert "ranks: 1, over gloo on cpu, started by none" in finished.stdout
    counts = dict(line.split() for line in finished.stderr.splitlines())
    assert int(counts["during"]) > 0 and int(counts["after"]) == 0


@pytest.mark.gpu
@pytest.mark.claim("A11", "A12")
def test_on_gpus_each_rank_has_its_own():
    gpus = min(2, torch.cuda.device_count())
    result = run_lesson(2, "--json", "--nproc", gpus, "--backend", "nccl").json
    assert (result["backend"], result["device"], result["world_size"]) == ("nccl", "cuda", gpus)
    assert result["passed"] and result["param_spread"] == [0.0] * 40
