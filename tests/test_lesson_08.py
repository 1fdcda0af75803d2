"""Lesson 08: Paddle with several places in one process, and with one process per place.

Paddle is never imported here: frameworks that share a process can crash. Everything that needs it
runs in a few processes, which start together and print what they measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from unittest import mock

import lesson_08_paddle_parallel_do as lesson
import numpy as np
import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, Finished, start_lesson

DEADLINE = 200  # seconds, for what takes twenty
LESSON_07 = ROOT / "lessons" / "lesson_07_tf_make_parallel.py"
WEIGHTS = ["embedding", "kernel_1", "bias_1", "kernel_2", "bias_2", "softmax_kernel"]
WEIGHTS += ["softmax_bias"]
# What a launcher or a scheduler may have told the shell; the addresses are nobody's.
ANOTHER_JOB = ENVIRONMENT | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
ANOTHER_JOB |= {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "8", "PADDLE_NNODES": "4"}
ANOTHER_JOB |= {"PADDLE_TRAINER_ENDPOINTS": "192.0.2.1:1", "PADDLE_MASTER": "192.0.2.1:1"}


# --- What the other processes do. `lesson` is imported there, too. ---

START = """
import argparse, json, os, signal, sys, time
sys.path[:0] = {paths!r}
import numpy as np
import lesson_08_paddle_parallel_do as lesson

def config(**changes):
    values = {{"nproc": 2, "steps": 1, "batch_size": 32, "seed": 0, "data_dir": None}}
    return argparse.Namespace(**(values | {{"dtype": "float64"}} | changes))
"""

MEASURE = """
from concurrent.futures import ThreadPoolExecutor
from solutions.lesson_08 import check, solution

def see_places():
    seen = []
    def watch(weights, rows, numbers):
        seen.append([rows.shape, str(rows.place), numbers.numpy().tolist()])
        weights["w"].set_value(weights["w"].detach() + 1)  # each place has a copy of its own
        return (rows @ weights["w"]) * numbers
    weights = {"w": np.ones(2)}
    rows, numbers = np.arange(20.0).reshape(10, 2), np.arange(10.0)
    merged, gradients = lesson.parallel_do(
        watch, lesson.get_places(3), weights, rows=rows, numbers=numbers
    )
    right = np.allclose(gradients["w"], (rows * numbers[:, None]).sum(0))
    facts = {"seen": seen, "master": weights["w"].tolist(), "merged": merged.tolist()}
    return facts | {"types": [type(merged).__name__], "gradient": right}

def gradients_on(places, **changes):
    return lesson.train(config(**changes), lesson.get_places(places))

def in_threads(one):
    weights, batches = lesson.make_problem(config())
    inputs, targets, mask = next(batches)
    parts = [np.array_split(a, 3) for a in (inputs, targets, mask / mask.sum())]
    def on_place(part):
        rows = dict(zip(("inputs", "targets", "share"), part))
        return lesson.parallel_do(lesson.language_model, lesson.get_places(1), weights, **rows)[1]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(on_place, zip(*parts)))
    found = {f"gradient_{n}": sum(gradients[n] for gradients in found) for n in weights}
    return lesson.difference(found | {"loss": one["loss"]}, one)

def with_gradient(weights, rows, stop=False, **options):
    copies = {n: lesson.paddle.to_tensor(w, stop_gradient=False) for n, w in weights.items()}
    rows = {n: lesson.paddle.to_tensor(a) for n, a in rows.items()}
    cost = lesson.language_model(copies, **rows, **options)
    if stop:
        cost.stop_gradient = True
    cost.sum().backward()
    return [name for name, copy in copies.items() if copy.grad is not None]

def losses_in_a_static_graph(stop):
    paddle = lesson.paddle
    paddle.enable_static()
    program, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, start):
        cost = paddle.static.nn.fc(paddle.static.data("x", [4, 3]), 2) ** 2
        if stop:
            cost.stop_gradient = True
        mean = cost.mean()
        paddle.optimizer.SGD(0.1).minimize(mean)
        executor = paddle.static.Executor()
        executor.run(start)
        feed = {"x": np.ones((4, 3), "float32")}
        return [float(executor.run(program, feed, [mean])[0]) for _ in range(3)]

def measure():
    lesson.import_paddle()
    paddle = lesson.paddle
    facts = {"places": see_places(), "device": paddle.device.get_device()}
    one = gradients_on(1)
    facts["same_places"] = {n: lesson.difference(gradients_on(n), one) for n in (2, 3, 4, 8)}
    facts["batch_of_10"] = lesson.difference(
        gradients_on(4, batch_size=10), gradients_on(1, batch_size=10))
    facts["threads"] = in_threads(one)
    facts["float32"] = str(gradients_on(2, dtype="float32")["gradient_bias_1"].dtype)
    weights, batches = lesson.make_problem(config())
    inputs, targets, mask = next(batches)
    share = mask / mask.sum()
    rows = {"inputs": inputs, "targets": targets}
    right, _ = lesson.parallel_do(
        lesson.language_model, lesson.get_places(1), weights, share=share, **rows)
    padded, _ = lesson.parallel_do(
        lesson.language_model, lesson.get_places(1), weights, share=mask / mask.size, **rows)
    other = [a.copy() for a in (inputs, targets)]
    for array in other:
        array[mask == 0] = 7  # what stands in the padding
    changed, _ = lesson.parallel_do(
        lesson.language_model, lesson.get_places(1), weights, inputs=other[0], targets=other[1],
        share=share)
    facts |= {"loss": right.sum(), "padded": padded.sum(), "padding_changed": changed.sum()}
    facts["real_words"] = mask.sum() / mask.size
    parts = np.array_split(mask, 2)
    halves = [lesson.parallel_do(
        lesson.language_model, lesson.get_places(1), weights, share=part / part.sum(),
        **{n: np.array_split(a, 2)[k] for n, a in rows.items()})[1]
        for k, part in enumerate(parts)]
    by_hand = {f"gradient_{n}": sum(half[n] for half in halves) / 2 for n in weights}
    by_hand["loss"] = one["loss"]
    facts["own_words_by_hand"] = lesson.difference(by_hand, one)
    facts["first_layer_only"] = with_gradient(weights, rows | {"share": share}, layers=(1,))
    facts["stopped"] = with_gradient(weights, rows | {"share": share}, stop=True)
    facts["one"] = {"gpus": paddle.device.cuda.device_count(), "types": sorted({
        str(place) for place in lesson.get_places(3)})}
    try:
        import paddle.fluid
    except ModuleNotFoundError as error:
        facts["fluid"] = str(error)
    facts["gone"] = [name for name in ("ParallelDo", "ParallelExecutor", "get_places")
        for home in (paddle, paddle.static, paddle.static.nn, paddle.distributed)
        if hasattr(home, name)]
    facts["solution"] = [check(solution, n) for n in (1, 3)]  # each tries one rank more, too
    three = lesson.run_workers(config(nproc=3, steps=4))
    alone = lesson.train(config(steps=4), lesson.get_places(2))
    facts["three"] = [lesson.difference(rank, one) for rank in three]
    facts["three_weights"] = max(
        abs(rank[n] - alone[n]).max() for rank in three for n in alone if "weight_" in n)
    facts["three_spread"] = max(
        abs(rank[n] - three[0][n]).max() for rank in three for n in alone if "weight_" in n)
    facts["three_loss"] = max(
        abs(rank["loss"] - alone["loss"]).max() for rank in three)
    facts["three_parts"] = [rank["own_loss"][0] for rank in three]
    own = lesson.run_workers(config(), own_words=True)
    own = [rank | {"loss": one["loss"]} for rank in own]  # compare the gradients only
    facts["own_words"] = [lesson.difference(rank, one) for rank in own]
    facts["own_words_as_by_hand"] = [lesson.difference(rank, by_hand) for rank in own]
    facts["static"] = [losses_in_a_static_graph(stop) for stop in (False, True)]
    print(json.dumps(facts))

if __name__ == "__main__":
    measure()
"""

FAIL = """
model = lesson.language_model

def language_model(*rows):
    step = language_model.calls = getattr(language_model, "calls", 0) + 1
    if step == 2 and os.environ["PADDLE_TRAINER_ID"] == "1":
        raise ValueError("no such word")
    return model(*rows)

lesson.language_model = language_model

if __name__ == "__main__":
    lesson.import_paddle()
    lesson.train = lesson.ask_tensorflow = lambda *args: None
    sys.exit(lesson.main(["--nproc", "2", "--steps", "2", "--batch-size", "8"]))
"""


def start(folder, name, body, *flags):
    """Start a Python process that runs `body`; its folder for temporary files is its own."""
    temporary = folder / f"files of {name}"
    temporary.mkdir()
    script = folder / f"{name}.py"
    paths = [str(ROOT / "lessons"), str(ROOT / "notebooks")]
    script.write_text(START.format(paths=paths) + body)
    return subprocess.Popen(
        [sys.executable, script, *flags],
        cwd=temporary,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start all processes at once: {name: process}; end them afterwards."""
    folder = tmp_path_factory.mktemp("with spaces in it")
    processes = {
        "float64": start_lesson(
            8, "--json", "--nproc", 3, "--steps", 2, "--dtype", "float64", env=ANOTHER_JOB
        ),
        "measure": start(folder, "measure", MEASURE),
        "raise": start(folder, "raise", FAIL),
    }
    yield processes | {"folder": folder}
    for process in processes.values():
        for relative in family(process):
            relative.kill()
        process.communicate()


def family(process):
    """Return the process and all its descendants that are alive."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


RESULTS = {}


def finished(started, name):
    """Wait for one of the processes; return it with its outputs."""
    if name not in RESULTS:
        stdout, stderr = started[name].communicate(timeout=DEADLINE)
        RESULTS[name] = Finished(started[name].args, started[name].returncode, stdout, stderr)
    return RESULTS[name]


@pytest.fixture(scope="module")
def facts(started):
    run = finished(started, "measure")
    assert run.returncode == 0, run.stderr
    return run.json


@pytest.fixture
def default(default_run):
    run = default_run(8)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


# --- The script ---


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_default_run_passes(default):
    facts = default.json
    assert default.stdout.splitlines()[-2].startswith("PASS ")
    assert facts["passed"] is True and facts["lesson"] == 8 and facts["world_size"] == 2
    assert (facts["backend"], facts["device"]) == ("gloo", "cpu")
    assert 0 < facts["max_grad_diff"] < 1e-5
    assert 1900 < facts["perplexity_first"] < 2100  # 2,000 words, none of them known better
    assert facts["perplexity_last"] < facts["perplexity_first"] / 2
    assert facts["tokens_per_second"] > 0 and len(facts["loss"]) == 100
    assert default.stderr == ""


@pytest.mark.needs("paddle", "tensorflow")
@pytest.mark.claim("D13")
def test_paddle_and_tensorflow_agree_in_float32(default):
    facts = default.json
    assert 0 < facts["max_diff_to_tensorflow"] < 1e-5
    one, other = (np.array(facts[name][:50]) for name in ("loss", "loss_tensorflow"))
    assert len(one) == 50 and (abs(one - other) / other).max() < 1e-2  # float32: rounding grows
    assert one[-1] < one[0] - 0.5


@pytest.mark.needs("paddle", "tensorflow")
@pytest.mark.claim("D13")
def test_paddle_and_tensorflow_agree_in_float64_whatever_another_job_has_exported(started):
    run = finished(started, "float64")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.json["passed"] is True and run.json["world_size"] == 3
    assert run.json["max_diff_to_tensorflow"] < 1e-9
    assert run.json["max_grad_diff"] < 1e-12


BAD = [
    (["--batch-size", "1"], "--batch-size"),
    (["--batch-size", "99999"], "--batch-size"),
    (["--dtype", "float16"], "--dtype"),
    (["--data-dir", "no such folder"], "--data-dir"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_value_costs_one_line(monkeypatch, capsys, flags, named):
    monkeypatch.setattr(lesson, "import_paddle", None)  # calling it would be a TypeError
    with pytest.raises(SystemExit) as exit_:
        lesson.main(flags)
    stdout, stderr = capsys.readouterr()
    assert exit_.value.code == 2 and stdout == ""
    assert len(stderr.splitlines()) == 1 and named in stderr


def test_missing_paddle_costs_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(lesson, "import_paddle", None)
    with pytest.raises(SystemExit) as exit_:
        lesson.main([])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert re.search(r"needs paddlepaddle: pip install paddlepaddle==[\d.]+\n$", said)


def test_variables_of_another_job_are_forgotten(monkeypatch):
    for name, value in ANOTHER_JOB.items():
        monkeypatch.setenv(name, value)
    lesson.forget_other_jobs()
    assert not [name for name in os.environ if name.startswith(("PADDLE_", "MASTER_"))]


# --- The verdict of main, with made-up measurements ---


def make_up():
    made = {f"{kind}_{name}": np.ones(2) for kind in ("gradient", "weight") for name in WEIGHTS}
    return made | {"loss": np.linspace(7.6, 5.0, 100)}


def verdict(monkeypatch, capsys, *flags, ours=(), workers=({}, {}), theirs=None):
    """Let main judge: return its exit code, its last plain line's first word, and the JSON."""
    rank = make_up()

    def train(args, places):
        return make_up() | (dict(ours) if args.steps > 1 else {}) | {"words_per_second": 1.0}

    place = argparse.Namespace(is_gpu_place=lambda: False)
    monkeypatch.setattr(lesson, "import_paddle", lambda: None)
    monkeypatch.setattr(lesson, "get_places", lambda count: [place] * count)
    monkeypatch.setattr(lesson, "train", train)
    monkeypatch.setattr(lesson, "run_workers", lambda args: [rank | dict(w) for w in workers])
    monkeypatch.setattr(lesson, "ask_tensorflow", lambda args: theirs and make_up() | theirs)
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: name)
    code = lesson.main([*flags, "--json"])
    lines = capsys.readouterr().out.splitlines()
    return code, lines[-2].split()[0], json.loads(lines[-1])


def test_claim_that_is_false_fails(monkeypatch, capsys):
    off = {"gradient_bias_2": np.array([1.0, 1.0001])}
    curve, flat = np.linspace(7.6, 5.0, 100), np.linspace(7.6, 7.0, 100)
    assert verdict(monkeypatch, capsys)[:2] == (0, "PASS")
    same = {"loss": curve}
    assert verdict(monkeypatch, capsys, theirs=same)[:2] == (0, "PASS")
    for change in (
        {"ours": off},
        {"workers": ({}, off)},
        {"workers": ({}, {"weight_bias_2": np.array([1.0, 1.0001])})},
        {"workers": ({"weight_bias_2": np.array([1.0, np.nan])},) * 2},
        {"ours": {"loss": flat}, "workers": ({"loss": flat},) * 2},
        {"theirs": off},
        {"theirs": {"loss": curve * 1.0001}},
        {"ours": {"gradient_bias_2": np.array([1.0, np.nan])}},
        {"ours": {"loss": curve * np.array([1.0] * 99 + [np.nan])}},
    ):
        code, word, facts = verdict(monkeypatch, capsys, **change)
        assert (code, word, facts["passed"]) == (1, "FAIL", False), change


def test_without_tensorflow_it_says_that_nothing_was_compared(monkeypatch, capsys):
    code, word, facts = verdict(monkeypatch, capsys)
    assert (code, word, facts["max_diff_to_tensorflow"]) == (0, "PASS", None)
    assert facts["loss_tensorflow"] is None
    args = argparse.Namespace()
    monkeypatch.undo()
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: None)
    assert lesson.ask_tensorflow(args) is None
    monkeypatch.undo()
    monkeypatch.setattr(lesson, "__file__", str(ROOT / "tests" / "alone.py"))
    assert lesson.ask_tensorflow(args) is None


def test_lesson_07_that_fails_is_named(monkeypatch, tmp_path):
    script = tmp_path / "lesson_07_tf_make_parallel.py"
    said = r"first\n{sys.argv[0].rpartition('/')[2]}: error: no such device"
    script.write_text(f'import sys; print(sys.argv[1:]); sys.exit(f"{said}")')
    monkeypatch.setattr(lesson, "__file__", str(tmp_path / "lesson_08.py"))
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: name)
    args = argparse.Namespace(nproc=2, json=True, data_dir=None)
    with pytest.raises(SystemExit, match=r"^lesson 07 failed: no such device$"):
        lesson.ask_tensorflow(args)


def test_lesson_07_that_fails_does_so_before_our_own_work(monkeypatch):
    monkeypatch.setattr(lesson, "import_paddle", lambda: None)
    monkeypatch.setattr(lesson, "get_places", lambda count: [mock.Mock()] * count)
    monkeypatch.setattr(lesson, "train", None)  # calling it would be a TypeError
    monkeypatch.setattr(lesson, "ask_tensorflow", lambda args: sys.exit("lesson 07 failed"))
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit, match="lesson 07 failed"):
        lesson.main([])


def test_lesson_07_is_given_the_same_flags(monkeypatch, tmp_path):
    script = tmp_path / "lesson_07_tf_make_parallel.py"
    script.write_text(
        "import sys, numpy; save = [a[7:] for a in sys.argv if a.startswith('--save=')][0]\n"
        "numpy.savez(save, flags=[a for a in sys.argv[1:] if not a.startswith('--save=')])"
    )
    monkeypatch.setattr(lesson, "__file__", str(tmp_path / "lesson_08.py"))
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: name)
    values = {"nproc": 3, "steps": 4, "batch_size": 5, "seed": 6, "dtype": "float64"}
    args = argparse.Namespace(**values, data_dir="a b", json=True)
    flags = lesson.ask_tensorflow(args)["flags"].tolist()
    expected = ["--nproc=3", "--steps=4", "--batch-size=5", "--seed=6", "--dtype=float64"]
    assert sorted(flags) == sorted([*expected, "--data-dir=a b"])


# --- parallel_do ---


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_inputs_are_split_and_outputs_merged_in_order(facts):
    places = facts["places"]
    assert [shape for shape, _, _ in places["seen"]] == [[4, 2], [3, 2], [3, 2]]
    assert [number for _, _, numbers in places["seen"] for number in numbers] == list(range(10))
    assert {place for _, place, _ in places["seen"]} == {"Place(cpu)"}
    rows = np.arange(20).reshape(10, 2)
    assert places["merged"] == (rows.sum(1) * 2 * np.arange(10)).tolist()


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_each_place_has_a_copy_of_the_weights(facts):
    """The body added 1 to its copy before it used it: no place saw that of another."""
    assert facts["places"]["master"] == [1.0, 1.0] and facts["places"]["gradient"] is True


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_gradients_of_any_number_of_places_are_those_of_one(facts):
    assert sorted(facts["same_places"]) == ["2", "3", "4", "8"]
    assert 0 < max(facts["same_places"].values()) < 1e-12
    assert facts["batch_of_10"] < 1e-12  # 3, 3, 2, 2 rows
    assert facts["threads"] < 1e-12 and facts["float32"] == "float32"


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_fluid_and_its_parallel_do_are_gone(facts):
    assert facts["fluid"] == "No module named 'paddle.fluid'" and facts["gone"] == []


@pytest.mark.needs("paddle")
def test_padding_has_no_influence(facts):
    assert facts["loss"] == facts["padding_changed"]


@pytest.mark.needs("paddle")
@pytest.mark.claim("D13")
def test_padded_length_gives_another_loss(facts):
    assert facts["real_words"] < 0.9
    assert facts["padded"] == pytest.approx(facts["loss"] * facts["real_words"])


@pytest.mark.needs("paddle")
@pytest.mark.claim("D13")
def test_the_paddle_programs_early_return_and_stopped_gradient_are_no_errors(facts):
    assert facts["first_layer_only"] == [name for name in WEIGHTS if name[-1] != "2"]
    assert facts["stopped"] == []
    trained, stopped = facts["static"]  # Fluid's programs were static graphs
    assert trained[2] < trained[0] and stopped[2] == stopped[0]


def test_pairs_belong_together():
    sentences, _ = lesson.read_sentences()
    numbers = lesson.number_words(sentences)
    inputs, targets, mask = next(lesson.make_batches(sentences, numbers, 32, 0))
    assert (inputs[:, 1:] == targets[:, :-1]).all() and (inputs[:, 0] == 0).all()
    assert (mask.sum(1) >= 5).all() and mask.sum() < mask.size


# --- DataParallel ---


@pytest.mark.needs("paddle")
@pytest.mark.claim("D5")
def test_workers_have_the_gradient_of_one_place(facts):
    """Ranks 1 and 2 start with zeros: DataParallel sends them rank 0's weights."""
    assert len(facts["three"]) == 3 and max(facts["three"]) < 1e-12
    assert facts["three_spread"] == 0.0 and facts["three_weights"] < 1e-12
    assert facts["three_loss"] < 1e-12
    assert len({round(part, 6) for part in facts["three_parts"]}) == 3  # each has its own rows


@pytest.mark.needs("paddle")
def test_mean_over_own_words_is_not_the_mean(facts):
    assert min(facts["own_words"]) > 1e-3
    assert max(facts["own_words_as_by_hand"]) < 1e-12
    assert facts["own_words_by_hand"] == pytest.approx(facts["own_words"][0])


@pytest.mark.needs("paddle")
def test_a_rank_that_fails_ends_the_job(started):
    """That the parent is killed, or another rank, is tested without Paddle."""
    run = finished(started, "raise")
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.splitlines() == ["rank 1 failed: ValueError: no such word"]
    assert list((started["folder"] / "files of raise").glob("tmp*")) == []
    in_its_session = [p for p in psutil.process_iter() if session(p) == started["raise"].pid]
    assert psutil.wait_procs(in_its_session, timeout=60)[1] == []


def session(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize(
    ("codes", "told", "said"),
    [
        ([-6, -9, None], [None] * 3, "rank 1 failed: exit code -9"),
        ([-6, 1], [None, "Traceback\n  x\nKeyError: 3\n"], "rank 1 failed: KeyError: 3"),
        ([None, 0, -6], [None] * 3, "rank 2 failed: exit code -6"),
    ],
)
def test_the_first_failure_is_named_and_not_a_neighbour(monkeypatch, codes, told, said):
    """A made-up job: its exit codes, and what the ranks' error queues hold (None: nothing)."""
    killed = []
    queues = [argparse.Namespace(empty=lambda t=t: t is None, get=lambda t=t: t) for t in told]
    kill = lambda: killed.append(1)  # noqa: E731
    processes = [argparse.Namespace(exitcode=code, kill=kill) for code in codes]
    job = argparse.Namespace(processes=processes, error_queues=queues)
    distributed = argparse.Namespace(spawn=lambda *args, **options: job)
    place = argparse.Namespace(is_gpu_place=lambda: False)
    monkeypatch.setattr(
        lesson, "paddle", argparse.Namespace(distributed=distributed), raising=False
    )
    monkeypatch.setattr(lesson, "get_places", lambda count: [place] * count)
    with pytest.raises(SystemExit) as exit_:
        lesson.run_workers(argparse.Namespace(nproc=len(codes)))
    assert str(exit_.value).startswith(said) and len(killed) == len(codes)


# --- Devices ---


@pytest.mark.needs("paddle")
@pytest.mark.claim("D11")
def test_without_gpus_all_places_are_the_cpu(facts):
    if facts["one"]["gpus"] == 0:
        assert facts["one"]["types"] == ["Place(cpu)"] and facts["device"] == "cpu"


@pytest.mark.gpu
@pytest.mark.needs("paddle")
@pytest.mark.claim("D11")
def test_paddle_sees_only_the_devices_of_the_variable():
    count = "import paddle; print(paddle.device.cuda.device_count())"
    seen = {}
    for devices in ("", "0"):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
        command = [sys.executable, "-W", "ignore", "-c", count]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        seen[devices] = run.stdout.split()[-1]
    if seen["0"] == "0":
        pytest.skip("needs a GPU build of Paddle")
    assert seen == {"": "0", "0": "1"}


# --- The exercise ---


def test_the_exercise_comes_before_the_code_that_answers_it():
    path = ROOT / "notebooks" / "lesson_08_paddle_parallel_do.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    (task,), (answer,) = (
        [place for place, source in enumerate(cells) if sign in source]
        for sign in ("judge(check,", "show(lesson.worker)")
    )
    assert task < answer


@pytest.mark.needs("paddle")
def test_solution_is_right_for_1_to_4_ranks(facts):
    assert facts["solution"] == [None, None]
