"""A process group that ends with us, however we end."""

import contextlib
import os
import signal
import subprocess


@contextlib.contextmanager
def process_group(farewell):
    """Yield the number of a new process group. At the end of the block, all that is in it is ended.

    The same happens when this process is gone, even by SIGKILL: the leader of the group is a shell
    that waits for the end of its input, a pipe whose other end only we have. It then runs the
    shell command `farewell` and kills the group.
    """
    script = f"trap '' TERM; read line; {farewell}; kill -KILL 0"
    leader = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, process_group=0)
    try:
        yield leader.pid
    finally:
        # The leader is our child. Before we wait for it, nobody else is given its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.stdin.close()
        leader.wait()
