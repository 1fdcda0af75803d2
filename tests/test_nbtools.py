"""The tools of the notebooks do what the notebooks rely on."""

import contextlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import matplotlib
import nbtools
import psutil
import pytest
import torch
import torch.distributed as dist
from jupyter_client.manager import KernelManager
from lockstep import ending, own_time
from nbtools import blame, pictures
from nbtools.record import Saved, Span, over_before_the_update, record, until_all_have_come

# Ranks get the functions themselves: else they would import this file, and matplotlib with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SANITIZE = nbtools.ROOT / "notebooks" / "nbtools" / "nbval_sanitize.cfg"


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
    """Make a temporary folder, write down our pid and that of a child, then never answer."""
    tempfile.mkdtemp()
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
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("pids_*")]
        if len(texts) == count and all(len(text.split()) == 2 for text in texts):
            return [int(pid) for text in texts for pid in text.split()]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def gone(pids):
    """Return whether all of these processes end within 60 s. A zombie has ended."""
    deadline = time.monotonic() + 60
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


def test_of_a_rank_that_has_waited_run_says_the_same_as_a_launcher():
    """Its wait says nothing of guilt: another one may not have come, or it calls once too often."""
    try:
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
    except RuntimeError as error:
        failure = blame.describe(error)
    end = ending.End(False, True, 0.0, 1, "Timed out")
    assert ending.WAITED in failure.message and ending.WAITED in ending.explain({1: 1}, {1: end})


def test_deadline_ends_the_ranks_and_their_children(tmp_path):
    with pytest.raises(nbtools.RankFailed, match=r" 2 s: ranks 0 and 1 are in wait_for_ever, "):
        nbtools.run(wait_for_ever, 2, tmp_path, deadline=2)
    assert gone(living_pids(tmp_path, 2))


def test_nothing_is_left_when_the_kernel_is_interrupted(tmp_path, monkeypatch):
    """Jupyter interrupts a cell by SIGINT, and Python makes a KeyboardInterrupt of it."""
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        interrupt = pool.submit(interrupt_us_when_all_run, tmp_path / "pids")
        with pytest.raises(KeyboardInterrupt):
            nbtools.run(wait_for_ever, 2, tmp_path / "pids", deadline=300)
    assert gone(interrupt.result())
    assert not list(tmp_path.glob("tmp*"))


def interrupt_us_when_all_run(folder):
    """Send SIGINT to this process as soon as two ranks wait; return the pids of all."""
    pids = living_pids(folder, 2)
    os.kill(os.getpid(), signal.SIGINT)
    return pids


@pytest.fixture
def short_path():
    """Return a folder with a short path: a forkserver's socket has room for 100 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_nothing_is_left_when_the_kernel_is_killed(short_path):
    program = f"""
import os, pathlib, subprocess, sys, tempfile, time
sys.path.insert(0, {str(nbtools.ROOT / "notebooks")!r})
import nbtools
sys.modules["nbtools.run"].SLOW = ["torch.distributed"]  # and no more: these ranks train nothing

{inspect.getsource(wait_for_ever)}
if __name__ == "__main__":
    nbtools.run(wait_for_ever, 2, pathlib.Path(sys.argv[1]))
"""
    command = [sys.executable, "-c", program, short_path]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    kernel = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    pids = living_pids(short_path, 2)
    kernel.kill()
    kernel.wait(60)
    assert gone(pids)
    assert not list(short_path.glob("tmp*"))


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


# --- Deadlines: own time ---


def run_in_a_circle(rank, world_size):
    while True:
        pass


def test_an_endless_loop_ends_at_three_times_the_deadline():
    with pytest.raises(
        nbtools.RankFailed, match=r"no answer after 3 s: rank 0 is in run_in_a_circ"
    ):
        nbtools.run(run_in_a_circle, 1, deadline=1)


OWN = {  # name: looks at two processes, (seconds later, {process: (used, not let)}); own, still
    "both sleep": ([(10, {1: (0, 0), 2: (0, 0)})], 10, 10),
    "one works": ([(10, {1: (9, 0), 2: (0, 0)})], 10, 0),
    "one is not let": ([(10, {1: (1, 8), 2: (0, 0)})], 2, 0),
    "both work on one processor": ([(10, {1: (5, 5), 2: (5, 5)})], 10, 0),
    "one looks at a file again and again": ([(1, {1: (0.02, 0), 2: (0, 0)})] * 10, 10, 10),
    "it works, and then it sleeps": ([(5, {1: (5, 0)}), (5, {1: (0, 0)})], 10, 5),
    "one works, and prints all the time": ([(0.1, {1: (0.1, 0), 2: (0, 0)})] * 100, 10, 0),
    "nobody was ever let": ([(10, {1: (0, 10), 2: (0, 10)})], 0.5, 0.5),
}


@pytest.mark.parametrize("name", OWN)
def test_own_time(name, monkeypatch):
    looks, own, still = OWN[name]
    now, so_far = [0.0], {1: (0.0, 0.0), 2: (0.0, 0.0)}
    monkeypatch.setattr(own_time.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(own_time.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(own_time, "_times", lambda pid: (so_far[pid][0], {"main": so_far[pid][1]}))
    clock = own_time.OwnTime()
    now[0] = 0.05
    clock.look(so_far)
    for seconds, processes in looks:
        now[0] += seconds
        for pid, (used, not_let) in processes.items():
            so_far[pid] = so_far[pid][0] + used, so_far[pid][1] + not_let
        clock.look(so_far)
    assert clock.seconds == pytest.approx(own + 0.05)
    assert clock.still == pytest.approx(still, abs=0.051)


# --- launch ---

LAUNCHER = """
[ "$2" = --nproc ] || { echo said before; echo 'the reason' >&2; exit 2; }
echo PASS
echo '{"flags": "'"$*"'", "python": "'"$LOCKSTEP_PYTHON"'", "world_size": 2}'
"""


@pytest.fixture
def lessons_99(tmp_path, monkeypatch):
    """Let launch(99) start a launcher that repeats its flags; it wants --nproc as the first."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "lesson_99.sh").write_text(LAUNCHER)
    monkeypatch.setattr(sys.modules["nbtools.launch"], "ROOT", tmp_path)
    monkeypatch.setenv("LOCKSTEP_RUNS", str(tmp_path))
    return tmp_path


def test_launch_returns_the_json_and_reports_a_failure(lessons_99):
    result = nbtools.launch(99, nproc=3, batch_size=30, quick=True)
    assert result["flags"] == "--json --nproc 3 --batch-size 30 --quick"
    assert result["python"] == sys.executable
    with pytest.raises(nbtools.LaunchFailed, match=r"^lesson 99 .* exit code 2: the reason$"):
        nbtools.launch(99)


def test_launch_returns_a_run_of_the_tests_if_it_is_as_good(lessons_99):
    def store(words, for_notebooks_of, text='{"world_size": 2, "stored": true}'):
        facts = {"stdout": f"PASS\n{text}\n", "for_notebooks_of": for_notebooks_of}
        path = launch.file_of_run(lessons_99, 99, words)
        path.write_text(json.dumps(facts))

    launch = sys.modules["nbtools.launch"]
    store([], str(lessons_99))
    assert nbtools.launch(99)["stored"]
    assert nbtools.launch(99, nproc=2)["stored"]  # without flags it had two ranks as well
    assert "stored" not in nbtools.launch(99, nproc=3)
    assert "stored" not in nbtools.launch(99, nproc=2, steps=1)
    store(["--nproc", "3"], str(lessons_99))
    assert nbtools.launch(99, nproc=3)["stored"]
    for other in (None, "/another/copy"):  # it failed, or GPUs were hidden; or it is of a copy
        store(["--nproc", "3"], other)
        assert "stored" not in nbtools.launch(99, nproc=3)
    launch.file_of_run(lessons_99, 99, ["--nproc", "3"]).write_text("")  # it was not finished
    assert "stored" not in nbtools.launch(99, nproc=3)


def test_importing_nbtools_imports_no_framework():
    names = {"torch", "tensorflow", "paddle", "jax", "matplotlib"}
    program = f"import sys, nbtools; print({names!r} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=nbtools.ROOT / "notebooks", capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


# --- measured, judge ---


@pytest.mark.parametrize(
    "value, text",
    [(0.41234, "≈0.412"), (-2, "≈-2"), (0, "≈0"), (1234567.8, "≈1,234,568"), (4.4e-16, "≈4.4e-16")],
)
def test_measured_shows_a_number_that_nbval_can_mask(value, text):
    pattern = re.search(r"^regex: (.*)$", SANITIZE.read_text(), re.MULTILINE).group(1)
    assert nbtools.measured(torch.tensor(value, dtype=torch.float64), -3, 1e7) == text
    assert re.sub(pattern, "≈", f"a {text}, b {text}. 3.5") == "a ≈, b ≈. 3.5"


@pytest.mark.parametrize("value", [0.99, 2.01, float("nan"), float("inf")])
def test_measured_raises_outside_its_bound(value):
    with pytest.raises(nbtools.OutOfBounds, match="not from 1 to 2"):
        nbtools.measured(value, 1, 2)


def hang(attempt):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def test_judge_never_raises_and_never_hangs():
    assert nbtools.judge(lambda attempt: None, 3) == "correct"
    assert nbtools.judge(lambda attempt: "too small\nor not", 3) == "not yet: too small"
    assert nbtools.judge(lambda attempt: None, None).startswith("no guess yet")
    assert nbtools.judge(lambda attempt: None, "3").startswith("not yet: ")
    assert nbtools.judge(lambda attempt: attempt(), lambda: 1 / 0).startswith("not yet: ZeroDiv")
    assert nbtools.judge(hang, 3, deadline=0.3).startswith("not yet: it had not finished after 0.3")

    def says_late():
        raise RuntimeError("\nthe reason")

    def says_nothing():
        raise RuntimeError

    late = "RuntimeError: the reason"
    assert nbtools.judge(lambda attempt: attempt(), says_late) == f"not yet: {late}"
    assert nbtools.judge(lambda attempt: attempt(), says_nothing) == "not yet: RuntimeError"

    def stub():
        raise NotImplementedError

    def stub_on_a_rank(rank, world_size):
        raise NotImplementedError

    def not_on_this_device(rank=0, world_size=1):
        raise NotImplementedError("Could not run 'aten::empty' with arguments from this backend")

    assert nbtools.judge(lambda attempt: attempt(), stub) == "not attempted"
    assert nbtools.judge(lambda attempt: nbtools.run(attempt, 1), stub_on_a_rank) == "not attempted"
    words = "NotImplementedError: Could not run 'aten::empty'"
    said = nbtools.judge(lambda attempt: attempt(), not_on_this_device)
    assert said.startswith(f"not yet: {words}")
    said = nbtools.judge(lambda attempt: nbtools.run(attempt, 1), not_on_this_device)
    assert said.startswith(f"not yet: rank 0: {words}")


# --- show_difference ---


def test_a_line_that_is_only_indented_is_no_difference(tmp_path):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("def f():\n    one()\n    two()\n")
    new.write_text("def f():\n    for _ in range(2):\n        one()\n    three()\n")
    lines = nbtools.show_difference(old, new).data.splitlines()[1:-1]
    said = [" def f():", "+    for _ in range(2):", "         one()", "-    two()", "+    three()"]
    assert lines == said


# --- record and the pictures ---


def test_free_ports_are_different_and_nobody_is_given_them():
    kernel = KernelManager()  # nbval starts this: conftest.py lets it choose in the same way
    kernel.pre_start_kernel()
    kernel.cleanup_connection_file()
    ports = kernel.ports + nbtools.free_ports(15)
    assert len(set(ports)) == 20
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(ports) & set(nbtools.free_ports(11_000))  # they are taken now
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.exists():  # what Linux gives away by itself begins above
        assert max(ports) < int(given.read_text().split()[0])


def recorded_step(rank, world_size):
    """Return the events of one step of DDP with small buckets."""
    from torch import nn

    layers = [nn.Linear(300, 300) for _ in range(4)]
    replica = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for _ in range(3):
        with record(rank) as recorder, recorder.span("compute", "step", lane="mine"):
            replica(torch.randn(64, 300)).sum().backward()
            optimizer.step()
    return recorder.spans, recorder.calls


@pytest.fixture(scope="module")
def recorded():
    return nbtools.run(recorded_step, 2)


def test_record_has_the_bytes_of_wire_on_one_clock_for_all_ranks(recorded):
    for rank, (spans, calls) in enumerate(recorded):
        sent = [span.nbytes for span in spans if span.lane == f"rank {rank}, gloo"]
        assert sorted(sent) == sorted(call.nbytes for call in calls)
        assert len(sent) >= 4 and set(sent) != {None}
        (mine,) = [span for span in spans if span.lane == "mine"]
        own = [span for span in spans if span.lane == f"rank {rank}"]
        assert {span.name.partition(":")[0] for span in own} == {
            "forward",
            "backward",
            "optimizer.step",
        }
        assert all(mine.begin - 0.01 < span.begin < span.end < mine.end + 0.01 for span in own)
    (first, _), (second, _) = recorded  # no all-reduce ends on one rank before both have begun it
    pairs = zip(*([s for s in spans if s.kind == "send"] for spans in (first, second)), strict=True)
    assert all(max(a.begin, b.begin) < min(a.end, b.end) + 0.01 for a, b in pairs)


def test_a_collective_is_over_when_the_update_that_needs_it_begins():
    update = Span("rank 0", "compute", "optimizer.step", 3.0, 5.0)
    late, during = (Span("rank 0, gloo", "send", "sum", begin, 4.0, 8) for begin in (1.0, 3.5))
    found = over_before_the_update([late, update, during])
    assert found == [late._replace(end=3.0), update, during]


def test_a_collective_waits_until_all_lanes_have_begun_it():
    early = Span("rank 0, gloo", "send", "sum", 1.0, 5.0, 8)
    late, work = (
        early._replace(lane="rank 1, gloo", begin=4.0),
        Span("rank 1", "compute", "f", 0, 4),
    )
    assert until_all_have_come([late, work, early]) == [
        work,
        early._replace(kind="wait", name="waits 1", end=4.0, nbytes=None),
        late._replace(name="sum 1"),
        early._replace(name="sum 1", begin=4.0),
    ]


@pytest.fixture
def no_window():
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    pictures.plt.close("all")
    matplotlib.use(before)


def test_lanes_draw_each_span_where_and_as_long_as_it_was(recorded, no_window):
    spans = [span for spans, _ in recorded for span in spans if span.kind == "send"]
    spans.append(spans[0]._replace(lane="rank 1, gloo"))  # overlaps: shares the height of its lane
    figure = pictures.lanes(spans, "title")
    (axes,) = figure.axes
    bars = [bar for container in axes.containers for bar in container]
    start = min(span.begin for span in spans)
    drawn = sorted((bar.get_x(), bar.get_width()) for bar in bars)
    expected = sorted(((s.begin - start) * 1e3, (s.end - s.begin) * 1e3) for s in spans)
    for (left, width), (right_left, right_width) in zip(drawn, expected, strict=True):
        assert (left, width) == pytest.approx((right_left, right_width))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0, gloo",
        "rank 1, gloo",
    ]


def test_a_label_does_not_stand_outside_of_axes_that_are_cut(no_window):
    span = pictures.Span("rank 0, gloo", "send", "all_reduce 1", 0, 1)
    (axes,) = pictures.lanes([span], "title").axes
    (label,) = axes.texts
    assert label.get_clip_on()


def test_waits_are_the_gaps_in_which_gloo_works():
    Span = pictures.Span
    spans = [Span("rank 0", "compute", "backward", 0, 1), Span("rank 0", "compute", "step", 3, 4)]
    spans += [Span("rank 0, gloo", "send", "all_reduce", 0.5, 2.5, 8)]
    (wait,) = [span for span in pictures.waits(spans) if span.kind == "wait"]
    assert (wait.lane, wait.begin, wait.end) == ("rank 0", 1, 2.5)


def test_strip_has_an_arrow_and_a_label_for_each_message(no_window):
    places = ["rank 0", "rank 1", "rank 2"]
    events = [pictures.Message("out", "rank 0", name, 96) for name in places[1:]]
    events.append(pictures.Collective("sum", "all_reduce", tuple(places), 12_000_000))
    events.append(pictures.Collective("send", "broadcast", tuple(places), 8, source="rank 0"))
    figure = pictures.strip(events, "title", places, ["out", "quiet", "sum", "send"])
    (axes,) = figure.axes
    arrows = [p for p in axes.patches if isinstance(p, matplotlib.patches.FancyArrowPatch)]
    assert len(arrows) == 2 + 2 * 3 + (1 + 2)  # into the broadcast goes rank 0's, out come two
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("96 B") == 2 and texts.count("nothing\nis sent") == 1
    assert "all_reduce\n12 MB" in texts and "broadcast\n8 B" in texts
    assert texts.count("rank 1") == 5  # a box before, between and after four steps


# --- Saved ---


def test_saved_counts_shared_memory_once_and_forgets_what_autograd_forgets():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    rows = torch.ones(10, 4)
    with Saved(rows, *model.parameters()) as saved:
        first = model(rows).sum()
        assert saved.now == 10 * 4 * 4  # Tanh's result, which Tanh and the second layer keep
        second = model(rows).sum()
        first.backward()
        second.backward()
    assert (saved.now, saved.most) == (0, 2 * 10 * 4 * 4)
