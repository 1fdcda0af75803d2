"""Examine lessons in a process of its own; print what is found, one line of JSON for each of them.

    python tests/examine_lesson.py 02 03

test_tasks.py starts it once for all lessons that share a framework: so torch starts once here
and once for the ranks, and each lesson is imported once for its bad flags and for all attempts at
its tasks. A line of stderr tells what is being tried, for the case that it never ends.
"""

import contextlib
import importlib
import io
import json
import multiprocessing.process
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("lessons", "notebooks", "scripts")]

from lockstep import proofs  # noqa: E402

BAD = ["--steps 0", "--steps two", "--batch-size -1", "--seed -1", "--seed 4294967296"]
BAD += ["--no-such-flag", "--step 3"]  # no abbreviations: they would change their meaning one day
BAD += [f"--seed {'9' * 5000}"]  # a long value is not repeated as a whole
BAD_NPROC = ["--nproc 0", "--nproc 65", "--nproc two"]  # where the lesson has this flag itself


def import_modules_of(number):
    """Import the lesson, its solutions and its wrong attempts; return the three modules."""
    (script,) = (ROOT / "lessons").glob(f"lesson_{number}_*.py")
    names = (script.stem, f"solutions.lesson_{number}", f"solutions.wrong_{number}")
    return [importlib.import_module(name) for name in names]


def examine(number):
    """Return what is found in one lesson: its tasks, its predicted numbers, its flags."""
    lesson, solutions, attempts = import_modules_of(number)
    return {
        "tasks": examine_tasks(number, solutions.TASKS, attempts),
        "numbers": predicted_numbers(solutions.TASKS),
        "flags": examine_flags(lesson),
    }


# --- Flags ---


def call(lesson, flags):
    """Call a lesson as the command line does; return [exit code, stdout, stderr]."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, [lesson.__file__, *flags.split()]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            if proofs.of_script(lesson.__file__):
                proofs.read_flags(lesson.__file__, flags.split(), 2, 2)
                raise AssertionError("these flags were taken")
            code = lesson.main(lesson.parse_args())
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = argv
    return [code, stdout.getvalue(), stderr.getvalue()]


@contextlib.contextmanager
def nothing_starts():
    """Make it an error, within the block, to start a process or to join a group."""

    def forbidden(*args, **kwargs):
        raise AssertionError("something was started")

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(subprocess, "Popen", forbidden))
        stack.enter_context(patch.object(multiprocessing.process.BaseProcess, "start", forbidden))
        if "torch" in sys.modules:
            group = importlib.import_module("torch.distributed")
            stack.enter_context(patch.object(group, "init_process_group", forbidden))
        yield


def examine_flags(lesson):
    """Return {flags: [exit code, stdout, stderr]} of --help and of bad values."""
    with nothing_starts():
        found = {"--help": call(lesson, "--help")}
        has_nproc = "\n  --nproc " in found["--help"][1]  # else it belongs to the launcher
        return found | {flags: call(lesson, flags) for flags in BAD + BAD_NPROC * has_nproc}


# --- Tasks ---


def stub(*args, **kwargs):
    raise NotImplementedError


def all_attempts(task, check, solution, attempts):
    """Yield (title, attempt, words that the verdict must contain, check); "" is the solution.

    A wrong attempt may bring a check of its own: the same one, with less patience.
    """
    yield "", solution, "correct", check
    for attempt in getattr(attempts, "RIGHT", {}).get(task, []):  # other right answers
        yield f"right: {attempt.__name__}", attempt, "correct", check
    for title, (attempt, words, *own_check) in attempts.WRONG.get(task, {}).items():
        yield title, attempt, words, own_check[0] if own_check else check
    if isinstance(solution, types.FunctionType | type):
        yield "stub", stub, "not attempted", check
    else:
        yield "stub", None, "no guess yet", check


def examine_tasks(number, tasks, attempts):
    """Return {task: {title of an attempt: [verdict, words that must be in it]}}."""
    judge = importlib.import_module("nbtools").judge
    verdicts = {}
    for task, (check, solution) in tasks.items():
        verdicts[task] = {}
        for title, attempt, words, its_check in all_attempts(task, check, solution, attempts):
            print(f"lesson {number}, {task}: {title or 'the solution'}", file=sys.stderr)
            verdicts[task][title] = [judge(its_check, attempt), words]
    return verdicts


def predicted_numbers(tasks):
    """Return {task: the right number} of the tasks that ask for one."""
    return {task: right for task, (_, right) in tasks.items() if isinstance(right, int | float)}


if __name__ == "__main__":
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an attempt prints is not a result
    for number in sys.argv[1:]:  # before the ranks' process starts: it imports the same packages
        with contextlib.suppress(Exception):  # it is said when it is this lesson's turn
            import_modules_of(number)
    for number in sys.argv[1:]:
        print(json.dumps({"lesson": number} | examine(number)), file=results, flush=True)
