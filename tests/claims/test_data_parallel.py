"""Evidence about nn.DataParallel and CUDA_VISIBLE_DEVICES, for claims of article A."""

import copy
import importlib
import itertools
import os
import subprocess
import sys

import cloudpickle
import lesson_01_data_parallel as lesson
import nbtools
import pytest
import torch
from lockstep.watch.devices import gradient
from lockstep.watch.stand_ins import find_devices, place
from proofs import lesson_01 as proof
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.claim("A2")
def test_without_any_device_it_splits_nothing(monkeypatch):
    source = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(source, "_get_available_device_type", lambda: None)
    rows, _, model = lesson.make_toy(0)
    seen = []
    model.register_forward_hook(lambda _, inputs, __: seen.append((os.getpid(), len(inputs[0]))))
    wrapped = nn.DataParallel(model)
    assert wrapped.device_ids == []
    assert torch.equal(wrapped(rows), model(rows))
    assert seen == [(os.getpid(), 100)] * 2


def ddp_step(rank, world_size):
    """Do one step the second way; return (process id, row numbers, gradient)."""
    rows, targets, model = lesson.make_toy(0)
    numbers = list(DistributedSampler(range(30), world_size, rank, shuffle=False))
    replica = nn.parallel.DistributedDataParallel(model)
    mse_loss(replica(rows[numbers]), targets[numbers]).backward()
    return os.getpid(), numbers, gradient(model.parameters())


@pytest.mark.claim("A2")
def test_one_process_and_one_process_per_replica_give_the_same_gradient():
    rows, targets, alone = lesson.make_toy(0)
    devices = find_devices(2)
    model = place(alone, devices[0])
    here = [place(part[:30], devices[0]) for part in (rows, targets)]
    with torch.autograd.set_multithreading_enabled(False):
        ours = proof.gradient_of(model, lambda x: lesson.data_parallel(model, x, devices), *here)
    pids, numbers, theirs = zip(*nbtools.run(ddp_step, 2), strict=True)
    assert len({os.getpid(), *pids}) == 3  # every rank is a process of its own
    assert sorted(itertools.chain(*numbers)) == list(range(30))
    for other in theirs:
        assert torch.allclose(other, ours, rtol=0, atol=1e-12)


@pytest.mark.claim("A8")
def test_weights_are_saved_from_the_module_inside():
    _, _, model = lesson.make_toy(0)
    devices = find_devices(2)
    wrapped = nn.DataParallel(place(model, devices[0]), [0, 1])
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert list(wrapped.module.state_dict()) == ["weight", "bias"]

    def on_cpu(state):
        return {name: tensor.cpu() for name, tensor in state.items()}

    _, _, fresh = lesson.make_toy(seed=1)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(on_cpu(wrapped.state_dict()))
    fresh.load_state_dict(on_cpu(wrapped.state_dict()), strict=False)  # no error, and no effect
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())
    fresh.load_state_dict(on_cpu(wrapped.module.state_dict()))
    assert torch.equal(fresh.weight, model.weight)


VISIBLE = """
import os
import torch
{before}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
try:
    torch.ones(1, device="cuda")
except RuntimeError:
    print("hidden", torch.cuda.device_count())
else:
    print("visible", torch.cuda.device_count())
"""


@pytest.mark.gpu
@pytest.mark.claim("A4")
@pytest.mark.parametrize(
    "before, late",
    [("", False), ("torch.nn.Linear(5, 2)", False), ('torch.ones(1, device="cuda")', True)],
)
def test_the_variable_counts_until_the_first_cuda_call(before, late):
    """A model that was built on the CPU is not a CUDA call: it is not too late then."""
    command = [sys.executable, "-c", VISIBLE.format(before=before)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    expected = f"visible {torch.cuda.device_count()}\n" if late else "hidden 0\n"
    assert (run.returncode, run.stdout) == (0, expected), run.stderr


@pytest.mark.gpu
@pytest.mark.claim("A4")
def test_without_the_variable_all_gpus_are_used():
    gpus = list(range(torch.cuda.device_count()))
    assert gpus and nn.DataParallel(nn.Linear(5, 2).cuda()).device_ids == gpus
