"""Lesson 01: the moves of nn.DataParallel, against one device and against the library."""

from pathlib import Path

import lesson_01_data_parallel as lesson
import pytest
import torch
from breaks import check_breaks
from conftest import run_lesson
from lockstep import lessons, proofs
from lockstep.watch import stand_ins
from lockstep.watch.devices import Watch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils import backend_registration

proof = proofs.of_lesson(lessons.find("01"))
SOURCE = Path(lesson.__file__).read_text()

COPY = 12 * 8  # bytes of one copy of the parameters: a layer 5 -> 2 in float64

# Rows inside the model, in the four steps of an epoch of 100 rows in batches of 30.
ROWS_INSIDE = {
    1: [[30], [30], [30], [10]],
    2: [[15, 15], [15, 15], [15, 15], [5, 5]],
    3: [[10, 10, 10], [10, 10, 10], [10, 10, 10], [4, 4, 2]],
    8: [[4, 4, 4, 4, 4, 4, 4, 2]] * 3 + [[2, 2, 2, 2, 2]],
}

BREAKS = {
    "one device does it all": (
        "    parts = scatter(rows, devices)\n    replicas",
        "    return model(rows)\n    replicas",
    ),
    "one after the other": (
        "list(threads.map(lambda replica, part: replica(part), replicas, parts))",
        "[replica(part) for replica, part in zip(replicas, parts)]",
        (3,),
    ),
    "two threads for three": ("ThreadPoolExecutor(len(parts))", "ThreadPoolExecutor(2)", (3,)),
    "parts as equal as possible": (
        "parts = rows.chunk(len(devices))",
        "parts = rows.tensor_split(len(devices))[: len(rows)]",
        (3,),
    ),
    "the same part for all": ("return [part.to(device) for", "return [parts[0].to(device) for"),
    "dealt like cards": (
        "parts = rows.chunk(len(devices))",
        "parts = [part for i in range(len(devices)) if len(part := rows[i :: len(devices)])]",
    ),
    "replicas for idle devices": ("for device in devices[: len(parts)]]", "for device in devices]"),
    "buffers stay at home": ("[*model.parameters(), *model.buffers()]", "[*model.parameters()]"),
    "one replica frozen": (
        "{id(tensor): tensor.to(device) for tensor in tensors}",
        "{id(t): t.to(device) if device.index != 1 else t.detach().to(device) for t in tensors}",
    ),
    "replicas kept from the first step": (
        "    replicas = [replicate(model, device) for device in devices[: len(parts)]]\n",
        "    kept = vars(data_parallel).setdefault('k', [replicate(model, d) for d in devices])\n"
        "    replicas = kept[: len(parts)]\n",
    ),
    "outputs in another order": ("for output in outputs])", "for output in outputs[::-1]])"),
    "outputs let go": (
        "torch.cat([output.to(device) for output in outputs])",
        "torch.cat([outputs[0], *(output.detach().to(device) for output in outputs[1:])])",
    ),
    "always the first batch": (
        "= batches[step % len(batches)]\n        optimizer.zero_grad()\n        outputs",
        "= batches[0]\n        optimizer.zero_grad()\n        outputs",
    ),
    "only the proof sees several devices": (
        "outputs = data_parallel(model, rows, devices)  #",
        "outputs = model(rows)  #",
    ),
    "gradients pile up": ("        optimizer.zero_grad()\n        outputs", "        outputs"),
    "a part's loss counts as the whole's": (
        "loss.backward()  # each",
        "(loss / len(devices)).backward()  # each",
    ),
    "two updates": (
        "        optimizer.step()  # only",
        "        optimizer.step(), optimizer.step()  # only",
    ),
    "five more replicas": (
        "        outputs = data_parallel(model, rows, devices)  #",
        "        [replicate(model, devices[-1]) for _ in range(5)]\n"
        "        outputs = data_parallel(model, rows, devices)  #",
    ),
    "no update": ("        optimizer.step()  # only", "        # only"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(1, BREAKS, nproc, "--steps", 6)  # an epoch has four


@pytest.fixture(autouse=True)
def one_thread_for_backward():
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.claim("A1", "A5", "A6")
@pytest.mark.parametrize("nproc", ROWS_INSIDE)
def test_main_passes_and_counts(nproc):
    args = proofs.read_flags(lesson.__file__, [f"--nproc={nproc}"], 1, 1)
    with proof.watched(args) as seen:
        lesson.main(args)
    verdict = proof.judge(seen, args, nproc, "none")
    assert verdict.wrong == [] and "one device and of nn.DataParallel" in verdict.claim
    result = verdict.numbers
    assert result["rows_per_replica"] == ROWS_INSIDE[nproc]
    assert result["rows_outside"] == [30, 30, 30, 10]
    copies = [len(parts) - 1 for parts in ROWS_INSIDE[nproc]]  # devices without rows get nothing
    for what in ("parameters", "gradients"):
        assert [step[what] for step in result["bytes_per_step"]] == [n * COPY for n in copies]
    assert result["loss_last"] < result["loss_first"] / 10


class Awkward(nn.Module):
    """Has a tied weight, a frozen parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 5, dtype=torch.float64)
        self.two = nn.Linear(5, 5, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.register_buffer("scale", torch.rand(5, dtype=torch.float64))

    def forward(self, rows):
        return self.two(self.one(rows) * self.scale)


@pytest.mark.claim("A1", "A2", "A5")
@pytest.mark.parametrize("size", [30, 10, 7, 1])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_ours_and_the_library_are_one_device(count, size):
    """Rows are counted by a hook in the layers, outputs compared in order, and gradients."""
    devices, alone = stand_ins.find_devices(count), Awkward()
    rows, targets = torch.rand(2, size, 5, dtype=torch.float64)
    here = [stand_ins.place(thing, devices[0]) for thing in (rows, targets)]
    model = stand_ins.place(alone, devices[0])
    model.two.weight = model.one.weight  # a stand-in has no memory that `to` could fill again
    parts = proof.parts_of(rows, devices)
    library = nn.DataParallel(model, list(range(count)))
    expected = proof.gradient_of(alone, alone, rows, targets)
    for forward in (lambda x: lesson.data_parallel(model, x, devices), library):
        with Watch(len(parts)) as seen:
            outputs = forward(here[0]).detach().cpu()
        assert (outputs - alone(rows)).abs().max() < 1e-12
        inside = sorted((device, len(rows)) for device, rows in seen.visits)
        assert inside == sorted([*enumerate(map(len, parts))] * 2)  # two layers
        assert not seen.meeting.broken
        assert (proof.gradient_of(model, forward, *here) - expected).abs().max() < 1e-12


def test_the_technique_alone_runs_in_another_file():
    """Its imports and its functions, on devices that are all the CPU."""
    imports, _, rest = SOURCE.partition('"""\n\n')[2].partition("# --- The technique ---")
    technique = rest.partition("# --- The example ---")[0]
    mine = {}
    exec(imports + technique, mine)
    rows, targets, model = lesson.make_toy(0)
    before = mse_loss(model(rows), targets)
    mine["train"](model, [(rows, targets)], [torch.device("cpu")] * 2, 40)
    assert mse_loss(model(rows), targets) < before / 10


# --- Stand-ins ---


def test_stand_ins_behave_like_devices():
    first, second = stand_ins.find_devices(2)
    module = nn.BatchNorm1d(3, device=second)
    module(torch.rand(4, 3).to(second)).sum().backward()
    assert {t.device for t in (module.weight.grad, module.running_mean)} == {second}
    here, there = torch.ones(2, device=first), torch.zeros((), device=second)
    assert (here + torch.tensor(1.0)).cpu().tolist() == [
        2,
        2,
    ]  # a number on the CPU may be mixed in
    for wrong in (there, torch.ones(2)):  # one on another device may not, as with CUDA
        with pytest.raises(RuntimeError, match="same device"):
            here + wrong
    source = torch.ones(2, device=second)
    assert here.copy_(source * 3).device == first and here.cpu().tolist() == [3, 3]
    there.copy_(torch.tensor(5.0, device=first))
    assert there.item() == 5


def test_a_torch_without_stand_ins_says_so(monkeypatch):
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend")
    with pytest.raises(SystemExit, match="can't make stand-ins"):
        stand_ins.register_stand_ins.__wrapped__()


@pytest.mark.gpu
@pytest.mark.claim("A1", "A2", "A5")
def test_on_gpus():
    gpus = torch.cuda.device_count()
    result = run_lesson(1, "--json", "--nproc", gpus, "--steps", 8).json
    assert result["passed"] and result["device"] == "cuda"
    assert result["max_diff_to_data_parallel"] < 1e-12
