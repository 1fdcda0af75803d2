"""Lesson 13: layers cut by columns and rows, replicas of that, and what it costs."""

import collections
import logging
import re
import sys

import cloudpickle
import lesson_11_how_fast as how_fast
import lesson_13_tensor_and_hybrid as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks, verdicts_of_proof
from conftest import ROOT, run_lesson, run_warm
from lockstep import lessons, proofs
from lockstep.watch.wire import Wire
from nbtools import run
from proofs import lesson_13 as proof
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.functional import mse_loss

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU, LESSON = torch.device("cpu"), lessons.find("13")
SOURCE = LESSON.script.read_text()
BLOCK = lesson.TOKENS * lesson.WIDTH * 8  # bytes of x for one row, in float64

# Meshes (data, tensor): two whole models, one model in two parts, two models in two parts each.
REPLICAS, PARTS, BOTH = [(2, 1)], [(1, 2)], [(2, 2)]

SAMPLER, CLONE = (
    "(data, replicas, replica, seed=seed)",
    "clone(memory_format=torch.contiguous_format)",
)
READ, TOTAL = "x = SumInBackward.apply(x, self.group)\n", f"total = part.{CLONE}\n"
OWN = "parts[dist.get_rank(group)].clone()"
CUT = SOURCE[SOURCE.index("    split(model.b") : SOURCE.index("    losses = []")]  # three lines
LATE = "".join(CUT.splitlines(True)[line] for line in (2, 0, 1))
LAYERS = "        part = self.layers(x)  # what lies between the cuts never travels\n"
ROWS, STEP = "rows.weight = my_part(rows.weight, 1, group)", "            optimizer.step()\n"
THREE = """hooks = []
        for name, layer in self.layers.named_children():
            if name not in ("out", "down"):
                f = lambda _, given: SumInBackward.apply(given[0], self.group)
                hooks.append(layer.register_forward_pre_hook(f))
        part = self.layers(x)
        for hook in hooks:
            hook.remove()
"""
GATHERED = """        weight = next(self.parameters()).detach()
        every = [weight.clone() for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, weight, group=self.group)
"""
TWICE = """            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
                parameter.grad /= replicas
"""
MESH = '(device.type, shape, mesh_dim_names=("data", "tensor"))'
BREAKS = {
    "the same rows on all replicas": (SAMPLER, "(data, 1, 0)", REPLICAS),
    "rows by rank": (SAMPLER, "(data, seed=seed)", BOTH),
    "an order of its own on each rank": ("seed=seed)  #", "seed=dist.get_rank())  #", REPLICAS),
    "not by the seed": (SAMPLER, "(data, replicas, replica)", REPLICAS),
    "no new order": ("sampler.set_epoch(len(losses) // len(loader))", "pass", REPLICAS),
    "a global batch twice as large": ("batch_size // replicas,", "2 * batch_size,", REPLICAS),
    "rows left out": ("sampler=sampler)", "sampler=sampler, drop_last=True)", REPLICAS),
    "the mesh turned round": (
        MESH,
        '(device.type, shape[::-1], mesh_dim_names=("tensor", "data"))',
        BOTH,
    ),
    "parts that are views": (OWN, OWN.removesuffix(".clone()"), PARTS),
    "uncut matrices are kept": (ROWS, f"self.old = rows.weight.detach()\n        {ROWS}", PARTS),
    "weights gathered in forward": (LAYERS, GATHERED + LAYERS, PARTS),
    "each gradient reduced twice": (STEP, TWICE + STEP, REPLICAS),
    "no DDP": ("loss = mse_loss(averaged(", "loss = mse_loss(model(", REPLICAS),
    "averaged over all": (', process_group=mesh.get_group("data"))', ")", BOTH),
    "no f": (READ, "\n", PARTS),
    "f three times": (READ + LAYERS, THREE, PARTS),
    "bias on every rank": (
        "rows.bias = rows.bias, None",
        "rows.bias = rows.bias, rows.bias",
        PARTS,
    ),
    "hidden units and rows that do not belong together": (
        ROWS,
        ROWS.replace("weight, 1", "weight.flip(1), 1"),
        PARTS,
    ),
    "another loss in the log": ("losses.append(loss", "losses.append(2 * loss", REPLICAS),
    "no update": (STEP, "            pass\n", REPLICAS),
    "g overwrites the part": (TOTAL, "total = part\n", PARTS),
    "f overwrites the gradient": (
        "return SumInForward.apply(gradient, ctx.group), None",
        "dist.all_reduce(gradient, group=ctx.group)\n        return gradient, None",
        PARTS,
    ),
    "moved uncut to the device": ("split(model.b", "split(model.to(device).b", PARTS),
    "blocks moved uncut": (CUT, f"    [b.to(device) for b in model.blocks]\n{CUT}", PARTS),
    # What a student would do:
    "the optimizer before the cut": (CUT, LATE, PARTS),
    "a mean in place of g's sum": ("        return total\n", "        return total / 2\n", PARTS),
    "all ranks take the first part": (OWN, "parts[0].clone()", PARTS),
    "each rank draws its own model": ("make_problem(args.seed)", "make_problem(rank)", PARTS),
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


@pytest.mark.claim("D1")
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)], ids=str)
def test_each_mesh_has_the_gradients_of_one_process_and_sends_what_it_should(shape):
    flags = ["--steps", "2", "--data", str(shape[0])]
    nproc = shape[0] * shape[1]
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags, 1).values()
    assert passed, claim


@pytest.mark.claim("D3")
def test_parameters_shrink_with_the_parts_and_bytes_do_not(default_run):
    two, four = default_run(13).json, run_lesson(13, "--json", "--nproc", 4, "--steps", 2).json
    assert four["passed"] and four["mesh"] == {"data": 1, "tensor": 4}
    assert four["parameters_per_rank"][0] < 0.53 * two["parameters_per_rank"][0]
    handed_in, of_four = (result["bytes_per_step"][0]["tensor"] for result in (two, four))
    assert of_four == handed_in
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
print(losses[-1] < losses[0] / 2, len(losses), tuple(model.blocks[0].mlp.layers.up.weight.shape))
dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_file_of_its_own(tmp_path):
    copied = SOURCE[SOURCE.index("\nimport ") : SOURCE.index("def make_problem")]
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


def off(model, whole):
    """Return how far any gradient of a model of DTensors is from that of one process."""
    logging.disable()  # full_tensor() remarks that it adds up
    gaps = []
    for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
        full = mine.grad.full_tensor() if isinstance(mine, DTensor) else mine.grad
        gaps.append((full - right.grad).abs().max().item())
    return max(gaps)


def kinds(wire):
    """Return how often each collective was called."""
    names = [name for name, _ in wire.calls if "wait" not in name and "_wrap" not in name]
    return collections.Counter(names)


def by_tokens(rank, world_size, lines):
    """Split two blocks by the plan; return the error, and what is sent by forward, SGD, AdamW."""
    names = {"parallel": parallel, "Replicate": Replicate, "Shard": Shard}
    exec(lines, names)
    torch.manual_seed(0)
    model, whole = (torch.nn.Sequential(*(lesson.Block() for _ in "ab")).double() for _ in "ab")
    whole.load_state_dict(model.state_dict())
    x = torch.randn(32, 8, 48, dtype=torch.float64)
    mesh = lesson.make_mesh(CPU, world_size)["tensor"]
    parallel.parallelize_module(model, mesh, names["sequence_plan"]())
    logs = [Wire() for _ in range(4)]
    with logs[0]:
        result = model(x)
    between = result.to_local().shape
    result = result.full_tensor()
    with logs[1]:
        result.square().mean().backward()
    whole(x).square().mean().backward()
    gap = off(model, whole)
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for log, optimizer in zip(logs[2:], (sgd, adamw), strict=True):
        with log:
            optimizer(model.parameters()).step()
    return gap, tuple(between), *map(kinds, logs)


def test_the_plan_by_tokens_sends_what_the_page_says():
    both = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
    for gap, between, *sent in run(by_tokens, 2, functions_of_the_page()):
        assert gap < 1e-12 and between == (32, 4, 48)
        assert sent == [both, both, {"all_reduce": 8}, {"all_reduce": 24}]


def sharded(rank, world_size, lines, each_block):
    """Shard the replicas of the split model; return the error, and the number of all-gathers."""
    names = {"fully_shard": fully_shard}
    exec(lines, names)
    mesh = lesson.make_mesh(CPU, tensor=2)
    (data, model), (_, whole) = lesson.make_problem(seed=0), lesson.make_problem(seed=0)
    rows, targets = (part[:32] for part in data.tensors)
    proof.split_by_library(model, mesh)
    if each_block:
        names["shard"](model, mesh)
    else:
        fully_shard(model, mesh=mesh["data"])
    mine = slice(mesh.get_local_rank("data"), None, 2)
    with Wire() as wire:
        mse_loss(model(rows[mine]), targets[mine]).backward()
    mse_loss(whole(rows), targets).backward()
    return off(model, whole), sum(n for kind, n in kinds(wire).items() if "gather" in kind)


@pytest.mark.parametrize(("each_block", "gathers"), [(True, 5), (False, 1)])
def test_replicas_that_share_their_part_gather_as_the_page_says(each_block, gathers):
    for gap, found in run(sharded, 4, functions_of_the_page(), each_block):
        assert gap < 1e-12 and found == gathers


# --- Flags ---


def mesh_of(ranks, *flags):
    args = proofs.read_flags(LESSON.script, [str(flag) for flag in flags], ranks, ranks)
    return proof.shape_of(args, ranks)


def test_any_number_of_ranks_has_a_default_mesh():
    for ranks in range(1, 65):
        data, tensor = mesh_of(ranks, "--batch-size", 64)
        assert data * tensor == ranks and lesson.HEADS % tensor == 0
    meshes = {1: (1, 1), 2: (1, 2), 4: (1, 4), 5: (5, 1), 8: (2, 4)}
    assert {ranks: mesh_of(ranks) for ranks in meshes} == meshes


def test_meshes_that_do_not_fit_cost_one_line(capsys):
    assert mesh_of(6, "--data", 3) == (3, 2) == mesh_of(6, "--tensor", 2)
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
            mesh_of(*flags)
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
