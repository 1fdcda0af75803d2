"""Faults in a lesson that a launcher has started: the right rank, one line, nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ENVIRONMENT, ROOT

RUN = [sys.executable, ROOT / "scripts" / "run_lesson.py"]
TORCHRUN = [*RUN, ROOT / "scripts" / "torchrun.py"]

FAULTY = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist

fault = sys.argv[1]
if fault == "--check":
    sys.exit(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
if fault == "raises" and rank == 1:
    raise ValueError("no such digit\\nsecond line")
if fault == "exits" and rank == 1:
    os._exit(3)
if fault == "is killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "disk" and rank == 2:
    sys.exit("rank 2: no space")
if fault == "all have been told":
    time.sleep(rank == 1)
    sys.exit("rank 1: no such file")
if fault == "returns early" and rank == 0:
    sys.exit(0)
if fault in ("is ended", "is ended and cleans up") and rank == 1:
    if fault == "is ended and cleans up":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)
if fault == "does not come":
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 1:
        time.sleep(1000)
    dist.barrier(group)
if fault == "waits":
    Path(f"ready_{rank}").touch()
    time.sleep(1000)
dist.barrier()
"""
FAULTS = {
    "raises": "rank 1 failed: ValueError: no such digit",
    "exits": "rank 1 failed: exit code 3",
    "is killed": "rank 1 failed: killed by SIGKILL",
    "disk": "rank 2 failed: no space",
    "all have been told": "rank 1 failed: no such file",
    "is ended": "rank 1 failed: killed by SIGTERM",
    "is ended and cleans up": "rank 1 failed: killed by SIGTERM",
    "does not come": "(it waited for another rank, which did not come)",
    "returns early": "it lost the connection to another rank; rank 0 had already returned",
}


@pytest.fixture
def faulty(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY)
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path / "tmp")}
    return {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.claim("B7")
@pytest.mark.parametrize("fault", FAULTS)
def test_under_torchrun_the_rank_that_is_the_cause_is_named_in_one_line(faulty, fault):
    run = subprocess.run([*TORCHRUN, "faulty.py", "--nproc=3", fault], timeout=200, **faulty)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.endswith(FAULTS[fault])
    assert list((faulty["cwd"] / "tmp").iterdir()) == []


def test_verbose_shows_the_traceback_as_well(faulty):
    command = [*TORCHRUN, "faulty.py", "raises", "--verbose"]
    run = subprocess.run(command, timeout=200, **faulty)
    assert "in <module>\n" in run.stderr and "second line" in run.stderr
    assert run.stderr.splitlines()[-1] == FAULTS["raises"]


@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL needs Linux's parent-death signal")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_takes_its_ranks_with_it(faulty, sign):
    """The signal comes as from a terminal, to the whole process group; SIGKILL to one process."""
    command = [*TORCHRUN, "faulty.py", "waits"]
    launcher = subprocess.Popen(command, start_new_session=True, **faulty)
    end, family = time.monotonic() + 120, []
    try:
        while len(list(faulty["cwd"].glob("ready_*"))) < 2:
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.1)
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 3
        os.killpg(launcher.pid, sign)
        assert launcher.wait(60) == (-9 if sign == signal.SIGKILL else 128 + sign)
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert list((faulty["cwd"] / "tmp").iterdir()) == []
        words = {signal.SIGINT: ["interrupted"], signal.SIGTERM: ["terminated"]}.get(sign, [])
        assert [line.split(":")[0] for line in launcher.stderr.read().splitlines()] == words
    finally:
        for process in [launcher, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "open('ready', 'w'); import time; time.sleep(1000)"])
"""


def test_ctrl_c_costs_one_line_although_a_child_is_busy(tmp_path):
    """The child hears nothing of the interrupt, so it prints no traceback; it is ended."""
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    launcher = subprocess.Popen([*RUN, script], **options)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    family = psutil.Process(launcher.pid).children(recursive=True)
    os.killpg(launcher.pid, signal.SIGINT)
    stderr = launcher.communicate(timeout=60)[1]
    assert (launcher.returncode, stderr) == (130, "interrupted: all that was started has ended\n")
    assert psutil.wait_procs(family, timeout=60)[1] == []


SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
except SystemExit:  # as a module in C may do, NumPy's for example
    pass
"""


def test_who_is_asked_to_end_during_an_import_ends_after_it(tmp_path):
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    script = tmp_path / "script.py"
    script.write_text("import importlib\nimportlib.import_module('swallows').time.sleep(1000)\n")
    run = subprocess.run([*RUN, script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (143, "")


def test_an_error_in_a_script_costs_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise OSError('no\\nsuch file')\n")
    run = subprocess.run([*RUN, script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, "script.py failed: OSError: no\n")


@pytest.mark.parametrize("name, seen", [("lesson_99.py", "None lo"), ("lesson_04.py", "3 eth7")])
def test_a_lesson_is_not_a_rank_of_another_job(tmp_path, name, seen):
    show = "print(*map(os.environ.get, ('RANK', 'GLOO_SOCKET_IFNAME')))"
    (tmp_path / name).write_text(f"import os\n{show}\n")
    environment = {**ENVIRONMENT, "RANK": "3", "GLOO_SOCKET_IFNAME": "eth7"}
    run = subprocess.run([*RUN, tmp_path / name], env=environment, capture_output=True, text=True)
    assert run.stdout.replace("lo0", "lo").split() == seen.split()  # lo0: a Mac


CHECK = """
import signal, sys, threading
sys.path.insert(0, sys.argv[1])
import torchrun
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
torchrun.check(sys.argv[2], 2, sys.argv[3:])
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
assert threading.active_count() == 1
print("goes on")
"""


@pytest.mark.parametrize("program", ["lessons/lesson_06_*.py", "scripts/doctor.py"])
def test_the_check_of_the_flags_leaves_nothing_in_the_launcher(program):
    """It runs there: a timer of the doctor once ended a launcher, and its report was lost."""
    (path,) = ROOT.glob(program)
    flag = "--timeout=90" if path.name == "doctor.py" else "--steps=5"
    command = [sys.executable, "-c", CHECK, ROOT / "scripts", path, flag]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "goes on\n"), run.stderr
