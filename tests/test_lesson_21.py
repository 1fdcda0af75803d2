"""Lesson 21: half precision on N ranks, and each part of it taken away."""

import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from conftest import run_lesson, run_warm
from lockstep import lessons, proofs

LESSON = lessons.find("21")
SOURCE = LESSON.script.read_text()

MEAN = "half = (bucket.buffer() / dist.get_world_size()).to(dtype)"
BACK = "bucket.buffer().copy_(done.value()[0])"
HALF = SOURCE[SOURCE.index(MEAN) : SOURCE.index(BACK)] + BACK
LATER = HALF.replace(" / dist.get_world_size()", "")
LATER = LATER.replace("done.value()[0]", "done.value()[0] / dist.get_world_size()")
ANYWHERE = "    return anywhere.item() > 0"
MAX, SENT = "op=dist.ReduceOp.MAX", "sent = dist.all_reduce(half, async_op=True).get_future()"
DIVIDE = "            gradient /= self.factor\n"
SILENT = "contextlib.nullcontext() if last else replica.no_sync()"
LOSS = "loss = mse_loss(outputs.float(), targets) / len(micro_batches)"
UNSCALE = "    finite = scale.unscale(replica.parameters())"
CLIP = "        nn.utils.clip_grad_norm_(replica.parameters(), max_norm)\n"
HOOK, MODEL = "    replica.register_comm_hook(dtype, send_in)\n", "make_model(args.seed + rank)"
BREAKS = {
    "the weights are half, too": (f"{MODEL}.to(device)", f"{MODEL}.to(device, dtype)"),
    "no autocast": ("enabled=dtype != torch.float32", "enabled=False"),
    "autocast in the other type": ("type, dtype, enabled", "type, torch.bfloat16, enabled"),
    "no hook": (HOOK, ""),
    "sent in bfloat16, whatever is asked for": (".to(dtype)", ".to(torch.bfloat16)"),
    "the sum": (MEAN, "half = bucket.buffer().to(dtype)"),
    "half the sum": ("/ dist.get_world_size()).to", "/ 2).to", (3,)),
    "divided after the sum": (HALF, LATER),
    "rounded before it is divided": (
        MEAN,
        "half = bucket.buffer().to(dtype) / dist.get_world_size()",
    ),
    "the mean stays half": (BACK, "done.value()[0]"),
    "each rank decides by itself": (ANYWHERE, "    return bool(found)"),
    "skipped only where all ranks have inf": (MAX, MAX.replace("MAX", "MIN")),
    "nan is overlooked": ("gradient.isfinite()", "(~gradient.isinf())"),
    "inf is overlooked": ("gradient.isfinite()", "(~gradient.isnan())"),
    "the last gradient is looked at": ("found |= ~", "found = ~"),
    "the first gradient is looked at": ("~gradient.isfinite()", "~gradients[0].isfinite()"),
    "one number of each is looked at": (
        "gradient.isfinite()",
        "gradient.flatten()[:1].isfinite()",
    ),
    "a rank without gradients decides alone": (
        "return not on_any_rank(found)",
        "return not on_any_rank(found) and bool(gradients)",
    ),
    "the hook waits for its sum": (
        SENT,
        SENT.replace(".get_future()", "\n    sent.wait()\n    sent = sent.get_future()"),
    ),
    "bfloat16 is sent as float16": (
        ".to(dtype)",
        ".to(torch.float16 if dtype == torch.bfloat16 else dtype)",
    ),
    "another factor, if none is asked for": (
        "factor=2.0**16, patience=2000",
        "factor=1.0, patience=2",
    ),
    "gradients are not divided": (DIVIDE, "            pass\n"),
    "divided twice": (DIVIDE, DIVIDE * 2),
    "the loss is not multiplied": ("(loss * scale.factor).b", "loss.b"),
    "the loss is half": (
        LOSS,
        LOSS.replace("outputs.float(), targets", "outputs, targets.to(dtype)"),
    ),
    "clipped before it is divided": (f"{UNSCALE}  # b", f"{CLIP[4:]}{UNSCALE}  # b"),
    "not clipped": (CLIP, ""),
    "nobody skips": ("    if finite:\n        nn", "    if True:\n        nn"),
    "everybody skips": ("    if finite:\n        nn", "    if not finite:\n        nn"),
    "the factor is never halved": ("self.factor /= 2", "pass"),
    "the factor never grows": ("self.factor * 2, 0", "self.factor, 0"),
    "good steps need not be in a row": ("self.good + 1 if finite else 0", "self.good + finite"),
    "the count goes on after it has grown": ("self.factor * 2, 0", "self.factor * 2, self.good"),
    "gradients pile up": ("    optimizer.zero_grad()\n", ""),
    "each micro-batch sends": (SILENT, "contextlib.nullcontext()"),
    "nobody sends": (SILENT, "replica.no_sync()"),
    "micro-batches are not divided": (LOSS, LOSS.replace(" / len(micro_batches)", "")),
    "past DDP": ("outputs = replica(rows)", "outputs = replica.module(rows)"),
    "first weights are not sent": ("Parallel(model)", "Parallel(model, init_sync=False)"),
    "all ranks take the same rows": ("x[rank::world_size]", "x[::world_size]"),
    "a layer is not trained": ("SGD(model.", "SGD(model[0]."),
    "every rank prints": ("    if rank == 0:\n        made", "    if True:\n        made"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(21, BREAKS, nproc, "--steps", 8, "--batch-size", 4)


@pytest.mark.parametrize(
    "nproc, flags",
    [
        (1, "--dtype bfloat16"),
        (2, "--dtype float32 --micro-batches 1"),
        (4, "--seed 3 --batch-size 2"),
    ],
)
def test_other_sizes_and_types_pass_too(nproc, flags):
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags.split(), 1).values()
    assert passed and claim.startswith(f"{nproc} ranks train in "), claim


def test_default_run(default_run):
    facts = default_run(21).json
    assert (facts["world_size"], facts["backend"], facts["dtype"]) == (2, "gloo", "float16")
    assert (facts["skipped"], facts["factor"], facts["bytes_sent"]) == (1, 2.0**17, 2 * 12480)
    assert 1e-5 < facts["max_gradient_off"] < 0.01


@pytest.mark.gpu
def test_on_gpus_the_updates_are_those_of_one_process():
    facts = run_lesson(21, "--nproc", min(4, torch.cuda.device_count()), "--json").json
    assert (facts["backend"], facts["device"], facts["passed"]) == ("nccl", "cuda", True)


BAD = ["--dtype float64", "--dtype half", "--steps 3", "--batch-size 1", "--micro-batches 0"]
BAD += ["--factor 0", "--factor 2.5", "--factor 10000", "--factor -4096", "--factor 99999999"]


@pytest.mark.parametrize("flags", BAD)
def test_bad_values_cost_one_line(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(LESSON.script, flags.split(), 2, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "error: " in line and flags.split()[0] in line


# --- The technique in a project of one's own ---

PROJECT = """

if __name__ == "__main__":
    rank, world_size, device = join_group("gloo")
    torch.manual_seed(0)
    rows = torch.randn(64, 6)
    rows[9] = 1e5  # beyond float16, in each epoch, on rank 1
    mine = rows[rank::world_size].split(8)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    replica, scale = DistributedDataParallel(model), LossScale(2.0**14, patience=5)
    replica.register_comm_hook(torch.bfloat16, send_in)
    adam, skipped = torch.optim.AdamW(model.parameters(), lr=0.01), 0
    for epoch in range(40):
        for part in mine:
            pairs = [(some, some.sum(1, keepdim=True)) for some in part.split(4)]
            loss, finite = train_step(replica, adam, scale, pairs, torch.float16, 1.0)
            skipped += not finite
    rows = rows[10:]
    with torch.no_grad():
        loss = mse_loss(model(rows), rows.sum(1, keepdim=True)).item()
    print(skipped >= 40, loss < 0.6, f"{loss:.17g}", scale.factor)  # 6 untrained
    dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    file = tmp_path / "project.py"
    file.write_text(SOURCE.partition("# --- The example ---")[0] + PROJECT)
    (code, zero), (other, one) = run_warm(file, 2)
    assert (code, other) == (0, 0) and zero == one  # one model, and one factor
    assert zero.split()[:2] == ["True", "True"], zero


SHARDED = """

if __name__ == "__main__":
    from torch.distributed.fsdp import fully_shard

    rank, world_size, device = join_group("gloo")
    model, scale = fully_shard(nn.Linear(4, 4)), LossScale(8.0)
    for value in (8.0, math.inf):
        (8 * model(torch.ones(2, 4)).sum()).backward()
        if rank == 1:
            model.weight.grad.to_local()[0, 0] = value
        print(scale.unscale(model.parameters()), model.bias.grad.to_local().tolist())
        model.zero_grad()
    dist.destroy_process_group()
"""


def test_parts_of_gradients_are_divided_and_one_rank_s_inf_is_told_to_all(tmp_path):
    file = tmp_path / "sharded.py"
    file.write_text(SOURCE.partition("# --- The example ---")[0] + SHARDED)
    for code, said in run_warm(file, 2):
        assert (code, said.splitlines()) == (0, ["True [2.0, 2.0]", "False [2.0, 2.0]"])
