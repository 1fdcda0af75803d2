"""Be one machine of several that run a lesson, or the doctor, together.

    python scripts/node.py LESSON --nodes HOST,HOST --node-rank N --port PORT
                           [--nproc RANKS] [--wait SECONDS] [flags of the lesson]

LESSON is a number, or "doctor" (scripts/doctor.py: look at the network before a long job).
--nodes names all machines, in the same order everywhere; --node-rank says which of them this one
is; --port is free on the first. --nproc: ranks on this machine, 2 by default. What is in cluster/
(for Slurm, Kubernetes, ssh) calls it once on each machine, with the same values but for
--node-rank. It does what this does, by hand:

    torchrun --nnodes=2 --node-rank=N --nproc-per-node=2 --master-addr=HOST --master-port=PORT \\
        lessons/lesson_02_launch_ddp.py

and four things more. It waits until the names of all machines are known, and for the machines
themselves, and names one that does not come. It lets gloo use the interface that leads to the other
machines, because a host's own name is often 127.0.1.1 (GLOO_SOCKET_IFNAME, if you have set it,
counts). The store listens at that interface only. And an error costs one line (torchrun.py).

Each machine needs this repository and a Python with requirements.txt (scripts/python.sh says which
is taken). Lessons 05 and 06 write files: TMPDIR, or their own flag for a folder, must name one that
all machines share. Else 06 fails, and 05 leaves event files on the other machines. There is no
password: a machine trusts all that reach it (README.md, Who can reach a running lesson).
"""

import os
import re
import sys
import time
from pathlib import Path

import needs
import network as net

ROOT = Path(__file__).resolve().parent.parent

STDIN_CLOSED = "--end-with-stdin"  # the ssh loop: nobody is left if its terminal has gone


def refuse(text, code=2):
    """Leave with one line on stderr."""
    print(f"node.py: error: {text}", file=sys.stderr)
    sys.exit(code)


def find_script(name):
    """Return the script that runs on each rank; leave if its ranks can't be on several machines."""
    if name == "doctor":
        return ROOT / "scripts" / "doctor.py"
    number = name.zfill(2)
    found = [*(ROOT / "lessons").glob(f"lesson_{number}_*.py")] if number.isdecimal() else []
    if not found:
        refuse(f"there is no lesson {name[:40]!r}; take a number, or doctor")
    can = [path.stem[-2:] for path in sorted((ROOT / "scripts").glob("lesson_*.sh")) if fits(path)]
    if number not in can:
        alone = found[0].stem.startswith(needs.ONE_PROCESS)
        why = "is one process" if alone else "starts its own ranks, all on one machine"
        refuse(f"lesson {number} {why}; on several machines run {', '.join(can)} or doctor")
    return found[0]


def fits(launcher):
    """Return whether a lesson's launcher uses torchrun, which knows several machines."""
    return "/torchrun.py" in launcher.read_text()


def read_flags(arguments):
    """Return (script, the values of our own flags, what is left for the lesson)."""
    own = {"--nodes": "", "--node-rank": "", "--port": "", "--nproc": "2", "--wait": "120"}
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0)
    name, *rest = arguments
    flags = []
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in own:
            flags.append(flag + equals + value)
        elif equals or rest:
            own[flag] = value if equals else rest.pop(0)
        else:
            refuse(f"argument {flag}: expected one argument")
    script = find_script(name)
    nodes = own["--nodes"].split(",")
    if not re.fullmatch(r"[\w:][\w.:%-]*(,[\w:][\w.:%-]*)*", own["--nodes"]):
        refuse("argument --nodes: must be host names or addresses, with commas between them")
    for flag, highest in (("--node-rank", len(nodes) - 1), ("--port", 65535), ("--wait", 86400)):
        if not re.fullmatch("[0-9]{1,5}", own[flag]) or int(own[flag]) > highest:
            refuse(f"argument {flag}: must be from 0 to {highest}, not {own[flag][:40]!r}")
    return script, nodes, own, flags


def find_way(nodes, node_rank, seconds):
    """Return (this machine's address on the way to the others, the first machine's address).

    Waits until the names are known: in Kubernetes they are not, before the pods have addresses.
    """
    end = time.monotonic() + seconds
    while True:
        known = {node: net.addresses_of(node) for node in nodes}
        unknown = [node for node, addresses in known.items() if not addresses]
        if not unknown:
            break
        if time.monotonic() > end:
            refuse(f"nobody knows the address of {', '.join(unknown)}: see --nodes, and DNS", 1)
        time.sleep(1)
    others = [node for node in nodes if node != nodes[node_rank]] or nodes
    try:
        here = net.address_towards(known[others[0]][0])
    except OSError as error:
        refuse(f"no way to {others[0]} ({known[others[0]][0]}): {error.strerror}", 1)
    return here, here if node_rank == 0 else known[nodes[0]][0]


def main():
    """Set the environment, then become the launcher of a lesson."""
    arguments = [argument for argument in sys.argv[1:] if argument != STDIN_CLOSED]
    script, nodes, own, flags = read_flags(arguments)
    node_rank = int(own["--node-rank"])
    here, first = find_way(nodes, node_rank, int(own["--wait"]))
    interface = net.interface_of(here)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ["LOCKSTEP_NODES"] = ",".join(nodes)
    os.environ["LOCKSTEP_NODE_RANK"] = str(node_rank)
    os.environ["LOCKSTEP_STORE"] = f"{first} {own['--port']} {own['--wait']}"
    scripts = [ROOT / "scripts" / name for name in ("run_lesson.py", "torchrun.py")]
    command = [sys.executable, *scripts, script, f"--nproc={own['--nproc']}", *flags]
    command = [str(part) for part in command]
    if STDIN_CLOSED in sys.argv:
        end_with_stdin(command)
    os.execv(sys.executable, command)


def end_with_stdin(command):
    """Run the command; end it when nobody holds our stdin open any more. Does not return."""
    import subprocess
    import threading

    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def wait_for_end():
        while os.read(0, 1024):
            pass
        process.terminate()  # run_lesson.py then ends all that it has started

    threading.Thread(target=wait_for_end, daemon=True).start()
    code = process.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
