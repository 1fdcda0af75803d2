"""Lesson 18: who keeps what, when nobody keeps all; and what it sends."""

import sys
from functools import partial

import cloudpickle
import lesson_18_sharding as lesson
import pytest
import torch
from breaks import check_breaks
from conftest import run_warm
from lockstep import proofs
from nbtools import run
from nbtools.record import Wire
from proofs import lesson_18 as proof
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ONE, TWO, THREE = (1,), (2,), (3,)  # the stage in which it is tried; in general the third

ON_THREE_RANKS = ("on three ranks",)  # two do not show it

FREE = "        self.free()\n        if output"
PIECE = "            (mse_loss(model(some), answers) / pieces).backward()\n"
STAGE_1 = "        if stage == 1:\n            for unit in units:\n                unit.reduce()\n"
UNITS = "    units = ["
GRAD = "torch.is_grad_enabled() and self"
RING = "    received = torch.empty_like(parts[0])"
GATHER = "dist.all_gather_single(self.flat, self.shard.detach())"
BESIDE = "dist.all_gather_single(a := torch.empty_like(self.flat), self.shard.detach())"
BEFORE = "    if self.stage == 3:\n            self.gather()\n"
NOT_GATHERED = BEFORE.replace("gather()", "flat.untyped_storage().resize_(8 * len(self.flat))")

BREAKS = {
    "the same part in each turn": ("parts[rank - turn], (", "parts[rank - 1], (", ON_THREE_RANKS),
    "a turn of the ring is left out": ("range(1, ranks)", "range(2, ranks)"),
    "parts are replaced, not added": ("].add_(received)", "].copy_(received)"),
    "an all-reduce": (RING, f"    return dist.all_reduce(flat) or parts[rank]\n{RING}"),
    "padding counted": ("-len(numbers) % ranks", "ranks - len(numbers) % ranks"),
    "two ranks with one shard": ("chunk(ranks)[dist.get_rank()]", "chunk(ranks)[0]"),
    "the model is not sent": ("        dist.broadcast(self.flat, 0)  #", "        #"),
    "the sum, not the mean": (".div_(dist.get_world_size())", ""),
    "its own gradient": ("reduce_scatter(self.gradient)", "self.gradient.chunk(2)[0]"),
    "gradients pile up": ("optimizer.zero_grad()\n        model.zero", "model.zero"),
    "no update": ("optimizer.step()\n        if stage < 3:", "if stage < 3:"),
    "the same rows on all ranks": ("zip(rows[rank::ranks]", "zip(rows[:: ranks]"),
    "the first rows, not every n-th": ("zip(rows[rank::ranks]", "zip(rows[: len(rows) // ranks]"),
    "the first batch again": ("targets in batches:", "targets in batches[:1] * len(batches):"),
    "pieces are not divided": ("answers) / pieces", "answers)"),
    "an update for each piece": (PIECE, f"{PIECE}            optimizer.step()\n"),
    "only the last piece counts": ("self.shard.grad += mine", "self.shard.grad = mine", TWO),
    "a copy": (FREE, FREE.replace("self.free()", "self.a = self.flat * 1"), TWO),
    "gather left out after the step": ("unit.gather()  #", "pass  #", TWO),
    "the shard is a copy": ("mine.clone() if stage == 3 else mine)", "mine.clone())", TWO),
    "stage 1 sends each piece": (PIECE + STAGE_1, PIECE + STAGE_1[23:], ONE),
    "old gradients stay until backward": ("model.zero_grad()", "pass", ONE),
    "gradients stay whole": ("mine if self.stage == 1 else mine.clone()", "mine", TWO),
    "whole gradients are not let go": ("self.module.zero_grad()", "pass", TWO),
    "the shard is a window": ("mine.clone() if stage == 3 else mine)", "mine)", THREE),
    "freed too early": ("*_: self.gather())", "*_: self.gather() or self.free())", THREE),
    "not freed after forward": (FREE, FREE[20:], THREE),
    "not freed after backward": ("            self.free()\n", "            pass\n", THREE),
    "not gathered for backward": (BEFORE, NOT_GATHERED, THREE),
    "everything at once": (PIECE, f"            _ = [u.gather() for u in units]\n{PIECE}", THREE),
    "a receive buffer of everything": (RING, RING.replace("parts[0])", "flat)[: len(parts[0])]")),
    "gathered beside it": (GATHER, f"{BESIDE}\n        self.flat.copy_(a)"),
    "spare parts beside the ring": (RING, f"    spare = [part.clone() for part in parts]\n{RING}"),
    "freed for backward alone": (FREE, FREE.replace("self", GRAD), THREE),
    "a second model": (UNITS, f"    a = __import__('copy').deepcopy(model)\n{UNITS}"),
    "all for Adam": ("in units])  #", "in units] + [*model.parameters()])  #", TWO),
}


@pytest.mark.parametrize("where", (*ONE, *TWO, *THREE, *ON_THREE_RANKS))
def test_each_break_ends_in_fail(where):
    stage, nproc = (3, 3) if where in ON_THREE_RANKS else (where, 2)
    flags = ("--stage", stage, "--steps", 2, "--accumulate", 2)
    table = {name: row if len(row) == 3 else (*row, THREE) for name, row in BREAKS.items()}
    check_breaks(18, BREAKS | table, nproc, *flags, mesh=where)


@pytest.mark.parametrize("ranks", (1, 3, 4, 8))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_the_formulas_are_those_of_the_paper_where_everything_divides(ranks, stage):
    """Section 5 of ZeRO in numbers of 8 bytes: which kinds are divided by n in which stage."""
    kept, _, sent = proof.formulas([24 * 5, 24 * 7], ranks, stage)
    whole, divided = 8 * 24 * 12, [kind for kind in range(3) if kind <= stage - 1]
    sizes = {0: kept["optimizer"] - 8, 1: kept["gradients"], 2: kept["parameters"]}
    for kind, size in sizes.items():
        assert size == whole * (2 if kind == 0 else 1) // (ranks if kind in divided else 1)
    assert sum(sent.values()) * ranks == (3 if stage == 3 else 2) * whole * (ranks - 1)


def test_bad_values_cost_one_line(capsys):
    wrong = {"--batch-size": "--batch-size 8", "--stage": "--stage 4"}
    wrong["times --accumulate, 6"] = "--batch-size 9 --accumulate 2"
    for words, flags in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            proofs.read_flags(lesson.__file__, flags.split(), 3, 3)
        stderr = capsys.readouterr().err
        assert words in stderr and stderr.count("\n") == 1, stderr


AROUND = """
dist.init_process_group("gloo")
torch.manual_seed(0)
rows, model = torch.randn(40, 32, TOKENS, NUMBERS), Transformer()
before = mse_loss(model(rows[0]), rows[0].mean(1)[:, :2])
train(model, [(some, some.mean(1)[:, :2]) for some in rows], stage=3)
with torch.no_grad():
    after = mse_loss(model(rows[0]), rows[0].mean(1)[:, :2])
print(bool(after < before / 2), model.blocks[0].mlp.up.weight.untyped_storage().nbytes())
dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_file_of_its_own(tmp_path):
    source = lesson.__loader__.get_source(lesson.__name__)
    copied = source[source.index("\nimport ") : source.index("def make_problem")]
    (tmp_path / "mine.py").write_text(copied + AROUND)
    assert run_warm(tmp_path / "mine.py", 2) == [(0, "True 0\n")] * 2


def use_more_tools(rank, world_size):
    """Return what the policy sends and, of ZeroRedundancyOptimizer, what it keeps and sends."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    batches, model = lesson.make_problem(0, 1, 24)
    rows, targets = (part[rank::world_size] for part in batches[0])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.float().blocks, model]:
        fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with Wire() as wire:
        model(rows.float()).float().square().mean().backward()
    types = {f"{call.name.strip('_')} in {call.kind}" for call in wire.calls}

    both = []
    for make in (torch.optim.Adam, partial(ZeroRedundancyOptimizer, optimizer_class=Adam)):
        torch.manual_seed(0)
        model = DistributedDataParallel(lesson.Transformer().double())
        optimizer = make(model.parameters(), lr=1e-3)
        mse_loss(model(rows), targets).backward()
        with Wire() as wire:
            optimizer.step()
        both.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    kept = [state["exp_avg"].shape for state in optimizer.optim.state.values()]
    shapes = [p.shape for p in model.parameters()]
    whole = len(kept) < len(shapes) and set(kept) <= set(shapes)
    return types, whole, {call.name for call in wire.calls}, (both[0] - both[1]).abs().max().item()


def test_what_the_side_roads_say():
    """What the policy sends, offload runs here, and ZeroRedundancyOptimizer beside DDP is Adam."""
    for types, whole, calls, off in run(use_more_tools, 3):
        assert types == {"allgather_base in bfloat16", "reduce_scatter_base in float32"}
        assert whole and calls == {"broadcast"} and off < 1e-15
