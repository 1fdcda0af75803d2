"""The second process of a lesson, which run.py watches: it runs the script, or starts its ranks.

python scripts/lockstep inside HOW SCRIPT [flags]       HOW: a word of lessons.py
"""

import multiprocessing
import os
import signal
import sys
import traceback

from lockstep import by_hand, ending, lessons, proofs, ranks, rehearsal
from lockstep.lessons import BY_HAND, ONE_PROCESS, REHEARSAL, TORCHRUN


def main(arguments):
    """Run a script as if Python had been called with it; leave with its exit code."""
    how, script, *flags = arguments
    ending.end_with_parent(signal.SIGTERM)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, ending.leave)
    watcher = os.getppid()
    code = run(how, script, flags)
    signal.setitimer(signal.ITIMER_REAL, 0)  # ending.leave may still wait
    end_ranks(watcher)
    ending.leave_with(code)


def end_ranks(watcher):
    """End the ranks that the script has started and, interrupted, has not waited for.

    What they have started is in our process group, and the watcher, our parent, ends that. If the
    watcher itself was killed, we do.
    """
    for rank in multiprocessing.active_children():
        rank.kill()
    if os.getppid() != watcher and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def run(how, script, flags):
    """Run a script, or start its ranks; return the exit code."""
    try:
        if how == TORCHRUN:
            return ranks.main(script, flags)
        if how == REHEARSAL:
            return rehearsal.main(script, flags)
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        if proofs.of_script(script):
            return run_watched(how, script, flags)
        sys.argv = [script, *flags]
        ending.run_script(script)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        lines = str(stop.code).strip().splitlines()
        return fail("\n".join(lines if ending.verbose() else lines[-1:]))
    except Exception as error:
        if ending.verbose():
            traceback.print_exc()
        failed = ending.of_spawned(error) or f"{os.path.basename(script)} failed: "
        return fail(failed + ending.reason(error))
    return 0


def fail(text):
    """Say why, and return the exit code; of who was asked to end, it is a consequence, and silent.

    In a rehearsal, for example, the launcher of the first machine may end before that of the other.
    """
    if ending.asked:
        return 128 + ending.asked[0]
    ending.say(text)
    return 1


def run_watched(how, script, flags):
    """Run a lesson that torchrun does not start, and judge it; return the exit code."""
    args = proofs.read_flags(script, flags, 1, 1)
    sys.argv = [script, *[flag for flag in flags if flag != "--json"]]
    sys.path.append(str(lessons.ROOT / "scripts"))  # a spawned rank gets this path
    if hasattr(proofs.of_script(script), "examine"):  # a proof that starts the ranks itself
        return proofs.tell(proofs.of_script(script).examine(args), script, args)
    if how == ONE_PROCESS:
        return proofs.run_in_one_process(script, args)
    from lockstep.watch import hooks

    if not ending.verbose():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error costs one line
    with proofs.Watch(script) as seen:
        if how == BY_HAND and by_hand.told(args) is None:
            by_hand.start_all(script, args)
        else:
            hooks.start()  # ranks find them by themselves; with one rank it is this process
            ending.run_script(script)
        return seen.judge(args, args.nproc, "none")
