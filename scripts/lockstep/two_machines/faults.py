"""Make the usual mistakes with two machines; say what the job says, and after how many seconds.

    bash scripts/two_machines.sh faults [NAME ...]

Launchers wait 15 s for each other and ranks 20 s, so that it ends; PyTorch's defaults are 15 and 30
minutes. The seconds are counted in the process that speaks, from its call of torchrun or of
init_process_group; after a cut or a kill they are counted from there.
"""

import sys
import time
from collections.abc import Callable
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
    event: str | None = None  # happens when the ranks have met
    run: Callable | None = None  # for what is not made like the others


LO, ETH = {"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "eth0"}
FAULTS = {
    "none": Fault("no mistake", "none is needed", event="stop"),
    "second": Fault("machine 1 never comes", "start it, or look why not", ({}, None)),
    "first": Fault("machine 0 never comes", "start it, or look why not", (None, {})),
    "port": Fault(
        "machine 1 is told another port", "one --master-port", ({}, {"--master-port": PORT + 1})
    ),
    "localhost": Fault(
        "both machines are told 127.0.0.1",
        "the address of machine 0 that machine 1 can reach",
        ({"--master-addr": "127.0.0.1"}, {"--master-addr": "127.0.0.1"}),
    ),
    "number": Fault(
        "both machines have node rank 0", "--node-rank 0 and 1", ({}, {"--node-rank": 0})
    ),
    "nnodes": Fault("machine 0 waits for three", "the same --nnodes on all", ({"--nnodes": 3}, {})),
    "no-such": Fault(
        "machine 1 names an interface that it does not have",
        "`ip address` lists them",
        variables=({}, {"GLOO_SOCKET_IFNAME": "eth9"}),
    ),
    "loopback": Fault(
        "gloo uses the loopback interface", "GLOO_SOCKET_IFNAME=eth0", variables=(LO, LO)
    ),
    "debian": Fault(
        "the own name of each machine resolves to 127.0.1.1",
        "GLOO_SOCKET_IFNAME=eth0, or correct /etc/hosts",
        own_name="127.0.1.1",
    ),
    "debian-cured": Fault(
        "the same, with GLOO_SOCKET_IFNAME=eth0",
        "this is it",
        variables=(ETH, ETH),
        own_name="127.0.1.1",
        event="stop",
    ),
    "killed": Fault(
        "all processes of machine 1 are killed",
        "c10d, --max-restarts, checkpoints",
        event="kill",
    ),
    "cut": Fault(
        "the cable is cut while the ranks compute",
        "a timeout that suits you; then as after a kill",
        event="cut",
    ),
    "replaced": Fault(
        "machine 1 dies in lesson 06 and is replaced, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "this is it",
        run=lambda: replace_machine("1"),
    ),
    "replaced-shared": Fault(
        "the same, without that variable",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines",
        run=lambda: replace_machine("0"),
    ),
}


def start_launcher(two, node, fault):
    """Start torchrun on machine `node`; return the process and the file that it writes."""
    flags = {"--nnodes": 2, "--node-rank": node, "--nproc-per-node": 1}
    flags |= {"--master-addr": two.machines[0].address, "--master-port": PORT}
    flags |= {"--rdzv-conf": f"timeout={LAUNCHER_WAITS}"} | fault.flags[node]
    typed = [f"{name}={value}" for name, value in flags.items()]
    command = [FAULTY_JOB, "launcher", *typed, FAULTY_JOB, "rank", two.folder]
    return start(two, node, f"said_{node}", command, fault.variables[node])


def start(two, node, name, command, variables):
    """Start Python on machine `node`; return the process and the file that it writes."""
    said = two.folder / name
    with open(said, "w") as file:
        options = {"stdout": file, "stderr": file, "env": two.environment() | variables}
        return two.machines[node].start(sys.executable, *command, **options), said


def make(fault):
    """Make one mistake on two fresh machines; return the lines that they said."""
    with TwoMachines() as two:
        if fault.own_name:
            for machine in two.machines:
                machine.names(two.folder, fault.own_name)
        nodes = [node for node in (0, 1) if fault.flags[node] is not None]
        started = {node: start_launcher(two, node, fault) for node in nodes}
        wait(two, fault.event, started.values())
        return [line for node in nodes for line in spoken(node, *started[node])]


def wait(two, event, started):
    """Wait until all launchers have ended; let the event happen when all ranks have met."""
    end = time.monotonic() + AT_MOST
    while time.monotonic() < end and any(job.poll() is None for job, _ in started):
        if event and all("met\n" in said.read_text() for _, said in started):
            let_happen(event, two)
            event = None
        time.sleep(0.05)


def let_happen(event, two):
    """Stop the job, kill machine 1, or cut the cable."""
    if event == "stop":
        Path(two.folder, "stop").touch()
    elif event == "kill":
        two.machines[1].kill()
    else:
        two.cut()


def spoken(node, job, said):
    """Return what the launcher and the rank of a machine have said."""
    lines = [line for line in said.read_text().splitlines() if line.startswith(("launch", "rank "))]
    lines = [f"machine {node}, {line}" for line in lines]
    if job.poll() is None:
        lines.append(f"machine {node}: still waits after {AT_MOST} s")
    return lines


# --- A machine that dies is replaced ---


def start_lesson_06(two, node, number, disable_sharing):
    """Start torchrun on a machine, for lesson 06; return the process and the file it writes."""
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=machine0:{PORT}", "--rdzv-id=lesson"]
    checkpoints = two.folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    command += ["--max-restarts=3", lessons.find("06").script]
    command += ["--steps=400", "--checkpoints", checkpoints]
    variables = ETH | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": disable_sharing}
    return start(two, node, f"said_{number}", command, variables)


def latest_step(two):
    """Return the step of the latest checkpoint of lesson 06, or 0."""
    names = [path.stem for path in Path(two.folder, "checkpoints").glob("step_????????.pt")]
    return max((int(name[len("step_") :]) for name in names), default=0)


def wait_for_step(two, step, job):
    """Return when lesson 06 has written a checkpoint of this step, or its launcher has ended."""
    while latest_step(two) < step and job.poll() is None:
        time.sleep(0.05)


def replace_machine(disable_sharing):
    """Kill machine 1 in the middle of lesson 06, put another in its place; return what is said."""
    with TwoMachines() as two:
        job, said = start_lesson_06(two, 0, 0, disable_sharing)
        start_lesson_06(two, 1, 1, disable_sharing)
        wait_for_step(two, 20, job)
        two.machines[1].kill()
        killed = time.monotonic()
        time.sleep(1)  # a checkpoint may be on its way
        step = latest_step(two)
        two.replace(1)
        start_lesson_06(two, 1, 2, disable_sharing)
        lines = [f"machine 1 is killed after step {step}, and replaced 1 s later"]
        wait_for_step(two, step + 1, job)
        if latest_step(two) > step:
            lines.append(f"the next step, {time.monotonic() - killed:.1f} s after the kill")
        job.wait(AT_MOST)
        if job.returncode:
            after = f"{time.monotonic() - killed:.1f} s after the kill"
            lines.append(f"machine 0's launcher ends, {after}")
        telling = ("PASS", "FAIL", "resumed", "torch.distributed.")
        return lines + [line for line in said.read_text().splitlines() if line.startswith(telling)]


def main(names):
    """Make the mistakes with these names (all); return the exit code."""
    if unknown := [name for name in names if name not in FAULTS]:
        Flags("two_machines.sh").error(f"no fault {unknown[0][:40]!r}; take {', '.join(FAULTS)}")
    for name in names or FAULTS:
        fault = FAULTS[name]
        print(f"{name}: {fault.mistake}", flush=True)
        for line in fault.run() if fault.run else make(fault):
            print("   ", line, flush=True)
        print("    cure:", fault.cure, flush=True)
    return 0
