"""Does a rank join the group of its job, or does its script start ranks of its own?

Such a script (mp.spawn) becomes as many jobs as ranks are started, which know nothing of each
other. They may all end well; or, since they inherit what the launcher has set, wait for ever.
"""

import contextlib
import functools
import importlib.util
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

C10D = "torch.distributed.distributed_c10d"
STARTS_ITS_OWN = (
    "it starts ranks of its own (mp.spawn), so it would be several jobs here: start it with python "
    "alone, or let it join the ranks that are here, as templates/smallest_ddp.py does"
)
ALONE = "no rank has joined the others (init_process_group): each has run the script on its own"


def watch():
    """Let this rank leave a file when it joins a group of all ranks (has_seen).

    A process that it starts before, and that makes a group instead, ends it.
    """
    os.environ["LOCKSTEP_RANK"] = f"{os.getpid()} {os.environ['WORLD_SIZE']}"
    sys.path.append(str(Path(__file__).parent.parent))  # its processes import this module
    _place("rank").touch()
    start = BaseProcess.start

    @functools.wraps(start)
    def start_watched(process):
        if _place("joined").exists():
            return start(process)
        process.run = functools.partial(_be_started, process.run)  # also that of a subclass
        try:
            start(process)
        finally:
            del process.run

    BaseProcess.start = start_watched
    _watch_torch()


def _place(what):
    return Path(os.environ["LOCKSTEP_ENDS"], f"{os.environ['LOCKSTEP_RANK'].split()[0]}.{what}")


def _be_started(run):
    """Be a process that a rank has started.

    The launcher may have refused the script meanwhile and ended, with its folder, in which the
    script may have had its own: what fails then is told to nobody.
    """
    _watch_torch()
    try:
        run()
    except Exception:
        if not os.path.exists(os.environ["LOCKSTEP_ENDS"]):
            os._exit(1)
        raise


def _watch_torch():
    """Look at each call of init_process_group in this process; torch need not be imported yet."""
    if C10D in sys.modules:
        _watch_calls(sys.modules[C10D])
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported:
    """Watches the calls as soon as their module has been imported."""

    def find_spec(self, name, path, target=None):
        if name != C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_watch(module):
            run(module)
            _watch_calls(module)

        spec.loader.exec_module = run_and_watch
        return spec


def _watch_calls(c10d):
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*args, **options):
        rank, world_size = map(int, os.environ["LOCKSTEP_RANK"].split())
        if os.getpid() != rank and not _place("joined").exists():
            with contextlib.suppress(FileNotFoundError):  # the launcher has ended, with its folder
                _place("own").touch()
            with contextlib.suppress(ProcessLookupError):  # torchrun, or a sibling, was faster
                os.kill(rank, signal.SIGKILL)
            os._exit(1)
        init(*args, **options)
        if os.getpid() == rank and c10d.get_world_size() == world_size:
            _place("joined").touch()

    for module in (c10d, sys.modules["torch.distributed"]):
        module.init_process_group = init_process_group


def has_seen(what, folder):
    """Return whether a rank has left such a file: "joined", or "own" (ranks of its own)."""
    return any(Path(folder).glob(f"*.{what}"))


def end_what_ranks_have_left(folder):
    """End all that ranks have started. Torchrun has asked, and who began just then did not hear it.

    It would look for the others for minutes. Each rank has a group of processes of its own.
    """
    for path in Path(folder).glob("*.rank"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.stem), signal.SIGKILL)
