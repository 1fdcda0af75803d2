"""Grade the tasks of a notebook: predict a number, build a function, repair a job."""

import contextlib
import signal
import threading

from nbtools.run import RankFailed


class _TooLong(BaseException):
    """The deadline has come. Not an Exception: an attempt that catches those must not catch it."""


def judge(check, attempt, deadline=120):
    """Return what `check` says about `attempt`, in one line.

    It does not raise (but for an interrupt from the keyboard), and it ends: an attempt that runs
    in this process is stopped at the deadline, one that runs on ranks by nbtools.run.

    check(attempt) returns None when the attempt is right, else one sentence about what is wrong.
    `attempt` is a number (task: predict), or a function (build, repair).

    no guess yet        the number is still None
    not attempted       the function raises NotImplementedError, here or on a rank
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
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return "correct"
    lines = (problem.strip() or "it is wrong").splitlines()
    if "NotImplementedError" in problem and "missing the required" not in problem:
        return "not attempted"
    # An error in a thread of nn.DataParallel has its reason at the end.
    return f"not yet: {lines[-1] if 'Caught' in lines[0] else lines[0]}"


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
