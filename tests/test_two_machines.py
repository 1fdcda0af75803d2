"""Two machines that are one: what runs on them, the usual mistakes, and that nothing stays."""

import re
import shutil
import time

import lesson_03_spawn_ddp
import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, finish, run_warm, start_program
from lockstep import lessons
from test_cluster import ROOT_ONLY
from torch.nn.utils import parameters_to_vector

TWO = ["bash", ROOT / "scripts" / "two_machines.sh"]
MBIT, STEPS = 2, 4  # the slow cable: each of the steps takes two seconds


def start(*arguments, **environment):
    return start_program(*TWO, *arguments, env={**ENVIRONMENT, **environment})


def test_without_root_or_ip_one_line_says_what_is_missing(tmp_path):
    for name in ("bash", "uname", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "id").write_text("#!/bin/bash\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    run = finish(start("14", PATH=str(tmp_path)))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "error: it needs root (sudo), the program ip, the program tc" in run.stderr


@ROOT_ONLY
@pytest.mark.parametrize(
    "flags, words",
    [
        ("01", "lesson 01 is one process"),
        ("14 --nproc 1", "argument --nproc: must be a whole number from 2"),
        ("16 --machines 1", "argument --machines: must be a whole number from 2"),
        ("16 --machines 5 --nproc 4", "argument --nproc: 5 machines need as many ranks"),
        ("faults nope", "no fault 'nope'; take second, first"),
        ("slurm nope.py", "try_slurm.sh: error: there is no lesson and no file 'nope.py'"),
    ],
)
def test_bad_flags_cost_one_line(flags, words):
    run = finish(start(*flags.split()))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert words in run.stderr


@ROOT_ONLY
@pytest.mark.claim("B6", "B7", "E13")
def test_two_jobs_at_once_each_on_two_machines_and_a_slow_cable_makes_every_step_wait():
    slow = ["03", "--nproc=2", f"--steps={STEPS}", f"--rate={MBIT}", "--json"]
    jobs = [start("14", "--nproc", 3), start(*slow)]
    first, second = map(finish, jobs)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "rank 2: node 1, local rank 0, on machine1" in first.stdout
    assert "rank 2 is at 10.14.0.2 and meets 0, 1 at 10.14.0.1" in first.stdout
    assert "digits, 2 ranks over gloo" in second.stdout
    parameters = parameters_to_vector(lesson_03_spawn_ddp.make_model().parameters())
    bits = STEPS * parameters.numel() * 32  # in each step a rank sends its gradients once
    assert second.json["seconds_training"] > 0.8 * bits / (MBIT * 1e6)


@ROOT_ONLY
def test_three_machines_on_a_switch_send_over_cables_of_their_own():
    """The rank that sends two tensors takes twice as long as its cable needs for one."""
    size = ["--megabytes", 0.5, "--rate", 20, "--steps", 1, "--algorithm", "naive", "--json"]
    run = finish(start("16", "--machines", 3, "--nproc", 3, *size))
    assert run.returncode == 0, run.stderr
    assert run.json["world_size"] == 3 and run.json["bytes_busiest"] == {"naive": [1_000_000]}
    assert run.json["milliseconds"]["naive"][0] > 0.8 * 1e3 * 4 * 0.5 * 8 / 20


SLEEPS = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
time.sleep(1000)
"""


@ROOT_ONLY
def test_of_a_command_that_is_killed_no_machine_is_left_and_no_file(tmp_path):
    ranks, temporary, script = tmp_path / "ranks", tmp_path / "tmp", tmp_path / "a script.py"
    ranks.mkdir()
    temporary.mkdir()
    script.write_text(SLEEPS)
    job = start(script, "--nproc=2", ranks, TMPDIR=str(temporary))
    end, family = time.monotonic() + 200, []
    try:
        while len(list(ranks.iterdir())) < 2:
            assert time.monotonic() < end and job.poll() is None, job.stderr.read()
            time.sleep(0.1)
        family = psutil.Process(job.pid).children(recursive=True)
        assert [each.name() for each in family].count("sleep") == 2  # process 1 of each machine
        job.kill()
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert list(temporary.iterdir()) == []
    finally:
        job.kill()  # the machines end with it
        job.communicate()


# --- The usual mistakes ---


def say(*names):
    """Return what is said of some of the faults."""
    run = finish(start("faults", *names))
    assert run.returncode == 0, run.stderr
    return run.stdout


@ROOT_ONLY
@pytest.mark.slow
@pytest.mark.claim("B7", "C9")
def test_faults_say_what_the_lesson_says():
    said = say("localhost", "killed")
    assert "machine 1, launcher, after" in said and "to connect to (127.0.0.1, 29500)" in said
    assert re.search(r"machine 0, rank 0, after .* Connection (reset|closed) by peer", said)


@ROOT_ONLY
@pytest.mark.slow
@pytest.mark.claim("B7", "E13")
def test_a_machine_that_dies_is_replaced_and_the_job_goes_on():
    said = say("replaced")
    step = re.search(r"killed after step (\d+)", said)[1]
    assert f"resumed from step {step}" in said
    (_, alone), _ = run_warm(lessons.find("06").script, 2, "--steps", 400)
    assert alone.splitlines()[-1] in said, "its first weight has other digits without a kill"
