"""The command `check`, as it is typed: how scripts start, what it says, and what it leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT
from lockstep import own_time
from lockstep.check import Job
from lockstep.watch import read, report

WATCHED = ROOT / "tests" / "watched"
COMMAND = [sys.executable, ROOT / "scripts" / "lockstep", "check"]


def check(*arguments, cwd=None):
    """Call the command; return (exit code, stdout, stderr)."""
    command = list(map(str, [*COMMAND, *arguments]))
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.PIPE)
    return done.returncode, done.stdout, done.stderr


NOISY = """

class Noisy(TensorDataset):
    def __getitem__(self, number):
        row, label = super().__getitem__(number)
        return row + torch.randn(6), label
"""


def test_a_script_that_starts_its_own_ranks(tmp_path):
    text = (WATCHED / "spawn.py").read_text().replace("sampler.set_epoch(epoch)", "pass")
    noisy = "data = Noisy(rows, rows.sum(1, keepdim=True))"  # drawn in a worker, started anew
    text = text.replace("data = TensorDataset(rows, rows.sum(1, keepdim=True))", noisy)
    loader = "loader = DataLoader(data, 8, sampler=sampler, num_workers=1, persistent_workers=True)"
    text = text.replace("    for epoch in", f"    {loader}\n    for epoch in")
    text = text.replace("DataLoader(data, 8, sampler=sampler):", "loader:")
    text = text.replace("\n\ndef work", NOISY + "\n\ndef work")
    (tmp_path / "train.py").write_text(text)
    code, stdout, stderr = check("--json", tmp_path / "train.py", tmp_path)
    report = json.loads(stdout)
    assert (code, stderr, report["started_by"], report["ranks"]) == (0, "", "python", [[0, 1]])
    assert [one["kind"] for one in report["findings"]] == ["order repeats", "same random numbers"]
    line = text.splitlines()[int(report["findings"][0]["place"].partition(":")[2]) - 1]
    assert "DataLoader(data" in line


def test_the_keys_of_its_json_are_stable(tmp_path, capsys):
    place = {"at": 0, "where": "train.py:3"}
    for rank in (0, 1):
        facts = [{"what": "start", "RANK": str(rank), "child_of": None}]
        facts += [{"what": "group", "rank": rank, "world": 2}]
        facts += [{"what": "save", "path": "/model.pt", "prefix": False}, {"what": "end"}]
        lines = [json.dumps(place | fact) + "\n" for fact in facts]
        (tmp_path / f"{rank}.jsonl").write_text("".join(lines))
    args = SimpleNamespace(script="train.py", source="", nproc=2, show=False, json=True)
    job = SimpleNamespace(launcher="torchrun", on_cpu=True, hung=False, code=0, output="")
    assert report.tell(args, job, read.read(tmp_path, by_torchrun=True)) == 2
    told = json.loads(capsys.readouterr().out)
    keys = ["script", "exit_code", "started_by", "ranks", "gpus_played_by_cpu", "updates"]
    assert list(told) == [*keys, "findings", "looked_at", "not_looked_at"]
    assert told["findings"] == [
        {
            "kind": "one file, several writers",
            "strength": "probably not meant",
            "text": "ranks 0, 1 write the same file model.pt",
            "ranks": [0, 1],
            "place": "train.py:3",
            "cure": "write on rank 0 only, or one file for each rank",
            "lesson": "06",
        }
    ]
    assert (told["ranks"], told["updates"]) == ([[0, 1]], [[0, 0]])


def test_a_script_for_gpus_runs_on_the_cpu():
    script = WATCHED / "for_gpus.py"
    code, stdout, stderr = check("--nproc", 2, script, "--nproc", "of the script")
    assert (code, stderr) == (0, "")
    assert "GPUs were played by the CPU, nccl by gloo" in stdout
    assert "probably not meant: epoch 1 has the order of epoch 0" in stdout
    assert "wrong" not in stdout.lower().replace("nothing is wrong", "")


def test_the_old_launcher_hands_over_a_flag(tmp_path):
    script = tmp_path / "old.py"
    head = "import argparse\nparser = argparse.ArgumentParser()\n"
    head += 'parser.add_argument("--local_rank", type=int)\n'
    head += "assert parser.parse_args().local_rank in (0, 1)\n"
    script.write_text(head + (WATCHED / "by_hand.py").read_text())
    code, stdout, _ = check("--updates", 3, script)
    assert code == 0 and "2 ranks, started by launch, 3 updates" in stdout
    assert "it was handed over as --local_rank" in stdout


def test_a_script_that_starts_ranks_gets_their_address_from_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "23456")
    from lockstep.check import Job, read_flags

    for script, port in ((WATCHED / "spawn.py", "23456"), (WATCHED / "ddp.py", None)):
        assert Job(read_flags([str(script)]), tmp_path).environment().get("MASTER_PORT") == port


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("no_such.py", None, "there is no file"),
        ("page.ipynb", "{}", "is a notebook"),
        ("broken.py", "for\n", "is no Python: line 1"),
        ("missing.py", "import torch\nimport no_such_package\n", "No module named 'no_such_pack"),
    ],
)
def test_bad_input_costs_one_line(name, text, words, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, stderr = check(name, cwd=tmp_path)
    assert code == 2
    assert words in stderr and len(stderr.splitlines()) == 1, stderr
    assert {path.name for path in tmp_path.iterdir()} <= {name}


def test_a_folder_and_bad_flags_start_nothing(tmp_path):
    for arguments, words in (
        ([tmp_path], "is a folder"),
        (["--nproc", "0", "x.py"], "--nproc"),
        (["--no-such-flag", "x.py"], "--no-such-flag"),
        ([], "script"),
    ):
        code, stdout, stderr = check(*arguments, cwd=tmp_path)
        assert (code, stdout) == (2, "") and words in stderr and len(stderr.splitlines()) == 1


def test_an_interrupt_leaves_nothing(tmp_path):
    script = tmp_path / "waits.py"
    text = (WATCHED / "by_hand.py").read_text()
    script.write_text(text.replace("dist.destroy_process_group()", "import time\ntime.sleep(1000)"))
    before = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    command = list(map(str, [*COMMAND, "--updates", "0", script]))
    process = subprocess.Popen(command, env=before, stderr=subprocess.PIPE, text=True)
    facts = tmp_path / "tmp"
    while len(list(facts.glob("lockstep_check_*/*.stack"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    ours = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130 and "interrupted" in stderr
    psutil.wait_procs(ours, timeout=60)
    assert not [one for one in ours if one.is_running() and one.status() != "zombie"]
    assert list(facts.iterdir()) == []


def test_a_hang_names_who_waits_where(tmp_path):
    script = tmp_path / "train.py"
    text = (WATCHED / "by_hand.py").read_text()
    script.write_text(
        text.replace(
            "        optimizer.step()\n",
            ("        optimizer.step()\n        if rank == 1:\n            dist.barrier()\n"),
        )
    )
    code, stdout, _ = check("--nproc", 3, "--patience", 20, "--json", script)
    (finding,) = [one for one in json.loads(stdout)["findings"] if one["kind"] == "hang"]
    line = 1 + script.read_text().splitlines().index("            dist.barrier()")
    assert code == 1
    assert f"rank 1 waits in barrier at train.py:{line}" in finding["text"]
    assert "rank 0 waits in all_reduce at train.py:" in finding["text"]
    assert finding["text"].endswith(f"barrier in group 0 at train.py:{line}; look first at rank 1")
    assert (finding["ranks"], finding["place"]) == ([1], f"train.py:{line}")


@pytest.mark.parametrize("not_let, stands", ((0.0, True), (0.99, False)))
def test_who_is_not_let_on_a_busy_machine_does_not_stand(not_let, stands, monkeypatch, tmp_path):
    """In 40 s a process gets 0.4 s of the processors: it sleeps, or others have them."""
    now = [0.0]
    monkeypatch.setattr(own_time.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(own_time, "_times", lambda pid: (now[0] / 100, {"1": now[0] * not_let}))
    flags = {"start": "torchrun", "source": "", "gpus": False, "patience": 30}
    job = Job(SimpleNamespace(**flags), tmp_path)
    for now[0] in range(1, 41):
        said = job.stands([1])
    assert said == stands


@pytest.mark.parametrize("lesson", ("03_spawn_ddp", "17_ddp_from_scratch"))
def test_a_lesson_is_a_script_like_any_other(lesson):
    """No proof judges it, and nobody misses what 03 writes after the last update."""
    code, _, stderr = check("--updates", 2, ROOT / "lessons" / f"lesson_{lesson}.py")
    assert (code, stderr) == (0, "")


KILLED = "if rank == 1:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(3))\n"
ABORTED = "sizes = [torch.zeros(1) for _ in range(2)]\n" + (
    "dist.gather(torch.ones(1), sizes if rank == 0 else None)\n"
    "dist.scatter(torch.zeros(2 - rank), [torch.ones(2)] * 2 if rank == 0 else None)\n"
)


@pytest.mark.parametrize(
    "end, words",
    [
        (KILLED, "rank 1 failed: killed by SIGKILL"),
        (ABORTED, r"rank 1 failed: killed by SIGABRT: op\.preamble.*, at train\.py:8"),
    ],
    ids=["killed", "aborted"],
)
def test_a_rank_that_dies_is_the_cause_and_what_it_no_longer_calls_is_none(end, words, tmp_path):
    head = "import os\nimport torch\nimport torch.distributed as dist\n"
    head += "dist.init_process_group('gloo')\nrank = dist.get_rank()\n"
    (tmp_path / "train.py").write_text(head + end)
    code, stdout, stderr = check("--json", tmp_path / "train.py")
    assert code == 2 and re.search(words, stderr), stderr
    assert json.loads(stdout)["findings"] == []


@pytest.mark.slow
def test_it_can_be_installed_into_an_environment_of_ones_own(tmp_path):
    """pip fetches setuptools for it."""
    source, place = tmp_path / "lockstep", tmp_path / "environment"
    shutil.copytree(ROOT / "scripts", source / "scripts")
    shutil.copy(ROOT / "pyproject.toml", source)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", source]
    subprocess.run(pip, check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))  # not fetched a second time
    script = tmp_path / "train.py"
    shutil.copy(WATCHED / "by_hand.py", script)
    command = [place / "bin" / "lockstep", "check", "--updates", "3", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 ranks, started by torchrun, 3 updates\nnothing was found" in done.stdout
