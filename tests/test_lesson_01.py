"""Lesson 01: the moves of nn.DataParallel, written out, counted, and compared with one device."""

import collections
import copy
import doctest
import importlib
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import lesson_01_data_parallel as lesson
import nbtools
import pytest
import torch
from conftest import run_lesson
from solutions.lesson_01 import check, solution
from torch import nn

CPU = torch.device("cpu")
COPY = 12 * 8  # bytes of one copy of the parameters: a layer 5 -> 2 in float64

# Rows inside the model, in the four steps of an epoch of 100 rows in batches of 30.
ROWS_INSIDE = {
    1: [[30], [30], [30], [10]],
    2: [[15, 15], [15, 15], [15, 15], [5, 5]],
    3: [[10, 10, 10], [10, 10, 10], [10, 10, 10], [4, 4, 2]],
    4: [[8, 8, 8, 6], [8, 8, 8, 6], [8, 8, 8, 6], [3, 3, 3, 1]],
    8: [[4, 4, 4, 4, 4, 4, 4, 2]] * 3 + [[2, 2, 2, 2, 2]],
}
BAD_FLAGS = [
    ("--nproc", 0),
    ("--nproc", "two"),
    ("--batch-size", -1),
    ("--steps", 0),
    ("--no-such-flag",),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the launcher with some of this file's flags, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("a folder")
    wanted = [BAD_FLAGS[0], ("--help",), *(("--nproc", n, "--json") for n in (1, 2, 8))]
    with ThreadPoolExecutor(3) as pool:
        finished = pool.map(lambda flags: run_lesson(1, *flags, cwd=folder), wanted)
        return dict(zip(wanted, finished, strict=True))


def first_batch():
    """Return the first batch of 30 rows, its targets, and the model."""
    rows, targets, model = lesson.make_toy(seed=0)
    return rows[:30], targets[:30], model


def gradients(model):
    return nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])


def recording(log, step=lesson.data_parallel_step):
    """Return a step that appends its traffic to `log`: of all steps, not only of one epoch."""

    def record(model, rows, targets, devices, traffic):
        result = step(model, rows, targets, devices, traffic)
        log.append(dict(traffic))
        return result

    return record


# --- The script, as a reader starts it ---


@pytest.mark.claim("A1", "A5")
@pytest.mark.parametrize("nproc", ROWS_INSIDE)
def test_script_passes(runs, nproc, capsys):
    flags = ("--nproc", nproc, "--json")
    if flags in runs:
        code, stdout, stderr = runs[flags].returncode, runs[flags].stdout, runs[flags].stderr
    else:  # the same without a new process
        code = lesson.main([*map(str, flags)])
        stdout, stderr = capsys.readouterr()
    assert (code, stderr) == (0, "")
    verdict, last = stdout.splitlines()[-2:]
    assert verdict.startswith(f"PASS with --nproc {nproc} ")
    result = json.loads(last)
    assert (result["lesson"], result["world_size"], result["passed"]) == (1, nproc, True)
    assert (result["backend"], result["device"] in ("cpu", "cuda")) == ("threads", True)
    assert result["rows_per_replica"] == ROWS_INSIDE[nproc]
    assert result["rows_outside"] == [30, 30, 30, 10]
    assert result["max_grad_diff"] < 1e-12
    assert result["loss_last"] < result["loss_first"] / 10
    assert result["bytes_broadcast_per_step"] == (nproc - 1) * COPY
    assert result["bytes_gathered_per_step"] == (nproc - 1) * COPY


def test_script_refuses_a_bad_flag(runs):
    run = runs[BAD_FLAGS[0]]
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "error: argument --nproc: " in line


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=lambda flags: "=".join(map(str, flags)))
def test_bad_flags_give_one_line_and_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as error:
        lesson.main([*map(str, flags)])
    output = capsys.readouterr()
    assert (error.value.code, output.out) == (2, "")
    (line,) = output.err.splitlines()
    assert flags[0] in line


def test_help_shows_the_docstring(runs):
    run = runs["--help",]
    assert (run.returncode, run.stderr) == (0, "")
    assert lesson.__doc__.splitlines()[0] in run.stdout
    assert "replicas: 2, on cpu\n" not in run.stdout  # it has started nothing
    assert all(flag in run.stdout for flag in ("--nproc", "--steps", "--batch-size", "--seed"))


def test_docstring_shows_the_real_output(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # it says "on a CPU"
    expected = lesson.__doc__.split("Output to expect on a CPU:\n")[1]
    expected = "".join(line.strip() + "\n" for line in expected.splitlines() if line.strip())
    assert lesson.main([]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert doctest.OutputChecker().check_output(expected, stdout, doctest.ELLIPSIS), stdout


def test_script_fails_when_the_gradients_are_not_added(monkeypatch, capsys):
    monkeypatch.setattr(lesson, "add_gradients", lambda *_: None)
    assert lesson.main(["--nproc", "2", "--steps", "4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL ")


def test_script_fails_when_nothing_is_learned(monkeypatch, capsys):
    rows, _, model = lesson.make_toy(seed=0)
    toy = rows, model(rows).detach(), model  # nothing to learn: the loss is 0 from the start
    monkeypatch.setattr(lesson, "make_toy", lambda seed: toy)
    assert lesson.main(["--nproc", "2", "--steps", "4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL ")


def test_seed_changes_the_toy_and_nothing_else_does():
    one, same, other = (lesson.train([CPU] * 2, 3, 30, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one["loss_first"] != other["loss_first"]


# --- A1: parts, gradients, one update ---


@pytest.mark.claim("A1")
@pytest.mark.parametrize("count", [30, 10, 7])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_merged_gradient_is_that_of_the_whole_batch(replicas, count):
    rows, targets, model = lesson.make_toy(seed=3)
    rows, targets = rows[:count], targets[:count]
    whole = copy.deepcopy(model)
    nn.functional.mse_loss(whole(rows), targets).backward()
    traffic = collections.Counter()
    inside, outside, loss = lesson.data_parallel_step(
        model, rows, targets, [CPU] * replicas, traffic
    )
    assert torch.allclose(gradients(model), gradients(whole), rtol=0, atol=1e-12)
    assert (sum(inside), outside) == (count, count)
    assert loss == pytest.approx(nn.functional.mse_loss(whole(rows), targets).item(), abs=1e-12)


@pytest.mark.claim("A1")
def test_every_replica_holds_all_parameters_and_works_on_its_own_part():
    rows, _, model = first_batch()
    devices = [CPU] * 4
    replicas = lesson.replicate(model, devices, collections.Counter())
    parts = lesson.scatter(rows, devices, collections.Counter(), "rows")
    outputs = lesson.parallel_apply(replicas, parts)
    for replica in replicas:
        assert len(list(replica.parameters())) == 2
        assert torch.equal(replica.weight, model.weight)
        assert torch.equal(replica.bias, model.bias)
    storages = {replica.weight.data_ptr() for replica in replicas}
    assert len(storages) == 4  # copies, not four names for one tensor
    assert torch.equal(torch.cat(parts), rows)  # every row once, in its old order
    for part, output in zip(parts, outputs, strict=True):
        assert torch.allclose(output, model(part), rtol=0, atol=1e-12)


@pytest.mark.claim("A1")
def test_training_does_not_depend_on_the_number_of_replicas():
    losses = [lesson.train([CPU] * n, 8, 30)["loss_last"] for n in (1, 2, 5, 8)]
    assert max(losses) - min(losses) < 1e-9
    assert losses[0] < 5


# --- A2: the two ways ---


@pytest.mark.claim("A2")
def test_data_parallel_is_one_line_and_splits_nothing_without_a_gpu(monkeypatch):
    """Also where there are GPUs: the wrapper is told that there is no device of any kind."""
    source = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(source, "_get_available_device_type", lambda: None)
    rows, _, model = first_batch()
    expected = model(rows)
    seen = []
    model.register_forward_hook(lambda _, inputs, __: seen.append((os.getpid(), len(inputs[0]))))
    wrapped = nn.DataParallel(model)
    assert wrapped.device_ids == []
    assert torch.equal(wrapped(rows), expected)
    assert seen == [(os.getpid(), 30)]  # one process, and all rows at once


def ddp_step(rank, world_size):
    """Do one step the second way; return (process id, row numbers, gradient)."""
    rows, targets, model = first_batch()
    sampler = torch.utils.data.DistributedSampler(
        range(len(rows)), num_replicas=world_size, rank=rank, shuffle=False
    )
    numbers = list(sampler)
    replica = nn.parallel.DistributedDataParallel(model)
    nn.functional.mse_loss(replica(rows[numbers]), targets[numbers]).backward()
    return os.getpid(), numbers, gradients(model)


@pytest.mark.claim("A2")
def test_one_process_and_one_process_per_replica_give_the_same_gradient():
    rows, targets, model = first_batch()
    lesson.data_parallel_step(model, rows, targets, [CPU] * 2, collections.Counter())
    pids, numbers, theirs = zip(*nbtools.run(ddp_step, 2), strict=True)
    assert len({os.getpid(), *pids}) == 3  # every rank is a process of its own
    assert [len(share) for share in numbers] == [15, 15]
    assert sorted(itertools.chain(*numbers)) == list(range(30))
    for gradient in theirs:
        assert torch.allclose(gradient, gradients(model), rtol=0, atol=1e-12)


# --- A4: CUDA_VISIBLE_DEVICES, and nn.DataParallel itself ---

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
@pytest.mark.parametrize("before", ["", "torch.nn.Linear(5, 2)"])
def test_variable_set_before_the_first_cuda_call_hides_the_gpus(before):
    """A model that was built on the CPU is not a CUDA call: it is not too late then."""
    command = [sys.executable, "-c", VISIBLE.format(before=before)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "hidden 0\n"), run.stderr


@pytest.mark.gpu
@pytest.mark.claim("A4")
def test_variable_set_after_the_first_cuda_call_is_too_late():
    command = [sys.executable, "-c", VISIBLE.format(before='torch.ones(1, device="cuda")')]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"visible {torch.cuda.device_count()}\n"


@pytest.mark.gpu
@pytest.mark.claim("A4")
def test_without_the_variable_all_gpus_are_used():
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    program = """
import torch
gpus = list(range(torch.cuda.device_count()))
assert gpus and torch.nn.DataParallel(torch.nn.Linear(5, 2).cuda()).device_ids == gpus
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.claim("A1", "A2", "A5")
def test_hand_written_version_is_data_parallel_on_all_gpus():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    result = lesson.train(devices, steps=8, batch_size=30)
    assert result["max_grad_diff"] < 1e-12
    assert result["max_diff_to_data_parallel"] is not None
    assert result["max_diff_to_data_parallel"] < 1e-12

    rows, _, model = lesson.make_toy(seed=0)
    rows, model = rows.to(devices[0]), model.to(devices[0])
    seen = {}
    model.register_forward_hook(
        lambda _, inputs, __: seen.update({inputs[0].device.index: len(inputs[0])})
    )
    wrapped = nn.DataParallel(model, [device.index for device in devices])
    for number, batch in enumerate(rows.split(30)):
        seen.clear()
        assert wrapped(batch).shape == (len(batch), 2)
        assert [seen[index] for index in sorted(seen)] == result["rows_per_replica"][number]


# --- A5: rows inside and outside ---


@pytest.mark.claim("A5")
@pytest.mark.parametrize("replicas", ROWS_INSIDE)
def test_rows_inside_and_outside(replicas):
    """The rows are counted by a hook in the model, not by the lesson."""
    rows, targets, model = lesson.make_toy(seed=0)
    seen = []
    model.register_forward_hook(lambda _, inputs, output: seen.append(tuple(output.shape)))
    for number, batch in enumerate(rows.split(30)):
        seen.clear()
        wanted = targets[30 * number :][:30]
        inside, outside, _ = lesson.data_parallel_step(
            model, batch, wanted, [CPU] * replicas, collections.Counter()
        )
        assert sorted(seen, reverse=True) == [(n, 2) for n in ROWS_INSIDE[replicas][number]]
        assert inside == ROWS_INSIDE[replicas][number]
        assert outside == [30, 30, 30, 10][number]


@pytest.mark.claim("A5")
def test_outputs_come_back_in_the_order_of_the_rows():
    rows, _, model = first_batch()
    devices = [CPU] * 4
    replicas = lesson.replicate(model, devices, collections.Counter())
    parts = lesson.scatter(rows, devices, collections.Counter(), "rows")
    gathered = lesson.gather(lesson.parallel_apply(replicas, parts), collections.Counter())
    assert gathered.shape == (30, 2)
    assert torch.allclose(gathered, model(rows), rtol=0, atol=1e-12)


@pytest.mark.claim("A5")
def test_replicas_without_rows_receive_nothing():
    """10 rows on 8 replicas: five parts, so four copies go out; the other three are idle."""
    traffic = lesson.train([CPU] * 8, 4, 30)["bytes_per_step"]
    assert [step["parameters"] for step in traffic] == [7 * COPY] * 3 + [4 * COPY]
    assert [step["gradients"] for step in traffic] == [7 * COPY] * 3 + [4 * COPY]


# --- A6: the master ---


@pytest.mark.claim("A6")
def test_master_sends_parameters_and_receives_gradients_in_every_step():
    log = []
    lesson.train([CPU] * 2, 12, 30, step=recording(log))
    full = {"rows": 600, "parameters": COPY, "outputs": 240, "gradients of the outputs": 240}
    last = {"rows": 200, "parameters": COPY, "outputs": 80, "gradients of the outputs": 80}
    epoch = [full | {"gradients": COPY}] * 3 + [last | {"gradients": COPY}]
    assert log == epoch * 3


@pytest.mark.claim("A6")
def test_only_the_master_is_updated_so_old_copies_are_out_of_date():
    rows, targets, model = first_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = lesson.replicate(model, [CPU] * 3, collections.Counter())
    assert kept[0] is model
    lesson.data_parallel_step(model, rows, targets, [CPU] * 3, collections.Counter())
    optimizer.step()
    new = lesson.replicate(model, [CPU] * 3, collections.Counter())
    for old_copy, new_copy in zip(kept[1:], new[1:], strict=True):
        assert not torch.allclose(old_copy.weight, model.weight)
        assert torch.equal(new_copy.weight, model.weight)


@pytest.mark.claim("A6")
def test_sending_the_parameters_only_once_breaks_training(monkeypatch):
    kept, replicate = [], lesson.replicate

    def replicate_once(model, devices, traffic):
        kept.extend([] if kept else replicate(model, [CPU] * 8, traffic))
        for replica in kept[1:]:
            replica.zero_grad()
        return kept[: len(devices)]

    monkeypatch.setattr(lesson, "replicate", replicate_once)
    assert lesson.train([CPU] * 8, 1, 30)["max_grad_diff"] < 1e-12  # nobody could notice
    kept.clear()
    broken = lesson.train([CPU] * 8, 40, 30)
    assert broken["max_grad_diff"] > 1
    assert broken["loss_last"] > broken["loss_first"]


# --- A8: saved weights ---


@pytest.mark.claim("A8")
def test_weights_are_saved_from_the_module_inside():
    _, _, model = first_batch()
    wrapped = nn.DataParallel(model)
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert list(wrapped.module.state_dict()) == ["weight", "bias"]

    _, _, fresh = lesson.make_toy(seed=1)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(wrapped.state_dict())
    fresh.load_state_dict(wrapped.state_dict(), strict=False)  # no error, and no effect
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())
    fresh.load_state_dict(wrapped.module.state_dict())
    assert torch.equal(fresh.weight, model.weight.to(CPU))
    assert torch.equal(fresh.bias, model.bias.to(CPU))


# --- What the notebook breaks ---


@pytest.mark.claim("A1")
def test_forgetting_the_other_gradients_is_detected(monkeypatch):
    right = lesson.train([CPU] * 8, 8, 30)["loss_last"]
    monkeypatch.setattr(lesson, "add_gradients", lambda *_: None)
    broken = lesson.train([CPU] * 8, 8, 30)
    assert broken["max_grad_diff"] > 1
    assert right < broken["loss_last"] < broken["loss_first"]  # the loss falls all the same
    assert lesson.train([CPU], 8, 30)["max_grad_diff"] < 1e-12  # one replica hides the mistake


# --- The exercise ---


def stub(model, rows, targets, devices, traffic):
    raise NotImplementedError


def scaled(scale):
    """Return an attempt that weighs the loss of a part with `scale(part, rows, parts)`."""

    def attempt(model, rows, targets, devices, traffic):
        parts = lesson.scatter(rows, devices, traffic, "rows")
        wanted = lesson.scatter(targets, devices, traffic, "targets")
        replicas = lesson.replicate(model, devices[: len(parts)], traffic)
        loss = 0.0
        for replica, part, goal in zip(replicas, parts, wanted, strict=True):
            share = scale(part, rows, parts) * nn.functional.mse_loss(replica(part), goal)
            share.backward()
            loss += share.item()
        lesson.add_gradients(model, replicas, traffic)
        return [len(part) for part in parts], len(rows), loss

    return attempt


def one_device(model, rows, targets, devices, traffic):
    loss = nn.functional.mse_loss(model(rows), targets)
    loss.backward()
    return [len(part) for part in rows.chunk(len(devices))], len(rows), loss.item()


def nobody_adds(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "add_gradients", lambda *_: None)
        return solution(*args)


def wrong_answer(*args):
    inside, outside, loss = solution(*args)
    return inside, outside, loss / 2


def no_answer(*args):
    solution(*args)


def never_sends(model, rows, targets, devices, traffic):
    return solution(model, rows, targets, devices, collections.Counter())


WRONG = {
    "sum of the means": (scaled(lambda *_: 1), "gradient is off"),
    "mean of the means": (scaled(lambda part, rows, parts: 1 / len(parts)), "gradient is off"),
    "nobody adds": (nobody_adds, "gradient is off"),
    "one device does all": (one_device, "the replicas must see"),
    "outputs travel": (lesson.data_parallel_step, "outputs were sent"),
    "nothing travels": (never_sends, "bytes of parameters must go out"),
    "half the loss": (wrong_answer, "the loss of the whole batch is"),
    "nothing is returned": (no_answer, "must return"),
}


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 8])
def test_solution_is_correct(nproc):
    assert check(solution, nproc) is None
    assert nbtools.judge(check, solution) == "correct"


def test_stub_is_not_attempted():
    assert nbtools.judge(check, stub) == "not attempted"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attempts_are_told_what_is_wrong(name):
    attempt, reason = WRONG[name]
    verdict = nbtools.judge(check, attempt)
    assert verdict.startswith("not yet: ") and reason in verdict
    assert all(reason in check(attempt, nproc) for nproc in (3, 4))


def test_solution_trains_like_one_device():
    result = lesson.train([CPU] * 8, 8, 30, step=solution)
    assert result["max_grad_diff"] < 1e-12
    assert result["loss_last"] == pytest.approx(lesson.train([CPU], 8, 30)["loss_last"])
    assert set(result["bytes_per_step"][0]) == {"rows", "targets", "parameters", "gradients"}
