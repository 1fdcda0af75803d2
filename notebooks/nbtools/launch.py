"""Run the launcher of a lesson, as a reader does in a terminal."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from nbtools.group import process_group
from nbtools.run import RankFailed

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 5  # seconds that ranks have to end politely, with torchrun and with us


class LaunchFailed(RankFailed):
    """A lesson's launcher ended with an error. `details` has all of its output."""


def launch(lesson, deadline=300, **flags):
    """Run `scripts/lesson_NN.sh --json` with `flags` and return its last line as a dict.

    `batch_size=30` becomes `--batch-size 30`; True becomes a flag without a value. Raises
    LaunchFailed, with the last line of stderr, when the exit code is not 0 or time is up. In any
    case the launcher and its ranks end, also when this process is interrupted or killed.
    """
    command = ["bash", str(ROOT / "scripts" / f"lesson_{lesson:02}.sh"), "--json"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    # torchrun's ranks are not in the launcher's process group: torchrun itself has to end them. So
    # it is asked politely first, and gets the time that it gives its ranks, and a little more.
    farewell = f"kill -TERM 0; sleep {PATIENCE + 3}"
    settings = {
        "LOCKSTEP_PYTHON": sys.executable,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(PATIENCE),
    }
    with process_group(farewell) as group:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=group,
            env={**os.environ, **settings},
        )
        try:
            stdout, stderr = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"lesson {lesson:02} had not finished after {deadline} s") from None
        finally:
            _end(process, group)
    if process.returncode != 0:
        last = (stderr.strip() or stdout.strip() or "no output").splitlines()[-1]
        message = f"lesson {lesson:02} ended with exit code {process.returncode}: {last}"
        raise LaunchFailed(message, stdout + stderr)
    return json.loads(stdout.splitlines()[-1])


def _end(process, group):
    """End a launcher and its process group: politely first, because torchrun has ranks to end."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(group, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE + 3)
