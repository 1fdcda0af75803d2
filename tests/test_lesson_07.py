"""Lesson 07: towers in one graph. TensorFlow runs in other processes, never in pytest's own.

`python test_lesson_07.py FOLDER` is such a process: it measures, and prints JSON.
"""

import contextlib
import io
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import lesson_07_tf_make_parallel as lesson
import numpy as np

ROOT = Path(__file__).resolve().parent.parent

# --- What the measuring process does ---

OWN = """
import tensorflow as tf
v1 = tf.compat.v1
from types import SimpleNamespace
{technique}
def tower(inputs, targets, mask):
    w = v1.get_variable("w", [], "float32", v1.ones_initializer())
    return tf.reduce_sum((w * tf.cast(inputs, "float32") - tf.cast(targets, "float32")) ** 2 * mask)

def batches():
    while True:  # 3 rows for two towers; 3 * 5 = 15, and the last number does not count
        yield [[1, 2], [3, 4], [5, 9]], [[3, 6], [9, 12], [15, 1]], [[1, 1], [1, 1], [1, 0]]

graph = build(tower, ["cpu:0", "cpu:1"], batches, "float32", 0.01)
losses = train(graph, 40)
graph.session.close()
"""


def own_project():
    """Return the losses of a project that has copied the technique; rest of the file is its own."""
    technique = Path(lesson.__file__).read_text().partition("# --- The technique ---")[2]
    names = {}
    exec(OWN.replace("{technique}", technique.partition("# --- The proof ---")[0]), names)
    return [float(loss) for loss in names["losses"]]


def crossings(watched):
    """Return what crosses in a training step: {"cpu:0 to cpu:1": {name: bytes}}."""
    metadata = lesson.v1.RunMetadata()
    options = lesson.v1.RunOptions(output_partition_graphs=True)
    watched.run([watched.graph.loss, watched.graph.update], None, options, metadata)
    found = {}
    for node in itertools.chain(*(part.node for part in metadata.partition_graphs)):
        if node.op == "_Recv":
            ends = [node.attr[end].s.decode()[-5:] for end in ("send_device", "recv_device")]
            name = re.sub(r"^edge_\d+_", "", node.attr["tensor_name"].s.decode())
            found.setdefault(" to ".join(ends).lower(), {})[name] = f"{name}:0"
    inputs, values = watched.run([watched.graph.inputs[0], found])
    sizes = {way: {name: v.nbytes for name, v in sent.items()} for way, sent in values.items()}
    return inputs.shape, sizes


def in_graph(function, rows=4):
    """Return the shape of function(a value of unknown shape), or the name of its error."""
    tf, v1 = lesson.tf, lesson.v1
    with tf.Graph().as_default(), v1.Session() as session:
        value = v1.placeholder("float32", [None, None])
        try:
            return list(session.run(function(value), {value: np.ones((rows, 7))}).shape)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            return type(error).__name__


def most_at_once(calls):
    """Return how many elements a pipeline with num_parallel_calls=`calls` makes at a time."""
    running, seen = [], []

    def make(number):
        running.append(number)
        seen.append(len(running))
        time.sleep(0.1)
        running.remove(number)
        return number

    def slowly(number):
        return lesson.tf.numpy_function(make, [number], "int64")

    data = lesson.tf.data.Dataset.range(8).map(slowly, num_parallel_calls=calls).prefetch(2)
    assert len([*data]) == 8
    return max(seen)


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


def measure(folder):
    """Return what TensorFlow does: {what: found}."""
    tf, facts = lesson.import_tensorflow(), {}
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    args = lesson.parse_args(["--dtype", "float64", "--batch-size", "6", "--data-dir", folder])
    first, make = lesson.prepare(args)
    made = []

    def watched_batches():
        for number, batch in enumerate(make()):
            made.append(number)
            yield batch

    watched = lesson.Watched(first, ["cpu:0", "cpu:1"], watched_batches)
    facts["before"], end = len(made), time.monotonic() + 60
    facts["shape"], facts["crossings"] = crossings(watched)  # takes two batches
    while len(made) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    facts["made"] = len(made)
    watched.close()
    facts["at_once"] = [most_at_once(calls) for calls in (None, 4)]
    batch = next(make())
    wider = [np.pad(array, ((0, 0), (0, 5))) for array in batch]
    facts["real"] = [lesson.by_hand(first, *some)[0] for some in (batch, wider)]
    facts["mirrored"] = mirrored(first, batch)
    facts["own"] = own_project()

    halves = lambda value: tf.split(value, 2)  # noqa: E731
    short = lambda value: [halves(value)[0], halves(value)[1][:, :3]]  # noqa: E731
    sums = lambda parts: [tf.reduce_sum(part) for part in parts]  # noqa: E731
    facts["merged"] = {
        "concat": in_graph(lambda value: tf.concat(halves(value), 0)),
        "concat of scalars": in_graph(lambda value: tf.concat(sums(halves(value)), 0)),
        "concat of other lengths": in_graph(lambda value: tf.concat(short(value), 0)),
        "add_n": in_graph(lambda value: tf.add_n(halves(value))),
        "add_n of other lengths": in_graph(lambda value: tf.add_n(short(value))),
        "add_n of scalars of other lengths": in_graph(lambda value: tf.add_n(sums(short(value)))),
    }
    facts["split"] = [in_graph(lambda value, n=n: tf.split(value, n)[0], 10) for n in (2, 4, 0)]
    lines = tf.data.Dataset.range(1000).shuffle(1000, reshuffle_each_iteration=True)
    pairs = tf.data.Dataset.zip((lines, lines))
    facts["met_themselves"] = sum(int(one) == int(other) for one, other in pairs)
    last_map = pairs.map(lambda one, other: (one, one + 1))
    facts["pairs_after_the_last_map"] = sum(int(x) + 1 == int(y) for x, y in last_map)
    facts["runs"] = {}
    save = ["--save", f"{folder}/x.npz"]
    for nproc, rows, more in ((1, 6, []), (4, 3, save)):
        words = ["--nproc", str(nproc), "--batch-size", str(rows), "--steps", "2", *more]
        with contextlib.redirect_stdout(io.StringIO()):
            flags = lesson.parse_args([*words, "--dtype", "float64", "--data-dir", folder])
            passed, _, numbers = lesson.main(flags)
        facts["runs"][nproc] = passed, numbers["rows_per_tower"], numbers["variables"]
    return facts | {"torch": "torch" in sys.modules}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])), flush=True)
    os._exit(0)  # without C++'s last steps

# --- In pytest ---

import pytest  # noqa: E402
from breaks import check_breaks  # noqa: E402
from conftest import ENVIRONMENT  # noqa: E402

pytestmark = pytest.mark.needs("tensorflow")

SCOPE = 'v1.variable_scope("model", '
LOSS = "loss = total / tf.reduce_sum(mask)  #"
PAIRS = "compute_gradients(loss, colocate_gradients_with_ops=True)"
SUM = "sums.append(tower(**part))"
SPLIT = "parts[name] = tf.split(value, len(devices))"

BREAKS = {
    "variables not shared": (SCOPE, 'v1.variable_scope(f"model{number or str()}", '),
    "gradients added, the loss averaged": (
        PAIRS,
        PAIRS.replace("loss,", "loss * len(devices),"),
        (2,),
    ),
    "divided by the padded length": (LOSS, "loss = total / tf.cast(tf.size(mask), dtype)  #", (2,)),
    "losses of unequal parts averaged": (
        SUM,
        'sums.append(tower(**part) / tf.reduce_sum(part["mask"]) / len(devices)'
        ' * tf.reduce_sum(inputs["mask"]))',
        (2,),
    ),
    "the batch not split, the loss averaged": (
        SPLIT,
        'parts[name] = [value / len(devices) if name == "mask" else value] * len(devices)',
    ),
    "all on one device": ("tf.device(device)", "tf.device(devices[0])"),
    "no colocation": (PAIRS, "compute_gradients(loss)", (2,)),
    "the learning rate times towers": ("(learning_rate)", "(learning_rate * len(devices))", (2,)),
    "only the last two variables": ("apply_gradients(pairs)", "apply_gradients(pairs[-2:])", (2,)),
    "two updates of a half": (
        "update = optimizer.apply_gradients(pairs)  #",
        "update = tf.group(*(optimizer.apply_gradients("
        "[(tf.convert_to_tensor(g) / 2, v) for g, v in pairs]) for _ in (1, 2)))  #",
        (2,),
    ),
    "updates in the first step only": (
        "return [graph.session.run([graph.loss, graph.update])[0] for _",
        "return [graph.session.run([graph.loss, graph.update][: 1 + (n == 0)])[0] for n",
        (2,),
    ),
    "every second batch": ("data.prefetch(2)", "data.shard(2, 0)", (2,)),
    "rows that are too many are dropped": (
        "value = tf.pad(value, [[0, missing], [0, 0]])",
        "value = value[: tf.shape(value)[0] // len(devices) * len(devices)]",
        (3,),
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder with a short text in PTB's format, in a path with a space."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    text = "the cat sat on the mat\n" * 3 + "a dog <unk> N times\nwe go\n" * 3
    for name in ("train", "valid", "test"):
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


@pytest.mark.claim("D7", "D9", "D12")
def test_each_break_ends_in_fail(texts):
    flags = ("--steps", 3, "--batch-size", 7, "--dtype", "float64", "--data-dir", texts)
    check_breaks(7, BREAKS, (2, 3), *flags)


@pytest.fixture(scope="module")
def facts(texts):
    """Return what the one measuring process has found."""
    folders = [str(ROOT / "lessons")]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, __file__, str(texts)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "tensorflow" not in sys.modules
    return json.loads(ran.stdout.splitlines()[-1])


# --- The script ---


def test_one_tower_and_more_towers_than_rows_pass(facts):
    assert facts["runs"] == {"1": [True, [6], 7], "4": [True, [1, 1, 1, 1], 7]}
    assert facts["torch"] is False


def test_save_writes_losses_gradients_and_weights(facts, texts):
    numbers = lesson.number_words(lesson.read_sentences(texts)[0])
    arrays, first = np.load(texts / "x.npz"), lesson.initial_weights(0, len(numbers))
    assert arrays["loss"].shape == (2,) and len(arrays) == 1 + 2 * len(first)
    for name, value in first.items():
        gradient, last = arrays[f"gradient_{name}"], arrays[f"weight_{name}"]
        assert gradient.shape == last.shape == value.shape
        assert abs(gradient).max() > 0 < abs(last - value).max()


def test_on_a_full_disk_the_results_come_with_a_sentence(tmp_path):
    """A limit on the size of a file plays the full disk."""
    path, limit = tmp_path / "x.npz", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("of last week")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
        wrong = lesson.save(path, [0.0] * 1000, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert wrong == [f"can't write {path}: File too large"]
    assert path.read_text() == "of last week" and [*tmp_path.iterdir()] == [path]


BAD = [
    ("--batch-size=100000", "--batch-size"),
    ("--dtype=float16", "--dtype"),
    ("--data-dir=no such folder", "ptb.train.txt is missing or empty"),
    ("--save=no such folder/x.npz", "--save"),
    ("--save=.", "--save"),
    ("", "needs tensorflow: pip install tensorflow==2.21.0"),
]


@pytest.mark.parametrize(("flag", "named"), BAD)
def test_bad_value_costs_one_line(monkeypatch, tmp_path, capsys, flag, named):
    monkeypatch.chdir(tmp_path)
    if not flag:
        monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        lesson.parse_args([flag] * bool(flag))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and named in line and list(tmp_path.iterdir()) == []


# --- The text ---


@pytest.mark.claim("D12")
def test_ptb_files_are_read_when_they_are_there(tmp_path):
    for name, text in (("train", "a b <unk>\n\nc N\n"), ("valid", "x\n"), ("test", "y z\n")):
        (tmp_path / f"ptb.{name}.txt").write_text(text)
    assert lesson.read_sentences(tmp_path) == ([["a", "b", "<unk>"], ["c", "N"]], [["y", "z"]])


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
@pytest.mark.parametrize("devices", (1, 2, 8))
def test_more_devices_make_fewer_updates_in_an_epoch(monkeypatch, devices):
    sentences, epochs = [["a"]] * 1000, []

    class Generator:  # stands for NumPy's; it knows when the next epoch begins
        def permutation(self, count):
            epochs.append(count)
            return np.arange(count)

    monkeypatch.setattr(lesson.np.random, "default_rng", lambda seed: Generator())
    batches = lesson.make_batches(sentences, {"a": 2}, 32 * devices, 0)
    updates = sum(1 for _ in itertools.takewhile(lambda _: len(epochs) == 1, batches))
    assert updates == 1000 // (32 * devices)


# --- The proof, the technique, and what TensorFlow does ---


def test_the_gradients_in_numpy_are_those_by_differences():
    """They are the measure of all towers; these know nothing of their formulas."""
    weights = {n: w * 3 for n, w in lesson.initial_weights(0, 5, 4).items()}
    batch = next(lesson.make_batches([["a", "b", "c"], ["b"]], {"a": 2, "b": 3, "c": 4}, 2, 0))
    for name, gradient in lesson.by_hand(weights, *batch)[1].items():
        slopes = np.zeros_like(gradient)
        for place in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = weights[name].copy()
                moved[place] += sign * 1e-5
                ends.append(lesson.by_hand(weights | {name: moved}, *batch)[0])
            slopes[place] = (ends[0] - ends[1]) / 2e-5
        assert abs(slopes - gradient).max() < 1e-8 < abs(gradient).max(), name


def test_the_technique_runs_in_a_project_of_ones_own(facts):
    assert len(facts["own"]) == 40
    assert facts["own"][0] == pytest.approx((4 + 16 + 36 + 64 + 100) / 5)
    assert facts["own"][-1] < 0.01 * facts["own"][0]  # w is 3


@pytest.mark.claim("D1", "D2")
def test_weights_cross_there_and_gradients_back_in_each_step(facts, texts):
    there, back = (facts["crossings"][way] for way in ("cpu:0 to cpu:1", "cpu:1 to cpu:0"))
    numbers = lesson.number_words(lesson.read_sentences(texts)[0])
    sizes = {name: w.nbytes for name, w in lesson.initial_weights(0, len(numbers)).items()}
    whole = sum(sizes.values()) - sizes["embedding"]
    rows = 3 * facts["shape"][1] * 64 * 8  # of the embedding: the second tower's words, float64
    others = [size for name, size in there.items() if "ReadVariableOp" in name]
    assert (len(others), sum(others)) == (6, whole)
    assert there["tower_1/model/embedding_lookup"] == rows
    gradients = [size for name, size in back.items() if name.startswith("gradients/tower_1/")]
    assert (len(gradients), sum(gradients)) == (6 + 1, whole + rows)
    assert back["tower_1/model/Sum"] == 8


@pytest.mark.claim("D6")
def test_mirrored_strategy_has_the_same_gradients_and_a_copy_on_each_device(facts):
    off, copies = facts["mirrored"]
    assert copies == 2 and len(off) == 2 and max(off) < 1e-10


@pytest.mark.claim("D7", "D8")
def test_concat_works_with_unknown_sizes_and_fails_for_scalars_and_other_lengths(facts):
    assert facts["merged"] == {
        "concat": [4, 7],
        "concat of scalars": "ValueError",
        "concat of other lengths": "InvalidArgumentError",
        "add_n": [2, 7],
        "add_n of other lengths": "InvalidArgumentError",
        "add_n of scalars of other lengths": [],
    }


@pytest.mark.claim("D10")
def test_prefetch_works_ahead_one_at_a_time_and_parallel_calls_make_several(facts):
    one, several = facts["at_once"]
    assert facts["before"] <= 3 and facts["made"] >= 4 and one == 1 < several <= 4


@pytest.mark.claim("D13")
def test_the_defects_of_the_articles_program(facts):
    assert facts["split"] == [[5, 7], "InvalidArgumentError", "ValueError"]
    assert abs(facts["real"][0] - facts["real"][1]) < 1e-12  # padding changes nothing here
    # It zips shuffled lines, but its last map takes both inputs and targets from the first line.
    assert facts["met_themselves"] < 50 and facts["pairs_after_the_last_map"] == 1000
