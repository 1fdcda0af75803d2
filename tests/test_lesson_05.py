"""Lesson 05: one rank speaks for all, and the number that it says is true."""

import builtins
import contextlib
import fcntl
import io
import logging
import os
import re
import subprocess
import sys
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock, patch

import cloudpickle
import lesson_05_rank_zero_output as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks
from conftest import ENVIRONMENT, run_warm
from lockstep import lessons, proofs
from nbtools import run
from nbtools.record import Wire
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
proof = proofs.of_lesson(lessons.find("05"))

MEAN = "    return total / count\n"
QUIET = "contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere)"
SILENT = "contextlib.redirect_stdout(nowhere)"
STAY = 'getattr(h, "stream", None) not in old_screens'
FILTER = "lambda record: rank == 0 or record"
ON_CPU = "torch.tensor([total, count], dtype=torch.float64)"
SUMS = "loss.detach() * len(mine), 0 * count +"
MUTE = 'setattr(sys, "stdout", sys.stdout if rank == 0 else __import__("io").StringIO())'
LOCAL = 'int(os.environ["LOCAL_RANK"])'
SGD = "(model){}\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    total"

BREAKS = {
    "mean of means": ("stack((total, ", "stack((total / count, "),
    "sum without division": (MEAN, "    return total\n"),
    "only rank 0 has the sum": ("dist.all_reduce(numbers)", "dist.reduce(numbers, 0)"),
    "reduced in float32": ("(total, count)))", "(total, count))).float()"),
    "its own loss is shown": ("loss {mean:.3g}", "loss {loss:.3g}"),
    "its own loss is written": ('"loss", mean,', '"loss", loss,'),
    "sums are not begun anew": ("0.0, 0\n                tq", "total, count\n                tq"),
    "sums are begun anew each time": ("total + loss.detach() * len(mine), count +", SUMS),
    "every is not heeded": ("if step % every == 0 or step == steps:", "if True:"),
    "the last steps are lost": ("if step % every == 0 or step == steps:", "if step % every == 0:"),
    "rows counted in the type of the loss": ("total.detach().double()", "total.detach()"),
    "graphs are kept": ("total + loss.detach() * len(mine)", "total + loss * len(mine)"),
    "rank % 8 logs": (FILTER, "lambda record: rank % 8 == 0 or record"),
    "rank % 8 prints": ("sys.stdout if rank == 0", "sys.stdout if rank % 8 == 0"),
    "rank % 8 writes": ("if rank != 0:\n        return", "if rank % 8:\n        return"),
    "each rank its own writer": ("if rank != 0:\n        return", "if False:\n        return"),
    "everybody prints": (QUIET, "contextlib.nullcontext()"),
    "silence on rank 0 too": (QUIET, SILENT),
    "rank 0 logs errors only": (FILTER, "lambda record: record"),
    "infos are lost": ("screen.setFormatter(", "screen.setLevel(30); screen.setFormatter("),
    "nobody hears what others write to stderr": (
        "            yield\n",
        "            sys.stderr = sys.stderr if rank == 0 else nowhere\n            yield\n",
    ),
    "old screens stay": (STAY, "h"),
    "an old screen on stdout stays": ("= sys.stdout, sys.stderr", "= (sys.stderr,)"),
    "lines of rank 0 only by name": ('f"[rank {rank}] %', 'f"[rank 0] %'),
    "errors are silenced": (">= logging.ERROR", "> logging.ERROR"),
    "warnings pass by": ("logging.captureWarnings(True)", "pass"),
    "log files are lost": (STAY, "not h"),
    "only FileHandlers stay": (STAY, "isinstance(h, logging.FileHandler)"),
    "no voice in the loop": ("with one_voice(rank), open", "with open"),
    "a bar on each rank": ("disable=rank != 0 or None", "disable=None"),
    "a bar in a log file": ("disable=rank != 0 or None", "disable=rank != 0"),
    "a print tears the bar": ("tqdm.write(f", "print(f"),
    "local rank 0 speaks": ("one_voice(rank), open", f"one_voice({LOCAL}), open"),
    "local rank 0 writes": ("open_writer(rank, folder) as", f"open_writer({LOCAL}, folder) as"),
    "local rank 0 has a bar": ("disable=rank != 0", f"disable={LOCAL} != 0"),
    "sums leave their device": ("torch.stack((total, torch.full_like(total, count)))", ON_CPU),
    "gradients as a mean of means": ("(loss * world_size * len(mine) / batch_size)", "loss"),
    "the factor without world size": ("loss * world_size * len", "loss * len"),
    "the same rows on all ranks": ("[rank::world_size]  #", "[::world_size]  #"),
    "no DDP": (SGD.format(""), SGD.format(".module")),
    # Last, because what they leave behind would spoil what follows them in this process.
    "handlers are changed in place": ("root.handlers = [", "root.handlers[:] = ["),
    "logging is not put back": ("        root.handlers = before", "        pass"),
    "only a good end puts back": (
        "    finally:\n",
        "    except OSError:\n        pass\n    else:\n",
    ),
    "print is not put back": (QUIET, f"contextlib.nullcontext({MUTE})"),
    "warnings are not put back": ("logging.captureWarnings(False)", "pass"),
}


@pytest.mark.claim("C4", "C5", "C6")
@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(5, BREAKS, nproc, "--steps", 4)


# --- The whole script ---


@pytest.mark.claim("C4", "C5", "C6", "C8")
def test_default_run(default_run):
    run = default_run(5)
    result = run.json
    assert (result["lesson"], result["world_size"], result["backend"]) == (5, 2, "gloo")
    assert result["lines_per_rank"] == {"rank0": [13, 0]}  # on a terminal there is a bar as well
    assert result["event_files"] == {"rank0": 1}
    first, second = result["loss_per_rank"]
    assert all(abs(one - other) > 1e-3 for one, other in zip(first, second, strict=True))
    assert result["loss_sum"] == pytest.approx(
        [sum(pair) for pair in zip(first, second, strict=True)]
    )
    assert result["loss_mean"] == pytest.approx(result["loss_all_data"], rel=0, abs=1e-12)
    for total, mean in zip(result["loss_sum"], result["loss_mean"], strict=True):
        assert total > 1.5 * mean  # the article's number is not the loss
    shown = [f"step {n}: loss {loss:.3g}" for n, loss in enumerate(result["loss_mean"], 1)]
    assert run.stdout.splitlines()[:10] == shown
    one, other, *_ = run.stderr.splitlines()
    assert one == "[rank 0] WARNING this layer is slow on rows of 5"
    assert re.fullmatch(r"\[rank 0\] WARNING .*UserWarning: its learning rate .*", other)
    assert "rank 1" not in run.stderr


@pytest.mark.claim("C4", "C5", "C8")
def test_where_all_speak_each_logs_the_loss_of_its_own_rows(lesson_run):
    result = lesson_run(5, "--output", "all", "--nproc", 3, "--steps", 5, "--batch-size", 7).json
    assert result["passed"] is True
    assert result["lines_per_rank"] == {"all": [9, 9, 9]}
    assert result["event_files"] == {"all": 3}
    assert result["loss_mean"] == pytest.approx(result["loss_per_rank"][0], rel=0, abs=1e-12)


@pytest.mark.claim("C4", "C5")
@pytest.mark.parametrize("output, files", [("all", 3), ("rank0", 1)])
def test_event_files_are_kept_in_a_new_folder(output, files, tmp_path):
    flags = ("--batch-size", 7, "--steps", 3, "--output", output, "--log-dir", tmp_path)
    (_, said), *others = run_warm(lesson.__file__, 3, *flags)
    assert [text.count("loss") for text in (said, *[text for _, text in others])] == (
        [3] * files + [0] * (3 - files)
    )
    (place,) = tmp_path.iterdir()
    found, losses = proof.read_events(str(place))
    assert place.name.startswith("run_") and (found, len(losses)) == (files, 3 * files)


@pytest.mark.parametrize("flags", ["--batch-size 2", "--output rank1", "--log-dir no/such/folder"])
def test_bad_values_cost_one_line(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, flags.split(), 3, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "error: " in line and flags.split()[0] in line


# --- The technique in a project of one's own ---

PROJECT = """

if __name__ == "__main__":
    sys.modules.setdefault("tensorboard.compat.notf", sys)  # spares seconds, if TensorFlow is here
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = torch.randn(70, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    train(model, rows, rows.sum(1, keepdim=True), 100, 33, sys.argv[1], every=50)
    print("rank", dist.get_rank(), "speaks again")
    dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    imports, _, rest = Path(lesson.__file__).read_text().partition('"""\n\n')[2].partition("# ---")
    file = tmp_path / "project.py"
    file.write_text(imports + "# ---" + rest.partition("# --- The example ---")[0] + PROJECT)
    (code, zero), (other, one) = run_warm(file, 2, tmp_path / "events")
    assert (code, other, one) == (0, 0, "rank 1 speaks again\n")
    first, last, _ = zero.splitlines()
    losses = [float(line.partition(" loss ")[2]) for line in (first, last)]
    assert first.startswith("step 50: ") and last.startswith("step 100: ") and losses[1] < losses[0]
    files, events = proof.read_events(str(tmp_path / "events"))
    assert files == 1 and events == [(50, pytest.approx(losses[0], rel=0.01)), (100, events[1][1])]


def means_of(rank, world_size):
    """Return the mean of (4) and (8, 8, 8), what AVG makes of it, and the mean of () and (1, 2)."""
    average = torch.tensor((4.0, 8.0)[rank])
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    mean = lesson.mean_over_rows(torch.tensor((4.0, 24.0)[rank]), (1, 3)[rank])
    return mean, average.item(), lesson.mean_over_rows(torch.tensor((0.0, 3.0)[rank]), 2 * rank)


@pytest.mark.claim("C4", "C8")
def test_avg_works_over_gloo_and_gives_the_mean_of_means():
    """And a rank without rows does no harm to the mean over rows."""
    assert run(means_of, 2) == [(7.0, 6.0, 1.5)] * 2


class Readings(TorchFunctionMode):
    """Notes which functions hand a single number to Python, or take it from its device."""

    NAMES = "item", "tolist", "numpy", "cpu", "to", "__float__", "__bool__"

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def train_on(rank, world_size, folder):
    """Train for 4 steps; return process, optimizers, what was sent, read and imported."""
    made, (rows, targets, model) = [], lesson.make_rows(0, torch.device("cpu"))

    class Counted(torch.optim.SGD):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(sum(p.numel() for group in self.param_groups for p in group["params"]))

    counting = patch.object(torch.optim, "SGD", Counted)
    with counting, proof.on_a_screen(), Wire() as wire, Readings() as readings:
        lesson.train(model, rows, targets, 4, 31, folder, every=2)
    slow = {"tensorboard", "tensorflow"} & set(sys.modules)
    return os.getpid(), made, wire.calls, readings.names, slow


@pytest.mark.claim("C5", "E6")
def test_each_rank_owns_its_process_and_optimizer_and_no_parameter_is_sent(tmp_path):
    ranks = run(train_on, 2, str(tmp_path))
    assert len({pid for pid, *_ in ranks} | {os.getpid()}) == 3  # each its own interpreter
    assert [slow for *_, slow in ranks] == [{"tensorboard"}, set()]  # who writes imports it
    for _, optimizers, calls, readings, _ in ranks:
        assert optimizers == [6]  # one, and it owns all 6 parameters
        assert calls.count(("broadcast", "float64", 6, 48)) == 1  # when DDP wraps: the parameters
        assert calls.count(("allreduce", "float64", 6, 48)) == 4  # gradients, in each step
        assert calls.count(("allreduce", "float64", 2, 16)) == 2  # our losses, every=2
        assert sum(call.kind == "float64" for call in calls) == 7
        assert readings == ["tolist"] * 2  # a GPU is not awaited in between


# --- Who speaks ---


@pytest.mark.claim("C6")
def test_the_articles_print_stays_dead_and_takes_files_with_it():
    report, screen = io.StringIO(), io.StringIO()
    with patch.object(builtins, "print", builtins.print), contextlib.redirect_stdout(screen):
        builtins.print = lambda *values, **options: None  # what the article does on rank 1
        with contextlib.suppress(ValueError):
            print("a line", file=report)
            raise ValueError("training failed")
        print("afterwards")
    assert (report.getvalue(), screen.getvalue()) == ("", "")
    assert proof.hear(1)[3:] == (["SAID"], True, True)  # the lesson's: files get theirs


@pytest.mark.claim("C6")
def test_without_configuration_the_others_still_log():
    """The article configures logging in the master only: Python's last resort speaks elsewhere."""
    with patch.object(logging.root, "handlers", []), proof.on_a_screen() as (_, err):
        logging.getLogger("train").warning("few steps")
        logging.getLogger("train").info("step 1")
    assert err.getvalue() == "few steps\n"


@pytest.mark.claim("C6")
def test_handlers_that_are_no_screen_get_what_they_would_get_otherwise(tmp_path):
    """Among them a queue; and a bar's handler, which takes the screen's place, is as silent."""
    queue, named = SimpleQueue(), logging.FileHandler(tmp_path / "named", delay=True)
    with (
        open(tmp_path / "opened", "w") as opened,
        patch.object(logging.root, "handlers", []),
        proof.on_a_screen() as (_, err),
    ):
        logging.root.handlers += [logging.StreamHandler(opened), QueueHandler(queue), named]
        with lesson.one_voice(1), logging_redirect_tqdm():
            logging.warning("few rows")
            logging.error("bad row")
        named.close()
    assert err.getvalue().strip() == "[rank 1] ERROR bad row"
    for file in ("opened", "named"):
        assert (tmp_path / file).read_text() == "few rows\nbad row\n"
    assert [queue.get().getMessage() for _ in range(queue.qsize())] == ["few rows", "bad row"]


@pytest.mark.claim("C6")
def test_one_voice_begins_at_its_with_and_the_level_is_chosen_before(caplog):
    """basicConfig does nothing where the root logger has a handler, and in one_voice it has one."""
    before = proof.state()
    voice = lesson.one_voice(1)
    assert proof.state() == before
    with voice:
        assert proof.state() != before
    caplog.set_level(logging.WARNING)  # and puts the level back
    with patch.object(logging.root, "handlers", []), proof.on_a_screen() as (_, err):
        for step in (1, 2):
            with lesson.one_voice(0):
                logging.basicConfig(level=logging.INFO)
                logging.info("step %d", step)
            logging.basicConfig(level=logging.INFO)
    assert err.getvalue() == "[rank 0] INFO step 2\n"


@pytest.mark.claim("C6")
def test_what_is_not_python_is_not_silenced(capfd):
    with lesson.one_voice(1):
        os.write(1, b"from C++\n")
        print("from Python")
    assert capfd.readouterr().out == "from C++\n"


@pytest.mark.claim("C6")
def test_a_print_is_four_writes_and_a_log_line_is_one():
    """torchrun starts Python with -u: between two writes, another rank can write to the screen."""
    with patch.multiple(sys, stdout=Mock(), stderr=Mock()), lesson.one_voice(0):
        print("step", 1)
        logging.error("a bad row: %d", 7)
        assert sys.stdout.write.call_count == 4
        sys.stderr.write.assert_called_once_with("[rank 0] ERROR a bad row: 7\n")


@pytest.mark.claim("C6")
@pytest.mark.skipif(sys.platform != "linux", reason="how large a pipe is, one asks Linux")
def test_a_pipe_takes_4096_bytes_whole_or_not_at_all_and_more_in_parts():
    """Between two parts, another rank can write. A writer that may wait makes the parts itself."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "wb", buffering=0) as pipe:
        room = 100
        os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) - room))
        assert pipe.write(bytes(4096)) is None  # nothing: there is room for 100 bytes
        assert pipe.write(bytes(4096 + room)) == room


@pytest.mark.claim("C6")
def test_a_bar_around_enumerate_has_no_total():
    nowhere = io.StringIO()
    assert tqdm(enumerate(range(5)), file=nowhere).total is None
    assert tqdm(range(5), file=nowhere).total == 5
    assert tqdm(range(5), file=nowhere, disable=None).disable  # this is no terminal


@pytest.mark.claim("C6")
def test_the_launcher_redirects_and_tees(tmp_path):
    """Both into files, rank 1 on the screen, too. (The notebook runs the filter, and @record.)"""
    speaker = "import os; os.write(1, f\"out of rank {os.environ['RANK']}\\n\".encode())"  # as C++
    (tmp_path / "speaker.py").write_text(speaker)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "--log-dir=."]
    command += ["--redirects=0:3", "--tee=1:3", "speaker.py"]
    options = {"cwd": tmp_path, "env": ENVIRONMENT, "timeout": 1500, "text": True}
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, **options)
    assert ended.stdout == "[default1]:out of rank 1\n"
    files = [tmp_path.glob(f"*/attempt_0/{rank}/stdout.log") for rank in (0, 1)]
    assert [next(file).read_text() for file in files] == ["out of rank 0\n", "out of rank 1\n"]


@pytest.mark.claim("C7")
def test_the_articles_master_is_one_per_machine_only_with_8_processes_each():
    for machines, local, article in (
        ((2, 2), [0, 2], [0]),
        ((8, 8), [0, 8], [0, 8]),
        ((1, 3), [0, 1], [0]),
        ((8, 4, 8), [0, 8, 12], [0, 8, 16]),
    ):
        local_ranks = [number for size in machines for number in range(size)]
        assert [rank for rank, number in enumerate(local_ranks) if number == 0] == local
        assert [rank for rank, _ in enumerate(local_ranks) if rank % 8 == 0] == article
        assert (local == article) == all(size == 8 for size in machines[:-1])
