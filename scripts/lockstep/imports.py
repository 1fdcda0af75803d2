"""Import torch in less time, in a process that will only run a lesson; TensorFlow in silence."""

import gc
import importlib
import os
import sys

from lockstep import lessons


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


def import_tensorflow():
    """Import TensorFlow, and return it; its log does not reach stderr.

    If it is broken, that costs one line on stderr, and exit code 2.
    """
    broken = None
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.modules.setdefault("jax", None)  # else its converter for phones imports it, too
    with open(os.devnull, "w") as nowhere:
        screen = os.dup(2)  # C++ code writes to file descriptor 2, before it obeys the log level
        os.dup2(nowhere.fileno(), 2)
        try:
            tf = importlib.import_module("tensorflow")
            tf.config.list_physical_devices()
        except ModuleNotFoundError:
            raise
        except Exception as error:
            broken = f"tensorflow is broken, its import ends with {type(error).__name__}"
        finally:
            os.dup2(screen, 2)
            os.close(screen)
    if broken:
        pin = lessons.pins()["tensorflow"]
        print(f"{broken}: pip install --force-reinstall {pin}", file=sys.stderr)
        sys.exit(2)
    tf.get_logger().setLevel("ERROR")
    return tf
