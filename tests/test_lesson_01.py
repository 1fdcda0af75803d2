"""Lesson 01: the moves of nn.DataParallel, against one device and against the library."""

import copy

import lesson_01_data_parallel as lesson
import pytest
import torch
from torch import nn

COPY = 12 * 8  # bytes of one copy of the parameters: a layer 5 -> 2 in float64

# Rows inside the model, in the four steps of an epoch of 100 rows in batches of 30.
ROWS_INSIDE = {
    1: [[30], [30], [30], [10]],
    2: [[15, 15], [15, 15], [15, 15], [5, 5]],
    3: [[10, 10, 10], [10, 10, 10], [10, 10, 10], [4, 4, 2]],
    4: [[8, 8, 8, 6], [8, 8, 8, 6], [8, 8, 8, 6], [3, 3, 3, 1]],
    8: [[4, 4, 4, 4, 4, 4, 4, 2]] * 3 + [[2, 2, 2, 2, 2]],
}


@pytest.fixture(autouse=True)
def one_thread_for_backward():
    with torch.autograd.set_multithreading_enabled(False):
        yield


def setup(count, size, seed=3):
    """Return devices, the model alone, and model, rows, targets on the first device."""
    rows, targets, alone = lesson.make_toy(seed)
    devices = lesson.find_devices(count)
    placed = [lesson.place(thing, devices[0]) for thing in (alone, rows[:size], targets[:size])]
    return devices, alone, rows[:size], targets[:size], *placed


@pytest.mark.claim("A1", "A5", "A6")
@pytest.mark.parametrize("nproc", ROWS_INSIDE)
def test_main_passes_and_counts(nproc):
    passed, claim, result = lesson.main(nproc=nproc)
    assert passed and "one device and of nn.DataParallel" in claim
    assert result["rows_per_replica"] == ROWS_INSIDE[nproc]
    assert result["rows_outside"] == [30, 30, 30, 10]
    copies = [len(parts) - 1 for parts in ROWS_INSIDE[nproc]]  # devices without rows get nothing
    for what in ("parameters", "gradients"):
        assert [step[what] for step in result["bytes_per_step"]] == [n * COPY for n in copies]
    assert result["loss_last"] < result["loss_first"] / 10


@pytest.mark.claim("A1", "A2", "A5")
@pytest.mark.parametrize("size", [30, 10, 5, 7])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_ours_and_the_library_are_one_device(count, size):
    """Rows are counted by a hook in the model, outputs compared in order, and gradients."""
    devices, alone, rows, targets, model, here, goals = setup(count, size)
    expected = lesson.backward(alone, alone, rows, targets)
    seen = []
    model.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    library = nn.DataParallel(model, list(range(count)))
    for forward in (lambda x: lesson.data_parallel(model, x, devices), library):
        seen.clear()
        outputs = forward(here).detach().cpu()
        assert (outputs - alone(rows)).abs().max() < 1e-12
        assert sorted(seen, reverse=True) == [(len(part), 5) for part in rows.chunk(count)]
        assert (lesson.backward(model, forward, here, goals) - expected).abs().max() < 1e-12


@pytest.mark.claim("A1")
@pytest.mark.parametrize("missing", ["gradients", "other parts", "learning"])
def test_main_fails_when_a_technique_is_removed(monkeypatch, missing):
    replicate, scatter = lesson.replicate, lesson.scatter
    if missing == "gradients":
        frozen = lambda model: copy.deepcopy(model).requires_grad_(False)  # noqa: E731
        change = "replicate", lambda m, d: replicate(frozen(m) if d.index else m, d)
    elif missing == "other parts":
        change = "scatter", lambda rows, devices: [scatter(rows, devices)[0]] * 2
    else:
        rows, _, model = lesson.make_toy(0)
        change = "make_toy", lambda seed: (rows, model(rows).detach(), model)
    monkeypatch.setattr(lesson, *change)
    try:
        passed, _, _ = lesson.main(steps=4)
    except (RuntimeError, ValueError):  # tensors of two devices, or of two sizes
        passed = False
    assert not passed


@pytest.mark.gpu
@pytest.mark.claim("A1", "A2", "A5")
def test_on_gpus():
    devices = lesson.find_devices(torch.cuda.device_count())
    assert devices[0].type == "cuda"
    result = lesson.measure(devices, steps=8, batch_size=30)
    assert max(result["max_grad_diff"], result["max_diff_to_data_parallel"]) < 1e-12
