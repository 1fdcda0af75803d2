"""Lesson 16: an all-reduce by send and receive, in five ways; PASS sees bits, bytes and rounds."""

import inspect
from pathlib import Path
from unittest.mock import patch

import lesson_16_all_reduce as lesson
import pytest
from breaks import as_module, check_breaks
from conftest import run_warm
from lockstep import lessons, proofs
from solutions import lesson_16 as solutions
from solutions import wrong_16

proof = proofs.of_lesson(lessons.find("16"))


def as_ring(*attempts):
    """Return the source of attempts at the tasks; the last one stands in the ring's place."""
    text = "\n\n".join(map(inspect.getsource, attempts)).replace("lesson.swap", "swap")
    text = text.replace(f"def {attempts[-1].__name__}", "def ring")
    return text.replace("place()", "(dist.get_rank(), dist.get_world_size())")


RING = inspect.getsource(lesson.ring)
SWAPS = "swap(tensor, rank ^ distance, arrived, rank ^ distance)\n        tensor += arrived"
NEXT = "(rank + distance) % n"
HALVES = "swap(theirs, partner, arrived, partner)\n        mine += arrived"
LEFT = "left, right = (rank - 1) % n, (rank + 1) % n"
PAIR = "[dist.P2POp(dist.irecv, coming, source), dist.P2POp(dist.isend, leaving, target)]"
RAISES = 'raise ValueError(f"{} needs a power of two, and not {{n}} ranks")'
BROADCAST = "dist.recv(tensor, 0)\n    for other in range(1, n) if rank == 0 else ():\n        {}"
OTHERS_SWAP = """dist.send(tensor, other)
    if n > 3 and rank in (1, 2):
        swap(tensor.clone(), 3 - rank, arrived, 3 - rank)"""
ONE_BUFFER = """both = tensor.clone()
        pair = [dist.P2POp(op, both, rank ^ distance) for op in (dist.irecv, dist.isend)]
        for work in reversed(dist.batch_isend_irecv(pair)):
            work.wait()
        tensor += both"""
BFLOAT16 = """half = arrived.bfloat16()
        swap(tensor.bfloat16(), rank ^ distance, half, rank ^ distance)
        tensor += half"""
ALL = """whole = torch.empty_like(tensor)
        swap(tensor, partner, whole, partner)
        tensor += whole"""

BREAKS = {  # on 2 ranks; threads play the other numbers of them
    "the send is posted first": (f"pair = {PAIR}", f"pair = {PAIR}[::-1]"),
    "a buffer changes while it is sent": ("(pair):\n", "(pair):\n        leaving.add_(1)\n"),
    "naive: a mean": ("other)\n        tensor += arrived", "other)\n        tensor += arrived / n"),
    "naive: what comes back is lost": ("dist.recv(tensor, 0)", "dist.recv(arrived, 0)"),
    "naive: one rank rounds": ("recv(tensor, 0)", "recv(tensor, 0)\n        tensor *= 1 + 2**-23"),
    "naive: the library sends it back": (
        BROADCAST.format("dist.send(tensor, other)"),
        "pass\n    dist.broadcast(tensor, 0)",
    ),
    "naive: two others swap, too": ("dist.send(tensor, other)", OTHERS_SWAP),
    "tree: the sum goes down the shortest branch first": ("in reversed(children)", "in children"),
    "doubling: any number of ranks": (RAISES.format("doubling"), "pass"),
    "doubling: a round too few": ("while distance < n:", "while distance < n // 2:"),
    "doubling: always the neighbour": (SWAPS, SWAPS.replace("^ distance", "^ 1")),
    "doubling: the partner of my partner": (SWAPS, SWAPS.replace("rank ^ distance", NEXT)),
    "doubling: one buffer, and the send is waited for first": (SWAPS, ONE_BUFFER),
    "doubling: bfloat16 travels": (SWAPS, BFLOAT16),
    "halving: any number of ranks": (RAISES.format("halving"), "pass"),
    "halving: sends all": (HALVES, ALL),
    "halving: nothing is added": ("mine += arrived\n        halving", "halving"),
    "halving: what comes back is lost": (
        "swap(mine, partner, theirs,",
        "swap(mine, partner, arrived,",
    ),
    "halving: both keep the same half": (
        "halves if rank < partner else reversed(halves)",
        "halves",
    ),
    "ring: the rest is forgotten": (
        "tensor.tensor_split(n)",
        "tensor[: len(tensor) // n * n].tensor_split(n)",
    ),
    "ring: chunk() makes fewer parts": ("tensor.tensor_split(n)", "tensor.chunk(n)"),
    "ring: a round too few": ("(n - 1):\n        leaving", "(n - 2):\n        leaving"),
    "ring: sums do not go round": (RING.rstrip().rpartition("\n")[2].strip(), "pass"),
    "ring: whole tensors, added as they come": (
        RING,
        as_ring(wrong_16.from_left, wrong_16.whole_tensors),
    ),
    "ring: to the left": (LEFT, "rank, left, right = -rank % n, (rank + 1) % n, (rank - 1) % n"),
    "ring: each to each": (RING, as_ring(solutions.my_reduce_scatter, wrong_16.each_to_each)),
    "nothing is added up before it is compared": ("    add_up(ours)\n", ""),
    "a number is left out": ("args.seed, device)", "args.seed, device)[1:]"),
    "another tensor is timed": ("torch.zeros_like(mine)", "torch.zeros_like(mine[1:])"),
    "every rank tells": ("print if rank == 0 else lambda line: None", "print"),
}
RACES = {  # gloo may write into memory that is free: what comes of it nobody knows
    "what arrives is not waited for": ("isend_irecv(pair):", "isend_irecv(pair)[1:]:"),
    "the send is not waited for": ("isend_irecv(pair):", "isend_irecv(pair)[:1]:"),
}
FLAGS = ("--megabytes", 0.004, "--steps", 1)


@pytest.mark.parametrize("nproc", (1, 2, 3))  # the breaks on 2, the script as it is on all
def test_each_break_ends_in_fail(nproc):
    check_breaks(16, BREAKS, nproc, *FLAGS)


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_who_does_not_wait_is_seen_where_threads_play(race):
    source = Path(lesson.__file__).read_text().replace(*race)
    with patch.object(proof, "lesson", as_module(source)):
        assert "nobody waits for" in " ".join(proof.wrong_when_played("ring"))


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


@pytest.mark.parametrize("flags", ["--algorithm doubling", "--megabytes -1", "--megabytes nan"])
def test_what_can_not_be_run_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, flags.split(), 6, 6)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and f"argument {flags.split()[0]}: " in line


def test_each_algorithm_has_at_most_15_lines():
    for algorithm in lesson.ALGORITHMS.values():
        assert len(inspect.getsource(algorithm).splitlines()) <= 15, algorithm


# --- The technique in a project of one's own ---

PROJECT = """
dist.init_process_group("gloo")
for add_up in (naive, tree, doubling, halving, ring):
    tensor = torch.arange(5.0) + dist.get_rank()
    add_up(tensor)
    print(add_up.__name__, tensor.tolist())
dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    technique = Path(lesson.__file__).read_text().partition("# --- The technique ---")[2]
    imports = "import torch\nimport torch.distributed as dist\n"
    file = tmp_path / "project.py"
    file.write_text(imports + technique.partition("# --- The example ---")[0] + PROJECT)
    lines = [f"{name} [1.0, 3.0, 5.0, 7.0, 9.0]\n" for name in lesson.ALGORITHMS]
    assert run_warm(file, 2) == [(0, "".join(lines))] * 2
