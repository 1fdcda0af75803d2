"""Lesson 03: ranks that a script starts itself, real data, an evaluation that counts once."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import lesson_03_spawn_ddp as lesson
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from breaks import check_breaks
from conftest import ENVIRONMENT, ROOT, run_lesson, run_warm
from lockstep import lessons, proofs
from nbtools import run
from sklearn.metrics import accuracy_score, f1_score
from torch import nn

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
proof = proofs.of_lesson(lessons.find("03"))

BREAKS = {
    "the same images on all ranks": (
        "DistributedSampler(data, seed=seed)",
        "DistributedSampler(data, 1, 0, seed=seed)",
    ),
    "a sampler seed for each rank": (
        "DistributedSampler(data, seed=seed)",
        "DistributedSampler(data, seed=seed + dist.get_rank())",
        (3,),
    ),
    "no set_epoch": ("sampler.set_epoch(epoch)", "pass"),
    "the batch is not divided": ("batch_size // dist.get_world_size()", "batch_size"),
    "loss times world size": (
        "loss.backward()\n            optimizer.step()",
        "(loss * dist.get_world_size()).backward(); optimizer.step()",
    ),
    "no DDP": ("DistributedDataParallel(model.to(device))", "model.to(device)"),
    "DDP is passed by": ("replica(images.to(device))", "model(images.to(device))"),
    "gradients pile up": ("optimizer.zero_grad()", "pass"),
    "no schedule": ("schedule.step()", "pass"),
    "a layer is forgotten": ("AdamW(model.parameters()", "AdamW(model[1:].parameters()"),
    "one replica goes astray": (
        "losses.append(loss.item())",
        "losses.append(loss.item()); model[0].bias.data += dist.get_rank()",
    ),
    "a step less": ("if len(losses) == steps:", "if len(losses) == steps - 1:"),
    "another loss is told": ("losses.append(loss.item())", "losses.append(loss.item() / 2)"),
    "an evaluation with padded images": (
        "Subset(data, range(rank, len(data), world_size))",
        "Subset(data, list(DistributedSampler(data, shuffle=False)))",
    ),
    "a made-up F1": ("return scores.mean().item()", "return 0.5"),
    "a made-up accuracy": ("return (counts.trace() / counts.sum()).item()", "return 0.999"),
    "counts stay at home": ("dist.all_reduce(counts)", "pass", (3,)),
    "evaluation in training mode": ("model.eval()", "pass"),
    "the mode is lost": ("model.train(was_training)", "pass"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    # Five steps are an epoch: the sixth one shows whether the next has an order of its own.
    check_breaks(3, BREAKS, nproc, "--steps", 6, "--batch-size", 300)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Give each process one thread: threads that share a core with another job wait long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")
        yield


# --- The whole script ---


def test_after_300_steps_an_accuracy_of_95_percent_is_asked_for(default_run):
    wanted = [proof.wanted_accuracy(*given) for given in ((300, 60), (299, 60), (300, 59))]
    assert wanted == [0.95, 0.0, 0.0]
    said = default_run(3).stdout.splitlines()[-2]
    assert re.fullmatch(r"PASS accuracy 0\.9[5-9]\d on 297 images, asked for: 0.95", said)


@pytest.mark.claim("C9")
def test_two_jobs_at_once_both_pass():
    """They are warm, and each starts two ranks: in two files, so no port can be taken."""
    flags = ["--nproc=2", "--steps=2", "--batch-size=8"]
    jobs = run_warm(lesson.__file__, 2, *flags, unset=["RANK", "WORLD_SIZE", "LOCAL_RANK"])
    assert [code for code, _ in jobs] == [0, 0]
    assert all(stdout.endswith(", from the same counts of 297 images\n") for _, stdout in jobs)


def test_ranks_that_never_met_end_in_fail(tmp_path):
    """check_breaks replaces launch_job and be_rank; here they start the ranks."""
    source = Path(lesson.__file__).read_text()
    told = [line for line in source.splitlines() if line.startswith("    os.environ.update(")]
    assert len(told) == 2
    for line in told:
        source = source.replace(line, "    pass")
    script = tmp_path / "script.py"
    script.write_text(source)
    flags = ["--nproc=2", "--steps=2", "--batch-size=8"]
    program = [sys.executable, "-c", AS_LESSON_03, str(script), *flags]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=600)
    claim = ended.stdout.splitlines()[-1]
    assert ended.returncode == 1 and "2 processes were started; the group has 1" in claim, ended


AS_LESSON_03 = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from lockstep import inside, lessons
lessons.of_script = lambda path: lessons.find("03")
inside.main([lessons.LAUNCH_JOB, *sys.argv[1:]])
"""


def test_fewer_images_than_ranks_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, ["--nproc=4", "--batch-size=3"], 1, 1)
    assert stop.value.code == 2
    assert "--batch-size: must be at least --nproc, 4" in capsys.readouterr().err


# --- The technique in a project of one's own ---

OF_A_READER = """

def work(rank, world_size, device):
    numbers = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [(image, (image.mean() > 0).long()) for image in numbers]
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    losses = train(model, data, 40, 30, device)
    counts = evaluate(model, data, device, classes=2)
    return [losses[-1] < losses[0], counts.sum().item(), accuracy(counts) > 0.7]


if __name__ == "__main__":
    print(launch_job(work, 2))
"""


def test_the_technique_runs_unchanged_in_a_file_of_a_reader(tmp_path):
    source = Path(lesson.__file__).read_text()
    technique = source.partition("# --- The example ---")[0].replace(lesson.__doc__, "")
    (tmp_path / "own.py").write_text(technique + OF_A_READER)
    ((code, stdout),) = run_warm(tmp_path / "own.py", 1)
    assert (code, stdout.strip()) == (0, "[True, 90, True]")


def report_process(rank, world_size, device, seed):
    total = torch.tensor(rank + 1, device=device)
    dist.all_reduce(total)
    facts = {"rank": rank, "world_size": world_size, "sum": total.item(), "seed": seed}
    facts |= {"pid": os.getpid(), "here": os.environ["LOCAL_WORLD_SIZE"]}
    return facts | {"threads": torch.get_num_threads()}


OTHER_JOB = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}


def call_launch_job(rank, world_size, nproc):
    """Call it as a rank of another job does; return its result, our process id, what has changed.

    Its ranks are forks of this one, which is warm; the run of the whole script spawns some.
    """
    dist.destroy_process_group()
    os.environ |= OTHER_JOB
    before = dict(os.environ)
    torch.set_num_threads(4)
    spawn = functools.partial(mp.start_processes, start_method="fork")
    with patch.object(mp, "spawn", spawn):
        facts = lesson.launch_job(report_process, nproc, 5)
    return facts, os.getpid(), set(before.items()) ^ set(os.environ.items()), dist.is_initialized()


@pytest.mark.claim("B4", "C2")
@pytest.mark.parametrize("nproc", [1, 2])
def test_launch_job_returns_what_rank_0_returned(nproc):
    ((facts, caller, changed, in_a_group),) = run(call_launch_job, 1, nproc)
    assert (facts["pid"] == caller) == (nproc == 1)
    expected = {"rank": 0, "world_size": nproc, "sum": nproc * (nproc + 1) // 2, "seed": 5}
    expected |= {"here": str(nproc), "threads": max(1, 4 // nproc)}
    assert {name: facts[name] for name in expected} == expected
    assert (changed, in_a_group) == (set(), False)


def fail(rank, world_size, device):
    raise ValueError("no such digit")


def test_with_one_rank_an_error_is_the_caller_s_and_the_next_job_runs():
    with pytest.raises(ValueError, match="no such digit"):
        lesson.launch_job(fail, 1)
    assert lesson.launch_job(report_process, 1, 5)["sum"] == 1


# --- Scores ---


def evaluate_in_both_modes(rank, world_size, images):
    """Evaluate with dropout in the model; return the counts, and the modes found afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    test_set, found = lesson.load_data()[1][:images], []
    for training in (True, False):
        model.train(training)
        found.append((lesson.evaluate(model, test_set, CPU), model.training, model[1].training))
    return found


@pytest.mark.claim("C3")
def test_evaluation_counts_each_image_once_and_leaves_the_mode():
    for images in (297, 2):  # the last: fewer images than ranks
        (alone, *_), _ = run(evaluate_in_both_modes, 1, images)[0]
        for nproc in (2, 3):
            for each in run(evaluate_in_both_modes, nproc, images):
                assert [modes for _, *modes in each] == [[True, True], [False, False]]
                assert all(torch.equal(counts, alone) for counts, *_ in each)
        assert alone.sum() == images


def test_scores_are_those_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels, answers = torch.randint(0, 10, (2, 500), generator=generator)
    counts = torch.bincount(labels * 10 + answers, minlength=100).reshape(10, 10)
    assert lesson.accuracy(counts) == pytest.approx(accuracy_score(labels, answers))
    expected = f1_score(labels, answers, average="macro")
    assert lesson.macro_f1(counts) == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.claim("C1", "C9")
def test_one_process_per_gpu():
    nproc = min(4, torch.cuda.device_count())
    result = run_lesson(3, "--nproc", nproc, "--json").json
    assert (result["backend"], result["device"]) == ("nccl", "cuda")
    assert result["passed"] is True and result["images_evaluated"] == 297
