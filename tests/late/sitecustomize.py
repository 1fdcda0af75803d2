"""Make one process late, in whatever way it was started: chance as an input of a test.

Python runs this file in each process that has its folder on PYTHONPATH (`late()` in test_late.py
sets it): the kernel of a notebook, the process from which its ranks are forked, ranks of torchrun
and of mp.spawn. LOCKSTEP_LATE says who is late:

a rank, as "2"   0.4 s before it joins a group, 0.3 s before it makes another one, 0.2 s at each
                 address that it reads of the ranks with which it then connects, 0.4 s before it
                 leaves a group
"spawner"        the process that waits for ranks of mp.spawn: when it looks, it is 2 s after the
                 first one has ended
"gloo"           the threads of gloo: each takes 0.1 s to let go of what DDP has sent
"""

import functools
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types

LATE = os.environ.get("LOCKSTEP_LATE", "")
stores = []  # they stay as long as there is a group: C++ knows them, and does not keep them


def delayed(function, seconds, is_late):
    """Return the function, which takes its time first if is_late(its arguments by name)."""

    @functools.wraps(function)
    def late(*args, **options):
        if is_late(options):
            time.sleep(seconds)
        return function(*args, **options)

    return late


def make_ranks_late(c10d):
    """Let the functions that join, make and leave a group be late on one rank."""

    def joins(options):
        return str(options.get("rank", -1)) == LATE or os.environ.get("RANK") == LATE

    def is_it(options):
        return c10d.is_initialized() and str(c10d.get_rank()) == LATE

    class SlowStore(c10d.Store):
        """Passes on what gloo asks of a store while ranks connect; each address takes a while."""

        def __init__(self, store):
            super().__init__()
            self.store = store
            stores.append(self)

        def set(self, key, value):
            self.store.set(key, value)

        def wait(self, keys, *limit):
            self.store.wait(keys, *limit)

        def get(self, key):
            time.sleep(0.2)
            return self.store.get(key)

    connect = c10d._new_process_group_helper

    @functools.wraps(connect)
    def connect_slowly(size, rank, members, backend, store, *args, **options):
        first = not c10d.is_initialized()
        late = str(rank) == LATE if first else is_it({})
        if late and "gloo" in str(backend):
            store = SlowStore(store)
        return connect(size, rank, members, backend, store, *args, **options)

    c10d._new_process_group_helper = connect_slowly
    c10d.init_process_group = delayed(c10d.init_process_group, 0.4, joins)
    c10d._new_group_with_tag = delayed(c10d._new_group_with_tag, 0.3, is_it)
    leave = c10d.destroy_process_group

    @functools.wraps(leave)
    def leave_late(*args, **options):
        time.sleep(0.4 * is_it({}))
        leave(*args, **options)
        if not c10d.is_initialized():
            stores.clear()

    c10d.destroy_process_group = leave_late


def make_the_spawner_late(spawn):
    """Let mp.spawn look late at which ranks have ended; it alone, and nobody else who waits."""
    from multiprocessing import connection

    def wait(ends, timeout=None):
        if ready := connection.wait(ends, timeout):
            time.sleep(2)
            ready = connection.wait(ends, 0)
        return ready

    place = spawn.multiprocessing
    seen_by_spawn = types.SimpleNamespace(**vars(place))
    seen_by_spawn.connection = types.SimpleNamespace(wait=wait)
    spawn.multiprocessing = seen_by_spawn


class SlowToGo:
    """Is let go of slowly by another thread than the main one; the GIL is free meanwhile."""

    def __del__(self):
        if threading.get_ident() != threading.main_thread().ident:
            for _ in range(25):  # it wants the GIL again and again
                time.sleep(0.004)


def make_gloo_late(c10d):
    """Let gloo's threads come late to the Python object that every backward hands on to them.

    backward() lets go of it at its end. Then whoever has it last needs the GIL: a thread of gloo.
    """
    torch = sys.modules["torch"]
    stash = torch._C._stash_obj_in_tls

    def stash_slowly(key, value):
        stash(key, SlowToGo() if key == "context" else value)

    torch._C._stash_obj_in_tls = stash_slowly


class Finder:
    """Finds a module as Python would, and changes it as soon as it is imported."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def stay_on_the_path(start=subprocess.Popen.__init__):
    """Reach programs as well that are started with a PYTHONPATH of their own."""

    @functools.wraps(start)
    def start_with_us(self, *args, env=None, **options):
        if env is not None:
            # Last: the watch has a file of this name, too, and it runs the next one.
            folders = [env.get("PYTHONPATH", ""), os.path.dirname(os.path.abspath(__file__))]
            env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        start(self, *args, env=env, **options)

    subprocess.Popen.__init__ = start_with_us


if LATE:
    if LATE == "spawner":
        finder = Finder("torch.multiprocessing.spawn", make_the_spawner_late)
    elif LATE == "gloo":
        finder = Finder("torch.distributed.distributed_c10d", make_gloo_late)
    else:
        finder = Finder("torch.distributed.distributed_c10d", make_ranks_late)
    sys.meta_path.insert(0, finder)
    stay_on_the_path()
