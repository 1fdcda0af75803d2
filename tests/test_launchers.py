"""How a lesson ends: nobody is left, and the right rank is blamed; over the ways of starting.

What one way shares with another is tested in one place. All launchers go through run.watch(), so
signals meet a tiny script; ranks of torchrun through rank.py, which needs no torch either.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ENVIRONMENT, ROOT
from lockstep import ending, lessons, ranks, run
from lockstep.ending import End
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing import ProcessRaisedException

DEADLINE = 300  # seconds within which no process of a job that has ended may be left
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
PACKAGE = ROOT / "scripts" / "lockstep"
INSIDE = [sys.executable, PACKAGE, "inside"]
# run.start(HOW, SCRIPT, flags), as `lesson NN` calls it for the scripts of its table.
START = "import sys; from lockstep import run; how, script, *flags = sys.argv[1:]; "
START += "sys.exit(run.start(how, script, flags, run.on_this_machine_alone()))"
WATCHED = [sys.executable, "-c", START]
ALONE = "note: no rank has joined the others (init_process_group): "  # a script without torch
ALONE += "each has run the script on its own\n"
IMPATIENT = [sys.executable, "-c", START.replace("; how", "; run.PATIENCE = 2; how")]


@pytest.fixture
def place(tmp_path):
    """Return options for Popen: a current folder, and in it one for temporary files."""
    (tmp_path / "tmp").mkdir()
    options = {"stderr": subprocess.PIPE, "text": True}
    return {"cwd": tmp_path, "env": surroundings(tmp_path), **options}


def surroundings(folder):
    """Return the environment in which a job of this file runs."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("scripts", "lessons"))
    own = {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return ENVIRONMENT | own


def temporary_files(folder):
    """Return what is left, without what torch and Python keep for all runs of a user."""
    names = [path.name for path in (folder / "tmp").iterdir()]
    return [name for name in names if not name.startswith(("pymp-", "torchinductor_"))]


def call(*command, **options):
    """Run a command to its end; return (exit code, stderr)."""
    command = [str(part) for part in command]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=1500, **options)
    return ended.returncode, ended.stderr


# --- What ranks print ---


def test_a_line_of_a_rank_is_one_piece(place):
    """Ranks share a pipe, and with torchrun's -u each part of a print would be a write."""
    script = place["cwd"] / "speak.py"
    script.write_text("import os\nfor n in range(5000): print('rank', os.environ['RANK'], n)\n")
    flags = ["torchrun", script, "--nproc=2"]
    ended = subprocess.run([*WATCHED, *flags], stdout=subprocess.PIPE, timeout=1500, **place)
    lines = ended.stdout.splitlines()
    assert sorted(lines) == sorted(f"rank {rank} {n}" for rank in "01" for n in range(5000))


# --- Nobody is left ---

# Each writes a file ready_... when it is in the middle of its work.

ONE_PROCESS = """
import pathlib, subprocess, sys, tempfile, time
child = "import pathlib, time; pathlib.Path('ready_child').touch(); time.sleep(1000)"
if sys.argv[1:] == ["deaf"]:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + child
with tempfile.TemporaryDirectory():
    try:
        process = subprocess.Popen([sys.executable, "-c", child])
        pathlib.Path("ready").touch()
        time.sleep(1000)
    finally:
        time.sleep(0.5)  # a second signal would come now
        process.terminate()
"""
IGNORES = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
time.sleep(1000)
"""
RANK = """
import os, pathlib, tempfile, time
with tempfile.TemporaryDirectory():
    pathlib.Path("ready_" + os.environ["RANK"]).touch()
    while not pathlib.Path("go_on").exists():
        time.sleep(0.05)
"""
# A rank that a lesson has spawned, without the others: it waits where it would meet them, in C, and
# holds Python's lock, so that no thread of Python goes on, and no signal is heard.
SPAWNED = """
import ctypes, os, time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

def wait(*arguments, **options):
    Path("ready").touch()
    ctypes.PyDLL(None).sleep(1000)

def work():
    {work}

if __name__ == "__main__":
    get_context("spawn").Process(target=work, daemon=True).start()
    time.sleep(1000)
"""
WORK = {
    "08": """
    import sys
    sys.modules["paddle"] = SimpleNamespace()
    from lockstep.watch import paddle_ranks
    paddle_ranks.be_a_rank(wait, (), None)""",
    "15": """
    from proofs import lesson_15 as proof
    proof.end_with_parent()
    wait()""",
}


class Job(NamedTuple):
    """Something that runs until it is ended."""

    process: subprocess.Popen
    folder: Path

    def family(self):
        """Return what runs in the job's folder, also those whose parent has ended."""
        found = psutil.process_iter(["cwd", "status"])
        return [one for one in found if one.info["cwd"] == str(self.folder)]

    def spawned(self):
        """Return the processes that multiprocessing has started."""
        with contextlib.suppress(psutil.Error):  # some come and go
            return [one for one in self.family() if "spawn_main" in " ".join(one.cmdline())]
        return []

    def end(self):
        """Return (exit code, lines on stderr, who is left, temporary files) when it has ended."""
        self.process.wait(DEADLINE)
        end = time.monotonic() + DEADLINE
        while (left := self.family()) and time.monotonic() < end:
            time.sleep(0.05)
        stderr = "" if left else self.process.stderr.read()
        return self.process.returncode, stderr.splitlines(), left, temporary_files(self.folder)


@pytest.fixture
def start(place):
    """Return a function that starts a command and returns the Job, when `ready` says so of it."""
    jobs = []

    def start(command, ready):
        command = [str(part) for part in command]
        process = subprocess.Popen(command, start_new_session=True, **place)
        job = Job(process, place["cwd"])
        jobs.append(job)
        end = time.monotonic() + 1500
        while not ready(job):
            assert time.monotonic() < end and process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        return job

    yield start
    for job in jobs:
        for one in job.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        job.process.communicate()


@pytest.fixture
def start_script(place, start):
    """Return a function that starts a script, which says that it is ready by so many files."""

    def start_script(command, script, files, *flags):
        (place["cwd"] / "script.py").write_text(script)
        return start(
            [*command, "script.py", *flags],
            lambda job: len(list(job.folder.glob("ready*"))) == files,
        )

    return start_script


def inner(job):
    """Return the second process of a launcher."""
    return psutil.Process(job.process.pid).children()[0]


WORD = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


@pytest.fixture(autouse=True)
def hangs_up():
    """Start commands that hear SIGHUP, also where nohup has started pytest."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sign", WORD)
def test_a_launcher_that_is_asked_to_end_says_one_line(start_script, sign):
    """It is asked twice, and its whole group, as by Ctrl-C; one of its processes is deaf."""
    job = start_script([*WATCHED, "itself"], ONE_PROCESS, 2, "deaf")
    os.killpg(job.process.pid, sign)
    time.sleep(0.2)
    os.killpg(job.process.pid, sign)
    line = f"{WORD[sign]}: all that was started has ended"
    assert job.end() == (128 + sign, [line], [], [])


def test_under_nohup_a_launcher_does_not_hear_that_the_terminal_has_gone(start_script):
    nohup = ["bash", "-c", "trap '' HUP; exec \"$@\"", "nohup"]
    job = start_script([*nohup, *WATCHED, "itself"], ONE_PROCESS, 2)
    os.killpg(job.process.pid, signal.SIGHUP)
    time.sleep(0.2)
    job.process.terminate()
    assert job.end()[:2] == (143, ["terminated: all that was started has ended"])


def test_a_lesson_that_does_not_end_when_it_is_asked_is_killed(start_script):
    job = start_script([*IMPATIENT, "itself"], IGNORES, 1)
    job.process.terminate()
    assert job.end() == (143, ["terminated: all that was started has ended"], [], [])


def test_a_lesson_that_is_killed_takes_its_processes_with_it(start_script):
    job = start_script([*WATCHED, "itself"], ONE_PROCESS, 2, "deaf")
    inner(job).kill()
    code, lines, left, _ = job.end()
    assert (code, lines, left) == (137, ["the lesson was killed by SIGKILL"], [])


@LINUX
def test_a_launcher_that_is_killed_leaves_nobody_and_no_file(start_script):
    job = start_script([*WATCHED, "itself"], ONE_PROCESS, 2)
    job.process.kill()
    assert job.end() == (-9, [], [], [])


def test_under_torchrun_nobody_is_left_and_the_next_run_passes(start_script, place):
    job = start_script([*WATCHED, "torchrun"], RANK, 2)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end() == (130, ["interrupted: all that was started has ended"], [], [])
    (place["cwd"] / "go_on").touch()
    assert call(*WATCHED, "torchrun", "script.py", **place) == (0, ALONE)


@LINUX
def test_under_torchrun_no_rank_outlives_a_torchrun_that_was_killed(start_script):
    job = start_script([*WATCHED, "torchrun"], RANK, 2)
    inner(job).kill()
    code, lines, left, _ = job.end()
    assert (code, lines, left) == (137, ["the lesson was killed by SIGKILL"], [])


ORPHAN = """
import os, signal, time
from pathlib import Path
parent = os.environ.get("LOCKSTEP_PARENT")
if parent and os.environ["ORPHAN"] in Path("/proc/self/cmdline").read_text():
    if os.environ.get("RANK", "0") == "0":
        os.kill(int(parent), signal.SIGKILL)
    while os.getppid() == int(parent):
        time.sleep(0.01)
"""


@LINUX
@pytest.mark.parametrize("how, orphan", [("itself", "inside"), ("torchrun", "rank.py")])
def test_who_starts_while_its_parent_is_killed_does_not_begin(place, start, how, orphan):
    """Linux tells nobody of a parent that has ended before it was asked to."""
    (place["cwd"] / "sitecustomize.py").write_text(ORPHAN)
    place["env"] |= {"ORPHAN": orphan, "PYTHONPATH": f"{place['cwd']}:{place['env']['PYTHONPATH']}"}
    (place["cwd"] / "script.py").write_text("open('begun', 'w')")
    job = start([*WATCHED, how, "script.py"], lambda job: True)
    code, _, left, _ = job.end()
    assert (code, left) == (-9 if how == "itself" else 137, [])
    assert not (place["cwd"] / "begun").exists()


@LINUX
def test_lesson_03_leaves_nobody(start):
    """Nor a data loader's worker that asks who its parent is when its rank has already gone.

    That is the first worker of a rank, at the moment when the second one is started.
    """
    command = ["bash", ROOT / "scripts" / "lesson_03.sh", "--steps=999999", "--workers=2"]
    job = start(command, lambda job: len(job.spawned()) == 6)  # two ranks, two workers of each
    job.process.kill()
    code, _, left, files = job.end()
    assert (code, left, files) == (-9, [], [])


def script_of(number):
    return lessons.find(number).script


@LINUX
@pytest.mark.parametrize("number", WORK)
def test_a_spawned_rank_ends_with_a_script_that_was_killed(start_script, number):
    """As when the script is run without a launcher. Paddle itself is not needed here."""
    job = start_script([sys.executable], SPAWNED.format(work=WORK[number].strip()), 1)
    assert len(job.spawned()) == 1
    job.process.kill()
    code, _, left, _ = job.end()
    assert (code, left) == (-9, [])


# --- The right rank is blamed: by what the ranks have written down ---


class Failure(NamedTuple):
    """What torchrun says of the process of a rank that has failed: exit code, and when."""

    exitcode: int
    timestamp: int = 0


def ended(rank, reason=None, time=0.0, **consequence):
    """Return {rank: its End}, by default that of a rank which came to its end."""
    of_whom = consequence.pop("of", rank)
    return {
        rank: End(
            **{"lost": False, "late": False} | consequence, time=time, rank=of_whom, reason=reason
        )
    }


def lost(rank, time=0.0):
    return ended(rank, "RuntimeError: Connection closed by peer", time, lost=True)


RAISED = ended(1, "ValueError: no such digit", time=5.0)
LATE = ended(1, "RuntimeError: Timed out", time=5.0, late=True)
BY_TORCHRUN = Failure(-15)
# name: (what torchrun saw, in its order; what the ranks wrote down; what is said of which rank)
RECORDED = {
    "raises": ({1: Failure(1), 0: BY_TORCHRUN}, RAISED, "1: ValueError: no such digit"),
    "who lost it ended before": (
        {0: Failure(1), 1: Failure(1)},
        RAISED | lost(0),
        "1: ValueError: no such digit",
    ),
    "who waited ended before": (
        {0: Failure(1), 1: Failure(1)},
        ended(0, "RuntimeError: Timed out", late=True) | RAISED,
        "1: ValueError: no such digit",
    ),
    "all raise": (
        {0: Failure(1), 1: Failure(1)},
        ended(0, "KeyError: 3", 6.0) | RAISED,
        "1: ValueError: no such digit",
    ),
    "all have been told": (
        {0: Failure(1), 1: Failure(1)},
        ended(0, "no such file", of=1) | ended(1, "no such file", 1.0),
        "1: no such file",
    ),
    "is killed": ({1: Failure(-9), 0: BY_TORCHRUN}, lost(0), "1: killed by SIGKILL"),
    "is killed, and another leaves": (
        {0: Failure(1), 1: Failure(-9)},
        lost(0),
        "1: killed by SIGKILL",
    ),
    "aborts": ({0: Failure(-6), 1: Failure(1)}, lost(1), "0: killed by SIGABRT"),
    "is terminated": ({1: Failure(-15), 0: Failure(-15)}, {}, "1: killed by SIGTERM"),
    "is terminated and cleans up": ({1: Failure(143), 0: Failure(143)}, {}, "1: killed by SIGTERM"),
    "the others clean up": (
        {1: Failure(1), 0: Failure(143), 2: Failure(-15)},
        RAISED,
        "1: ValueError: no such digit",
    ),
    "another is deaf": (  # torchrun kills it after 30 seconds
        {1: Failure(1, 100), 0: Failure(-9, 130)},
        RAISED,
        "1: ValueError: no such digit",
    ),
    "os._exit": ({1: Failure(3), 0: BY_TORCHRUN}, lost(0), "1: exit code 3"),
    "sys.exit with a code": ({1: Failure(3), 0: BY_TORCHRUN}, ended(1), "1: exit code 3"),
    "FAIL while another waits": (
        {1: Failure(1), 0: Failure(1)},
        ended(1) | lost(0),
        "1: exit code 1",
    ),
    "FAIL": ({0: Failure(1), 1: Failure(1)}, ended(0) | ended(1), None),
    "refuses its flags": ({0: Failure(2), 1: BY_TORCHRUN}, ended(0), None),
    "does not come": (
        {0: Failure(1), 1: Failure(1)},
        LATE | lost(0),
        "1: RuntimeError: Timed out (it waited: another did not come, or it called once too often)",
    ),
    "returned early": (
        {1: Failure(1), 2: Failure(1)},
        ended(0) | lost(1, 1.0) | lost(2, 2.0),
        "1: it lost the connection to another rank; rank 0 had already returned",
    ),
    "nobody says why": (
        {0: Failure(1), 1: Failure(1)},
        lost(0, 2.0) | lost(1, 1.0),
        "1: it lost the connection to another rank; nobody knows why",
    ),
}


@pytest.mark.claim("B7")
@pytest.mark.parametrize("name", RECORDED)
def test_the_cause_is_told_from_its_consequences(name):
    failures, ends, line = RECORDED[name]
    said = ending.explain(ending.own_exit_codes(failures), ends)
    assert said == (line and "rank " + line.replace(":", " failed:", 1))


def test_a_rank_that_was_lost_on_another_machine_is_explained_there():
    said = ending.explain({0: 1}, lost(0), on_several_machines=True)
    assert said == "rank 0 failed: it lost a rank of another machine, which says why"


def fail_with(*lines):
    error = ValueError("\n".join(lines))
    error.add_note("a note")
    return error


BY_PEER = "[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
SIZES = "[/src/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 2000 vs 1000. "
SIZES += "Received data size doesn't match expected size. Is there a collective mismatch?"


def test_a_reason_is_one_line_in_plain_words():
    assert ending.reason(fail_with("no such digit", "second line")) == "ValueError: no such digit"
    assert ending.reason(RuntimeError(BY_PEER)) == (
        "RuntimeError: Connection closed by peer [127.0.0.1]:1234"
    )
    assert "2000 bytes came where 1000 were expected" in ending.reason(RuntimeError(SIZES))
    assert len(ending.reason(ValueError("x" * 5000))) == 300
    with pytest.raises(SyntaxError) as error:
        compile("x =", "script.py", "exec")
    assert ending.reason(error.value) == "SyntaxError: invalid syntax"
    on_rank_1 = {1: (RuntimeError("Missing key in checkpoint state_dict: a."), None)}
    text = '-- Process 1 failed:\n\nTraceback:\n  File "a.py", line 1, in f\nValueError: a\nb'
    spawned = ProcessRaisedException(text, 1, 2)
    assert ending.reason(spawned) == "ValueError: a"
    error = CheckpointException("load", {2: (CheckpointException("read", on_rank_1), None)})
    assert ending.reason(error) == "RuntimeError: Missing key in checkpoint state_dict: a."


def test_only_torch_distributed_tells_of_a_neighbour():
    assert ending.tells(ending.LOST, RuntimeError(BY_PEER))
    assert not ending.tells(ending.LOST, BrokenPipeError(32, "Broken pipe"))
    assert not ending.tells(ending.LATE, ValueError("timeout must be positive"))


# --- The right rank is blamed: for real ---

# Ranks that need no torch, for what only rank.py and torchrun can show. What is waited for never
# comes: torchrun has to end who waits.
FAULTY = """
import os, signal, sys, threading, time
fault, rank = sys.argv[1], int(os.environ["RANK"])
if fault == "raises" and rank == 1:
    raise ValueError("no such digit\\nsecond line")
if fault == "times out" and rank == 1:
    raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
if fault == "exits" and rank == 1:
    sys.exit(3)
if fault == "is killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "is killed" and rank == 0:
    raise RuntimeError("Connection closed by peer")
if fault == "says why" and rank == 2:
    sys.exit("a line before\\nrank 2: no space")
if fault == "says nothing" and rank == 1:
    sys.exit("")
if fault == "returns early" and rank == 0:
    sys.exit(0)
if fault == "returns early":
    raise RuntimeError("Connection closed by peer")
if fault == "is ended and cleans up" and rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
if fault == "bad flag":
    sys.exit(2)
if fault == "nobody reads" and rank == 1:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    print("a result")
    sys.exit()
if fault == "is still writing":
    log = open(f"log_{rank}", "w")
    threading.Thread(target=lambda: time.sleep(1) or log.write("saved")).start()
    sys.exit()
time.sleep(1000)
"""
FAULTS = {
    "raises": "rank 1 failed: ValueError: no such digit",
    "times out": "rank 1 failed: RuntimeError: Timed out waiting 3000ms for recv operation to"
    " complete (it waited: another did not come, or it called once too often)",
    "exits": "rank 1 failed: exit code 3",
    "is killed": "rank 1 failed: killed by SIGKILL",
    "says why": "rank 2 failed: no space",
    "says nothing": "rank 1 failed: sys.exit() without a word",
    "returns early": "it lost the connection to another rank; rank 0 had already returned",
    "is ended and cleans up": "rank 1 failed: killed by SIGTERM",
    "nobody reads": "rank 1 failed: BrokenPipeError: [Errno 32] Broken pipe",
}
# One start of torch, and for each fault a copy of it that starts three ranks; all at a time.
ALL_FAULTS = """
import json, os, sys
import torch.distributed.launch, torch.distributed.run
from lockstep import inside

launchers = {}
for fault in sys.argv[1:]:
    launchers[fault] = os.fork()
    if launchers[fault] == 0:
        os.dup2(os.open(f"stderr of {fault}", os.O_CREAT | os.O_WRONLY), 2)
        inside.main(["torchrun", "faulty.py", "--nproc=3", fault])
codes = {
    fault: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for fault, pid in launchers.items()
}
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Return {fault: (exit code of its launcher, lines on stderr)}, and the folder."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "tmp").mkdir()
    (folder / "faulty.py").write_text(FAULTY)
    environment = surroundings(folder)
    command = [sys.executable, "-c", ALL_FAULTS, *FAULTS, "bad flag", "is still writing"]
    output = subprocess.check_output(command, cwd=folder, env=environment, timeout=1500)
    said = {
        fault: (code, (folder / f"stderr of {fault}").read_text().splitlines())
        for fault, code in json.loads(output).items()
    }
    return said, folder


@pytest.mark.claim("B7")
@pytest.mark.parametrize("fault", FAULTS)
def test_under_torchrun_the_rank_that_is_the_cause_is_named_in_one_line(launched, fault):
    code, (line,) = launched[0][fault]
    assert code == 1 and line.endswith(FAULTS[fault])


def test_under_torchrun_a_refused_flag_and_a_good_end_say_nothing_more(launched):
    said, folder = launched
    assert said["bad flag"] == (2, [])
    assert said["is still writing"] == (0, ALONE.splitlines())
    assert [path.read_text() for path in folder.glob("log_*")] == ["saved"] * 3


def test_under_torchrun_a_rank_that_has_failed_leaves_nobody(launched):
    folder = launched[1]
    assert Job(None, folder).family() == [] and temporary_files(folder) == []


LOSES_ITS_NEIGHBOUR = """
import time
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
dist.destroy_process_group()  # now rank 0 loses rank 1 ...
time.sleep(1)
raise ValueError("no such digit\\nsecond line")  # ... and only later it is seen why
"""


def test_under_torchrun_who_loses_a_neighbour_over_gloo_waits_for_the_cause(place):
    """And with --verbose the traceback is shown as well."""
    (place["cwd"] / "script.py").write_text(LOSES_ITS_NEIGHBOUR)
    code, stderr = call(*WATCHED, "torchrun", "script.py", "--verbose", **place)
    *lines, last = stderr.splitlines()
    assert (code, last) == (1, "rank 1 failed: ValueError: no such digit")
    assert "second line" in lines and any(ending.LOST.search(line) for line in lines), stderr


# --- Ranks that a script starts itself ---

# Addressed as in many a tutorial: without a word of ours, its ranks would wait for ever, because
# torchrun has told them that the store is there. They are a subclass, so there is no target.
AT_LOCALHOST = """
import os
import torch.distributed as dist
from torch import multiprocessing as mp

class Rank(mp.get_context("spawn").Process):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def run(self):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
        dist.init_process_group("gloo", rank=self.rank, world_size=2)

if __name__ == "__main__":
    ranks = [Rank(rank) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
"""
# It has joined, so what its processes do is its own affair. At its top it imports no torch.
JOINS = """
import os

def work():
    import torch.distributed as dist
    from torch.distributed import init_process_group
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def main():
    import multiprocessing
    from torch.distributed import destroy_process_group, init_process_group
    init_process_group("gloo")
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    destroy_process_group()
    raise SystemExit(process.exitcode)

if __name__ == "__main__":
    main()
"""
SPAWNS = (ROOT / "templates" / "smallest_spawn.py").read_text()
MEETS = '    store = dist.FileStore(f"{folder}'  # late, without its folder: it tries for minutes
LATE_SPAWNS = SPAWNS.replace(MEETS, f"    import time\n    time.sleep(5 * rank)\n{MEETS}")


@pytest.mark.parametrize("script, own", [(LATE_SPAWNS, 1), (AT_LOCALHOST, 1), (JOINS, 0)])
def test_under_torchrun_a_script_that_starts_its_own_ranks_is_refused(place, script, own):
    """And nobody is left of it: a process that is still on its way would keep stderr open."""
    (place["cwd"] / "script.py").write_text(script)
    with open(place["cwd"] / "stderr", "w") as file:
        code, _ = call(*WATCHED, "torchrun", "script.py", **place | {"stderr": file})
    here = str(place["cwd"])
    family = [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == here]
    assert psutil.wait_procs(family, timeout=60)[1] == []
    stderr = (place["cwd"] / "stderr").read_text()
    assert (code, len(stderr.splitlines())) == (own, own), stderr
    assert own == 0 or re.match("script.py failed: it starts ranks of its own", stderr)


# --- Ranks that a lesson starts itself ---

SAID = {
    "-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    '  File "spawn.py", line 87, in _wrap\n    fn(i, *args)\n'
    '  File "lesson.py", line 6, in f\n    raise ValueError("no such row\\nsecond line")\n'
    "         ^^^^^^\nValueError: no such row\nsecond line\n": "ValueError: no such row",
    "process 1 terminated with signal SIGKILL": "process 1 terminated with signal SIGKILL",
}


@pytest.mark.claim("B7")
@pytest.mark.parametrize("error", [mp.ProcessRaisedException, mp.ProcessExitedException])
def test_the_error_of_mp_spawn_becomes_one_line(error):
    """Recorded errors; for real, below, mp.spawn raises them for the right rank."""
    text = list(SAID)[error is mp.ProcessExitedException]
    more = {"signal_name": "SIGKILL", "exit_code": -9} if "SIGKILL" in text else {}
    raised = error(text, error_index=1, error_pid=0, **more)
    assert ending.of_spawned(raised) + ending.reason(raised) == f"rank 1 failed: {SAID[text]}"


def fail_on_rank_1(rank, world_size, device, how, file):
    """Be a rank of a job in which rank 1 fails and the others wait for it."""
    dist.barrier()
    if rank == 1:
        Path(file).write_text(str(time.monotonic()))  # one clock for all processes
    if rank == 1 and how == "raises":
        raise ValueError("no such row")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.claim("B7")
@pytest.mark.parametrize(
    "how, error, line",
    [
        ("is killed", mp.ProcessExitedException, "terminated with signal SIGKILL"),
        ("raises", mp.ProcessRaisedException, "ValueError: no such row"),
    ],
)
def test_a_spawned_rank_that_fails_ends_the_job(how, error, line, tmp_path):
    """Which rank is reported depends on when mp.spawn looks: page 03 says so."""
    lesson = importlib.import_module(script_of("03").stem)
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)) as raised:
        lesson.launch_job(fail_on_rank_1, 2, how, str(tmp_path / "moment"))
    assert time.monotonic() - float((tmp_path / "moment").read_text()) < 100  # gloo's: two minutes
    echo = mp.ProcessRaisedException, "by peer"  # rank 0 loses rank 1, and may have ended as well
    kind, words = {1: (error, line), 0: echo}[raised.value.error_index]
    assert type(raised.value) is kind and words in str(raised.value).splitlines()[-1]
    family = psutil.Process().children(recursive=True)
    assert [one for one in family if "spawn_main" in " ".join(one.cmdline())] == []


# --- What a launcher says of a script, and when it is interrupted in a bad moment ---


@pytest.mark.parametrize("verbose", ["0", "1"])
@pytest.mark.parametrize(
    "how", ["raise OSError('no\\nsuch file')", "import sys; sys.exit('a\\nb')"]
)
def test_an_error_in_a_script_costs_one_line(place, how, verbose):
    (place["cwd"] / "script.py").write_text(how)
    place["env"]["LOCKSTEP_VERBOSE"] = verbose
    code, stderr = call(*INSIDE, "itself", "script.py", **place)
    *before, last = stderr.splitlines()
    raised = how.startswith("raise")
    assert (code, last) == (1, "script.py failed: OSError: no" if raised else "b")
    assert bool(before) == (verbose == "1")


SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
except SystemExit:  # as a module in C may do, NumPy's for example
    pass
"""
IN_AN_IMPORT = "import importlib; importlib.import_module('swallows').time.sleep(1000)"
FAILS_THEN = "import swallows; raise RuntimeError('another one has ended')"
IN_A_START = """
import multiprocessing, os, signal, time
from multiprocessing import util

def start_and_be_ended(*arguments, start=util.spawnv_passfds):
    pid = start(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    return pid

if __name__ == "__main__":
    util.spawnv_passfds = start_and_be_ended
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=[0], daemon=True).start()
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    "script", [IN_AN_IMPORT, IN_A_START, FAILS_THEN], ids=["an import", "a start", "and fails"]
)
def test_who_is_asked_to_end_in_the_middle_of_something_ends_after_it(place, script):
    (place["cwd"] / "swallows.py").write_text(SWALLOWS)
    (place["cwd"] / "script.py").write_text(script)
    assert call(*INSIDE, "itself", "script.py", **place) == (143, "")


# --- Flags and variables ---


@pytest.mark.parametrize("number, seen", [("02", (None, "lo")), ("04", ("3", "eth7"))])
def test_a_lesson_is_not_a_rank_of_another_job(monkeypatch, number, seen):
    """But lesson 04 is about these variables."""
    monkeypatch.setattr(run, "start", lambda how, script, flags, environment: environment)
    monkeypatch.setattr(run.needs, "problem", lambda lesson, flags: None)
    monkeypatch.setattr(run.network, "loopback", lambda: "lo")
    for name, value in [("RANK", "3"), ("MASTER_ADDR", "there"), ("GLOO_SOCKET_IFNAME", "eth7")]:
        monkeypatch.setenv(name, value)
    environment = run.main([number])
    assert (environment.get("RANK"), environment["GLOO_SOCKET_IFNAME"]) == seen
    assert ("MASTER_ADDR" in environment) == (number == "04")


def test_the_launcher_s_own_flags_do_not_reach_the_lesson(monkeypatch):
    monkeypatch.setattr(run, "watch", lambda command, environment: (command[3:], environment))
    flags = ["--verbose", "--force", "--steps", "1", "--", "--verbose"]
    command, environment = run.start("itself", "script.py", flags, {})
    assert command == ["itself", "script.py", "--steps", "1", "--", "--verbose"]
    assert environment["LOCKSTEP_VERBOSE"] == "1"
    assert "LOCKSTEP_VERBOSE" not in run.start("itself", "script.py", ["--", "--verbose"], {})[1]


def test_flags_of_torchrun_are_told_from_those_of_the_script():
    own, flags = ranks.read_flags("script.py", ["--nproc=3", "--rate", "1", "--", "--nproc", "4"])
    assert (own.nproc, own.launcher, flags) == (3, "torchrun", ["--rate", "1", "--nproc", "4"])


@pytest.mark.parametrize("flags", [["--nproc"], ["--nproc=0"], ["--nproc=65"], ["--launcher=x"]])
def test_a_bad_value_for_the_launcher_costs_one_line(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        ranks.read_flags("lessons/script.py", flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith(f"script.py: error: argument {flags[0].partition('=')[0]}: ")


UNDER_TORCHRUN = [one.number for one in lessons.TABLE if one.start in lessons.ON_SEVERAL_MACHINES]


@pytest.mark.parametrize("number", UNDER_TORCHRUN)
def test_the_check_of_the_flags_leaves_nothing_in_the_launcher(capsys, number):
    """It runs there: a timer once ended a launcher, and its report was lost."""

    def see():
        return threading.enumerate(), [signal.getsignal(one) for one in signal.valid_signals()]

    before = see()
    ranks.check(script_of(number), 2, ["--seed=5"], ranks.Job())
    with pytest.raises(SystemExit) as stop:
        ranks.check(script_of(number), 2, ["--seed=x"], ranks.Job())
    assert (stop.value.code, see()) == (2, before)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_line_on_stderr_is_one_write_so_that_those_of_two_machines_do_not_mix(monkeypatch):
    """print() writes a line, then its end: of two processes, one line in ten was torn."""
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    ending.say_goodbye(signal.SIGTERM)
    assert written == ["terminated: all that was started has ended\n"]
    for path in (ROOT / "scripts" / "lockstep").rglob("*.py"):
        for line in path.read_text().splitlines():  # who has other ends makes one write
            assert "file=sys.stderr" not in line or 'end=""' in line, f"{path.name}: {line}"
