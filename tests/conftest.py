"""What several tests need: starting a lesson as a reader does, and the record of proven claims."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "LOCKSTEP_PYTHON": sys.executable}

# Test function ("tests/test_x.py::test_y") -> outcomes of its runs in this session.
OUTCOMES = {}


class Finished(subprocess.CompletedProcess):
    """A launcher that has ended."""

    @property
    def json(self):
        """Return the last line of stdout as a dict."""
        return json.loads(self.stdout.splitlines()[-1])


def start_lesson(number, *flags, cwd=ROOT, **options):
    """Start scripts/lesson_NN.sh in a session of its own; return the running process."""
    command = ["bash", str(ROOT / "scripts" / f"lesson_{number:02}.sh"), *map(str, flags)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def run_lesson(number, *flags, **options):
    """Run scripts/lesson_NN.sh to its end; return its exit code, stdout and stderr."""
    process = start_lesson(number, *flags, **options)
    stdout, stderr = process.communicate(timeout=110)
    return Finished(process.args, process.returncode, stdout, stderr)


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU; run test_claims.py after all that it asks about."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: item.nodeid.startswith("tests/test_claims.py"))


def pytest_runtest_logreport(report):
    """Remember how each test ended; a skip counts as a skip, not as a pass."""
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES.setdefault(report.nodeid.split("[")[0], []).append(report.outcome)
