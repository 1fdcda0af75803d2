"""Lesson 07: how did make_parallel train one TensorFlow model on several devices?

In DDP each process has its own parameters. Here one process builds one graph, and make_parallel
builds the model in it once per device: a tower. All towers share one set of variables. In each
step a tower is sent them (of the embedding, the rows of its words), its targets and its mask, and
sends its gradients back. This is article D's way, of 2018; it runs today as tf.compat.v1.

Run it:      bash scripts/lesson_07.sh --nproc 2
PTB's text:  bash scripts/lesson_07.sh --data-dir FOLDER

Output to expect on a CPU:

    2 towers in one process on cpu:0 cpu:1, each with 16 of 32 sentences; 7 variables
    operations in a step: cpu:0 ..., cpu:1 ...; on another tower's device: 0
    perplexity ... in step 1, ... in the last 10 of 100; ... tokens per second
    PASS loss, gradients and updates of 2 towers are those of the whole batch (off by ...)
"""

import argparse
import collections
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

# --- The technique ---
# It takes 4 seconds to import TensorFlow, so this script does it late. In a project of your own:
# import tensorflow as tf
# v1 = tf.compat.v1


def make_parallel(tower, devices, **inputs):
    """Return the sum of `tower(**part)`, a scalar, over one tower per device.

    Inputs are tensors (rows, time). If the devices do not divide the rows, rows of zeros follow;
    `tower` must not count them. Variables that it gets by name are shared by all towers.
    """
    sums, parts = [], {}
    for name, value in inputs.items():
        missing = -tf.shape(value)[0] % len(devices)
        value = tf.pad(value, [[0, missing], [0, 0]])
        parts[name] = tf.split(value, len(devices))
    for number, device in enumerate(devices):
        part = {name: pieces[number] for name, pieces in parts.items()}
        scope = v1.variable_scope("model", reuse=v1.AUTO_REUSE)
        with tf.device(device), tf.name_scope(f"tower_{number}"), scope:
            sums.append(tower(**part))
    return tf.add_n(sums)  # one number from each tower


def build(tower, devices, batches, dtype, learning_rate):
    """Return a session, and the nodes to run in it: one step of training on all devices.

    `batches()` yields (inputs, targets, mask), arrays (rows, time). `tower` gets its rows of them
    and returns the sum of the losses of all words whose mask is 1.
    """
    with tf.Graph().as_default():
        signature = [tf.TensorSpec([None, None], kind) for kind in ("int32", "int32", dtype)]
        data = tf.data.Dataset.from_generator(batches, output_signature=tuple(signature))
        iterator = v1.data.make_initializable_iterator(data.prefetch(2))  # made while a step runs
        inputs, targets, mask = iterator.get_next()
        total = make_parallel(tower, devices, inputs=inputs, targets=targets, mask=mask)
        loss = total / tf.reduce_sum(mask)  # divided once, by the words of all towers
        optimizer = v1.train.GradientDescentOptimizer(learning_rate)
        # With `colocate`, nearly all gradient operations run where their forward operations ran.
        pairs = optimizer.compute_gradients(loss, colocate_gradients_with_ops=True)
        update = optimizer.apply_gradients(pairs)  # one, where the variables are
        on_gpu = len(devices) * ("gpu" in devices[0])
        count = {"CPU": len(devices), "GPU": on_gpu}  # one CPU can play several devices
        session = v1.Session(config=v1.ConfigProto(device_count=count))
        session.run([v1.global_variables_initializer(), iterator.initializer])
    nodes = {"inputs": (inputs, targets, mask), "loss": loss, "pairs": pairs, "update": update}
    return SimpleNamespace(session=session, **nodes)


def train(graph, steps):
    """Make so many steps; return the loss of each, as it was before its update."""
    return [graph.session.run([graph.loss, graph.update])[0] for _ in range(steps)]


# --- The proof ---

LEARNING_RATE = 2.0


def read_sentences(data_dir=None):
    """Return (training, test): lists of sentences, each a list of words (claim D12).

    Python's own documentation, which comes with Python; with `data_dir`, PTB's files from there.
    Raises ValueError, in one line, when one of PTB's three files is missing or empty.
    """
    if data_dir is None:
        topics = importlib.import_module("pydoc_data.topics").topics
        text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
        parts = re.split(r"[.!?]\s|\n\s*\n", re.sub(r"\d+", " N ", text))
        sentences = [re.findall(r"[a-z]+|N", part) for part in parts]
        sentences = [words for words in sentences if 4 <= len(words) <= 30]
        return sentences[: -len(sentences) // 10], sentences[-len(sentences) // 10 :]
    texts = []
    for path in (Path(data_dir, f"ptb.{part}.txt") for part in ("train", "valid", "test")):
        if not path.is_file() or not path.read_text(encoding="utf-8").strip():
            raise ValueError(f"{path} is missing or empty")
        lines = path.read_text(encoding="utf-8").splitlines()
        texts.append([line.split() for line in lines if line.strip()])
    return texts[0], texts[2]


def number_words(sentences, size=2000):
    """Return {word: number} of the most frequent words; 0 ends a sentence, 1 is any other word."""
    counts = collections.Counter(word for words in sentences for word in words)
    counts.pop("<unk>", None)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: number for number, word in enumerate(["<eos>", "<unk>", *frequent])}


def make_batches(sentences, numbers, batch_size, seed):
    """Yield (inputs, targets, mask) without end: integers, integers, floats, (batch_size, time).

    Targets are the inputs, one word later. A sentence is moved as a whole, so pairs stay together.
    `time` is the longest sentence and its end; the mask is 1 at a sentence's words and its end.
    """
    coded = [[numbers.get(word, 1) for word in words] for words in sentences]
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(coded))
        for first in range(0, len(order) - batch_size + 1, batch_size):
            batch = [coded[index] for index in order[first : first + batch_size]]
            shape = batch_size, max(map(len, batch)) + 1
            inputs, targets, mask = np.zeros(shape, "i4"), np.zeros(shape, "i4"), np.zeros(shape)
            for row, words in enumerate(batch):
                inputs[row, 1 : len(words) + 1] = targets[row, : len(words)] = words
                mask[row, : len(words) + 1] = 1.0  # the end of the sentence is to be learned, too
            yield inputs, targets, mask


def initial_weights(seed, words, width=64):
    """Return the first weights, float64: {name: array}. Gates of an LSTM: i, f, g, o.

    i, f, o = sigmoid and g = tanh of [input, state] @ kernel + bias; f gets 1 more before it.
    """
    shapes = {"embedding": (words, width)}
    for layer in (1, 2):
        shapes |= {f"kernel_{layer}": (2 * width, 4 * width), f"bias_{layer}": (4 * width,)}
    shapes |= {"softmax_kernel": (width, words), "softmax_bias": (words,)}
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-0.1, 0.1, shape) for name, shape in shapes.items()}


def import_tensorflow():
    """Import TensorFlow for the functions above, and return it. Its log does not reach stderr."""
    global tf, v1
    broken = None
    os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    sys.modules.setdefault("jax", None)  # else its converter for phones imports it, too
    with open(os.devnull, "w") as nowhere:
        screen = os.dup(2)  # C++ code writes to file descriptor 2, before it obeys the log level
        os.dup2(nowhere.fileno(), 2)
        try:
            tf = importlib.import_module("tensorflow")
            tf.config.list_physical_devices()
        except ModuleNotFoundError:
            raise
        except Exception as error:
            broken = f"tensorflow is broken, its import ends with {type(error).__name__}"
        finally:
            os.dup2(screen, 2)
            os.close(screen)
    if broken:
        print(f"{broken}: pip install --force-reinstall tensorflow==2.21.0", file=sys.stderr)
        sys.exit(2)
    v1 = tf.compat.v1
    tf.get_logger().setLevel("ERROR")
    v1.disable_control_flow_v2()  # loops as in 2018
    return tf


def device_names(count):
    """Return `count` names: GPUs where there are enough, else virtual CPU devices."""
    kind = "gpu" if len(tf.config.list_physical_devices("GPU")) >= count else "cpu"
    return [f"{kind}:{number}" for number in range(count)]


def lstm_step(x, c, h, kernel, bias):
    """Return the new memory c and the new output h of an LSTM layer, after one more word x."""
    i, f, g, o = tf.split(tf.concat([x, h], 1) @ kernel + bias, 4, axis=1)
    c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
    return c, tf.sigmoid(o) * tf.tanh(c)


def sum_of_losses(weights, inputs, targets, mask):
    """Return the sum of the losses of all real words, a scalar; the inputs are (rows, time)."""
    # The look-up runs where the embedding is: the tower is sent the rows of its words, no more.
    words = tf.nn.embedding_lookup(weights["embedding"], inputs)  # (rows, time, width)
    words = tf.transpose(words, [1, 0, 2])  # (time, rows, width)
    # The other weights as this tower reads them: each is sent to its device once in a step.
    weights = {name: tf.identity(w) for name, w in weights.items() if name != "embedding"}

    def one_word(time, states, outputs):
        x, new = words[time], []
        for layer, (c, h) in enumerate(states, 1):  # layer 2 reads the output of layer 1
            c, x = lstm_step(x, c, h, weights[f"kernel_{layer}"], weights[f"bias_{layer}"])
            new.append((c, x))
        return time + 1, new, outputs.write(time, x)

    zeros, steps = tf.zeros_like(words[0]), tf.shape(words)[0]
    start = 0, [(zeros, zeros), (zeros, zeros)], tf.TensorArray(words.dtype, steps)
    outputs = tf.while_loop(lambda time, *_: time < steps, one_word, start)[2].stack()
    logits = tf.einsum("trw,wv->trv", outputs, weights["softmax_kernel"]) + weights["softmax_bias"]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.transpose(targets), logits)
    return tf.reduce_sum(losses * tf.transpose(mask))


def language_model(first, **part):
    """Return sum_of_losses with variables that have the values `first`: {name: array}."""
    variables = {name: v1.get_variable(name, None, w.dtype, w) for name, w in first.items()}
    return sum_of_losses(variables, **part)


def numpy_forward(rows, kernel, bias):
    """Return all that an LSTM layer computes for `rows`, (time, rows, width), step by step."""
    kept, h, c = [], np.zeros_like(rows[0]), np.zeros_like(rows[0])
    for x in rows:
        both, before = np.concatenate([x, h], 1), c
        i, f, g, o = np.split(both @ kernel + bias, 4, 1)
        i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f + 1, o))  # sigmoids
        g = np.tanh(g)
        c = f * before + i * g
        h = o * np.tanh(c)
        kept.append((both, before, i, f, g, o, np.tanh(c), h))
    return kept


def numpy_backward(kept, errors, kernel):
    """Return the gradients of a layer's rows, kernel and bias; `errors`: those of its outputs."""
    rows, d_kernel, d_bias = [], np.zeros_like(kernel), np.zeros(kernel.shape[1])
    d_c = d_h = 0.0  # from the word that follows
    for (both, before, i, f, g, o, tanh_c, _), error in zip(kept[::-1], errors[::-1], strict=True):
        d_h = d_h + error
        d_c = d_c + d_h * o * (1 - tanh_c**2)
        gates = d_c * g * i * (1 - i), d_c * before * f * (1 - f), d_c * i * (1 - g**2)
        gates = np.concatenate([*gates, d_h * tanh_c * o * (1 - o)], 1)
        d_kernel, d_bias = d_kernel + both.T @ gates, d_bias + gates.sum(0)
        d_x, d_h = np.split(gates @ kernel.T, 2, 1)
        d_c = d_c * f
        rows.append(d_x)
    return np.stack(rows[::-1]), d_kernel, d_bias


def by_hand(weights, inputs, targets, mask):
    """Return the loss of the whole batch, and {name: gradient}: in NumPy, without TensorFlow."""
    w = {name: array.astype("f8") for name, array in weights.items()}
    rows, layers = w["embedding"][inputs.T], {}
    for layer in (1, 2):
        layers[layer] = numpy_forward(rows, w[f"kernel_{layer}"], w[f"bias_{layer}"])
        rows = np.stack([kept[-1] for kept in layers[layer]])
    logits = rows @ w["softmax_kernel"] + w["softmax_bias"]
    chances = np.exp(logits - logits.max(2, keepdims=True))
    chances /= chances.sum(2, keepdims=True)
    right = *np.indices(targets.T.shape), targets.T
    share = mask.T / mask.sum()  # of each word in the loss
    loss = -(np.log(chances[right]) * share).sum()
    chances[right] -= 1
    errors = chances * share[..., None]
    found = {"softmax_kernel": np.einsum("trw,trv->wv", rows, errors)}
    found["softmax_bias"] = errors.sum((0, 1))
    errors = errors @ w["softmax_kernel"].T
    for layer in (2, 1):
        errors, *of_weights = numpy_backward(layers[layer], errors, w[f"kernel_{layer}"])
        found[f"kernel_{layer}"], found[f"bias_{layer}"] = of_weights
    found["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(found["embedding"], inputs.T, errors)
    return loss, found


def difference(ours, theirs):
    """Return the largest difference, relative to the largest value of `theirs`."""
    if np.shape(ours) != np.shape(theirs):
        return np.inf
    return float(np.max(abs(np.float64(ours) - theirs)) / np.max(abs(theirs)))


class Watched:
    """A graph of the technique; while one looks, its session computes more, and records."""

    def __init__(self, first, devices, batches):
        self.parts, self.devices, self.first = [], devices, first
        self.graph = build(self.tower, devices, batches, first["embedding"].dtype, LEARNING_RATE)
        self.session, self.run = self.graph.session, self.graph.session.run
        with self.session.graph.as_default():
            self.variables = {v.op.name.removeprefix("model/"): v for v in v1.trainable_variables()}
            pairs = [(g, v.op.name) for g, v in self.graph.pairs if g is not None]
            dense = {name.removeprefix("model/"): tf.convert_to_tensor(g) for g, name in pairs}
        self.more = {"gradients": dense, "parts": self.parts, "batch": self.graph.inputs}

    def tower(self, **part):
        self.parts.append(part)
        return language_model(self.first, **part)

    def run_and_record(self, fetches, *rest):
        """Do what session.run does, in more detail; `seen` has what was found out."""
        options = v1.RunOptions(trace_level="SOFTWARE_TRACE", output_partition_graphs=True)
        metadata, before = v1.RunMetadata(), self.run(self.variables)
        answers, more = self.run([fetches, self.more], None, options, metadata)
        more |= {"before": before, "after": self.run(self.variables)}
        more |= {"ran": what_ran(metadata), "crossed": what_crossed(metadata)}
        self.seen.append(SimpleNamespace(**more))
        return answers

    def look(self, steps):
        """Make so many steps; return their losses, and what was seen in each run of the session."""
        self.seen = []
        with patch.object(self.session, "run", self.run_and_record):
            return train(self.graph, steps), self.seen

    def close(self):
        """End the pipeline, by beginning it anew, and the session, while Python is still there."""
        nodes = self.session.graph.get_operations()
        self.run([node for node in nodes if node.type == "MakeIterator"])
        self.session.close()


def what_ran(metadata):
    """Return [(device, operation)]: what ran where in a recorded step."""
    parts = metadata.step_stats.dev_stats
    pairs = [(part.device.lower().rpartition("device:")[2], part.node_stats) for part in parts]
    return [(device, op.node_name) for device, ops in pairs for op in ops]


def what_crossed(metadata):
    """Return [(from, to, tensor, bytes)]: what one device sends to another in a recorded step."""
    sizes, found = collections.Counter(), []
    for op in itertools.chain(*(part.node_stats for part in metadata.step_stats.dev_stats)):
        for slot, kind in ((output.slot, output.tensor_description) for output in op.output):
            count = np.prod([dim.size for dim in kind.shape.dim], dtype=int)
            sizes[op.node_name, slot] += int(count) * tf.as_dtype(kind.dtype).size
    for node in itertools.chain(*(part.node for part in metadata.partition_graphs)):
        ends = [node.attr[f"{end}_device"].s.decode().lower() for end in ("send", "recv")]
        if node.op == "_Send" and ends[0] != ends[1]:
            name, _, slot = node.input[0].partition(":")
            places = (end.rpartition("device:")[2] for end in ends)
            found.append((*places, node.input[0], sizes[name, int(slot or 0)]))
    return sorted(found)


def misplaced(ran):
    """Return operations named after a tower, but for reads and look-ups, that ran elsewhere."""
    towers = [(re.search(r"tower_(\d+)/", name), device, name) for device, name in ran]
    away = [name for tower, device, name in towers if tower and tower[1] != device[4:]]
    return [name for name in away if not re.search("ReadVariableOp|/embedding_lookup", name)]


def wrong_in_parts(parts, batch, towers):
    """Return what is wrong with the rows that the towers were given: a list of sentences."""
    counts = [len(part["mask"]) for part in parts]
    most = -(-len(batch[0]) // towers)
    if counts != [most] * towers:
        return [f"the towers have {counts} rows of {len(batch[0])}, not {most} each"]
    joined = [np.concatenate([part[n] for part in parts]) for n in ("inputs", "targets", "mask")]
    same = all(np.array_equal(a[: len(b)], b) for a, b in zip(joined, batch, strict=True))
    extra = joined[2][len(batch[0]) :].any()
    return [] if same and not extra else ["the towers' rows are not those of the batch, once each"]


def wrong_in_places(watched, step):
    """Return what is wrong with the variables, and with what ran where: a list of sentences."""
    away, count, wanted = len(misplaced(step.ran)), len(watched.variables), len(watched.first)
    places = {variable.device.lower()[-5:] for variable in watched.variables.values()}
    types = [node.type for node in watched.session.graph.get_operations()]
    changes = sum(bool(re.match("Resource.*(Apply|Scatter)|Assign.*Var", kind)) for kind in types)
    updates = changes - count  # one node gives a variable its first value
    named = len({name for _, op in step.ran for name in re.findall(r"tower_\d+/", op)})
    towers = len(watched.devices)
    rules = {
        f"{count} variables, not {wanted}: the towers do not share them": count == wanted,
        f"{named} of {towers} towers have names": named == towers,
        f"{away} operations of a tower ran on another one's device": away == 0,
        f"the variables are on {sorted(places)}": places == {watched.devices[0]},
        f"{updates} nodes update {count} variables": updates == count,
        "no batch is made ahead": "PrefetchDataset" in types,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_bytes(watched, step):
    """Return which device sent another one too much or too little: a list of sentences."""
    (home, *others), first, wanted = watched.devices, watched.first, collections.Counter()
    sent = collections.Counter()
    for one, other, _, size in step.crossed:
        sent[one, other] += size
    for device, part in zip(others, step.parts[1:], strict=False):
        rows, time = part["mask"].shape
        # Both ways: six weights, rows of the embedding, four last states, and one number.
        both = sum(w.nbytes for name, w in first.items() if name != "embedding")
        both += rows * (time + 4) * first["embedding"][0].nbytes + first["embedding"].itemsize
        wanted[home, device] = both + part["targets"].nbytes + part["mask"].nbytes
        wanted[device, home] = both
    ways = [] if "gpu" in home else sorted(sent | wanted)  # beside GPUs, the host sends as well
    texts = {way: f"{' to '.join(way)}: {sent[way]:,} bytes, not {wanted[way]:,}" for way in ways}
    return [texts[way] for way in ways if sent[way] != wanted[way]]


def wrong_in_step(step, loss, first, batch, small):
    """Compare a step with NumPy on the whole batch; return (difference, a list of sentences)."""
    before = {name: step.before.get(name, w) for name, w in first.items()}
    right, gradients = by_hand(before, *batch)
    off_loss = difference(loss, right)
    off = [difference(step.gradients.get(name), g) for name, g in gradients.items()]
    moved = {name: before[name] - np.float64(step.after.get(name, np.nan)) for name in before}
    updates = [difference(moved[name] / LEARNING_RATE, g) for name, g in gradients.items()]
    rules = {
        "a step has another batch than the next one": all(map(np.array_equal, step.batch, batch)),
        f"a loss is {loss:.6g}, not {right:.6g}": off_loss < small,
        f"a gradient is off by {np.max(off):.1e}": np.max(off) < small,
        # The difference of two rounded weights has few digits left in float32.
        f"an update is off by {np.max(updates):.1e}": np.max(updates) < 50 * small,
    }
    worst = float(np.max([off_loss, *off]))  # np.max: nan if one of them is nan
    return worst, [sentence for sentence, holds in rules.items() if not holds]


def train_and_compare(watched, batches, small):
    """Train, and look at steps 1, 2 and the last; return what was found, as a namespace."""
    count, start = len(batches), time.perf_counter()
    losses, steps = watched.look(min(2, count))
    if count > 3:
        start = time.perf_counter()  # of the steps at which nobody looks
        losses += train(watched.graph, count - 3)
    words = sum(mask.sum() for *_, mask in batches[2 * (count > 3) : len(losses)])
    rate = words / (time.perf_counter() - start)
    if count > 2:
        loss, last = watched.look(1)
        losses, steps = losses + loss, steps + last
    numbers, off, wrong = [0, 1, count - 1] if count > 2 else range(count), [], []
    if (len(steps), len(losses)) != (len(numbers), count):
        wrong = [f"{len(numbers)} steps ran the session {len(steps)} times"]
    for number, step in zip(numbers, steps, strict=False):
        batch, loss = batches[number], losses[number]
        worst, sentences = wrong_in_step(step, loss, watched.first, batch, small)
        wrong += sentences + wrong_in_parts(step.parts, batch, len(watched.devices))
        off.append(worst)
    return SimpleNamespace(losses=losses, off=max(off), first=steps[0], wrong=wrong, rate=rate)


def wrong_in_learning(before, after, batches, first, last):
    """Return what is wrong with all steps together: a list of sentences."""
    short = len(batches) < 100 or len(batches[0][0]) < 32  # too short to have learned much
    fine = np.isfinite(last) and (short or last <= first / 2)
    moved = (after.get("embedding", before) != before).any(1)  # by the steps that read this word
    missing = sum(not moved[inputs].all() for inputs, *_ in batches)
    wrong = [f"the update of {missing} steps is missing"] if missing else []
    return wrong if fine else [*wrong, f"the perplexity went from {first:.0f} to {last:.0f} only"]


def save(path, losses, gradients, weights):
    """Write all that --save asks for, or nothing; return what is wrong: a list of sentences."""
    arrays = {f"gradient_{name}": value for name, value in gradients.items()}
    arrays |= {f"weight_{name}": value for name, value in weights.items()}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # in the same folder: same disk
    try:
        with unfinished.open("xb") as file:
            np.savez(file, loss=losses, **arrays)
        os.replace(unfinished, path)
    except OSError as error:  # what was there stays
        return [f"can't write {path}: {error.strerror}"]
    finally:
        unfinished.unlink(missing_ok=True)
    return []


def prepare(args):
    """Return the first weights, and a function that makes the batches."""
    sentences, _ = read_sentences(args.data_dir)
    numbers = number_words(sentences)
    weights = initial_weights(args.seed, len(numbers))
    weights = {name: value.astype(args.dtype) for name, value in weights.items()}
    return weights, functools.partial(make_batches, sentences, numbers, args.batch_size, args.seed)


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers for JSON."""
    import_tensorflow()
    weights, make = prepare(args)
    batches = list(itertools.islice(make(), args.steps))
    devices, small = device_names(args.nproc), 1e-5 if args.dtype == "float32" else 1e-10
    watched = Watched(weights, devices, make)
    found = train_and_compare(watched, batches, small)
    losses, step = found.losses, found.first
    wrong = found.wrong + wrong_in_places(watched, step) + wrong_in_bytes(watched, step)
    numbers = {"lesson": 7, "world_size": args.nproc, "backend": "graph", "device": devices[0][:3]}
    numbers |= {"variables": len(watched.variables), "misplaced": len(misplaced(step.ran))}
    numbers |= {"max_grad_diff": found.off, "tokens_per_second": float(found.rate)}
    numbers["rows_per_tower"] = [len(part["mask"]) for part in step.parts]
    numbers["ops_per_device"] = dict(sorted(collections.Counter(d for d, _ in step.ran).items()))
    first, last = np.exp([losses[0], np.mean(losses[-10:])], dtype="f8").tolist()
    numbers |= {"perplexity_first": first, "perplexity_last": last}
    after = watched.run(watched.variables)
    wrong += wrong_in_learning(weights["embedding"], after, batches, first, last)
    report(numbers, devices, args)
    wrong += save(args.save, losses, step.gradients, after) if args.save else []
    watched.close()
    claim = f"loss, gradients and updates of {args.nproc} towers"
    claim += f" are those of the whole batch (off by {found.off:.1e})" if not wrong else ": "
    return not wrong, claim + "; ".join(dict.fromkeys(wrong)), numbers


def report(numbers, devices, args):
    """Print what a reader wants to know."""
    rows = f"with {numbers['rows_per_tower'][0]} of {args.batch_size} sentences"
    print(f"{args.nproc} towers in one process on {' '.join(devices)}, each {rows};", end=" ")
    print(f"{numbers['variables']} variables")
    counts = ", ".join(f"{device} {count}" for device, count in numbers["ops_per_device"].items())
    print(f"operations in a step: {counts}; on another tower's device: {numbers['misplaced']}")
    first, last = numbers["perplexity_first"], numbers["perplexity_last"]
    span = f"the last {min(10, args.steps)} of {args.steps}"
    print(f"perplexity {first:.0f} in step 1, {last:.0f} in {span};", end=" ")
    print(f"{numbers['tokens_per_second']:.0f} tokens per second")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before TensorFlow is imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--nproc", type=whole(1, 64), default=2, help="towers, %(default)s")
    number, text = whole(1, 10**6), "of all towers together, %(default)s"
    parser.add_argument("--steps", type=number, default=100, help="%(default)s")
    parser.add_argument("--batch-size", type=number, default=32, help=text)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--data-dir", metavar="FOLDER", help="with ptb.{train,valid,test}.txt")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", type=Path, metavar="FILE", help="losses, gradients, weights")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("tensorflow") is None:
        parser.error("needs tensorflow: pip install tensorflow==2.21.0")
    if problem := wrong_in_files(args):
        parser.error(problem if len(problem) < 300 else f"{problem[:200]} ... {problem[-50:]}")
    return args


def wrong_in_files(args):
    """Return what is wrong with the text to read or the file to write, or None."""
    try:
        count = len(read_sentences(args.data_dir)[0])
    except (ValueError, OSError) as error:
        return f"argument --data-dir: {error}"
    if args.batch_size > count:
        return f"argument --batch-size: there are only {count} sentences"
    try:
        taken = args.save and args.save.is_dir()
    except OSError:  # the name is too long
        taken = True
    if taken or (args.save and not os.access(args.save.absolute().parent, os.W_OK)):
        return f"argument --save: can't write {args.save}"
    return None


# --- The frame: the same in every lesson ---


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            limits = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{limits}, not {text[:40]!r}")
        return int(text)

    return number


def conclude(passed, claim, numbers, as_json):
    """Let rank 0 print the verdict as the last line, or before the JSON; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("PASS" if passed else "FAIL", claim)
        if as_json:
            print(json.dumps(numbers | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse_args()
    sys.exit(conclude(*main(args), args.json))
