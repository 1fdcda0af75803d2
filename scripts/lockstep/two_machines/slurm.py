"""Try cluster/lesson.slurm under a real Slurm, which is started here on two machines that are one.

Here as on many clusters a task has one core and little memory unless it asks for more: it is bound
to its cores, and killed when it takes more memory than it has.
"""

import os
import re
import shutil
import subprocess
import sys
import time

from lockstep import machine
from lockstep.flags import Flags
from lockstep.lessons import ROOT
from lockstep.two_machines.namespaces import TwoMachines

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "sinfo", "munged")
CORES = os.cpu_count()
SYSTEM = ("/usr/sbin", "/sbin")  # where the daemons are, also if PATH lacks them
SETTINGS = """
ClusterName=lockstep
SlurmctldHost=machine0(10.14.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/mnt/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir=/mnt/%n
JobRequeue=0
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
NodeName=machine0 NodeAddr=10.14.0.1 CPUs={cores} RealMemory=8192
NodeName=machine1 NodeAddr=10.14.0.2 CPUs={cores} RealMemory=8192
PartitionName=all Nodes=machine0,machine1 Default=YES State=UP
"""


def main(arguments):
    """Submit lesson.slurm with these arguments (02); return the exit code of the job."""
    what, *flags = arguments or ["02"]
    parser = Flags("try_slurm.sh")
    machine.find_script(parser, what)  # leaves, before Slurm is started, if there is none
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *SYSTEM])
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        cure = "on Debian and Ubuntu: apt install slurmctld slurmd slurm-client munge"
        parser.error(f"it needs {', '.join(missing)} ({cure})")
    with TwoMachines() as two:
        os.environ["SLURM_CONF"] = write_settings(two.folder)
        with open(two.folder / "log", "w") as log:
            start_slurm(two, log)
        return submit(two, what, flags)


def write_settings(folder):
    """Write what Slurm's programs read; return the path of slurm.conf."""
    for name in ("state", "machine0", "machine1"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(os.urandom(1024))
    settings = folder / "slurm.conf"
    settings.write_text(SETTINGS.format(folder=folder, cores=CORES))
    return str(settings)


def start_slurm(two, log):
    """Start Slurm's daemons, and wait until both machines are ready; leave if they are not."""
    first, second = two.machines
    for place in two.machines:  # sockets lie there: their paths have at most 107 letters
        place.do("mount", "--bind", two.folder, "/mnt")
    socket = two.folder / "munge.socket"
    files = [f"--{name}-file={two.folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    streams = {"stdout": log, "stderr": log}
    first.start(
        "munged", "--foreground", "--force", "--socket=/mnt/munge.socket", *files, **streams
    )
    end = time.monotonic() + 60
    while not socket.exists() and time.monotonic() < end:
        time.sleep(0.05)
    for place, daemon in ((first, "slurmctld"), (first, "slurmd"), (second, "slurmd")):
        place.start(daemon, "-D", **streams)
    ask = first.enter("sinfo", "--noheader", "--states=idle", "--format=%D")
    while subprocess.run(ask, capture_output=True, text=True).stdout.strip() != "2":
        if time.monotonic() > end:
            give_up(two, "Slurm did not start")
        time.sleep(0.1)


def submit(two, what, flags):
    """Submit the file, with no more cores than there are; print what the job says, and wait for it.

    Return its exit code.
    """
    file, output = ROOT / "scripts" / "cluster" / "lesson.slurm", two.folder / "output"
    cores = re.search(r"(?m)^#SBATCH --cpus-per-task=(\d+)$", file.read_text())[1]
    enter, options = two.machines[0].enter, {"stdout": subprocess.PIPE, "text": True}
    command = ["sbatch", "--parsable", f"--output={output}"]
    command = enter(*command, f"--cpus-per-task={min(int(cores), CORES)}", file, what, *flags)
    environment = two.environment() | {"LOCKSTEP_PYTHON": sys.executable}
    job = subprocess.run(command, env=environment, **options).stdout.strip()
    if not job:
        return 1  # sbatch has said why
    state = "PENDING"
    while state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        time.sleep(0.2)  # (sbatch --wait looks after ten seconds, then after thirty)
        facts = subprocess.run(enter("scontrol", "show", "job", job), **options).stdout
        state, code = re.search(r"JobState=(\w+).*ExitCode=(\d+)", facts, re.DOTALL).groups()
    if not output.exists():
        give_up(two, f"the job has not run: {state}")
    print(output.read_text(), end="")
    return int(code)


def give_up(two, why):
    """Leave with the last words of Slurm's daemons, and ours."""
    last = (two.folder / "log").read_text().splitlines()[-5:]
    sys.exit("\n".join([*last, f"try_slurm.sh: error: {why}"]))
