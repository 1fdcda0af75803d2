"""Make the usual mistakes with two machines; say what the job says, and after how many seconds.

    bash scripts/two_machines.sh faults [NAME ...]

Launchers wait 15 s for each other and ranks 20 s, so that it ends; PyTorch's defaults are 10 and 30
minutes. The seconds are counted in the process that speaks, from its call of torchrun or of
init_process_group; after a cut or a kill they are counted from there.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lockstep.two_machines.namespaces import PORT, TwoMachines

LAUNCHER_WAITS, RANK_WAITS, AT_MOST = 15, 20, 200  # seconds


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


def be_launcher(arguments):
    """Call torchrun; say how it has failed."""
    from torch.distributed import run

    start = time.monotonic()
    try:
        run.main(arguments)
    except BaseException as error:
        say("launcher", start, error)
        sys.exit(1)


def be_rank():
    """Join the group, then call all-reduce until something happens; say what."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    start, stop = time.monotonic(), Path(os.environ["FAULTS_FOLDER"], "stop")
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_WAITS))
        print("met", flush=True)
        total = torch.zeros(1)
        while total == 0:
            start = time.monotonic()
            total.fill_(stop.exists())
            dist.all_reduce(total)
        dist.destroy_process_group()
        print(f"rank {os.environ['RANK']}: came to its end", flush=True)
    except Exception as error:
        say(f"rank {os.environ['RANK']}", start, error)
        os._exit(1)


def say(who, start, error):
    """Print the type and the first line of an error, and the seconds that it took."""
    text = (str(error).strip() or "(no text)").splitlines()[0]
    name = type(error).__name__
    if name == "ChildFailedError":
        text = "(names the rank that failed first)"
    print(f"{who}, after {time.monotonic() - start:.1f} s: {name}: {text}", flush=True)


def start_launcher(two, node, fault):
    """Start torchrun on machine `node`; return the process and the file that it writes."""
    flags = {"--nnodes": 2, "--node-rank": node, "--nproc-per-node": 1}
    flags |= {"--master-addr": two.machines[0].address, "--master-port": PORT}
    flags |= {"--rdzv-conf": f"timeout={LAUNCHER_WAITS}"} | fault.flags[node]
    typed = [f"{name}={value}" for name, value in flags.items()]
    command = [sys.executable, __file__, "launcher", *typed, __file__, "rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULTS_FOLDER": two.folder.name}
    environment.pop("GLOO_SOCKET_IFNAME", None)  # run_lesson.py has set it
    said = Path(two.folder.name, f"said_{node}")
    with open(said, "w") as file:
        options = {"stdout": file, "stderr": file, "env": environment | fault.variables[node]}
        return two.machines[node].start(*command, **options), said


def make(fault):
    """Make one mistake on two fresh machines; return the lines that they said."""
    with TwoMachines() as two:
        if fault.own_name:
            for machine in two.machines:
                machine.names(two.folder.name, fault.own_name)
        nodes = [node for node in (0, 1) if fault.flags[node] is not None]
        started = {node: start_launcher(two, node, fault) for node in nodes}
        end = time.monotonic() + AT_MOST
        happened = None if fault.event else 0
        while time.monotonic() < end and any(job.poll() is None for job, _ in started.values()):
            if happened is None and all(
                "met\n" in said.read_text() for _, said in started.values()
            ):
                happened = time.monotonic()
                if fault.event == "stop":
                    Path(two.folder.name, "stop").touch()
                else:
                    two.cut() if fault.event == "cut" else two.machines[1].kill()
            time.sleep(0.05)
        lines = []
        for node, (job, said) in started.items():
            lines += [
                f"machine {node}, {line}"
                for line in said.read_text().splitlines()
                if line.startswith(("launcher", "rank "))
            ]
            if job.poll() is None:
                lines.append(f"machine {node}: still waits after {AT_MOST} s")
        return lines


LESSON_06 = Path(__file__).resolve().parent.parent / "lessons/lesson_06_checkpoint_map_location.py"


def start_lesson_06(two, node, number, disable_sharing):
    """Start torchrun on a machine, for lesson 06; return the process and its output's file."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=3"]
    flags += [f"--rdzv-endpoint=machine0:{PORT}", "--rdzv-id=lesson"]
    checkpoints = Path(two.folder.name, "checkpoints")
    checkpoints.mkdir(exist_ok=True)
    job = [LESSON_06, "--steps=400", "--checkpoints", checkpoints]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = disable_sharing
    said = Path(two.folder.name, f"said_{number}")
    with open(said, "w") as file:
        options = {"stdout": file, "stderr": file, "env": environment}
        command = [sys.executable, "-m", "torch.distributed.run", *flags, *job]
        return two.machines[node].start(*command, **options), said


def latest_step(two):
    """Return the step of the latest checkpoint of lesson 06, or 0."""
    names = [path.stem for path in Path(two.folder.name, "checkpoints").glob("step_????????.pt")]
    return max((int(name[len("step_") :]) for name in names), default=0)


def replace_machine(disable_sharing):
    """Kill machine 1 in the middle of lesson 06, put another in its place; return what is said."""
    with TwoMachines() as two:
        job, said = start_lesson_06(two, 0, 0, disable_sharing)
        start_lesson_06(two, 1, 1, disable_sharing)
        while latest_step(two) < 20 and job.poll() is None:
            time.sleep(0.05)
        two.machines[1].kill()
        killed = time.monotonic()
        time.sleep(1)  # a checkpoint may be on its way
        step = latest_step(two)
        two.replace(1)
        start_lesson_06(two, 1, 2, disable_sharing)
        lines = [f"machine 1 is killed after step {step}, and replaced 1 s later"]
        while latest_step(two) <= step and job.poll() is None:
            time.sleep(0.05)
        if latest_step(two) > step:
            lines.append(f"the next step, {time.monotonic() - killed:.1f} s after the kill")
        job.wait(AT_MOST)
        if job.returncode:
            lines.append(
                f"machine 0's launcher ends, {time.monotonic() - killed:.1f} s after the kill"
            )
        last = [
            line
            for line in said.read_text().splitlines()
            if line.startswith(("PASS", "FAIL", "resumed", "torch.distributed."))
        ]
        return lines + last


def main(names):
    """Make the mistakes with these names (all); return the exit code."""
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        print(
            f"two_machines.py: error: no fault {unknown[0][:40]}: {' '.join(FAULTS)}",
            file=sys.stderr,
        )
        return 2
    for name in names or FAULTS:
        fault = FAULTS[name]
        print(f"{name}: {fault.mistake}", flush=True)
        for line in fault.run() if fault.run else make(fault):
            print("   ", line, flush=True)
        print("    cure:", fault.cure, flush=True)
    return 0


if __name__ == "__main__":
    be_rank() if sys.argv[1] == "rank" else be_launcher(sys.argv[2:])
