"""Lesson 12: the layers of one model on several ranks, by three schedules, equal to one process."""

import lesson_12_pipeline_parallel as lesson
import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from conftest import run_lesson, run_warm
from lockstep import lessons, proofs
from proofs import lesson_12 as proof
from torch import nn
from torch.nn.functional import mse_loss

LESSON = lessons.find("12")
SOURCE = LESSON.script.read_text()
MESSAGE = 32 * 32 * 8  # bytes: rows, width, float64

BREAKS = {
    "GPipe under the name of 1F1B": (
        '"1f1b": one_forward_one_backward',
        '"1f1b": all_forward_then_all_backward',
    ),
    "1F1B under the name of GPipe": (
        '"gpipe": all_forward_then_all_backward',
        '"gpipe": one_forward_one_backward',
    ),
    "a warm-up twice as long": (
        "ahead = min(world_size - 1 - rank, micro_batches)",
        "ahead = min(2 * (world_size - 1 - rank), micro_batches)",
    ),
    "a warm-up on one rank that is one too long": (
        "ahead = min(world_size - 1 - rank, micro_batches)",
        "ahead = min(world_size - 1 - rank + (rank == 0), micro_batches)",
        (3,),
    ),
    "a forgotten micro-batch": (
        "actions = schedule(rank, world_size, micro_batches)",
        "actions = schedule(rank, world_size, micro_batches - 1)",
    ),
    "a micro-batch's loss is not divided": (" / len(targets)", ""),
    "the targets of one micro-batch for all": ("targets[n])", "targets[0])", (3,)),
    "stages in another order": (
        "return [layers[begin:end] for begin, end in itertools.pairwise(bounds)]",
        "return [layers[begin:end] for begin, end in itertools.pairwise(bounds)][::-1]",
    ),
    "a layer that no stage has": (
        "bounds = [len(layers) * stage // stages for stage in range(stages + 1)]",
        "bounds = [(len(layers) - 1) * stage // stages for stage in range(stages + 1)]",
        (3,),
    ),
    "an update inside the step": (
        "            messages = one_message(dist.isend, inputs.pop(n).grad, rank - 1)\n",
        "            messages = one_message(dist.isend, inputs.pop(n).grad, rank - 1)\n"
        "            for parameter in stage.parameters():\n"
        "                parameter.data -= 2.0 * parameter.grad\n"
        "            stage.zero_grad()\n",
        (3,),
    ),
    "an update for each micro-batch": (
        "        train_step(rank, world_size, stage, actions, *pieces)\n",
        "        for one in zip(*pieces, strict=True):\n"
        "            one_piece = schedule(rank, world_size, 1), *([part] for part in one)\n"
        "            train_step(rank, world_size, stage, *one_piece)\n"
        "            optimizer.step()\n",
    ),
    "old weights: gradients come a step late": (
        "        optimizer.step()",
        "        for own in stage.parameters():\n"
        "            own.grad, own.late = getattr(own, 'late', 0 * own.grad), own.grad\n"
        "        optimizer.step()",
        (3,),
    ),
    "old weights on one rank": ("        optimizer.step()", "        rank or optimizer.step()"),
    "gradients are not set to zero": ("        optimizer.zero_grad()\n", ""),
    "the same batch in each step": (
        "itertools.cycle(pairs)",
        "itertools.repeat(next(pairs))",
        (3,),
    ),
    "outputs are not let go": ("outputs.pop(n).backward", "outputs[n].backward", (3,)),
    "inputs are not let go": ("inputs.pop(n).grad", "inputs[n].grad", (3,)),
    "the gradient ends at a border": (
        "dist.isend, inputs.pop(n).grad, rank - 1",
        "dist.isend, 0 * inputs.pop(n), rank - 1",
    ),
    "stages of one layer and of all others": (
        "bounds = [len(layers) * stage // stages for stage in range(stages + 1)]",
        "bounds = [*range(stages), len(layers)]",
        (3,),
    ),
    "an optimizer for each step": (
        "        optimizer.zero_grad()\n",
        "        optimizer = torch.optim.SGD(stage.parameters(), lr=1.0, momentum=0.5)\n"
        "        optimizer.zero_grad()\n",
    ),
    "an output is sent an action late": (
        "rank - 1) + messages)\n            outputs[n] = stage(inputs[n])\n",
        "rank - 1) + (messages if n != 1 or rank else []))\n"
        "            outputs[n] = stage(inputs[n])\n"
        "            if (rank, n) == (0, 1):\n"
        "                exchange(messages)\n",
    ),
    "all messages are kept": (
        "    if messages:\n",
        "    exchange.kept = [*getattr(exchange, 'kept', []), *messages]\n    if messages:\n",
    ),
    "GPipe's backwards from the last one on": (
        '("backward", n) for n in numbers]',
        '("backward", n) for n in reversed(numbers)]',
    ),
    "unequal pieces": ("if len(rows) % micro_batches:", "if False:"),
    "what was made is sent before a message is awaited": (
        "one_message(dist.irecv, inputs[n].detach(), rank - 1) + messages",
        "messages + one_message(dist.irecv, inputs[n].detach(), rank - 1)",
    ),
    "each rank draws a model of its own": ("args.batch_size, args.seed)", "args.batch_size, rank)"),
    "the loss that is told is the last batch's": (
        "return mse_loss(outputs, targets).item()",
        "return mse_loss(outputs[-32:], targets[-32:]).item()",
    ),
    "all ranks wait for all": (
        "            work.wait()\n",
        "            work.wait()\n        dist.barrier()\n",
    ),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(12, BREAKS, nproc, "--steps", 4)


@pytest.mark.claim("D1", "D3")
def test_default_run(default_run):
    result = default_run(12).json
    assert (result["world_size"], result["schedule"], result["micro_batches"]) == (2, "1f1b", 4)
    assert result["stages"] == [4, 4] and result["alive"] == [2, 1]
    assert result["max_grad_diff"] < 1e-12 and result["library_diff"] < 1e-12
    assert result["bytes_sent"] == [MESSAGE, MESSAGE]
    assert result["loss_last"] < result["loss_first"]


@pytest.mark.claim("D1", "D3")
@pytest.mark.parametrize(
    ("stages", "schedule", "m"),
    [(1, "gpipe", 8), (4, "naive", 1), (4, "gpipe", 2), (4, "1f1b", 8), (3, "1f1b", 2)],
)
def test_each_schedule_passes_and_idles_and_keeps_as_the_page_says(stages, schedule, m):
    actions = [lesson.SCHEDULES[schedule](rank, stages, m) for rank in range(stages)]
    keeps = [min(m, stages - rank) if schedule == "1f1b" else m for rank in range(stages)]
    assert [proof.alive_at_most(own) for own in actions] == keeps
    assert proof.bubble(actions) == pytest.approx((stages - 1) / (m + stages - 1), abs=1e-12)
    flags = ["--steps", "2", "--schedule", schedule, "--micro-batches", str(m)]
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, stages, flags, 1).values()
    assert passed, claim


def test_the_logical_clock_is_that_of_two_ranks_worked_out_by_hand():
    """Two stages, two micro-batches: F 1 tick, B 2 ticks; rank 1 begins at tick 1."""
    actions = [lesson.one_forward_one_backward(rank, 2, 2) for rank in range(2)]
    ends = proof.logical_clock(actions)
    assert [ends[1, *action] for action in actions[1]] == [2, 4, 5, 7]  # F0 B0 F1 B1
    assert [ends[0, *action] for action in actions[0]] == [1, 2, 6, 9]  # F0 F1 B0 B1
    assert proof.bubble(actions) == pytest.approx(1 - 12 / 18)
    ends = proof.logical_clock(actions, lengths=[1, 2])
    assert [ends[1, *action] for action in actions[1]] == [3, 7, 9, 13]
    assert [ends[0, *action] for action in actions[0]] == [1, 2, 9, 15]
    assert proof.bubble(actions, [1, 2]) == pytest.approx(1 - 18 / 30)


AROUND = """
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
rows, targets = torch.randn(2, 6, 4)
stage = split(model, world_size)[rank]
train(rank, world_size, stage, [(rows, targets)] * 3, one_forward_one_backward, 3)
print(sum(parameter.sum().item() for parameter in stage.parameters()))
dist.destroy_process_group()
"""


def test_the_technique_runs_in_an_empty_file_with_ten_lines_around(tmp_path):
    technique = SOURCE.split('"""', 2)[2].partition("# --- The example ---")[0]
    script = tmp_path / "of_a_reader.py"
    script.write_text(technique + AROUND)
    (code, first), (_, second) = run_warm(script, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    rows, targets = torch.randn(2, 6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(model(rows), targets).backward()
        optimizer.step()
    alone = sum(parameter.sum().item() for parameter in model.parameters())
    assert code == 0 and float(first) + float(second) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--micro-batches 5", 2, "--micro-batches: 5 do not divide the batch of 32 rows"),
        ("--steps 1", 9, "--nproc: at most 8 ranks"),
        ("--schedule 2f2b", 2, "--schedule"),
    ],
)
def test_flags_that_do_not_fit_cost_one_line(flags, world_size, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        proofs.read_flags(lesson.__file__, flags.split(), world_size, world_size)
    (line,) = capsys.readouterr().err.splitlines()
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
