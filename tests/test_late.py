"""Nothing depends on who is late: one rank, or another.

tests/late/sitecustomize.py makes them late, in processes that were started in any way.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, finish, run_lesson, start_program
from lockstep import lessons
from nbtools import run

# Send the functions of this file to the ranks, so that no rank has to import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FOLDER = ROOT / "tests" / "late"
ON_TWO = [lesson.number for lesson in lessons.TABLE if "torch" in lesson.packages][1:]  # 01: none
ON_FOUR = ["04", "12", "13", "14", "16", "18", "19"]  # their notebooks start more than two ranks


def late(who):
    """Return an environment in which this one is late: a rank, "spawner" or "gloo"."""
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    return ENVIRONMENT | {"LOCKSTEP_LATE": str(who), "PYTHONPATH": path}


# --- In every run ---


def make_late(who):
    """Make a rank late, in the process that we are."""
    spec = importlib.util.spec_from_file_location("late", FOLDER / "sitecustomize.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.LATE = str(who)
    module.make_ranks_late(sys.modules["torch.distributed.distributed_c10d"])


def make_a_group_and_return(rank, world_size, who):
    """Return as soon as this rank has its connections to the others in a new group."""
    import torch.distributed as dist

    make_late(who)
    dist.new_group()
    return rank


LEAVE_AT_ONCE = """
import sys
sys.path.insert(0, sys.argv[1])
import nbtools
sys.modules["nbtools.run"].SLOW = ["torch.distributed"]  # and no more: these ranks train nothing

def leave_at_once(rank, world_size):
    import torch.distributed as dist
    dist.destroy_process_group()
    return rank

if __name__ == "__main__":
    print(nbtools.run(leave_at_once, 4))
"""


def test_who_leaves_at_once_does_not_break_the_meeting():
    """Without the barrier after joining, ranks that still connect lose those that have left."""
    program = [sys.executable, "-c", LEAVE_AT_ONCE, ROOT / "notebooks"]
    ended = finish(start_program(*program, env=late(1)))
    assert (ended.stdout, ended.stderr) == ("[0, 1, 2, 3]\n", "")


def test_who_has_returned_stays_until_all_have_connected():
    """Without that, a late rank 1 or 3 loses those that have returned: each time, of four."""
    with ThreadPoolExecutor(4) as pool:  # run() may be called by several threads
        answers = pool.map(lambda who: run(make_a_group_and_return, 4, who), range(4))
        assert list(answers) == [[0, 1, 2, 3]] * 4


# --- Slow: the notebooks and the lessons ---


@contextlib.contextmanager
def busy_processors():
    """Keep every processor busy with two loops."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(2 * psutil.cpu_count())]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def check_notebook(number, env):
    """Fail if a cell of a notebook then prints something else than what is stored."""
    (notebook,) = (ROOT / "notebooks").glob(f"lesson_{number}_*.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-n0", "-q", "-pno:cacheprovider"]
    ended = finish(start_program(*command, notebook, env=env))
    assert ended.returncode == 0, re.sub(r"\x1b\[\d+m", "", ended.stdout)[-3000:]


# All of them take long: LOCKSTEP_LATE_ALL=1.
ALL = "LOCKSTEP_LATE_ALL" in os.environ
WHO = [(n, who) for n in ON_TWO for who in range(4 if n in ON_FOUR else 2)]
WHO += [("03", "spawner")]  # the other pages spawn no ranks that end with an error
SOME = [("03", "spawner"), ("04", 0), ("04", 1), ("13", 3), ("19", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number, who", WHO if ALL else SOME)
def test_a_notebook_says_the_same_whoever_is_late(number, who):
    check_notebook(number, late(who))


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="only if all are asked for")
@pytest.mark.parametrize("number", ["04", "05", "10", "12", "19"])  # they have the shortest limits
def test_a_notebook_says_the_same_on_a_busy_machine(number):
    with busy_processors():
        check_notebook(number, ENVIRONMENT)


SCRIPTS = [number for number in ON_TWO if number != "14"]  # which wants four


@pytest.mark.slow
@pytest.mark.parametrize("who", range(3) if ALL else [1])
@pytest.mark.parametrize("number", SCRIPTS)
def test_a_lesson_passes_whoever_is_late(number, who):
    script = Path(ROOT, "scripts", f"lesson_{number}.sh")
    ended = finish(start_program("bash", script, "--nproc=3", env=late(who)))
    assert ended.returncode == 0, ended.stdout + ended.stderr


BY_HAND = ["02", "03", "05", "06", "09", "10", "11", "12", "13", "15", "16", "17", "18", "20", "21"]
COPIED = [path for path in sorted((ROOT / "lessons").glob("*.py")) if path.name[7:9] in BY_HAND]
OTHERWISE = ["11", "16", "20"]  # two print seconds; 20 is watched in turns, each of which stops
COPIED += sorted((ROOT / "templates").glob("smallest_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", COPIED, ids=lambda path: path.stem)
def test_what_a_reader_copies_ends_well_however_late_gloo_lets_go(script, tmp_path):
    """Without a launcher of ours, which would end each rank before Python clears up.

    It is copied into an empty folder, and says there what it says when it is watched.
    """
    copy = shutil.copy(script, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable] if "spawn" in script.stem else command
    copy = [copy, "--framework", "pytorch"] if "frameworks" in script.stem else [copy]
    for _ in range(1 + 4 * (script.stem == "smallest_ddp")):  # every second run was red
        ended = finish(start_program(*command, *copy, env=late("gloo"), cwd=tmp_path))
        assert ended.returncode == 0, ended.stderr
    lesson = lessons.of_script(script)
    if lesson and lesson.proof.exists() and lesson.number not in OTHERWISE:
        watched = run_lesson(int(lesson.number), "--nproc", 2).stdout.splitlines()
        said = ended.stdout.splitlines()
        assert said and [line for line in said if line not in watched] == []
