"""What becomes of a function that is killed: in a write, or before one of its steps."""

import os
import resource
import signal
import sys


def fate(function, *args, moment=None, limit=None, kills=True):
    """Call function(*args) in a fork of this process; return its exit code: 0 at its end.

    It is killed just before its `moment`-th step, from 1 on: a line of its file, or a file that is
    renamed, removed or truncated, wherever that is written. With a `limit` it is killed when a file
    of it gets more bytes; without `kills` such a write is an OSError, as on a full disk. The code
    is negative for a kill, the errno of an OSError, 1 for another error.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if limit is not None:  # the kernel sends SIGXFSZ, which Python ignores
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file about the child's end
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        elif moment is not None:
            die_before(moment, function.__code__.co_filename)
        function(*args)
        os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    finally:
        os._exit(1)


def die_before(moment, file):
    """Let this process be killed before the `moment`-th line of a file, or change of a name."""
    steps = 0

    def count(event, *_):
        nonlocal steps
        if event in ("line", "os.rename", "os.remove", "os.truncate"):
            steps += 1
            if steps == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame, event, _):
        if frame.f_code.co_filename != file:
            return None
        count(event)
        return trace

    sys.addaudithook(count)  # Python calls it before it renames or removes
    sys.settrace(trace)
