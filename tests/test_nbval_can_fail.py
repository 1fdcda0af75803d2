"""`pytest --nbval` turns red when a lesson and its notebook disagree.

Each case copies the repository into a folder with a space in its name, breaks one thing there, and
runs the notebook of lesson 01. The unbroken copy must pass: otherwise red means nothing.
"""

import shutil
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT

NOTEBOOK = "notebooks/lesson_01_data_parallel.ipynb"
SCRIPT = "lessons/lesson_01_data_parallel.py"

# name: (file, what to replace, replacement)
BREAKS = {
    "nothing": (SCRIPT, "", ""),
    "the gradients are not added up": (SCRIPT, "ours.grad += send", "ours.grad += 0 * send"),
    "a comment in a shown function": (SCRIPT, "# stops at `gathered`:", "# ends at `gathered`:"),
    "the launcher fails": ("scripts/lesson_01.sh", "set -euo pipefail", "exit 1"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases side by side; return {case: (exit code, output)}."""
    running = {}
    for case, (file, old, new) in BREAKS.items():
        copy = tmp_path_factory.mktemp("broken") / "a copy"
        for folder in ("lessons", "notebooks", "scripts"):
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
        for name in ("pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / name, copy)
        source = (copy / file).read_text(encoding="utf-8")
        assert old in source
        (copy / file).write_text(source.replace(old, new, 1), encoding="utf-8")
        running[case] = subprocess.Popen(
            [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", NOTEBOOK],
            cwd=copy,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return {
        case: (process.communicate(timeout=110)[0], process.returncode)
        for case, process in running.items()
    }


def test_an_unbroken_copy_is_green(outcomes):
    output, code = outcomes["nothing"]
    assert code == 0, output[-2000:]


@pytest.mark.parametrize("case", [case for case in BREAKS if case != "nothing"])
def test_a_broken_copy_is_red(outcomes, case):
    output, code = outcomes[case]
    assert code == 1, output[-2000:]  # 1: tests ran and some failed; 2 to 5 would be pytest's own
    assert "FAILED" in output
