"""Lesson 07: towers in one graph. TensorFlow runs in other processes, never in pytest's own.

`python test_lesson_07.py FOLDER` is such a process: it measures, and prints JSON.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import lesson_07_tf_make_parallel as lesson
import numpy as np

ROOT = Path(__file__).resolve().parent.parent

# --- What the measuring process does ---


LEFT_OUT = (
    "return [graph.session.run([graph.loss, graph.update])[0] for _",
    "return [graph.session.run([graph.loss, graph.update][: 1 + (steps < 3 or n)])[0] for n",
)


def copy_the_technique(part="", other=""):
    """Let the lesson's main use a copy of its technique, which has nothing else of the script."""
    names = {name: getattr(lesson, name) for name in ("tf", "v1", "SimpleNamespace")}
    technique = Path(lesson.__file__).read_text().partition("# --- The technique ---")[2]
    exec(technique.partition("# --- The proof ---")[0].replace(part, other), names)
    lesson.build, lesson.train = names["build"], names["train"]


def in_graph(function, rows=4):
    """Return the shape of function(a value of unknown shape), or the name of its error."""
    tf, v1 = lesson.tf, lesson.v1
    with tf.Graph().as_default(), v1.Session() as session:
        value = v1.placeholder("float32", [None, None])
        try:
            return list(session.run(function(value), {value: np.ones((rows, 7))}).shape)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            return type(error).__name__


def reading_ahead(calls):
    """Return how many elements a pipeline makes at a time, and how many if one is asked for."""
    running, seen, end = [], [], time.monotonic() + 60

    def make(number):
        running.append(number)
        seen.append(len(running))
        time.sleep(0.2)
        running.remove(number)
        return number

    @lesson.tf.autograph.experimental.do_not_convert  # it would write a file
    def slowly(number):
        return lesson.tf.numpy_function(make, [number], "int64")

    data = iter(lesson.tf.data.Dataset.range(8).map(slowly, num_parallel_calls=calls).prefetch(2))
    next(data)
    while len(seen) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    ahead, _ = len(seen), [*data]
    return max(seen), ahead


def mirrored(first, batch):
    """Return how far each device's gradients are off in the notebook's function, and the copies."""
    path = ROOT / "notebooks" / "lesson_07_tf_make_parallel.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    (source,) = [cell for cell in cells if "def mirrored_gradients(" in cell]
    names = {"tf": lesson.tf, "np": np, "lesson": lesson}
    exec(source, names)
    by_device, copies = names["mirrored_gradients"](first, batch, 2)
    _, right = lesson.by_hand(first, *batch)
    return [max(lesson.difference(g[n], right[n]) for n in right) for g in by_device], copies


def run_main(folder, nproc, rows, steps):
    """Return what main returns, with these flags."""
    words = ["--nproc", str(nproc), "--batch-size", str(rows), "--steps", str(steps)]
    words += ["--dtype", "float64", "--data-dir", folder, "--save", f"{folder}/x{nproc}.npz"]
    with contextlib.redirect_stdout(io.StringIO()):
        return lesson.main(lesson.parse_args(words))


def measure(folder):
    """Return what TensorFlow does: {what: found}."""
    tf, facts = lesson.import_tensorflow(), {}
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    args = lesson.parse_args(["--dtype", "float64", "--batch-size", "6", "--data-dir", folder])
    first, make = lesson.prepare(args)
    facts["ahead"] = [reading_ahead(calls) for calls in (None, 4)]
    facts["mirrored"] = mirrored(first, next(make()))
    copy_the_technique()
    facts["merged"] = [
        in_graph(lambda value: tf.concat([value, value], 0)),
        in_graph(lambda value: tf.concat([tf.reduce_sum(value)] * 2, 0)),
        in_graph(lambda value: tf.concat([value, value[:, :3]], 0)),
    ]
    facts["split"] = [in_graph(lambda value, n=n: tf.split(value, n)[0], 10) for n in (2, 4, 0)]
    facts["runs"] = {}
    for nproc, rows in ((1, 6), (3, 1)):
        passed, _, numbers = run_main(folder, nproc, rows, 1)
        facts["runs"][nproc] = passed, numbers["rows_per_tower"], numbers["variables"]
    copy_the_technique(*LEFT_OUT)
    facts["left out"] = run_main(folder, 1, 6, 6)[1]
    return facts | {"torch": "torch" in sys.modules}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])), flush=True)
    os._exit(0)  # without C++'s last steps

# --- In pytest ---

import pytest  # noqa: E402
from breaks import check_breaks  # noqa: E402
from conftest import ENVIRONMENT  # noqa: E402

pytestmark = pytest.mark.needs("tensorflow")

PAIRS = "compute_gradients(loss, colocate_gradients_with_ops=True)"
WORDS = "tf.reduce_sum(mask)  #"
LOOK_UP = 'tf.nn.embedding_lookup(weights["embedding"]'

BREAKS = {
    "variables not shared": ('scope("model", ', 'scope(f"model{number or str()}", '),
    "gradients added, the loss averaged": (PAIRS, PAIRS.replace("loss,", "loss * 2,")),
    "divided by the padded length": (WORDS, "tf.cast(tf.size(mask), dtype)  #"),
    "losses of unequal parts averaged": (
        "sums.append(tower(**part))",
        'sums.append(tower(**part) / tf.reduce_sum(part["mask"]) / 2'
        ' * tf.reduce_sum(inputs["mask"]))',
    ),
    "the batch not split, the loss averaged": (
        "parts[name] = tf.split(value, len(devices))",
        'parts[name] = [value / len(devices) if name == "mask" else value] * len(devices)',
    ),
    "all on one device": ("tf.device(device)", "tf.device(devices[0])"),
    "towers without names": ('tf.name_scope(f"tower_{number}"), ', ""),
    "no colocation": (PAIRS, "compute_gradients(loss)"),
    "the whole embedding is sent": (LOOK_UP, LOOK_UP.replace("(", "(0 + ")),
    "each tower is sent the whole batch": (
        "part = {name: pieces[number] for name, pieces in parts.items()}",
        "with tf.device(device):\n            "
        "part = {n: tf.split(tf.concat(p, 0), len(p))[number] for n, p in parts.items()}",
    ),
    "the learning rate times towers": ("(learning_rate)", "(learning_rate * len(devices))"),
    "two updates of a half": (
        "update = optimizer.apply_gradients(pairs)  #",
        "halves = [(tf.convert_to_tensor(g) / 2, v) for g, v in pairs]\n"
        "        update = [optimizer.apply_gradients(halves) for _ in '12']  #",
    ),
    "every second batch": ("data.prefetch(2)", "data.shard(2, 0).prefetch(2)"),
    "no batch is made ahead": ("data.prefetch(2)", "data"),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder with a text in PTB's format: a word of its own in each sentence."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    text = "".join(f"the cat{n} sat on the <unk> N times\nwe go{n}\n" for n in range(22))
    for name in ("train", "valid", "test"):
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


@pytest.mark.claim("D1", "D2", "D6", "D7", "D9", "D12", "D13")
def test_each_break_ends_in_fail(texts):
    """Two steps are enough; what takes more to be seen is in the test below."""
    flags = ("--steps", 2, "--batch-size", 7, "--dtype", "float64", "--data-dir", texts)
    check_breaks(7, BREAKS, 2, *flags)


def test_an_update_that_is_left_out_while_nobody_looks_is_missed(facts):
    assert "the update of 1 steps is missing" in facts["left out"]


@pytest.fixture(scope="module")
def facts(texts):
    """Return what the one measuring process has found."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT / "lessons")}
    command = [sys.executable, __file__, str(texts)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    assert "tensorflow" not in sys.modules
    return json.loads(ran.stdout.splitlines()[-1])


def test_one_tower_and_more_towers_than_rows_pass_and_save(facts, texts):
    assert facts["runs"] == {"1": [True, [6], 7], "3": [True, [1, 1, 1], 7]}
    assert not facts["torch"]
    numbers = lesson.number_words(lesson.read_sentences(texts)[0])
    arrays, first = np.load(texts / "x3.npz"), lesson.initial_weights(0, len(numbers))
    assert arrays["loss"].shape == (1,) and len(arrays) == 1 + 2 * len(first)
    for name, value in first.items():
        assert abs(arrays[f"gradient_{name}"]).max() > 0
        assert abs(arrays[f"weight_{name}"] - value).max() > 0


def test_if_the_results_can_not_be_written_those_of_last_week_stay(monkeypatch, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("of last week")
    monkeypatch.setattr(lesson.np, "savez", lambda *args, **kwargs: Path("/").write_text(""))
    (wrong,) = lesson.save(path, [0.0], {}, {})
    assert wrong.startswith(f"can't write {path}: ")
    assert path.read_text() == "of last week" and [*tmp_path.iterdir()] == [path]


def test_bad_values_cost_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for flag in ["--data-dir=no folder", "--save=no/x", "--save=.", "--batch-size=99999"]:
        with pytest.raises(SystemExit) as stop:
            lesson.parse_args([flag])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and flag.partition("=")[0] in line
    assert list(tmp_path.iterdir()) == []


def test_every_pair_belongs_together_and_all_sentences_come(texts):
    sentences, _ = lesson.read_sentences()
    numbers, seen = lesson.number_words(sentences), set()
    batches = lesson.make_batches(sentences, numbers, 32, 0)
    for inputs, targets, mask in itertools.islice(batches, len(sentences) // 32):
        for row in range(32):
            length = int(mask[row].sum())
            assert inputs[row, 0] == targets[row, length - 1] == 0
            assert np.array_equal(inputs[row, 1:length], targets[row, : length - 1])
            assert not mask[row, length:].any() and not targets[row, length:].any()
            seen.add(tuple(targets[row, : length - 1].tolist()))
    coded = {tuple(numbers.get(word, 1) for word in words) for words in sentences}
    assert seen <= coded and len(seen) > 0.9 * len(coded)


@pytest.mark.claim("D4")
def test_more_devices_make_fewer_updates_in_an_epoch():
    """An epoch ends when a sentence comes again; here each sentence is one word of its own."""
    numbers = {str(number): number for number in range(1000)}
    for devices in (1, 2, 8):
        updates, seen = 1000 // (32 * devices), np.zeros(1000, int)
        batches = lesson.make_batches([[word] for word in numbers], numbers, 32 * devices, 0)
        for _, targets, _ in itertools.islice(batches, updates + 1):
            assert seen.max() < 2  # in the first `updates` batches
            seen[targets[:, 0]] += 1
        assert seen.max() == 2


def test_the_gradients_in_numpy_are_those_by_differences():
    """They are the measure of all towers; these know nothing of their formulas."""
    weights = {n: w * 3 for n, w in lesson.initial_weights(0, 5, 4).items()}
    batch = next(lesson.make_batches([["a", "b", "c"], ["b"]], {"a": 2, "b": 3, "c": 4}, 2, 0))
    for name, gradient in lesson.by_hand(weights, *batch)[1].items():
        step = 1e-5 * np.random.default_rng(0).normal(size=gradient.shape)
        ends = [weights | {name: weights[name] + sign * step} for sign in (1, -1)]
        one, other = (lesson.by_hand(end, *batch)[0] for end in ends)
        assert (one - other) / 2 == pytest.approx((gradient * step).sum(), rel=1e-6), name


@pytest.mark.claim("D6")
def test_mirrored_strategy_has_the_same_gradients_and_a_copy_on_each_device(facts):
    off, copies = facts["mirrored"]
    assert copies == 2 and len(off) == 2 and max(off) < 1e-10


@pytest.mark.claim("D7", "D8", "D13")
def test_concat_works_with_unknown_sizes_and_what_the_articles_program_can_not_do(facts):
    assert facts["merged"] == [[8, 7], "ValueError", "InvalidArgumentError"]
    assert facts["split"] == [[5, 7], "InvalidArgumentError", "ValueError"]


@pytest.mark.claim("D10")
def test_prefetch_works_ahead_one_at_a_time_and_parallel_calls_make_several(facts):
    (one, ahead), (several, _) = facts["ahead"]
    assert one == 1 < several <= 4 and ahead >= 3
