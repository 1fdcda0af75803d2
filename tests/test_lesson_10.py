"""Lesson 10: N ranks train as one process does; each condition, kept and taken away."""

import json
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks, verdicts_of_proof
from conftest import ROOT, run_lesson
from lockstep import lessons, proofs
from nbtools import RankFailed, run
from nbtools.record import Wire
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LESSON = lessons.find("10")
SOURCE = LESSON.script.read_text()

SEND = """        with contextlib.nullcontext() if last else replica.no_sync():  # the forward, too
            (loss_sum(replica(inputs), targets) * weight).backward()  # the last one sends
"""
LATE = """        loss = loss_sum(replica(inputs), targets) * weight
        replica.require_backward_grad_sync = last
        loss.backward()
"""
COUNT = "sum(int((targets != -100).sum()) for _, targets in micro_batches)"
TOTAL = "max(1, count_everywhere(mine, micro_batches[0][1].device))"
SHARE, SCALE = "batch[rank::world_size] for", "weight = dist.get_world_size() / total"
LAST, SPLIT = "last = number == len(micro_batches)", "tensor_split(micro_batches)"
ALWAYS, REDUCE = "contextlib.nullcontext()", "dist.all_reduce(total)"
SHUFFLE, SGD = "manual_seed(seed + epoch)", "SGD(model.parameters(), lr=0.3,"
BREAKS = {
    "all ranks take the same rows": (SHARE, "batch[::world_size] for"),
    "a row comes twice": (SHARE, "torch.cat([batch, batch[-1:]])[rank::world_size] for"),
    "a short last batch is dropped": ("split(batch_size)]", "split(batch_size)[: rows // 18]]"),
    "each rank shuffles by itself": (SHUFFLE, "manual_seed(seed + epoch + rank)"),
    "the same orders with each seed": (SHUFFLE, "manual_seed(epoch)"),
    "four orders": (SHUFFLE, "manual_seed(seed + epoch % 4)"),
    "the epoch never grows": ("epoch += 1", "pass"),
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
    "past DDP": ("loss_sum(replica(inputs)", "loss_sum(replica.module(inputs)"),
    "sent one too early": (LAST, f"{LAST} - 1"),
    "nobody sends": (LAST, "last = False"),
    "gradients pile up": (f"{SCALE}\n    optimizer.zero_grad()", SCALE),
    "an update after each micro-batch": ("sends\n    optimizer.st", "sends\n        optimizer.st"),
    "an all-reduce more": (LAST, f"{LAST}; dist.all_reduce(torch.ones(9))"),
    "the batch is not cut": (SPLIT, "tensor_split(1)"),
    "a micro-batch is left out": (SPLIT, f"{SPLIT}[:-1]"),
    "a learning rate for each rank": (SGD, SGD.replace("0.3", "0.3 * (1 + rank)")),
    "a layer is not trained": (SGD, SGD.replace("model.", "model[1].")),
    "first weights are not sent": ("Parallel(model)", "Parallel(model, init_sync=False)"),
    "every rank prints": ("if rank == 0:", "if True:"),
}


@pytest.mark.claim("A1", "C3")
@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(10, BREAKS, nproc, "--steps", 3, "--batch-size", 18, "--micro-batches", 2)


@pytest.mark.claim("A1")
@pytest.mark.parametrize("nproc, flags", [(1, "--steps 4"), (4, "--batch-size 8 --seed 3")])
def test_other_sizes_pass_too(nproc, flags):
    """Also where, in the last batch of 3 rows, a rank has none at all."""
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags.split(), 1).values()
    assert passed and claim.startswith(f"{nproc} ranks equal one process"), claim


@pytest.mark.gpu
@pytest.mark.claim("A1")
def test_on_gpus_the_ranks_equal_one_process():
    facts = run_lesson(10, "--nproc", min(4, torch.cuda.device_count()), "--json").json
    assert (facts["backend"], facts["device"], facts["passed"]) == ("nccl", "cuda", True)


@pytest.mark.parametrize("flag", ["--batch-size 5", "--steps 3"])
def test_flags_that_do_not_fit_together_are_refused(capsys, flag):
    with pytest.raises(SystemExit):
        proofs.read_flags(LESSON.script, flag.split(), 3, 3)
    assert f"error: argument {flag[:-2]}: must be" in capsys.readouterr().err


# --- The technique in a project of one's own ---

PROJECT = """
torch.manual_seed(0)
texts = torch.randint(0, 6, (21, 4))
targets = (texts + 1) % 6
targets[::2, 2:] = -100
model, other = (nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6)) for _ in range(2))
train(model, torch.optim.Adam(model.parameters(), lr=0.05), texts, targets, 60, 10, 2)
other.load_state_dict(model.state_dict())
replica, optimizer = DistributedDataParallel(other), torch.optim.SGD(other.parameters(), lr=0.05)
own = ((0, 1, 2), (3,))[dist.get_rank()]  # three micro-batches here, one there
train_step(replica, optimizer, [(texts[part::4], targets[part::4]) for part in own])
train_step(replica, optimizer, [(texts, torch.full_like(targets, -100))])  # no token at all
loss = (loss_sum(other(texts), targets) / (targets != -100).sum()).item()
"""


def in_a_project(rank, world_size, source):
    """Run the source, which finds a group that exists already; return its loss."""
    names = {"__name__": "project"}
    exec(source, names)
    return names["loss"]


def test_the_technique_runs_in_a_project_of_ones_own():
    zero, one = run(in_a_project, 2, SOURCE.partition("# --- The example ---")[0] + PROJECT)
    assert zero == one < 0.1


# --- An uneven end ---


def end_with_join(rank, world_size, steps, ours, options):
    """Make more steps on rank 0, inside join; return the weights, the rows, and what was sent.

    `ours`: where each step has an all-reduce of our own, "before" it or "after" it.
    """
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 1, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    replica, first = DistributedDataParallel(model), model.weight.detach().clone()
    with Wire() as wire, replica.join(**options):
        for number in range((steps, 2)[rank]):
            if ours == "before":
                dist.all_reduce(torch.ones(2))
            replica.zero_grad()
            replica(rows[number + 4 * rank]).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            if ours == "after":
                dist.all_reduce(torch.ones(2))
    return first, model.weight.detach(), rows, [call.nbytes for call in wire.calls]


@pytest.mark.claim("B7")
@pytest.mark.parametrize("by_all", [False, True])
def test_join_ends_and_divides_by_those_at_work_or_by_all(by_all):
    options = {"divide_by_initial_world_size": by_all}
    (first, ours, rows, sent), (_, theirs, *_) = run(end_with_join, 2, 3, None, options)
    wanted = first - 0.1 * (rows[[0, 4, 1, 5]].sum(0) / 2 + rows[2] / (2 if by_all else 1))
    assert torch.equal(ours, theirs) and (ours - wanted).abs().max() < 1e-12
    assert sent.count(4) == 2 * 3 + 2  # two in a step, one at the end, and DDP's table of buckets


@pytest.mark.claim("B7")
@pytest.mark.parametrize("ours, told", [("after", "exhausted"), ("before", "no answer after 4 s")])
def test_join_can_throw_but_not_where_a_collective_of_ours_comes_first(ours, told):
    options = {"throw_on_early_termination": True}
    with pytest.raises(RankFailed, match=told):
        run(end_with_join, 2, 4, ours, options, deadline=4)


# --- Batch size and learning rate ---


def sweeps(rank, world_size, source):
    """Return accuracies by rate and seed: with 32 rows on rank 0, with 1,024 on rank 1."""
    names = {"torch": torch, "cross_entropy": cross_entropy, "load_digits": load_digits}
    exec(source, names)
    size, rates = [(32, [0.02]), (1024, [0.02, 0.64, 5.12])][rank]
    return names["sweep"](size, rates, seeds=3)


@pytest.mark.claim("D4")
def test_a_bigger_batch_needs_another_learning_rate():
    page = json.loads((ROOT / "notebooks" / f"{LESSON.script.stem}.ipynb").read_text())
    (cell,) = [c["source"] for c in page["cells"] if "def sweep(" in "".join(c["source"])]
    (small,), (kept, scaled, too_high) = run(sweeps, 2, "".join(cell))  # one thread for each
    assert small.min() > 0.94 and kept.max() < 0.75
    assert scaled.mean() > 0.85 and too_high.mean() < 0.25
