"""Several machines: `machine`, and what calls it under Slurm, in Kubernetes, and by ssh."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import jsonschema
import psutil
import pytest
import yaml
from conftest import ENVIRONMENT, ROOT, finish, start_program
from lockstep import network, ranks, ssh
from lockstep.two_machines.namespaces import TwoMachines
from torch.distributed import HashStore

CLUSTER = ROOT / "scripts" / "cluster"
LOOPBACK = "127.0.0.1,127.0.0.2"


def cannot_make_machines():
    """Return whether this process may not make a network namespace."""
    command = "unshare --net --uts --mount --pid --fork ip link add one type veth peer name two"
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip", "tc")))
    return not tools or subprocess.run(command.split(), capture_output=True).returncode != 0


ROOT_ONLY = pytest.mark.skipif(cannot_make_machines(), reason="needs root, and ip")


class Machines(NamedTuple):
    """Two machines: their names, their addresses, and the command that enters each."""

    hosts: str
    addresses: list
    enter: list
    interface: str  # the one that leads from one to the other


@pytest.fixture(scope="module")
def machines():
    """Return two machines: network namespaces with addresses of their own, where it is allowed.

    Elsewhere both are this machine, at two of its loopback addresses.
    """
    if cannot_make_machines():
        yield Machines(LOOPBACK, LOOPBACK.split(","), ["", ""], network.loopback())
        return
    with TwoMachines() as two:
        enter = [shlex.join(each.enter()) for each in two.machines]
        addresses = [each.address for each in two.machines]
        yield Machines("machine0,machine1", addresses, enter, "eth0")


@ROOT_ONLY
def test_the_machines_of_these_tests_have_addresses_of_their_own(machines):
    """Skipped where they have not: then what goes wrong between two addresses is not seen here."""
    assert machines.addresses == ["10.14.0.1", "10.14.0.2"]


@pytest.fixture
def start(tmp_path, machines):
    """Return a function that starts a program in tmp_path; ssh, scontrol and srun are stand-ins.

    They enter the two machines as the real ones would, and run there what they are given.
    """
    (first, second), (host_0, host_1) = machines.enter, machines.hosts.split(",")
    programs = {
        "ssh": f"""while [ "$1" = -o ]; do shift 2; done; echo "$1" >>hosts
            case $1 in {host_0}) shift; exec {first} sh -c "$*";;
            {host_1}) shift; exec {second} sh -c "$*";; esac""",
        "scontrol": f"""case $3 in n0) echo "   NodeAddr={machines.addresses[0]} NodeHostName=x";;
            n1) echo "   NodeAddr={machines.addresses[1]} NodeHostName=x";;
            7) echo "   Command=$FILE 02"; echo "   WorkDir=/";; *) echo n0 n1;; esac""",
        "srun": f"""while [ "${{1#--}}" != "$1" ]; do shift; done
            SLURM_NODEID=1 {second} "$@" & SLURM_NODEID=0 {first} "$@" && wait $!""",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return lambda *command, **more: start_program(*command, cwd=tmp_path, env={**found, **more})


# --- The three ways ---


SLURM = CLUSTER / "lesson.slurm"


def submit(start, *arguments, folder=ROOT, file=SLURM):
    """Start lesson.slurm as Slurm does: a copy of `file`, submitted in `folder`."""
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder), "FILE": str(file)}
    job |= {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CPUS_PER_TASK": "4"}
    return start("bash", SLURM, *arguments, **job)


def test_the_slurm_file_runs_a_lesson_on_both_machines(start):
    run = finish(submit(start, "02", "--nproc=1", "--steps=3", "--json"))
    assert run.returncode == 0 and run.json["world_size"] == 2, run.stderr


def test_the_slurm_file_runs_a_script_in_the_folder_in_which_it_was_submitted(start, tmp_path):
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "my train.py").write_text("import sys; sys.stdout.write(open('data.txt').read())")
    (folder / "data.txt").write_text("rows\n")  # written at once: print() writes twice
    run = finish(submit(start, "my train.py", "--nproc=1", folder=folder))
    assert (run.returncode, run.stdout) == (0, "rows\n" * 2), run.stderr


@pytest.mark.parametrize("file, lines, words", [("copy.slurm", 1, "itself"), (SLURM, 2, "nowhere")])
def test_the_slurm_file_says_what_it_does_not_find(start, tmp_path, file, lines, words):
    """The repository; on each machine the folder in which the script is to run."""
    run = finish(submit(start, "02", folder=tmp_path / "nowhere", file=tmp_path / file))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", lines), run.stderr
    assert words in run.stderr


MANIFESTS = list(yaml.safe_load_all((CLUSTER / "lesson.yaml").read_text()))


def test_the_pods_of_the_manifest_run_the_doctor(start, machines):
    (container,) = MANIFESTS[2]["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    given |= {"LOCKSTEP_PYTHON": sys.executable, "NODES": machines.hosts}
    given["LESSON"] += " --nproc=1 --json --timeout=90"
    line = container["args"][0].replace("/lockstep/scripts", f"'{ROOT}/scripts'")
    line = line.replace("29500", str(*network.free_ports(1)))
    pod = [*container["command"], line]
    pods = [
        start(*shlex.split(machines.enter[n]), *pod, **given, JOB_COMPLETION_INDEX=str(n))
        for n in (0, 1)
    ]
    first, second = map(finish, pods)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr
    (pair,) = [row for row in first.json["checks"] if "ranks" in row]
    assert pair["machines"] == machines.hosts.split(",") and second.stdout == ""


SCRIPT = """
import json, os, psutil, sys, time
listens = [each.laddr.ip for each in psutil.net_connections("inet") if each.status == "LISTEN"]
place = [int(os.environ["RANK"]), os.environ["GLOO_SOCKET_IFNAME"], sorted(set(listens))]
place.append(os.getcwd())
sys.stdout.write(json.dumps([*place, sys.argv[1:]]) + "\\n")  # at once: print() writes twice
time.sleep(1000)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_the_ssh_loop_runs_a_script_and_takes_all_machines_with_it(start, tmp_path, machines, sign):
    """Its path may have a space; its flags reach it as they are. The loop may also be killed."""
    script = tmp_path / "my train.py"
    script.write_text(SCRIPT)
    flags = ["--epochs", "3", "a  b", "--force", "--nproc=1", "--", "--nproc", "9", "--", "-x"]
    loop = start("bash", CLUSTER / "ssh.sh", machines.hosts, script.name, *flags)
    said = [loop.stdout.readline() for _ in range(2)]
    family = psutil.Process(loop.pid).children(recursive=True)
    loop.send_signal(sign)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    run = finish(loop)
    assert run.returncode == (130 if sign == signal.SIGINT else -9), run.stderr
    assert {line.split(":")[0] for line in run.stderr.splitlines()} <= {"interrupted", "terminated"}
    whole = ["--epochs", "3", "a  b", "--force", "--nproc", "9", "--", "-x"]
    ranks_said = sorted(map(json.loads, said))
    assert [(rank, name, folder, argv) for rank, name, _, folder, argv in ranks_said] == [
        (rank, machines.interface, str(tmp_path), whole) for rank in (0, 1)
    ]
    if machines.interface == "eth0":  # nobody else listens in these networks
        assert [listens for _, _, listens, *_ in ranks_said] == [["10.14.0.1"], []]
    assert sorted((tmp_path / "hosts").read_text().split()) == machines.hosts.split(",")


def test_a_machine_without_the_callers_folder_says_so(tmp_path):
    command = ssh.remote(tmp_path / "not here", ["machine", "train.py"])
    run = finish(start_program("sh", "-c", command))
    assert run.returncode == 2 and "not here" in run.stderr and len(run.stderr.splitlines()) == 1


def test_the_ssh_loop_refuses_before_it_calls_ssh(start, tmp_path):
    """A host that begins with "-" would be a flag of ssh, and could run a command here."""
    for hosts, what in (("a,b", "nope.py"), ("a,b", "04"), ("-oProxyCommand=x,b", "02")):
        run = finish(start("bash", CLUSTER / "ssh.sh", hosts, what))
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith("ssh.sh: error: "), run.stderr
    assert not (tmp_path / "hosts").exists()


# --- The command of one machine ---


@pytest.mark.parametrize(
    "code, what, flag, words",
    [
        (2, "04", "", "lesson 04 starts its own ranks.* take 02, 03, 05, 06.* or a script"),
        (2, "1", "", "lesson 01 is one process"),
        (2, "nope.py", "", "there is no lesson and no file 'nope.py'"),
        (2, "02", "--nodes=-oProxyCommand", "--nodes"),
        (2, "02", "--node-rank=2", "--node-rank: must be from 0 to 1"),
        (2, "03", "--batch-size=3", "--batch-size: must be at least .* 4"),
        (1, "02", "", r"not here after 2 s: machine 1 \(127.0.0.2\); start it"),
    ],
)
def test_what_can_not_run_costs_one_line(code, what, flag, words):
    port = network.free_ports(1)[0]
    given = [f"--nodes={LOOPBACK}", "--node-rank=0", f"--port={port}", "--wait=2"]
    command = [sys.executable, ROOT / "scripts" / "lockstep", "machine", what]
    run = finish(start_program(*command, *given, *flag.split()))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (code, "", 1)
    assert re.search(words, run.stderr), run.stderr


def test_a_first_machine_that_does_not_listen_or_can_not_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"can't listen at 127.0.0.1, port {port}: .*--port"):
            ranks.listen("127.0.0.1", port)
    monkeypatch.setenv("LOCKSTEP_NODES", "ada,bob")
    monkeypatch.setenv("LOCKSTEP_STORE", f"127.0.0.1 {port} 0")
    with pytest.raises(
        SystemExit, match=rf"machine 0 \(ada\): no answer at 127.0.0.1, port {port}"
    ):
        ranks.wait_for_first_machine(ranks.Job())


def test_who_waits_for_the_other_machines_hears_a_signal(monkeypatch):
    """Else a launcher that is asked to end would be killed later, and leave its folder."""
    monkeypatch.setenv("LOCKSTEP_NODES", "ada,bob")
    monkeypatch.setenv("LOCKSTEP_STORE", "127.0.0.1 0 20")
    store = HashStore()
    before = signal.signal(signal.SIGALRM, lambda *_: store.set("machine/1", ""))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        ranks.check_in(store, ranks.Job())
    finally:
        signal.signal(signal.SIGALRM, before)


# --- A real Slurm ---


REAL_SLURM = pytest.mark.skipif(
    cannot_make_machines() or not shutil.which("slurmctld", path="/usr/sbin:/usr/bin"),
    reason="needs root, and Slurm's programs (slurmctld, slurmd, sbatch, munged)",
)
IN_SLURM = """
import json, os, sys, time
from pathlib import Path
place = [len(os.sched_getaffinity(0)), os.environ["GLOO_SOCKET_IFNAME"], os.getcwd(), sys.argv[2:]]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(place))
time.sleep(1000 if "sleep" in sys.argv else 3)  # for the memory, Slurm looks once a second
"""


@pytest.fixture
def slurm(tmp_path):
    """Return (a folder for what the ranks write, a function that starts a job in a real Slurm)."""
    written, script = tmp_path / "written", tmp_path / "my train.py"
    written.mkdir()
    script.write_text(IN_SLURM)
    command = ["bash", CLUSTER / "try_slurm.sh", script.name, written, "--nproc=1"]
    given = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    programs = []

    def start(*flags):
        programs.append(start_program(*command, *flags, cwd=tmp_path, env=given))
        return programs[-1]

    yield written, start
    for program in programs:  # also after a test that has failed
        program.send_signal(signal.SIGINT)
        program.wait(60)
    assert not list(tmp_path.glob("tmp*"))  # the temporary folder has gone


@REAL_SLURM
@pytest.mark.slow
def test_a_real_slurm_gives_all_cores_and_enough_memory_to_a_script(slurm, tmp_path):
    """And its job runs in the folder in which it was submitted."""
    written, start = slurm
    run = finish(start("a  b", "--", "--nproc", "4"))
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    found = [json.loads((written / rank).read_text()) for rank in "01"]
    place = [min(4, os.cpu_count()), "eth0", str(tmp_path), ["a  b", "--nproc", "4"]]
    assert found == [place] * 2


@REAL_SLURM
@pytest.mark.slow
def test_of_a_slurm_that_is_interrupted_nothing_is_left(slurm):
    written, start = slurm
    program, end = start("sleep"), time.monotonic() + 200
    while len(list(written.iterdir())) < 2:
        assert time.monotonic() < end and program.poll() is None
        time.sleep(0.1)
    family = psutil.Process(program.pid).children(recursive=True)
    names = set()
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was a short command
            names.add(each.name())
    program.send_signal(signal.SIGINT)
    assert finish(program).returncode == 130
    assert {"slurmd", "slurmctld", "munged"} <= names and psutil.wait_procs(family, timeout=60)[
        1
    ] == []


# --- The manifest of Kubernetes ---


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
