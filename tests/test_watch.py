"""The instrument names each fault of a table, and calls nothing wrong in scripts that are right.

The ranks are forks of one process that has torch (nbtools/warm_check.py): a fault takes half a
second.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from watched.faults import CLEAN, FAULTS

WATCHED = Path(__file__).with_name("watched")


@pytest.fixture(scope="module")
def check():
    """Return a function: check(path, *flags) is what the check says of a script, as a dict."""
    command = [sys.executable, ROOT / "notebooks" / "nbtools" / "warm_check.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def ask(*arguments):
            print(json.dumps([str(one) for one in arguments]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def edited(folder, script, edits):
    """Return the path of a script with edits, in an own folder."""
    text = (WATCHED / script).read_text()
    for old, new in edits.items():
        assert old in text, f"{script} has no {old!r}"
        text = text.replace(old, new, 1)
    path = folder / script
    path.write_text(text)
    return path


def line_of(path, place):
    """Return the text of a line such as "train.py:41"; "" if no line is named."""
    if place is None:
        return ""
    name, _, number = place.rpartition(":")
    assert name == path.name
    return path.read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_line(name, check, tmp_path):
    script, edits, kind, strength, words = FAULTS[name]
    path = edited(tmp_path, script, edits)
    patience = 3 if "hang" in kind else 60
    report = check("--patience", patience, path, tmp_path)
    named = [
        one
        for one in report["findings"]
        if re.fullmatch(kind, one["kind"])
        and one["strength"] == strength
        and words in line_of(path, one["place"])
    ]
    assert named, report["findings"]
    wrong = any(one["strength"] == "wrong" for one in report["findings"])
    assert report["exit_code"] == (1 if wrong else 0)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_called_wrong_where_nothing_is(name, check, tmp_path):
    script, edits, *never = CLEAN[name]
    path = edited(tmp_path, script, edits)
    report = check(path, tmp_path)
    assert report["exit_code"] == 0, report["findings"]
    assert not [one for one in report["findings"] if one["strength"] == "wrong"]
    assert max(map(max, report["updates"])) > 0
    for kind in never:
        assert not [one for one in report["findings"] if re.fullmatch(kind, one["kind"])]
    if name.startswith("as they are"):
        assert report["findings"] == []


def test_a_long_run_is_looked_at_in_part_and_to_its_end(check, tmp_path):
    """What a run writes down is bounded, so the bounds are set to next to nothing here."""
    rooms = '{"updates": 40, "rows": 24, "forwards": 5, "calls": 2}'
    small = f"import torch\nfrom lockstep.watch import facts\nfacts.ROOM |= {rooms}\n"
    edits = {
        "import torch\n": small,
        "        score =": "        dist.barrier()\n        score =",
    }
    path = edited(tmp_path, "ddp.py", edits)
    report = check("--updates", 0, path, tmp_path)
    assert (report["findings"], report["updates"]) == ([], [[12, 12]])
    looked, left_out = "; ".join(report["looked_at"]), "; ".join(report["not_looked_at"])
    for words in ("first 5 of 12 updates", "row numbers in 1 training epochs: [24, 24]"):
        assert words in looked
    assert "the evaluation: [19, 18] rows" in looked  # it has a room of its own
    assert "calls itself: [2, 2] by rank" in looked
    for words in ("updates after the first 5 ", "rows after", "calls of a", "collectives after"):
        assert words in left_out
    for name, kind in (
        ("changed after the last update", "replicas differ"),
        ("both ranks save", "one file, several writers"),
        ("an evaluation that fills up", "rows tested twice"),
    ):
        path = edited(tmp_path, "ddp.py", edits | FAULTS[name][1])
        kinds = [one["kind"] for one in check("--updates", 0, path, tmp_path)["findings"]]
        assert kinds == [kind], name


def test_of_a_large_model_a_sample_is_compared_and_the_report_says_so(check, tmp_path):
    small = "import torch\nfrom lockstep.watch import facts\nfacts.LARGE, facts.MOST = 50, 80\n"
    path = edited(tmp_path, "by_hand.py", {"import torch\n": small})
    report = check("--updates", 3, path)
    words = "each number of Sequential: it has 57, and of a tensor 20 are compared at most"
    assert report["findings"] == [] and words in report["not_looked_at"]
    memory = "memory of what is trained, by rank: parameters 228 bytes, gradients 228 bytes,"
    assert f"{memory} optimizer 472 bytes" in report["looked_at"]


def test_memory_is_counted_with_the_parts_that_a_rank_holds(check):
    report = check("--updates", 2, WATCHED / "shard.py")
    words = "memory of what is trained, by rank: parameters 148 bytes, gradients 148 bytes,"
    # The rows of the two layers' parameters are dealt out; a last part is padded, but not its state
    assert f"{words} optimizer 312 bytes and 240 bytes" in report["looked_at"]


def test_after_an_error_of_one_rank_no_message_is_called_missing(check, tmp_path):
    step = "        optimizer.step()\n"
    edits = {step: step + "        if rank == 1 and epoch == 1:\n            torch.ones(10**13)\n"}
    report = check(edited(tmp_path, "by_hand.py", edits))
    assert (report["exit_code"], report["findings"]) == (2, [])
    assert "collectives after the error of rank 1" in report["not_looked_at"]


def test_a_checksum_sees_each_bit_and_a_projection_is_linear():
    import torch
    from lockstep.watch import facts

    torch.manual_seed(0)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        for count in (0, 1, 7, 8191, 8192, 70_000):
            tensor = (100 * torch.randn(count)).to(kind)
            sums = {facts.checksum(tensor)}
            for n in {0, 1, count // 2, count - 1} & set(range(count)):
                other = tensor.clone()
                other[n] = not other[n] if kind == torch.bool else other[n] * 2 + 1
                sums.add(facts.checksum(other))
            assert len(sums) == 1 + len({0, 1, count // 2, count - 1} & set(range(count)))
    a, b = torch.randn(2, 200_000, dtype=torch.float64)
    assert facts.checksum(a) != facts.checksum(torch.cat([a[65536:131072], a[:65536], a[131072:]]))
    parts = facts.projection(a), facts.projection(b), facts.projection(3 * a - b)
    assert abs(3 * parts[0] - parts[1] - parts[2]) < 1e-9 * a.norm()
    moved = torch.cat([a[65536:131072], a[:65536], a[131072:]])
    assert abs(facts.projection(moved) - parts[0]) > 1


def test_a_sample_meets_all_columns_of_a_matrix(monkeypatch):
    import torch
    from lockstep.watch import facts

    monkeypatch.setitem(facts.process, "most", 2**12)
    columns = facts.flat(torch.arange(256).expand(4096, 256))
    assert len(columns.unique()) == 256 and 2**11 < len(columns) <= 2**12


ONE_PROCESS = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
"""

A_NEW_LAYER = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
folder = os.path.join(os.path.dirname(__file__), "saved")
dcp.save({"body": torch.ones(1)}, checkpoint_id=folder)
dcp.load({"head": torch.ones(1)}, checkpoint_id=folder)
"""

ONE_FAILS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("too small")
dist.all_reduce(torch.ones(1), async_op=True)
"""


@pytest.mark.parametrize(
    "text, words",
    [
        ("import torch\ninput('how many epochs? ')\n", "EOFError: EOF when reading a line"),
        ("import torch\nprint('hello')\n", "nothing to compare (it printed last: hello)"),
        ("import torch\n\nraise ValueError('too small')\n", "ValueError: too small, at train.py:3"),
        (ONE_PROCESS, "it trains in one process, and joins no group"),
        (A_NEW_LAYER, "Missing key in checkpoint state_dict: head., at train.py:9"),
        (ONE_FAILS, "ValueError: too small, at train.py:6"),
        ("import torch\ntorch.cuda.CUDAGraph()\n", "GPUs are played by the CPU, and this is not"),
    ],
)
def test_a_script_that_cannot_be_checked_costs_one_line(text, words, check, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    report = check(path)
    assert report["exit_code"] == 2 and words in report["stderr"]
    assert report["findings"] == []
    assert len(report["stderr"].splitlines()) == 1


def test_each_kind_of_finding_is_in_the_table_of_faults_and_on_the_page():
    from lockstep.watch.findings import KINDS

    wanted = {word for _, _, kind, _, _ in FAULTS.values() for word in kind.split("|")}
    page = (ROOT / "docs" / "check.md").read_text()
    assert f" and {len(CLEAN)} right scripts are tested as well" in page
    for kind, (_, lesson) in KINDS.items():
        assert f"| {kind} |" in page, kind
        assert kind in wanted, kind
        assert list((ROOT / "lessons").glob(f"lesson_{lesson}_*.py"))


def test_inf_is_traced_to_a_rank_only_if_all_have_made_the_same_steps():
    from lockstep.watch.findings.halves import origin

    def told(*norms, passes=1):
        theirs = [[{"own_norms": [norm], "backwards": [0]}] for norm in norms]
        theirs[-1][0]["backwards"] *= passes
        return origin(0, 1, theirs[0][0], theirs)

    bad = float("inf")
    assert "came from rank 1" in told(1.0, bad) and "too large" in told(1.0, 2.0)
    assert told(bad, 1.0) == "" and told(1.0, bad, passes=2) == told(0.0, 0.0)


def test_who_was_ended_while_it_joined_has_not_left_the_group_out():
    from types import SimpleNamespace

    from lockstep.watch.findings import rest

    found = []
    report = SimpleNamespace(found=lambda *finding: found.append(finding[0]), findings=[])
    killed = SimpleNamespace(group={"world": 2}, ended=None, updates=[])
    for ended, kinds in ((None, []), ("end", ["no group"])):
        other = SimpleNamespace(group=None, ended=ended, updates=[])
        assert rest.group({0: other, 1: killed}, report, 2)
        assert found == kinds
