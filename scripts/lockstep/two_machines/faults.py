"""Make the usual mistakes with two machines; say what the job says, and after how many seconds.

    bash scripts/two_machines.sh faults [NAME ...]

Launchers wait 15 s for each other and ranks 20 s, so that it ends; PyTorch's defaults are 15 and 30
minutes. The seconds are counted in the process that speaks, from its call of torchrun or of
init_process_group; after a cut or a kill they are counted from there.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lockstep import lessons
from lockstep.flags import Flags
from lockstep.two_machines.namespaces import PORT, TwoMachines

LAUNCHER_WAITS, AT_MOST = 15, 200  # seconds; faulty_job.py says how long ranks wait
FAULTY_JOB = Path(__file__).with_name("faulty_job.py")


class Fault(NamedTuple):
    """A mistake, and what differs from a job that works."""

    mistake: str
    cure: str
    flags: tuple = ({}, {})  # of each machine's torchrun; None: nobody starts it
    variables: tuple = ({}, {})  # of each machine's environment
    own_name: str | None = None  # what each machine believes its own address to be
    nowhere: tuple = ()  # (name, addresses) of an interface that leads nowhere
    event: str | None = None  # the method of TwoMachines that is called when the ranks have met


NAMES = "lo", "eth0", "eth1", "eth9", "docker0"
LO, ETH, ETH1, ETH9, DOCKER = ({"GLOO_SOCKET_IFNAME": name} for name in NAMES)
LOST = "eth1", "10.15.0.1", "10.15.0.2"  # packets are lost there, as by a firewall that drops them
INSIDE = "docker0", "172.17.0.1", "172.17.0.1"  # on each machine a network of its own
OWN = {"--master-addr": "10.14.0.2"}
HERE = {"--master-addr": "127.0.0.1"}
COMES = "start it, or look why not"
FAULTS = {
    "second": Fault("machine 1 never comes", COMES, ({}, None)),
    "first": Fault("machine 0 never comes", COMES, (None, {})),
    "localhost": Fault("both are told 127.0.0.1", "the address of machine 0", (HERE, HERE)),
    "number": Fault("both have node rank 0", "--node-rank 0 and 1", ({}, {"--node-rank": 0})),
    "nnodes": Fault("machine 0 waits for three", "the same --nnodes on all", ({"--nnodes": 3}, {})),
    "no-such": Fault("machine 1 has no eth9", "`ip address` lists them", variables=({}, ETH9)),
    "loopback": Fault("gloo uses lo", "GLOO_SOCKET_IFNAME=eth0", variables=(LO, LO)),
    "debian": Fault("own name is 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0", own_name="127.0.1.1"),
    "firewall": Fault("packets are lost", "allow every port", variables=(ETH1, ETH1), nowhere=LOST),
    "own": Fault("machine 1 is told its own address", "that of machine 0", ({}, OWN)),
    "ones": Fault("both have node rank 1", "--node-rank 0 and 1", ({"--node-rank": 1}, {})),
    "docker": Fault(
        "gloo uses docker0", "GLOO_SOCKET_IFNAME=eth0", variables=(DOCKER, DOCKER), nowhere=INSIDE
    ),
    "killed": Fault("machine 1 is killed", "c10d, restarts, checkpoints", event="kill"),
    "cut": Fault("the cable is cut", "a timeout that suits you", event="cut"),
    "replaced": Fault("machine 1 dies in lesson 06, and is replaced", "this is it"),
}


def start(two, node, command, variables):
    """Start Python on machine `node`; return the process. What it says is in said_0 or said_1."""
    said = two.folder / f"said_{node}"
    with open(said, "w") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT}
        environment = two.environment() | variables
        return two.machines[node].start(sys.executable, *command, env=environment, **options)


def start_launcher(two, node, fault):
    """Start torchrun on machine `node`; return the process."""
    flags = {"--nnodes": 2, "--node-rank": node, "--nproc-per-node": 1}
    flags |= {"--master-addr": two.machines[0].address, "--master-port": PORT}
    flags |= {"--rdzv-conf": f"timeout={LAUNCHER_WAITS}"} | fault.flags[node]
    typed = [f"{name}={value}" for name, value in flags.items()]
    command = [FAULTY_JOB, "launcher", *typed, FAULTY_JOB, "rank"]
    return start(two, node, command, fault.variables[node])


def make(fault):
    """Make one mistake on two fresh machines; return the lines that they said."""
    with TwoMachines() as two:
        if fault.own_name:
            for machine in two.machines:
                machine.names(two.folder, fault.own_name)
        if fault.nowhere:
            two.lead_nowhere(*fault.nowhere)
        nodes = [node for node in (0, 1) if fault.flags[node] is not None]
        jobs = [start_launcher(two, node, fault) for node in nodes]
        said = [two.folder / f"said_{node}" for node in nodes]
        end, event = time.monotonic() + AT_MOST, fault.event
        while time.monotonic() < end and any(job.poll() is None for job in jobs):
            if event and all("met\n" in each.read_text() for each in said):
                getattr(two, event)()
                event = None
            time.sleep(0.05)
        return [
            f"machine {node}, {line}"
            for node, each in zip(nodes, said, strict=True)
            for line in each.read_text().splitlines()
            if line.startswith(("launch", "rank "))
        ]


# --- A machine that dies is replaced ---


def start_lesson_06(two, node):
    """Start torchrun on a machine, for lesson 06; return the process."""
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=machine0:{PORT}", "--rdzv-id=lesson"]
    command += ["--max-restarts=3", lessons.find("06").script]
    command += ["--steps=400", "--save-every=1", "--checkpoints", two.folder / "checkpoints"]
    return start(two, node, command, ETH | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def wait_for_step(two, step, job):
    """Return the latest step that lesson 06 has saved: at least this one, unless it has ended."""
    while True:
        names = [path.stem for path in two.folder.glob("checkpoints/step_????????.pt")]
        latest = max((int(name[len("step_") :]) for name in names), default=0)
        if latest >= step or job.poll() is not None:
            return latest
        time.sleep(0.05)


def replace_machine():
    """Kill machine 1 in the middle of lesson 06, put another in its place; return what is said."""
    with TwoMachines() as two:
        (two.folder / "checkpoints").mkdir()
        job, _ = start_lesson_06(two, 0), start_lesson_06(two, 1)
        wait_for_step(two, 20, job)
        two.kill()
        killed = time.monotonic()
        time.sleep(1)  # a checkpoint may be on its way
        step = wait_for_step(two, 0, job)
        two.replace(1)
        start_lesson_06(two, 1)
        lines = [f"machine 1 is killed after step {step}, and replaced 1 s later"]
        if wait_for_step(two, step + 1, job) > step:
            lines.append(f"the next step, {time.monotonic() - killed:.1f} s after the kill")
        job.wait(AT_MOST)
        said = (two.folder / "said_0").read_text().splitlines()
        return lines + [line for line in said if line.startswith(("step", "resumed"))]


def main(names):
    """Make the mistakes with these names (all); return the exit code."""
    if unknown := [name for name in names if name not in FAULTS]:
        Flags("two_machines.sh").error(f"no fault {unknown[0][:40]!r}; take {', '.join(FAULTS)}")
    for name in names or FAULTS:
        fault = FAULTS[name]
        print(f"{name}: {fault.mistake}", flush=True)
        for line in replace_machine() if name == "replaced" else make(fault):
            print("   ", line, flush=True)
        print("    cure:", fault.cure, flush=True)
    return 0
