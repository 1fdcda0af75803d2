"""Do ranks of one machine meet by each method of init_process_group?"""

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import ending, network
from lockstep.doctor.row import Row

METHODS = ("env://", "tcp://", "a TCPStore handed over", "file://")


def meet(peers, method, folder):
    """Join by one method, add up the ranks, leave; return the row. Raises Missing."""
    listener = network.listen_at("127.0.0.1") if peers.rank == 0 else None
    port = listener and listener.getsockname()[1]
    port = peers.gather(f"{method} port", port, peers.timeout)[0]
    problem, begin = None, time.perf_counter()
    try:
        join(peers, method, folder, port, listener)
        total = torch.tensor([peers.rank])
        dist.all_reduce(total)
        if total.item() != sum(range(peers.world_size)):
            problem = f"the all-reduce of {peers.world_size} ranks was {total.item()}"
        dist.barrier()  # who leaves first would cut off one that still connects
    except Exception as error:
        problem = ending.reason(error)
    seconds = time.perf_counter() - begin
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    problem = peers.cause(f"{method} end", problem)
    if problem:
        cure = "look for a firewall on this machine; what works above can be used instead"
        return Row(f"meeting by {method}", "not ok", problem, cure)
    return Row(f"meeting by {method}", "ok", f"{peers.world_size} ranks, {seconds:.2f} s")


def join(peers, method, folder, port, listener):
    """Join the default group by one method.

    env:// and tcp:// would let a store listen on all addresses. They find the one that rank 0 has
    opened at that port in the same process, and use it.
    """
    limit = timedelta(seconds=peers.timeout)
    options = {"wait_for_workers": False, "multi_tenant": True}
    if listener:
        options["master_listen_fd"] = listener.detach()
    place = "127.0.0.1", port, peers.world_size, bool(listener), limit
    store = dist.TCPStore(*place, **options)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # env:// would take torchrun's
    how = {
        "env://": {"init_method": "env://"},
        "tcp://": {"init_method": f"tcp://127.0.0.1:{port}"},
        "a TCPStore handed over": {"store": dist.PrefixStore("group", store)},
        "file://": {"init_method": f"file://{folder}/meeting"},
    }[method]
    who = {"rank": peers.rank, "world_size": peers.world_size, "timeout": limit}
    dist.init_process_group("gloo", **how, **who)
