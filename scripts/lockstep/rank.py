"""Be one rank of a script; ranks.py starts it. Write down how it ended, for ranks.py to read.

The script and the folder come in the environment, because torch.distributed.launch puts a flag of
its own, --local-rank, in front of ours.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # torchrun runs this file by its path

from lockstep import ending, imports, joining, lessons  # noqa: E402

ALL_ARE_HERE = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def main():
    """Run the script as this rank; return the exit code."""
    ending.end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is for ranks.py to handle
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # a line is one write
    script = os.environ["LOCKSTEP_SCRIPT"]
    sys.argv[0] = script
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        if "LOCKSTEP_ADDRESS" in os.environ:
            let_gloo_listen_at(os.environ["LOCKSTEP_ADDRESS"])
        code = take_turns(json.loads(os.environ.get("LOCKSTEP_TURNS", "[]")))
        if code:
            return code
        run(script)
    except SystemExit as stop:
        return end_of_exit(stop.code)
    except BaseException as error:  # CheckpointException of torch is no Exception
        if ending.verbose():
            traceback.print_exc()
        if "lockstep.watch.end" in sys.modules:
            sys.modules["lockstep.watch.end"].note_error(error)
        lost = ending.tells(ending.LOST, error)
        ending.write_end(ending.reason(error), lost, ending.tells(ending.LATE, error))
        if lost:
            let_the_cause_leave_first()
        return 1
    ending.write_end(None)
    return 0


def let_the_cause_leave_first():
    """Return 2 s after a rank has told how it ended that has not only lost another, as we have.

    For torchrun ends all others when it sees the first one leave. If the cause can't tell, because
    it was killed, torchrun sees that, and ends us; if it is on another machine, nobody here tells.
    """
    end = time.monotonic() + (10 if ALL_ARE_HERE else 0)
    folder = Path(os.environ["LOCKSTEP_ENDS"])
    while all(told.lost for told in ending.read_ends(folder).values()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(2)


def end_of_exit(code):
    """Write down the end of a script that has called sys.exit(code); return the exit code."""
    if code is None or isinstance(code, int):
        if code != 128 + signal.SIGTERM:  # with this one it has been ended, and cleans up
            ending.write_end(None)
        return code or 0
    lines = str(code).strip().splitlines() or ["sys.exit() without a word"]
    ending.write_end(lines[-1])
    return 1


def run(script):
    """Run a script as Python would; one that would start ranks itself is one of them."""
    lesson, rank = lessons.of_script(script), os.environ["RANK"]
    if lesson:  # another script may set a variable first that torch reads when it is imported
        imports.import_quickly("torch")
    else:
        joining.watch()
    try:
        if lesson and lesson.start == lessons.LAUNCH_JOB:
            run_launched(importlib.import_module(Path(script).stem))
        else:
            ending.run_script(script)
    finally:
        os.environ["RANK"] = rank  # the script may have changed it; how it ended is told by rank


def take_turns(turns):
    """Let a child run the script in each turn but the last; return 0 in who is to run it now.

    A turn is (flags, after how many updates SIGTERM comes; 0: never). A child is a fork that has
    imported torch, and nothing else: as new as a rank that torchrun has restarted. Returns the exit
    code of a child that has failed, or was asked to end.
    """
    if turns:  # an optimizer imports dynamo: once, before the forks
        imports.import_quickly("torch.distributed", "torch._dynamo")
    for number, (flags, after) in enumerate(turns):
        parent, is_last = os.getpid(), number == len(turns) - 1
        child = None if is_last else os.fork()
        if child and (code := wait_for_turn(child)):
            return code
        if not child:
            from lockstep.watch import facts

            if not is_last:
                os.environ["LOCKSTEP_PARENT"] = str(parent)
                ending.end_with_parent(signal.SIGKILL)
            os.environ["LOCKSTEP_WATCH_SIGTERM"] = str(after)
            facts.begin()
            meet_under(f"turn {number}")
            sys.argv += flags
            break
    return 0


def meet_under(prefix):
    """Let the ranks meet at keys of their own: their store still has those of an earlier group."""
    from torch.distributed import PrefixStore, distributed_c10d

    rendezvous = distributed_c10d.rendezvous

    def apart(*args, **kwargs):
        for store, *place in rendezvous(*args, **kwargs):
            yield PrefixStore(prefix, store), *place

    distributed_c10d.rendezvous = apart


def wait_for_turn(child):
    """Return the exit code of a child, 0 also if it was stopped in its turn and not by a signal."""
    heard = []

    def pass_on(signal_number, frame):
        heard.append(signal_number)
        os.kill(child, signal_number)

    signal.signal(signal.SIGTERM, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)  # torchrun tells by which signal
    return 0 if code == 128 + signal.SIGTERM and not heard else code


def let_gloo_listen_at(address):
    """Rehearsals: let gloo listen at one of the many addresses of the loopback interface.

    By itself it takes the first one of GLOO_SOCKET_IFNAME, 127.0.0.1, on both "machines".
    """
    from torch.distributed import distributed_c10d

    class AtOneAddress(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store, rank, size, timeout):
            options = self._Options()
            options._devices = [self.create_device(hostname=address)]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = AtOneAddress


def run_launched(lesson):
    """Be one rank of a lesson that calls launch_job(func, nproc, *args), on several machines.

    mp.spawn starts processes on one machine only. Here the ranks are started already, so its
    launch_job is replaced by one that starts nothing.
    """

    def launch_job(func, nproc, *args):
        """Call func(rank, world_size, device, *args) as the rank that we are."""
        rank, world_size, device = lesson.join_group()
        result = func(rank, world_size, device, *args)
        lesson.dist.destroy_process_group()
        if rank > 0:
            sys.exit()  # rank 0 goes on, and judges what all have found
        return result

    lesson.launch_job = launch_job
    lesson.main(lesson.parse_args([*sys.argv[1:], "--nproc", os.environ["WORLD_SIZE"]]))


if __name__ == "__main__":
    ending.leave_with(main())
