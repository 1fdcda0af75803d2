"""Lesson 17: DDP by hand leaves DDP's gradients, with its bytes, messages and overlap."""

import re
import sys
from pathlib import Path

import cloudpickle
import lesson_17_ddp_from_scratch as lesson
import pytest
import torch
from breaks import check_breaks
from conftest import run_warm
from lockstep import lessons, proofs
from lockstep.watch.played_gloo import play
from nbtools import run
from nbtools.record import Wire
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
proof = proofs.of_lesson(lessons.find("17"))

STATE = "take_from_rank_0([*module.parameters(), *module.buffers()])"
OFF = "before, self.averaging = self.averaging, False"
NO_SYNC = re.search(r'""".*sends nothing."""', Path(lesson.__file__).read_text())[0]
RESTORE = """        try:
            yield
        finally:
            self.averaging = before
"""
AT_ONCE = f"""        {OFF}
        stack = contextlib.ExitStack()
        stack.callback(setattr, self, "averaging", before)
        return stack
"""
SECOND = """        loss = mse_loss(ddp(second), second.flip(1))
        loss.backward()
"""

BREAKS = {
    "parameters do not start equal": (STATE, "take_from_rank_0([*module.buffers()])"),
    "buffers do not start equal": (STATE, "take_from_rank_0([*module.parameters()])"),
    "frozen parameters do not start equal": (
        STATE,
        "trained = [p for p in module.parameters() if p.requires_grad]\n"
        "        take_from_rank_0([*trained, *module.buffers()])",
    ),
    "buffers are never sent again": ("        if self.buffers_differ:\n", "        if False:\n"),
    "buffers after each forward that evaluates": (" and torch.is_grad_enabled()\n", "\n"),
    "buffers in training only": (
        "        if self.buffers_differ:\n",
        "        if self.buffers_differ and self.training:\n",
    ),
    "named arguments are dropped": ("self.module(*inputs, **named)", "self.module(*inputs)"),
    "a MiB of 10**6 bytes": ("bucket_mb * 2**20)", "bucket_mb * 10**6)"),
    "one bucket for several types": ("kind = p.dtype, p.device", "kind = None"),
    "buckets of float64 only": ("dtype=bucket[0].dtype,", "dtype=torch.float64,"),
    "divided after the sum": (
        "        self.flats[number].mul_(1 / dist.get_world_size())  # before the sum, which could "
        "overflow\n        self.works.append(dist.all_reduce(self.flats[number], async_op=True))\n",
        "        flat = self.flats[number]\n"
        "        work = dist.all_reduce(flat, async_op=True)\n"
        "        both = lambda: (work.wait(), flat.div_(dist.get_world_size()))\n"
        "        self.works.append(argparse.Namespace(wait=both))\n",
    ),
    "buffers with each micro-batch": ("        if self.buffers_differ:\n", "        if True:\n"),
    "from the first layer on": ("into_buckets(trained[::-1],", "into_buckets(trained,"),
    "a shared weight twice": (
        "trained = [p for p in module.parameters() if p.requires_grad]",
        "trained = [p for m in module.modules() for p in m.parameters(recurse=False)]\n"
        "        trained = [p for p in trained if p.requires_grad]",
    ),
    "the sum": ("        self.flats[number].mul_(1 / dist.get_world_size())", "        pass"),
    "half the sum": ("mul_(1 / dist.get_world_size())", "mul_(1 / 2)", (3,)),
    "begun and waited for": (
        "number], async_op=True))",
        "number], async_op=True))\n        self.works[-1].wait()",
    ),
    "nobody waits": ("            work.wait()\n", "            pass\n"),
    "held back until nearly all are there": (
        "        if not self.averaging:\n",
        "        if not self.averaging or sum(self.missing) > 1:\n",
    ),
    "with find_unused all at the end": (
        "        if not self.averaging:\n",
        "        if not self.averaging or self.find_unused:\n",
    ),
    "a full bucket overtakes": (
        "for number in range(len(self.works), len(self.buckets)):\n            if self.missing",
        "for number in [self.bucket_of[p]]:\n            if self.missing",
    ),
    "no_sync does nothing": (OFF, "before = self.averaging"),
    "no_sync lasts after an error": (RESTORE, "        yield\n        self.averaging = before\n"),
    "no_sync ends with an inner one": ("self.averaging = before\n", "self.averaging = True\n"),
    "no_sync begins when it is called": (
        f"""    @contextlib.contextmanager
    def no_sync(self):
        {NO_SYNC}
        {OFF}
{RESTORE}""",
        f"    def no_sync(self):\n{AT_ONCE}",
    ),
    "gradients leave the buckets": ("            p.grad = view\n\n", "            pass\n\n"),
    "what is left of the step before": ("            view.zero_()\n", "            pass\n"),
    "one that no rank used becomes 0": ("p.grad = view if ranks else None", "p.grad = view"),
    "used on this rank only": ("used.tolist()", "[p.grad is not None for p in self.views]"),
    "unused ones are no error": ("if unused and not self.find_unused:", "if False:"),
    "the error names all": ("{', '.join(unused)}", "{', '.join(self.names.values())}"),
    "a failed backward's all-reduces stay": (
        "            self.wait()  # there is nothing",
        "            # there is nothing",
    ),
    "the next backward is taken for the one that failed": (
        "backward = torch._C._current_graph_task_id()",
        "backward = self.backward if self.works else torch._C._current_graph_task_id()",
    ),
    "both micro-batches in no_sync": (SECOND, SECOND.replace("        ", "            ")),
    "past the wrapper": ("mse_loss(ddp(second)", "mse_loss(ddp.module(second)"),
    "gradients pile up": ("        optimizer.zero_grad()\n", ""),
    "the same rows on all ranks": ("[:, :, rank::world_size]", "[:, :, ::world_size]"),
    "every rank prints": ("    if rank == 0:\n        sizes", "    if True:\n        sizes"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(17, BREAKS, nproc, "--steps", 2, "--batch-size", 8 * nproc)


# --- The whole script ---


def test_default_run(default_run):
    result = default_run(17).json
    assert (result["world_size"], result["backend"]) == (2, "gloo")
    assert result["max_grad_diff_to_ddp"] == {"in reverse order": 0.0, "in DDP's order": 0.0}
    assert (result["all_reduces"], result["overlapped"]) == (3, 2)
    trained = [p.nbytes for p in lesson.Model().double().parameters() if p.requires_grad]
    assert sum(result["buckets"]) == result["bytes_sent"] == sum(trained)
    assert min(result["buckets"][:-1]) >= 2**20


def test_buckets_that_hold_all_can_not_overlap():
    args, model = lesson.parse_args(["--bucket-mb=100", "--steps=2"]), lesson.Model().double()
    ((wrong, _, numbers),) = play(lesson, 1, lambda rank: proof.act(rank, args, model))
    assert (wrong, numbers["all_reduces"], numbers["overlapped"]) == ([], 1, 0)


@pytest.mark.parametrize("flags", ["--batch-size 23", "--bucket-mb 0", "--bucket-mb 0.5"])
def test_bad_values_cost_one_line(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, flags.split(), 3, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "error: " in line and flags.split()[0] in line


def evaluated(rank, world_size):
    """Return how many messages DDP has sent after a step, and two forward passes that evaluate."""
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with Wire() as wire:
        replica(torch.randn(8, 4)).sum().backward()
        found = [len(wire.calls)]
        replica.eval()
        for _ in range(2):
            with torch.no_grad():
                replica(torch.randn(8, 4))
            found.append(len(wire.calls))
    return found


def test_ddp_sends_buffers_in_the_first_forward_pass_that_evaluates():
    """As OwnDDP does, says the proof."""
    (before, first, second), *_ = run(evaluated, 2)
    assert before < first == second


# --- The technique in a project of one's own ---

PROJECT = """

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), *layers, nn.Linear(8, 1))
    model = model.to(memory_format=torch.channels_last)
    ddp, adam = OwnDDP(model, bucket_mb=0.0001), torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    rows = torch.randn(64, 3)
    mine = rows[dist.get_rank() :: 2].split(8)
    for step in range(100):
        adam.zero_grad()
        for part in mine[:3]:
            with ddp.no_sync():
                (ddp(part) - part.sum(1, keepdim=True)).square().mean().backward()
        (ddp(mine[3]) - mine[3].sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    ddp.eval()
    with torch.no_grad():
        loss = (ddp(rows) - rows.sum(1, keepdim=True)).square().mean()
    learned = loss.item() < 1  # 3 untrained; 0.4 to 0.6 by seed and processor
    print(len(ddp.buckets), learned, f"{loss.item():.17g}")
    dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    file = tmp_path / "project.py"
    source = Path(lesson.__file__).read_text()
    file.write_text(source.partition("# --- The example ---")[0] + PROJECT)
    (code, zero), (other, one) = run_warm(file, 2)
    assert (code, other) == (0, 0) and zero == one  # the same model, buffers included
    assert zero.split()[1] == "True" and int(zero.split()[0]) > 1


class Frozen(nn.Module):
    """A frozen bias inside, and a parameter that is used nowhere and never trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 50), nn.ReLU())
        self.last, self.fixed = nn.Linear(50, 5), nn.Parameter(torch.full((2,), 2.0))
        self.layers[2].bias.requires_grad_(False)
        self.fixed.requires_grad_(False)

    def forward(self, rows):
        return self.last(self.layers(rows))


class Tied(nn.Module):
    """Two of five layers share their weight."""

    def __init__(self):
        super().__init__()
        sizes = [(10, 10), (10, 50), (50, 10), (10, 50), (50, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.layers[3].weight = self.layers[1].weight

    def forward(self, rows):
        for layer in self.layers:
            rows = torch.relu(layer(rows))
        return rows


class Mixed(nn.Module):
    """Parameters of two types, with a bool and an integer buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 10).float(), nn.Linear(10, 5)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, rows):
        return self.last(self.first(rows.float()).double()) * self.mask


def train_as_one(rank, world_size):
    """Train each model on halves, and one process on all rows; return how far they are apart."""
    found = {}
    for kind, limit in ((Frozen, 25), (Frozen, 0.001), (Tied, 25), (Tied, 0.001), (Mixed, 0.0001)):
        torch.manual_seed(0)
        alone = kind().double()
        torch.manual_seed(rank)
        model = kind().double()
        if kind is Mixed:
            alone.first.float(), model.first.float()
        fixed = [p.clone() for p in alone.parameters() if not p.requires_grad]
        ddp, off = lesson.OwnDDP(model, limit), []
        torch.manual_seed(7)
        rows, targets = torch.randn(20, 10).double(), torch.randn(20, 5).double()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
        for _ in range(5):
            share = torch.randperm(20)
            mine = share[rank * 10 : rank * 10 + 10]
            for optimizer, call, part in zip(optimizers, (alone, ddp), (share, mine), strict=True):
                optimizer.zero_grad()
                mse_loss(call(rows[part]), targets[part]).backward()
                optimizer.step()
            off.append(proof.apart(alone.parameters(), model.parameters()))
        kept = [p for p in model.parameters() if not p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(fixed, kept, strict=True))
        found[f"{kind.__name__} {limit}"] = max(off)
    return found


def test_halves_train_as_one_process_with_all_rows():
    for found in run(train_as_one, 2):
        assert all(off < (1e-6 if "Mixed" in kind else 1e-12) for kind, off in found.items()), found
