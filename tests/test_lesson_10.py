"""Lesson 10: N ranks train as one process does; each condition, kept and taken away."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import lesson_10_same_as_one_process as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks, verdict
from conftest import run_lesson
from nbtools import RankFailed, run
from nbtools.record import Wire
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SEND = """        with contextlib.nullcontext() if last else replica.no_sync():  # the forward, too
            (loss_sum(replica(inputs), targets) * weight).backward()  # the last one sends
"""
LATE = """        loss = loss_sum(replica(inputs), targets) * weight
        replica.require_backward_grad_sync = last
        loss.backward()
"""
COUNT = "sum(int((targets != -100).sum()) for _, targets in micro_batches)"
TOTAL = "max(1, count_everywhere(mine, micro_batches[0][1].device))"
LOSSES = '        "losses divided": {"train_step": step_with(lambda count, parts: 1 / count)},\n'
REDUCE, OTHER = "dist.all_reduce(total)", "torch.distributed._functional_collectives"
SHARE, SCALE = "batch[rank::world_size] for", "weight = dist.get_world_size() / total"
LAST, SPLIT = "last = number == len(micro_batches)", "tensor_split(micro_batches)"
SENT = SEND.splitlines(keepends=True)[1]
DROPOUT = "return nn.functional.dropout(torch.ones(len(texts), 9, 5, device=texts.device))"
MASKED, ALWAYS = "ranks(args, data, mask=mask_of_text)", "contextlib.nullcontext()"
BREAKS = {
    "all ranks take the same rows": (SHARE, "batch[::world_size] for"),
    "a row comes twice": (SHARE, "torch.cat([batch, batch[-1:]])[rank::world_size] for"),
    "the same orders with each seed": ("manual_seed(seed + epoch)", "manual_seed(epoch)"),
    "four orders": ("manual_seed(seed + epoch)", "manual_seed(seed + epoch % 4)"),
    "the epoch never grows": ("epoch += 1\n\n\n# --- The proof", "pass\n\n\n# --- The proof"),
    "a mean where a sum belongs": ('targets.flatten(), reduction="sum")', "targets.flatten())"),
    "padding is counted": (COUNT, "sum(targets.numel() for _, targets in micro_batches)"),
    "each rank counts its own": (REDUCE, "total *= dist.get_world_size()"),
    "counted in bfloat16": ("float64, device=device)  # e", "bfloat16)  # e"),
    "divided by no tokens": (TOTAL, TOTAL.replace("max(1, ", "(")),
    "a rank without tokens counts one": (f"mine = {COUNT}", f"mine = max(1, {COUNT})"),
    "nine counts are sent": (REDUCE, f"total = total.repeat(9); {REDUCE}; total = total[0]"),
    "DDP's division is forgotten": (SCALE, "weight = 1 / total"),
    "2 ranks, always": (SCALE, "weight = 2 / total", (3,)),
    "losses are not divided": (SCALE, SCALE.replace("=", "= len(micro_batches) *")),
    "no no_sync": (SEND, SEND.replace(f"{ALWAYS} if last else replica.no_sync()", ALWAYS)),
    "the flag after the forward": (SEND, LATE),
    "sent one too early": (LAST, f"{LAST} - 1"),
    "nobody sends": (LAST, "last = False"),
    "gradients pile up": (f"{SCALE}\n    optimizer.zero_grad()", SCALE),
    "an update after each micro-batch": ("sends\n    optimizer.st", "sends\n        optimizer.st"),
    "an all-reduce of one's own": (
        SENT,
        f"{SENT}            {OTHER}.all_reduce(torch.ones(9), 'sum', dist.group.WORLD)\n",
    ),
    "the batch is not cut": (SPLIT, "tensor_split(1)"),
    "a micro-batch is left out": (SPLIT, f"{SPLIT}[:-1]"),
    "a learning rate for each rank": ("lr=rate, mom", "lr=rate * (1 + dist.get_rank()), mom"),
    "first weights are not sent": ("(model, init_sync=init_sync)", "(model, init_sync=False)"),
    "dropout from the process": (MASKED, MASKED.replace("text", "process")),
    "a condition is not tried": (LOSSES, ""),
    "one dropout seed for all": ("args.seed + dist.get_rank()", "args.seed"),
    "no dropout": (DROPOUT, DROPOUT.replace("nn.functional.dropout", "")),
    "no dropout by text": ("return 2.0 * (torch.stack", "return 1 + 0 * (torch.stack"),
    "another removal": (LOSSES, '        "losses divided": {"rate": 1},\n'),
}


@pytest.mark.claim("A1", "C3")
@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(10, BREAKS, nproc, "--steps", 3, "--batch-size", 18, "--micro-batches", 2)


@pytest.mark.claim("A1", "C3")
def test_default_run(default_run):
    facts = default_run(10).json
    assert (facts["lesson"], facts["world_size"], facts["backend"]) == (10, 2, "gloo")
    assert len(facts["off"]) == len(lesson.SPOILED) == 11
    assert all(kept < 1e-12 < 0.001 < removed for kept, removed in facts["off"].values())
    assert facts["bytes"] == [640, 1920] and facts["param_change"] > 0.1
    assert facts["rows_per_step"] == 16


@pytest.mark.claim("A1")
@pytest.mark.parametrize(
    "nproc, flags", [(1, "--steps 4"), (4, "--steps 6 --batch-size 8 --micro-batches 2 --seed 3")]
)
def test_other_sizes_pass_too(nproc, flags):
    """Also where, in the last batch of 3 rows, a rank has none at all."""
    source = Path(lesson.__file__).read_text()
    for passed, claim in run(verdict, nproc, source, flags.split(), 1):
        assert passed and claim.startswith(f"{nproc} ranks equal one process"), claim


@pytest.mark.gpu
@pytest.mark.claim("A1")
def test_on_gpus_the_ranks_equal_one_process():
    facts = run_lesson(10, "--nproc", min(4, torch.cuda.device_count()), "--json").json
    assert (facts["backend"], facts["device"], facts["passed"]) == ("nccl", "cuda", True)


@pytest.mark.parametrize("flags", ["--batch-size 5", "--steps 3", "--micro-batches 1"])
def test_bad_values_cost_one_line(monkeypatch, capsys, flags):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as stop:
        lesson.parse_args(flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "error: " in line and flags.split()[0] in line


# --- The technique in a project of one's own ---

PROJECT = """
torch.manual_seed(0)
texts = torch.randint(0, 6, (21, 4))
targets = (texts + 1) % 6
targets[::2, 2:] = -100
model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6))
replica = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
train(replica, optimizer, texts, targets, 60, 10, 2)
own = ((0, 1, 2), (3,))[dist.get_rank()]  # three micro-batches here, one there
train_step(replica, optimizer, [(texts[part::4], targets[part::4]) for part in own])
train_step(replica, optimizer, [(texts, torch.full_like(targets, -100))])  # no token at all
loss = (loss_sum(model(texts), targets) / (targets != -100).sum()).item()
"""


def in_a_project(rank, world_size, source):
    """Run the source, which finds a group that exists already; return its loss."""
    names = {"__name__": "project"}
    exec(source, names)
    return names["loss"]


def test_the_technique_runs_in_a_project_of_ones_own():
    imports, _, rest = Path(lesson.__file__).read_text().partition('"""\n\n')[2].partition("# ---")
    source = imports + "# ---" + rest.partition("# --- The proof ---")[0] + PROJECT
    zero, one = run(in_a_project, 2, source)
    assert zero == one < 0.1


# --- An uneven end ---


def linear(rank):
    """Return a replica, rows and targets of this rank, and a function that makes a step."""
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 1, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    replica = DistributedDataParallel(model)

    def step(number):
        replica.zero_grad()
        replica(rows[number + 4 * rank]).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    return model, rows, replica, step


def end_with_join(rank, world_size, by_all):
    """Let rank 0 make one step more; return the weights, the rows, and what was sent."""
    model, rows, replica, step = linear(rank)
    first = model.weight.detach().clone()
    with Wire() as wire, replica.join(divide_by_initial_world_size=by_all):
        for number in range(3 if rank == 0 else 2):
            step(number)
    return first, model.weight.detach(), rows, [call.nbytes for call in wire.calls]


@pytest.mark.claim("B7")
@pytest.mark.parametrize("by_all", [False, True])
def test_join_ends_and_divides_by_those_at_work_or_by_all(by_all):
    (first, ours, rows, sent), (_, theirs, *_) = run(end_with_join, 2, by_all)
    wanted = first - 0.1 * (rows[[0, 4, 1, 5]].sum(0) / 2 + rows[2] / (2 if by_all else 1))
    assert torch.equal(ours, theirs) and (ours - wanted).abs().max() < 1e-12
    assert sent.count(4) == 2 * 3 + 2  # two in a step, one at the end, and DDP's table of buckets


def end_without(rank, world_size, inside):
    """Make one step more on rank 0: without join, or with an all-reduce of our own inside it."""
    _, _, replica, step = linear(rank)
    throws = inside in ("throws", "before")
    with replica.join(throw_on_early_termination=throws, enable=inside != ""):
        for number in range(4 if rank == 0 else 2):
            if inside == "before":
                dist.all_reduce(torch.ones(2))
            step(number)
            if inside in ("ours", "throws"):
                dist.all_reduce(torch.ones(2))


@pytest.mark.claim("B7")
def test_without_join_a_rank_loses_its_neighbour():
    with pytest.raises(RankFailed, match=r"rank 0 lost its connection in .*rank 1 had already"):
        run(end_without, 2, "")


@pytest.mark.claim("B7")
def test_join_answers_no_collective_of_ours_and_can_throw():
    with ThreadPoolExecutor(2) as pool:  # both wait until the deadline, so let them wait together
        stuck = [pool.submit(run, end_without, 2, way, deadline=4) for way in ("ours", "before")]
    assert ["no answer after 4 s" in str(future.exception()) for future in stuck] == [True, True]
    with pytest.raises(RankFailed, match="exhausted"):
        run(end_without, 2, "throws")


# --- Batch size and learning rate ---


def sweeps(rank, world_size):
    """Return accuracies by rate and seed: with 32 rows on rank 0, with 1,024 on rank 1."""
    if rank == 0:
        return lesson.sweep(32, [0.02], seeds=3)
    return lesson.sweep(1024, [0.02, 0.64, 5.12], seeds=3)


@pytest.mark.claim("D4")
def test_a_bigger_batch_needs_another_learning_rate():
    (small,), (kept, scaled, too_high) = run(sweeps, 2)  # one thread for each
    assert small.min() > 0.94 and kept.max() < 0.75
    assert scaled.mean() > 0.85 and too_high.mean() < 0.25
