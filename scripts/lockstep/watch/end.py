"""How a rank ends: by itself, by an error, or not at all."""

import atexit
import functools
import multiprocessing.util
import os
import sys
import traceback

from lockstep import ending
from lockstep.watch import facts, models
from lockstep.watch.hooks import around


def watch():
    """Put the hooks in place."""
    around(sys, "excepthook", excepthook)
    around(sys.modules["torch.multiprocessing.spawn"], "_wrap", be_rank)


@functools.cache
def watch_this_rank():
    """Write down the last state of this process. multiprocessing's children skip atexit."""
    ours = os.getpid()

    def at_end():
        if os.getpid() == ours and os.path.isdir(facts.settings["folder"]):
            models.note_states()
            facts.note("end")

    atexit.register(at_end)
    multiprocessing.util.Finalize(None, at_end, exitpriority=0)


def note_error(error):
    """Write down an error, with the reader's own line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if facts.is_own(f.filename)]
    place = f"{facts.shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
    error = ending.innermost(error)
    text = (str(error).strip().splitlines() or [""])[0][:300]
    facts.note("error", type=type(error).__name__, text=text, where=place)


def excepthook(function, instance, args, kwargs):
    """An error ends this process."""
    note_error(args[1])
    return function(*args, **kwargs)


def be_rank(function, instance, args, kwargs):
    """A process of mp.spawn calls the script's function: see its error before it is sent.

    It ends without C++'s last steps, because models are kept (see models.replicas).
    """
    work, *others = args

    def watched(*its):
        try:
            return work(*its)
        except Exception as error:
            note_error(error)
            raise

    code = 0
    try:
        function(watched, *others, **kwargs)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    if not isinstance(multiprocessing.current_process(), multiprocessing.context.SpawnProcess):
        sys.exit(code)  # a fork ends so by itself
    ending.leave_with(code)
