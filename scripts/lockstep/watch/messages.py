"""The group, and the collectives and messages that the script calls itself, in order."""

import faulthandler
import functools
import os
import re
import signal
import socket
import sys
import threading
import time

from lockstep.watch import facts
from lockstep.watch.hooks import around

BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
COLLECTIVES = ["all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier"]
COLLECTIVES += ["gather", "all_gather", "all_gather_into_tensor", "scatter"]
COLLECTIVES += ["reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"]
COLLECTIVES += ["gather_object", "all_gather_object", "scatter_object_list"]
COLLECTIVES += ["broadcast_object_list"]

OF_A_LAUNCHER = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
OF_A_LAUNCHER += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]

ASKED = "asked"  # a file in the folder of the facts: who waits for whom?

_inside = []  # a collective that is made of others counts once


def watch():
    """Put the hooks in place."""
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    hooks = {"init_process_group": join, "destroy_process_group": leave, "new_group": make_group}
    calls = [] if facts.settings["times"] else [*COLLECTIVES, *BETWEEN_TWO]  # clock.py sees them
    for name in (*hooks, *calls):
        hook = hooks.get(name, call)
        around(c10d, name, hook)
        for module in (torch.distributed, torch.distributed.device_mesh):  # names of the same
            if hasattr(module, name):
                setattr(module, name, getattr(c10d, name))


def join(init, instance, args, kwargs):
    """The rank joins its group, which meets on this machine, whatever address the script has."""
    import torch.distributed as dist

    from lockstep.watch import end, sockets

    facts.note("joining", where=facts.where())
    if "LOCKSTEP_WATCH_DEVICES" in os.environ:  # a check: all ranks are on this machine
        if "MASTER_ADDR" in os.environ:
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        args = [args[0], here(args[1]), *args[2:]] if len(args) > 1 else args
        kwargs = {name: here(value) for name, value in kwargs.items()}
    result = init(*args, **kwargs)
    facts.process["rank"] = dist.get_rank()
    os.environ["LOCKSTEP_WATCH_PARENT"] = str(dist.get_rank())  # for processes that it will start
    end.watch_this_rank()
    place = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    place["environment"] = {name: os.environ.get(name) for name in OF_A_LAUNCHER}
    if facts.settings["values"]:
        place |= {"host": socket.gethostname(), **sockets.of_this_process()}
    facts.note("group", **place, backend=str(dist.get_backend()), where=facts.where())
    stack = open(path_of("stack"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    faulthandler.enable(stack)  # if C++ ends this process
    be_ready_for_a_hang()
    if facts.settings["storages"]:
        from lockstep.watch import storages

        storages.begin()
    return result


def path_of(kind):
    """Return the path of a file of this process."""
    return os.path.join(facts.settings["folder"], f"{os.getpid()}.{kind}")


@functools.cache
def be_ready_for_a_hang():
    """Note messages, and write the last calls of this rank when the check finds that all stand."""
    from lockstep.watch import traces

    if not facts.settings["times"]:
        traces.take_notes()
    threading.Thread(target=leave_calls_when_asked, args=[traces], daemon=True).start()


def leave_calls_when_asked(traces):
    """Wait until a file says that nobody moves, then write the last calls of this rank."""
    while not os.path.exists(os.path.join(facts.settings["folder"], ASKED)):
        time.sleep(0.5)
    traces.write_calls(path_of("calls"))


def here(address):
    """Return a "tcp://host:port" with the address of this machine, and anything else as it is."""
    return (
        re.sub("^tcp://[^/]*:", "tcp://127.0.0.1:", address)
        if isinstance(address, str)
        else address
    )


def leave(destroy, instance, args, kwargs):
    """The rank leaves its group."""
    from lockstep.watch import models

    models.note_states()
    return destroy(*args, **kwargs)


def make_group(make, instance, args, kwargs):
    """The script, or PyTorch, makes a group: how many seconds does it wait? None: by default."""
    limit = args[1] if len(args) > 1 else kwargs.get("timeout")
    facts.note("new_group", seconds=limit and limit.total_seconds(), where=facts.where())
    return make(*args, **kwargs)


def call(function, instance, args, kwargs):
    """The script calls a collective, or sends to one rank."""
    if _inside:
        return function(*args, **kwargs)
    import torch
    import torch.distributed as dist

    from lockstep.watch import models

    name = getattr(function, "__name__", "?")
    given = [*args, *kwargs.values()]
    first = next((one for one in given if isinstance(one, torch.Tensor)), None)
    shape = None if first is None else [list(first.shape), str(first.dtype).removeprefix("torch.")]
    group = next((one for one in given if isinstance(one, dist.ProcessGroup)), None)
    members = None if group is None else dist.get_process_group_ranks(group)
    caller = sys._getframe(1).f_code.co_filename
    own = facts.is_own(caller) or caller.endswith("torch/distributed/nn/functional.py")
    if not facts.room("calls", (str(members), own, name in BETWEEN_TWO)):
        return function(*args, **kwargs)
    way = list(facts.way())
    about = {"own": own, "in_model": models.is_called()}
    about |= {"where": way[0] if way else None, "way": way}
    if facts.settings["values"] and name in BETWEEN_TWO:
        about["ops"] = messages_of(name, args, kwargs)
    facts.note("call", name=name, shape=shape, members=members, **about)
    _inside.append(name)
    try:
        return function(*args, **kwargs)
    finally:
        _inside.pop()
        facts.note("called", name=name)


def messages_of(name, args, kwargs):
    """For a proof: return [whether it sends, other rank, bytes] of each message that starts."""
    if name == "batch_isend_irecv":
        ops = args[0] if args else kwargs["p2p_op_list"]
        return [[op.op.__name__ == "isend", op.peer, op.tensor.nbytes] for op in ops]
    given = dict(zip(("tensor", "peer"), args, strict=False)) | kwargs
    ranks = [given.get(key) for key in ("peer", "dst", "src", "group_dst", "group_src")]
    other = next((rank for rank in ranks if rank is not None), None)
    return [["send" in name, other, given["tensor"].nbytes]]
