"""Examine one lesson in a process of its own, and print what was found as one line of JSON.

    python tests/examine_lesson.py 03

test_contract.py starts it for each lesson: frameworks that can't share a process stay apart, and a
lesson is imported once for all of its bad flags, its solutions and the wrong attempts.
"""

import contextlib
import importlib
import io
import json
import multiprocessing.process
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lessons"), str(ROOT / "notebooks")]

BAD = ["--steps 0", "--steps two", "--batch-size -1", "--seed -1", "--seed 4294967296"]
BAD += ["--no-such-flag", "--step 3"]  # no abbreviations: they would change their meaning one day
BAD += [f"--seed {'9' * 5000}"]  # a long value is not repeated as a whole
BAD_NPROC = ["--nproc 0", "--nproc 65", "--nproc two"]  # where the lesson has this flag itself


def call(lesson, flags):
    """Call a lesson as the command line does; return [exit code, stdout, stderr]."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, [lesson.__file__, *flags.split()]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = lesson.start(lesson.main) if hasattr(lesson, "start") else lesson.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = argv
    return [code, stdout.getvalue(), stderr.getvalue()]


def forbid_processes():
    """Make it an error to start a process or to join a group, for the rest of this process."""

    def forbidden(*args, **kwargs):
        raise AssertionError("something was started")

    subprocess.Popen = multiprocessing.process.BaseProcess.start = forbidden
    if "torch" in sys.modules:
        importlib.import_module("torch.distributed").init_process_group = forbidden


def examine_flags(name):
    """Return {flags: [exit code, stdout, stderr]} of --help and of bad values."""
    lesson = importlib.import_module(name)
    forbid_processes()
    found = {"--help": call(lesson, "--help")}
    has_nproc = "\n  --nproc " in found["--help"][1]  # else it belongs to the launcher
    return found | {flags: call(lesson, flags) for flags in BAD + BAD_NPROC * has_nproc}


def examine_tasks(number):
    """Return {task: {attempt: [verdict, words that must be in it]}}; "" is the solution."""
    judge = importlib.import_module("nbtools").judge
    solutions = importlib.import_module(f"solutions.lesson_{number}")
    attempts = importlib.import_module(f"solutions.wrong_{number}")
    wrong, right = attempts.WRONG, getattr(attempts, "RIGHT", {})
    verdicts = {}
    for task, (check, solution) in solutions.TASKS.items():
        verdicts[task] = {"": [judge(check, solution), "correct"]}
        for attempt in right.get(task, []):  # other right answers
            verdicts[task][f"right: {attempt.__name__}"] = [judge(check, attempt), "correct"]
        verdicts[task] |= {
            title: [judge(check, attempt), words]
            for title, (attempt, words) in wrong.get(task, {}).items()
        }
        if isinstance(solution, types.FunctionType):
            verdicts[task]["stub"] = [judge(check, stub), "not attempted"]
        else:
            verdicts[task]["stub"] = [judge(check, None), "no guess yet"]
    return verdicts


def predicted_numbers(number):
    """Return {task: the right number} of the tasks that ask for one."""
    tasks = importlib.import_module(f"solutions.lesson_{number}").TASKS
    return {task: right for task, (_, right) in tasks.items() if isinstance(right, int | float)}


def stub(*args, **kwargs):
    raise NotImplementedError


if __name__ == "__main__":
    number = sys.argv[1]
    (script,) = (ROOT / "lessons").glob(f"lesson_{number}_*.py")
    tasks = examine_tasks(number)  # first: examine_flags forbids processes
    found = {"tasks": tasks, "numbers": predicted_numbers(number)}
    print(json.dumps(found | {"flags": examine_flags(script.stem)}))
