"""The house rules: every lesson has its five places, and notebooks can be trusted.

There is no list of exceptions here. A lesson that can't keep a rule is a reason to change the rule.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "lessons").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [*sorted(ROOT.glob("*.md")), *NOTEBOOKS]


def name(path):
    return path.stem


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path):
    """Return the notebook's code cells that hold code: [(source, outputs, metadata)]."""
    cells = [cell for cell in load(path)["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if "".join(cell["source"]).strip()]


def definition(path, wanted):
    """Return the source of the top-level function or class `wanted` of a script, or None."""
    source = path.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if getattr(node, "name", None) == wanted:
            return ast.get_source_segment(source, node)
    return None


# Blocks that lessons copy unchanged. A reader reads them once.
COPIED = ["setup", "Arguments", "make_toy", "launch_job", "run"]
COPIED += ["read_sentences", "number_words", "make_batches", "initial_weights"]


def test_lessons_are_numbered_without_a_gap():
    assert len(LESSONS) >= 3
    pattern = re.compile(r"lesson_(\d\d)_[a-z0-9_]+")
    numbers = [int(pattern.fullmatch(path.stem).group(1)) for path in LESSONS]
    assert numbers == list(range(1, len(LESSONS) + 1))


def test_every_lesson_has_its_five_places_and_nothing_else_is_there():
    numbers = [path.stem[7:9] for path in LESSONS]
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in LESSONS]
    for folder, pattern, expected in (
        ("scripts", "lesson_*", "lesson_{}.sh"),
        ("tests", "test_lesson_*", "test_lesson_{}.py"),
        ("notebooks/solutions", "lesson_*.py", "lesson_{}.py"),
    ):
        found = sorted(path.name for path in (ROOT / folder).glob(pattern))
        assert found == [expected.format(number) for number in numbers], folder


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.sh")), ids=name)
def test_scripts_can_be_executed_and_stop_at_the_first_error(path):
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines or path.name == "setup.sh"  # setup.sh is sourced


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_script_is_short_and_says_what_it_is(path):
    source = path.read_text(encoding="utf-8")
    copied = [block for name in COPIED if (block := definition(path, name))]
    not_ours = sum(len(block.splitlines()) + 2 for block in copied)  # and two empty lines
    assert len(source.splitlines()) - not_ours <= 250
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring.splitlines()[0].startswith(f"Lesson {path.stem[7:9]}: ")
    assert docstring.splitlines()[0].endswith("?")
    assert 15 <= len(docstring.splitlines()) <= 35
    assert f"bash scripts/lesson_{path.stem[7:9]}.sh" in docstring
    assert "Output to expect" in docstring and "\n    PASS " in docstring
    assert "# --- New in this lesson ---" in source


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_script_stands_alone(path):
    """Nothing of this repository is imported, so that one file can be copied to a cluster."""
    ours = {path.stem for path in LESSONS} | {
        "nbtools",
        "wire",
        "solutions",
        "conftest",
        "environment",
    }
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module]
        assert not ours.intersection(name.split(".")[0] for name in names)


@pytest.mark.parametrize("block", COPIED)
def test_copied_blocks_are_equal_to_the_letter(block):
    places = [*LESSONS, *(ROOT / "templates").glob("*.py")]
    copies = {path.stem: definition(path, block) for path in places}
    copies = {lesson: source for lesson, source in copies.items() if source is not None}
    assert len(copies) >= 2
    assert len(set(copies.values())) == 1, f"{block} differs among {sorted(copies)}"


def test_the_template_is_a_lesson_that_runs():
    template = ROOT / "templates" / "lesson_NN_slug.py"
    run = subprocess.run([sys.executable, template, "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2].startswith("PASS ")
    assert json.loads(run.stdout.splitlines()[-1])["passed"] is True
    assert (ROOT / "templates" / "lesson_NN_slug.ipynb").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_is_executed_from_top_to_bottom(path):
    cells = code_cells(path)
    assert 20 <= len(load(path)["cells"]) <= 35
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_has_one_figure_and_no_svg(path):
    cells = code_cells(path)
    data = [output.get("data", {}) for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in item for item in data) == 1
    assert not any("image/svg+xml" in item for item in data)
    (figure,) = [
        cell for cell in cells if any("image/png" in o.get("data", {}) for o in cell["outputs"])
    ]
    source = "".join(figure["source"])
    assert source.rstrip().endswith("plt.show()") and "figsize" in source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_can_be_compared(path):
    """No shell cells, nothing that differs from run to run, few ignored outputs."""
    ignored = 0
    for cell in code_cells(path):
        source = "".join(cell["source"])
        assert not re.search(r"^\s*(!|%%bash|%%sh|%%writefile)", source, re.MULTILINE), source
        assert not re.search(r"\b(clear_output|input)\(", source), source
        tags = cell["metadata"].get("tags", [])
        if "nbval-ignore-output" in tags or "NBVAL_IGNORE_OUTPUT" in source:
            ignored += 1
            assert "# Output not compared:" in source, "an ignored output needs its reason"
        printed = []  # without figures, and without the source that `show` shows
        for output in cell["outputs"]:
            data = output.get("data", {})
            printed += [data[kind] for kind in data if kind not in ("image/png", "text/markdown")]
            printed += [output.get("text", "")]
        text = json.dumps(printed)
        assert not re.search(r"/(home|root|tmp|Users|usr|private)/", text), text
        assert not re.search(r"(127\.0\.0\.1|localhost|port)\D{0,3}\d{4,5}", text), text
        assert not re.search(r" at 0x[0-9a-f]+", text), text
    assert ignored <= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_has_all_its_parts(path):
    source = "\n".join("".join(cell["source"]) for cell in load(path)["cells"])
    number = int(path.stem[7:9])
    for part in (
        "show(",
        f"launch({number},",
        "judge(",
        f"from solutions.lesson_{number:02} import",
    ):
        assert part in source, part
    assert "not attempted" in json.dumps([cell["outputs"] for cell in code_cells(path)])


def links(path):
    """Return the targets of all Markdown links in a page or a notebook, without web addresses."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in load(path)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_resolve(path):
    for target in links(path):
        file, _, heading = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, target


def test_readme_has_a_row_for_every_lesson():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if "](lessons/" in line]
    assert len(rows) == len(LESSONS)
    for path, row in zip(LESSONS, rows, strict=True):
        number = path.stem[7:9]
        assert row.startswith(f"| {number} |")
        for target in (f"lessons/{path.name}", f"notebooks/{path.stem}.ipynb"):
            assert f"]({target})" in row
        assert f"`bash scripts/lesson_{number}.sh`" in row


def test_requirements_are_pinned_and_explained():
    lines = [
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+ +# \S.*", line), line
