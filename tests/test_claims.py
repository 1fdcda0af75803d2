"""CLAIMS.md tells the truth: each test it names exists, carries the claim's id, and has run.

This file runs last. A test that was not selected in this run can't be judged here; a test that was
selected must have passed. A skipped test proves nothing: its row must say that it needs a GPU.
"""

import re

import pytest
from conftest import OUTCOMES, ROOT

CLAIMS = (ROOT / "CLAIMS.md").read_text(encoding="utf-8")
VERDICTS = ("holds", "changed", "wrong", "the script is wrong", "not run yet")
ALL_IDS = [
    f"{letter}{number}"
    for letter, last in zip("ABCDE", (19, 7, 10, 13, 14), strict=True)
    for number in range(1, last + 1)
]


def read_rows():
    """Return {claim id: (verdict, [tests])} from the tables of CLAIMS.md."""
    rows = {}
    for line in CLAIMS.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[A-E]\d+", cells[0]):
            assert cells[0] not in rows, f"two rows for {cells[0]}"
            rows[cells[0]] = (cells[2], re.findall(r"`(tests/\S+?\.py::\w+)`", cells[4]))
    return rows


ROWS = read_rows()


@pytest.fixture(scope="module")
def marked():
    """Return {test: set of claim ids}, read from the marks in the test files."""
    found = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        pattern = r"((?:^@.*\n(?:^[ )].*\n)*)+)def (test_\w+)"
        for decorators, name in re.findall(pattern, source, re.MULTILINE):
            marks = re.findall(r"mark\.claim\(([^)]*)\)", decorators)
            ids = re.findall(r"[A-E]\d+", " ".join(marks))
            found[f"tests/{path.name}::{name}"] = set(ids)
    return found


def test_every_claim_has_a_row_or_is_listed_as_open():
    open_ids = re.search(r"^## Not judged yet\n+(.*?)(?=^## |\Z)", CLAIMS, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"\b[A-E]\d+\b", open_ids.group(1)) if open_ids else []
    assert not set(listed) & set(ROWS)
    assert sorted([*ROWS, *listed]) == sorted(ALL_IDS)


@pytest.mark.parametrize("claim", sorted(ROWS))
def test_claim_is_proven_by_tests_that_ran(claim, marked):
    verdict, tests = ROWS[claim]
    assert verdict.startswith(VERDICTS), verdict
    assert tests, f"{claim} names no test"
    for test in tests:
        assert test in marked, f"{test} does not exist"
        assert claim in marked[test], f"{test} is not marked with {claim}"
        outcomes = set(OUTCOMES.get(test, {"passed"}))  # not selected in this run: not judged
        if outcomes == {"skipped"}:
            assert "GPU" in verdict, f"{test} was skipped, and the verdict does not say why"
        else:
            assert outcomes == {"passed"}, f"{test}: {outcomes}"


def test_every_marked_test_is_named_in_a_row(marked):
    for test, ids in marked.items():
        for claim in ids:
            assert claim in ROWS, f"{test} claims {claim}, which has no row"
            assert test in ROWS[claim][1], f"the row of {claim} does not name {test}"
