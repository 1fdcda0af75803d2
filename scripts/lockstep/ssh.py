"""Start `machine` on each of several machines by ssh, and end all when one fails.

bash scripts/cluster/ssh.sh HOST,HOST WHAT [--nproc RANKS] [--wait SECONDS] [flags of WHAT]

WHAT is a lesson's number, "doctor", or a training script of yours. What follows "--" is handed to
it as it is. A script runs in the folder in which you call this, which all machines must have.
docs/several_machines.md says what the machines need.
"""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep import ending, machine, network
from lockstep.flags import Flags
from lockstep.lessons import ROOT

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
PATIENCE = 15  # seconds for the other machines to say why they fail, and to clean up


def remote(folder, arguments):
    """Return what ssh is to run there, in this folder: the Python of that machine, and lockstep."""
    home, folder = shlex.quote(str(ROOT / "scripts" / "lockstep")), shlex.quote(str(folder))
    missing = shlex.quote(f"not on this machine: the folder {folder}, where the script is to run")
    command = f"""python=$(bash {home}/python.sh) || exit
        cd {folder} 2>/dev/null || {{ echo {missing} >&2; exit 2; }}
        exec "$python" {home} {shlex.join(arguments)}"""
    return f"exec bash -c {shlex.quote(command)}"  # whatever the login shell there is


def start(hosts, port, what, flags):
    """Start `machine` on each machine. It ends when its stdin, which we hold, is closed."""
    processes = []
    nodes = ",".join(host.rpartition("@")[2] for host in hosts)
    for number, host in enumerate(hosts):
        own = [f"--nodes={nodes}", f"--node-rank={number}", f"--port={port}"]
        folder = Path.cwd() if os.path.isabs(what) else ROOT  # a script, or what is ours
        command = remote(folder, ["machine", what, *own, "--end-with-stdin", *flags])
        there = [*SSH, host, command]
        processes.append(subprocess.Popen(there, stdin=subprocess.PIPE, start_new_session=True))
    return processes


def wait(processes):
    """Return the exit code: the first that is not 0. Then the others have some seconds left."""
    code, end, codes = 0, float("inf"), [None]
    while None in codes and time.monotonic() < end:
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
        if code == 0 and any(codes):
            code, end = next(filter(None, codes)), time.monotonic() + PATIENCE
    return code


def end(processes):
    """Let each machine end its ranks, and wait until it has."""
    for process in processes:
        process.stdin.close()
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def main(arguments):
    """Run something on the machines that are named; return the exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    parser = Flags("ssh.sh")
    if len(arguments) < 2 or not re.fullmatch(machine.HOSTS, arguments[0]):
        parser.error("expected HOST,HOST and a lesson, doctor, or a script")
    hosts, (what, *flags) = arguments[0].split(","), arguments[1:]
    what = machine.whole_path(parser, what)
    for number in ending.WORDS:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    processes = []
    try:
        processes += start(hosts, random.choice(network.PORTS), what, flags)
        return wait(processes)
    except SystemExit as stop:
        if isinstance(stop.code, int):
            ending.say_goodbye(stop.code - 128)
        raise
    finally:
        for number in ending.WORDS:
            signal.signal(number, signal.SIG_IGN)
        end(processes)
