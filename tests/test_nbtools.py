"""run, launch, show, judge and Wire do what the notebooks rely on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbtools
import psutil
import pytest
import torch
import torch.distributed as dist
from wire import Wire


def rank_and_sum(rank, world_size, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return rank, world_size, total


def fail_on_one(rank, world_size, how):
    if rank == 1:
        if how == "raise":
            raise ValueError("no such digit")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever(rank, world_size, folder=None):
    """Write down our pid and that of a child of ours, then never answer."""
    if folder is not None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"pids_{rank}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def speak(rank, world_size):
    time.sleep(0.2 * (world_size - rank))  # the last rank speaks first
    print(f"from {rank}")
    print("and again")


def read_variable(rank, world_size):
    return os.environ.get("LOCKSTEP_TEST_VARIABLE")


def living_pids(folder, count):
    """Wait until `count` ranks have written their pids; return the pids of all."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("pids_*")]
        if len(texts) == count and all(len(text.split()) == 2 for text in texts):
            return [int(pid) for text in texts for pid in text.split()]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def gone(pids):
    """Return whether all of these processes end within 10 s. A zombie has ended."""
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 8])
def test_values_come_back_by_rank(nproc):
    values = nbtools.run(rank_and_sum, nproc, 1)
    assert [value[:2] for value in values] == [(rank, nproc) for rank in range(nproc)]
    assert {value[2].item() for value in values} == {sum(range(1, nproc + 1))}


def test_a_function_written_in_a_cell_works():
    """A cell's function lives in __main__, and uses names that other cells have defined."""
    cell = {"__name__": "__main__"}
    exec("factor = 10\ndef work(rank, world_size, x):\n    return factor * rank + x", cell)
    assert nbtools.run(cell["work"], 2, 5) == [5, 15]


def test_ranks_may_leave_without_having_spoken():
    """The first rank to return must not break the meeting of those that are still connecting."""
    for _ in range(8):
        assert nbtools.run(lambda rank, world_size: rank, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1: ValueError: no such digit (in fail_on_one, line "),
        ("kill", "rank 1: killed by SIGKILL"),
        ("exit", "rank 1: exit code 3"),
    ],
)
def test_the_rank_that_failed_is_named_in_one_line(how, words):
    for _ in range(3):
        with pytest.raises(nbtools.RankFailed) as error:
            nbtools.run(fail_on_one, 3, how)
        assert str(error.value).startswith(words)
        assert len(error.value._render_traceback_()) == 1
        assert "\n" not in str(error.value)


def test_deadline_ends_the_ranks_and_their_children(tmp_path):
    with pytest.raises(nbtools.RankFailed, match="no answer after 8 s from rank 0, 1"):
        nbtools.run(wait_for_ever, 2, tmp_path, deadline=8)
    assert gone(living_pids(tmp_path, 2))


def test_nothing_is_left_when_the_kernel_is_interrupted_or_killed(tmp_path):
    folders = {name: tmp_path / name.name for name in (signal.SIGINT, signal.SIGKILL)}
    program = f"""
        import sys, pathlib
        sys.path[:0] = {[os.path.dirname(nbtools.__file__), os.path.dirname(__file__)]!r}
        import nbtools, test_nbtools
        if __name__ == "__main__":
            nbtools.run(test_nbtools.wait_for_ever, 2, pathlib.Path(sys.argv[1]))
    """
    command, kernels = [sys.executable, "-c", textwrap.dedent(program)], {}
    for signal_number, folder in folders.items():
        folder.mkdir()
        kernels[signal_number] = subprocess.Popen([*command, folder], stderr=subprocess.DEVNULL)
    pids = {signal_number: living_pids(folder, 2) for signal_number, folder in folders.items()}
    for signal_number, kernel in kernels.items():
        kernel.send_signal(signal_number)
        assert kernel.wait(20) != 0
        assert gone(pids[signal_number])


def test_what_ranks_print_comes_in_rank_order(capsys):
    nbtools.run(speak, 3)
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {text}" for rank in range(3) for text in (f"from {rank}", "and again")
    ]


def test_ranks_see_the_environment_of_today(monkeypatch):
    nbtools.run(read_variable, 1)  # the forkserver exists before the variable does
    monkeypatch.setenv("LOCKSTEP_TEST_VARIABLE", "here")
    assert nbtools.run(read_variable, 2) == ["here", "here"]


def test_ranks_draw_different_numbers_unless_seeded():
    """Ranks are forks of one process; without a new seed they would all draw the same."""
    drawn = nbtools.run(lambda rank, world_size: torch.rand(2).tolist(), 3)
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.parametrize("nproc", [0, -1, 65, "two", 2.0])
def test_a_bad_number_of_ranks_is_refused(nproc):
    with pytest.raises(ValueError, match="nproc must be a whole number from 1 to 64"):
        nbtools.run(speak, nproc)


def test_launch_returns_the_json_and_reports_a_failure():
    with ThreadPoolExecutor(2) as pool:
        good, bad = (pool.submit(nbtools.launch, 1, nproc=n, steps=2) for n in (3, 0))
    result = good.result()
    assert (result["lesson"], result["world_size"], result["passed"]) == (1, 3, True)
    with pytest.raises(nbtools.LaunchFailed, match=r"exit code 2: .*argument --nproc"):
        bad.result()


def test_show_is_the_source_to_the_letter():
    assert nbtools.show(speak).data.startswith("```python\ndef speak(rank, world_size):\n")
    assert "# the last rank speaks first" in nbtools.show(speak).data


def test_judge_never_raises():
    assert nbtools.judge(lambda attempt: None, None) == "correct"
    assert nbtools.judge(lambda attempt: "too small", None) == "not yet: too small"
    assert nbtools.judge(lambda attempt: attempt(), lambda: 1 / 0).startswith("not yet: ZeroDiv")

    def stub():
        raise NotImplementedError

    assert nbtools.judge(lambda attempt: attempt(), stub) == "not attempted"


def speak_on_the_wire(rank, world_size):
    with Wire() as quiet:
        torch.ones(3) + 1
    with Wire() as wire:
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
        dist.broadcast(torch.ones(2, 2, dtype=torch.int32), 0)
    dist.barrier()  # outside: it is not written down
    return quiet.calls, wire.calls, [str(call) for call in wire.calls]


def test_wire_writes_down_the_collectives_inside_and_their_bytes():
    for quiet, calls, texts in nbtools.run(speak_on_the_wire, 2):
        assert quiet == []
        assert calls == [("allreduce", "float64", 3, 24), ("broadcast", "int32", 4, 16)]
        assert texts == ["allreduce of 3 float64 = 24 bytes", "broadcast of 4 int32 = 16 bytes"]


def test_free_ports_are_different_and_nobody_is_given_them():
    ports = nbtools.free_ports(20)
    assert len(set(ports)) == 20
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(ports) & set(nbtools.free_ports(11_000))  # they are taken now
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.exists():  # what Linux gives away by itself begins above
        assert max(ports) < int(given.read_text().split()[0])
