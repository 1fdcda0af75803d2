"""Lesson 05: one rank speaks for all, and the number that it says is true."""

import builtins
import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import lesson_05_rank_zero_output as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, Finished, run_warm
from nbtools import run
from nbtools.record import Wire
from torch import nn
from tqdm import tqdm

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
LAUNCHER = ["bash", ROOT / "scripts" / "lesson_05.sh"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]
RANK_VARIABLES = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"

# What a rank with a library and with C++ code does: it writes to the file descriptors.
SPEAKER = """
import os
rank = os.environ["RANK"].encode()
os.write(1, b"out of rank " + rank + b"\\n")
os.write(2, b"err of rank " + rank + b"\\n")
"""

# --- Starting things ---


def execute(*command, **options):
    """Run a command to its end, and return it; leave no process behind."""
    changes = options.pop("env", {})
    environment = {**os.environ, "LOCKSTEP_PYTHON": sys.executable}
    for name in [*RANK_VARIABLES.split(), "OMP_NUM_THREADS", "PYTHONWARNINGS"]:
        environment.pop(name, None)
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    # Not text=True: it would turn the \r of a progress bar into a newline.
    return Finished(process.args, process.returncode, stdout.decode(), stderr.decode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder whose name has spaces, with what the launches need in it."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    (folder / "speaker.py").write_text(SPEAKER)
    for name in ("events", "logs", "all"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def started(folder, default_run):
    """Return {name: finished process} of all that this file starts, two at a time."""
    events = ["--json", "--log-dir", "events"]
    everyone = ["--output", "all", "--nproc=3", "--steps", 4, *events]
    omp, no_gpu = {"OMP_NUM_THREADS": "1"}, {"CUDA_VISIBLE_DEVICES": ""}
    jobs = {
        # name: (command, variables)
        "all": ([*LAUNCHER, *everyone], no_gpu | {"TMPDIR": str(folder / "all")}),
        "filter": ([*TORCHRUN, "--local-ranks-filter=0", "speaker.py"], omp),
        "files": ([*TORCHRUN, "--redirects=0:3", "--tee=1:3", "--log-dir=logs", "speaker.py"], omp),
    }
    with ThreadPoolExecutor(2) as pool:
        futures = {
            name: pool.submit(execute, *command, cwd=folder, env=variables)
            for name, (command, variables) in jobs.items()
        }
        results = {name: future.result() for name, future in futures.items()}
    return results | {"rank0": default_run(5)}


def passed(finished):
    """Assert that a lesson run has passed; return its JSON."""
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-2].startswith("PASS ")
    assert finished.json["passed"] is True
    return finished.json


# --- The whole script ---


@pytest.mark.claim("C4", "C5", "C6", "C8")
@pytest.mark.parametrize("mode, nproc, steps", [("rank0", 2, 10), ("all", 3, 4)])
def test_script_passes_and_its_counts_are_the_lines_that_arrived(started, mode, nproc, steps):
    result = passed(started[mode])
    assert (result["lesson"], result["world_size"], result["backend"]) == (5, nproc, "gloo")
    assert result["lines_per_rank"] == {
        "all": [steps + 4] * nproc,  # a log line, a bar, and a warning of two lines
        "rank0": [steps + 3] + [0] * (nproc - 1),  # no bar: this is not a terminal
    }
    assert result["event_files"] == {"all": nproc, "rank0": 1}
    # Newlines, not lines: they stay when the lines of two ranks mix.
    trained, _, report = started[mode].stdout.partition(f"step {steps}, loss by rank: ")
    assert len(report.splitlines()) == 4
    arrived = trained.count("\n") + started[mode].stderr.count("\n")
    assert arrived == sum(result["lines_per_rank"][mode]), trained + started[mode].stderr
    assert trained.count("loss") == steps * (1 if mode == "rank0" else nproc)


@pytest.mark.claim("C4", "C8")
@pytest.mark.parametrize("mode", ["rank0", "all"])
def test_ranks_differ_before_the_reduction_and_the_logged_loss_is_true(started, mode):
    result = passed(started[mode])
    first, second, *_ = result["loss_per_rank"]
    assert all(abs(one - other) > 1e-3 for one, other in zip(first, second, strict=True))
    sums = [sum(losses) for losses in zip(*result["loss_per_rank"], strict=True)]
    assert result["loss_sum"] == pytest.approx(sums, abs=1e-12)
    assert result["loss_mean"] == pytest.approx(result["loss_all_data"], rel=0, abs=1e-12)
    assert len(sums) == len(result["loss_mean"]) == {"rank0": 10, "all": 4}[mode]
    for total, mean in zip(result["loss_sum"], result["loss_mean"], strict=True):
        assert total > 1.5 * mean  # the article's number is not the loss


@pytest.mark.claim("C6")
def test_only_whole_lines_of_rank_0_arrive(started):
    lines = started["rank0"].stdout.splitlines()
    for number, line in enumerate(lines[:10], 1):
        assert re.fullmatch(rf"step {number}: loss \d+(\.\d+)?", line)
    first, second, _ = started["rank0"].stderr.splitlines()
    assert first == "[rank 0] WARNING 10 steps are few"
    assert re.fullmatch(r"\[rank 0\] WARNING .*UserWarning: the learning rate .*", second)


@pytest.mark.claim("C5")
def test_event_files_are_kept_in_a_folder_for_each_run(started, folder):
    flags = ("--log-dir", folder / "events", "--json")
    (_, stdout), _ = run_warm(lesson.__file__, 2, *flags)
    runs = {}
    for place in (folder / "events").iterdir():
        assert place.name.startswith("run_")
        files, losses = lesson.read_events(str(place))
        runs[files] = losses
    rank0, everyone = json.loads(stdout.splitlines()[-1]), passed(started["all"])
    as_float32 = torch.tensor(rank0["loss_mean"]).tolist()
    assert runs[1] == as_float32  # rank 0 alone: each true loss once
    of_all_ranks = torch.tensor(everyone["loss_per_rank"]).flatten().tolist()
    assert sorted(runs[3]) == sorted(of_all_ranks)  # three values for each step, none of them true
    assert len(runs) == 2 and len(runs[3]) == 12


def leftovers(folder):
    """Return what a run has left in its folder for temporary files.

    torchinductor_USER is left out: torch makes this cache sometimes, one for all runs of a user.
    """
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def test_a_run_leaves_nothing(started, folder):
    assert started["all"].returncode == 0 and leftovers(folder / "all") == []


ENDED_IN_A_PUT = """
import os, queue, runpy, signal, sys, threading, time

put = queue.Queue.put
losses = 0

def put_and_be_ended(self, item, *rest):
    global losses
    waiters = self.not_empty._waiters
    losses += b"loss" in item
    if not losses or not waiters:
        return put(self, item, *rest)
    queue.Queue.put = put_later
    with self.not_empty:  # as put() does it, up to the middle of notify()
        self._put(item)
        self.unfinished_tasks += 1
        waiters[0].release()
        os.kill(os.getpid(), signal.SIGTERM)

def put_later(self, item, *rest):
    time.sleep(1)  # by then the writing thread waits again
    put(self, item, *rest)

queue.Queue.put = put_and_be_ended
sys.argv[1:] = ["--steps", "500000"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_that_is_told_to_end_removes_its_folder(tmp_path):
    """Also in the one place where an exception would make TensorBoard wait for two minutes."""
    code = f"import sys; sys.argv = [{lesson.__file__!r}]\n{ENDED_IN_A_PUT}"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for name in RANK_VARIABLES.split():
        environment.pop(name, None)
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=90
    )
    assert (finished.returncode, finished.stdout) == (143, b"")
    assert not leftovers(tmp_path)


BAD_FLAGS = [
    ("--batch-size", "2"),  # three ranks
    ("--output", "rank1"),
    ("--log-dir", "no/such/folder"),
    ("--log-dir", __file__),
    ("--log-dir", ""),
]


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=" ".join)
def test_bad_values_cost_one_line(monkeypatch, capsys, flags, tmp_path):
    monkeypatch.setattr(lesson, "setup", None)  # calling it would be a TypeError
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        lesson.main([*flags])
    stdout, stderr = capsys.readouterr()
    assert (stop.value.code, stdout) == (2, "")
    *_, line = stderr.splitlines()
    assert "error: " in line and flags[0] in line
    assert len(stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_parse_args_starts_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lesson, "setup", None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert lesson.parse_args(["--batch-size", "3", "--log-dir", str(tmp_path)])
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


# --- Numbers ---


def test_a_full_disk_costs_one_line(tmp_path):
    """A limit on the size of a file plays the full disk; it is inherited by the shell's child."""
    flags = ["--steps", "500", "--log-dir", str(tmp_path)]
    command = ["bash", "-c", 'ulimit -f 1; exec "$0" "$@"', sys.executable, lesson.__file__, *flags]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert run.stderr == "rank 0: can't write event files: [Errno 27] File too large\n"


def test_an_error_of_tensorboards_thread_is_told_once(monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def on_a_full_disk():
        raise OSError(28, "No space left on device")

    said = "can't write event files: .* No space left"
    with pytest.raises(SystemExit, match=said), lesson.one_line_if_the_disk_is_full(0):
        thread = threading.Thread(target=on_a_full_disk)
        thread.start()
        thread.join()
        on_a_full_disk()
    assert shown == [] and threading.excepthook == shown.append


def train_quietly(rank, world_size, output="rank0", folder=None, *args):
    """Call lesson.train on a rank; return (its losses, what it printed)."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        losses = lesson.train(rank, world_size, CPU, output, folder, *args)
    return losses, text.getvalue()


def reference(steps, batch_size):
    """Return the losses of one process that trains on all rows, written without the lesson."""
    rows = torch.randn(100, 5, generator=torch.Generator().manual_seed(0)).double()
    weight, bias, losses = torch.zeros(5).double(), torch.zeros(()).double(), []
    for step in range(1, steps + 1):
        numbers = [row % 100 for row in range(step * batch_size, (step + 1) * batch_size)]
        errors = rows[numbers] @ weight + bias - (rows[numbers].sum(1) + 3)
        losses.append((errors**2).mean().item())
        weight = weight - 0.1 * 2 * (errors[:, None] * rows[numbers]).mean(0)
        bias = bias - 0.1 * 2 * errors.mean()
    return losses


@pytest.mark.claim("C4")
@pytest.mark.parametrize("nproc, batch_size", [(1, 30), (2, 30), (2, 7), (3, 10), (4, 30), (8, 9)])
def test_logged_loss_is_that_of_one_process(nproc, batch_size, tmp_path):
    ranks = run(train_quietly, nproc, "rank0", str(tmp_path), 6, batch_size)
    for losses, _ in ranks:
        own, total, of_means, mean, truth = zip(*losses, strict=True)
        assert list(mean) == pytest.approx(reference(6, batch_size), rel=0, abs=1e-12)
        assert list(truth) == pytest.approx(list(mean), rel=0, abs=1e-12)
        assert list(total) == pytest.approx([nproc * value for value in of_means])
        wrong = max(abs(one - other) for one, other in zip(of_means, truth, strict=True))
        assert (wrong < 1e-12) == (batch_size % nproc == 0)  # uneven: a mean of means is not it
    reduced = [[step[1:4] for step in losses] for losses, _ in ranks]
    assert reduced == [reduced[0]] * nproc  # after the reduction, the ranks agree
    own = [[step[0] for step in losses] for losses, _ in ranks]
    assert nproc == 1 or own[0] != own[1]  # before, they do not
    _, events = lesson.read_events(str(tmp_path))
    assert events == torch.tensor([step[3] for step in ranks[0][0]]).tolist()
    shown = [line for line in ranks[0][1].splitlines() if line.startswith("step")]
    assert shown == [f"step {n}: loss {loss[3]:.3g}" for n, loss in enumerate(ranks[0][0], 1)]


def reduce_once(rank, world_size):
    """Rank 0 has 1 row with loss 4, rank 1 has 3 rows with loss 8."""
    with Wire() as wire:
        reduced = lesson.reduce_loss(
            torch.tensor([4.0, 8.0][rank], dtype=torch.float64), 1 + 2 * rank
        )
    average = torch.tensor([4.0, 8.0][rank], dtype=torch.float64)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    return reduced, wire.calls, average.item()


@pytest.mark.claim("C4", "C8")
def test_one_all_reduce_of_24_bytes_gives_sum_and_means():
    """The mean of means is what gloo's AVG gives, without a division of ours."""
    expected = (12.0, 6.0, 7.0), [("allreduce", "float64", 3, 24)], 6.0
    assert run(reduce_once, 2) == [expected, expected]


def main_without(rank, world_size, technique):
    """Run the lesson's main() on a rank, with one technique removed; return exit code, output."""
    if technique == "weights":
        reduce_loss = lesson.reduce_loss
        lesson.reduce_loss = lambda *args: reduce_loss(*args)[:2] + reduce_loss(*args)[1:2]
    elif technique == "division":
        reduce_loss = lesson.reduce_loss
        lesson.reduce_loss = lambda *args: reduce_loss(*args)[:2] + reduce_loss(*args)[:1]
    elif technique == "one voice":
        lesson.one_voice = lambda rank: contextlib.nullcontext()
    elif technique == "one writer":
        train = lesson.train
        lesson.train = lambda r, n, d, output, *a: train(r, n, d, "all", *a)
    elif technique == "learning":
        torch.optim.SGD.step = lambda self: None
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = lesson.main(["--batch-size", "31"])
    return code, output.getvalue().splitlines()[-1:]


@pytest.mark.claim("C4", "C5", "C6")
@pytest.mark.parametrize(
    "technique", [None, "weights", "division", "one voice", "one writer", "learning"]
)
def test_main_fails_when_a_technique_is_removed(technique):
    code, last = run(main_without, 2, technique)[0]
    assert (code, last[0][:4]) == ((0, "PASS") if technique is None else (1, "FAIL"))


# --- Who speaks ---


def suppress_print(is_master):
    """Do what the article does."""
    if not is_master:
        builtins.print = lambda *values, **options: None


def library_prints(file=None):
    """Be a function of a library that prints, on the screen or into a file of its own."""
    print("from a library", file=file)


def listen(action, *args):
    """Return what `action(*args)` writes to sys.stdout and sys.stderr."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        action(*args)
    return text.getvalue()


def the_articles_print(rank, world_size):
    real, report = builtins.print, io.StringIO()
    try:
        suppress_print(rank == 0)
        raise ValueError("training failed")
    except ValueError:
        library_prints(report)
        heard = listen(library_prints)
    return heard, report.getvalue(), builtins.print is real


@pytest.mark.claim("C6")
def test_the_articles_print_stays_dead_and_takes_files_with_it():
    line = "from a library\n"
    assert run(the_articles_print, 2) == [(line, line, True), ("", "", False)]


def the_lessons_print(rank, world_size):
    real, report = builtins.print, io.StringIO()
    heard = []
    try:
        with lesson.one_voice(rank):
            heard.append(listen(library_prints))
            library_prints(report)
            raise ValueError("training failed")
    except ValueError:
        heard.append(listen(library_prints))
    return heard, report.getvalue(), builtins.print is real


@pytest.mark.claim("C6")
def test_one_voice_gives_print_back_and_leaves_files_alone():
    line = "from a library\n"
    assert run(the_lessons_print, 2) == [([line, line], line, True), (["", line], line, True)]


def print_in_all_ways(rank, world_size, prefix):
    with lesson.one_voice(rank, speakers=(0, 2), prefix=prefix) as say:
        heard = [listen(print, "a", 1), listen(say, "x\ny")]
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            print("b", "c", sep="-", end="!\n", file=sys.stderr, flush=True)
        return [*heard, text.getvalue()]


@pytest.mark.claim("C6")
@pytest.mark.parametrize("prefix", [False, True])
def test_a_rank_speaks_on_purpose_and_with_its_number(prefix):
    for rank, heard in enumerate(run(print_in_all_ways, 3, prefix)):
        mark = f"[rank {rank}] "
        shown = mark * prefix
        printed = [f"{shown}a 1\n", f"{shown}b-c!\n"] if rank != 1 else ["", ""]
        assert heard == [printed[0], f"{mark}x\n{mark}y\n", printed[1]]


def log_in_all_ways(rank, world_size, voice):
    """Return what is heard of info, warning, error, a logger with its own handler, warnings."""
    own = logging.getLogger("own")
    own.propagate = False
    handler = logging.Handler()
    heard_by_own = []
    handler.emit = lambda record: heard_by_own.append(record.getMessage())
    own.addHandler(handler)
    root = logging.getLogger()
    before = root.handlers, root.level, root.manager.disable, warnings.showwarning

    def speak():
        log = logging.getLogger("train")
        log.info("info")
        log.warning("warning")
        log.error("error")
        own.warning("own")
        warnings.warn("careful", stacklevel=1)

    if voice == "article":
        suppress_print(rank == 0)
        if rank == 0:
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
            root.handlers[0].setStream(text := io.StringIO())
            return listen(speak) + text.getvalue(), heard_by_own, True
        return listen(speak), heard_by_own, True
    with lesson.one_voice(rank):
        heard = listen(speak)
    after = root.handlers, root.level, root.manager.disable, warnings.showwarning
    return heard, heard_by_own, before == after and before[0] is after[0]


@pytest.mark.claim("C6")
def test_without_configuration_the_others_still_log_warnings():
    """The article configures logging in the master only: Python's last resort speaks elsewhere."""
    (zero, _, _), (one, own, _) = run(log_in_all_ways, 2, "article")
    assert "INFO info\n" in zero
    assert "warning\nerror\n" in one and "info" not in one
    assert own == ["own"]
    assert "UserWarning: careful" in one


@pytest.mark.claim("C6")
def test_one_voice_configures_logging_and_warnings_on_each_rank_and_restores_them():
    (zero, own_0, same_0), (one, own_1, same_1) = run(log_in_all_ways, 2, "lesson")
    lines = [f"[rank 0] {line}" for line in ("INFO info", "WARNING warning", "ERROR error")]
    assert zero.splitlines()[:3] == lines
    assert re.match(r"\[rank 0\] WARNING .*UserWarning: careful", zero.splitlines()[3])
    assert one == "[rank 1] ERROR error\n"  # an error is never silent
    assert (own_0, own_1) == (["own"], [])
    assert same_0 and same_1


def log_into_a_file(rank, world_size, folder):
    """Log with a configuration made before one_voice: a screen, and a log file of this rank."""
    screen, file = logging.StreamHandler(), logging.FileHandler(f"{folder}/{rank}.log")
    root = logging.getLogger()
    root.handlers, root.level = [screen, file], logging.DEBUG

    def speak():
        for say in (root.debug, root.warning, root.error):
            say(say.__name__)

    with lesson.one_voice(rank):
        heard = listen(speak)
    root.warning("afterwards")
    return heard, root.handlers == [screen, file]


@pytest.mark.claim("C6")
def test_one_voice_leaves_a_log_file_alone(tmp_path, capsys):
    heard = run(log_into_a_file, 2, str(tmp_path))
    lines = ["[rank 0] WARNING warning\n[rank 0] ERROR error\n", "[rank 1] ERROR error\n"]
    assert heard == [(lines[0], True), (lines[1], True)]
    shown = capsys.readouterr().err  # by the old screen: nothing inside
    assert shown == "[rank 0] afterwards\n[rank 1] afterwards\n"
    logs = [(tmp_path / f"{rank}.log").read_text().split() for rank in (0, 1)]
    assert logs == [["debug", "warning", "error", "afterwards"], ["error", "afterwards"]]


def speak_where_a_level_was_chosen(rank, world_size, level, disabled):
    """Choose what may be logged, and no handler; return what is heard inside one_voice."""
    logging.getLogger().setLevel(level)
    logging.disable(disabled)
    with lesson.one_voice(rank):
        return listen(lambda: [logging.info("i"), logging.warning("w"), logging.error("e")])


@pytest.mark.claim("C6")
def test_one_voice_lets_nothing_through_that_was_switched_off():
    chosen = run(speak_where_a_level_was_chosen, 2, logging.ERROR, logging.NOTSET)
    assert chosen == ["[rank 0] ERROR e\n", "[rank 1] ERROR e\n"]
    assert run(speak_where_a_level_was_chosen, 2, logging.INFO, logging.CRITICAL) == ["", ""]


def write_as_cpp(rank, world_size, path):
    """Write to file descriptor 2, as C++ code does, with the descriptor sent to a file."""
    saved, file = os.dup(2), os.open(f"{path}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    with lesson.one_voice(rank):
        os.write(2, b"from C++\n")
    os.dup2(saved, 2)


@pytest.mark.claim("C6")
def test_no_python_code_silences_cpp_but_the_launcher_does(started, tmp_path):
    run(write_as_cpp, 2, str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["from C++\n"] * 2
    assert started["filter"].stdout == "out of rank 0\n"
    assert started["filter"].stderr == "err of rank 0\n"


@pytest.mark.claim("C6")
def test_the_launcher_redirects_and_tees(started, folder):
    """Rank 0 is redirected into files, rank 1 is written into files and shown."""
    assert started["files"].stdout == "[default1]:out of rank 1\n"
    assert started["files"].stderr == "[default1]:err of rank 1\n"
    for rank in (0, 1):
        for kind in ("out", "err"):
            (file,) = (folder / "logs").glob(f"*/attempt_0/{rank}/std{kind}.log")
            assert file.read_text() == f"{kind} of rank {rank}\n"


class SlowWire(io.RawIOBase):
    """A file to which all ranks append; after each write a rank waits for the others."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def writable(self):
        return True

    def write(self, data):
        written = os.write(self.file, data)
        dist.barrier()
        return written


def speak_at_once(rank, world_size, path, voice):
    stream = io.TextIOWrapper(SlowWire(path), write_through=True)  # as python -u makes it
    with contextlib.redirect_stdout(stream):
        if voice:
            with lesson.one_voice(rank, speakers=range(world_size)):
                for step in range(3):
                    print("step", step, "of rank", rank)
        else:
            for step in range(3):
                print("step", step, "of rank", rank)


@pytest.mark.claim("C6")
@pytest.mark.parametrize("voice", [False, True])
def test_lines_of_ranks_mix_with_print_and_never_with_one_voice(voice, tmp_path):
    run(speak_at_once, 3, str(tmp_path / "screen"), voice)
    lines = (tmp_path / "screen").read_text().splitlines()
    whole = [line for line in lines if re.fullmatch(r"step \d of rank \d", line)]
    assert len(whole) == (9 if voice else 0)


class Sink(io.RawIOBase):
    """Counts the writes that reach the operating system."""

    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


@pytest.mark.claim("C6")
@pytest.mark.parametrize("buffered", [False, True])
def test_a_line_of_up_to_4096_bytes_is_one_write(buffered):
    sink = Sink()
    raw = io.BufferedWriter(sink) if buffered else sink
    with (
        contextlib.redirect_stdout(io.TextIOWrapper(raw, write_through=not buffered)),
        lesson.one_voice(0) as say,
    ):
        for length in (1, 100, 4000):
            print("x" * length, "y")
            say("z" * length)
    expected = [
        line
        for n in (1, 100, 4000)
        for line in (b"x" * n + b" y\n", b"[rank 0] " + b"z" * n + b"\n")
    ]
    assert sink.writes == expected


# --- The progress bar ---


class Terminal(io.StringIO):
    def isatty(self):
        return True


def draw(rank, world_size, output, stream, folder):
    """Train with stderr as `stream`; return (the bar's total, disabled, what was drawn)."""
    bars = []

    class Seen(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append((self.total, self.disable))

    lesson.tqdm = Seen
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(Terminal()):
        lesson.train(rank, world_size, CPU, output, folder, 5)
    return bars, stream.getvalue()


@pytest.mark.claim("C6")
@pytest.mark.parametrize(
    "output, stream", [("rank0", Terminal()), ("rank0", io.StringIO()), ("all", io.StringIO())]
)
def test_the_bar_has_a_total_and_only_rank_0_draws_it(output, stream, tmp_path):
    terminal = isinstance(stream, Terminal)
    drawn = run(draw, 2, output, type(stream)(), str(tmp_path))
    for rank, (bars, text) in enumerate(drawn):
        shown = output == "all" or (terminal and rank == 0)
        assert len(bars) == 1 and bool(bars[0][1]) is (not shown)
        assert ("5/5" in text) is shown
        assert not shown or bars[0][0] == 5
    if terminal:  # a line takes the place of the bar, and the bar is drawn again
        assert re.search(r"\r\x1b\[K\[rank 0\] WARNING", drawn[0][1])


@pytest.mark.claim("C6")
def test_a_bar_around_enumerate_has_no_total():
    text = io.StringIO()
    assert tqdm(enumerate(range(5)), file=text).total is None
    assert len(list(tqdm(enumerate(range(5)), file=text))) == 5
    assert "5it" in text.getvalue() and "%" not in text.getvalue()
    assert tqdm(range(5), file=text).total == 5
    assert tqdm(enumerate(range(5)), file=text, total=5).total == 5


# --- Event files ---


def imported(rank, world_size, folder, fake):
    """Train where a TensorFlow could be imported; return which of the slow modules were."""
    sys.path.insert(0, fake)
    train_quietly(rank, world_size, "rank0", folder)
    return [name in sys.modules for name in ("tensorboard", "tensorflow")]


@pytest.mark.claim("C5")
def test_only_rank_0_imports_tensorboard_and_nobody_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('TensorFlow was imported')")
    ranks = run(imported, 2, str(tmp_path / "events"), str(tmp_path))
    assert ranks == [[True, False], [False, False]]


@pytest.mark.claim("C5")
def test_writers_of_all_ranks_make_a_file_each_and_repeat_every_step(tmp_path):
    run(train_quietly, 3, "all", str(tmp_path / "all"), 4)
    ranks = run(train_quietly, 3, "rank0", str(tmp_path / "rank0"), 4)
    files, values = lesson.read_events(str(tmp_path / "all"))
    assert (files, len(values)) == (3, 12)
    files, values = lesson.read_events(str(tmp_path / "rank0"))
    assert (files, values) == (1, torch.tensor([step[3] for step in ranks[0][0]]).tolist())


# --- Masters ---


def masters_here(rank, world_size, machines):
    """Be one rank of several machines, given by their numbers of processes."""
    places = [(node, local) for node, size in enumerate(machines) for local in range(size)]
    os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] = map(str, places[rank])
    return lesson.masters(dist.get_rank(), int(os.environ["LOCAL_RANK"]))


@pytest.mark.claim("C7")
@pytest.mark.parametrize(
    "machines, local, article",
    [
        ((2,), [0], [0]),
        ((2, 2), [0, 2], [0]),
        ((4, 4), [0, 4], [0]),
        ((8, 8), [0, 8], [0, 8]),
        ((1, 3), [0, 1], [0]),
        ((8, 4, 8), [0, 8, 12], [0, 8, 16]),
    ],
)
def test_the_articles_master_is_one_per_machine_only_with_8_processes_each(
    machines, local, article
):
    if sum(machines) <= 4:
        ranks = run(masters_here, sum(machines), machines)
    else:
        locals_ = [number for size in machines for number in range(size)]
        ranks = [lesson.masters(rank, number) for rank, number in enumerate(locals_)]
    found = [[rank for rank, is_ in enumerate(kind) if is_] for kind in zip(*ranks, strict=True)]
    assert found == [[0], local, article]
    assert (local == article) == all(size == 8 for size in machines[:-1])
    with_right_number = lesson.masters(2, 0, num_gpus=2)
    assert with_right_number == (False, True, True)


# --- Why DDP needs no master for the parameters (E6) ---


def count_owners(rank, world_size, folder):
    """Train 4 steps; return (process, optimizers made here, what was sent at first, and later)."""
    made, first = [], []

    class Counted(torch.optim.SGD):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(sum(p.numel() for group in self.param_groups for p in group["params"]))

    class Watched(nn.parallel.DistributedDataParallel):
        def __init__(self, *args):
            super().__init__(*args)
            first.extend(wire.calls)
            wire.calls.clear()

    torch.optim.SGD, nn.parallel.DistributedDataParallel = Counted, Watched
    with Wire() as wire:
        train_quietly(rank, world_size, "rank0", folder, 4)
    return os.getpid(), made, first, wire.calls


@pytest.mark.claim("E6")
def test_each_rank_owns_its_process_and_optimizer_and_no_parameter_is_sent(tmp_path):
    ranks = run(count_owners, 2, str(tmp_path))
    assert len({pid for pid, *_ in ranks} | {os.getpid()}) == 3  # each its own interpreter
    for _, optimizers, first, later in ranks:
        assert optimizers == [6]  # one, and it owns all 6 parameters
        assert first[-1] == ("broadcast", "float64", 6, 48)  # the parameters, once, first
        assert later.count(("allreduce", "float64", 6, 48)) == 4  # gradients, in each step
        assert later.count(("allreduce", "float64", 3, 24)) == 4  # our losses
        # What else is sent is DDP's table of buckets, once (lesson 02): no 48 bytes.
        others = [call.nbytes for call in later if call.name != "allreduce"]
        assert len(later) - len(others) == 8
        assert sum(others) <= 16
