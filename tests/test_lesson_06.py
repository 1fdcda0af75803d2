"""Lesson 06: checkpoints that survive a kill, and from which a job goes on with the same bits."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import lesson_06_checkpoint_map_location as lesson
import psutil
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks, verdicts_of_proof
from conftest import finish, run_warm, start_program
from lockstep import lessons, proofs
from nbtools import RankFailed, run
from torch import nn

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
proof = proofs.of_lesson(lessons.find("06"))

CPU = torch.device("cpu")
SOURCE = Path(lesson.__file__).read_text()
WRITE = """        torch.save(state, file)  # from Python to the operating system
        os.fsync(file.fileno())  # and to the disk, before the name is there
    os.replace(unfinished, path)"""
NAME_FIRST = """        os.replace(unfinished, path)
        torch.save(state, file)
        os.fsync(file.fileno())"""
KEEP = '        save(state | {"now": now, "random": everyone}, path)\n'
OLD = "        for old in [other for other in checkpoints(folder) if other <"
EARLY = f"{OLD} path][:-1]:\n            old.unlink()\n{KEEP}"
WRITER = SOURCE[SOURCE.index("    if dist.get_rank() == 0:\n        state") : SOURCE.index(KEEP)]
EACH = 'dist.get_rank() * "other_" + f"step_{'
TOGETHER = "dist.all_gather_object(everyone, own, group)"
BREAKS = {  # the same mistake on any number of ranks
    "the model is left out": ('{"model": model, "optimizer"', '{"optimizer"'),
    "the momentum is left out": ('"optimizer": optimizer, ', ""),
    "the schedule is left out": (', "schedule": schedule}', "}"),
    "the epoch is lost": ('return saved["now"]', 'return saved["now"] | {"epoch": 0}'),
    "the position is lost": ('return saved["now"]', 'return saved["now"] | {"rows": 0}'),
    "the step is one behind": ('"now": now,', '"now": now | {"step": now["step"] - 1},'),
    "each rank counts its own rows": (" * dist.get_world_size()  # all", "  #"),
    "the position is rounded": (".tolist()[used:]", ".tolist()[used - used % world_size :]"),
    "an epoch that is used up begins again": (".tolist()[used:]", ".tolist()[used % 100 :]", (2,)),
    "one rank has a row more": ("[: len(rest) // world_size]", "", (3,)),
    "torch's random state is lost": ('torch.set_rng_state(states["torch"])', "pass"),
    "NumPy's random state is lost": ('np.random.set_state(states["numpy"])', "pass"),
    "Python's random state is lost": ('random.setstate(states["random"])', "pass"),
    "a loop over the loader draws": ("sampler=mine, generator=own", "sampler=mine"),
    "no name of its own": ('path.with_suffix(".unfinished")', "path"),
    "another folder": ('path.with_suffix(".unfinished")', 'path.parents[1] / "new"'),
    "the name before the data": (WRITE, NAME_FIRST),
    "no fsync of the file": ("os.fsync(file.fileno())", "pass"),
    "no fsync of the folder": ("os.fsync(folder)", "pass"),
    "the old file is removed first": ("os.replace(", "path.unlink(True); os.replace("),
    "older files are removed first": (KEEP, EARLY),
    "only one is kept": ("keep=2", "keep=1"),
    "no map_location": ('map_location="cpu", ', ""),
    "a file may run code": ("weights_only=True", "weights_only=False"),
    "checksums are not compared": ("file.testzip()", "False"),
    "the latest, damaged or not": ("reversed(checkpoints(folder))", "checkpoints(folder)[-1:]"),
    "newer files count as older": ("checkpoints(folder) if other <= path]", "checkpoints(folder)]"),
    "an unfinished file is in the way": ('open(unfinished, "wb")', 'open(unfinished, "xb")'),
    "DDP's own keys": ('{"model": model, "opt', '{"model": replica, "opt'),
    "rank 0's random states for all": ('["random"][dist.get_rank()]', '["random"][0]'),
    "the same order in every epoch": ("manual_seed(seed + epoch)", "manual_seed(seed)"),
    "one order for each rank": ("manual_seed(seed + epoch)", "manual_seed(seed + epoch + rank)"),
    "another first sum": ("replica(data[0][0][None].to(device)).sum().backward()", "pass", (3,)),
    "every rank writes": (WRITER, WRITER.replace("== 0", ">= 0").replace('f"step_{', EACH)),
    "nobody waits for the file": ("dist.barrier(group)  # nobody goes", "pass  #"),
    "a slow disk ends who waits": ("group=group)", "group=None)"),
    "a slow disk ends who loads": (TOGETHER, TOGETHER.replace("group", "None")),
    "a slow save takes too long": ("timedelta(hours=2)", "timedelta(minutes=2)"),
    "each rank loads what it finds": (TOGETHER, "everyone = [own] * len(everyone)"),
    "other bytes under the same name": ("[path.name, checksums]", "[path.name, 0]"),
    "who fails leaves alone": ("in enumerate(everyone)", "in [(dist.get_rank(), own)]"),
    "SIGTERM is not noted": ("noted.append(True)", "None"),
    "SIGTERM, and nothing is saved": ("(done or now", '(now["step"] == steps or now'),
    "saved is only what SIGTERM stops": ("% every == 0", "== 0"),
    "the end is not saved": ("if folder and (done or", "if folder and (stop > 0 or"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(6, BREAKS, nproc, "--seed", 1)  # 3 ranks show the last bit


@pytest.mark.claim("A17", "B7")
def test_default_run(default_run):
    result = default_run(6).json
    assert (result["lesson"], result["world_size"], result["passed"]) == (6, 2, True)
    assert (result["resumed_from_step"], result["max_param_diff"]) == (7, 0.0)
    assert (result["checkpoints_kept"], result["kills"]) == (2, 11)
    assert result["bytes_written"] > 5 * 2 * 5056  # 5 files, each with torch's states of 2 ranks


PROJECT = """
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data._utils import signal_handling

def be_late():
    # A worker from after the first step: its own code of the project has not run yet.
    handle_signals()
    if stepped:
        Path(folder, "ready").touch()
        __import__("time").sleep(2)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    numbers, ends = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), []
    data, folder = TensorDataset(numbers, numbers.sum(1, keepdim=True)), sys.argv[1]
    register_optimizer_step_post_hook(lambda *_: stepped.append(True))
    found, stepped = checkpoints(folder), []
    if not found:
        handle_signals = signal_handling._set_worker_signal_handlers
        signal_handling._set_worker_signal_handlers = be_late
    steps = int(found[-1].stem[5:]) + 7 if found else 10**9
    for where in (folder, None)[: 1 + len(found)]:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        step = train(model, data, steps, 20, torch.device("cpu"), where, every=10**9)
        ends.append(nn.utils.parameters_to_vector(model.parameters()))
    if found and dist.get_rank() == 0:
        print(torch.equal(*ends), int(checkpoints(folder)[-1].stem[5:]) == steps)
    del model
    dist.destroy_process_group()
    sys.exit(143 if step < steps else 0)
"""


@pytest.mark.claim("A17")
def test_the_technique_in_a_project_of_ones_own_survives_a_sigterm_to_torchrun(tmp_path):
    """It saves at SIGTERM, and at no other time, so a second run can only go on from there.

    The loaders have workers, to which torchrun sends the signal as well, here while they begin:
    torch's handler of SIGTERM is in place, and would end them. Nothing is left of them.
    """
    own, folder = tmp_path / "own.py", tmp_path / "folder"
    technique = SOURCE.replace(lesson.__doc__, "").partition("# --- The example ---")[0]
    with_workers = technique.replace("generator=own)", "generator=own, num_workers=1)")
    assert with_workers != technique
    own.write_text(with_workers + PROJECT)
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = start_program(*command, "--local-addr=127.0.0.1", own, folder, cwd=tmp_path)
    while job.poll() is None and not (folder / "ready").exists():
        time.sleep(0.05)
    family = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    assert finish(job).returncode != 0
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert len(lesson.checkpoints(folder)) == 1
    (code, stdout), other = run_warm(own, 2, folder)
    assert (code, stdout.splitlines()[1:], other) == (0, ["True True"], (0, ""))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what is read")
def test_a_file_is_read_once(tmp_path):
    path = tmp_path / "step_00000001.pt"
    lesson.save({"weight": torch.ones(10**6)}, path)
    before = bytes_read()
    state, _ = lesson.load_latest(tmp_path)
    assert state["weight"].sum() == 10**6 and bytes_read() - before < 1.2 * path.stat().st_size


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_random_states_of_gpus_come_back(monkeypatch, tmp_path):
    """With a stub for two GPUs: no GPU has run it."""
    given, told = [torch.tensor([7], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8)], []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: given)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", told.extend)
    state = {"now": {"step": 1, "epoch": 0, "rows": 30}, "random": [lesson.random_states()]}
    alone = {"get_rank": lambda: 0, "get_world_size": lambda: 1}
    with patch.multiple(dist, **alone), patch.object(lesson, "load_together", lambda *_: state):
        lesson.resume("a folder", {}, None)
    assert [state.item() for state in told] == [7, 8]


class Payload:
    """Would make a folder when it is loaded: harmless, but it shows that code has run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_file_with_code_is_refused_and_the_code_does_not_run(tmp_path, capsys):
    lesson.save({"now": 5}, tmp_path / "step_00000005.pt")
    lesson.save({"now": Payload(tmp_path / "proof")}, tmp_path / "step_00000006.pt")
    (tmp_path / "step_00000007.pt").symlink_to("/dev/zero")  # neither is a file
    os.mkfifo(tmp_path / "step_00000008.pt")
    assert lesson.load_latest(tmp_path)[0] == {"now": 5} and not (tmp_path / "proof").exists()
    assert capsys.readouterr().err.startswith("step_00000006.pt can't be used: UnpicklingError")
    torch.load(tmp_path / "step_00000006.pt", weights_only=False)
    assert (tmp_path / "proof").exists()  # so the payload is one


# --- The script ---


def test_a_job_goes_on_in_its_folder_also_with_another_number_of_ranks(tmp_path):
    """2, 3 and again 3 ranks: the last two are the same, but the model is not that of 3 ranks."""
    for nproc, steps in ((2, "4"), (2, "6"), (3, "8"), (3, "10")):
        flags, sources = ["--checkpoints", str(tmp_path), "--steps", steps], {"as it is": SOURCE}
        verdicts = verdicts_of_proof(lessons.find("06"), sources, nproc, flags, 1)
        passed, claim = verdicts["as it is"]
        assert passed and ("by 0.0 from" in claim) == (nproc == 2), claim
    job = proof.read_job(tmp_path)
    assert job == {"seed": 0, "batch_size": 30, "ranks": ["2 ranks on cpu", "3 ranks on cpu"]}


JOB = '{"seed": 0, "batch_size": 30, "ranks": []}'
FOLDERS = {  # words of the complaint: the step that is there, and job.json
    "can't write in": None,
    "these files are another program's": (2, ""),
    "and is at step 12": (12, JOB),
    "has seed 1": (2, JOB.replace("0", "1", 1)),
    "job.json in": (2, JOB[:9]),
}


@pytest.mark.parametrize("words", FOLDERS)
def test_a_bad_folder_costs_one_line_and_nothing_starts(tmp_path, capsys, words):
    folder, made = tmp_path / "folder", FOLDERS[words]
    if made is not None:
        folder.mkdir()
        lesson.save({"now": 2}, folder / f"step_{made[0]:08}.pt")
        if made[1]:
            (folder / "job.json").write_text(made[1])
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, ["--checkpoints", str(folder)], 2, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and words in line


def run_job(steps, folder, every=5):
    """Train the example as a new process would; return its parameters."""
    for seeded in (random.seed, lesson.np.random.seed, torch.manual_seed):
        seeded(dist.get_rank())
    data, model = lesson.make_job(0)
    lesson.train(model, data, steps, 30, CPU, folder, every=every)
    return nn.utils.parameters_to_vector(model.parameters())


def killed_at_random(rank, world_size, folder, delay):
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    run_job(10**6, folder, every=1)


def go_on(rank, world_size, folder):
    begun = int(lesson.checkpoints(folder)[-1].stem[5:])
    return torch.equal(run_job(begun + 5, folder), run_job(begun + 5, None)), begun


@pytest.mark.slow
@pytest.mark.claim("A17", "B7")
@pytest.mark.parametrize("nproc", (1, 2, 3, 4))
def test_thirty_kills_and_still_the_same_bits(tmp_path, nproc):
    chance = random.Random(nproc)
    for _ in range(30):
        with pytest.raises(RankFailed, match=r"SIGKILL|Connection"):
            run(killed_at_random, nproc, str(tmp_path), 0.05 + 0.3 * chance.random())
    ends = run(go_on, nproc, str(tmp_path))
    assert [equal for equal, _ in ends] == [True] * nproc
    assert ends[0][1] > 0  # how far they came in between is a matter of speed
