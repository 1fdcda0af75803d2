"""Lesson 13: layers cut by columns and rows, replicas of that, and what it costs."""

import collections
import functools
import logging
import re
import sys

import cloudpickle
import lesson_11_how_fast as how_fast
import lesson_13_tensor_and_hybrid as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks
from conftest import ROOT, run_lesson, run_warm
from nbtools import run
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn.functional import mse_loss

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
BLOCK = lesson.TOKENS * lesson.WIDTH * 8  # bytes of x for one row, in float64

# Meshes (data, tensor): two whole models, one model in two parts, two models in two parts each.
REPLICAS, PARTS, BOTH = [(2, 1)], [(1, 2)], [(2, 2)]

BREAKS = {
    "the same rows on all replicas": (
        "(data, replicas, replica, seed=seed)",
        "(data, 1, 0)",
        REPLICAS,
    ),
    "rows by rank": ("(data, replicas, replica, seed=seed)", "(data, seed=seed)", BOTH),
    "an order of its own on each rank": ("seed=seed)  #", "seed=dist.get_rank())  #", REPLICAS),
    "not by the seed": (
        "(data, replicas, replica, seed=seed)",
        "(data, replicas, replica)",
        REPLICAS,
    ),
    "no new order": ("sampler.set_epoch(epoch)", "pass", REPLICAS),
    "a global batch twice as large": (
        "batch_size // replicas,",
        "2 * batch_size // replicas,",
        REPLICAS,
    ),
    "rows left out": ("sampler=sampler)", "sampler=sampler, drop_last=True)", REPLICAS),
    "the mesh turned round": (
        '(device.type, shape, mesh_dim_names=("data", "tensor"))',
        '(device.type, shape[::-1], mesh_dim_names=("tensor", "data"))',
        BOTH,
    ),
    "parts that are views": ("[dist.get_rank(group)].clone()", "[dist.get_rank(group)]", PARTS),
    "whole matrices are kept": (
        "    mine.weight = my_part(layer.weight, 1, group)",
        "    mine.weight = my_part(layer.weight, 1, group)\n    mine.whole = layer.weight.detach()",
        PARTS,
    ),
    "weights gathered in forward": (
        "        hidden = gelu(self.up(x))",
        "        weight = self.up.weight.detach()\n"
        "        n = dist.get_world_size(self.group)\n"
        "        dist.all_gather([weight.clone() for _ in range(n)], weight, group=self.group)\n"
        "        hidden = gelu(self.up(x))",
        PARTS,
    ),
    "each gradient reduced twice": (
        "            optimizer.step()",
        "            for parameter in model.parameters():\n"
        "                dist.all_reduce(parameter.grad, group=mesh.get_group('data'))\n"
        "                parameter.grad /= replicas\n"
        "            optimizer.step()",
        REPLICAS,
    ),
    "no DDP": ("loss = mse_loss(averaged(", "loss = mse_loss(model(", REPLICAS),
    "averaged over all": (', process_group=mesh.get_group("data"))', ")", BOTH),
    "no f": ("x = SumInBackward.apply(x, self.group)\n        hidden", "hidden", PARTS),
    "f three times": (
        "mixed = attend(self.query(x), self.key(x), self.value(x))\n        part",
        "one, two = (SumInBackward.apply(x, self.group) for _ in range(2))\n"
        "        mixed = attend(self.query(x), self.key(one), self.value(two))\n        part",
        PARTS,
    ),
    "bias on every rank": ("linear(hidden, self.down.weight)", "self.down(hidden)", PARTS),
    "hidden units and rows that do not belong together": (
        "my_part(layer.weight, 1, group)",
        "my_part(layer.weight.flip(1), 1, group)",
        PARTS,
    ),
    "another loss in the log": (
        "losses.append(loss.item())",
        "losses.append(2 * loss.item())",
        REPLICAS,
    ),
    "no update": ("            optimizer.step()\n", "            pass\n", REPLICAS),
    "f overwrites the gradient": (
        "total = gradient.clone(memory_format=torch.contiguous_format)",
        "total = gradient",
        PARTS,
    ),
    "g overwrites the part": (
        "total = part.clone(memory_format=torch.contiguous_format)",
        "total = part",
        PARTS,
    ),
    "a whole layer is made first": (
        "mine = nn.Linear(layer.in_features, layer.out_features // dist.get_world_size(group))",
        "mine = nn.Linear(layer.in_features, layer.out_features)",
        PARTS,
    ),
    "moved whole to the device": (
        "    split(model.blocks,",
        "    split(model.to(device).blocks,",
        PARTS,
    ),
    "blocks moved whole to the device": (
        "    split(model.blocks,",
        "    for block in model.blocks:\n        block.to(device)\n    split(model.blocks,",
        PARTS,
    ),
    "a plan without PrepareModuleInput": ('plan["blocks.*.attention"] =', "_ =", PARTS),
}


@pytest.mark.parametrize("mesh", REPLICAS + PARTS + BOTH, ids=str)
def test_each_break_ends_in_fail(mesh):
    data, tensor = mesh
    # A replica has an epoch of three steps, the last one smaller; a fourth needs a new order.
    steps = 4 if data > 1 else 2
    flags = ("--data", data, "--batch-size", 100 * data, "--steps", steps, "--seed", 5)
    check_breaks(13, BREAKS, data * tensor, *flags, mesh=mesh)


# --- The whole script ---


@pytest.mark.claim("D1")
def test_default_run(default_run):
    result = default_run(13).json
    assert result["mesh"] == {"data": 1, "tensor": 2}
    assert max(result[f"{name}_diff"] for name in ("max_grad", "max_loss", "library")) < 1e-12
    assert result["all_reduces_per_step"] == [{"data": 0, "tensor": 8}] * 2
    assert result["bytes_per_step"] == [{"data": 0, "tensor": 8 * 32 * BLOCK}] * 2
    whole = sum(parameter.numel() for parameter in lesson.Transformer().parameters())
    assert all(whole * 0.5 < held < whole * 0.52 for held in result["parameters_per_rank"])
    assert result["loss_last"] < result["loss_first"] / 2


@functools.cache
def facts_of(shape):
    return run(lesson.measure, shape[0] * shape[1], CPU, shape, 2, deadline=200)


@pytest.mark.claim("D1")
@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (1, 4), (3, 1), (2, 2)], ids=str)
def test_each_mesh_has_the_gradients_of_one_process_and_sends_what_it_should(shape):
    data, tensor = shape
    for facts in facts_of(shape):
        assert facts["problem"] is None
        assert max(facts["grad_diffs"] + facts["weight_diffs"] + facts["library_diffs"]) < 1e-12
        assert facts["tensor"] == [32 // data * BLOCK] * (8 if tensor > 1 else 0)
        assert facts["data"] == ([facts["parameters"] * 8] if data > 1 else [])


@pytest.mark.claim("D3")
def test_parameters_shrink_with_the_parts_and_bytes_do_not():
    two, four = facts_of((1, 2))[0], facts_of((1, 4))[0]
    assert four["parameters"] < 0.53 * two["parameters"]
    handed_in = sum(two["tensor"])
    assert sum(four["tensor"]) == handed_in
    sent = {n: how_fast.all_reduce_cost(n, handed_in)[1] for n in (2, 4)}
    assert sent[4] == 1.5 * sent[2]  # each rank computes half as much, and sends more


AROUND = """
dist.init_process_group("gloo")
cpu = torch.device("cpu")
torch.manual_seed(0)
rows = torch.randn(64, TOKENS, NUMBERS)
model = Transformer()
mesh = make_mesh(cpu, tensor=2)
losses = train(model, TensorDataset(rows, rows.mean(1)[:, :2]), mesh, cpu, steps=30, batch_size=32)
print(losses[-1] < losses[0] / 2, len(losses), tuple(model.blocks[0].mlp.up.weight.shape))
dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_file_of_its_own(tmp_path):
    source = lesson.__loader__.get_source(lesson.__name__)
    copied = source[source.index("\nimport ") : source.index("# --- The proof ---")]
    (tmp_path / "mine.py").write_text(copied + AROUND)
    assert run_warm(tmp_path / "mine.py", 2) == [(0, "True 30 (96, 48)\n")] * 2


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


# --- docs/sequence_and_sharding.md ---


def functions_of_the_page():
    """Return the Python of the page, which needs the names that it uses."""
    page = (ROOT / "docs" / "sequence_and_sharding.md").read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))


def by_tokens(rank, world_size, lines):
    """Split two blocks by the plan; return the error, and what is sent by forward, SGD, AdamW."""
    logging.disable()  # full_tensor() remarks that it adds up
    names = {"parallel": parallel, "Replicate": Replicate, "Shard": Shard}
    exec(lines, names)
    torch.manual_seed(0)
    model, whole = (torch.nn.Sequential(*(lesson.Block() for _ in "ab")).double() for _ in "ab")
    whole.load_state_dict(model.state_dict())
    x = torch.randn(32, 8, 48, dtype=torch.float64)
    mesh = lesson.make_mesh(CPU, world_size)["tensor"]
    parallel.parallelize_module(model, mesh, names["sequence_plan"]())
    logs = [lesson.Messages() for _ in range(4)]
    with logs[0]:
        result = model(x)
    between = result.to_local().shape
    result = result.full_tensor()
    with logs[1]:
        result.square().mean().backward()
    whole(x).square().mean().backward()
    off = lesson.distance(lesson.gradients(model), lesson.gradients(whole), rank)
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for log, optimizer in zip(logs[2:], (sgd, adamw), strict=True):
        with log:
            optimizer(model.parameters()).step()
    sent = [collections.Counter(kind.rpartition("::")[2] for kind, *_ in log.calls) for log in logs]
    return off, tuple(between), *sent


def test_the_plan_by_tokens_sends_what_the_page_says():
    both = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
    for off, between, *sent in run(by_tokens, 2, functions_of_the_page()):
        assert off < 1e-12 and between == (32, 4, 48)
        assert sent == [both, both, {"all_reduce": 8}, {"all_reduce": 24}]


def sharded(rank, world_size, lines, each_block):
    """Shard the replicas of the split model; return the error, and the number of all-gathers."""
    logging.disable()  # full_tensor() remarks that it needs two all-gathers
    names = {"fully_shard": fully_shard}
    exec(lines, names)
    mesh = lesson.make_mesh(CPU, tensor=2)
    (data, model), (_, whole) = lesson.make_problem(seed=0), lesson.make_problem(seed=0)
    rows, targets = (part[:32] for part in data.tensors)
    lesson.split_by_library(model, mesh)
    if each_block:
        names["shard"](model, mesh)
    else:
        fully_shard(model, mesh=mesh["data"])
    mine = slice(mesh.get_local_rank("data"), None, 2)
    with lesson.Messages() as sent:
        mse_loss(model(rows[mine]), targets[mine]).backward()
    mse_loss(whole(rows), targets).backward()
    off = lesson.distance(lesson.gradients(model), lesson.gradients(whole), rank % 2)
    return off, sum("gather" in kind for kind, *_ in sent.calls)


@pytest.mark.parametrize(("each_block", "gathers"), [(True, 5), (False, 1)])
def test_replicas_that_share_their_part_gather_as_the_page_says(each_block, gathers):
    for off, found in run(sharded, 4, functions_of_the_page(), each_block):
        assert off < 1e-12 and found == gathers


# --- Flags ---


def mesh_of(monkeypatch, ranks, *flags):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    args = lesson.parse_args([str(flag) for flag in flags])
    return args.data, args.tensor


def test_any_number_of_ranks_has_a_default_mesh(monkeypatch):
    for ranks in range(1, 65):
        data, tensor = mesh_of(monkeypatch, ranks, "--batch-size", 64)
        assert data * tensor == ranks and lesson.HEADS % tensor == 0
    meshes = {1: (1, 1), 2: (1, 2), 4: (1, 4), 5: (5, 1), 8: (2, 4)}
    assert {ranks: mesh_of(monkeypatch, ranks) for ranks in meshes} == meshes


def test_meshes_that_do_not_fit_cost_one_line(monkeypatch, capsys):
    assert mesh_of(monkeypatch, 6, "--data", 3) == (3, 2) == mesh_of(monkeypatch, 6, "--tensor", 2)
    wrong = {"--data: 3 does not divide": (4, "--data", 3, "--tensor", 2)}
    wrong["--data: must be a whole number from 1"] = (4, "--data", 0)
    wrong["--tensor: 4 does not divide"] = (6, "--tensor", 4)
    wrong["2 x 2 (--tensor) is not the number of ranks, 8"] = (8, "--data", 2, "--tensor", 2)
    wrong["the 12 heads can't be dealt out to 8 ranks"] = (8, "--tensor", 8)
    wrong["the 12 heads can't be dealt out to 5 ranks"] = (5, "--data", 1)
    too_small = (4, "--data", 4, "--batch-size", 3)
    wrong["--batch-size: must be at least the number of replicas, 4"] = too_small
    for words, flags in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            mesh_of(monkeypatch, *flags)
        stderr = capsys.readouterr().err
        assert words in stderr and stderr.count("\n") == 1, stderr


@pytest.mark.gpu
def test_on_gpus_each_rank_has_its_own():
    gpus = min(4, torch.cuda.device_count())
    if gpus < 2:
        pytest.skip("needs two GPUs: one sends no message")
    for mesh in [()] + [("--data", 2, "--tensor", 2)] * (gpus == 4):
        result = run_lesson(13, "--json", "--nproc", gpus, *mesh).json
        expected = ("nccl", "cuda", True)
        assert (result["backend"], result["device"], result["passed"]) == expected
