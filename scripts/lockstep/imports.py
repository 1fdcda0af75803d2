"""Import torch in less time, in a process that will only run a lesson; others in silence."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import warnings

from lockstep import ending, lessons


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
    use_one_thread()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.modules.setdefault("jax", None)  # else its converter for phones imports it, too
    with quiet():  # C++ code writes before it obeys the log level
        try:
            tf = importlib.import_module("tensorflow")
            tf.config.list_physical_devices()
        except ModuleNotFoundError:
            raise
        except Exception as error:
            broken = error
    if broken:
        leave_broken("tensorflow", broken)
    tf.get_logger().setLevel("ERROR")
    return tf


def import_paddle():
    """Import Paddle, and return it; signals reach us as before, and it tells nothing that we know.

    If it is broken, that costs one line on stderr, and exit code 2.
    """
    for known in ("No ccache found", ".*trained under CPUONLY mode"):
        warnings.filterwarnings("ignore", known)
    use_one_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        paddle = importlib.import_module("paddle")
    except ModuleNotFoundError:
        raise
    except Exception as error:
        leave_broken("paddlepaddle", error)
    paddle.disable_signal_handler()  # else a page about C++ when someone ends this process
    signal.signal(signal.SIGTERM, handler)
    return paddle


def use_one_thread():
    """Let NumPy, if it is not yet there, use one thread: with small matrices the others only wait.

    They wait at full speed, and on a busy machine a product takes many times as long.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextlib.contextmanager
def quiet():
    """Keep off the screen what anybody writes to file descriptor 2 meanwhile, as C++ code does."""
    screen = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)


def hush():
    """Keep off the screen all that this process will say, its C++ code as well."""
    os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (a notebook has others)


def leave_broken(package, error):
    """Say in one line that a package can't be imported, and leave with exit code 2."""
    said = f"{package} is broken, its import ends with {type(error).__name__}"
    ending.say(f"{said}: pip install --force-reinstall {lessons.pins()[package]}")
    sys.exit(2)
