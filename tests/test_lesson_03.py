"""Lesson 03: ranks that a script starts itself, real data, an evaluation that counts once."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import cloudpickle
import lesson_03_spawn_ddp as lesson
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, run_lesson, start_lesson
from nbtools import run
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.utils.data import DistributedSampler

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
DEADLINE = 60  # seconds within which no process of a job that has ended may be left
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Give each process one thread: threads that share a core with another job wait long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")
        yield


# --- The whole script ---


def test_main_fails_for_each_part_of_the_claim(capsys):
    right = torch.diag(torch.tensor([28] * 9 + [45]))  # 297 images
    good = {"backend": "gloo", "device": "cpu", "counts": right.tolist()}
    good |= {"loss_per_rank": [[2.0], [2.0]], "param_change": 0.1, "param_spread": 0.0}
    wrong = right.clone()
    wrong[9] = torch.tensor([15] + [0] * 8 + [30])  # 15 images of 297: 0.9495
    changes = {"accuracy": {"counts": wrong.tolist()}, "count": {"counts": (right * 2).tolist()}}
    changes |= {"spread": {"param_spread": 1e-9}, "nothing moved": {"param_change": 0.0}}
    changes |= {"nan": {"param_change": float("nan")}}

    def verdict(change, **flags):
        with patch.object(lesson, "launch_job", lambda *_: good | change):
            return lesson.main(**flags)[0]

    with contextlib.redirect_stdout(io.StringIO()):
        assert verdict({})
        assert [name for name in changes if verdict(changes[name])] == []
        assert verdict(changes["accuracy"], steps=5)  # too few steps to ask for 0.95


@pytest.mark.claim("C9")
def test_two_jobs_at_once_both_pass(tmp_path):
    jobs = [start_lesson(3, "--steps", 2, "--nproc", n, cwd=tmp_path) for n in (2, 3)]
    for job in jobs:
        stdout, stderr = job.communicate(timeout=300)
        assert job.returncode == 0, stderr
        assert stdout.splitlines()[-1].startswith("PASS ")


def test_fewer_images_than_ranks_are_refused():
    finished = run_lesson(3, "--nproc", 4, "--batch-size", 3)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "--batch-size: must be at least --nproc, 4" in finished.stderr


# --- Starting ranks. They import this file, so nothing runs at its top level. ---


def report_process(rank, world_size, device, seed):
    total = torch.tensor(rank + 1, device=device)
    dist.all_reduce(total)
    facts = {"rank": rank, "world_size": world_size, "sum": total.item(), "seed": seed}
    return facts | {"pid": os.getpid(), "threads": torch.get_num_threads()}


@pytest.mark.claim("B4", "C2")
@pytest.mark.parametrize("nproc", [1, 2])
def test_launch_job_returns_what_rank_0_returned(nproc):
    before = dict(os.environ)
    facts = lesson.launch_job(report_process, nproc, 5)
    assert (facts["pid"] == os.getpid()) == (nproc == 1)
    expected = {"rank": 0, "world_size": nproc, "sum": nproc * (nproc + 1) // 2, "seed": 5}
    assert {name: facts[name] for name in expected} == expected
    assert facts["threads"] == max(1, torch.get_num_threads() // nproc)
    assert dict(os.environ) == before and not dist.is_initialized()


def fail_on_rank_1(rank, world_size, device, how):
    if rank == 1 and how == "raise":
        raise ValueError("no such digit\nsecond line")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.claim("B7")
@pytest.mark.parametrize("how, reason", [("raise", "ValueError: no such digit"), ("kill", "KILL")])
def test_a_rank_that_fails_ends_the_job_and_is_named(how, reason):
    start = time.monotonic()
    fail = lambda *_: lesson_launch_job(fail_on_rank_1, 3, how)  # noqa: E731
    lesson_launch_job = lesson.launch_job
    with patch.object(lesson, "launch_job", fail), pytest.raises(SystemExit) as stop:
        lesson.main(nproc=3)
    assert time.monotonic() - start < 100  # the group's own timeout is two minutes
    assert re.fullmatch(rf"rank 1 failed: .*{reason}.*", stop.value.code.splitlines()[-1])
    family = psutil.Process().children(recursive=True)
    assert [child for child in family if "spawn_main" in " ".join(child.cmdline())] == []


JOB = """
import signal, sys, time
from pathlib import Path
import lesson_03_spawn_ddp as lesson

def work(rank, world_size, device, mode):
    if mode == "deaf":  # as a rank that waits for its neighbours inside C++ code
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    data, workers = lesson.load_data()[0], 2 if mode == "workers" else 0
    Path(sys.argv[1], f"ready_{rank}").touch()
    if mode == "workers":
        for _ in lesson.train(rank, 2, device, data, lesson.make_model(), 10**6, 60, 0, workers):
            pass
    time.sleep(1000)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as main() does
    lesson.launch_job(work, 2, sys.argv[2])
"""


@LINUX
@pytest.mark.parametrize(
    "mode, sign",
    [("plain", signal.SIGINT), ("workers", signal.SIGTERM), ("deaf", signal.SIGKILL)],
)
def test_a_launcher_that_ends_leaves_nobody_behind(tmp_path, mode, sign):
    """Nor a data loader worker that is still importing, nor a folder, if there was time for it."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    paths = {"PYTHONPATH": str(ROOT / "lessons"), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, tmp_path / "job.py", tmp_path, mode]
    options = {"env": {**ENVIRONMENT, **paths}, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, **options)
    family, end = [], time.monotonic() + 200
    expected = 7 if mode == "workers" else 3  # two ranks and Python's resource tracker, workers
    try:
        while len(family) < expected or len(list(tmp_path.glob("ready_*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
            family = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(sign)
        assert launcher.wait(60) != 0
        assert psutil.wait_procs(family, timeout=DEADLINE)[1] == []
        left = [path.name for path in (tmp_path / "tmp").iterdir()]
        ours = [name for name in left if not name.startswith(("pymp-", "torchinductor_"))]
        assert sign == signal.SIGKILL or ours == []
    finally:
        for child in [launcher, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        launcher.wait()


# --- Training and evaluation ---


def order_of_epochs(rank, world_size):
    epochs = []

    class Watched(DistributedSampler):
        def __iter__(self):
            epochs.append(list(super().__iter__()))
            return iter(epochs[-1])

    lesson.DistributedSampler = Watched
    train_set, _ = lesson.load_data()
    training = lesson.train(rank, world_size, CPU, train_set, lesson.make_model(), 5, 750)
    assert len([next(training) for _ in range(3)]) == 3  # two steps are an epoch
    return epochs


def test_every_epoch_has_a_new_order():
    (first_0, second_0), (first_1, second_1) = run(order_of_epochs, 2)
    assert first_0 != second_0
    assert sorted(first_0 + first_1) == sorted(second_0 + second_1) == list(range(1500))


def evaluate_in_both_modes(rank, world_size):
    """Evaluate with dropout in the model; return the counts, and the modes found afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    test_set, found = lesson.load_data()[1], []
    for training in (True, False):
        model.train(training)
        counts = lesson.evaluate(rank, world_size, CPU, model, test_set)
        found.append((counts, model.training, model[1].training))
    return found


@pytest.mark.claim("C3")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_evaluation_counts_each_image_once_and_leaves_the_mode(nproc):
    (alone, *_), _ = run(evaluate_in_both_modes, 1)[0]
    for (one, mode_1, inner_1), (other, mode_2, inner_2) in run(evaluate_in_both_modes, nproc):
        assert torch.equal(one, other) and torch.equal(one, alone) and one.sum() == 297
        assert (mode_1, inner_1, mode_2, inner_2) == (True, True, False, False)


def test_scores_are_those_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels, answers = torch.randint(0, 10, (2, 500), generator=generator)
    counts = torch.bincount(labels * 10 + answers, minlength=100).reshape(10, 10)
    assert lesson.accuracy(counts) == pytest.approx(accuracy_score(labels, answers))
    expected = f1_score(labels, answers, average="macro")
    assert lesson.macro_f1(counts) == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.claim("C1", "C9")
def test_one_process_per_gpu():
    nproc = min(4, torch.cuda.device_count())
    result = run_lesson(3, "--nproc", nproc, "--json").json
    assert (result["backend"], result["device"]) == ("nccl", "cuda")
    assert result["passed"] is True and result["images_evaluated"] == 297
