"""PASS means it: take a part of the technique away, and the lesson's own verdict is FAIL.

Each tests/test_lesson_NN.py has the table BREAKS = {name: (text in the script, text in its place)}
of such mistakes, as a literal. A third part of a row, a tuple, says on how many ranks this mistake
is one, where that differs. BREAKS_RUN = {"ranks": (2, 3), "flags": [...], "machines": 2} says how
they are tried; with two machines, half of the ranks are told that they run on the second.

The ranks are forks of a process that has imported torch: a break costs a second, not six.
"""

import ast
import contextlib
import importlib
import io
import os
import sys
import types
from unittest.mock import patch

import cloudpickle
import pytest
from conftest import ROOT
from lockstep import lessons
from nbtools import run

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

THIRD = [each for each in lessons.TABLE if "\ndef conclude(" in each.script.read_text()]


def literals(lesson):
    """Return the literals BREAKS and BREAKS_RUN of a lesson's test file."""
    tree = ast.parse((ROOT / "tests" / f"test_lesson_{lesson.number}.py").read_text())
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    named = {ast.unparse(node.targets[0]): node.value for node in assignments}
    found = {name: ast.literal_eval(named[name]) for name in named if name.startswith("BREAKS")}
    usual = {"ranks": (2, 3), "flags": [], "machines": 1}
    return found.get("BREAKS", {}), usual | found.get("BREAKS_RUN", {})


def verdict(rank, world_size, source, flags, machines):
    """Run a script's main() on a rank, whose group exists already; return (passed, claim)."""
    import torch
    import torch.distributed as dist

    node, local_rank = divmod(rank, -(-world_size // machines))
    here = [other for other in range(world_size) if other // -(-world_size // machines) == node]
    place = {"GROUP_RANK": node, "GROUP_WORLD_SIZE": machines, "LOCAL_RANK": local_rank}
    place |= {"LOCAL_WORLD_SIZE": len(here), "MASTER_ADDR": "10.14.0.1", "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in place.items()}
    script = {"__name__": "script", "__doc__": "", "__file__": "script.py"}
    sys.modules["script"] = types.ModuleType("script")  # what looks its own module up finds one
    exec(compile(source, "script.py", "exec"), script)
    if "launch_job" in script:  # the ranks are started already
        place = (rank, world_size, torch.device("cpu"))
        script["launch_job"] = lambda func, nproc, *args: func(*place, *args)
    with contextlib.ExitStack() as stack:
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(patch.object(dist, name, lambda *args, **kwargs: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        passed, claim, _ = script["main"](script["parse_args"](flags))
    return bool(passed), claim


def verdict_of_rank_0(lesson, source, nproc, options):
    """Return (passed, claim), as rank 0 would print them."""
    one_process = lesson.start == lessons.ONE_PROCESS
    flags = options["flags"]
    if one_process or lesson.start == lessons.LAUNCH_JOB:
        flags = [*flags, "--nproc", str(nproc)]
    return run(verdict, 1 if one_process else nproc, source, flags, options["machines"])[0]


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Import what is slow and some lessons need: then the process that forks the ranks has it."""
    importlib.import_module("sklearn.datasets")


@pytest.mark.parametrize("lesson", THIRD, ids=lambda lesson: f"lesson_{lesson.number}")
def test_a_lesson_without_a_part_of_its_technique_says_fail(lesson):
    breaks, options = literals(lesson)
    assert len(breaks) >= 6
    source = lesson.script.read_text()
    wrong = []
    for nproc in options["ranks"]:
        passed, claim = verdict_of_rank_0(lesson, source, nproc, options)
        assert passed, f"as it is, on {nproc} ranks: {claim}"
        for name, (part, other, *where) in breaks.items():
            assert source.count(part) == 1, f"{name}: {part!r} is there {source.count(part)} times"
            if not where or nproc in where[0]:
                broken = source.replace(part, other)
                passed, claim = verdict_of_rank_0(lesson, broken, nproc, options)
                wrong += [f"{name}, on {nproc} ranks: PASS {claim}"] if passed else []
    assert wrong == []
