"""Run a lesson for its launcher: a failure or Ctrl-C costs one line, and nothing is left behind.

    python scripts/run_lesson.py [torchrun.py] LESSON.py [--verbose] [--force] [flags of the lesson]

There are two processes. The first one only watches. The second one runs the program, in a process
group of its own: so Ctrl-C in a terminal reaches the first one alone, and not a rank in the middle
of an import. The first one then asks the second to end (SIGTERM), and the second turns that into a
SystemExit: every `finally` and every `with` is left, ranks are ended, folders are removed.

Exit codes: the program's own; 1 if it raised an error; 2 if a package or memory is missing; 130
after Ctrl-C; 143 after SIGTERM. --verbose shows the whole traceback of an error; --force starts the
lesson although the memory is not enough.

Over gloo a rank listens at the address of the host's name, which others may reach. All ranks of a
lesson are here, so gloo is told to use the loopback interface, whatever GLOO_SOCKET_IFNAME says.
For the same reason a lesson does not see what another job's launcher has exported (RANK and the
like). Lesson 04 is about these variables, and its ranks can be started by hand: it sees them all.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import needs

PATIENCE = 10  # seconds for a lesson to clean up, before it is killed
OF_A_JOB = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


def watch(command):
    """Run `command`; return its exit code. If we are asked to end, it ends first."""
    asked, running = [], []

    def ask(signal_number, frame):
        asked.append(signal_number)
        for process in running:
            process.terminate()
        signal.alarm(PATIENCE)

    for signal_number in WORDS:
        signal.signal(signal_number, ask)
    process = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    running.append(process)
    if asked:  # before there was anybody to be asked
        process.terminate()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever the program has left
    if asked:
        print(f"{WORDS[asked[0]]}: all that was started has ended", file=sys.stderr)
        return 128 + asked[0]
    if code < 0:
        print(f"the lesson was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return 128 - code
    return code


def run(program, flags):
    """Run `program` as if Python had been called with it; return its exit code."""
    end_with_parent(signal.SIGTERM)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, leave)
    sys.argv = [program, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            raise
        lines = stop.code.strip().splitlines()
        print("\n".join(lines if verbose() else lines[-1:]), file=sys.stderr)
        return 1
    except Exception as error:
        if verbose():
            traceback.print_exc()
        print(f"{os.path.basename(program)} failed: {reason(error)}", file=sys.stderr)
        return 1
    return 0


def leave(signal_number, frame):
    """Raise SystemExit; in the middle of an import or of starting a process, a little later.

    A module in C that is interrupted while it is imported may swallow a SystemExit, so that the
    lesson would go on, or make an ImportError of it. A process that multiprocessing has started,
    but not yet told what to do, would print a traceback.
    """
    busy, caller = False, frame
    while caller:
        importing = caller.f_code.co_filename.startswith("<frozen importlib")
        starting = caller.f_code.co_qualname == "Popen._launch"
        busy = busy or importing or starting
        caller = caller.f_back
    if not busy:
        sys.exit(128 + signal_number)
    signal.signal(signal.SIGALRM, lambda _, later: leave(signal_number, later))
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def end_with_parent(signal_number):
    """Linux: be sent this signal when our parent ends, however it ends."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)


def reason(error):
    """Return what went wrong, in one line of at most 300 characters."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def verbose():
    """Return whether the reader wants to see whole tracebacks."""
    return os.environ.get("LOCKSTEP_VERBOSE") == "1"


def main():
    """Be the first process; it calls this file again with --inside for the second."""
    arguments = sys.argv[1:]
    if arguments[0] == "--inside":
        return run(arguments[1], arguments[2:])
    if "--verbose" in arguments:
        os.environ["LOCKSTEP_VERBOSE"] = "1"
    lesson = arguments[0] if Path(arguments[0]).name != "torchrun.py" else arguments[1]
    if problem := needs.problem(lesson, arguments):
        print(problem, file=sys.stderr)
        return 2
    if not verbose():
        # A rank that was ended leaves tqdm's lock. Python removes it, and would say so last.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    arguments = [flag for flag in arguments if flag not in ("--verbose", "--force")]
    if not Path(lesson).name.startswith("lesson_04"):
        for name in [*OF_A_JOB, "GLOO_SOCKET_IFNAME"]:
            os.environ.pop(name, None)
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return watch([sys.executable, __file__, "--inside", *arguments])


if __name__ == "__main__":
    sys.exit(main())
