"""What the notebooks' tools say and leave behind when something goes wrong on a rank."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import nbtools
import pytest
import torch
import torch.distributed as dist
from test_nbtools import gone, living_pids

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import this file


def message_of(fn, nproc, *args, deadline=60):
    """Return the message of the RankFailed that `run` must raise. It has one line."""
    with pytest.raises(nbtools.RankFailed) as error:
        nbtools.run(fn, nproc, *args, deadline=deadline)
    assert "\n" not in str(error.value)
    return str(error.value)


def deadlock(rank, world_size):
    if rank < 2:
        dist.recv(torch.zeros(1), src=1 - rank)  # both wait, and nobody sends
    if rank == 2:
        time.sleep(600)


def test_at_the_deadline_each_rank_says_where_it_is():
    first = deadlock.__code__.co_firstlineno
    assert message_of(deadlock, 4, deadline=2) == (
        f"no answer after 2 s: ranks 0 and 1 wait in recv (deadlock, line {first + 2});"
        f" rank 2 is in deadlock, line {first + 4}; rank 3 had already returned"
    )


def skip(rank, world_size):
    if rank:
        dist.barrier()


def fail_late(rank, world_size):
    if rank:
        dist.barrier()
    dist.destroy_process_group()  # now the others lose their connection to rank 0 ...
    time.sleep(1)
    raise ValueError("the cause")  # ... and only later it is seen why


def two_sizes(rank, world_size):
    dist.all_reduce(torch.ones(1000 * (rank + 1)))


LOST = r"rank [12] lost its connection in barrier \(skip, line \d+\), because rank 0 had already"
MISMATCH = (
    r"rank 0: killed by SIGABRT in all_reduce \(two_sizes, line \d+\): 2000 bytes came where 1000"
)


@pytest.mark.parametrize(
    "fn, nproc, words",
    [
        (skip, 2, LOST),
        (skip, 3, LOST),
        (fail_late, 3, "rank 0: ValueError: the cause"),
        (two_sizes, 2, MISMATCH),
    ],
)
def test_the_right_rank_is_blamed(fn, nproc, words):
    for _ in range(3):
        message = message_of(fn, nproc)
        assert re.match(words, message), message


def leave_a_child(rank, world_size, folder, exit_code):
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"{rank} {exit_code}").write_text(str(child.pid))
    if exit_code:
        os._exit(exit_code)


def test_children_end_with_a_rank_that_has_ended(tmp_path):
    nbtools.run(leave_a_child, 2, tmp_path, 0)
    assert message_of(leave_a_child, 1, tmp_path, 3) == "rank 0: exit code 3"
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3 and gone(pids)


# As with torchrun, the rank is not in the launcher's process group: only the launcher can end it.
POLITE = "set -m; trap 'kill $!; exit' TERM"
STUBBORN = "trap '' TERM"


@pytest.mark.parametrize(
    "signal_number, launcher",
    [(signal.SIGINT, POLITE), (signal.SIGKILL, POLITE), (signal.SIGKILL, STUBBORN)],
)
def test_a_launcher_and_its_rank_end_with_the_kernel(tmp_path, signal_number, launcher):
    (tmp_path / "scripts").mkdir()
    script = f"{launcher}\nsleep 600 &\necho $$ $! > '{tmp_path}/pids_0'\nwait; wait\n"
    (tmp_path / "scripts" / "lesson_99.sh").write_text(script)
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(nbtools.ROOT / "notebooks")!r})
import nbtools
launch = sys.modules["nbtools.launch"]
launch.ROOT, launch.PATIENCE = pathlib.Path(sys.argv[1]), 0.5
nbtools.launch(99)"""
    command = [sys.executable, "-c", program, tmp_path]
    kernel = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids = living_pids(tmp_path, 1)
    kernel.send_signal(signal_number)
    assert kernel.wait(60) != 0
    assert gone(pids)


def write_a_lot(rank, world_size):
    print("first")
    for _ in range(30):
        os.write(1, b"x" * 99_999 + b"\n")
    print("last")


def test_of_a_flood_only_the_first_and_the_last_part_is_kept(capsys):
    nbtools.run(write_a_lot, 1)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("[rank 0] first", "[rank 0] last")
    left_out = len("first\nlast\n") + 3_000_000 - 200_000
    assert f"[rank 0] ... {left_out:,} bytes were left out here ..." in lines
    assert sum(map(len, lines)) < 201_000


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def return_from_rank_1(rank, world_size, kind):
    if rank == 1:
        return {"lock": threading.Lock, "unreadable": Unreadable}[kind]()


def test_what_can_t_be_pickled_or_unpickled_is_named_in_one_line():
    value = "rank 1: the value that it returned"
    cause = "TypeError: cannot pickle '_thread.lock' object"
    assert message_of(return_from_rank_1, 2, "lock") == f"{value} can't be pickled: {cause}"
    message = message_of(return_from_rank_1, 2, "unreadable")
    assert message.startswith(f"{value} can't be unpickled: ValueError: invalid literal for int()")
    argument = "the function or one of its arguments"
    assert message_of(deadlock, 2, threading.Lock()) == f"{argument} can't be pickled: {cause}"
    assert message_of(deadlock, 1, Unreadable()).startswith(
        f"rank 0: {argument} can't be unpickled"
    )
