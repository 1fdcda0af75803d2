"""`pytest --nbval` turns red when it should, and only then.

The repository is copied into a folder with a space in its name. There, lesson 01 and its notebook
are made to disagree in three places: the cells that show these places must turn red, and no other.
Beside it lies a notebook about numbers that measured() prints: their digits may change, and nothing
else, and no number may leave its bound.
"""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ENVIRONMENT, ROOT

NOTEBOOK = "lesson_01_data_parallel.ipynb"
SCRIPT = "lessons/lesson_01_data_parallel.py"

# What is broken: (file, what to replace, replacement, the cell that must turn red)
BREAKS = {
    "the replicas' gradients do not come back": (
        SCRIPT,
        "tensor.to(device) for tensor in tensors}",
        "tensor.detach().to(device) for tensor in tensors}",
        "show(lesson.data_parallel, ",
    ),
    "a line of the script": (
        SCRIPT,
        "loss.backward()  # each",
        "(2 * loss).backward()  # each",
        "show(lesson.train)",
    ),
    "the launcher fails": ("scripts/lesson_01.sh", 'exec "$python"', "exit 7 #", "launch(1,"),
}

# --- Numbers that were measured ---

STORED = "loss ≈0.412, error ≈4.4e-16 in 8 rows"
CELLS = {  # what the cell prints -> is it green?
    "from nbtools import measured": True,
    "print(f'loss {measured(0.412, 0, 1)}, error {measured(4.4e-16, 0, 1e-12)} in 8 rows')": True,
    "print(f'loss {measured(0.39751, 0, 1)}, error {measured(0, 0, 1e-12)} in 8 rows')": True,
    "print(f'loss {measured(1.2, 0, 1)}, error {measured(4.4e-16, 0, 1e-12)} in 8 rows')": False,
    "print('loss ≈0.412, error ≈4.4e-16 in 9 rows')": False,
    "print('cost ≈0.412, error ≈4.4e-16 in 8 rows')": False,
    "print('loss 0.412, error ≈4.4e-16 in 8 rows')": False,
}


def write_notebook(path):
    """Write a notebook in which all cells but the first have the same stored output."""
    cells = []
    for number, source in enumerate(CELLS, start=1):
        output = nbformat.v4.new_output("stream", name="stdout", text=STORED + "\n")
        outputs = [output] if "print" in source else []
        cells.append(nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=number))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


# --- The copy ---


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy what a notebook needs, with the notebook above as the only one; return the copy."""
    copy = tmp_path_factory.mktemp("copied") / "a copy"
    for name in ("lessons", "notebooks", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.ipynb")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "requirements.txt", "conftest.py", "CLAIMS.md"):
        shutil.copy(ROOT / name, copy)
    write_notebook(copy / "notebooks" / "lesson_99_measured.ipynb")
    return copy


def run_notebooks(*arguments, cwd):
    """Run `pytest --nbval` on these; return {notebook's number: [is it green? for each cell]}."""
    command = [sys.executable, "-m", "pytest", "--nbval", "-rA", "-p", "no:cacheprovider"]
    options = {"capture_output": True, "text": True, "timeout": 1500, "env": ENVIRONMENT}
    run = subprocess.run([*command, *arguments], cwd=cwd, **options)
    assert run.returncode == 1, run.stdout[-2000:]  # 2 to 5 would be pytest's own
    found = {}
    for word, notebook, cell in re.findall(r"(PASSED|FAILED) .*_(\d\d)_.*Cell (\d+)", run.stdout):
        found.setdefault(notebook, {})[int(cell)] = word == "PASSED"
    return {number: [cells[cell] for cell in sorted(cells)] for number, cells in found.items()}, run


def test_digits_behind_the_sign_may_change_and_nothing_else(copy):
    """Here in processes of pytest-xdist, by folder."""
    found, _ = run_notebooks("-n", "1", "notebooks", cwd=copy)
    assert found["99"] == [*CELLS.values()]


def test_cells_that_show_a_break_are_red_and_others_green(copy, tmp_path):
    """Both notebooks in this process's child, by name, from elsewhere."""
    for file, old, new, _ in BREAKS.values():
        source = (copy / file).read_text(encoding="utf-8")
        assert source.count(old) == 1
        (copy / file).write_text(source.replace(old, new), encoding="utf-8")
    notebook = json.loads((ROOT / "notebooks" / NOTEBOOK).read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = [cell for cell in code if re.search(r"import|show\(lesson|launch\(", cell["source"][0])]
    paths = [copy / "notebooks" / NOTEBOOK, copy / "notebooks" / "lesson_99_measured.ipynb"]
    paths[0].write_text(json.dumps(notebook | {"cells": shown}), encoding="utf-8")
    found, run = run_notebooks(*paths, cwd=tmp_path)
    red = [any(words in cell["source"][0] for *_, words in BREAKS.values()) for cell in shown]
    assert red == [False] + [True] * len(BREAKS)
    assert found == {"01": [not is_red for is_red in red], "99": [*CELLS.values()]}
    assert "LaunchFailed: lesson 01 ended with exit code 7: no output" in run.stdout
