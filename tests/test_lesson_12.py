"""Lesson 12: the layers of one model on several ranks, by three schedules, equal to one process."""

import json
import sys
from unittest.mock import patch

import cloudpickle
import lesson_12_pipeline_parallel as lesson
import pytest
import torch
from conftest import run_lesson, run_warm
from nbtools import run

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
MESSAGE = 32 * 32 * 8  # bytes: rows, width, float64


@pytest.mark.claim("D1", "D3")
def test_default_run(default_run):
    result = default_run(12).json
    assert (result["world_size"], result["schedule"], result["micro_batches"]) == (2, "1f1b", 4)
    assert result["stages"] == [4, 4]
    assert result["max_grad_diff"] < 1e-12 and result["library_diff"] < 1e-12
    assert result["bytes_sent"] == [MESSAGE, MESSAGE]
    assert result["loss_last"] < result["loss_first"] / 2


def measure_all(rank, world_size, runs):
    return [lesson.measure(rank, world_size, CPU, 2, 32, m, schedule)[0] for m, schedule in runs]


@pytest.mark.claim("D1", "D3")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process(stages):
    """Uneven cuts too: 8 layers on 3 ranks are 2, 3 and 3."""
    runs = [(m, schedule) for m in (1, 2, 4, 8) for schedule in ("gpipe", "1f1b")]
    ranks = run(measure_all, stages, runs, deadline=300)
    for (m, schedule), *facts in zip(runs, *ranks, strict=True):
        assert max(own["max_grad_diff"] for own in facts) < 1e-12
        assert max(own["library_diff"] for own in facts) < 1e-12
        actions = [own["actions"] for own in facts]
        assert lesson.bubble(actions) == pytest.approx((stages - 1) / (m + stages - 1), abs=1e-12)
        for rank, own in enumerate(facts):
            neighbours = {peer for peer in (rank - 1, rank + 1) if 0 <= peer < stages}
            assert own["sent"] == dict.fromkeys(neighbours, MESSAGE)
            alive = m if schedule == "gpipe" else min(m, stages - rank)
            assert lesson.alive_at_most(own["actions"]) == alive


def test_the_logical_clock_is_that_of_two_ranks_worked_out_by_hand():
    """Two stages, two micro-batches: F 1 tick, B 2 ticks; rank 1 begins at tick 1."""
    actions = [lesson.one_forward_one_backward(rank, 2, 2) for rank in range(2)]
    ends = lesson.logical_clock(actions)
    assert [ends[1, *action] for action in actions[1]] == [2, 4, 5, 7]  # F0 B0 F1 B1
    assert [ends[0, *action] for action in actions[0]] == [1, 2, 6, 9]  # F0 F1 B0 B1
    assert lesson.bubble(actions) == pytest.approx(1 - 12 / 18)
    ends = lesson.logical_clock(actions, lengths=[1, 2], message=0.5)
    assert [ends[1, *action] for action in actions[1]] == [3.5, 7.5, 9.5, 13.5]
    assert [ends[0, *action] for action in actions[0]] == [1, 2, 10, 16]
    assert lesson.bubble(actions, [1, 2]) == pytest.approx(1 - 18 / 30)


def forget_the_last(rank, world_size, micro_batches):
    return lesson.one_forward_one_backward(rank, world_size, micro_batches - 1)


def one_by_one(rank, world_size, micro_batches):
    return [(kind, n) for n in range(micro_batches) for kind in ("forward", "backward")]


def main_without(rank, world_size, technique):
    """Run main() on a rank, whose group exists already, with one technique removed."""
    collect = lesson.collect
    changes = {"join_group": lambda: (rank, world_size, CPU), "report": lambda _: None}
    if technique == "messages":
        changes["exchange"] = lambda messages: None
    if technique == "a micro-batch":
        changes["SCHEDULES"] = {"1f1b": forget_the_last}
    if technique == "work at the same time":
        changes["SCHEDULES"] = {"1f1b": one_by_one}
    if technique == "equal to the library":
        changes["collect"] = lambda *facts: collect(*facts) | {"library_diff": 1e-9}
    if technique == "learning":
        changes["collect"] = lambda *facts: collect(*facts) | {"loss_last": 99.0}
    with patch.multiple(lesson, **changes):
        passed, _, _ = lesson.main(steps=4)
    return passed


TECHNIQUES = ["none", "messages", "a micro-batch", "work at the same time"]
TECHNIQUES += ["equal to the library", "learning"]


@pytest.mark.claim("D3")
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_main_fails_when_a_technique_is_removed(technique):
    assert run(main_without, 2, technique) == [technique == "none"] * 2


def train_on_other_batches(rank, world_size):
    """Train 3 steps on different batches; return the stage's layers by name."""
    model, rows, targets = lesson.make_chain(48)
    stage = lesson.split(model, world_size)[rank]
    batches = list(zip(rows.split(16), targets.split(16), strict=True))
    if rank > 0:  # only the first rank uses the values of rows, and only the last the targets
        batches = [(torch.full_like(rows, torch.nan), targets) for rows, targets in batches]
    if rank < world_size - 1:
        batches = [(rows, torch.full_like(targets, torch.nan)) for rows, targets in batches]
    list(lesson.train(rank, world_size, stage, batches, lesson.one_forward_one_backward, 4))
    return stage.state_dict()


def test_a_rank_uses_its_own_layers_and_what_it_receives_and_nothing_else():
    layers = run(train_on_other_batches, 3)
    model, rows, targets = lesson.make_chain(48)
    batches = list(zip(rows.split(16), targets.split(16), strict=True))
    list(lesson.train_alone(model, batches))
    joined = {name: tensor for own in layers for name, tensor in own.items()}
    assert joined.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert (joined[name] - tensor).abs().max() < 1e-12, name


@pytest.mark.claim("D3")
def test_the_other_two_schedules_pass_too():
    for schedule, idle in (("naive", 3 / 4), ("gpipe", 3 / 11)):
        flags = ("--schedule", schedule, "--micro-batches", 8, "--steps", 2, "--json")
        (code, stdout), *_ = run_warm(lesson.__file__, 4, *flags)
        result = json.loads(stdout.splitlines()[-1])
        assert code == 0 and result["passed"] is True
        assert result["bubble"] == pytest.approx(idle, abs=1e-12)
        assert result["alive"] == [1 if schedule == "naive" else 8] * 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--micro-batches 5", "--micro-batches: 5 do not divide the batch of 32 rows"),
        ("--nproc 9", "--nproc: at most 8 ranks"),
        ("--schedule 2f2b", "--schedule"),
    ],
)
def test_flags_that_do_not_fit_cost_one_line(flags, words):
    finished = run_lesson(12, *flags.split())
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert "error: " in line and words in line


@pytest.mark.gpu
@pytest.mark.claim("D3")
def test_on_gpus_the_messages_go_by_nccl():
    gpus = min(4, torch.cuda.device_count())
    if gpus < 2:
        pytest.skip("needs two GPUs: one sends no message")
    for schedule in lesson.SCHEDULES:
        result = run_lesson(12, "--json", "--nproc", gpus, "--schedule", schedule).json
        assert (result["backend"], result["device"]) == ("nccl", "cuda")
        assert result["passed"]
