"""Checkpoints of another device, or of a wrapped model: what PyTorch says, and what cures it."""

import re
import sys

import cloudpickle
import lesson_06_checkpoint_map_location as lesson
import pytest
import torch
from nbtools import run
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = torch.device("cpu")


def file_from(device, path):
    """Save a tensor of 4,000 bytes in a file that says that it comes from `device`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: device)
        lesson.save({"weight": torch.ones(1000)}, path)
    return path


@pytest.mark.claim("A15")
def test_a_missing_device_raises_the_article_s_error_and_map_location_is_the_cure(
    monkeypatch, tmp_path
):
    path = file_from("cuda:1", tmp_path / "from_gpu.pt")
    words = {0: "object on a CUDA device but torch.cuda.is_available() is False"}
    words[1] = "object on CUDA device 1 but torch.cuda.device_count() is 1."
    for gpus, said in words.items():
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(RuntimeError, match=re.escape(f"Attempting to deserialize {said}")):
            torch.load(path)
        with pytest.raises(RuntimeError, match="Attempting to deserialize"):
            torch.load(path, map_location={"cuda:0": "cpu"})  # a dict maps only what it names
        for form in ("cpu", CPU, {"cuda:1": "cpu"}, lambda storage, location: storage):
            weight = torch.load(path, map_location=form)["weight"]
            assert weight.device == CPU and torch.equal(weight, torch.ones(1000))


@pytest.mark.claim("A15", "B7")
def test_every_rank_would_load_to_the_device_that_the_file_names(tmp_path):
    path = file_from("cuda:0", tmp_path / "from_gpu.pt")

    def bytes_asked_for(rank, world_size):
        asked = []
        torch.load(path, map_location=lambda one, tag: asked.append((tag, one.nbytes())) or one)
        return asked

    assert run(bytes_asked_for, 4) == [[("cuda:0", 4000)]] * 4  # 16,000 bytes on one device


@pytest.mark.claim("A8")
def test_state_dict_of_the_wrapper_does_not_fit_a_plain_model():
    def keys(rank, world_size):
        replica = nn.parallel.DistributedDataParallel(nn.Linear(5, 2))
        nn.Linear(5, 2).load_state_dict(replica.module.state_dict())
        with pytest.raises(RuntimeError, match=r'Unexpected key.* "module.weight", "module.bias"'):
            nn.Linear(5, 2).load_state_dict(replica.state_dict())
        return list(replica.state_dict())

    assert run(keys, 1) == [["module.weight", "module.bias"]]


def step_of(model, batch):
    model(batch).pow(2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.claim("A16")
def test_moving_a_module_moves_the_live_model():
    """From the CPU to `meta`, a device without data, since there may be no GPU to come from."""
    model, batch = nn.Linear(5, 2), torch.ones(3, 5)
    copies = {key: tensor.to("meta") for key, tensor in model.state_dict().items()}
    assert {tensor.device.type for tensor in copies.values()} == {"meta"}
    step_of(model, batch)  # the live model is where it was
    assert model.to("meta") is model and model.weight.device.type == "meta"
    with pytest.raises(RuntimeError, match=r"not on the expected device|same device"):
        step_of(model, batch)


@pytest.mark.gpu
@pytest.mark.claim("A15", "A16")
def test_on_a_gpu_the_article_s_cure_moves_the_live_model(tmp_path):
    model, path = nn.Linear(5, 2).cuda(), tmp_path / "step_00000001.pt"
    lesson.save({"model": model.state_dict()}, path)
    before = torch.cuda.memory_allocated()
    state, _ = lesson.load(path)
    assert torch.cuda.memory_allocated() == before
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    step_of(model, torch.ones(3, 5).cuda())
    model.cpu().state_dict()
    with pytest.raises(RuntimeError):
        step_of(model, torch.ones(3, 5).cuda())
