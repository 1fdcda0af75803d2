"""Lesson 11: bytes that are counted, a cost model that is tested, ratios of measured times.

No test here asserts a time. Times that a test looks at are made up.
"""

import argparse
import copy
import os
import statistics
import sys
import threading
import time

import cloudpickle
import lesson_11_how_fast as lesson
import nbtools
import pytest
import torch
import torch.distributed as dist
from conftest import run_lesson
from solutions.lesson_11 import CASES, check, solution

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ON_LINUX = sys.platform == "linux"
SMALL, LARGE = lesson.SHAPES
GRADIENT = {SMALL: 8 * 100 * (16 * 16 + 16), LARGE: 8 * 4 * (512 * 512 + 512)}


def config(**changes):
    usual = {"nproc": 2, "steps": 1, "batch_size": 13, "seed": 0, "threads": 1}
    return argparse.Namespace(**{**usual, "link": lesson.LINKS, **changes})


# --- What ranks do here. Ranks of mp.spawn import this file: nothing runs at its top level. ---


def measure(rank, world_size, cfg):
    """Measure on a rank; 13 rows are not divisible, so that parts differ."""
    return lesson.measure(cfg)


def count_all_reduce(rank, world_size, sizes):
    """Return [(bytes, bytes written)] of one all-reduce of each size."""
    counts = []
    for size in sizes:
        tensor = torch.zeros(size // 4)
        dist.all_reduce(tensor)
        dist.barrier()
        before = lesson.bytes_written()
        dist.all_reduce(tensor)
        counts.append((size, lesson.bytes_written() - before))
        dist.barrier()
    return counts


def train_with_ddp(rank, world_size, broadcast_parameters):
    """Return the bytes written by a DDP step, and by one that also sends parameters as DP does."""
    model, rows, targets = lesson.make_problem(LARGE, 8, 0, "cpu")
    group = dist.group.WORLD
    step = lesson.make_variant("DDP", model, rows, targets, world_size, rank, group, {})
    for _ in range(2):
        step()  # the second step begins with DDP's new table of buckets
    dist.barrier()
    before = lesson.bytes_written()
    if broadcast_parameters:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    step()
    return lesson.bytes_written() - before


def where_it_runs(rank, world_size, name):
    """Return {(process, thread)} in which the forward passes of a variant run."""
    dist.barrier()
    places = set()

    class Watched(torch.nn.Linear):
        def forward(self, rows):
            places.add((os.getpid(), threading.get_ident()))
            time.sleep(0.05)  # so that each part keeps its thread for a while
            return super().forward(rows)

    model = Watched(3, 3, dtype=torch.float64)
    rows = torch.ones(4, 3, dtype=torch.float64)
    sent = {"parameters": 0, "gradients": 0}
    place = (4, rank, dist.group.WORLD, sent) if name == "DDP" else (4, 0, None, sent)
    lesson.make_variant(name, model, rows, rows, *place)()
    return places


# --- Fixtures ---


@pytest.fixture(scope="module")
def measured():
    """Return what 1, 2, 3 and 4 ranks measured, and the lines that report it: {nproc: (...)}."""
    results = {}
    for nproc in (1, 2, 3, 4):
        cfg = config(nproc=nproc)
        result = nbtools.run(measure, nproc, cfg)[0]
        results[nproc] = result, lesson.analyse(result, cfg)
    return results


def make_up_turn(shape, n, variant, rank=0, seconds=(0.1,), **changes):
    """Return the facts of one variant that did everything right."""
    size, sent = GRADIENT[shape], 0
    if variant == "DDP":
        sent = 1.005 * lesson.all_reduce_cost(n, size)[1]
    copied = 2 * (n - 1) * size if variant == "DataParallel" else 0
    facts = {"shape": shape, "workers": n, "variant": variant, "rank": rank}
    facts |= {"seconds": list(seconds), "written": sent, "difference": 1e-16}
    return facts | {"parameters": copied, "gradients": copied} | changes


def make_up_result(nproc=4, link=(1e-4, 1e-9), **seconds):
    """Return a result as `measure` returns it, with times that were made up."""
    workers = [n for n in (1, 2, 4) if n <= nproc]
    turns = []
    for shape in lesson.SHAPES:
        for n in workers:
            for name in lesson.VARIANTS:
                times = seconds.get(name.replace(" ", "_"), {}).get(n, [0.1])
                turns.append(make_up_turn(shape, n, name, seconds=times))
            turns += [make_up_turn(shape, n, "DDP", rank, [9.9]) for rank in range(1, n)]
    times = [
        [n, size, lesson.predict_all_reduce(link, n, size)]
        for n in workers[1:]
        for size in lesson.SIZES
    ]
    result = {"backend": "gloo", "device": "cpu", "all_reduce": times, "turns": turns}
    return result | {"processor": 1.0}


# --- The cost model ---


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 256])
def test_a_ring_sends_two_chunks_of_n_minus_1(n):
    messages, sent = lesson.all_reduce_cost(n, 1000)
    assert messages == 2 * (n - 1)
    assert sent == pytest.approx(2 * (n - 1) * 1000 / n)


@pytest.mark.parametrize("link", [(5e-5, 1e-9), (0.0, 2e-9), (1e-3, 0.0), (1e-6, 1e-12)])
def test_fit_finds_a_link_that_is_known(link):
    times = [(n, s, lesson.predict_all_reduce(link, n, s)) for n in (2, 3) for s in lesson.SIZES]
    found = lesson.fit_link(times)
    assert found == pytest.approx(list(link), rel=1e-6, abs=1e-15)
    assert lesson.predict_all_reduce(found, 8, 12345) == pytest.approx(
        lesson.predict_all_reduce(link, 8, 12345)
    )


def test_no_price_is_negative_and_the_fit_is_then_the_best_one():
    falling = [(2, size, 1e-3 - 1e-11 * size) for size in lesson.SIZES]
    assert lesson.fit_link(falling)[1] == 0.0 < lesson.fit_link(falling)[0]
    steep = [(2, size, 1e-9 * size * (1 + size / 1e7)) for size in lesson.SIZES]
    assert lesson.fit_link(steep)[0] == 0.0 < lesson.fit_link(steep)[1]
    for times in (falling, steep):
        best = squared_error(lesson.fit_link(times), times)
        for factor in (0.99, 1.01):
            near = [price * factor for price in lesson.fit_link(times)]
            assert squared_error(near, times) > best


def squared_error(link, times):
    return sum((lesson.predict_all_reduce(link, n, s) / t - 1) ** 2 for n, s, t in times)


def test_errors_are_relative():
    """Small sizes are twice as slow as the link says: the fit must care about them."""
    times = [(2, s, (2 if s < 1e5 else 1) * (2e-5 + 1e-9 * s)) for s in lesson.SIZES]
    link = lesson.fit_link(times)
    for change in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        near = [price * factor for price, factor in zip(link, change, strict=True)]
        assert squared_error(near, times) > squared_error(link, times)
    assert link[0] > 1.2e-5  # absolute errors would leave it near 1e-5


@pytest.mark.claim("D3", "A3")
def test_close_to_linear_only_if_computing_takes_much_longer_than_sending():
    """2 to 8 devices can be linear, or useless. The formula says so: nothing is measured here."""
    for n in (2, 4, 8):
        sending = lesson.predict_all_reduce((1e-5, 1e-10), n, 1e8)
        low, high = lesson.predict_speedup(n * 10.0, 10.0, sending)
        assert 0.99 * n < low < high == n
        low, high = lesson.predict_speedup(n * sending / 9, sending / 9, sending)
        assert low == pytest.approx(n / 10) and high == pytest.approx(n / 9)


@pytest.mark.skipif(not ON_LINUX, reason="needs /proc/self/io")
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_gloo_sends_what_the_formula_says(nproc):
    """The bytes written by each rank, headers included, for sizes as DDP's buckets have."""
    for counts in nbtools.run(count_all_reduce, nproc, [100_000, 1_000_000, 12_000_000]):
        for size, written in counts:
            sent = lesson.all_reduce_cost(nproc, size)[1]
            assert sent <= written < 1.02 * sent


# --- What is sent, and by whom ---


@pytest.mark.claim("A3", "A6", "E6")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_counted_bytes_are_those_of_the_formulas(measured, nproc):
    result, _ = measured[nproc]
    workers = sorted({n for n in (1, 2, 4, nproc) if n <= nproc})
    assert {turn["workers"] for turn in result["turns"]} == set(workers)
    for turn in result["turns"]:
        n, size = turn["workers"], GRADIENT[turn["shape"]]
        master = 2 * (n - 1) * size if turn["variant"] == "DataParallel" else 0  # in two steps
        assert (turn["parameters"], turn["gradients"]) == (master, master)
        sent = 2 * (n - 1) / n * size if turn["variant"] == "DDP" else 0
        if ON_LINUX:
            assert sent <= turn["written"] <= 1.02 * sent
    ddp = [(t["shape"], t["workers"], t["rank"]) for t in result["turns"] if t["variant"] == "DDP"]
    assert sorted(ddp) == sorted(
        (s, n, r) for s in lesson.SHAPES for n in workers for r in range(n)
    )


@pytest.mark.skipif(not ON_LINUX, reason="needs /proc/self/io")
@pytest.mark.claim("E6")
def test_ddp_has_no_room_for_parameters():
    size = GRADIENT[LARGE]
    without = nbtools.run(train_with_ddp, 2, False)
    assert all(size <= written < 1.02 * size for written in without)
    written = nbtools.run(train_with_ddp, 2, True)
    assert written[0] > 1.98 * size  # rank 0 sent them, and the count shows it


@pytest.mark.claim("E6", "A3")
def test_data_parallel_has_threads_and_ddp_has_processes():
    """Threads of one process share its interpreter and its GIL."""
    (places,) = nbtools.run(where_it_runs, 1, "DataParallel")
    assert len({process for process, _ in places}) == 1 and len(places) == 4
    ranks = nbtools.run(where_it_runs, 4, "DDP")
    assert len({process for places in ranks for process, _ in places}) == 4
    assert all(len(places) == 1 for places in ranks)


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_all_variants_have_the_gradient_of_one_process(measured, nproc):
    result, lines = measured[nproc]
    assert result["passed"] is True
    differences = [turn["difference"] for turn in result["turns"]]
    assert max(differences) < 1e-10
    # With several ranks the sum has another order: exact zeros everywhere would be suspicious.
    assert nproc == 1 or max(differences) > 0
    assert len(lines) == 1 + 6 * len({t["workers"] for t in result["turns"]}) + (nproc > 1) + 3


@pytest.mark.claim("C10")
def test_the_problem_has_a_gradient_in_every_layer_and_depends_on_the_seed():
    for shape, (layers, width) in lesson.SHAPES.items():
        model, rows, targets = lesson.make_problem(shape, 13, 0, "cpu")
        assert sum(p.nbytes for p in model.parameters()) == GRADIENT[shape]
        assert len(model) == 2 * layers and rows.shape == targets.shape == (13, width)
        lesson.backward(model, rows, targets, 1 / targets.numel())
        assert all(parameter.grad.norm() > 1e-9 for parameter in model.parameters())
        reference = torch.nn.functional.mse_loss(model(rows), targets)
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        reference.backward()
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-15)
        assert not torch.equal(rows, lesson.make_problem(shape, 13, 1, "cpu")[1])
        assert torch.equal(rows, lesson.make_problem(shape, 13, 0, "cpu")[1])


@pytest.mark.claim("A6")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_parameters_are_sent_in_every_step(n):
    """The master changes between steps; the replicas must compute with its new parameters."""
    model, rows, targets = lesson.make_problem(LARGE, 13, 0, "cpu")
    sent = {"parameters": 0, "gradients": 0}
    compute = lesson.make_variant("DataParallel", model, rows, targets, n, 0, None, sent)
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        whole = copy.deepcopy(model)
        lesson.backward(whole, rows, targets, 1 / targets.numel())
        compute()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-15)
        assert sent["parameters"] == sent["gradients"] == step * (n - 1) * GRADIENT[LARGE]


def measure_few_rows(rank, world_size):
    """Return whether 3 ranks are right with a batch of 2 rows: a rank has no row at all."""
    result = lesson.measure(config(nproc=3, batch_size=2))
    lesson.analyse(result, config(nproc=3))
    return result["passed"]


def test_a_worker_without_a_row_is_no_error():
    assert nbtools.run(measure_few_rows, 3) == [True] * 3


def parameters_of(rank, world_size):
    """Return the bytes of parameters that a rank holds for DDP, and of their gradients."""
    model, rows, targets = lesson.make_problem(LARGE, 8, 0, "cpu")
    place = (world_size, rank, dist.group.WORLD, {})
    lesson.make_variant("DDP", model, rows, targets, *place)()
    pairs = [(parameter.nbytes, parameter.grad.nbytes) for parameter in model.parameters()]
    return [sum(column) for column in zip(*pairs, strict=True)]


@pytest.mark.claim("D3")
def test_every_worker_holds_all_parameters():
    assert nbtools.run(parameters_of, 3) == [[GRADIENT[LARGE]] * 2] * 3


# --- How it is compared ---


def test_one_process_has_as_many_threads_as_all_workers(monkeypatch):
    """Each variant sets its number of compute threads just before it is timed."""
    seen, order = [], []

    def time_calls(call, count):
        seen.append(torch.get_num_threads())
        return order.append(call) or 0.1

    monkeypatch.setattr(lesson, "time_calls", time_calls)
    before = torch.get_num_threads()
    try:
        lesson.measure(config(nproc=1, steps=2, threads=2))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)
    assert seen == [2] * 2 * len(lesson.SHAPES) * len(lesson.VARIANTS)
    turns = len(seen) // 2
    assert order[:turns] == order[turns:], "each variant has its turn in each repeat"


def record_turns(rank, world_size, cfg):
    """Return what this rank timed, in order: [(workers, variant, threads, start, end)].

    `threads` holds what each thread that computed a gradient says about its compute threads.
    """
    made, seen, asked = {}, [], []
    make_variant, backward = lesson.make_variant, lesson.backward

    def ask(*arguments):
        asked.append(torch.get_num_threads())  # it is another number in each Python thread
        return backward(*arguments)

    def remember(name, model, rows, targets, n, *place):
        compute = make_variant(name, model, rows, targets, n, *place)
        made[id(compute)] = compute, n, name
        return compute

    def time_calls(call, count):
        if id(call) in made:
            asked.clear()
            start = time.monotonic()
            for _ in range(2):
                call()
            end = time.monotonic()
            seen.append((*made[id(call)][1:], list(asked), start, end))
        return 0.1

    lesson.make_variant, lesson.time_calls, lesson.backward = remember, time_calls, ask
    lesson.measure(cfg)
    return seen


@pytest.fixture(scope="module")
def turns():
    """Return the turns of each of 3 ranks."""
    return nbtools.run(record_turns, 3, config(nproc=3, threads=2), deadline=280)


def test_threads_of_each_variant(turns):
    """n x k compute threads for one process, k for each worker of the others."""
    assert len(turns[0]) == len(lesson.SHAPES) * 3 * len(lesson.VARIANTS)
    for n, name, threads, _, _ in turns[0] + turns[1] + turns[2]:
        counts = 2 * (n if name == "DataParallel" else 1)  # two steps
        assert threads == [2 * n if name == "one process" else 2] * counts, (n, name)


def test_threads_of_the_pool_do_not_depend_on_when_they_begin(monkeypatch):
    """They take over the number of compute threads when the variant is made, not at first use."""
    asked, backward = [], lesson.backward
    monkeypatch.setattr(
        lesson, "backward", lambda *a: asked.append(torch.get_num_threads()) or backward(*a)
    )
    model, rows, targets = lesson.make_problem(SMALL, 4, 0, "cpu")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        sent = {"parameters": 0, "gradients": 0}
        compute = lesson.make_variant("DataParallel", model, rows, targets, 3, 0, None, sent)
        torch.set_num_threads(5)
        compute()
    finally:
        torch.set_num_threads(before)
    assert asked == [2, 2, 2]


@pytest.mark.skipif(not ON_LINUX, reason="needs one clock for all processes")
def test_no_rank_computes_while_rank_0_works_alone(turns):
    for ours in turns[1:]:
        places = [i for i, turn in enumerate(turns[0]) if turn[1] == "DDP" and turn[0] > 1]
        places = places if ours is turns[1] else [i for i in places if turns[0][i][0] == 3]
        assert len(ours) == len(places)
        for turn, place in zip(ours, places, strict=True):
            assert turn[:2] == turns[0][place][:2]
            assert turns[0][place - 1][4] <= turn[3], "it began before rank 0 had finished"
            assert turn[4] <= turns[0][place + 1][3], "rank 0 began before it had finished"


def test_time_of_calls_leaves_out_the_first(monkeypatch):
    calls = []  # the first call takes 100 seconds, each other one 2
    monkeypatch.setattr(lesson.time, "perf_counter", lambda: sum(calls))
    assert lesson.time_calls(lambda: calls.append(2.0 if calls else 100.0), 3) == 2.0
    assert calls == [100.0, 2.0, 2.0, 2.0]


def have_cores(monkeypatch, count):
    """Let this process be allowed on `count` of the 1000 cores of its machine."""
    monkeypatch.setattr(lesson.os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(lesson.os, "sched_getaffinity", lambda _: range(count), raising=False)


@pytest.mark.claim("A3")
def test_speedups_are_ratios_of_the_medians_of_what_was_measured(monkeypatch):
    have_cores(monkeypatch, 4)
    one, threads = {1: [0.4, 0.1, 0.2], 4: [0.1]}, {2: [0.2, 0.5, 0.1], 4: [0.8]}
    processes, share = {2: [0.3, 0.1, 0.1], 4: [0.05]}, {2: [0.09], 4: [0.04, 0.04, 9.0]}
    seconds = {"one_process": one, "DataParallel": threads, "DDP": processes, "share_alone": share}
    result = make_up_result(**seconds)
    lines = lesson.analyse(result, config(nproc=4))
    rows = {(row["shape"], row["workers"]): row for row in result["rows"]}
    for shape in lesson.SHAPES:
        assert rows[shape, 1]["speedup"]["one process"] == 1.0
        assert rows[shape, 2]["speedup"] == pytest.approx(
            {"one process": 2.0, "DataParallel": 1.0, "DDP": 2.0}
        )
        assert rows[shape, 4]["speedup"]["DataParallel"] == pytest.approx(0.25)
        sending = lesson.predict_all_reduce((1e-4, 1e-9), 4, GRADIENT[shape])
        expected = 0.2 / (0.04 + sending), 0.2 / max(0.04, sending)
        assert rows[shape, 4]["predicted"] == pytest.approx(expected)
        assert rows[shape, 4]["bytes"] == GRADIENT[shape]
    assert f"{SMALL}, 2 x DataParallel: 200 ms (100 to 500), speed-up 1" in lines


def test_workers_that_share_cores_are_predicted_to_be_slower(monkeypatch):
    share = {"share_alone": {1: [0.1], 2: [0.05], 4: [0.025]}}
    for cores, factor in ((8, 1), (4, 1), (2, 2), (1, 4)):
        have_cores(monkeypatch, cores)
        result = make_up_result(link=(0.0, 1e-15), **share)
        lesson.analyse(result, config(nproc=4))
        assert result["rows"][2]["predicted"][0] == pytest.approx(4 / factor, rel=1e-3)


def test_the_fit_is_judged_on_what_it_has_not_seen():
    """Change one number at a time: what is fitted changes the link, what is a test does not."""
    known = [[n, s] for n in (2,) for s in lesson.SIZES[::2]]
    for place in range(2 * len(lesson.SIZES)):
        result = make_up_result()
        n, size, seconds = result["all_reduce"][place]
        result["all_reduce"][place][2] = 3 * seconds
        lesson.analyse(result, config(nproc=4))
        unchanged = result["link"] == pytest.approx([1e-4, 1e-9], rel=1e-9)
        assert unchanged == ([n, size] not in known), (n, size)


@pytest.mark.parametrize("factor", [4, 1 / 4])
def test_errors_where_fitted_and_elsewhere_are_both_shown(factor):
    """Ten times too low is as wrong as ten times too high."""
    result = make_up_result()
    for time_ in result["all_reduce"]:
        if time_[0] == 4 or time_[1] not in lesson.SIZES[::2]:
            time_[2] *= factor
    result["all_reduce"][-1][2] *= factor
    lines = lesson.analyse(result, config(nproc=4))
    assert [number for pair in result["errors"] for number in pair] == pytest.approx([1, 1, 4, 16])
    (line,) = [line for line in lines if line.startswith("all-reduce: ")]
    words = "wrong by a factor of 1 (median), 1 (worst) where fitted; 4, 16 elsewhere"
    assert line == f"all-reduce: 100 us per message, 1 s per GB; {words}"
    pair = make_up_result(nproc=2)  # two ranks only: the other sizes are the test
    pair["all_reduce"] = [
        [n, s, t * (1 if s in lesson.SIZES[::2] else 2)] for n, s, t in pair["all_reduce"]
    ]
    lesson.analyse(pair, config(nproc=2))
    assert [number for two in pair["errors"] for number in two] == pytest.approx([1, 1, 2, 2])


def test_one_worker_alone_has_no_prediction():
    result = make_up_result(nproc=1)
    lines = lesson.analyse(result, config(nproc=1, link=[]))
    assert [row["predicted"] for row in result["rows"]] == [None, None]
    assert result["errors"] == [] and "predicted" not in " ".join(lines)


@pytest.mark.claim("D3")
def test_links_are_predicted_from_the_time_of_one_worker():
    result = make_up_result(one_process={1: [0.01]})
    lines = lesson.analyse(result, config(link=[[10, 16, 8], [1000, 1, 100]]))
    for line, (us, gb, n) in zip(lines[-2:], [(10, 16, 8), (1000, 1, 100)], strict=True):
        sending = 2 * (n - 1) * us * 1e-6 + 2 * (n - 1) / n * GRADIENT[LARGE] / (gb * 1e9)
        low, high = n * 0.01 / (0.01 + sending), n * 0.01 / max(0.01, sending)
        place = f"{LARGE}, {n} devices, {us} us, {gb} GB/s"
        assert line == f"{place}: predicted {low:.3g} to {high:.3g}"


# --- The verdict ---

WRONG = {
    "a wrong gradient": {"difference": 1e-9},
    "no gradient": {"difference": float("nan")},
    "too few bytes": {"written": 1000},
    "too many bytes": {"written": 1.03 * 1.5 * GRADIENT[SMALL]},
    "parameters not sent": {"parameters": 0},
    "gradients not sent": {"gradients": 0},
}


@pytest.mark.parametrize("what", WRONG)
def test_main_fails_when_a_part_of_the_claim_is_false(monkeypatch, capsys, what):
    def verdict(result):
        monkeypatch.setattr(lesson, "launch_job", lambda *_: result)
        code = lesson.main(["--nproc", "4"])
        last = capsys.readouterr().out.splitlines()[-1]
        assert "bytes on the sockets: the formula's, plus at most 2 %; cost model: wrong by" in last
        return code, last.split()[0]

    assert verdict(make_up_result()) == (0, "PASS")
    result = make_up_result()
    variant = "DataParallel" if "sent" in what else "DDP"
    (turn,) = [
        t
        for t in result["turns"]
        if (t["shape"], t["workers"], t["variant"], t["rank"]) == (SMALL, 4, variant, 0)
    ]
    turn.update(WRONG[what])
    assert verdict(result) == (1, "FAIL")


def last_line(monkeypatch, capsys, result):
    monkeypatch.setattr(lesson, "launch_job", lambda *_: result)
    assert lesson.main(["--nproc", "4"]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_verdict_says_how_far_the_model_was_off(monkeypatch, capsys):
    """Between the two estimates it is a factor of 1; else the factor to the nearer of them."""
    have_cores(monkeypatch, 4)
    link, alone = (0.0, 4e-9), {1: [0.1], 2: [0.04]}
    added = 0.04 + lesson.predict_all_reduce(link, 2, GRADIENT[LARGE])
    for ddp, off in ((added - 0.01, 1), (2 * added, 2), (0.01, 4)):
        result = make_up_result(nproc=2, link=link, share_alone=alone, DDP={2: [ddp]})
        for time_ in result["all_reduce"]:
            time_[2] /= 8 if time_[1] in lesson.SIZES[1::2] else 1  # where it is not fitted
        line = last_line(monkeypatch, capsys, result)
        assert result["rows"][-1]["off"] == pytest.approx(off)
        worst = max(row["off"] for row in result["rows"] if row["off"])
        words = f"up to 8 (all-reduce), {worst:.2g} (speed-up of DDP)"
        assert line.endswith(f"; cost model: wrong by a factor of {words}")
    result["all_reduce"][0][2] *= 1000  # where it is fitted
    line = last_line(monkeypatch, capsys, result)
    (_, fitted), (_, elsewhere) = result["errors"]
    assert fitted > elsewhere and f"up to {fitted:.2g} (all-reduce)" in line


@pytest.mark.parametrize(("processor", "said"), [(1.0, False), (0.91, False), (0.52, True)])
def test_verdict_says_that_the_times_are_disturbed(monkeypatch, capsys, processor, said):
    line = last_line(monkeypatch, capsys, make_up_result() | {"processor": processor})
    words = "; times DISTURBED: the ranks got 52% of the processor time of an idle machine"
    assert line.endswith(words) == said and ("DISTURBED" in line) == said


def test_a_rank_that_has_to_wait_for_the_processor_gets_less_of_its_time(monkeypatch):
    """The GIL is what it waits for here: another thread wants it all the time."""
    done = threading.Event()

    def disturb():
        while not done.is_set():
            pass

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert lesson.processor_share(0.5) < lesson.UNDISTURBED
    finally:
        done.set()
        thread.join()


def probes(rank, world_size, cores):
    """Return how many times this rank has asked for its share, and what the job made of it."""
    asked = []
    lesson.count_cores = lambda: cores
    lesson.processor_share = lambda: asked.append(rank) or (0.5, 0.9, 0.1)[rank]
    return len(asked), lesson.measure(config(nproc=3))["processor"], len(asked)


@pytest.mark.parametrize(("cores", "mean"), [(2, 0.7), (8, 0.5)])
def test_one_rank_for_each_core_is_asked_for_its_share(cores, mean):
    """With 3 ranks on 2 cores, the third would only take the time of the others."""
    found = nbtools.run(probes, 3, cores)
    turns = len(lesson.SHAPES) * 3 * len(lesson.VARIANTS)
    turns += 2 * len(lesson.SIZES)  # each all-reduce of 2 and of 3 ranks
    assert [after for _, _, after in found] == [turns] * 2 + [turns * (cores > 2)]
    assert [got for _, got, _ in found] == pytest.approx([mean] * 3)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_headers_of_many_ranks_are_allowed(n):
    """They are 288 bytes for each message: 2 (n - 1) of them, measured with 2 to 8 ranks."""
    sent = lesson.all_reduce_cost(n, GRADIENT[SMALL])[1]
    for factor, right in ((1, True), (8, False)):
        turn = make_up_turn(SMALL, n, "DDP", written=sent + factor * 2 * (n - 1) * 288)
        assert lesson.is_right(turn, GRADIENT[SMALL], True) == right


def test_what_one_worker_writes_is_an_error():
    for name in ("one process", "share alone", "DataParallel"):
        turn = make_up_turn(SMALL, 2, name, written=1)
        assert not lesson.is_right(turn, GRADIENT[SMALL], True)


def test_a_system_that_does_not_count_can_pass(monkeypatch, capsys):
    result = make_up_result()
    for turn in result["turns"]:
        turn["written"] = None
    monkeypatch.setattr(lesson, "launch_job", lambda *_: result)
    assert lesson.main(["--nproc", "4"]) == 0
    assert "; no bytes on sockets were counted; cost model: " in capsys.readouterr().out
    monkeypatch.setattr(lesson.Path, "exists", lambda path: False)
    assert lesson.bytes_written() is None


# --- The script, as a reader uses it ---


@pytest.mark.claim("A3", "E6")
def test_script_passes_from_another_folder(lesson_run):
    run = lesson_run(11, "--nproc", 2, "--steps", 1)  # as its notebook does
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1 + 2 * 2 * 3 + 1 + 3 + 1 + 1  # the JSON, too
    facts = run.json
    assert facts["lesson"] == 11 and facts["world_size"] == 2 and facts["passed"] is True
    assert (facts["backend"], facts["device"]) == ("gloo", "cpu")
    assert len(facts["rows"]) == 4 and len(facts["all_reduce"]) == len(lesson.SIZES)
    for row in facts["rows"]:
        first = next(r for r in facts["rows"] if r["shape"] == row["shape"])
        alone = statistics.median(first["ms"]["one process"])
        for name, speedup in row["speedup"].items():
            assert speedup == pytest.approx(alone / statistics.median(row["ms"][name]))


BAD = [
    (["--batch-size", "0"], "--batch-size"),
    (["--link", "1", "2"], "--link"),
    (["--link", "1", "two", "3"], "--link"),
    (["--link", "1", "0", "3"], "--link"),
    (["--link", "-1", "1", "3"], "--link"),
    (["--link", "1", "nan", "3"], "--link"),
    (["--link", "1", "1", "1"], "--link"),
    (["--report", "our class.html"], "notebook 11 and --json have its numbers"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_value_costs_one_line(monkeypatch, capsys, flags, named):
    monkeypatch.setattr(lesson, "launch_job", None)  # calling it would be a TypeError
    with pytest.raises(SystemExit) as exit_:
        lesson.main(flags)
    stdout, stderr = capsys.readouterr()
    assert exit_.value.code == 2 and stdout == ""
    lines = [line for line in stderr.splitlines() if line]
    assert len(lines) == 1 and named in lines[0]


def test_help_says_how_to_give_a_link(capsys):
    with pytest.raises(SystemExit):
        lesson.main(["--help"])
    text = capsys.readouterr().out
    assert "--link LATENCY_US GB_PER_S DEVICES" in text[text.index("options:") :]


def test_a_link_is_added_to_the_known_ones(monkeypatch):
    seen = []
    monkeypatch.setattr(
        lesson, "launch_job", lambda cfg, func: seen.append(cfg) or make_up_result()
    )
    assert lesson.main(["--link", "5", "100", "16", "--link", "1", "2", "3"]) == 0
    assert lesson.main([]) == 0
    assert [cfg.link for cfg in seen] == [[*lesson.LINKS, [5, 100, 16], [1, 2, 3]], lesson.LINKS]
    assert seen[1].threads == max(1, torch.get_num_threads() // 4)


@pytest.mark.gpu
@pytest.mark.claim("A3", "E6")
def test_on_gpus_the_variants_agree():
    nproc = min(4, torch.cuda.device_count())
    facts = run_lesson(11, "--nproc", nproc, "--steps", 1, "--json").json
    assert (facts["backend"], facts["device"]) == ("nccl", "cuda")
    assert facts["passed"] is True


# --- The exercise ---


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 16])
def test_solution_is_best_by_the_lessons_own_model(most):
    assert check(solution, (most,)) is None
    for _, latency, per_byte, compute, size in CASES:
        link = (latency, per_byte)
        seconds = [
            compute / n + lesson.predict_all_reduce(link, n, size) for n in range(1, most + 1)
        ]
        assert seconds[solution(link, compute, size, most) - 1] == pytest.approx(min(seconds))
