"""Lesson 11: bytes that are counted, a clock that is examined, a cost model that is tested.

No test here asserts a time. Times that a test looks at are made up.
"""

import json
import os
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

import idle_runs
import lesson_11_how_fast as lesson
import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from conftest import run_lesson, run_warm
from lockstep import lessons, proofs
from lockstep.watch import claims, clock
from torch.utils._python_dispatch import TorchDispatchMode

LESSON = lessons.find("11")
SOURCE = LESSON.script.read_text()
proof = proofs.of_lesson(LESSON)
SMALL, LARGE = lesson.SHAPES
GRADIENT = {SMALL: 8 * 100 * (16 * 16 + 16), LARGE: 8 * 4 * (512 * 512 + 512)}

WARM = "            work()  # not counted: memory, connections, the fastest kernel\n"
READY = "            dist.barrier()\n"
CLOCK = "            wall, processor = time.perf_counter(), time.process_time()\n"
TURNS = "    for {}:\n        for {}:\n"
ROUND, WORK = "_ in range(rounds)", "name, work in works.items()"
DDP = "DistributedDataParallel(inner[1])"
FITTED = "fitted = [t for t in times if t[0] in fewer and t[1] in SIZES[::2]]"
GAIN = 'medians["one process"] / seconds'
THREADS = "    torch.set_num_threads(threads)\n"
SUM = "partial(dist.all_reduce, torch.zeros(size // 4, device=device), group=group)"

PLAYED = {  # what no run shows
    "warm only once": (WARM, WARM.replace("work()", "not mine[name] and work()")),
    "nobody waits for the others": (READY + CLOCK, CLOCK),
    "the next turn begins early": ("dist.barrier()  # nobody", "pass  # nobody"),
    "waiting for others is counted": (READY + CLOCK, CLOCK + READY),
    "the GPU is not waited for": ("wait_for_gpu()\n            mine", "mine"),
    "the clock for the processor": ("time.process_time() - pro", "time.perf_counter() - pro"),
    "rank 0's clock for all": ("max(seconds for seconds, _ in ranks)", "ranks[0][0]"),
    "not in turns": (TURNS.format(ROUND, WORK), TURNS.format(WORK, ROUND)),
    "each rank keeps its own times": ("theirs[name] for theirs", "mine[name] for theirs"),
    "too low is not wrong": ("[max(ratio, 1 / ratio) for ratio in ratios]", "ratios"),
    "no number of ranks is unseen": ("if n < most} or {most}", "} | {most}"),
    "fitted to what it is tested on": (FITTED, "fitted = times[:-1]"),
    "tested on all": ("[t for t in times if t not in fitted]", "times"),
    "a price below 0": ("if (link >= 0).all():", "if True:"),
    "absolute errors": ("weights = 1 / seconds", "weights = seconds / seconds"),
    "the best error is the worst": ("max(wrong)]", "min(wrong)]"),
    "all overlaps in both": ("alone / (share + sending)", "alone / max(share, sending)"),
    "parameters are not copied": ("their.data.copy_(our.data)", "pass"),
    "gradients are not added": ("our.grad += their.grad", "pass"),
    "each replica has a mean of its own": ("weight=1 / targets", "weight=n / targets"),
}
BREAKS = PLAYED | {
    "all bytes to each": ("2 * (n - 1) / n * size", "2 * (n - 1) * size"),
    "n - 1 messages": ("return 2 * (n - 1), 2", "return n - 1, 2"),
    "sending without waiting": (SUM, SUM.replace("group=group", "group=group, async_op=True")),
    "half is sent": ("torch.zeros(size // 4, device", "torch.zeros(size // 8, device"),
    "all send for each number of ranks": ("work if rank < n else lambda: None", "work", (3,)),
    "the fastest is the median": ("name: statistics.median(", "name: min("),
    "the first round counts": ("turns[1:] for", "turns for"),
    "sending is timed as seldom": ("time_sums(4 * args.steps", "time_sums(args.steps"),
    "the speed-up is upside down": (GAIN, "seconds / medians['one process']"),
    "the wrapper is the bare model": ("backward, wrapped, *", "backward, inner[0], *"),
    "more threads are one": ("n * threads)", "threads)"),
    "all compute the same rows": ("tensor_split(n)[rank]", "tensor_split(n)[0]", (3,)),
    "gradients are not sent": (DDP, DDP + "\n    ddp.require_backward_grad_sync = False"),
    "the limit is half the work": ("silent, *share", "silent, *(part[::2] for part in share)"),
    "the limit sends": ("backward, silent", "backward, ddp"),
    "the wrapper sends": ("process_group=alone", "process_group=None"),
    "DDP's mean is taken for the sum": ("n * mean", "mean"),
    "DDP looks for unused parameters": (DDP, DDP.replace("1]", "1], find_unused_parameters=True")),
    "DDP copies nothing": (DDP, DDP.replace("1]", "1], gradient_as_bucket_view=True")),
    "one big bucket": (DDP, DDP.replace("1]", "1], bucket_cap_mb=25")),
    "each rank has its own seed": ("args.seed, device)", "args.seed + rank, device)"),
    "every rank tells": ("print if rank == 0 else lambda line: None", "print"),
    "the threads of before": (THREADS, ""),
}
FLAGS = ("--steps", 2, "--batch-size", 16)


@pytest.mark.claim("A3", "A6", "E6")
@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    """On 3 ranks 16 rows are shared as 6, 5 and 5."""
    check_breaks(11, BREAKS, nproc, *FLAGS)


# --- The whole script ---


@pytest.mark.claim("A3", "E6", "D3")
def test_default_run_counts_the_bytes_of_the_formulas(default_run):
    """DDP has no room for parameters; each of its ranks has all of them, as its gradient shows."""
    facts = default_run(11).json
    assert (facts["world_size"], facts["backend"], facts["device"]) == (2, "gloo", "cpu")
    assert len(facts["turns"]) == 2 * len(lesson.SHAPES) * len(proof.WAYS)
    for turn in facts["turns"]:
        size, is_ddp = GRADIENT[turn["shape"]], turn["variant"] == "DDP"
        if sys.platform == "linux":
            assert 0 <= turn["written"] - size * is_ddp <= 3 * 48 * 12 * is_ddp
    for row in facts["rows"]:
        assert sum(row["buckets"]) == GRADIENT[row["shape"]]
    points = facts["all_reduce"]
    assert all(fast < slow if share else fast == slow for _, _, fast, slow, share, _ in points)
    slow = [[2, size, slow] for _, size, _, slow, *_ in points]
    link, _ = lesson.fit_and_test(slow)
    assert len(points) == len(lesson.SIZES) and facts["slow_link"] == pytest.approx(link)


@pytest.mark.parametrize("nproc, rows", ((1, 5), (3, 2)))
def test_one_rank_and_a_rank_without_rows_pass(nproc, rows):
    flags = ["--steps", "1", "--batch-size", str(rows)]
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags, 1).values()
    assert passed and (" and test are right" in claim) == (nproc > 1), claim
    assert "1 round(s) are too few" in claim


@pytest.mark.gpu
@pytest.mark.claim("A3", "E6")
def test_on_gpus_the_ways_agree():
    nproc = min(4, torch.cuda.device_count())
    facts = run_lesson(11, "--nproc", nproc, "--steps", 1, "--json").json
    assert (facts["backend"], facts["device"], facts["passed"]) == ("nccl", "cuda", True)


class Moved(TorchDispatchMode):
    """Adds up the bytes that are copied, and that are added to others."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.bytes[function] += args[0].nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.claim("A6")
def test_the_master_moves_its_parameters_and_as_many_gradients_for_each_replica():
    model, *batch = lesson.make_problem(SMALL, 4, 0, "cpu")
    moved = Moved()
    with claims.one_thread():
        work = lesson.data_parallel(model, *batch, 3)
        with moved:
            work()
    moves = torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor
    assert [moved.bytes[kind] for kind in moves] == [2 * GRADIENT[SMALL]] * 2


# --- What follows from times ---

IDLE = [((0.1, 0.1), (0.1, 0.099))] * 5  # silent rounds: (seconds, processor seconds) of each rank


@pytest.mark.parametrize(
    "silent, others, ranks, words",
    [
        (IDLE, 0.05, 2, []),
        (IDLE, 3.0, 2, []),  # on 8 cores
        ([((0.1, 0.05),)] * 5, 0, 8, []),  # each may hope for half a core, of 4
        ([((0.1, 0.1), (0.1, 0.05))] * 5, 0, 2, ["87% of their processor time"]),
        (IDLE, 6.5, 2, ["6.5 cores busy"]),
        (IDLE[:2] + [((0.2, 0.2),)] * 3, 0, 2, ["50% apart"]),
        (IDLE[:4], 0, 2, ["4 round(s) are too few"]),
    ],
)
def test_other_work_is_noticed(monkeypatch, silent, others, ranks, words):
    monkeypatch.setattr(proof.os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(proof.os, "cpu_count", lambda: 8)
    _, signs = proof.signs_of_other_work([IDLE, silent], others, ranks)
    assert len(signs) == len(words) and all(map(str.__contains__, signs, words)), signs
    said = proof.conclude_on_speed({"signs": signs, "rows": [ROW], "errors": [[1, 1], [1.1, 2]]})
    assert said.startswith("no conclusion" if signs else "with few large layers DDP reaches 71%")
    assert bool(signs) or said.endswith("off by 10% where it was not fitted, by 27% for DDP")


MS = (100, 0), (60, 0), (80, 0), (50, 40), (47, 53), (70, 69)  # of each way, on two ranks
TIMES = {
    name: [tuple((k * part / 1e3, k * part / 2e3) for part in ranks) for k in (1, 2, 8)]
    for name, ranks in zip(proof.WAYS, MS, strict=True)
}
ROW = proof.summarize("", TIMES, [8, 8], [1e-3, 0.0], 2)  # two buckets of two messages each


def test_what_follows_from_times_that_are_made_up(monkeypatch):
    assert [*ROW["parts"].values()] == pytest.approx([90, 10, 6, 34])
    gains = [1, 100 / 60, 100 / 80, 2, 100 / 53, 100 / 70]
    assert [*ROW["speedup"].values()] == pytest.approx(gains)
    assert ROW["predicted"] == pytest.approx((200 / 110, 200 / 106))
    stat = "cpu 1 1 1 50 50 1 1 1 0 0"  # the two 50 are of processors that had no work
    monkeypatch.setattr(Path, "read_text", lambda _: stat)
    assert clock.processors()[1] == 6 / os.sysconf("SC_CLK_TCK") or sys.platform != "linux"
    assert proof.cores_of_others([(5, 20, 1), (5, 20, 1)], [(7, 26, 2), (7, 26, 2)]) == 2


@pytest.mark.claim("D3", "A3")
def test_close_to_linear_only_if_computing_takes_much_longer_than_sending():
    """2 to 8 devices can be linear, or useless. The formula says so: nothing is measured here."""
    for n in (2, 4, 8):
        sending = lesson.predict_all_reduce((1e-5, 1e-10), n, 1e8)
        low, high = lesson.predict_speedup(n * 10.0, 10.0, sending)
        assert 0.99 * n < low < high == n
        low, high = lesson.predict_speedup(n * sending / 9, sending / 9, sending)
        assert low == pytest.approx(n / 10) and high == pytest.approx(n / 9)


def test_a_latency_with_two_peaks_has_two_and_their_shares_do_not_move_them():
    """The median of all jumps from one peak to the other; the peaks stay."""
    noise = torch.Generator().manual_seed(0)
    for share in (0.1, 0.55, 0.9):
        made_up = torch.randn(200, generator=noise).mul(0.2).exp()
        made_up[: round(200 * share)] *= 9
        fast, slow, found = proof.peaks((4e-4 * made_up).tolist())
        assert (fast, slow) == pytest.approx((4e-4, 36e-4), rel=0.15)
        assert found == pytest.approx(share, abs=0.01)
    for made_up in (torch.randn(200, generator=noise).mul(0.5).exp(), torch.linspace(1, 5, 48)):
        median = statistics.median(made_up.tolist())
        assert proof.peaks(made_up.tolist()) == (median, median, 0)
    assert proof.peaks([1.0, 9.0]) == (5, 5, 0) and proof.peaks([2.0] * 9) == (2, 2, 0)
    one_late = [1 + k / 100 for k in range(99)] + [1000.0]
    assert proof.peaks(one_late)[2] == 0


# --- What page, claims and the page on cost say ---

STORED = idle_runs.NOTEBOOK.read_text("utf-8")


def say(page, n, last=""):
    """Write a notebook that has printed, in run n, that DDP is so many times as fast."""
    new, count = re.subn(r"(DDP: ≈)[\d.]+( ms, ≈)[\d.]+", rf"\g<1>1,056\g<2>1.4{n}", STORED)
    new = re.sub(r"\d+( measurements of this page)", rf"{n}\1", new)
    assert count == 1
    page.write_text(new.replace("conclusion: DDP reaches", f"conclusion: {last}DDP reaches"))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Let idle_runs write into a copy of the pages; the notebook says nothing yet."""
    for name in {name for name, _ in idle_runs.SENTENCES}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((idle_runs.ROOT / name).read_bytes())
    monkeypatch.setattr(idle_runs, "ROOT", tmp_path)
    monkeypatch.setattr(idle_runs, "NOTEBOOK", tmp_path / "page.ipynb")
    monkeypatch.setattr(idle_runs, "RUNS", tmp_path / "runs.json")
    monkeypatch.setattr(sys, "argv", ["idle_runs.py", "3"])
    monkeypatch.setenv("LOCKSTEP_TRIES", "1")
    (tmp_path / "page.ipynb").write_text("as it was")
    return tmp_path


def test_disturbed_runs_are_made_again_and_all_pages_say_the_same(copied, monkeypatch, capsys):
    runs = iter([(2,), (0, "none; DISTURBED, 16% apart; "), None, (5,), (7,)])

    def execute(page):
        if (what := next(runs)) is None:
            raise TimeoutError
        say(page, *what)

    monkeypatch.setattr("lockstep.execute.execute", execute)
    assert idle_runs.main() == 0
    assert "3 quiet runs, with 14 measurements made again; 2 not quiet" in capsys.readouterr().out
    check_pages(copied)
    claims = (copied / "CLAIMS.md").read_text()
    assert "In 3 runs on two idle cores" in claims and "1.42 to 1.47 for DDP" in claims
    (copied / "CLAIMS.md").write_text(claims.replace("1.42 to 1.47", "1.42 to 1.48"))
    with pytest.raises(AssertionError, match=r"CLAIMS.md does not say .*1.42 to 1.47"):
        check_pages(copied)


@pytest.mark.parametrize("last", ["none; DISTURBED, 16% apart; ", "so\\nconclusion: "])
def test_without_quiet_runs_all_is_as_it_was(copied, monkeypatch, last):
    before = {path: path.read_bytes() for path in copied.rglob("*.*")}
    monkeypatch.setattr("lockstep.execute.execute", lambda page: say(page, 1, last))
    with pytest.raises(SystemExit, match=r"all is as it was: (this machine|12 conclusions)"):
        idle_runs.main()
    assert {path: path.read_bytes() for path in copied.rglob("*.*")} == before


def test_page_claims_and_costs_are_those_of_the_idle_runs():
    """If this is red: bash scripts/setup.sh all; python tests/idle_runs.py on an idle machine."""
    check_pages(idle_runs.ROOT)


def check_pages(root):
    runs = json.loads(idle_runs.RUNS.read_text())["runs"]
    printed = idle_runs.printed_by(idle_runs.NOTEBOOK)
    assert len(runs) >= 3 and idle_runs.why_disturbed(printed) == []
    assert idle_runs.figures_of(printed) == runs[-1], "the page is not of the last run"
    ddp, by_threads = (
        statistics.median(run[k][-1] for run in runs) for k in ("DDP", "DataParallel")
    )
    assert ddp < by_threads, "A3 and the page say that DDP was not faster"
    facts = idle_runs.facts_of(runs)
    for name, sentence in idle_runs.SENTENCES:
        said = sentence.format(**facts)
        assert said in (root / name).read_text("utf-8"), f"{name} does not say {said}"


# --- What is computed ---


@pytest.mark.claim("C10")
def test_the_problem_has_a_gradient_in_every_layer_and_depends_on_the_seed():
    for shape in lesson.SHAPES:
        model, rows, targets = lesson.make_problem(shape, 13, 0, "cpu")
        assert sum(p.nbytes for p in model.parameters()) == GRADIENT[shape]
        with claims.one_thread():
            lesson.backward(model, rows, targets, 1 / targets.numel(), 1)
        assert all(parameter.grad.norm() > 1e-9 for parameter in model.parameters())
        assert not torch.equal(rows, lesson.make_problem(shape, 13, 1, "cpu")[1])
        assert torch.equal(rows, lesson.make_problem(shape, 13, 0, "cpu")[1])


# --- The technique in a project of one's own ---

PROJECT = """
rank, n, device = join_group()
sums = time_sums(3, device)
link, _ = fit_and_test([(*key, statistics.median(seconds)) for *key, seconds in sums])
print([len(seconds) for *_, seconds in sums], predict_all_reduce(link, n, 10**6) > 0)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    imports, _, rest = SOURCE.partition('"""\n\n')[2].partition("# ---")
    file = tmp_path / "project.py"
    file.write_text(imports + "# ---" + rest.partition("# --- The example ---")[0] + PROJECT)
    assert run_warm(file, 2) == [(0, "[3, 3, 3, 3, 3, 3, 3] True\n")] * 2
