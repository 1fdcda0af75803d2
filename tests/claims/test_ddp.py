"""Evidence about DistributedDataParallel and DistributedSampler, for claims of articles A to C."""

import sys
from collections import Counter

import cloudpickle
import lesson_02_launch_ddp as lesson
import pytest
import torch
from nbtools import run
from nbtools.record import Wire
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def listen(rank, world_size, steps):
    """Return the collectives of each phase, and what this rank's tensors were after it."""
    rows, targets, _ = lesson.make_toy(seed=0)
    _, _, model = lesson.make_toy(seed=rank)  # other weights on each rank
    calls, seen = {}, {"start": flat(model.parameters())}
    with Wire() as wire:
        replica = DistributedDataParallel(model)
    calls["wrapping"], seen["wrapped"] = wire.calls, flat(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with Wire() as wire:
            loss = mse_loss(replica(rows[rank:24:world_size]), targets[rank:24:world_size])
        calls["forward", step] = wire.calls
        alone = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        with Wire() as wire:
            loss.backward()
        calls["backward", step], seen["alone", step] = wire.calls, flat(alone)
        seen["gradient", step] = flat(parameter.grad for parameter in model.parameters())
        before = flat(model.parameters())
        with Wire() as wire:
            optimizer.step()
        calls["step", step] = wire.calls
        seen["update", step] = flat(model.parameters()) - before
    return calls, seen


@pytest.fixture(scope="module", params=[2, 3])
def heard(request):
    """Return [(collectives, tensors) of each rank] of four steps with DDP."""
    return run(listen, request.param, 4)


@pytest.mark.claim("A9")
def test_parameters_are_sent_once_when_the_model_is_wrapped(heard):
    starts = [seen["start"] for _, seen in heard]
    assert all((start - starts[0]).abs().max() > 1 for start in starts[1:])  # they differed
    for calls, seen in heard:
        assert torch.equal(seen["wrapped"], starts[0])  # now all have rank 0's
        assert calls["wrapping"].count(("broadcast", "float64", 12, 96)) == 1
        later = [call for phase, made in calls.items() if phase != "wrapping" for call in made]
        # What is broadcast later is one table of buckets, in integers: no parameters.
        broadcasts = [call for call in later if call.name != "allreduce"]
        assert {(call.name, call.kind) for call in broadcasts} == {("broadcast", "int32")}
        assert sum(call.nbytes for call in broadcasts) == 16


@pytest.mark.claim("A9", "A10")
def test_gradients_are_averaged_in_backward_and_not_in_step(heard):
    for step in range(4):
        mean = sum(seen["alone", step] for _, seen in heard) / len(heard)
        for calls, seen in heard:
            assert calls["backward", step] == [("allreduce", "float64", 12, 96)]
            assert calls["step", step] == []
            assert torch.equal(seen["gradient", step], heard[0][1]["gradient", step])
            assert (seen["gradient", step] - mean).abs().max() < 1e-12
            assert (seen["alone", step] - mean).abs().max() > 1e-3  # they had been different
            assert (seen["update", step] + 0.1 * seen["gradient", step]).abs().max() < 1e-12


def forward_only(rank, world_size):
    rows, _, model = lesson.make_toy(seed=0)
    replica = DistributedDataParallel(model)
    with Wire() as wire:
        for _ in range(4):
            replica(rows[rank::world_size])
    return wire.calls, [parameter.grad for parameter in model.parameters()]


@pytest.mark.claim("A19")
def test_a_loop_without_backward_sends_nothing():
    assert run(forward_only, 2) == [([], [None, None])] * 2


def several_devices(rank, world_size, device_ids):
    try:
        DistributedDataParallel(nn.Linear(5, 2), device_ids=device_ids)
    except ValueError as error:
        return str(error)


@pytest.mark.claim("C1")
def test_several_replicas_in_one_process_are_refused():
    assert "single element" in run(several_devices, 1, [0, 1])[0]


# --- The sampler ---


def shares(world_size, rows=100):
    return [list(DistributedSampler(range(rows), world_size, rank)) for rank in range(world_size)]


@pytest.mark.claim("B5", "A10")
@pytest.mark.parametrize("world_size, repeated", [(1, 0), (2, 0), (3, 2), (4, 0), (7, 5)])
def test_sampler_deals_every_row_and_pads_by_repeating(world_size, repeated):
    parts = shares(world_size)
    times = Counter(number for part in parts for number in part)
    assert sorted(times) == list(range(100))
    assert times.total() == 100 + repeated
    assert {len(part) for part in parts} == {(100 + repeated) // world_size}


@pytest.mark.claim("B5")
def test_padding_falsifies_an_evaluation():
    has_it = set(range(0, 100, 3))  # 34 of 100 rows
    for world_size, right in ((3, False), (4, True)):
        counted = [number in has_it for part in shares(world_size) for number in part]
        assert (sum(counted) / len(counted) == pytest.approx(0.34, abs=1e-6)) == right


@pytest.mark.claim("B5")
def test_without_set_epoch_the_order_never_changes():
    sampler = DistributedSampler(range(100), 2, 0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.claim("C3")
def test_without_a_distributed_sampler_every_rank_reads_all_rows():
    for seed in (0, 1):  # with equal seeds even in the same order: twice the work, nothing shared
        loaders = [
            DataLoader(range(100), 15, shuffle=True, generator=torch.Generator().manual_seed(s))
            for s in (0, seed)
        ]
        zero, one = ([int(n) for batch in loader for n in batch] for loader in loaders)
        assert sorted(zero) == sorted(one) == list(range(100))
        assert (zero == one) == (seed == 0)
