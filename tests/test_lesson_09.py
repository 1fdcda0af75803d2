"""Lesson 09: what BatchNorm sees of a batch in parts, and a BatchNorm that sees all of it."""

import contextlib
import sys
import time
import warnings

import cloudpickle
import lesson_09_batch_norm as lesson
import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from conftest import run_lesson, run_warm
from lockstep import lessons, proofs
from nbtools import run
from nbtools.record import Wire
from solutions.lesson_09 import forwards_that_send
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROW = lessons.find("09")
proof = proofs.of_lesson(ROW)

MEAN = "(counts * means).sum(0) / count  #"
SAVE = "ctx.save_for_backward(normalised, scale, count)"
DDP = "(model, forward_sync_buffers=send_buffers)"
KEPT = "kept = self.running_mean, self.running_var"
ROWS = "values = channels_last.f"
CLASS = "layer.__class__ = SynchronisedBatchNorm"
STEP = "optimizer.step()\n\n\ndef join"
ALL = "dist.all_gather_object([None] * dist.get_world_size(), values)"

# More ranks change nothing in these mistakes.
BREAKS = {
    "a mean of its own": (MEAN, "own_mean  #"),
    "spread within the parts only": (" + counts * (means - mean).square()", ""),
    "unbiased, not biased": (
        "square()).sum(0) / count",
        "square()).sum(0) / (count - 1)",
    ),
    "biased, not unbiased": ("variance * count / (count - 1)", "variance"),
    "one pass": ("(values - own_mean).square()", "(values.square() - own_mean.square())"),
    "evaluation as in training": ("if not self.training:", "if False:"),
    "a training forward without gradients evaluates": (
        "if not self.training:",
        "if not (self.training and torch.is_grad_enabled()):",
    ),
    "eps is not heeded in evaluation": (', "eps": self.eps', ""),
    "momentum=None is 0.1": ("1 / self.num_batches_tracked.item()", "0.1"),
    "sums in half precision": ("values = values.float()", "pass"),
    "outputs in float32": ("outputs.contiguous().to(inputs.dtype)", "outputs.contiguous()"),
    "no DDP": (f"DistributedDataParallel{DDP}", "model"),
    "buffers that begin apart": (DDP, "(model, broadcast_buffers=False)"),
    "buffers sent in each step": (DDP, "(model)"),
    "rows of its own part": ("dist.all_reduce(count)", "pass"),
    "no update": (STEP, STEP.replace("optimizer.step()", "pass")),
    "all rows sent": (SAVE, f"{ALL}; {SAVE}"),
    "a whole number sent in each forward": (SAVE, f"dist.all_reduce(count.long()); {SAVE}"),
    "a wait in evaluation": (KEPT, f"dist.barrier(); {KEPT}"),
    "a wait after training": (STEP, STEP.replace("()", "()\n    dist.barrier()", 1)),
    "no gradient in evaluation": ("batch_norm(inputs, *kept", "batch_norm(inputs.detach(), *kept"),
    "videos taken for rows": (ROWS, "values = (channels_last if inputs.dim() != 5 else inputs).f"),
    "a single row does not count": ("([len(values)])", "([len(values) * (len(values) > 1)])"),
    "running statistics of the last rank": (SAVE, f"{SAVE}; mean = means[-1] * 1"),
    "the loss without world size": ("(loss * dist.get_world_size())", "loss"),
    "plain: the switch reversed": ('send_buffers=way == "DDP"', 'send_buffers=way != "DDP"'),
    "parts not weighted by rows": (MEAN, "means.mean(0)  #"),
    "no gradient across ranks": ("dist.all_reduce(sums)  #", "pass  #"),
    "a gradient of a gradient": ("    @once_differentiable\n", ""),
    "the only row of a batch": ("if count < 2:", "if False:"),
    "no BatchNorm2d is converted": ("(nn.BatchNorm1d, nn.BatchNorm2d, nn.", "(nn.BatchNorm1d, nn."),
    "layers of a model are not converted": ("in model.modules()", "in [model]"),
    "a converted layer begins anew": (CLASS, f"{CLASS}; layer.reset_parameters()"),
    "the model is not converted": ("model = convert(model)", "pass"),
    "the mean of a rank's own loss": (".square().sum() / count", ".square().mean()"),
    "gradients are not cleared": ("optimizer.zero_grad()", "pass"),
    "the same rows on all ranks": ("in (rank, rank + 1))", "in (0, 1))"),
}


@pytest.mark.claim("A7")
@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(9, BREAKS, nproc, "--steps", 3)


# --- The whole script ---


@pytest.mark.claim("A7")
def test_default_run(default_run):
    facts = default_run(9).json
    assert (facts["backend"], facts["parts"]) == ("gloo", [10, 20])
    assert facts["sync_diff"] < 1e-10 < 0.1 < facts["plain_diff"]
    rows, _ = lesson.make_rows(0)
    inputs = lesson.make_model(nn.BatchNorm1d, 0)[0](rows[:30]).detach()[:, 0]
    own, used, kept = [part.mean().item() for part in inputs.chunk(2)], facts["used"], facts["kept"]
    for way in ("DataParallel", "DDP", "DDP, buffers not sent"):
        assert used[way] == pytest.approx(own, abs=1e-10)
        assert kept[way][0] == pytest.approx(kept["DataParallel"][0], abs=1e-10)  # the master's
    for way in ("one process", "synchronised"):
        assert used[way] == pytest.approx([inputs.mean().item()] * len(kept[way]))
    for means in (kept, facts["kept_variance"]):
        (master,), (one,) = means["DataParallel"], means["one process"]
        assert abs(master - one) > 0.01 and means["synchronised"] == pytest.approx([one, one])
        apart = [abs(means[way][0] - means[way][1]) for way in ("DDP", "DDP, buffers not sent")]
        assert 0 < 3 * apart[0] < apart[1]  # different again after each forward; and never sent


@pytest.mark.claim("A7")
@pytest.mark.parametrize("nproc, flags", [(1, ()), (4, ("--batch-size", "9", "--steps", "2"))])
def test_other_shares_pass(nproc, flags):
    """With 2 rows for each of 4 ranks, the first has no row at all."""
    words = ["--seed", "3", *flags]
    said = verdicts_of_proof(ROW, {"as it is": ROW.script.read_text()}, nproc, words, machines=1)
    passed, claim = said["as it is"]
    assert passed, claim
    assert nproc == 1 or "on 0 + 2 + 2 + 4 rows" in claim


@pytest.mark.parametrize("size", ("7", "101"))
def test_too_few_and_too_many_rows_are_refused(capsys, size):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, ["--batch-size", size], 4, 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "--batch-size: must be from 8, 2 for each rank" in line


PROJECT = """

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(60, 3, 2)
    layers = nn.Conv1d(3, 8, 1), SynchronisedBatchNorm(8), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    mine = rows[rank::world_size]
    model = nn.Sequential(*layers)
    train(model, [(mine, mine.sum((1, 2))[:, None])] * 50)
    loss = (model.eval()(rows) - rows.sum((1, 2))[:, None]).square().mean()
    losses = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(losses, loss.detach())
    if rank == 0:
        print(len(set(map(float, losses))), losses[0].item() < 0.2)
    dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    imports, _, rest = ROW.script.read_text().partition('"""\n\n')[2].partition("# --- The tech")
    file = tmp_path / "project.py"
    file.write_text(imports + "#" + rest.partition("# --- The example ---")[0] + PROJECT)
    assert run_warm(file, 2) == [(0, "1 True\n"), (0, "")]


@pytest.mark.gpu
@pytest.mark.claim("A7")
def test_the_librarys_equals_ours_on_gpus():
    gpus = min(2, torch.cuda.device_count())
    finished = run_lesson(9, "--nproc", gpus, "--json")
    assert finished.returncode == 0, finished.stderr
    assert finished.json["device"] == "cuda" and "nn.SyncBatchNorm" in finished.json["used"]


# --- The converter ---


class NormThenRelu(nn.BatchNorm1d):
    """A layer of which BatchNorm is only a part, as many libraries have."""

    def forward(self, inputs):
        return super().forward(inputs).relu()


def model_of_others():
    """Return a model with BatchNorm of all kinds: one in two places, and one frozen."""
    twice, frozen = nn.BatchNorm2d(4, eps=0.1, momentum=None), nn.BatchNorm1d(5).eval()
    free = nn.BatchNorm1d(5, track_running_stats=False, bias=False)
    video = nn.Sequential(nn.BatchNorm3d(4, affine=False), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 4, 3), twice, nn.Sequential(video, twice), frozen, free)


def test_what_is_converted_and_what_is_left():
    others = NormThenRelu(4), nn.InstanceNorm1d(4), nn.LazyBatchNorm1d()
    model = model_of_others().extend(others)
    before = [(one, one.training, repr(one)) for one in model.modules()]
    assert lesson.synchronise(model) is model
    names = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}
    for (layer, training, said), now in zip(before, model.modules(), strict=True):
        name, _, settings = said.partition("(")
        wanted = "SynchronisedBatchNorm" if name in names else name
        assert layer is now and now.training == training
        assert type(now).__name__ == wanted
        assert name not in names or repr(now) == f"{wanted}({settings}"
    # The library's loses what a subclass adds, breaks a lazy layer, and can miss a second place.
    twice = nn.BatchNorm1d(4)
    model = nn.Sequential(*others, twice, nn.ReLU(), twice)
    lost, same, broken, once, _, missed = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(lost) is type(broken) is type(once) is nn.SyncBatchNorm
    assert same is others[1] and broken.num_features == 0 and missed is twice


# --- DDP and buffers ---

EPOCH = ["usual"] * 3 + ["no_grad"] * 2
KINDS = [*EPOCH, *EPOCH, "no_sync", "usual", "usual"]
SENT = [True] * 4 + [False, False] + [True] * 3 + [False] * 3 + [True]


def buffers_sent(rank, world_size):
    """Return whether buffers are sent before each of some forwards, in three ways; and warnings."""
    found, rows = [], lesson.make_rows(0)[0]
    for options in ({}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}):
        model = lesson.make_model(nn.BatchNorm1d, 0)
        model[1].running_mean += rank
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = DistributedDataParallel(model, **options)
        sent, begun = [], model[1].running_mean[0].item()
        for kind in KINDS:
            context = {"no_grad": torch.no_grad, "no_sync": ddp.no_sync}.get(
                kind, contextlib.nullcontext
            )
            with Wire() as wire, context():
                outputs = ddp(rows[4 * rank :][:4])
                if kind != "no_grad":
                    outputs.sum().backward()
            sent.append(("broadcast", 128) in [(call.name, call.nbytes) for call in wire.calls])
        found.append((sent, begun, [str(one.message) for one in caught]))
    return found


@pytest.mark.claim("A7")
def test_when_ddp_sends_buffers():
    """Not after a forward without gradients or in no_sync; and what the two switches do."""
    assert sum(SENT[:10]) == forwards_that_send  # the task of the notebook
    for rank, (usual, ours, old) in enumerate(run(buffers_sent, 2)):
        assert usual == (SENT, 0.0, [])
        assert ours == ([False] * 13, 0.0, [])  # only when wrapping
        assert old[:2] == ([False] * 13, float(rank))
        assert len(old[2]) == 1 and "forward_sync_buffers" in old[2][0]


def who_goes_on(rank, world_size, folder, convert, expected):
    """Return on each rank which others end a forward of DDP while this one does not begin it."""
    ddp = DistributedDataParallel(convert(lesson.make_model(nn.BatchNorm1d, 0)))
    for late, free in enumerate(expected):
        torch.distributed.barrier()
        if rank == late:
            while not {f"{late} {one}" for one in free} <= {file.name for file in folder.iterdir()}:
                time.sleep(0.01)
            time.sleep(0.2)  # and who else?
            seen = sorted(int(file.name[2:]) for file in folder.glob(f"{late} *"))
        ddp(torch.ones(3, 5).double())
        (folder / f"{late} {rank}").touch()
    return seen


@pytest.mark.claim("A7")
@pytest.mark.parametrize(
    "convert, expected", [(nn.Module.train, [[], [2], [1]]), (lesson.synchronise, [[], [], []])]
)
def test_who_waits_for_whom_in_a_forward(tmp_path, convert, expected):
    """For rank 0's buffers all wait, and rank 0 for all; for statistics, each for all."""
    assert run(who_goes_on, 3, tmp_path, convert, expected) == expected
