"""What several tests need: starting a lesson as a reader does, and the record of proven claims."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "LOCKSTEP_PYTHON": sys.executable}

# A shell starts a background job with SIGINT ignored. What the tests start would inherit that, and
# would never hear the interrupt that they send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A framework's name for `import`, and for pip. Without it, what needs it is skipped.
FRAMEWORKS = {"tensorflow": "tensorflow", "paddle": "paddlepaddle"}
MISSING = {name: pip for name, pip in FRAMEWORKS.items() if importlib.util.find_spec(name) is None}
NOTEBOOKS_NEED = {"lesson_07": ["tensorflow"], "lesson_08": ["paddle", "tensorflow"]}

# Test function ("tests/test_x.py::test_y") -> outcomes of its runs in this session.
OUTCOMES = {}
UNPROVEN = []


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
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # after 300 s: also its ranks
    return Finished(process.args, process.returncode, stdout, stderr)


def read_claims():
    """Return {claim id: (verdict, [tests])} from the tables of CLAIMS.md."""
    rows = {}
    for line in (ROOT / "CLAIMS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[A-E]\d+", cells[0]):
            assert cells[0] not in rows, f"two rows for {cells[0]}"
            rows[cells[0]] = (cells[2], re.findall(r"`(tests/\S+?\.py::\w+)`", cells[4]))
    return rows


def unproven(rows, outcomes):
    """Return a line for each test of a claim that was selected and did not pass.

    A skipped test proves nothing: the verdict must say that it needs a GPU. A test that is not in
    `outcomes` was not selected in this run: it can't be judged. Nor can one whose framework is not
    installed: the run ends with a line about that.
    """
    lines = []
    for claim, (verdict, tests) in rows.items():
        for test in tests:
            seen = set(outcomes.get(test, ["passed"])) - {"not installed"} or {"passed"}
            if seen != {"passed"} and not (seen == {"skipped"} and "GPU" in verdict):
                lines.append(f"{claim} is not proven: {test} {', '.join(sorted(seen))}")
    return lines


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU, or a framework, that is not here."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        needed = [name for mark in item.iter_markers("needs") for name in mark.args]
        if item.path.suffix == ".ipynb":
            needed = NOTEBOOKS_NEED.get(item.path.name[: len("lesson_NN")], [])
        for name in needed:
            if name in MISSING:
                item.add_marker(pytest.mark.skip(reason=f"{MISSING[name]} is not installed"))


def pytest_runtest_logreport(report):
    """Remember how each test ended; a skip counts as a skip, not as a pass."""
    if report.when == "call" or report.outcome != "passed":
        not_installed = report.skipped and "is not installed" in str(report.longrepr)
        outcome = "not installed" if not_installed else report.outcome
        OUTCOMES.setdefault(report.nodeid.split("[")[0], []).append(outcome)


def pytest_sessionfinish(session):
    """Fail the run if it left a claim unproven."""
    if hasattr(session.config, "workerinput"):
        return  # one of several processes of pytest-xdist: the one that started them judges
    UNPROVEN.extend(unproven(read_claims(), OUTCOMES))
    if UNPROVEN and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Name the claims that this run did not prove, and the frameworks that it lacked."""
    if UNPROVEN:
        terminalreporter.section("claims of CLAIMS.md that were not proven", red=True)
        for line in UNPROVEN:
            terminalreporter.line(line)
    if any("not installed" in outcomes for outcomes in OUTCOMES.values()):
        names = " and ".join(MISSING.values())
        terminalreporter.line(f"skipped what needs {names}: not installed here")
