"""Lessons on several machines: node.py, the ssh loop, the Slurm file, the Kubernetes manifest."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time

import jsonschema
import psutil
import pytest
import yaml
from conftest import ENVIRONMENT, ROOT, finish, free_port, start_program, watch_ports

CLUSTER = ROOT / "scripts" / "cluster"
TWO = "127.0.0.1,127.0.0.2"
PROGRAMS = {  # stand-ins: all "machines" are this one
    "ssh": 'while [ "$1" = -o ]; do shift 2; done; echo "$1" >>hosts; shift; exec sh -c "$*"',
    "scontrol": '[ "$2" = node ] && echo "   NodeAddr=127.0.0.${3#n} NodeHostName=x" || echo n1 n2',
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
        SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@" && wait $!""",
}


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a program in tmp_path, with the stand-ins on its PATH."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return lambda *command, **more: start_program(*command, cwd=tmp_path, env={**found, **more})


def test_the_doctor_looks_at_pairs_of_machines_by_the_ssh_loop(start, tmp_path):
    flags, open_ports = ["--json", "--timeout=90"], set()
    loop = start("bash", CLUSTER / "ssh.sh", TWO, "doctor", *flags)
    threading.Thread(target=watch_ports, args=(loop, open_ports)).start()
    run = finish(loop)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    pairs = {tuple(row["ranks"]): row["machines"] for row in run.json["checks"] if "ranks" in row}
    assert len(pairs) == 6 and pairs[0, 2] == pairs[1, 3] == TWO.split(",")
    hosts = (tmp_path / "hosts").read_text().split()
    assert (hosts[0], sorted(hosts[1:]), open_ports) == ("127.0.0.1", TWO.split(","), set())


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_the_ssh_loop_takes_all_machines_with_it_even_if_it_is_killed(start, sign):
    loop = start("bash", CLUSTER / "ssh.sh", TWO, "02", "--nproc=1", "--steps=999999")
    limit, family = time.monotonic() + 200, []
    while "".join(str(each.info["cmdline"]) for each in family).count("rank.py") < 2:
        assert time.monotonic() < limit and loop.poll() is None
        time.sleep(0.2)
        children = {each.pid for each in psutil.Process(loop.pid).children(recursive=True)}
        family = [each for each in psutil.process_iter(["cmdline"]) if each.pid in children]
    loop.send_signal(sign)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    run = finish(loop)
    assert run.returncode == (130 if sign == signal.SIGINT else -9)
    assert {line.split(":")[0] for line in run.stderr.splitlines()} <= {"interrupted", "terminated"}


@pytest.mark.parametrize(
    "code, lesson, flag, words",
    [
        (2, "03", "", "lesson 03 starts its own ranks.* run 02, 05, 06.* or doctor"),
        (2, "1", "", "lesson 01 is one process"),
        (2, "02", "--nodes=-oProxyCommand", "--nodes"),
        (2, "02", "--node-rank=2", "--node-rank: must be from 0 to 1"),
        (2, "02", "--batch-size=3", "--batch-size: must be at least .* 4"),
        (1, "02", "--node-rank=0", r"not here after 2 s: machine 1 \(127.0.0.2\); start it"),
        (1, "02", "--node-rank=1", r"machine 0 \(127.0.0.1\): no answer at 127.0.0.1, port"),
    ],
)
def test_what_can_not_run_costs_one_line(start, code, lesson, flag, words):
    given = [f"--nodes={TWO}", "--node-rank=0", f"--port={free_port()}", "--wait=2"]
    run = finish(start(sys.executable, ROOT / "scripts/node.py", lesson, *given, *flag.split()))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (code, "", 1)
    assert re.search(words, run.stderr), run.stderr


def test_the_slurm_file_runs_a_lesson_on_both_machines(start):
    given = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[1-2]"}
    run = finish(start("bash", CLUSTER / "lesson.slurm", "02", "--json", **given))
    assert run.returncode == 0 and run.json["world_size"] == 4, run.stderr


@pytest.mark.skipif(
    not shutil.which("slurmctld", path="/usr/sbin:/usr/bin") or os.getuid() != 0,
    reason="needs Slurm's programs (slurmctld, slurmd, sbatch, munged), and root",
)
@pytest.mark.parametrize("flag, code", [("--json", 0), ("--steps=999998", 130)])
def test_a_real_slurm_runs_it_and_nothing_is_left(tmp_path, flag, code):
    given = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    program = start_program("bash", CLUSTER / "try_slurm.sh", "02", flag, env=given)
    while code and program.poll() is None and not list(tmp_path.glob("slurm.*/job.out")):
        time.sleep(0.2)
    program.send_signal(signal.SIGINT if code else 0)
    run = finish(program)
    assert run.returncode == code and (code or run.json["world_size"] == 4), run.stderr
    processes = [each.info for each in psutil.process_iter(["cmdline", "environ"])]
    assert str(tmp_path) not in str(processes) and not list(tmp_path.glob("slurm*"))


MANIFESTS = list(yaml.safe_load_all((CLUSTER / "lesson.yaml").read_text()))


def test_the_manifest_fits_the_schema_of_kubernetes():
    """Always our own list of fields; where it is installed, also the whole published schema."""
    known = json.loads((ROOT / "tests" / "kubernetes_fields.json").read_text())
    assert [each["kind"] for each in MANIFESTS] == ["Service", "NetworkPolicy", "Job"]
    for manifest in MANIFESTS:
        jsonschema.validate(manifest, known)
    published = pytest.importorskip("kubernetes_validate")  # pip install kubernetes-validate
    for manifest in MANIFESTS:
        published.validate(manifest, "1.34", strict=True)


def test_the_parts_of_the_manifest_fit_each_other():
    service, policy, job = (each["spec"] for each in MANIFESTS)
    service_name, _, job_name = (each["metadata"]["name"] for each in MANIFESTS)
    labels, pod = job["template"]["metadata"]["labels"], job["template"]["spec"]
    assert service["clusterIP"] == "None"  # with an address of its own, pods would have no names
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert (pod["subdomain"], job["completionMode"]) == (service_name, "Indexed")
    hosts = [f"{job_name}-{number}.{service_name}" for number in range(job["completions"])]
    assert {"name": "NODES", "value": ",".join(hosts)} in pod["containers"][0]["env"]
    assert job["parallelism"] == job["completions"]


def test_the_pods_of_the_manifest_run_a_lesson(start):
    (container,) = MANIFESTS[2]["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    given |= {"LESSON": "02 --json", "NODES": TWO, "LOCKSTEP_PYTHON": sys.executable}
    line = f"cd '{ROOT}'; {container['args'][0]}".replace("29500", str(free_port()))
    pods = [start(*container["command"], line, **given, JOB_COMPLETION_INDEX=n) for n in "01"]
    first, second = map(finish, pods)
    assert (first.json["world_size"], second.returncode, second.stdout) == (4, 0, "")
