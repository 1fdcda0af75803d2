"""The interactive pages compute what docs/formulas.py says, and that is what the lessons say."""

import importlib.util
import json
import shutil
import subprocess
from itertools import product
from math import isclose
from pathlib import Path

import lesson_11_how_fast as how_fast
import pytest

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("formulas", DOCS / "formulas.py")
formulas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(formulas)
STORED = json.loads(formulas.TABLE.read_text())

MODEL = {"parameters": 40 * 12 * 4096**2, "activations": 0, "cut": 0, "micro_batches": 32}
MIXED = {"precision": "mixed", "optimizer": "Adam"}


def same(one, other):
    """Return True if two rows of values have the same names, and numbers but for rounding."""
    close = [isclose(one[name], other[name], rel_tol=1e-12) for name in one.keys() & other.keys()]
    return one.keys() == other.keys() and all(close)


def test_the_stored_table_is_what_python_computes():
    assert {name: [row["inputs"] for row in rows] for name, rows in STORED.items()} == json.loads(
        json.dumps(formulas.grid())
    ), "the grid has changed: python docs/formulas.py"
    for name, rows in STORED.items():
        for row in rows:
            assert same(getattr(formulas, name)(**row["inputs"]), row["values"]), row["inputs"]


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize("name", STORED)
def test_javascript_computes_the_stored_table(name):
    script = {"data_parallel_step": "cost_model", "rank_memory": "memory"}[name]
    code = f"""const formulas = require("./_static/{script}_formulas.js");
        const rows = require("./formulas.json").{name};
        console.log(JSON.stringify(rows.map((row) => formulas.{name}(row.inputs))));"""
    job = subprocess.run(["node", "-e", code], cwd=DOCS, capture_output=True, check=True, text=True)
    for row, values in zip(STORED[name], json.loads(job.stdout), strict=True):
        assert same(values, row["values"]), row["inputs"]


@pytest.mark.parametrize("divided", [True, False])
def test_a_step_is_that_of_lesson_11(divided):
    for n, size, compute in product((1, 2, 7, 256), (4096, 102_228_128), (0.01, 0.1)):
        assert formulas.all_reduce_cost(n, size) == how_fast.all_reduce_cost(n, size)
        for us, gb, _ in how_fast.LINKS:
            sending = how_fast.predict_all_reduce((us / 1e6, 1e-9 / gb), n, size)
            times = (compute, compute / n) if divided else (n * compute, compute)
            expected = how_fast.predict_speedup(*times, sending)
            for overlap, speedup in zip((0, 1), expected, strict=True):
                job = (n, size, compute, us / 1e6, gb * 1e9, overlap, 1, divided)
                step = formulas.data_parallel_step(*job)
                assert isclose(step["sending"], sending, rel_tol=1e-12)
                assert isclose(step["speedup"], speedup, rel_tol=1e-12)


def test_a_slow_device_and_a_part_of_the_overlap():
    job = {"size": 1e6, "compute": 1.0, "latency": 0, "bandwidth": 1e6, "divided": False}
    step = formulas.data_parallel_step(devices=2, overlap=0.25, slowest=1.5, **job)
    assert step["late"] == 0.5 and step["hidden"] == 0.25 and step["exposed"] == 0.75
    assert step["step"] == 2.25  # 1.5 s, and three quarters of a second of sending


@pytest.mark.parametrize("strategy, low, gigabytes", [
    ("data", 120, 129), ("zero1", 31.4, 44), ("zero2", 16.6, 30), ("zero3", 1.9, 16),
    ("tensor", None, 16), ("gpipe", None, 16), ("1f1b", None, 16),
])  # fmt: skip
def test_memory_of_zero_figure_1_and_of_the_table_of_lesson_13(strategy, low, gigabytes):
    held = formulas.rank_memory(strategy, ranks=8, **MODEL, **MIXED)["total"] / 1e9
    assert round(held) == gigabytes
    if low:  # figure 1 of arXiv:1910.02054: 7.5 billion parameters on 64 devices
        job = MODEL | MIXED | {"parameters": 7.5e9, "ranks": 64}
        assert round(formulas.rank_memory(strategy, **job)["total"] / 1e9, 1) == low


def test_memory_of_lesson_12():
    adam = formulas.rank_memory("data", 7e9, "float32", "Adam", 1, 0, 1, 0)
    assert adam["total"] == 112e9  # lesson 12: measured on a layer, for 7 billion parameters
    kept = {"gpipe": [49_152] * 4, "1f1b": [24_576, 18_432, 12_288, 6_144]}  # in 8 micro-batches
    for schedule, counted in kept.items():
        alive = [formulas.alive_micro_batches(schedule, 4, 8, stage) for stage in range(4)]
        assert [24_576 * count // 4 for count in alive] == counted
        job = MODEL | MIXED | {"activations": 24_576, "micro_batches": 8, "ranks": 4}
        assert formulas.rank_memory(schedule, **job)["activations"] == counted[0]
