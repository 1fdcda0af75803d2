"""Import torch in less time, in a process that will only run a lesson."""

import gc
import importlib


def import_quickly(*names):
    """Import modules while Python does not look for garbage, and leave them out of later searches.

    A large package makes a million objects that stay. Python searches them again and again for
    cycles that nobody uses, and finds none: for torch and its first optimizer, that is a quarter
    of the processor time (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
