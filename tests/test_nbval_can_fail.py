"""`pytest --nbval` turns red when it should, and only then.

First: when a lesson and its notebook disagree. Each case copies the repository into a folder with a
space in its name, breaks one thing there, and runs the notebook of lesson 01 up to the first red
cell. The cells before it are green: so the copy itself works, and it is the break that is seen.

Second: when a number that measured() prints leaves its bound, or when anything else changes. The
digits behind the sign may change.
"""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ENVIRONMENT, ROOT

NOTEBOOK = "notebooks/lesson_01_data_parallel.ipynb"
SCRIPT = "lessons/lesson_01_data_parallel.py"

# name: (file, what to replace, replacement, what the first red cell contains)
BREAKS = {
    "the replicas' gradients do not come back": (
        SCRIPT,
        "tensor.to(device) for tensor in tensors}",
        "tensor.detach().to(device) for tensor in tensors}",
        "show(lesson.data_parallel, ",
    ),
    "a number of the script": (SCRIPT, "lr=0.1", "lr=0.2", "show(lesson.train)"),
    "the launcher fails": ("scripts/lesson_01.sh", "set -euo pipefail", "exit 1", "launch(1,"),
}


def copy_of_the_repository(folder):
    """Copy what a notebook needs into `folder`; return the copy."""
    copy = folder / "a copy"
    for name in ("lessons", "notebooks", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "requirements.txt", "conftest.py", "CLAIMS.md"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases side by side; return {case: (exit code, output)}."""
    running = {}
    for case, (file, old, new, _) in BREAKS.items():
        copy = copy_of_the_repository(tmp_path_factory.mktemp("broken"))
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


# --- Numbers that were measured ---

STORED = "loss ≈0.412, error ≈4.4e-16 in 8 rows"
CELLS = {  # what the cell prints -> is it green?
    "print(f'loss {measured(0.412, 0, 1)}, error {measured(4.4e-16, 0, 1e-12)} in 8 rows')": True,
    "print(f'loss {measured(0.39751, 0, 1)}, error {measured(0, 0, 1e-12)} in 8 rows')": True,
    "print(f'loss {measured(1.2, 0, 1)}, error {measured(4.4e-16, 0, 1e-12)} in 8 rows')": False,
    "print('loss ≈0.412, error ≈4.4e-16 in 9 rows')": False,
    "print('cost ≈0.412, error ≈4.4e-16 in 8 rows')": False,
    "print('loss 0.412, error ≈4.4e-16 in 8 rows')": False,
}
START = "from nbtools import measured"


def write_notebook(path):
    """Write a notebook in which each cell has the same stored output, and prints one of CELLS."""
    cells = [nbformat.v4.new_code_cell(START, execution_count=1)]
    for number, source in enumerate(CELLS, start=2):
        output = nbformat.v4.new_output("stream", name="stdout", text=STORED + "\n")
        cells.append(nbformat.v4.new_code_cell(source, outputs=[output], execution_count=number))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.mark.parametrize("how", ["from the root", "by name", "from elsewhere", "in processes"])
def test_digits_behind_the_sign_may_change_and_nothing_else(how, tmp_path):
    copy = copy_of_the_repository(tmp_path)
    for path in (copy / "notebooks").glob("*.ipynb"):
        path.unlink()
    path = copy / "notebooks" / "lesson_99_measured.ipynb"
    write_notebook(path)
    command = [sys.executable, "-m", "pytest", "--nbval", "-rA", "-p", "no:cacheprovider"]
    command += {"from the root": ["notebooks"], "from elsewhere": [path]}.get(
        how, [f"notebooks/{path.name}"]
    )
    command += ["-n", "2"] if how == "in processes" else []
    where = tmp_path if how == "from elsewhere" else copy
    options = {"capture_output": True, "text": True, "timeout": 300}
    run = subprocess.run(command, cwd=where, env=ENVIRONMENT, **options)
    found = {int(n): word for word, n in re.findall(r"(PASSED|FAILED) \S.*Cell (\d+)", run.stdout)}
    expected = [True, *CELLS.values()]
    assert found == {n: "PASSED" if green else "FAILED" for n, green in enumerate(expected)}
