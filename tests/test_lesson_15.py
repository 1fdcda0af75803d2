"""Lesson 15: one model in four frameworks, each of which has a process of its own.

No framework is imported here: the breaks of each run in one process, and the verdict is NumPy's.
"""

import json

import lesson_15_four_frameworks as lesson
import numpy as np
import pytest
from breaks import check_breaks

ALL = pytest.mark.needs("tensorflow", "paddle", "jax")

ADDED = 'added = {"aggregation": tf.VariableAggregation.SUM}'
PADDLES = "mine = [paddle.to_tensor(array[rank::world_size])"
TORCHS = "mine = [torch.from_numpy(array[rank::world_size])"
ALL_ROWS = "(array if array.dtype.kind == 'i' else array / world_size)"  # right, but a waste
CLEAR = "optimizer.clear_grad()\n        return loss\n\n    return step\n\n\ndef pytorch_ddp"
PADDLE_UPDATE = "optimizer.step()  # 6: on each rank\n        optimizer.clear_grad()"
PADDLE_MERGE = "[paddle.distributed.broadcast(p, 0) for p in layer.parameters()]"
UPDATE = "optimizer.step()  # 6: on each rank\n        optimizer.zero_grad()"
OWN = 'own = jax.lax.pcast(weights, "data", to="varying")'
FOUND = 'jax.lax.psum(found, "data")'
LOCAL = "with tf.GradientTape() as tape:\n            loss = loss_of(variables, *mine)"

# "<way>: what is wrong"
BREAKS = {
    "tensorflow towers: not merged": ("for found in gradients", "for found in gradients[:1]"),
    "tensorflow towers: all rows for each": (
        "mine = [array[number :: len(devices)] for array in batch]  # 2\n            with",
        "mine = [*batch[:2], batch[2] / len(devices)]\n            with",
    ),
    "tensorflow towers: on one device": ("with tf.device(device):", "with tf.device(devices[0]):"),
    "tensorflow mirrored: not merged": (ADDED, ADDED.replace("SUM", "ONLY_FIRST_REPLICA")),
    "tensorflow mirrored: forward on one device": (
        LOCAL,
        LOCAL.replace("with", "with tf.device(devices[0]),"),
    ),
    "paddle: no copy of rank 0's weights": (
        "DataParallel(layer)",
        "DataParallel(layer)\n    [p.set_value(p * (1 + rank)) for p in layer.parameters()]",
    ),
    "paddle: no DataParallel": ("paddle.DataParallel(layer)", "layer"),
    "paddle: all rows for each": (PADDLES, PADDLES.replace("array[rank::world_size]", ALL_ROWS)),
    "paddle: no clear_grad": (CLEAR, "return loss\n\n    return step\n\n\ndef pytorch_ddp"),
    "paddle: rank 0 alone updates": (
        PADDLE_UPDATE,
        f"rank or {PADDLE_UPDATE}\n        world_size > 1 and {PADDLE_MERGE}",
    ),
    "pytorch: other weights": ("torch.tensor(w *", "torch.tensor(1.01 * w *"),
    "pytorch: no copy of rank 0's weights": ("Parallel(model)", "Parallel(model, init_sync=False)"),
    "pytorch: no DDP": ("DistributedDataParallel(model)", "model"),
    "pytorch: all rows for each": (TORCHS, TORCHS.replace("array[rank::world_size]", ALL_ROWS)),
    "pytorch: one worker does not update": (UPDATE, "rank or " + UPDATE),
    "pytorch: two all-reduces": (
        UPDATE,
        "[dist.all_reduce(w.grad.clone()) for w in model.parameters()]\n        " + UPDATE,
    ),
    "jax shard_map: the trap": (OWN, "own = weights"),
    "jax shard_map: two all-reduces": (
        FOUND,
        FOUND.replace("found", "jax.lax.pmean(found, 'data')"),
    ),
    "jax shard_map: gathers all rows": (
        "        found = jax.value_and_grad(loss_of)(own",
        "        mine = [jax.lax.all_gather(m, 'data', tiled=True) for m in mine]\n"
        "        mine[2] = mine[2] / jax.lax.axis_size('data')\n"
        "        found = jax.value_and_grad(loss_of)(own",
    ),
    "jax jit: the inputs alone are divided": (
        "it, rows, rows, rows)",
        "it, rows, *[all_of_it] * 2)",
    ),
}


@ALL
def test_each_break_ends_in_fail():
    check_breaks(15, BREAKS, (3,), "--steps", 3, "--batch-size", 7)


# --- The whole script ---


@ALL
@pytest.mark.claim("D2", "D6")
def test_four_frameworks_train_alike(default_run):
    run = default_run(15)
    facts = run.json
    assert run.stderr == "" and facts["world_size"] == 2 and facts["missing"] == []
    assert sorted(facts["frameworks"]) == ["jax", "paddle", "pytorch", "tensorflow"]
    assert len(facts["max_grad_diff"]) == 6 and max(facts["max_grad_diff"].values()) < 1e-10
    for first, last in zip(facts["loss_first"].values(), facts["loss_last"].values(), strict=True):
        assert first == pytest.approx(np.log(500), abs=0.05) and last < first - 0.5
    sent, whole = facts["bytes_per_step"], 8 * facts["weights"]
    assert sent["pytorch"] == whole and sent["jax shard_map"] == whole + 8  # the loss, too
    assert sent["jax jit"] > 2 * whole and sent["paddle"] is None
    assert 1.5 * whole < sent["tensorflow towers"] < 2 * whole < sent["tensorflow mirrored"]
    assert set(map(sum, facts["rows_per_step"].values())) == {32}
    assert min(facts["lines_added"].values()) > 0


@pytest.fixture
def without_processes(monkeypatch):
    """Return a function: the lesson's main(), as if these frameworks were there, and right."""

    def main(*frameworks, off=0.0):
        def in_processes(there, nproc, folder):
            first, batches = lesson.load_problem(folder)
            after = {name: w - 0.01 for name, w in first.items()}
            seen = {
                "loss": [np.log(500)] * len(batches),
                "after_one": after,
                "weights": [after] * 3,
            }
            seen |= {"alone": after, "rows": [11] * 3, "bytes": None}
            found = {way: dict(seen) for name in there for way in lesson.ways_of(name)}
            other = {name: w - off for name, w in after.items()}
            found["pytorch" if "pytorch" in there else "jax jit"]["after_one"] = other
            return found

        there = [{"pytorch": "torch"}.get(name, name) for name in frameworks]
        monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: name in there or None)
        monkeypatch.setattr(lesson, "in_processes", in_processes)
        return lesson.main(lesson.parse_args(["--steps", "2", "--nproc", "3"]))

    return main


def test_what_is_not_installed_is_named_and_left_out(without_processes, capsys):
    passed, claim, numbers = without_processes("pytorch", "jax")
    assert passed and numbers["missing"] == ["tensorflow", "paddle"], claim
    assert numbers["frameworks"] == ["pytorch", "jax"]
    assert list(numbers["max_grad_diff"]) == ["pytorch and jax"]
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in said if "left" in words] == ["tensorflow", "paddle"]
    json.dumps(numbers)


def test_one_framework_is_nothing_to_compare(without_processes):
    for there in (["jax"], []):
        passed, claim, _ = without_processes(*there)
        assert not passed and "of 4 frameworks two are needed" in claim


def test_a_framework_that_differs_and_a_wrong_problem_are_named(without_processes, monkeypatch):
    passed, claim, _ = without_processes("pytorch", "jax", off=1e-6)
    assert not passed and "pytorch: its gradient is off by 0.0001" in claim
    first, batches = lesson.make_problem(lesson.parse_args(["--steps", "2"]))
    unshifted = first, [(inputs, inputs, share) for inputs, _, share in batches]
    monkeypatch.setattr(lesson, "make_problem", lambda args: unshifted)
    passed, claim, _ = without_processes("pytorch", "jax")
    assert not passed and claim.endswith("the targets are not the words that follow")
