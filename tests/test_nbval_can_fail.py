"""`pytest --nbval` turns red when a lesson and its notebook disagree.

Each case copies the repository into a folder with a space in its name, breaks one thing there, and
runs the notebook of lesson 01 up to the first red cell. The cells before it are green: so the copy
itself works, and it is the break that is seen.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT

NOTEBOOK = "notebooks/lesson_01_data_parallel.ipynb"
SCRIPT = "lessons/lesson_01_data_parallel.py"

# name: (file, what to replace, replacement, what the first red cell contains)
BREAKS = {
    "the gradients are not added up": (
        SCRIPT,
        "ours.grad += send",
        "ours.grad += 0 * send",
        "lesson.add_gradients",
    ),
    "a comment in a shown function": (
        SCRIPT,
        "# stops at `gathered`:",
        "# ends at `gathered`:",
        "show(lesson.data_parallel_step)",
    ),
    "the launcher fails": ("scripts/lesson_01.sh", "set -euo pipefail", "exit 1", "launch(1,"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases side by side; return {case: (exit code, output)}."""
    running = {}
    for case, (file, old, new, _) in BREAKS.items():
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
            [sys.executable, "-m", "pytest", "--nbval", "-x", "-p", "no:cacheprovider", NOTEBOOK],
            cwd=copy,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return {
        case: (process.communicate(timeout=300)[0], process.returncode)
        for case, process in running.items()
    }


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_copy_is_red_in_the_cell_that_shows_it(outcomes, case):
    output, code = outcomes[case]
    assert code == 1, output[-2000:]  # 1: tests ran and some failed; 2 to 5 would be pytest's own
    summary = re.search(r"1 failed, (\d+) passed", output)
    assert summary, output[-2000:]
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    first_red = "".join(code_cells[int(summary.group(1))]["source"])
    assert BREAKS[case][3] in first_red
