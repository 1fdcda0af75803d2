"""What every lesson owes to who calls it: flags are checked, tasks are judged.

Its flags are checked before anything starts; its tasks accept the solution and refuse the usual
wrong answers. examine_lesson.py tries it, for several lessons in one process.
"""

import ast
import json
import os
import re
import subprocess
import sys
from multiprocessing.connection import wait

import pytest
from conftest import QUICK_JAX, ROOT
from lockstep import lessons
from test_contract import docstring, each, literal


class Examination:
    """What tests/examine_lesson.py finds in several lessons, which share one process."""

    PATIENCE = 1500  # seconds without a result: something hangs

    def __init__(self, numbers):
        self.waiting = list(numbers)
        self.found = {}
        self.process = None

    def of(self, lesson):
        """Return what was found in a lesson; fails if its examination has hung or has died."""
        while lesson not in self.found:
            if self.process is None:
                self.start()
            self.read_next()
        found = self.found[lesson]
        assert isinstance(found, dict), found
        return found

    def start(self):
        """Start a process that examines the lessons that have no result yet."""
        command = [sys.executable, ROOT / "tests" / "examine_lesson.py", *self.waiting]
        pipe = {"stdout": subprocess.PIPE, "bufsize": 0}  # what wait() sees is all that there is
        place = {"cwd": ROOT / "notebooks", "env": os.environ | QUICK_JAX}  # there a task is solved
        self.process = subprocess.Popen(command, start_new_session=True, **place, **pipe)

    def read_next(self):
        """Read the result of the next lesson; if none comes, end the process and say so."""
        lesson = self.waiting.pop(0)
        answered = wait([self.process.stdout], self.PATIENCE)
        line = self.process.stdout.readline() if answered else b""
        if line:
            self.found[lesson] = json.loads(line)
            return
        how = "has ended" if answered else f"has said nothing for {self.PATIENCE} s"
        self.found[lesson] = f"lesson {lesson}: its examination {how}; its stderr says where it was"
        self.end()

    def end(self):
        """End the process; its ranks end with it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


@pytest.fixture(scope="module")
def examined(request):
    """Return a function: examined("03") is what tests/examine_lesson.py finds in lesson 03.

    Two frameworks can't share a process. All other lessons are examined in one, and only those that
    are asked for in this session.
    """
    items = request.session.items  # notebooks' cells are among them, and have no fixtures
    asking = [item for item in items if "examined" in getattr(item, "fixturenames", ())]
    numbers = sorted({item.callspec.params["lesson"] for item in asking})
    own = {n for n in numbers if lessons.find(n).frameworks()}
    together = Examination(n for n in numbers if n not in own)
    examinations = {n: Examination([n]) if n in own else together for n in numbers}
    yield lambda lesson: examinations[lesson].of(lesson)
    for examination in examinations.values():
        examination.end()


# --- Flags ---


@each
def test_help_shows_the_docstring_and_starts_nothing(lesson, examined):
    code, stdout, stderr = examined(lesson)["flags"]["--help"]
    assert (code, stderr) == (0, "")
    assert docstring(lesson).splitlines()[0] in stdout
    for flag in ("--steps", "--batch-size", "--seed", "--json"):
        assert flag in stdout


@each
def test_bad_values_cost_one_line_and_start_nothing(lesson, examined):
    found = examined(lesson)["flags"]
    assert len(found) >= 8
    for flags, (code, stdout, stderr) in found.items():
        if flags != "--help":
            assert (code, stdout, len(stderr.splitlines())) == (2, "", 1), (flags, stderr)
            assert "error: " in stderr and flags.split()[0] in stderr and len(stderr) < 500, stderr


# --- Tasks ---


@each
def test_tasks_take_the_solution_and_refuse_wrong_answers(lesson, examined):
    tasks = examined(lesson)["tasks"]
    assert len(tasks) >= 3
    for task, attempts in tasks.items():
        assert len(attempts) >= 3, f"{task}: the solution, the stub, and a wrong answer at least"
        for attempt, (verdict, words) in attempts.items():
            wrong = attempt not in ("", "stub") and not attempt.startswith("right: ")
            assert verdict.startswith("not yet: ") == wrong, (task, attempt, verdict)
            assert words in verdict and "\n" not in verdict, (task, attempt, verdict)


@each
def test_no_hint_tells_the_number(lesson, examined):
    hints = ast.literal_eval(literal(lesson, "HINTS"))
    for task, answer in examined(lesson)["numbers"].items():
        told = re.findall(r"\b\d+(?:\.\d+)?\b", hints[task].replace(",", ""))
        assert not [number for number in told if abs(float(number) / answer - 1) < 0.01], task
