"""Lesson 15: one model in four frameworks, each of which has a process of its own.

No framework is imported here: the breaks of each run in one process, and the verdict is NumPy's.
"""

import importlib.util
import json

import numpy as np
import pytest
from breaks import check_breaks
from lockstep import lessons, proofs

LESSON = lessons.find("15")

ALL = pytest.mark.needs("tensorflow", "paddle", "jax")

PADDLES = "paddle.to_tensor(array[rank::world_size])"
TORCHS = "torch.from_numpy(array[rank::world_size])"
ALL_ROWS = "(array if array.dtype.kind == 'i' else array / world_size)"  # right, but a waste
PADDLE_UPDATE = "optimizer.step()  # 6: on each rank\n        optimizer.clear_grad()"
PADDLE_MERGE = "[paddle.distributed.broadcast(p, 0) for p in layer.parameters()]"
UPDATE = "optimizer.step()  # 6: on each rank\n        optimizer.zero_grad()"
OWN = 'own = jax.lax.pcast(weights, "data", to="varying")'
FOUND = 'jax.lax.psum(found, "data")'
GRADIENT = "        found = jax.value_and_grad(loss_of)(own"
TOWER = "mine = [array[number :: len(devices)] for array in batch]  # 2\n            with"
LOCAL = "with tf.GradientTape() as tape:\n            loss = loss_of(variables, *mine)"

# "<way>: what is wrong"
BREAKS = {
    "tensorflow towers: not merged": ("for found in gradients", "for found in gradients[:1]"),
    "tensorflow towers: all rows for each": (
        TOWER,
        "mine = [*batch[:2], batch[2] / len(devices)]\n            with",
    ),
    "tensorflow towers: on one device": ("tf.device(device),", "tf.device(devices[0]),"),
    "tensorflow towers: the mean of gradients": ("rate * merged", "rate * merged / len(devices)"),
    "tensorflow mirrored: not merged": ("Aggregation.SUM", "Aggregation.ONLY_FIRST_REPLICA"),
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
    "paddle: no clear_grad": (PADDLE_UPDATE, "optimizer.step()"),
    "paddle: rank 0 alone updates": (
        PADDLE_UPDATE,
        f"rank or {PADDLE_UPDATE}\n        world_size > 1 and {PADDLE_MERGE}",
    ),
    "pytorch: other weights": ("torch.tensor(w)", "torch.tensor(1.01 * w)"),
    "pytorch: no copy of rank 0's weights": ("Parallel(model)", "Parallel(model, init_sync=False)"),
    "pytorch: no DDP": ("torch.nn.parallel.DistributedDataParallel(model)", "model"),
    "pytorch: all rows for each": (TORCHS, TORCHS.replace("array[rank::world_size]", ALL_ROWS)),
    "pytorch: one worker does not update": (UPDATE, "rank or " + UPDATE),
    "pytorch: two all-reduces": (
        UPDATE,
        "[torch.distributed.all_reduce(w.grad.clone()) for w in model.parameters()]\n        "
        + UPDATE,
    ),
    "pytorch: its part of the loss is told": (
        "    torch.distributed.all_reduce(losses)  # each has its parts\n",
        "",
    ),
    "jax shard_map: the trap": (OWN, "own = weights"),
    "jax shard_map: two all-reduces": (
        FOUND,
        FOUND.replace("found", "jax.lax.pmean(found, 'data')"),
    ),
    "jax shard_map: gathers all rows": (
        GRADIENT,
        "        mine = [jax.lax.all_gather(m, 'data', tiled=True) for m in mine]\n"
        "        mine[2] = mine[2] / jax.lax.axis_size('data')\n" + GRADIENT,
    ),
    "jax jit: the inputs alone are divided": (
        "(full, rows, rows, rows)",
        "(full, rows, full, full)",
    ),
    "jax jit: weights of the step before": ("now, loss = step(now", "_, loss = step(now"),
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


def judged(*frameworks, off=0.0):
    """Return the verdict on three steps of three workers, as if these frameworks were right."""
    proof = proofs.of_lesson(LESSON)
    args = proofs.read_flags(LESSON.script, ["--steps", "2", "--nproc", "3"], 1, 1)
    first, _ = proof.lesson.make_problem(args)
    after, loss = {name: w - 0.01 for name, w in first.items()}, np.log(500)
    seen = {"loss": [loss] * 2, "after_one": after, "weights": [after] * 3, "alone": after}
    seen |= {"rows": [11] * 3, "bytes": None, "updates": []}
    found = {}
    for way in (way for name in frameworks for way in proof.ways_of(name)):
        found[way] = seen | {"said": f"{way:20} loss {loss:.4f} to {loss:.4f}"}
    found["pytorch"]["after_one"] = {name: w - off for name, w in after.items()}
    return proof.judge(found, args)


def test_what_is_not_installed_is_named_and_left_out():
    claim, wrong, numbers, lines = judged("pytorch", "jax")
    assert wrong == [] and numbers["missing"] == ["tensorflow", "paddle"]
    assert claim.startswith("2 frameworks, 3 ways, 3 workers")
    assert list(numbers["max_grad_diff"]) == ["pytorch and jax"]
    assert [line.split()[0] for line in lines if "left out" in line] == ["tensorflow", "paddle"]
    json.dumps(numbers)


def test_a_batch_has_a_sentence_for_each_worker_and_room_in_memory(capsys):
    for flags, said in (("--batch-size 1", "from 2"), ("--steps 10000 --batch-size 101", "to 100")):
        with pytest.raises(SystemExit):
            proofs.read_flags(LESSON.script, flags.split(), 1, 1)
        assert said in capsys.readouterr().err


def test_one_framework_is_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax" or None)
    proof = proofs.of_lesson(LESSON)
    claim, wrong, *_ = proof.examine(proofs.read_flags(LESSON.script, [], 1, 1))
    assert (claim, wrong) == ("of 4 frameworks two are needed", ["installed: jax"])


def test_a_framework_that_differs_and_a_wrong_problem_are_named(monkeypatch):
    assert "pytorch: its gradient is off by 0.0001" in "; ".join(
        judged("pytorch", "jax", off=1e-6)[1]
    )
    lesson = proofs.of_lesson(LESSON).lesson
    make = lesson.make_problem

    def unshifted(args):
        weights, batches = make(args)
        return weights, [(inputs, inputs, share) for inputs, _, share in batches]

    monkeypatch.setattr(lesson, "make_problem", unshifted)
    assert judged("pytorch", "jax")[1] == ["the targets are not the words that follow"]
