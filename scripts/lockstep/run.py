"""Run a lesson for its launcher: a failure or Ctrl-C costs one line, and nothing is left behind.

    python scripts/lockstep lesson NN [--verbose] [--force] [flags of the lesson]

There are two processes. The first one, here, only watches. The second one (inside.py) runs the
lesson, in a process group of its own: so Ctrl-C in a terminal reaches the first one alone, and not
a rank in the middle of an import. The first one then asks the second to end (SIGTERM), and the
second turns that into a SystemExit: every `finally` and every `with` is left, ranks are ended,
folders are removed.

Exit codes: the lesson's own; 1 if it raised an error; 2 if a package or memory is missing; 130
after Ctrl-C; 143 after SIGTERM; 129 after SIGHUP. --verbose shows the whole traceback of an error;
--force starts the lesson although the memory is not enough.
"""

import contextlib
import os
import signal
import subprocess
import sys

from lockstep import ending, lessons, needs, network
from lockstep.flags import split_at_dashes

PATIENCE = 30  # seconds for a lesson to clean up, before it is killed: an import may take long
OF_A_JOB = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def main(arguments):
    """Run the lesson with this number on this machine; return the exit code."""
    number, *flags = arguments or ["--help"]
    lesson = lessons.find(number)
    if number in ("-h", "--help"):
        print(__doc__)
        return 0
    if lesson is None:
        ending.say(__doc__)
        return 2
    if problem := needs.problem(lesson, flags):
        ending.say(problem)
        return 2
    # Lesson 04 is about these variables, and sees them all.
    environment = loopback() | os.environ if lesson.number == "04" else on_this_machine_alone()
    return start(lesson.start, lesson.script, flags, environment)


# --- What a job finds in its environment ---


def on_this_machine_alone():
    """Return the environment of a job all of whose ranks are on this machine.

    Over gloo a rank listens at the address of the host's name, which others may reach: so gloo is
    told to use the loopback interface, whatever GLOO_SOCKET_IFNAME says. And the job does not see
    what another job's launcher has exported (RANK and the like).
    """
    hidden = [*OF_A_JOB, "GLOO_SOCKET_IFNAME"]
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return loopback() | kept


def loopback():
    """Return the setting that keeps gloo on this machine."""
    name = network.loopback()
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


# --- The process that watches ---


def start(how, script, flags, environment):
    """Run a script; `how` its ranks start is a word of lessons.py. Return the exit code."""
    environment = dict(environment)
    ours, theirs = split_at_dashes(flags)
    if "--verbose" in ours:
        environment["LOCKSTEP_VERBOSE"] = "1"
    else:
        # A rank that was ended leaves tqdm's lock. Python removes it, and would say so last.
        environment.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    ours = [flag for flag in ours if flag not in ("--verbose", "--force")]
    flags = [*ours, "--", *theirs] if theirs else ours
    package = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, package, "inside", how, str(script), *flags]
    return watch(command, environment)


def watch(command, environment, output=None, look=None, asked=None):
    """Run `command`; return its exit code. If we are asked to end, it ends first.

    `output` is a file for what it prints. look(process) is called five times in a second. `asked`
    is a list that gets the signals by which we are asked to end.
    """
    environment = environment | {"LOCKSTEP_PARENT": str(os.getpid())}
    options = {"process_group": 0, "stdin": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen(command, **options, stdout=output, stderr=output)
    asked = [] if asked is None else asked

    def ask(signal_number, frame):
        asked.append(signal_number)
        if len(asked) == 1:  # a second one would disturb it while it cleans up
            process.terminate()
            signal.alarm(PATIENCE)

    for signal_number in ending.WORDS:
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(signal_number, ask)
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    code = wait_for(process, look)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever the program has left
    if asked:
        ending.say_goodbye(asked[0])
        return 128 + asked[0]
    if code < 0:
        ending.say(f"the lesson was killed by {signal.Signals(-code).name}")
        return 128 - code
    return code


def wait_for(process, look):
    """Return the exit code of a process; look at it while it runs."""
    while True:
        try:
            return process.wait(0.2 if look else None)
        except subprocess.TimeoutExpired:
            look(process)
