"""The cures of README.md and docs/errors.md, tried on the faults that they are for.

After a cure the ranks agree, and their gradients are those of one process with all rows. A cure for
the neighbour's fault is tried as well: where it only silences the message, the ranks differ.
"""

import os
import subprocess
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nbtools import RankFailed, run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows_of(step, rank):
    """Return the rows of a rank in a step: 8 of 4 numbers."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def train(rank, world_size, make_model, change, options):
    """Train for three steps; return (parameters, largest difference of a gradient to one process).

    make_model() returns a model; change(model) is called when DDP has wrapped it with `options`.
    """
    alone, model = make_model(), make_model()
    replica = DistributedDataParallel(model, **options)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    largest = 0.0
    for step in range(3):
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        all_rows = torch.cat([rows_of(step, other) for other in range(world_size)])
        alone(all_rows).square().mean().backward()
        optimizer.zero_grad()
        replica(rows_of(step, rank)).square().mean().backward()
        gap = flat(p.grad for p in model.parameters()) - flat(p.grad for p in alone.parameters())
        largest = max(largest, gap.abs().max().item())
        optimizer.step()
    return flat(model.parameters()), largest


def leave(model):
    """Change nothing."""


def differences(make_model, change=leave, **options):
    """Return the largest differences: of a parameter between ranks; of a gradient to one process.

    RankFailed is raised if a rank fails.
    """
    (zero, gap_0), (one, gap_1) = run(train, 2, make_model, change, options)
    return (zero - one).abs().max().item(), max(gap_0, gap_1)


def is_right(between_ranks, to_one_process):
    return between_ranks == 0 and to_one_process < 1e-12


# --- A parameter is not the one that DDP has seen ---


def a_linear_layer():
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def replace_weight(model):
    """Put another parameter in the place of one that DDP has seen."""
    model.weight = nn.Parameter(torch.ones_like(model.weight))


def write_into_weight(model):
    with torch.no_grad():
        model.weight.copy_(torch.ones_like(model.weight))


def replaced_before():
    replace_weight(model := a_linear_layer())
    return model


def test_a_parameter_that_was_replaced_after_wrapping():
    with pytest.raises(RankFailed, match="Expected to have finished reduction"):
        differences(a_linear_layer, replace_weight)
    assert is_right(*differences(a_linear_layer, write_into_weight))
    assert is_right(*differences(replaced_before))


def test_the_flag_for_unused_parameters_only_silences_that():
    between_ranks, to_one_process = differences(
        a_linear_layer, replace_weight, find_unused_parameters=True
    )
    assert between_ranks > 0.01 and to_one_process > 0.01


# --- A parameter is ready twice ---


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward, used `times` in a forward."""

    def __init__(self, times, reentrant, with_first):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4) if with_first else None
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.times, self.reentrant = times, reentrant

    def forward(self, rows):
        hidden = self.first(rows) if self.first else rows.requires_grad_()
        for _ in range(self.times):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def checkpointed(times, reentrant, with_first=True):
    """Return a function that makes the model, in float64."""
    return lambda: Checkpointed(times, reentrant, with_first).double()


FIND = {"find_unused_parameters": True}


def test_a_reentrant_checkpoint_with_the_flag_for_unused_parameters():
    with pytest.raises(RankFailed, match="mark a variable ready only once"):
        differences(checkpointed(1, True), **FIND)
    assert is_right(*differences(checkpointed(1, True)))  # without the flag
    assert is_right(*differences(checkpointed(1, False), **FIND))
    assert is_right(*differences(checkpointed(1, True), **FIND, static_graph=True))


def test_a_block_in_two_reentrant_checkpoints():
    with pytest.raises(RankFailed, match="mark a variable ready only once"):
        differences(checkpointed(2, True))
    between_ranks, to_one_process = differences(checkpointed(2, True, with_first=False))
    assert between_ranks > 0.01 and to_one_process > 0.01  # and not a word
    with pytest.raises(RankFailed, match="mark a variable ready only once"):
        differences(checkpointed(2, True, with_first=False), **FIND)  # without the flag: as above
    for with_first in (True, False):
        assert is_right(*differences(checkpointed(2, False, with_first)))
        assert is_right(*differences(checkpointed(2, True, with_first), static_graph=True))


# --- One rank wraps its model, another one is elsewhere ---


def wrap_on_rank_0_only(rank, world_size):
    if rank == 0:
        DistributedDataParallel(nn.Linear(4, 1))
    else:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(counts, torch.tensor([1797]))  # how many rows each rank has


def test_a_strange_number_of_parameters_is_the_data_of_another_collective():
    """And which of the two ranks is wrong, nobody knows."""
    words = "this rank has 2 parameters, and rank 1 has sent 1797: do their .* or was one of them"
    with pytest.raises(RankFailed, match=words):
        run(wrap_on_rank_0_only, 2)


# --- Files ---


def save_into_a_new_folder(rank, world_size, folder, makers):
    """Ranks `makers` make the folder, rank 0 late; rank 1 saves into it."""
    if rank == 0:
        dist.barrier()  # rank 1 has saved
    if rank in makers:
        os.makedirs(folder, exist_ok=True)
    if rank == 1:
        torch.save({}, f"{folder}/optimizer_1.pt")
        dist.barrier()


def test_a_folder_that_is_not_there_yet(tmp_path):
    with pytest.raises(RankFailed, match=r"Parent directory .* does not exist"):
        run(save_into_a_new_folder, 2, str(tmp_path / "new"), [0])
    run(save_into_a_new_folder, 2, str(tmp_path / "new"), [0, 1])


def load_into_a_larger_model(rank, world_size, folder, planner):
    """Return whether the layer of the checkpoint was loaded, and whether the new one stayed."""
    old, larger = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    dcp.save({"0.weight": old.weight, "0.bias": old.bias}, checkpoint_id=folder)
    state = larger.state_dict()
    was = larger[1].weight.clone()
    dcp.load(state, checkpoint_id=folder, planner=planner)
    loaded = [None] * world_size
    dist.all_gather_object(loaded, larger[0].weight.tolist())
    return loaded[0] == loaded[1], torch.equal(larger[1].weight, was)


def test_a_sharded_checkpoint_without_a_layer_of_the_model(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(RankFailed, match=r"Missing key in checkpoint state_dict: 1.(weight|bias)"):
        run(load_into_a_larger_model, 2, folder, None)
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)
    assert run(load_into_a_larger_model, 2, folder, partly) == [(True, True), (True, True)]


def collect_state(rank, world_size, on):
    """Shard a model; ranks `on` ask for its whole state. Return the shape of a weight in it."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 8), mesh=init_device_mesh("cpu", (world_size,)))
    whole = None
    if rank in on:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model(torch.ones(2, 4)).sum().backward()
    return None if whole is None else list(whole["weight"].shape)


def test_the_whole_state_of_a_sharded_model_is_a_collective():
    with pytest.raises(RankFailed, match=r"get_model_state_dict .* tensors of the same size"):
        run(collect_state, 2, [0])
    assert run(collect_state, 2, [0, 1]) == [[8, 4], [8, 4]]


FUNCTION = "def train(rank):\n    assert rank == 0\n"
SPAWN = (
    "from multiprocessing import get_context\n"
    "process = get_context('spawn').Process(target=train, args=(0,))\n"
    "process.start()\nprocess.join()\nraise SystemExit(process.exitcode)\n"
)


def test_a_function_of_a_notebook_is_not_found_by_spawn(tmp_path):
    """A kernel runs a cell as a text that is no file; mp.spawn starts its processes like this."""
    (tmp_path / "my_ranks.py").write_text(FUNCTION)
    command = [sys.executable, "-c"]
    cell = [*command, FUNCTION + SPAWN], [*command, "from my_ranks import train\n" + SPAWN]
    fault, cure = (subprocess.run(c, cwd=tmp_path, capture_output=True, text=True) for c in cell)
    assert "Can't get attribute 'train' on <module '__main__' (built-in)>" in fault.stderr
    assert (fault.returncode, cure.returncode, cure.stderr) == (1, 0, "")
