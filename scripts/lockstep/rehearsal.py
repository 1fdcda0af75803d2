"""Rehearse a lesson on two machines that are this one: a launcher at 127.0.0.2, one at 127.0.0.3.

Each launcher does what `machine` does when it has found its address and its port (ranks.py). Where
the system has no such addresses, as on a Mac, both are at 127.0.0.1.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep import ending, network, ranks, ssh
from lockstep.lessons import TORCHRUN

PACKAGE = Path(__file__).parent


def main(script, arguments):
    """Start both launchers, wait for them, and return the exit code."""
    own, flags = ranks.read_flags(script, arguments, fewest=2, default=4)
    if own.nproc > 8 or set(flags) - {"--json"}:  # else importing torch takes longer than we wait
        ranks.check(script, own.nproc, flags, ranks.Job())
    addresses = two_addresses()
    launchers = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        network.listen_at(addresses[0]) as listener,  # nobody else can take this port any more
    ):
        os.environ["TMPDIR"] = folder  # what a launcher leaves that is killed goes with it
        try:
            for node in (0, 1):
                launchers.append(start(script, node, own, flags, addresses, listener))
            code = ssh.wait(launchers)
            if code < 0:
                ending.say(f"a launcher was killed by {signal.Signals(-code).name}")
            return code if code >= 0 else 1
        finally:
            end(launchers)


def two_addresses():
    """Return the addresses of the two machines."""
    try:
        network.listen_at("127.0.0.3").close()
    except OSError:
        return "127.0.0.1", "127.0.0.1"
    return "127.0.0.2", "127.0.0.3"


def start(script, node, own, flags, addresses, listener):
    """Start the launcher of one machine; return its process. The first one gets the listener."""
    ranks_here = (own.nproc + 1 - node) // 2
    port = listener.getsockname()[1]
    environment = os.environ | {"LOCKSTEP_PARENT": str(os.getpid())}
    environment |= {"LOCKSTEP_NODES": ",".join(addresses), "LOCKSTEP_NODE_RANK": str(node)}
    environment |= {"LOCKSTEP_STORE": f"{addresses[0]} {port} 60"}
    environment |= {"LOCKSTEP_ADDRESS": addresses[node], "LOCKSTEP_RANKS": str(own.nproc)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # both machines would take the same GPUs
    if node == 0:
        environment["LOCKSTEP_LISTENER"] = str(listener.fileno())
    command = [sys.executable, PACKAGE, "inside", TORCHRUN, script]
    command += [f"--nproc={ranks_here}", f"--launcher={own.launcher}", "--", *flags]
    options = {"env": environment, "pass_fds": [listener.fileno()] * (node == 0)}
    return subprocess.Popen(command, **options)


def end(launchers):
    """Let each launcher end its ranks, and wait until it has; kill it if it has not."""
    for launcher in launchers:
        launcher.terminate()
    for launcher in launchers:
        try:
            launcher.wait(ssh.PATIENCE)
        except subprocess.TimeoutExpired:
            launcher.kill()
