"""What every lesson owes, tested once for all of them.

A lesson has its five places; its docstring shows its real output; its notebook can be compared.
Its tests have BREAKS (breaks.py). What it owes to who calls it is tested in test_tasks.py.
"""

import ast
import base64
import doctest
import functools
import importlib
import json
import re
import textwrap
import types

import pytest
from breaks import verdicts_of_proof
from conftest import ROOT, run_warm
from lockstep import proofs

SCRIPTS = {path.stem[7:9]: path for path in sorted((ROOT / "lessons").glob("*.py"))}
NOTEBOOKS = {path.stem[7:9]: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
PROOFS = {path.stem[7:9]: path for path in sorted((ROOT / "lessons/proofs").glob("lesson_*.py"))}
PAGES = [*sorted(ROOT.glob("*.md")), *NOTEBOOKS.values()]
# `-k lesson_03` finds what lesson 03 owes, too.
each = pytest.mark.parametrize("lesson", SCRIPTS, ids="lesson_{}".format)

KEYS = json.loads((ROOT / "tests" / "json_keys.json").read_text())


@functools.cache
def text_of(path):
    """Return what is in a file, read once for all tests."""
    return path.read_text(encoding="utf-8")


@functools.cache
def parsed(path):
    """Return the syntax tree of a Python file."""
    return ast.parse(text_of(path))


@functools.cache
def notebook_of(lesson):
    """Return the notebook of a lesson as a dictionary."""
    return json.loads(text_of(NOTEBOOKS[lesson]))


def docstring(lesson):
    return ast.get_docstring(parsed(SCRIPTS[lesson]))


def cells(lesson, kind="code"):
    """Return the cells of one kind that are not empty: [(source, cell)]."""
    notebook = notebook_of(lesson)
    pairs = [("".join(c["source"]), c) for c in notebook["cells"] if c["cell_type"] == kind]
    return [(source, cell) for source, cell in pairs if source.strip()]


def printed(cell):
    """Return what a cell shows as text, without figures and without the source from show()."""
    shown = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        shown += [data[kind] for kind in data if kind not in ("image/png", "text/markdown")]
        shown.append(output.get("text", ""))
    return "".join("".join(part) for part in shown)


# --- The places of a lesson ---


def test_every_lesson_has_its_places_and_nothing_else_is_there():
    numbers = list(SCRIPTS)
    assert numbers == [f"{n:02}" for n in range(1, len(numbers) + 1)], "a number is missing"
    assert [path.stem for path in NOTEBOOKS.values()] == [path.stem for path in SCRIPTS.values()]
    for folder, name in (
        ("scripts", "lesson_{}.sh"),
        ("lessons/proofs", "lesson_{}.py"),
        ("tests", "test_lesson_{}.py"),
        ("notebooks/solutions", "lesson_{}.py"),
        ("notebooks/solutions", "wrong_{}.py"),
    ):
        found = sorted(path.name for path in (ROOT / folder).glob(name.format("*")))
        assert found == [name.format(number) for number in numbers], folder


def test_readme_has_a_row_for_every_lesson():
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("|") and "](lessons/" in line]
    assert sorted(row[2:4] for row in rows) == list(SCRIPTS)
    for row in rows:
        number, _, script, notebook, minutes = row.strip("| ").split(" | ")
        assert f"](lessons/{SCRIPTS[number].name})" in script
        assert f"](notebooks/{NOTEBOOKS[number].name})" in notebook
        assert abs(int(minutes) - minutes_of(number)) <= 5, f"{number}: {minutes_of(number)}"


def minutes_of(number):
    """Return what README promises: one minute for 120 words, one for 15 lines, seven for a task.

    The two numbers for code are least squares over what readers of six pages needed: 04, 05 and 06
    took 80, 65 and 85 minutes, 09, 10 and 11 took 75, 85 and 85. They are off by 9 on average.
    """
    words = sum(len(text.split()) for text, _ in cells(number, "markdown"))
    tasks = sum(text.count("print(judge(") for text, _ in cells(number))
    code = [text for text, c in cells(number) if "hide-input" not in c["metadata"].get("tags", [])]
    for output in [output for _, cell in cells(number) for output in cell["outputs"]]:
        code.append("".join(output.get("data", {}).get("text/markdown", "")))  # what show() shows
    lines = sum(bool(line.strip()) for text in code for line in text.splitlines())
    return words / 120 + lines / 15 + 7 * tasks


def test_readme_is_read_in_ten_minutes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) < 600  # no tables


def test_what_is_where_names_every_file_and_no_other():
    """The tree of docs/house.md; NN in it stands for any lesson."""
    page = (ROOT / "docs" / "house.md").read_text()
    tree = page.partition("```\nlockstep/\n")[2].partition("\n```")[0]
    named, above = set(), []
    for line in tree.splitlines():
        indent, name = re.match(r"(\W*)([\w.]+)", line).groups()
        above[len(indent) // 4 - 1 :] = [name]
        named.add("/".join(above))
    assert [name for name in named if not (ROOT / name.replace("NN", "03")).exists()] == []
    there = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".py", ".sh")]
    there += [*(ROOT / "scripts/cluster").iterdir(), *(ROOT / "notebooks/nbtools").glob("*.py")]
    there += (ROOT / "docs/build").glob("*.py")
    names = {re.sub(r"lesson_\d\d.sh", "lesson_NN.sh", str(p.relative_to(ROOT))) for p in there}
    assert sorted(name for name in names - named if not name.endswith("__init__.py")) == []


def test_the_four_hops_from_a_command_to_a_rank_are_in_the_files():
    page = (ROOT / "docs" / "house.md").read_text()
    hops = re.findall(r"^\| \[(\S+)\]\(\S+\) \| `(.+?)` \|", page, re.MULTILINE)
    assert len(hops) == 4
    for file, line in hops:
        assert line in map(str.strip, (ROOT / file).read_text().splitlines()), (file, line)


def test_the_picture_of_readme_is_that_of_its_notebook():
    tagged = [c for _, c in cells("02") if "readme-picture" in c["metadata"].get("tags", [])]
    pictures = [output["data"]["image/png"] for output in tagged[0]["outputs"]]
    assert (ROOT / "docs" / "overlap.png").read_bytes() == base64.b64decode(pictures[0])


def test_requirements_are_pinned_and_explained():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+ +# \S.*", line), line


# --- The script ---


@each
def test_script_says_what_it_is(lesson):
    first, *rest = docstring(lesson).splitlines()
    assert re.fullmatch(rf"Lesson {lesson}: .*\?", first)
    assert f"bash scripts/lesson_{lesson}.sh" in "\n".join(rest)
    assert "Output to expect" in docstring(lesson) and "\n    PASS " in docstring(lesson)


@each
def test_script_stands_alone(lesson):
    """Nothing of this repository is imported, so that one file can be copied to a cluster."""
    ours = {path.stem for path in SCRIPTS.values()} | {"nbtools", "solutions", "conftest"}
    for node in ast.walk(parsed(SCRIPTS[lesson])):
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(node, ast.Import)]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module]
        assert not ours.intersection(name.split(".")[0] for name in names)


@each
def test_gloo_is_not_held_at_the_end(lesson):
    """Who joins a group has imported what would hold it; see CONTRIBUTING. test_late.py runs it."""
    source = text_of(SCRIPTS[lesson])
    imported = re.search(r"^ *import torch\.distributed\.nn\b", source, re.MULTILINE)
    assert imported or "init_process_group(" not in source


@functools.cache
def definitions(source):
    """Return {name: source} of the top-level functions and classes."""
    lines = source.splitlines()
    nodes = [node for node in ast.parse(source).body if hasattr(node, "name")]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}


def test_copied_blocks_are_equal_to_the_letter():
    """`join_group`, and the blocks that several lessons share."""
    texts = {path.stem: text_of(path) for path in SCRIPTS.values()}
    texts["template"] = text_of(ROOT / "templates" / "lesson_NN_slug.py")
    shared = ["join_group", "make_toy"]
    shared += ["read_sentences", "number_words", "make_batches", "initial_weights"]
    for name in shared:
        copies = {lesson: definitions(text).get(name) for lesson, text in texts.items()}
        copies = {lesson: copy for lesson, copy in copies.items() if copy is not None}
        assert len(copies) >= 2, name
        assert len(set(copies.values())) == 1, f"{name} differs among {sorted(copies)}"


@each
def test_technique_comes_first(lesson):
    source = text_of(SCRIPTS[lesson])
    assert source[: source.index("# --- The technique ---")].count("\n") < 44


@each
def test_technique_is_what_a_reader_copies(lesson):
    """No generator, no claim code, no flag: the proof watches from outside, and has its breaks.

    A context manager is written with one `yield`, and is no generator that a proof could step. An
    `IterableDataset` is asked for its rows one by one, so there a generator is the technique.
    """
    source = text_of(SCRIPTS[lesson])
    technique = technique_of(source)
    contexts = len(re.findall(r"@contextlib.contextmanager\n *def ", technique))
    assert len(re.findall(r"^ +yield$", technique, re.MULTILINE)) == contexts
    technique = re.sub(r"^ +yield$", "", technique, count=contexts, flags=re.MULTILINE)
    if "(IterableDataset):" not in technique:
        assert not re.search(r"\byield\b", technique)
    assert not re.search(r"\bargs\b|\b[A-E]\d{1,2}\b", technique)
    assert source.endswith(END_OF_SCRIPT)
    assert f"check_breaks({int(lesson)}, BREAKS" in text_of(ROOT / f"tests/test_lesson_{lesson}.py")


def technique_of(source):
    """Return what stands between its title and the next one."""
    return re.split(r"# --- .* ---\n", source)[1]


@each
def test_a_script_is_its_technique(lesson):
    """It has no watcher and no verdict; half of its code, at least, is what a reader copies."""
    source = text_of(SCRIPTS[lesson])
    assert re.findall(r"# --- (.*) ---\n", source) == ["The technique", "The example"]
    assert source.count("\n") <= 250
    below = source.rpartition('"""\n\nimport')[2]
    assert not re.search(r"PASS|FAIL|args.json|conclude|whole", below)
    code = [line for line in below.splitlines() if line.strip()]
    technique = [line for line in technique_of(source).splitlines() if line.strip()]
    rest = [line for line in code if not line.startswith(("import ", "from "))]
    assert len(technique) >= len(rest) / 2


END_OF_SCRIPT = """

if __name__ == "__main__":
    main(parse_args())
"""


@each
def test_functions_are_short(lesson):
    files = [SCRIPTS[lesson], PROOFS[lesson]]
    for node in [node for file in files for node in ast.walk(parsed(file))]:
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (25 if node.name == "main" else 30), f"{node.name} has {lines} lines"


# --- What a reader sees of a script ---


@each
def test_docstring_shows_the_real_output(lesson, default_run):
    run = default_run(int(lesson))
    assert run.returncode == 0, run.stderr
    expected = textwrap.dedent(
        docstring(lesson).split("Output to expect on a CPU:\n")[1].strip("\n")
    )
    lines = run.stdout.splitlines(keepends=True)[:-1]  # the last one is the JSON
    checker = doctest.OutputChecker()
    assert checker.check_output(expected.rstrip() + "\n", "".join(lines), doctest.ELLIPSIS), lines


@each
def test_json_has_the_keys_that_other_programs_read(lesson, default_run):
    result = default_run(int(lesson)).json
    assert sorted(result) == sorted(KEYS[lesson])
    assert result["lesson"] == int(lesson) and result["passed"] is True


OPEN = ["08", "15"]  # docs/security.md says what listens there, and for how long


@each
def test_nobody_beyond_this_machine_can_reach_a_lesson(lesson, default_run):
    assert lesson in OPEN or default_run(int(lesson)).open_ports == []


# --- Tasks ---


def literal(lesson, name):
    """Return the dictionary `name` of a solution module, not evaluated: what a site reads."""
    for node in parsed(ROOT / "notebooks" / "solutions" / f"lesson_{lesson}.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise AssertionError(f"lesson {lesson} has no {name}")


@each
def test_every_task_has_a_hint(lesson):
    hints = ast.literal_eval(literal(lesson, "HINTS"))
    assert list(hints) == [ast.literal_eval(task) for task in literal(lesson, "TASKS").keys]
    assert all(8 <= len(hint.split()) <= 45 for hint in hints.values()), hints


@each
def test_notebook_has_its_tasks_unsolved(lesson):
    judged = [(source, printed(cell)) for source, cell in cells(lesson) if "print(judge(" in source]
    assert len(judged) >= 3
    names = re.findall(r"judge\([\w.]+, (\w+)\)", "\n".join(source for source, _ in judged))
    known = {ast.literal_eval(task) for task in literal(lesson, "TASKS").keys}
    assert set(names) <= known, "by these names the site finds the solutions"
    for source, output in judged:
        assert re.match(r"(not attempted|no guess yet|not yet: )", output), source
    code = "\n".join(source for source, _ in cells(lesson))
    assert re.search(rf"from solutions(\.| import )lesson_{lesson}\b", code)


# --- The notebook ---


@each
def test_notebook_is_executed_from_top_to_bottom(lesson):
    code = [cell for _, cell in cells(lesson)]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@each
def test_notebook_can_be_compared(lesson):
    """No shell cells, nothing that differs from run to run, few ignored outputs."""
    ignored = 0
    for source, cell in cells(lesson):
        assert not re.search(r"^\s*(!|%%bash|%%sh|%%writefile)", source, re.MULTILINE), source
        assert not re.search(r"\b(clear_output|input)\(", source), source
        tags = cell["metadata"].get("tags", [])
        if "nbval-ignore-output" in tags or "NBVAL_IGNORE_OUTPUT" in source:
            ignored += 1
            assert "# Output not compared:" in source, "an ignored output needs its reason"
        text = printed(cell)
        assert not re.search(r"/(home|root|tmp|Users|usr|private)/", text), text
        assert not re.search(r"(127\.0\.0\.1|localhost|port)\D{0,3}\d{4,5}", text), text
        assert not re.search(r" at 0x[0-9a-f]+", text), text
        kinds = [kind for output in cell["outputs"] for kind in output.get("data", {})]
        assert "image/svg+xml" not in kinds
        assert "image/png" not in kinds or "plt.show()" in source, source
    assert ignored <= 3


@each
def test_notebook_shows_and_runs_the_script(lesson):
    code = "\n".join(source for source, _ in cells(lesson))
    assert "show(lesson." in code and ("launch(" in code or "subprocess.run(" in code)
    assert any("image/png" in json.dumps(cell["outputs"]) for _, cell in cells(lesson))


@each
def test_every_picture_has_a_text_alternative(lesson):
    """What is seen, and what it shows, for readers who can't see it: in the cell's metadata."""
    pictures = [cell for _, cell in cells(lesson) if "image/png" in json.dumps(cell["outputs"])]
    options = [cell["metadata"].get("mystnb", {}) for cell in pictures]
    texts = [option.get("image", {}).get("alt", "") for option in options]
    assert all(len(text.split()) >= 8 for text in texts), texts
    assert len(set(texts)) == len(texts)


@each
def test_notebook_shows_numbers_and_pictures(lesson):
    code = cells(lesson)
    assert max(len(source.splitlines()) for source, _ in code) <= 25
    lines = [line for _, cell in code for line in printed(cell).splitlines()]
    assert not [line for line in lines if re.search(r"\b(True|False)\s*$", line)]
    mechanism = [source for source, _ in code if re.search(r"\b(lanes|strip)\(", source)]
    assert len(mechanism) >= 2
    assert any("≈" in line for line in lines)


@each
def test_notebook_has_one_road(lesson):
    """No bracket about something else, and no drawing code between the paragraphs."""
    text = "\n".join(source for source, _ in cells(lesson, "markdown"))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    brackets = re.findall(r"\(([^()]*)\)", text)
    assert not [bracket for bracket in brackets if len(bracket.split()) > 10]
    assert text.count("<details>") == text.count("</details>") <= 1
    for source, cell in cells(lesson):
        if re.search(r"\.(bar|plot)\(|subplots\(", source):
            assert "hide-input" in cell["metadata"].get("tags", []), source
            assert cell["metadata"].get("jupyter", {}).get("source_hidden") is True, source
            assert len(source.splitlines()) <= 10, source


def anchors(path):
    text = path.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_resolve(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(source for source, _ in cells(path.stem[7:9], "markdown"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:|attachment:", target):
            continue
        file, _, heading = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        assert not heading or heading in anchors(page), target


def test_the_template_is_a_lesson_that_runs(monkeypatch):
    script = ROOT / "templates" / "lesson_NN_slug.py"
    for nproc in (1, 2):
        (code, _), *others = run_warm(script, nproc)
        assert code == 0 and others == [(0, "")] * (nproc - 1)
    monkeypatch.syspath_prepend(script.parent)
    proof = importlib.import_module("proof_NN")
    for name in ("of_script", "of_lesson"):
        monkeypatch.setattr(proofs, name, lambda _: proof)
    source, lesson = script.read_text(), types.SimpleNamespace(script=script, start="torchrun")
    sources = {"as it is": source, "broken": source.replace("    dist.all_reduce(", "    (")}
    said = verdicts_of_proof(lesson, sources, 2, [], 1)
    assert [passed for passed, _ in said.values()] == [True, False], said


def test_the_smallest_scripts_run():
    zero, one = run_warm(ROOT / "templates" / "smallest_ddp.py", 2)
    assert zero[0] == one[0] == 0 and zero[1].startswith("the last loss of rank 0: ")
    ((code, stdout),) = run_warm(ROOT / "templates" / "smallest_spawn.py", 1)
    said = [f"rank {rank} of 2 knows the sum: 3" for rank in (0, 1)]
    assert code == 0 and sorted(stdout.splitlines()) == said


def test_the_smallest_script_can_spawn():
    """A spawned process imports the script: it must find its work there, and start nothing."""
    _, *rest, last = parsed(ROOT / "templates" / "smallest_spawn.py").body
    assert {type(node) for node in rest} == {ast.Import, ast.FunctionDef}
    assert ast.unparse(last.test) == "__name__ == '__main__'"


# --- Claims ---


def test_every_claim_has_a_verdict_or_is_listed_as_open_and_has_tests():
    from conftest import read_claims

    verdicts = read_claims()
    text = (ROOT / "CLAIMS.md").read_text(encoding="utf-8")
    open_ids = re.findall(r"\b[A-E]\d+\b", text.partition("\n## Not judged yet\n")[2])
    last = {"A": 19, "B": 7, "C": 10, "D": 13, "E": 14}
    every = [f"{letter}{n}" for letter, count in last.items() for n in range(1, count + 1)]
    assert sorted([*verdicts, *open_ids]) == sorted(every)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marked = set(re.findall(r"[A-E]\d+", " ".join(re.findall(r"mark\.claim\(([^)]*)\)", sources))))
    assert marked == set(verdicts)
    for claim, verdict in verdicts.items():
        allowed = ("holds", "changed", "wrong", "the script is wrong", "not run yet")
        assert verdict.startswith(allowed), (claim, verdict)


def test_a_claim_whose_tests_did_not_pass_is_named():
    from conftest import unproven

    verdicts = {"A1": "holds", "A2": "holds (on GPUs: not run yet)"}
    fine = [{}, {"A1": ["passed"]}, {"A1": ["not installed"]}, {"A2": ["skipped", "passed"]}]
    assert [unproven(verdicts, outcomes) for outcomes in fine] == [[]] * 4
    for outcomes in (["skipped"], ["passed", "failed"], ["passed", "skipped"], ["failed"]):
        assert unproven(verdicts, {"A1": outcomes}) != []
    assert unproven(verdicts, {"A2": ["failed", "skipped"]}) != []
