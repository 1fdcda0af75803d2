"""Lesson 02: one process per replica, started by a launcher, kept in step by DDP."""

import math
import sys
import types

import cloudpickle
import lesson_02_launch_ddp as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks
from conftest import ENVIRONMENT, ROOT, run_lesson, run_warm
from lockstep import lessons, proofs
from nbtools import run

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SOURCE = (ROOT / "lessons" / "lesson_02_launch_ddp.py").read_text()

BREAKS = {
    "all ranks take the same rows": (
        "DistributedSampler(data, seed=seed)",
        "DistributedSampler(data, 1, 0, seed=seed)",
    ),
    "a sampler seed for each rank": ("(data, seed=seed)", "(data, seed=seed + dist.get_rank())"),
    "no set_epoch": ("sampler.set_epoch(epoch)", "pass"),
    "two orders, in turn": ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch % 2)"),
    "the rows are not shuffled": ("(data, seed=seed)", "(data, shuffle=False)"),
    "the batch is not divided": ("batch_size // world_size, sampler", "batch_size, sampler"),
    "the rest of the rows is dropped": ("sampler=sampler)", "sampler=sampler, drop_last=True)"),
    "no DDP": ("DistributedDataParallel(model.to(device))", "model.to(device)"),
    "the model is called past DDP": ("mse_loss(replica(rows", "mse_loss(model(rows"),
    "the parameters are not sent": ("model.to(device))", "model.to(device), init_sync=False)"),
    "the loss times world size": ("loss.backward()", "(loss * world_size).backward()"),
    "no backward": ("loss.backward()", "pass"),
    "gradients pile up": ("optimizer.zero_grad()", "pass"),
    "a part of the model is not trained": ("model.parameters(), lr", "[model.weight], lr"),
    "another optimizer": (
        "(model.parameters(), lr=0.1)",
        "(model.parameters(), lr=0.1 / world_size, momentum=0.5)",
    ),
    "a learning rate for each rank": (
        "(model.parameters(), lr=0.1",
        "(model.parameters(), lr=0.1 * (1 + dist.get_rank())",
    ),
    "one rank leaves out an update": (
        "optimizer.step()",
        "(done == 3 and dist.get_rank() == 1) or optimizer.step()",
    ),
    "one rank changes by itself": (
        "done += 1",
        "done += 1; model.bias.data += (done == 3) * dist.get_rank()",
    ),
    "an epoch ends a step too early": ("if done == steps:", "if done == steps - 1:"),
    "each rank has data of its own": (
        "rows, targets, model = make_toy(args.seed)",
        "rows, targets, model = make_toy(args.seed + dist.get_rank())",
    ),
    "each process is a world of its own": ("return rank, world_size,", "return rank, 1,"),
    "smaller shares": ("batch_size // world_size, s", "batch_size // world_size - 2, s"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(2, BREAKS, nproc, "--steps", 12)


CHECKSUMS = {
    "the checksum forgets the largest": ("dist.all_reduce(highest, dist.ReduceOp.MAX)", "pass"),
    "the checksum of the last number": (
        "flatten()\n        digest",
        "flatten()[-1:]\n        digest",
    ),
    "the checksum of the first and the last number": (
        "flatten()\n        digest",
        "flatten()[[0, -1]]\n        digest",
    ),
    "the checksum of float32": ("numbers.view(", "numbers.float().view("),
}


def wrong_answers(rank, world_size, sources):
    """Change each number of rank 1's model by its last bit; return how often each is wrong."""
    _, _, model = lesson.make_toy(seed=0)
    numbers = [one for part in model.parameters() for one in part.detach().view(-1)]
    wrong = dict.fromkeys(sources, 0)
    for name, source in sources.items():
        script = vars(types.ModuleType("script"))
        exec(source, script)
        wrong[name] += not script["replicas_agree"](model)
        for number in numbers:
            kept = number.clone()
            if rank == 1:
                number.copy_(torch.nextafter(number, torch.full_like(number, math.inf)))
            wrong[name] += script["replicas_agree"](model)
            number.copy_(kept)
    return wrong


def test_the_checksum_sees_the_last_bit_of_each_number():
    sources = {"as it is": SOURCE}
    for name, (part, other) in CHECKSUMS.items():
        assert SOURCE.count(part) == 1, name
        sources[name] = SOURCE.replace(part, other)
    first, second = run(wrong_answers, 2, sources)
    assert first.pop("as it is") == second.pop("as it is") == 0
    assert [name for name, wrong in first.items() if wrong + second[name] == 0] == []


@pytest.mark.claim("A10", "A12", "A13", "A18", "B3")
def test_default_run(default_run):
    result = default_run(2).json
    assert (result["world_size"], result["launcher"]) == (2, "torchrun")
    assert (result["backend"], result["device"]) == ("gloo", "cpu")
    assert result["param_spread"] == [0.0] * 40  # exactly 0, after each step
    assert result["max_grad_diff"] < 1e-12
    assert result["loss_last"] < result["loss_first"] / 10
    assert result["rows_per_rank"] == [[15, 15, 15, 5]] * 2
    ranks = [(facts["RANK"], facts["LOCAL_RANK"]) for facts in result["environment"]]
    assert ranks == [("0", "0"), ("1", "1")]


@pytest.mark.claim("A11")
def test_a_backend_that_can_not_work_is_refused(monkeypatch, capsys):
    def answer(flags, ranks=2):
        try:
            return (
                vars(proofs.read_flags(lessons.find("02").script, flags.split(), 2, ranks)) and ""
            )
        except SystemExit as stop:
            assert stop.code == 2
            return capsys.readouterr().err

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for gpus, possible in ((0, False), (1, False), (2, True), (8, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert answer("--backend gloo") == ""
        refused = answer("--backend nccl")
        assert refused == "" if possible else f"2 ranks; there are {gpus}" in refused
    assert "at least the number of ranks, 2" in answer("--batch-size 1")
    assert "invalid choice: 'mpi'" in answer("--backend mpi")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # GPUs, but a CPU build
    assert "needs a GPU" in answer("--backend nccl")


BAD = {"--nproc 0": "--nproc", "--nproc": "one", "--launcher mpirun": "--launcher"}
BAD |= {"--backend nccl": "needs a GPU"}  # this one is answered by the lesson itself


@pytest.mark.claim("A11")
@pytest.mark.parametrize("flags", BAD)
def test_bad_values_cost_one_line_and_no_rank_is_started(flags):
    finished = run_lesson(2, *flags.split(), env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""})
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert "error: " in line and BAD[flags] in line


PROJECT = """

if __name__ == "__main__":
    rank, world_size, device = join_group()
    torch.manual_seed(0)
    rows = torch.randn(60, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    train(model, TensorDataset(rows, rows.sum(1, keepdim=True)), 100, 20, device)
    agree = replicas_agree(model)
    loss = mse_loss(model(rows.to(device)), rows.sum(1, keepdim=True).to(device))
    if rank == 0:
        print(world_size, agree, loss.item() < 0.1)
    dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    imports, _, rest = SOURCE.partition('"""\n\n')[2].partition("# --- The technique ---")
    file = tmp_path / "project.py"
    file.write_text(imports + rest.partition("# --- The example ---")[0] + PROJECT)
    assert run_warm(file, 2) == [(0, "2 True True\n"), (0, "")]


def test_no_thread_of_gloo_outlives_the_group(tmp_path):
    """Else the process can abort at its exit: "terminate called without an active exception"."""
    file = tmp_path / "counts.py"
    file.write_text(SOURCE.partition("\n\nif __name__")[0] + COUNT)
    assert run_warm(file, 1, "--steps", 4)[0][0] == 0


COUNT = """

def gloo_threads():
    import glob
    names = []
    for path in glob.glob("/proc/self/task/*/comm"):
        try:
            names.append(open(path).read())
        except OSError:  # it has just ended
            pass
    return sum("gloo" in name for name in names)


def gloo_threads_in_the_end():
    import time
    end = time.monotonic() + 60
    while gloo_threads() and time.monotonic() < end:
        time.sleep(0.01)  # a thread that is joined is still listed for a moment
    return gloo_threads()


def watched(model):
    during.append(gloo_threads())
    return True


during, replicas_agree = [], watched
main(parse_args())
assert during[0] > 0 and gloo_threads_in_the_end() == 0
"""


@pytest.mark.gpu
@pytest.mark.claim("A11", "A12")
def test_on_gpus_each_rank_has_its_own():
    gpus = min(2, torch.cuda.device_count())
    result = run_lesson(2, "--json", "--nproc", gpus, "--backend", "nccl").json
    assert (result["backend"], result["device"], result["world_size"]) == ("nccl", "cuda", gpus)
    assert result["passed"] and result["param_spread"] == [0.0] * 40
