"""Lesson 03: ranks that a script starts itself, real data, an evaluation that counts once."""

import contextlib
import io
import os
import sys
from unittest.mock import patch

import cloudpickle
import lesson_03_spawn_ddp as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, run_lesson, start_lesson
from nbtools import run
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.utils.data import DistributedSampler

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")


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
