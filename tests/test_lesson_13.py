"""Lesson 13: layers cut by columns and rows, replicas of that, and what it costs."""

import re
import sys
from unittest.mock import patch

import cloudpickle
import lesson_11_how_fast as how_fast
import lesson_13_tensor_and_hybrid as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import run_lesson
from nbtools import run
from torch import nn
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
BLOCK = lesson.TOKENS * lesson.WIDTH * 8  # bytes of x for one row, in float64


# --- The whole script ---


@pytest.mark.claim("D1")
def test_default_run(default_run):
    result = default_run(13).json
    assert result["mesh"] == {"data": 1, "tensor": 2}
    assert max(result[f"{name}_diff"] for name in ("max_grad", "max_loss", "library")) < 1e-12
    assert result["all_reduces_per_step"] == [{"data": 0, "tensor": 8}] * 2
    assert result["bytes_per_step"] == [{"data": 0, "tensor": 8 * 32 * BLOCK}] * 2
    whole = sum(parameter.numel() for parameter in lesson.Transformer().parameters())
    assert [whole * 0.5 < held < whole * 0.52 for held in result["parameters_per_rank"]] == [
        True
    ] * 2
    assert result["loss_last"] < result["loss_first"] / 2


SHAPES = [(1, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (2, 4)]


@pytest.mark.claim("D1")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_mesh_has_the_gradients_of_one_process_and_sends_what_it_should(shape):
    data, tensor = shape
    for rank, facts in enumerate(run(lesson.measure, data * tensor, CPU, shape, 2, deadline=200)):
        assert tuple(facts["place"]) == divmod(rank, tensor)  # neighbours share a model
        assert max(facts["grad_diffs"]) < 1e-12 and facts["library_diff"] < 1e-12
        assert facts["tensor"] == [32 // data * BLOCK] * (8 if tensor > 1 else 0)
        assert facts["data"] == ([facts["parameters"] * 8] if data > 1 else [])


@pytest.mark.claim("D3")
def test_parameters_shrink_with_the_parts_and_bytes_do_not():
    held, handed_in = {}, {}
    for n in (2, 4):
        facts = run(lesson.measure, n, CPU, (1, n), 1, deadline=100)[0]
        held[n], handed_in[n] = facts["parameters"], sum(facts["tensor"])
    assert held[4] < 0.53 * held[2] and handed_in[4] == handed_in[2]
    sent = {n: how_fast.all_reduce_cost(n, handed_in[n])[1] for n in (2, 4)}
    assert sent[4] == 1.5 * sent[2]  # each rank computes half as much, and sends more


# --- Main fails without the technique ---


def forget_f():
    lesson.SumInBackward.apply = lambda x, group: x


def forget_g():
    lesson.SumInForward.apply = lambda part, group: part


def sum_both_ways():
    right = lesson.SumInForward.apply
    lesson.SumInForward.apply = lambda part, group: right(
        lesson.SumInBackward.apply(part, group), group
    )


def bias_on_every_rank():
    def forward(self, x):
        hidden = gelu(self.up(lesson.SumInBackward.apply(x, self.group)))
        return lesson.SumInForward.apply(self.down(hidden), self.group)

    lesson.SplitMLP.forward = forward


def cut_rows_where_columns_belong():
    """Give each rank other columns in `down` than it has hidden units."""
    my_part = lesson.my_part

    def part(tensor, dim, group):
        return my_part(tensor.flip(1) if dim == 1 else tensor, dim, group)

    lesson.my_part = part


def average_over_all():
    lesson.DistributedDataParallel = lambda model, process_group: DistributedDataParallel(model)


def do_not_average():
    lesson.DistributedDataParallel = lambda model, process_group: model


def deal_rows_by_rank():
    lesson.DistributedSampler = lambda data, *_, seed: DistributedSampler(data, seed=seed)


def f_three_times():
    """Right numbers, more messages than needed: each of query, key and value adds up its own."""

    def forward(self, x):
        three = [lesson.SumInBackward.apply(x, self.group) for _ in range(3)]
        layers = (self.query, self.key, self.value)
        mixed = lesson.attend(*(layer(copy) for layer, copy in zip(layers, three, strict=True)))
        part = lesson.linear(mixed, self.out.weight)
        return lesson.SumInForward.apply(part, self.group) + self.out.bias

    lesson.SplitAttention.forward = forward


def another_answer_of_the_library():
    lesson.library_distance = lambda *_: 1e-9


def do_not_learn():
    """Let the optimizer of the split model, and only that one, do nothing."""
    train = lesson.train

    def train_without_updates(*arguments):
        training = train(*arguments)
        while True:
            with patch.object(torch.optim.SGD, "step", lambda self: None):
                seen = next(training)
            yield seen

    lesson.train = train_without_updates


def another_loss():
    right = lesson.train
    lesson.train = lambda *arguments: ((*rows, 0.9 * loss) for *rows, loss in right(*arguments))


def main_with(rank, world_size, change, shape):
    """Run main() on a rank, whose group exists already, after one change of the technique."""
    change()
    here = {"join_group": lambda: (rank, world_size, CPU), "report": lambda _: None}
    with patch.multiple(lesson, **here):
        data, tensor = shape
        return lesson.main(steps=2, data=data, tensor=tensor)[0]


def nothing():
    pass


CHANGES = [(nothing, (2, 2)), (forget_f, (1, 2)), (forget_g, (1, 2)), (sum_both_ways, (1, 2))]
CHANGES += [(bias_on_every_rank, (1, 2)), (cut_rows_where_columns_belong, (1, 2))]
CHANGES += [(average_over_all, (2, 2)), (do_not_average, (2, 1)), (deal_rows_by_rank, (1, 2))]
CHANGES += [(f_three_times, (1, 2)), (another_answer_of_the_library, (1, 1))]
CHANGES += [(do_not_learn, (1, 2)), (another_loss, (2, 1))]


@pytest.mark.claim("D1")
@pytest.mark.parametrize("change, shape", CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_main_fails_when_a_technique_is_removed(change, shape):
    ranks = shape[0] * shape[1]
    assert run(main_with, ranks, change, shape, deadline=200) == [change is nothing] * ranks


# --- The operators ---


def call_operators(rank, world_size):
    """Return what f and g leave of a tensor, their results and their gradients."""
    group, x = dist.group.WORLD, torch.full((2, 3), rank + 1.0).T.requires_grad_()
    seen = []
    for operator in (lesson.SumInBackward, lesson.SumInForward):
        result = operator.apply(x, group)
        (gradient,) = torch.autograd.grad(result, x, torch.ones(2, 3).T)  # as x: not contiguous
        seen += [result.unique().tolist(), gradient.unique().tolist()]
    return x.detach().unique().tolist(), seen


def test_f_sums_backward_only_and_g_forward_only_and_neither_changes_its_input():
    for rank, (x, seen) in enumerate(run(call_operators, 3)):
        assert x == [rank + 1.0]
        assert seen == [[rank + 1.0], [3.0], [6.0], [1.0]]


def split_and_put_together(rank, world_size):
    """Return the differences of a layer to its parts, put together again."""
    layer = nn.Linear(6, 12)
    dist.broadcast(layer.weight.data, 0)
    dist.broadcast(layer.bias.data, 0)
    by_columns = lesson.by_columns(layer, dist.group.WORLD)
    by_rows = lesson.by_rows(layer, dist.group.WORLD)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (by_columns.weight, by_columns.bias, by_rows.weight))
    columns, biases, rows = zip(*everyone, strict=True)
    equal = [
        torch.equal(torch.cat(columns), layer.weight),
        torch.equal(torch.cat(biases), layer.bias),
    ]
    equal += [torch.equal(torch.cat(rows, 1), layer.weight), torch.equal(by_rows.bias, layer.bias)]
    by_columns.weight.data.zero_()  # of its own memory, not a view of the whole layer
    return equal, (layer.weight != 0).all().item(), repr(by_columns), repr(by_rows)


def test_parts_make_the_whole_layer_and_do_not_keep_it_in_memory():
    for equal, untouched, columns, rows in run(split_and_put_together, 3):
        assert equal == [True] * 4 and untouched
        assert "in_features=6, out_features=4" in columns
        assert "in_features=2, out_features=12" in rows


# --- Flags ---


def answer(monkeypatch, ranks, batch_size=32, data=0, tensor=0):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return lesson.refuse(batch_size=batch_size, data=data, tensor=tensor)


def test_any_number_of_ranks_has_a_default_mesh(monkeypatch):
    for ranks in range(1, 65):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        data, tensor = lesson.mesh_shape(0, 0)
        assert data * tensor == ranks and lesson.HEADS % tensor == 0
        assert answer(monkeypatch, ranks, batch_size=64) is None
    meshes = {1: (1, 1), 2: (1, 2), 4: (1, 4), 5: (5, 1), 8: (2, 4)}
    for ranks, mesh in meshes.items():
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert lesson.mesh_shape(0, 0) == mesh


def test_meshes_that_do_not_fit_are_refused(monkeypatch):
    assert answer(monkeypatch, 6, data=3) is answer(monkeypatch, 6, tensor=2) is None
    assert answer(monkeypatch, 8, data=2, tensor=4) is None
    wrong = {"--data: 3 does not divide": {"ranks": 4, "data": 3}}
    wrong["--tensor: 4 does not divide"] = {"ranks": 6, "tensor": 4}
    wrong["2 x 2 (--tensor) is not the number of ranks, 8"] = {"ranks": 8, "data": 2, "tensor": 2}
    wrong["the 12 heads can't be dealt out to 8 ranks"] = {"ranks": 8, "tensor": 8}
    wrong["the 12 heads can't be dealt out to 5 ranks"] = {"ranks": 5, "data": 1}
    wrong["--batch-size: must be at least the number of replicas, 4"] = {
        "ranks": 4,
        "data": 4,
        "batch_size": 3,
    }
    for words, flags in wrong.items():
        assert words in answer(monkeypatch, **flags), flags


def test_a_mesh_that_does_not_fit_costs_one_line_and_no_rank_is_started():
    finished = run_lesson(13, "--nproc", 4, "--data", 3, "--tensor", 2)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert re.fullmatch(r".*error: argument --data: 3 does not divide .*\n", finished.stderr)


@pytest.mark.gpu
def test_on_gpus_each_rank_has_its_own():
    gpus = min(4, torch.cuda.device_count())
    if gpus < 2:
        pytest.skip("needs two GPUs: one sends no message")
    for mesh in [()] + [("--data", 2, "--tensor", 2)] * (gpus == 4):
        result = run_lesson(13, "--json", "--nproc", gpus, *mesh).json
        expected = ("nccl", "cuda", True)
        assert (result["backend"], result["device"], result["passed"]) == expected
