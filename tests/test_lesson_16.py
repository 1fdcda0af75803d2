"""Lesson 16: an all-reduce by send and receive, in five ways; PASS sees bits, bytes and rounds."""

import inspect
import json
from pathlib import Path

import lesson_16_all_reduce as lesson
import pytest
from breaks import check_breaks
from conftest import run_warm

NAIVE = "        dist.recv(arrived, other)\n        tensor += arrived"
LEAF = "        dist.send(tensor, 0)\n        dist.recv(tensor, 0)\n"
SENDS_BACK = "    for other in range(1, n) if rank == 0 else ():\n        dist.send(tensor, other)"
SWAPS = "        swap(tensor, rank ^ distance, arrived, rank ^ distance)\n        tensor += arrived"
HALVES = "        swap(theirs, partner, arrived, partner)\n        mine += arrived"
BACK = "        swap(mine, partner, theirs, partner)\n"
CHUNKS = "    chunks = tensor.tensor_split(n)"
FIRST = "        leaving, mine = chunks[(rank - step) % n]"
GO_ROUND = "swap(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left)"
PAIR = "[dist.P2POp(dist.irecv, coming, source), dist.P2POp(dist.isend, leaving, target)]"
RAISES = 'raise ValueError(f"{} needs a power of two, and not {{n}} ranks")'

CHAIN = """def tree(tensor):
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    if rank + 1 < n:
        dist.recv(arrived, rank + 1)
        tensor += arrived
    if rank > 0:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
    if rank + 1 < n:
        dist.send(tensor, rank + 1)
"""
CAROUSEL = """def ring(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing, total = tensor.clone(), tensor.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(tensor)
        swap(passing, (rank + 1) % n, arrived, (rank - 1) % n)
        total += arrived
        passing = arrived
    tensor.copy_(total)
"""
DIRECT = """def ring(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for back, step in [(back, step) for back in (0, 1) for step in range(1, n)]:
        target, source = (rank + step) % n, (rank - step) % n
        arrived = torch.empty_like(chunks[source if back else rank])
        swap(chunks[rank if back else target], target, arrived, source)
        if back:
            chunks[source].copy_(arrived)
        else:
            chunks[rank].add_(arrived)
"""
ONE_BUFFER = """        both = tensor.clone()
        pair = [dist.P2POp(op, both, rank ^ distance) for op in (dist.irecv, dist.isend)]
        for work in reversed(dist.batch_isend_irecv(pair)):
            work.wait()
        tensor += both"""

BREAKS = {  # on 2 ranks, or on those that are named
    "what arrives is not waited for": ("isend_irecv(pair):", "isend_irecv(pair)[1:]:"),
    "the send is not waited for": ("isend_irecv(pair):", "isend_irecv(pair)[:1]:"),
    "the send is posted first": (f"pair = {PAIR}", f"pair = {PAIR}[::-1]"),
    "a buffer changes while it is sent": (
        "isend_irecv(pair):\n        work.wait()",
        "isend_irecv(pair):\n        leaving.add_(1)\n        work.wait()",
    ),
    "naive: a mean": (NAIVE, NAIVE.replace("+= arrived", "+= arrived / n")),
    "naive: what comes back is lost": (LEAF, LEAF.replace("recv(tensor", "recv(arrived")),
    "naive: one rank rounds": (LEAF, f"{LEAF}        tensor *= 1 + 2**-23\n"),
    "naive: the library sends it back": (
        f"{LEAF}{SENDS_BACK}",
        "        dist.send(tensor, 0)\n    dist.broadcast(tensor, 0)",
    ),
    "naive: two others swap, too": (
        SENDS_BACK,
        f"{SENDS_BACK}\n    if rank in (1, 2):\n"
        "        swap(tensor.clone(), 3 - rank, arrived, 3 - rank)",
        (4,),
    ),
    "tree: a chain": (inspect.getsource(lesson.tree), CHAIN, (4,)),
    "doubling: any number of ranks": (RAISES.format("doubling"), "pass", (3,)),
    "doubling: a round too few": ("while distance < n:", "while distance < n // 2:"),
    "doubling: always the neighbour": (SWAPS, SWAPS.replace("^ distance", "^ 1"), (4,)),
    "doubling: one buffer, and the send is waited for first": (SWAPS, ONE_BUFFER),
    "doubling: bfloat16 travels": (
        SWAPS,
        "        arrived = torch.empty_like(tensor, dtype=torch.bfloat16)\n"
        + SWAPS.replace("swap(tensor,", "swap(tensor.bfloat16(),"),
    ),
    "halving: any number of ranks": (RAISES.format("halving"), "pass", (3,)),
    "halving: sends all": (
        HALVES,
        "        whole = torch.empty_like(tensor)\n"
        "        swap(tensor, partner, whole, partner)\n"
        "        tensor += whole",
    ),
    "halving: nothing is added": (HALVES, HALVES.replace("mine += arrived", "pass")),
    "halving: what comes back is lost": (BACK, BACK.replace("theirs,", "theirs.clone(),")),
    "ring: the rest is forgotten": (
        CHUNKS,
        CHUNKS.replace("tensor.", "tensor[: len(tensor) // n * n]."),
    ),
    "ring: a round too few": (f"range(n - 1):\n{FIRST}", f"range(n - 2):\n{FIRST}"),
    "ring: sums do not go round": (GO_ROUND, "pass"),
    "ring: whole tensors, added as they come": (inspect.getsource(lesson.ring), CAROUSEL),
    "ring: to the left": (
        "left, right = (rank - 1) % n, (rank + 1) % n",
        "rank, left, right = -rank % n, (rank + 1) % n, (rank - 1) % n",
        (3,),
    ),
    "ring: each to each": (inspect.getsource(lesson.ring), DIRECT, (3,)),
}
FLAGS = ("--megabytes", 0.004, "--steps", 1)


@pytest.mark.parametrize("nproc", (2, 3, 4))
def test_each_break_ends_in_fail(nproc):
    check_breaks(16, BREAKS, nproc, *FLAGS)


# --- The whole script ---


@pytest.mark.claim("E1")
def test_default_run(default_run):
    result = default_run(16).json
    names = ["naive", "tree", "doubling", "halving", "ring"]
    assert (result["algorithms"], result["same_bits"]) == (names, True)
    assert result["bytes_busiest"] == {name: [1_000_000] for name in names}
    assert result["messages_busiest"] == dict(zip(names, (1, 1, 1, 2, 2), strict=True))
    assert result["rounds"] == dict(zip(names, (2, 2, 1, 2, 2), strict=True))
    assert set(result["milliseconds"]) == {*names, "library"}
    assert result["max_diff"] == 0.0  # of two ranks, there is only one order


@pytest.mark.parametrize("nproc", (1, 6, 8))
def test_other_numbers_of_ranks_pass(nproc):
    (code, stdout), *others = run_warm(lesson.__file__, nproc, *FLAGS, "--json")
    assert (code, others) == (0, [(0, "")] * (nproc - 1)), stdout
    result = json.loads(stdout.splitlines()[-1])
    left_out = [] if nproc in (1, 8) else ["doubling", "halving"]
    assert sorted([*result["algorithms"], *left_out]) == sorted(lesson.ALGORITHMS)
    assert ("need a power of two, and not" in stdout) == bool(left_out)
    if nproc == 8:  # the formulas by hand: 1,000 numbers
        sent = {"naive": 28000, "tree": 12000, "doubling": 12000, "halving": 7000, "ring": 7000}
        assert result["bytes_busiest"] == {name: [nbytes] for name, nbytes in sent.items()}
        assert list(result["rounds"].values()) == [14, 6, 3, 6, 14]


def test_an_algorithm_that_needs_a_power_of_two_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "6")
    for flags, words in (
        ("--algorithm doubling", "doubling needs a power of two, and not 6 ranks"),
        ("--algorithm star", "invalid choice: 'star'"),
        ("--megabytes -1", "must be a number from 0 to 1000, not '-1'"),
        ("--megabytes 1 nan", "must be a number from 0 to 1000, not 'nan'"),
    ):
        with pytest.raises(SystemExit) as stop:
            lesson.parse_args(flags.split())
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and words in line


def test_each_algorithm_has_at_most_15_lines():
    for algorithm in lesson.ALGORITHMS.values():
        assert len(inspect.getsource(algorithm).splitlines()) <= 15, algorithm


# --- The technique in a project of one's own ---

PROJECT = """

import sys

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
for add_up in (naive, tree, ring) if n == 3 else (naive, tree, doubling, halving, ring):
    tensor = torch.arange(5.0) + rank
    add_up(tensor)
    print(add_up.__name__, tensor.tolist())
for add_up in (doubling, halving) if n == 3 else ():
    try:
        add_up(torch.ones(1))
    except ValueError as error:
        print(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nproc", (2, 3))
def test_the_technique_runs_in_a_project_of_ones_own(nproc, tmp_path):
    technique = Path(lesson.__file__).read_text().partition("# --- The technique ---")[2]
    imports = "import torch\nimport torch.distributed as dist\n"
    file = tmp_path / "project.py"
    file.write_text(imports + technique.partition("# --- The proof ---")[0] + PROJECT)
    total = [float(nproc * number + nproc * (nproc - 1) // 2) for number in range(5)]
    names = list(lesson.ALGORITHMS) if nproc == 2 else ["naive", "tree", "ring"]
    lines = [f"{name} {total}" for name in names]
    for name in ("doubling", "halving") if nproc == 3 else ():
        lines.append(f"{name} needs a power of two, and not 3 ranks")
    assert run_warm(file, nproc) == [(0, "\n".join(lines) + "\n")] * nproc
