"""Run the launcher of a lesson, as a reader does in a terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from nbtools.run import RankFailed

ROOT = Path(__file__).resolve().parent.parent.parent


class LaunchFailed(RankFailed):
    """A lesson's launcher ended with an error. `details` has all of its output."""


def launch(lesson, deadline=300, **flags):
    """Run `scripts/lesson_NN.sh --json` with `flags` and return its last line as a dict.

    `batch_size=30` becomes `--batch-size 30`; True becomes a flag without a value. Raises
    LaunchFailed, with the last line of stderr, when the exit code is not 0 or time is up.
    """
    command = ["bash", str(ROOT / "scripts" / f"lesson_{lesson:02}.sh"), "--json"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "LOCKSTEP_PYTHON": sys.executable},
    )
    try:
        stdout, stderr = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"lesson {lesson:02} had not finished after {deadline} s") from None
    finally:
        _end_session(process)
    if process.returncode != 0:
        last = (stderr.strip() or stdout.strip() or "no output").splitlines()[-1]
        message = f"lesson {lesson:02} ended with exit code {process.returncode}: {last}"
        raise LaunchFailed(message, stdout + stderr)
    return json.loads(stdout.splitlines()[-1])


def _end_session(process):
    """End a launcher and its workers: first politely, because torchrun has workers to end."""
    for signal_number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(patience)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue
