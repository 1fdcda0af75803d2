"""CLAIMS.md tells the truth: each test it names exists, carries the claim's id, and proves it.

That each of these tests has run and passed is judged at the end of the run, in conftest.py.
"""

import re

import pytest
from conftest import ROOT, read_claims, unproven

CLAIMS = (ROOT / "CLAIMS.md").read_text(encoding="utf-8")
VERDICTS = ("holds", "changed", "wrong", "the script is wrong", "not run yet")
ALL_IDS = [
    f"{letter}{number}"
    for letter, last in zip("ABCDE", (19, 7, 10, 13, 14), strict=True)
    for number in range(1, last + 1)
]


ROWS = read_claims()


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
def test_claim_names_tests_that_carry_its_id(claim, marked):
    verdict, tests = ROWS[claim]
    assert verdict.startswith(VERDICTS), verdict
    assert tests, f"{claim} names no test"
    for test in tests:
        assert test in marked, f"{test} does not exist"
        assert claim in marked[test], f"{test} is not marked with {claim}"


def test_a_claim_whose_test_did_not_pass_is_named():
    rows = {"A1": ("holds", ["t::a"]), "A2": ("holds; needs a GPU", ["t::b"])}
    assert unproven(rows, {"t::a": ["passed", "passed"], "t::b": ["skipped"]}) == []
    assert unproven(rows, {}) == []
    assert unproven(rows, {"t::a": ["not installed"]}) == []
    for outcomes in (["skipped"], ["passed", "failed"], ["passed", "skipped"]):
        assert "A1 is not proven: t::a" in unproven(rows, {"t::a": outcomes})[0]
    assert "A2 is not proven: t::b failed" in unproven(rows, {"t::b": ["failed"]})


def test_every_marked_test_is_named_in_a_row(marked):
    for test, ids in marked.items():
        for claim in ids:
            assert claim in ROWS, f"{test} claims {claim}, which has no row"
            assert test in ROWS[claim][1], f"the row of {claim} does not name {test}"
