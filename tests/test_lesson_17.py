"""Lesson 17: DDP by hand leaves DDP's gradients, with its bytes, messages and overlap."""

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

SOURCE = Path(lesson.__file__).read_text()

STATE = "take_from_rank_0([*module.parameters(), *module.buffers()])"
TRAINED = "trained = [p for p in module.parameters() if p.requires_grad]"
EVERYWHERE = f"""trained = [p for m in module.modules() for p in m.parameters(recurse=False)]
        {TRAINED.replace("module.parameters()", "trained")}"""
BUFFERS, SENDS = "        if self.buffers_differ:\n", "        if not self.averaging:\n"
MEAN = "self.flats[number].mul_(1 / dist.get_world_size())"
BEGIN = "self.works.append(dist.all_reduce(self.flats[number], async_op=True))"
DIVIDE_LATER = """flat = self.flats[number]
        work = dist.all_reduce(flat, async_op=True)
        both = lambda: (work.wait(), flat.div_(dist.get_world_size()))
        self.works.append(argparse.Namespace(wait=both))"""
LOOP = "for number in range(len(self.works), len(self.buckets)):\n            if"
TASK = "torch._C._current_graph_task_id()"
NO_SYNC = SOURCE[SOURCE.index("    @contextlib") : SOURCE.index("    def on_gradient")]
OFF = "before, self.averaging = self.averaging, False"
RESTORE = NO_SYNC.partition(f"{OFF}\n")[2].rstrip()
AT_ONCE = f"""    def no_sync(self):
        {OFF}
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
        f"{STATE}\n        {TRAINED}",
        f"{TRAINED}\n        take_from_rank_0([*trained, *module.buffers()])",
    ),
    "buffers are never sent again": (BUFFERS, "        if False:\n"),
    "buffers after each forward that evaluates": (" and torch.is_grad_enabled()\n", "\n"),
    "buffers in training only": (BUFFERS, "        if self.buffers_differ and self.training:\n"),
    "buffers with each micro-batch": (BUFFERS, "        if True:\n"),
    "named arguments are dropped": ("self.module(*inputs, **named)", "self.module(*inputs)"),
    "a MiB of 10**6 bytes": ("bucket_mb * 2**20)", "bucket_mb * 10**6)"),
    "one bucket for several types": ("kind = p.dtype, p.device", "kind = None"),
    "buckets of float64 only": ("dtype=bucket[0].dtype,", "dtype=torch.float64,"),
    "from the first layer on": ("into_buckets(trained[::-1],", "into_buckets(trained,"),
    "a shared weight twice": (TRAINED, EVERYWHERE),
    "divided after the sum": (
        f"{MEAN}  # before the sum, which could overflow\n        {BEGIN}",
        DIVIDE_LATER,
    ),
    "the sum": (MEAN, "pass"),
    "half the sum": ("mul_(1 / dist.get_world_size())", "mul_(1 / 2)", (3,)),
    "begun and waited for": (BEGIN, f"{BEGIN}\n        self.works[-1].wait()"),
    "nobody waits": ("            work.wait()\n", "            pass\n"),
    "held back until nearly all are there": (
        SENDS,
        SENDS.replace(":", " or sum(self.missing) > 1:"),
    ),
    "with find_unused all at the end": (SENDS, SENDS.replace(":", " or self.find_unused:")),
    "a full bucket overtakes": (LOOP, "for number in [self.bucket_of[p]]:\n            if"),
    "no_sync does nothing": (OFF, "before = self.averaging"),
    "no_sync lasts after an error": (RESTORE, "        yield\n        self.averaging = before"),
    "no_sync ends with an inner one": ("self.averaging = before\n", "self.averaging = True\n"),
    "no_sync begins when it is called": (NO_SYNC, AT_ONCE),
    "gradients leave the buckets": ("            p.grad = view\n\n", "            pass\n\n"),
    "what is left of the step before": ("            view.zero_()\n", "            pass\n"),
    "one that no rank used becomes 0": ("p.grad = view if ranks else None", "p.grad = view"),
    "used on this rank only": ("used.tolist()", "[p.grad is not None for p in self.views]"),
    "unused ones are no error": ("if unused and not self.find_unused:", "if False:"),
    "the error names all": ("{', '.join(unused)}", "{', '.join(self.names.values())}"),
    "a failed backward's all-reduces stay": ("self.wait()  # there is nothing", "# nothing"),
    "the next backward is taken for the one that failed": (
        f"backward = {TASK}",
        f"backward = self.backward if self.works else {TASK}",
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
    ((wrong, _, _, numbers),) = play(lesson, 1, lambda rank: proof.beside_ddp(args, model))
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
    file.write_text(SOURCE.partition("# --- The example ---")[0] + PROJECT)
    (code, zero), (other, one) = run_warm(file, 2)
    assert (code, other) == (0, 0) and zero == one  # the same model, buffers included
    assert zero.split()[1] == "True" and int(zero.split()[0]) > 1


class Odd(nn.Module):
    """A shared weight, frozen parameters, one of them unused, two types; and odd buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.fixed = nn.Linear(10, 10), nn.Parameter(torch.ones(2), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(10, 10).double() for _ in range(4))
        self.layers[3].weight = self.layers[1].weight
        self.layers[2].bias.requires_grad_(False)
        self.register_buffer("mask", torch.arange(10) < 5)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, rows):
        rows = self.first(rows.float()).double()
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows * self.mask


def train_as_one(rank, world_size, limit):
    """Train on halves, and alone on all rows; return how far the parameters are apart."""
    torch.manual_seed(0)
    alone = Odd()
    torch.manual_seed(rank)
    model = Odd()
    ddp, off = lesson.OwnDDP(model, limit), []
    torch.manual_seed(7)
    rows, targets = torch.randn(2, 20, 10).double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(5):
        share = torch.randperm(20)
        mine = share[rank * 10 : rank * 10 + 10]
        for optimizer, call, part in zip(optimizers, (alone, ddp), (share, mine), strict=True):
            optimizer.zero_grad()
            mse_loss(call(rows[part]), targets[part]).backward()
            optimizer.step()
        off.append(proof.apart(alone.parameters(), model.parameters()))
    return max(off)


@pytest.mark.parametrize("limit", [25, 0.0005])
def test_halves_train_as_one_process_with_all_rows(limit):
    assert max(run(train_as_one, 2, limit)) < 1e-6  # some of it is float32
