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

import numpy as np
from lockstep import lessons, proofs

ROOT = Path(__file__).resolve().parent.parent

BAD = "--data-dir=no folder", "--batch-size=99999"

# --- What the measuring process does ---


def in_graph(proof, function, rows=4):
    """Return the shape of function(a value of unknown shape), or the name of its error."""
    tf, v1 = proof.lesson.tf, proof.lesson.v1
    with tf.Graph().as_default(), v1.Session() as session:
        value = v1.placeholder("float32", [None, None])
        try:
            return list(session.run(function(value), {value: np.ones((rows, 7))}).shape)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            return type(error).__name__


def reading_ahead(tf, calls):
    """Return how many elements a pipeline makes at a time, and how many if one is asked for."""
    running, seen, end = [], [], time.monotonic() + 60

    def make(number):
        running.append(number)
        seen.append(len(running))
        time.sleep(0.2)
        running.remove(number)
        return number

    @tf.autograph.experimental.do_not_convert  # it would write a file
    def slowly(number):
        return tf.numpy_function(make, [number], "int64")

    data = iter(tf.data.Dataset.range(8).map(slowly, num_parallel_calls=calls).prefetch(2))
    next(data)
    while len(seen) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    ahead, _ = len(seen), [*data]
    return max(seen), ahead


def mirrored(proof, first, batch):
    """Return how far each device's gradients are off in the notebook's function, and the copies."""
    path = ROOT / "notebooks" / "lesson_07_tf_make_parallel.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    (source,) = [cell for cell in cells if "def mirrored_gradients(" in cell]
    names = {"tf": proof.lesson.tf, "np": np, "lesson": proof.lesson}
    exec(source, names)
    by_device, copies = names["mirrored_gradients"](first, batch, 2)
    _, right = proof.by_hand(first, *batch)
    return [max(proof.difference(g[n], right[n]) for n in right) for g in by_device], copies


def run_main(proof, folder, nproc, rows):
    """Return what the proof says of one step with these flags."""
    words = ["--nproc", str(nproc), "--batch-size", str(rows), "--steps", "1"]
    words += ["--dtype", "float64", "--data-dir", folder]
    args = proofs.read_flags(proof.lesson.__file__, words, 1, 1)
    with contextlib.redirect_stdout(io.StringIO()), proof.watched(args) as seen:
        proof.lesson.main(args)
    verdict = proof.judge(seen, args, nproc, "none")
    return verdict.wrong, verdict.numbers["rows_per_tower"], verdict.numbers["variables"]


def refused(proof, flag):
    """Return the exit code for this flag, and what is said on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            proofs.read_flags(proof.lesson.__file__, [flag], 1, 1)
        except SystemExit as ended:
            return ended.code, said.getvalue().splitlines()


def pairs_belong_together(lesson):
    """Return the share of the sentences that an epoch has; each target is the next word."""
    sentences = lesson.read_sentences()
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
    assert seen <= coded
    return len(seen) / len(coded)


def updates_in_an_epoch(lesson, devices):
    """Return how many batches come before a sentence comes again, of 1,000 of one word each."""
    numbers, seen = {str(number): number for number in range(1000)}, np.zeros(1000, int)
    batches = lesson.make_batches([[word] for word in numbers], numbers, 32 * devices, 0)
    for count, (_, targets, _) in enumerate(batches):
        seen[targets[:, 0]] += 1
        if seen.max() == 2:
            return count


def measure(folder):
    """Return what TensorFlow does: {what: found}."""
    proof, facts = proofs.of_lesson(lessons.find("07")), {}
    tf, lesson = proof.lesson.tf, proof.lesson
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    args = lesson.parse_args(["--dtype", "float64", "--batch-size", "6", "--data-dir", folder])
    first, make = lesson.prepare(args)
    facts["ahead"] = [reading_ahead(tf, calls) for calls in (None, 4)]
    facts["mirrored"] = mirrored(proof, first, next(make()))
    facts["merged"] = [
        in_graph(proof, lambda value: tf.concat([value, value], 0)),
        in_graph(proof, lambda value: tf.concat([tf.reduce_sum(value)] * 2, 0)),
        in_graph(proof, lambda value: tf.concat([value, value[:, :3]], 0)),
    ]
    facts["split"] = [in_graph(proof, lambda v, n=n: tf.split(v, n)[0], 10) for n in (2, 4, 0)]
    facts["runs"] = [run_main(proof, folder, nproc, rows) for nproc, rows in ((1, 6), (3, 1))]
    facts["refused"] = {flag: refused(proof, flag) for flag in BAD}
    facts["share"] = pairs_belong_together(lesson)
    facts["updates"] = [updates_in_an_epoch(lesson, devices) for devices in (1, 2, 8)]
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
    "an update is left out while nobody looks": (
        "return [graph.session.run([graph.loss, graph.update])[0] for _",
        "return [graph.session.run([graph.loss, graph.update][: 1 + (n != 1)])[0] for n",
    ),
    "the first words' outputs have no gradient": (
        '"trw,wv->trv", outputs',
        '"trw,wv->trv", tf.concat([tf.stop_gradient(outputs[:1]), outputs[1:]], 0)',
    ),
    "padding is learned, too": ("losses * tf.transpose(mask)", "losses"),
    "the first tower counts for all": ("tf.add_n(sums)", "(sums[0] * len(sums))"),
    "two updates in a step": (
        "losses = train(graph, args.steps)",
        "losses = train(graph, 2 * args.steps)[::2]",
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder with a text in PTB's format: a word of its own in each sentence."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    text = "".join(f"the cat{n} sat on the <unk> N times\nwe go{n}\n" for n in range(22))
    (folder / "ptb.train.txt").write_text(text)
    return folder


@pytest.mark.claim("D1", "D2", "D6", "D7", "D9", "D12", "D13")
def test_each_break_ends_in_fail(texts):
    """Nobody looks into the third step of four."""
    flags = ("--steps", 4, "--batch-size", 7, "--dtype", "float64", "--data-dir", texts)
    check_breaks(7, BREAKS, 2, *flags)


@pytest.fixture(scope="module")
def facts(texts):
    """Return what the one measuring process has found."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, __file__, str(texts)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    assert "tensorflow" not in sys.modules
    return json.loads(ran.stdout.splitlines()[-1])


def test_one_tower_and_more_towers_than_rows_pass(facts):
    assert facts["runs"] == [[[], [6], 7], [[], [1, 1, 1], 7]]
    assert not facts["torch"]


def test_bad_values_cost_one_line(facts):
    for flag in BAD:
        code, (line,) = facts["refused"][flag]
        assert code == 2 and f"error: argument {flag.partition('=')[0]}: " in line


def test_every_pair_belongs_together_and_all_sentences_come(facts):
    assert facts["share"] > 0.9


@pytest.mark.claim("D4")
def test_more_devices_make_fewer_updates_in_an_epoch(facts):
    """An epoch ends when a sentence comes again."""
    assert facts["updates"] == [1000 // 32, 1000 // 64, 1000 // 256]


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
