"""Lesson 08: Paddle with several places in one process, and with one process per place.

Neither Paddle nor the lesson is imported here: frameworks that share a process can crash.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from breaks import check_breaks
from conftest import ENVIRONMENT, ROOT

pytestmark = pytest.mark.needs("paddle")

COPIES = "{name: paddle.to_tensor(w, stop_gradient=False) for name, w in weights.items()}\n"
ONE = f"copies if number else {COPIES}        [w.clear_grad() for w in copies.values()]\n"
MASTER = "        weights = {name: w - rate * gradients[name] for name"
ALL_ROWS = "replica(*mine); loss = layer(*map(paddle.to_tensor, batch)).sum()"
CLEAR = "optimizer.clear_grad()"
SENT = f"{CLEAR}; [paddle.distributed.stream.broadcast(w, 0) for w in layer.parameters()]"
TWICE = f"[paddle.distributed.all_reduce(w.grad) for w in layer.parameters()]; {CLEAR}"

BREAKS = {
    "parts of other sizes": ("array_split(array, len(places))", "split(array, [1])"),
    "all rows on the first place": ("part[number])", "part[number], place=places[0])"),
    "one copy of the weights": (COPIES, ONE),
    "a mean for each place": ("output.sum().backward()", "output.mean().backward()", (3,)),
    "outputs in another order": ("concatenate(outputs),", "concatenate(outputs[::-1]),"),
    "only the last two weights": (MASTER, MASTER.replace("]", "] * (name[:7] == 'softmax')"), (3,)),
    "every worker computes all rows": ("loss = replica(*mine).sum() * world_size", ALL_ROWS, (3,)),
    "the loss is not scaled": (".sum() * world_size  # because", ".sum()  # because"),
    "no DataParallel": ("paddle.DataParallel(layer)", "layer", (3,)),
    "no clear_grad": (CLEAR, "pass"),
    "the weights are sent in each step": (CLEAR, SENT),
    "the gradients travel twice": (CLEAR, TWICE),
    "the rate times workers": ("SGD(rate, ", "SGD(rate * world_size, ", (3,)),
    "the losses are not added up": ("paddle.distributed.all_reduce(losses)", "pass"),
    "every worker takes the first rows": ("world_size)[rank]", "world_size)[0]"),
    "a place's gradients replace the others'": ("gradients[name] + copy.grad", "copy.grad"),
    "one worker less": ("spawn(function, given, nproc,", "spawn(function, given, nproc - 1,", (3,)),
    "a mean for each sentence": ("mask.sum())", "mask.sum(1, keepdims=True) / len(mask))"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a folder with a text of short sentences, in the file that --data-dir reads."""
    folder, generator = tmp_path_factory.mktemp("a text"), np.random.default_rng(0)
    words = [f"word{letter}" for letter in "abcdefghijklmnop"]
    lines = [" ".join(generator.choice(words, 2 + number % 5)) for number in range(40)]
    (folder / "ptb.train.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.claim("D5", "D13")
def test_each_break_ends_in_fail(text):
    check_breaks(8, BREAKS, (2, 3), "--steps", 2, "--batch-size", 7, "--data-dir", text)


def test_default_run_learns(default_run):
    run = default_run(8)
    facts = run.json
    assert (facts["world_size"], facts["backend"], facts["device"]) == (2, "gloo", "cpu")
    assert run.stderr == "" and 0 < facts["max_grad_diff"] < 1e-12 and len(facts["loss"]) == 20
    assert 1900 < facts["perplexity_first"] < 2100  # 2,000 words, none of them known better
    assert facts["perplexity_last"] < facts["perplexity_first"] / 2


# --- What a process with Paddle measures: one for all tests that follow ---

MEASURE = """
import contextlib, io, json, os, sys
sys.path.insert(0, "scripts")
import numpy as np
from lockstep import lessons, proofs
from lockstep.watch.paddle_ranks import wait_for
from types import SimpleNamespace

text, proof = sys.argv[1], proofs.of_lesson(lessons.find("08"))
lesson, paddle = proof.lesson, proof.paddle

def answer(flags):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        proofs.read_flags(lesson.__file__, flags.split(), 1, 1)
    return said.getvalue()

def verdict(flags):
    with contextlib.redirect_stdout(io.StringIO()):
        return proof.examine(lesson.parse_args([*flags.split(), "--data-dir", text])).wrong

def leave(call, *args):
    try:
        call(*args)
    except SystemExit as stop:
        return stop.code

def fail():
    paddle.distributed.init_parallel_env()
    if os.environ["PADDLE_TRAINER_ID"] == "1":
        raise ValueError("no such word")
    paddle.distributed.barrier()

def job(codes):
    ranks = [SimpleNamespace(exitcode=code, kill=int, empty=lambda: True) for code in codes]
    return SimpleNamespace(processes=ranks, error_queues=ranks)

def with_gradient(stop=False, **options):
    args = lesson.parse_args(["--steps", "1", "--data-dir", text])
    weights, ((*rows, share),) = lesson.prepare(args)
    copies = {n: paddle.to_tensor(w, stop_gradient=False) for n, w in weights.items()}
    cost = lesson.language_model(copies, *map(paddle.to_tensor, (*rows, share)), **options)
    cost.stop_gradient = cost.stop_gradient or stop
    cost.sum().backward()
    return [name for name, copy in copies.items() if copy.grad is not None]

def losses_in_a_static_graph(stop):
    paddle.enable_static()
    program, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, start):
        cost = paddle.static.nn.fc(paddle.static.data("x", [4, 3]), 2) ** 2
        cost.stop_gradient = stop
        mean = cost.mean()
        paddle.optimizer.SGD(0.1).minimize(mean)
        executor = paddle.static.Executor()
        executor.run(start)
        feed = {"x": np.ones((4, 3), "float32")}
        return [float(executor.run(program, feed, [mean])[0]) for _ in range(3)]

os.environ |= {"PADDLE_TRAINERS_NUM": "8", "PADDLE_TRAINER_ID": "3", "MASTER_PORT": "1"}
os.environ |= {"PADDLE_TRAINER_ENDPOINTS": "192.0.2.1:1", "MASTER_ADDR": "192.0.2.1"}
bad = ["--batch-size 1", "--batch-size 99999", "--dtype float16", "--data-dir no_folder"]
runs = ["--nproc 1", "--nproc 4 --batch-size 11 --dtype float32"]
homes = paddle, paddle.static, paddle.static.nn, paddle.distributed
gone = ["fluid", "ParallelDo", "ParallelExecutor", "get_places"]
facts = {
    "places": sorted({str(place) for place in lesson.get_places(64)}),
    "bad": {flags: answer(flags) for flags in bad},
    "runs": [verdict("--steps 3 " + flags) for flags in runs],
    "failed": leave(proof.on_ranks, fail, 2),
    "blamed": [leave(wait_for, job(codes)) for codes in ([-6, -9, None], [None, 0, -6])],
    "gone": [name for name in gone for home in homes if hasattr(home, name)],
    "one_layer": with_gradient(layers=(1,)), "stopped": with_gradient(stop=True),
    "torch": "torch" in sys.modules,
    "static": [losses_in_a_static_graph(stop) for stop in (False, True)],
}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporary files")
    command = [sys.executable, "-c", MEASURE, text]
    options = {"cwd": ROOT, "env": ENVIRONMENT | {"TMPDIR": str(folder)}, "start_new_session": True}
    ran = subprocess.run(command, timeout=1500, capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stderr
    left = [path for path in folder.iterdir() if path.name.startswith("tmp")]
    return json.loads(ran.stdout.splitlines()[-1]) | {"left": left}


def test_bad_values_cost_one_line(facts):
    for flags, said in facts["bad"].items():
        assert len(said.splitlines()) == 1 and "error: " in said and flags.split()[0] in said


@pytest.mark.claim("D5")
def test_other_numbers_of_places_and_unequal_parts_pass(facts):
    assert facts["runs"] == [[], []] and not facts["torch"]


def test_the_rank_that_fails_first_is_named_and_nothing_is_left(facts):
    assert facts["failed"] == "rank 1 failed: ValueError: no such word" and facts["left"] == []
    blamed = ["rank 1 failed: exit code -9", "rank 2 failed: exit code -6"]  # -6: lost a neighbour
    assert facts["blamed"] == blamed


@pytest.mark.claim("D5", "D11")
def test_fluid_is_gone_and_without_enough_gpus_all_places_are_the_cpu(facts):
    assert facts["gone"] == [] and facts["places"] == ["Place(cpu)"]


@pytest.mark.claim("D13")
def test_the_paddle_programs_early_return_and_stopped_gradient_are_no_errors(facts):
    left = ["embedding", "kernel_1", "bias_1", "softmax_kernel", "softmax_bias"]
    assert facts["one_layer"] == left and facts["stopped"] == []
    trained, stopped = facts["static"]  # Fluid's programs were static graphs
    assert trained[2] < trained[0] and stopped[2] == stopped[0]


@pytest.mark.gpu
@pytest.mark.claim("D11")
def test_paddle_sees_only_the_devices_of_the_variable():
    code = "import paddle; print(paddle.device.cuda.device_count())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environments = [os.environ | {"CUDA_VISIBLE_DEVICES": devices} for devices in ("", "0")]
    seen = [subprocess.check_output(command, env=e, text=True).split()[-1] for e in environments]
    if seen[1] == "0":
        pytest.skip("needs a GPU build of Paddle")
    assert seen == ["0", "1"]


# --- The technique in a project of one's own ---

PROJECT = """
rows = np.random.default_rng(0).normal(size=(60, 9, 3)).astype("float32")
batches = list(zip(rows, rows @ np.array([[1], [2], [3]], "float32"), strict=True))

class Fit(paddle.nn.Linear):
    def forward(self, rows, answers):
        return ((super().forward(rows) - answers) ** 2).sum(1) / 9

def body(weights, rows, answers):
    return ((rows @ weights["w"] - answers) ** 2).sum(1) / 9

def work():
    layer, _ = train(lambda: Fit(3, 1, bias_attr=False), batches, 0.1)
    weight = layer.weight.numpy().flatten().round(2).tolist()
    Path(f"rank_{paddle.distributed.get_rank()}").write_text(str(weight))

if __name__ == "__main__":
    start_workers(work, 2)
    weights = {"w": np.zeros((3, 1), "float32")}
    last, _ = train_on_places(body, get_places(2), weights, batches, 0.1)
    print(last["w"].flatten().round(2).tolist())
"""


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    (script,) = (ROOT / "lessons").glob("lesson_08_*.py")
    imports, _, rest = script.read_text().partition('"""\n\n')[2].partition("# ---")
    technique = rest.partition("# --- The example ---")[0]
    (tmp_path / "project.py").write_text(imports + "# ---" + technique + PROJECT)
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 1500}
    ran = subprocess.run([sys.executable, "project.py"], env=ENVIRONMENT, **options)
    assert ran.stdout.splitlines()[-1:] == ["[1.0, 2.0, 3.0]"], ran.stderr
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["[1.0, 2.0, 3.0]"] * 2
