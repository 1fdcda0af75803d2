"""What a cell of a notebook calls: show source, show a number, judge an attempt, give a hint."""

import contextlib
import difflib
import inspect
import re
import signal
import sys
import textwrap
import threading
from pathlib import Path

from lockstep import lessons, needs

from nbtools.blame import RankFailed

# --- Show the source of the lesson's functions: what you read is what runs ---


def show(*things):
    """Return the source of one or more functions, classes or files (a Path) as Markdown.

    nbval compares it: when the script changes, the notebook turns red until it is executed again.
    """
    return _code("python", "\n\n\n".join(map(_source, things)))


def show_difference(old, new):
    """Return what has to change in the source of `old` to get that of `new`, as Markdown.

    Lines that begin with `-` go, lines that begin with `+` come; all other lines stay, but may be
    indented differently.
    """
    before, after = _source(old).splitlines(), _source(new).splitlines()
    words = [[line.strip() for line in lines] for lines in (before, after)]
    shown = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        if kind == "equal":
            shown += [f" {line}" for line in after[c:d]]
        else:
            shown += [f"-{line}" for line in before[a:b]] + [f"+{line}" for line in after[c:d]]
    return _code("diff", "\n".join(shown))


def _source(thing):
    return (thing.read_text() if isinstance(thing, Path) else inspect.getsource(thing)).rstrip()


def _code(language, text):
    from IPython.display import Markdown

    return Markdown(f"```{language}\n{text}\n```")


# --- Numbers that a run has measured ---


class OutOfBounds(AssertionError):
    """A measured number is not where the notebook says it must be."""


def measured(value, low, high, digits=3):
    """Return `value` as text, ≈0.412, with `digits` digits, if low <= value <= high.

    Raises OutOfBounds if it is not, also for nan.

    `pytest --nbval` compares the text of outputs. It is told (nbval_sanitize.cfg) to ignore the
    digits that follow the sign ≈, and nothing else. So the reader sees the number, a machine that
    differs in the third digit stays green, and the bound of the number stands in the cell.
    """
    value = float(value)
    if not low <= value <= high:
        raise OutOfBounds(f"measured {value:.{digits}g}, which is not from {low} to {high}")
    return f"≈{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"≈{value:.{digits}g}"


# --- Tasks: predict a number, build a function, repair a job ---


def hint(check):
    """Print the hint of the task that `check` judges: hint(tasks.check_rows_in_a_step)."""
    solutions = sys.modules[check.__module__]
    tasks = {its_check: name for name, (its_check, _) in solutions.TASKS.items()}
    print(textwrap.fill(solutions.HINTS[tasks[check]], 88))


# How the error of a stub reads, without a message, here or on a rank.
STUB = re.compile(r"(.*[:,] )?(rank \d+: )?NotImplementedError:? ?( ?\(in \S+, line \d+\))?")


class _TooLong(BaseException):
    """The deadline has come. Not an Exception: an attempt that catches those must not catch it."""


def judge(check, attempt, deadline=600):
    """Return what `check` says about `attempt`, in one line.

    It does not raise (but for an interrupt from the keyboard), and it ends: an attempt that runs
    in this process is stopped at the deadline, one that runs on ranks by nbtools.run.

    check(attempt) returns None when the attempt is right, else one sentence about what is wrong.
    `attempt` is a number (task: predict), or a function (build, repair).

    no guess yet        the number is still None
    not attempted       the function raises NotImplementedError without a message, as a stub does,
                        here or on a rank; PyTorch's own say what is not implemented
    not yet: ...        what is wrong, also when the attempt raises, or has not finished after
                        `deadline` seconds
    correct
    """
    if attempt is None:
        return "no guess yet: put a number in place of None, and run this cell again"
    if isinstance(attempt, str):
        return "not yet: a number is wanted, without quotation marks"
    try:
        with _time_limit(deadline):
            problem = check(attempt)
    except _TooLong:
        problem = f"it had not finished after {deadline} s: does it wait for something?"
    except RankFailed as error:
        problem = str(error)  # "rank 1: ValueError: ..."
    except (Exception, SystemExit) as error:
        words = str(error).strip()  # its first line may be empty
        problem = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if problem is None:
        return "correct"
    lines = (problem.strip() or "it is wrong").splitlines()
    # An error in a thread of nn.DataParallel has its reason at the end.
    reason = lines[-1] if "Caught" in lines[0] else lines[0]
    return "not attempted" if STUB.fullmatch(reason) else f"not yet: {reason}"


@contextlib.contextmanager
def _time_limit(seconds):
    """Raise _TooLong in the block when `seconds` have passed (where signals can do that)."""
    possible = hasattr(signal, "setitimer")
    if not possible or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- A framework that is not installed, and the lesson that needs it ---

FRAMEWORKS = {"tensorflow": "07", "paddle": "08", "jax": "15", "jaxlib": "15"}


def explain_missing_frameworks():
    """Let IPython, if we are in it, answer the import of an absent framework with one line."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.set_custom_exc((ModuleNotFoundError,), _what_to_run)


def _what_to_run(shell, kind, error, traceback, tb_offset=None):
    """Show that a module was not found, as IPython does; if it is a framework, in one line."""
    name = error.name or getattr(error.__cause__, "name", None)  # jax raises its own for jaxlib
    if name in FRAMEWORKS:
        number = FRAMEWORKS[name]
        missing = needs.missing_packages(lessons.find(number), lessons.FRAMEWORKS)
        if Path(sys.prefix).resolve() == lessons.ROOT / ".venv":
            missing = f"needs {name}: bash scripts/setup.sh {number}"
        line = f"this notebook {missing}; then run this cell again"
        error._render_traceback_ = lambda: [line]  # IPython asks for this, as of RankFailed
    shell.showtraceback((kind, error, traceback), tb_offset, running_compiled_code=True)
