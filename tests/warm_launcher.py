"""Launch lesson 04 in a process that is warm: its ranks are forks, and import nothing.

`run(be_launcher, 1, flags)` of nbtools does what scripts/lesson_04.sh does with these flags.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile

import cloudpickle
import torch.distributed as dist
from lockstep import by_hand, inside, lessons

# `run` sends the functions of this file to the ranks, so that no rank has to import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Fork(multiprocessing.get_context("fork").Process):
    """A rank that is a fork of a launcher, which is warm; else it would import torch."""

    returncode = property(lambda self: self.exitcode)
    wait = multiprocessing.Process.join

    def poll(self):
        return self.exitcode


def be_rank(variables, flags, victim):
    """Be a rank, as rank.py is in a new process."""
    from lockstep import rank
    from lockstep.watch import hooks

    os.closerange(3, 256)  # among them is the store that the launcher holds
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.pop("LOCKSTEP_PARENT", None)
    sys.argv = ["rank.py", *flags]
    hooks.start()
    if variables["RANK"] == victim:
        os.kill(os.getpid(), 9)
    code = rank.main()
    sys.stdout.flush()
    os._exit(code)  # the launcher's folders are its own to remove


def be_launcher(rank, world_size, flags, victim=None):
    """Run the lesson; return its exit code, and the lines of stdout and of stderr."""
    dist.destroy_process_group()
    for name in by_hand.OF_A_JOB:
        os.environ.pop(name, None)

    def start(script, folder, variables, flags):
        more = {"LOCKSTEP_SCRIPT": script, "LOCKSTEP_ENDS": folder}
        process = Fork(target=be_rank, args=(variables | more, flags, victim))
        process.start()
        return process

    by_hand.start = start
    with tempfile.TemporaryFile("w+") as out, contextlib.redirect_stderr(io.StringIO()) as err:
        os.dup2(out.fileno(), 1)
        code = inside.run(
            lessons.BY_HAND, str(lessons.find("04").script), [str(flag) for flag in flags]
        )
        sys.stdout.flush()
        out.seek(0)
        return code, out.read().splitlines(), err.getvalue().splitlines()
