"""Lesson 03: ranks that a script starts itself, real data, an evaluation that counts once."""

import argparse
import contextlib
import doctest
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from datetime import timedelta

import cloudpickle
import lesson_03_spawn_ddp as lesson
import nbtools
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, Finished, run_lesson, start_lesson
from solutions.lesson_03 import check, solution
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DEADLINE = 15  # seconds within which no process of a failed job may be left
THREADS = torch.get_num_threads()
SCRIPT_STEPS = {2: 300, 3: 20}  # of the launcher's runs, by number of ranks; 300 is the default


# --- What ranks do here. Ranks of mp.spawn import this file: nothing runs at its top level. ---


def train_quietly(rank, world_size, cfg, *changes):
    """Call lesson.train on a rank, without its progress bar, after changes to the lesson."""
    torch.set_num_threads(1)
    for change in changes:
        change()
    with contextlib.redirect_stderr(io.StringIO()):
        return lesson.train(cfg)


def leave_out_ddp():
    nn.parallel.DistributedDataParallel = lambda model: model


def leave_out_the_sampler():
    lesson.DistributedSampler = lambda data, *_, seed: DistributedSampler(data, 1, 0, seed=seed)


def count_evaluated(rank, world_size, cfg):
    """Train three times; return how many images were evaluated by the lesson and by two others."""
    test_set = lesson.make_data("digits")[1]

    class WholeTestSet(DataLoader):
        def __init__(self, data, *args, **options):
            super().__init__(data if len(data) == 1500 else test_set, *args, **options)

    class PaddedPart(DataLoader):
        def __init__(self, data, *args, **options):
            if len(data) != 1500:
                data, options["sampler"] = test_set, DistributedSampler(test_set, shuffle=False)
            super().__init__(data, *args, **options)

    counts = []
    for lesson.DataLoader in (DataLoader, WholeTestSet, PaddedPart):
        counts.append(train_quietly(rank, world_size, cfg)["images_evaluated"])
    return counts


def train_and_watch(rank, world_size, cfg):
    """Train a network with BatchNorm; return the epochs, the images dealt, and the statistics."""
    seen = {"epochs": [], "indices": [], "statistics": None}

    class Watched(DistributedSampler):
        def set_epoch(self, epoch):
            seen["epochs"].append(epoch)
            super().set_epoch(epoch)

        def __iter__(self):
            indices = list(super().__iter__())
            seen["indices"].append(indices)
            return iter(indices)

    def evaluate(model, *args):
        seen["statistics"] = [buffer.clone() for buffer in model.buffers()]
        return evaluate_before(model, *args)

    def make_model(name, channels, outputs):
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, outputs))

    evaluate_before = lesson.evaluate
    lesson.DistributedSampler, lesson.evaluate = Watched, evaluate
    lesson.make_model = make_model
    return seen | {"result": train_quietly(rank, world_size, cfg)}


def report_process(cfg):
    """Be the function that launch_job calls: say where it was called."""
    rank, world_size, device = lesson.setup()
    total = torch.tensor(rank + 1, device=device)
    dist.all_reduce(total)
    facts = {"rank": rank, "world_size": world_size, "sum": total.item(), "seed": cfg.seed}
    return facts | {"pid": os.getpid(), "threads": torch.get_num_threads()}


def fail_on_rank_1(cfg):
    """Be a training that ends badly on rank 1 while the others wait for it."""
    lesson.setup()
    if os.environ["RANK"] == "1" and cfg.seed == 1:
        raise ValueError("no such digit")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def die_in_step_2(rank, world_size, cfg):
    """Train; rank 1 is killed before its second step."""

    def progress(steps, **options):
        for step in steps:
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield step

    lesson.tqdm = progress
    return lesson.train(cfg)


def join_as_printed(rank, world_size, folder=None):
    """Do as the article prints it, without an address, or with our cure, a file in `folder`."""
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    store = folder and dist.FileStore(str(folder / "rendezvous"), world_size)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    except ValueError as error:
        return str(error)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return total.item()


def join_at_port(rank, world_size, port):
    """Join a group at a fixed port, as the article does; return the kind of error, and its text."""
    dist.destroy_process_group()
    place = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=3)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **place)
    except RuntimeError as error:
        return type(error).__name__, str(error)


def wrap(rank, world_size, device_ids):
    """Wrap a model for these devices; return the error."""
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(5, 2), device_ids=device_ids)
    except ValueError as error:
        return str(error)


# --- Helpers ---


def config(**changes):
    usual = {"nproc": 2, "steps": 4, "batch_size": 60, "seed": 0, "data": "digits"}
    return argparse.Namespace(**{**usual, "model": "small", **changes})


def still_alive(processes):
    """Return which of the processes are still there DEADLINE seconds from now."""
    return psutil.wait_procs(processes, timeout=DEADLINE)[1]


def wait_for_ranks(process, count):
    """Wait until a launcher has `count` ranks; return all of its descendants, and the ranks."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):  # setup.sh's own children come and go
            family = psutil.Process(process.pid).children(recursive=True)
            ranks = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
            # A rank that has a connection has imported torch and has met the others.
            if len(ranks) == count and all(child.net_connections("tcp") for child in ranks):
                return family, ranks
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Give each process one thread: threads that share a core with another job wait long."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def long_run():
    """Start a run that would take an hour: (launcher, its descendants, its ranks)."""
    process = start_lesson(3, "--nproc", 2, "--steps", 100000)
    family = []
    try:
        family, ranks = wait_for_ranks(process, 2)
        yield process, family, ranks
    finally:
        for child in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.communicate()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Run the default with 2 ranks, and a short one with 3, at the same time: {nproc: Finished}."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    started, finished = {}, {}
    try:
        for nproc, steps in SCRIPT_STEPS.items():
            flags = [] if nproc == 2 else ["--nproc", nproc, "--steps", steps]
            started[nproc] = start_lesson(3, "--json", *flags, cwd=folder)
        for nproc, process in started.items():
            stdout, stderr = process.communicate(timeout=300)
            finished[nproc] = Finished(process.args, process.returncode, stdout, stderr)
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert list(folder.iterdir()) == []
    return finished


@pytest.fixture(scope="module")
def trainings(scripts):
    """Return the facts of the default training with 1 to 4 ranks: {nproc: (code, output)}.

    2 is the script's own. 1 runs main() here, as the script does. 3 and 4 run main() with the
    result of ranks that `run` has started: the same training, without an import of torch per rank.
    """
    trained = {2: (scripts[2].returncode, scripts[2].stdout)}
    with pytest.MonkeyPatch.context() as patch:
        for nproc in (1, 3, 4):
            if nproc > 1:
                job = config(nproc=nproc, steps=300)
                facts = nbtools.run(train_quietly, nproc, job, deadline=300)[0]
                patch.setattr(lesson, "launch_job", lambda *_, facts=facts: facts)
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
                code = lesson.main(["--nproc", str(nproc), "--json"])
            trained[nproc] = code, stdout.getvalue()
    return trained


@pytest.fixture(scope="module")
def short_run():
    """Train 4 steps on 2 ranks, as the lesson does: what train returned on each rank."""
    return nbtools.run(train_quietly, 2, config())


# --- The script, as a reader runs it ---


@pytest.mark.claim("C2", "C3")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_default_run_passes(trainings, nproc):
    code, output = trainings[nproc]
    assert code == 0
    verdict, last = output.splitlines()[-2:]
    facts = json.loads(last)
    assert facts["lesson"] == 3 and facts["world_size"] == nproc and facts["passed"] is True
    assert facts["accuracy"] >= 0.95
    assert facts["images_evaluated"] == 297
    assert facts["param_spread"] == 0.0 < facts["param_change"]
    assert facts["loss_last"] < 0.1 < 2 < facts["loss_first"]
    assert [len(losses) for losses in facts["loss_per_rank"]] == [300] * nproc
    assert verdict.startswith("PASS ")


def test_docstring_shows_the_real_output(scripts):
    block = re.search(r"Output to expect[^\n]*\n\n((?:    .+\n)+)", lesson.__doc__).group(1)
    shown, real = textwrap.dedent(block), scripts[2].stdout.splitlines()[:-1]
    assert len(shown.splitlines()) == len(real) == 4
    compare = doctest.OutputChecker().check_output
    assert compare(shown, "\n".join(real) + "\n", doctest.ELLIPSIS), real


@pytest.mark.claim("C9")
def test_two_jobs_at_once_both_pass(scripts):
    """The fixture runs two jobs at a time; a fixed port would let only one of them in."""
    assert [scripts[nproc].returncode for nproc in (2, 3)] == [0, 0]


def test_one_progress_bar_with_a_total(scripts):
    for nproc, run in scripts.items():
        bars = [line for line in re.split(r"[\r\n]", run.stderr) if "it/s]" in line]
        assert bars and all(bar.startswith("rank 0: ") for bar in bars)
        steps = SCRIPT_STEPS[nproc]
        counts = [int(re.search(rf"(\d+)/{steps} \[", bar).group(1)) for bar in bars]
        assert counts[0] == 0 and counts[-1] == steps, nproc
        assert counts == sorted(counts), "a second bar writes in between"
        assert run.stderr.count(f"| 0/{steps} [") == 1, "one bar, from one rank"


BAD = [
    (["--nproc", "0"], "--nproc"),
    (["--nproc", "65"], "--nproc"),
    (["--nproc", "two"], "--nproc"),
    (["--batch-size", "-1"], "--batch-size"),
    (["--batch-size", "3", "--nproc", "4"], "--batch-size"),
    (["--steps", "0"], "--steps"),
    (["--seed", "-1"], "--seed"),
    (["--data", "cats"], "--data"),
    (["--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_value_costs_one_line(monkeypatch, capsys, flags, named):
    monkeypatch.setattr(lesson, "launch_job", None)  # calling it would be a TypeError
    with pytest.raises(SystemExit) as exit_:
        lesson.main(flags)
    stdout, stderr = capsys.readouterr()
    assert exit_.value.code == 2 and stdout == ""
    lines = [line for line in stderr.splitlines() if line]
    assert len(lines) == 1 and named in lines[0]


def test_help_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(lesson, "launch_job", None)
    with pytest.raises(SystemExit) as exit_:
        lesson.main(["--help"])
    assert exit_.value.code == 0
    assert lesson.__doc__.splitlines()[0] in capsys.readouterr().out


def test_resnet50_says_what_to_install(monkeypatch, capsys):
    find_spec = lesson.importlib.util.find_spec
    hidden = {"torchvision": None}
    monkeypatch.setattr(
        lesson.importlib.util, "find_spec", lambda name: hidden.get(name, find_spec(name))
    )
    with pytest.raises(SystemExit) as exit_:
        lesson.main(["--model", "resnet50"])
    stdout, stderr = capsys.readouterr()
    assert exit_.value.code == 2 and stdout == ""
    assert len(stderr.splitlines()) == 1
    assert re.search(r"pip install torchvision==[\d.]+$", stderr.strip())


def test_resnet50_is_given_three_channels_and_the_right_outputs(monkeypatch):
    """A stand-in for torchvision, which has no CPU build here: it records how it is called."""

    def resnet50(num_classes):
        return nn.Sequential(
            nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes)
        )

    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    models = types.SimpleNamespace(resnet50=resnet50)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    digits, images = torch.rand(2, 1, 8, 8), torch.rand(2, 3, 224, 224)
    assert lesson.make_model("resnet50", 1, 10)(digits).shape == (2, 10)
    assert lesson.make_model("resnet50", 3, 1)(images).shape == (2, 1)


def test_claim_that_is_false_fails(monkeypatch, capsys):
    """main says FAIL and 1 for each part of the claim that does not hold."""
    good = {"backend": "gloo", "device": "cpu", "accuracy": 0.95, "images_evaluated": 297}
    good |= {"loss_per_rank": [[2.0], [2.0]], "param_change": 0.1, "param_spread": 0.0}

    def verdict(*flags, **changes):
        monkeypatch.setattr(lesson, "launch_job", lambda *_: good | changes)
        code = lesson.main(list(flags))
        return code, capsys.readouterr().out.splitlines()[-1].split()[0]

    assert verdict() == (0, "PASS")
    for change in (
        {"accuracy": 0.949},
        {"images_evaluated": 298},
        {"param_spread": 1e-9},
        {"param_change": 0.0},
        {"param_change": float("nan")},
    ):
        assert verdict(**change) == (1, "FAIL"), change
    assert verdict("--steps", "5", accuracy=0.1) == (0, "PASS")


# --- Starting ranks: launch_job, run, and the article's snippet ---


@pytest.mark.claim("C2")
def test_one_device_calls_the_function_in_this_process():
    facts = lesson.launch_job(config(nproc=1, seed=5), report_process)
    assert facts["pid"] == os.getpid()
    assert (facts["world_size"], facts["sum"], facts["seed"]) == (1, 1, 5)
    assert not dist.is_initialized()


@pytest.mark.claim("B4", "C2")
def test_more_devices_get_a_process_each():
    facts = lesson.launch_job(config(nproc=2, seed=5), report_process)
    assert facts["pid"] != os.getpid() and not psutil.pid_exists(facts["pid"])
    assert (facts["rank"], facts["world_size"], facts["sum"], facts["seed"]) == (0, 2, 3, 5)
    assert facts["threads"] == max(1, THREADS // 2)


@pytest.mark.claim("B4")
def test_snippet_without_an_address_fails_and_a_file_cures_it(tmp_path):
    for answer in nbtools.run(join_as_printed, 2):
        assert "environment variable MASTER_ADDR expected, but not set" in answer
    assert nbtools.run(join_as_printed, 2, tmp_path) == [3, 3]


@pytest.mark.claim("C9")
def test_fixed_port_belongs_to_the_first_job():
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (answer,) = nbtools.run(join_at_port, 1, first.port)
    assert answer[0] == "DistNetworkError" and "EADDRINUSE" in answer[1]
    del first


@pytest.mark.claim("C1")
@pytest.mark.parametrize("device_ids", [[0, 1], [0, 1, 2, 3]])
def test_several_devices_in_one_process_are_refused(device_ids):
    (answer,) = nbtools.run(wrap, 1, device_ids)
    assert answer == "device_ids can only be None or contain a single element."


@pytest.mark.gpu
@pytest.mark.claim("C1", "C9")
def test_one_process_per_gpu():
    nproc = min(4, torch.cuda.device_count())
    facts = run_lesson(3, "--nproc", nproc, "--json").json
    assert (facts["backend"], facts["device"]) == ("nccl", "cuda")
    assert facts["passed"] is True and facts["images_evaluated"] == 297
    for answer in nbtools.run(wrap, 1, list(range(nproc + 1))):
        assert "single element" in answer


# --- Training and evaluation ---


def test_first_step_is_that_of_the_whole_batch(short_run):
    """Each rank's first loss is that of its own 30 images; their mean is the batch's loss."""
    torch.manual_seed(0)
    train_set, _, _ = lesson.make_data("digits")
    model = lesson.make_model("small", 1, 10)
    batch, expected = [], []
    for rank in range(2):
        sampler = DistributedSampler(train_set, 2, rank, seed=0)
        part = [train_set[index] for index in list(sampler)[:30]]
        batch += part
        expected.append(loss_of(model, part))
    measured = [losses[0] for losses in short_run[0]["loss_per_rank"]]
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(measured) / 2, loss_of(model, batch), rtol=1e-4, atol=1e-4)
    assert abs(measured[0] - measured[1]) > 1e-3


def loss_of(model, pairs):
    images, labels = zip(*pairs, strict=True)
    with torch.no_grad():
        outputs = model(torch.stack(images))
        return nn.functional.cross_entropy(outputs, torch.stack(labels)).item()


def test_all_ranks_return_the_same_facts(short_run):
    timed = {"seconds_training", "images_per_second"}
    first, second = ({k: v for k, v in facts.items() if k not in timed} for facts in short_run)
    assert first == second
    assert first["param_spread"] == 0.0 < first["param_change"]


def test_every_epoch_has_a_new_order_and_statistics_agree():
    cfg = config(steps=5, batch_size=750)  # two steps are an epoch
    ranks = nbtools.run(train_and_watch, 2, cfg)
    for seen in ranks:
        assert seen["epochs"] == [0, 1, 2]
        first, second, _ = seen["indices"]
        assert len(first) == 750 and sorted(first) != sorted(second)
    for one, other in zip(ranks[0]["indices"], ranks[1]["indices"], strict=True):
        assert sorted(one + other) == list(range(1500))
    torch.testing.assert_close(ranks[0]["statistics"], ranks[1]["statistics"], rtol=0, atol=0)
    assert ranks[0]["statistics"][2] == 5  # BatchNorm has counted its batches


@pytest.mark.claim("C3")
def test_without_a_sampler_every_rank_trains_on_the_same_images(short_run):
    with_sampler = short_run[0]["loss_per_rank"]
    assert all(a != b for a, b in zip(*with_sampler, strict=True))
    without = nbtools.run(train_quietly, 2, config(), leave_out_the_sampler)[0]
    assert without["loss_per_rank"][0] == without["loss_per_rank"][1]
    alone = nbtools.run(train_quietly, 1, config(nproc=1, batch_size=30), leave_out_the_sampler)[0]
    one_rank = alone["loss_per_rank"][0]
    torch.testing.assert_close(without["loss_per_rank"][0], one_rank, rtol=1e-2, atol=1e-2)


@pytest.mark.claim("C3")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_each_test_image_is_evaluated_once(nproc):
    cfg = config(nproc=nproc, steps=1)
    counted = nbtools.run(count_evaluated, nproc, cfg)
    assert counted[0] == [297, 297 * nproc, {1: 297, 2: 298, 3: 297, 4: 300}[nproc]]


@pytest.mark.claim("B7")
def test_ranks_that_skip_ddp_drift_apart(short_run):
    assert short_run[0]["param_spread"] == 0.0
    drifted = nbtools.run(train_quietly, 2, config(), leave_out_ddp)
    assert all(facts["param_spread"] > 1e-3 for facts in drifted)


# --- Trouble ---


@pytest.mark.claim("B7")
def test_a_rank_that_dies_is_named_by_run():
    with pytest.raises(nbtools.RankFailed, match="rank 1: killed by SIGKILL"):
        nbtools.run(die_in_step_2, 2, config(), deadline=30)


@pytest.mark.claim("B7")
@pytest.mark.parametrize(("seed", "reason"), [(1, "ValueError: no such digit"), (2, "SIGKILL")])
def test_a_rank_that_fails_ends_the_job(monkeypatch, seed, reason):
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(lesson, "train", fail_on_rank_1)
    start = time.monotonic()
    with pytest.raises(SystemExit) as exit_:
        lesson.main(["--nproc", "3", "--seed", str(seed)])
    assert time.monotonic() - start < 100  # the group's own timeout is two minutes
    message = exit_.value.code  # a text: Python prints it on stderr, and the exit code is 1
    assert re.fullmatch(rf"rank 1 failed: .*{reason}.*", message.splitlines()[-1])
    ranks = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in ranks if "spawn_main" in " ".join(process.cmdline())] == []


def test_a_rank_that_fails_stays_a_moment_and_keeps_its_group(monkeypatch, tmp_path):
    """Else its neighbours lose it, fail as well, and one of them may be named instead."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # run changes them; this puts them back afterwards
    pauses = []
    monkeypatch.setattr(lesson.time, "sleep", pauses.append)
    monkeypatch.setattr(lesson.mp, "_prctl_pr_set_pdeathsig", lambda sign: None)  # not for pytest
    cfg = config(nproc=1, seed=1, folder=str(tmp_path))
    try:
        with pytest.raises(ZeroDivisionError):
            lesson.run(0, lambda cfg: 1 / 0, cfg)
        assert pauses == [1]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(1)


def test_interrupt_ends_all_ranks(long_run):
    process, family, _ = long_run
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert still_alive(family) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_killed_launcher_leaves_no_rank_and_the_next_run_passes(long_run):
    process, family, _ = long_run
    process.kill()
    assert still_alive(family) == []
    with contextlib.redirect_stdout(io.StringIO()):
        assert lesson.main(["--nproc", "2", "--steps", "2"]) == 0


DEAF = """
import argparse, os, signal, sys, time
from pathlib import Path
import lesson_03_spawn_ddp as lesson

def wait(cfg):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(cfg.out, str(os.getpid())).touch()
    time.sleep(1000)

if __name__ == "__main__":
    lesson.launch_job(argparse.Namespace(nproc=2, out=sys.argv[1]), wait)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_killed_launcher_ends_ranks_that_do_not_hear_an_interrupt(tmp_path):
    """As deaf as a rank that waits for its neighbours inside C++ code."""
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "out").mkdir()
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT / "lessons"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, tmp_path / "deaf.py", tmp_path / "out"]
    process = subprocess.Popen(command, env=environment)
    ranks, end = [], time.monotonic() + 90
    try:
        while len(ranks) < 2 and time.monotonic() < end:
            ranks = [psutil.Process(int(path.name)) for path in (tmp_path / "out").iterdir()]
            time.sleep(0.1)
        assert len(ranks) == 2
        process.kill()
        assert still_alive(ranks) == []
    finally:
        for child in [process, *ranks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


# --- The article's random images ---


@pytest.mark.claim("C10")
def test_random_images_are_made_from_their_numbers_and_labelled_by_a_coin_toss():
    images, labels = lesson.make_random_images(range(150))
    assert images.shape == (150, 3, 224, 224) and labels.shape == (150,)
    means = images.double().mean((1, 2, 3))
    assert (means - 0.5).abs().max() < 0.005  # nothing but noise decides the label
    assert torch.equal(labels, (means < 0.5).float())
    assert 0.35 < labels.mean() < 0.65
    again, _ = lesson.make_random_images([149, 3])
    assert torch.equal(again, images[[149, 3]])  # no file, no download, on any rank the same
    assert len(set(means.tolist())) == 150
    train_set, test_set, make_batch = lesson.make_data("random-images")
    assert sorted([*train_set, *test_set]) == list(range(1000))
    assert make_batch is lesson.make_random_images


@pytest.mark.claim("C10")
def test_random_images_can_be_trained_on(monkeypatch, capsys):
    """With one layer: the lesson's own network takes seconds for the 100 test images."""
    images, _ = lesson.make_random_images(range(2))
    assert lesson.make_model("small", 3, 1)(images).shape == (2, 1)
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1)
    monkeypatch.setattr(lesson, "make_model", lambda *_: nn.Sequential(*layers))
    flags = "--nproc 1 --data random-images --batch-size 4 --steps 1"
    assert lesson.main(flags.split()) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("on 100 images, asked for: 0.0")


# --- The exercise ---


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_solution_is_correct(nproc):
    assert check(solution, nproc) is None
    assert nbtools.judge(check, solution) == "correct" or nproc > 1


def not_attempted(rank, world_size, model, test_set):
    raise NotImplementedError


def of_its_own_part(rank, world_size, model, test_set):
    part = test_set[rank::world_size]
    return sum(model(image) == label for image, label in part) / max(1, len(part))


def mean_of_means(rank, world_size, model, test_set):
    mean = torch.tensor(of_its_own_part(rank, world_size, model, test_set))
    dist.all_reduce(mean)
    return mean.item() / world_size


def everything_everywhere(rank, world_size, model, test_set):
    return of_its_own_part(0, 1, model, test_set)


def with_padding(rank, world_size, model, test_set):
    part = [test_set[i] for i in DistributedSampler(test_set, shuffle=False)]
    counts = torch.tensor([sum(model(image) == label for image, label in part), len(part)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def only_rank_0_works(rank, world_size, model, test_set):
    accuracy = torch.tensor(of_its_own_part(0, 1, model, test_set) if rank == 0 else 0.0)
    dist.broadcast(accuracy, 0)
    return accuracy.item()


@pytest.mark.parametrize(
    "attempt",
    [of_its_own_part, mean_of_means, everything_everywhere, with_padding, only_rank_0_works],
)
def test_wrong_attempt_is_refused(attempt):
    assert nbtools.judge(check, attempt).startswith("not yet: with ")


def test_stub_is_not_attempted():
    assert nbtools.judge(check, not_attempted) == "not attempted"
    assert "world_size" in inspect.signature(solution).parameters
