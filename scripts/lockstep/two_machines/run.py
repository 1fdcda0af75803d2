"""Run a lesson on two machines that are one: two network namespaces, joined by a cable.

    bash scripts/two_machines.sh LESSON [--nproc RANKS] [--rendezvous static|c10d]
        [--rate MBIT] [--delay MS] [--cut SECONDS] [--verbose] [flags of the lesson]
    bash scripts/two_machines.sh faults [NAME ...]

LESSON is 14, or the number of any other lesson that torchrun starts (02) or that starts its ranks
with launch_job(func, nproc, ...) (03). It needs Linux, and to be run as root; machines.py
makes the namespaces, and `faults` is machine_faults.py.

--nproc       ranks on both machines together (4); the first one has the odd one
--rate        the cable carries so many megabits per second
--delay       each packet arrives so many milliseconds later (the kernel needs netem)
--cut         the cable is cut so many seconds after the start
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from lockstep import ending, lessons
from lockstep.two_machines import faults
from lockstep.two_machines.namespaces import ADDRESSES, PORT, TwoMachines

RANK = lessons.ROOT / "scripts" / "lockstep" / "rank.py"
OWN = {"--nproc": "4", "--rate": "0", "--delay": "0", "--cut": "0", "--rendezvous": "static"}


def refuse(text):
    """Leave with one line and exit code 2."""
    print(f"two_machines.py: error: {text}", file=sys.stderr)
    sys.exit(2)


def read_flags(arguments):
    """Return (our own flags, the flags of the lesson); leave with one line if one is wrong."""
    own, flags = dict(OWN), []
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name not in own:
            flags.append(name + equals + value)
        elif equals or arguments:
            own[name] = value if equals else arguments.pop(0)
        else:
            refuse(f"argument {name}: expected one argument")
    for name in ("--nproc", "--rate", "--delay", "--cut"):
        if not re.fullmatch("[0-9]{1,6}", own[name]):
            refuse(f"argument {name}: must be a whole number, not '{own[name][:40]}'")
    if not 2 <= int(own["--nproc"]) <= 64:
        refuse(f"argument --nproc: must be from 2 to 64, not {own['--nproc']}")
    if own["--rendezvous"] not in ("static", "c10d"):
        refuse(f"argument --rendezvous: must be static or c10d, not '{own['--rendezvous'][:40]}'")
    return own, flags


def find_lesson(number):
    """Return a lesson whose ranks can be on two machines; leave with one line if it is none."""
    lesson = lessons.find(number)
    if lesson is None:
        refuse(f"argument LESSON: there is no lesson '{number[:40]}'")
    if lesson.start not in lessons.ON_SEVERAL_MACHINES:
        refuse(
            f"argument LESSON: lesson {number} stays on one machine: no launcher starts its ranks"
        )
    return lesson


def check(script, flags, ranks):
    """Let the lesson check its flags, as its rank 0, before there is any machine; leave with 2."""
    place = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(script), "--check", *flags]
    if subprocess.run(command, env=os.environ | place).returncode:
        sys.exit(2)  # it has said why
    if {"-h", "--help"} & set(flags):
        sys.exit()


def torchrun(node, ranks, rendezvous, program, flags):
    """Return the command of machine `node`, of two."""
    ranks_here = (ranks + 1 - node) // 2
    command = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks_here}"]
    if rendezvous == "c10d":
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=machine0:{PORT}", "--rdzv-id=lesson"]
    else:
        command += [f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}"]
        command += [f"--master-port={PORT}"]
    return [sys.executable, *command, program, *flags]


def run(two, script, own, flags):
    """Run the lesson on two machines; return the exit code."""
    ends = Path(two.folder.name, "ends")
    ends.mkdir()
    environment = {"LOCKSTEP_SCRIPT": str(script), "LOCKSTEP_ENDS": str(ends)}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    launchers, logs = [], [Path(two.folder.name, f"stderr_{node}") for node in (0, 1)]
    for node, machine in enumerate(two.machines):
        command = torchrun(node, int(own["--nproc"]), own["--rendezvous"], RANK, flags)
        with open(logs[node], "w") as log:
            options = {"env": {**os.environ, **environment}, "stderr": log}
            launchers.append(machine.start(*command, **options))
    since_cut = wait(two, launchers, int(own["--cut"]))
    if not any(launcher.returncode for launcher in launchers):
        return 0
    said = "".join(log.read_text() for log in logs).strip() or "the launchers have said nothing"
    if os.environ.get("LOCKSTEP_VERBOSE") == "1":
        print(said, file=sys.stderr)
    why = ending.explain({}, ends)
    if not any(ends.iterdir()):  # no rank has come to its end: the launchers know why
        why = said.splitlines()[-1]
    if why:
        after = f"{since_cut:.0f} s after the cut: " if since_cut else ""
        print(after + why, file=sys.stderr)
    return 1


def wait(two, launchers, cut):
    """Wait until both launchers have ended, or one has failed; cut the cable after `cut` seconds.

    Return the seconds since the cut, or None if there was none.
    """
    start, moment = time.monotonic(), None
    while any(job.poll() is None for job in launchers) and not any(job.poll() for job in launchers):
        time.sleep(0.05)
        if cut and moment is None and time.monotonic() - start >= cut:
            two.cut()
            moment = time.monotonic()
    return moment and time.monotonic() - moment


def main(arguments):
    """Run a lesson or the faults; return the exit code."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0
    what, *arguments = arguments
    if what == "faults":
        return faults.main(arguments)
    own, flags = read_flags(arguments)
    lesson = find_lesson(what)
    its_own = ["--nproc", own["--nproc"]] if lesson.start == lessons.LAUNCH_JOB else []
    check(lesson.script, flags + its_own, int(own["--nproc"]))
    with TwoMachines() as two:
        if int(own["--rate"]) or int(own["--delay"]):
            try:
                two.limit(int(own["--rate"]), int(own["--delay"]))
            except subprocess.CalledProcessError as error:
                refuse(f"the cable can't be made slow: tc says: {error.stderr.strip()[:200]}")
        return run(two, lesson.script, own, flags)
