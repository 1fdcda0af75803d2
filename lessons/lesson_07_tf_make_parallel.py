"""Lesson 07: how did TensorFlow's make_parallel train one model on several devices?

In DDP each process has its own parameters. Here one process builds one graph, and
make_parallel builds the model in it once per device: a tower. All towers share one set
of variables. In each step a tower gets a copy of them (of the embedding, the rows of its
words) and its part of the batch, and sends its gradients back. This is the "tower mode"
of article D: 2018, tf.compat.v1.

Run it:      bash scripts/lesson_07.sh --nproc 2
PTB's text:  bash scripts/lesson_07.sh --data-dir FOLDER

Output to expect on a CPU:

    2 towers in one process on cpu:0 cpu:1; variables: 7, with one tower: 7
    operations in a step: cpu:0 ..., cpu:1 ...; on another tower's device: 0
    perplexity ... in step 1, ... in the last 10 of 100; ... tokens per second
    PASS loss and gradients of 2 towers are one device's (largest relative difference ...)
"""

import argparse
import collections
import functools
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class Arguments(argparse.ArgumentParser):
    """The flags of all lessons. A bad value: one line on stderr, from rank 0, and exit code 2."""

    def __init__(self, text, **defaults):
        super().__init__(description=text, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, value in {**defaults, "seed": 0}.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
        self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        limits = {"nproc": (1, 64), "seed": (0, 2**32 - 1)}
        for name in ("nproc", "steps", "batch_size", "seed"):
            low, high = limits.get(name, (1, 10**6))
            if not low <= getattr(args, name, low) <= high:
                self.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" * (os.environ.get("RANK", "0") == "0"))

    def exit(self, status=0, message=""):
        if len(message) > 300:  # it repeats a long value
            message = f"{message[:200]} ... {message[-50:]}"
        super().exit(status, message)


# --- The common problem: exactly the same in lessons 07 and 08; only Python and NumPy ---


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
    `time` is that of the longest sentence of the batch; the mask is 1 at real words.
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


# --- New in this lesson ---

LEARNING_RATE = 2.0


def import_tensorflow():
    """Import TensorFlow for the functions below, and return it. Its log does not reach stderr."""
    global tf, v1
    os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with open(os.devnull, "w") as nowhere:
        screen = os.dup(2)  # C++ code writes to file descriptor 2, before it obeys the log level
        os.dup2(nowhere.fileno(), 2)
        try:
            tf = importlib.import_module("tensorflow")
            tf.config.list_physical_devices()
        finally:
            os.dup2(screen, 2)
            os.close(screen)
    v1 = tf.compat.v1
    tf.get_logger().setLevel("ERROR")
    v1.disable_control_flow_v2()  # loops as in 2018
    return tf


def device_names(count):
    """Return `count` names: GPUs where there are enough, else virtual CPU devices (claim D6)."""
    kind = "gpu" if len(tf.config.list_physical_devices("GPU")) >= count else "cpu"
    return [f"{kind}:{number}" for number in range(count)]


def sum_of_losses(weights, inputs, targets, mask):
    """Return the sum of the losses of all real tokens, a scalar; the inputs are (rows, time).
    Both need not be known when the graph is built: the loop over time is in the graph."""
    # The look-up runs where the embedding is: the tower is sent the rows of its words, no more.
    words = tf.nn.embedding_lookup(weights["embedding"], inputs)  # (rows, time, width)
    words = tf.transpose(words, [1, 0, 2])  # (time, rows, width)
    # The other weights as this tower reads them: all of each is sent to its device in each step.
    # Between two virtual CPU devices TensorFlow passes on the same memory.
    weights = {name: tf.identity(w) for name, w in weights.items() if name != "embedding"}

    def one_word(time, states, outputs):
        output, new = words[time], []
        for layer, (c, h) in enumerate(states, 1):  # layer 2 reads the output of layer 1
            z = tf.concat([output, h], 1) @ weights[f"kernel_{layer}"] + weights[f"bias_{layer}"]
            i, f, g, o = tf.split(z, 4, axis=1)
            c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
            output = tf.sigmoid(o) * tf.tanh(c)
            new.append((c, output))
        return time + 1, new, outputs.write(time, output)

    zeros, steps = tf.zeros_like(words[0]), tf.shape(words)[0]
    start = 0, [(zeros, zeros), (zeros, zeros)], tf.TensorArray(words.dtype, steps)
    outputs = tf.while_loop(lambda time, *_: time < steps, one_word, start)[2].stack()
    logits = tf.einsum("trw,wv->trv", outputs, weights["softmax_kernel"]) + weights["softmax_bias"]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.transpose(targets), logits)
    return tf.reduce_sum(losses * tf.transpose(mask))


def make_parallel(fn, num_devices, **inputs):
    """Return the sum of `fn(**part)`, a scalar, over one tower per device (claim D7).

    Where `num_devices` does not divide the rows of the inputs (rows, time), rows of zeros follow:
    their mask is 0, so they add nothing. Variables that `fn` gets by name are shared by all towers.
    """
    sums, parts = [], {}
    for name, value in inputs.items():
        value = tf.pad(value, [[0, -tf.shape(value)[0] % num_devices], [0, 0]])
        parts[name] = tf.split(value, num_devices)
    for number, device in enumerate(device_names(num_devices)):
        scope = v1.variable_scope("model", reuse=v1.AUTO_REUSE)
        with tf.device(device), tf.name_scope(f"tower_{number}"), scope:
            sums.append(fn(**{name: part[number] for name, part in parts.items()}))
    return tf.add_n(sums)  # one scalar from each tower


def build(weights, batches, num_devices, colocate=True):
    """Return a session, and the tensors to run in it, as a namespace (claims D9, D10).
    `weights`: the first values, {name: array}. `batches()` yields (inputs, targets, mask)."""

    def tower(**inputs):
        variables = {k: v1.get_variable(k, None, v.dtype, v) for k, v in weights.items()}
        return sum_of_losses(variables, **inputs)

    with tf.Graph().as_default():
        kinds = "int32", "int32", weights["embedding"].dtype
        signature = tuple(tf.TensorSpec([None, None], kind) for kind in kinds)
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        iterator = v1.data.make_initializable_iterator(data.prefetch(2))  # made while a step runs
        inputs, targets, mask = iterator.get_next()
        total = make_parallel(tower, num_devices, inputs=inputs, targets=targets, mask=mask)
        tokens = tf.reduce_sum(mask)
        optimizer = v1.train.GradientDescentOptimizer(LEARNING_RATE)
        # With `colocate`, each gradient operation runs where its forward operation ran.
        pairs = optimizer.compute_gradients(total / tokens, colocate_gradients_with_ops=colocate)
        graph = SimpleNamespace(inputs=(inputs, targets, mask), tokens=tokens, loss=total / tokens)
        graph.train = optimizer.apply_gradients(pairs)  # one update, where the variables are
        graph.variables = {v.op.name.removeprefix("model/"): v for _, v in pairs}
        dense = (tf.convert_to_tensor(gradient) for gradient, _ in pairs)
        graph.gradients = dict(zip(graph.variables, dense, strict=True))
        count = {"CPU": num_devices, "GPU": num_devices * ("gpu:0" in device_names(num_devices))}
        graph.session = v1.Session(config=v1.ConfigProto(device_count=count))
        graph.session.run([v1.global_variables_initializer(), iterator.initializer])
    return graph


def trace(graph, batch):
    """Feed one batch by hand. Return loss, {name: gradient}, and what ran where (claim D9):
    [(device, operation, start in ms, duration in ms)]."""
    metadata, options = v1.RunMetadata(), v1.RunOptions(trace_level=v1.RunOptions.SOFTWARE_TRACE)
    feed, ran = dict(zip(graph.inputs, batch, strict=True)), []
    results = graph.session.run([graph.loss, graph.gradients], feed, options, metadata)
    for part in metadata.step_stats.dev_stats:
        device = part.device.lower().rpartition("device:")[2]
        for op in part.node_stats:
            times = op.all_start_micros / 1000, op.all_end_rel_micros / 1000
            ran.append((device, op.node_name, *times))
    return *results, ran


def misplaced(ran):
    """Return a tower's operations that ran on another one's device.

    Left out is what belongs to a variable's device: reads and look-ups, and a look-up's gradient.
    """
    towers = [(re.search(r"tower_(\d+)/", name), device, name) for device, name, *_ in ran]
    away = [name for tower, device, name in towers if tower and tower[1] != device[4:]]
    return [name for name in away if not re.search("ReadVariableOp|/embedding_lookup", name)]


def save_whole(path, **arrays):
    """Write `arrays` to `path`, an .npz file: all of it, or (OSError) what was there stays."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # in the same folder: same disk
    try:
        with unfinished.open("xb") as file:
            np.savez(file, **arrays)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=100, batch_size=32)
    parser.add_argument("--data-dir", metavar="FOLDER", help="with ptb.{train,valid,test}.txt")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", type=Path, metavar="FILE", help="losses, gradients, weights")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("tensorflow") is None:
        parser.error("needs tensorflow: pip install tensorflow==2.21.0")
    try:
        sentences, _ = read_sentences(args.data_dir)
    except (ValueError, OSError) as error:
        parser.error(f"argument --data-dir: {error}")
    if args.batch_size > len(sentences):
        parser.error(f"argument --batch-size: there are only {len(sentences)} sentences")
    try:
        taken = args.save and args.save.is_dir()
    except OSError:  # the name is too long
        taken = True
    if taken or (args.save and not os.access(args.save.absolute().parent, os.W_OK)):
        parser.error(f"argument --save: can't write {args.save}")
    try:
        import_tensorflow()
    except Exception as error:
        broken = f"tensorflow is broken, its import ends with {type(error).__name__}"
        parser.error(f"{broken}: pip install --force-reinstall tensorflow==2.21.0")

    numbers = number_words(sentences)
    weights = initial_weights(args.seed, len(numbers))
    weights = {name: value.astype(args.dtype) for name, value in weights.items()}
    batches = functools.partial(make_batches, sentences, numbers, args.batch_size, args.seed)
    one, many = build(weights, batches, 1), build(weights, batches, args.nproc)
    whole_loss, whole, _ = trace(one, next(batches()))
    first_loss, gradients, ran = trace(many, next(batches()))
    diffs = [abs(gradients[name] - whole[name]).max() / abs(whole[name]).max() for name in whole]
    diff = float(max(*diffs, abs(first_loss - whole_loss) / whole_loss))

    start = time.perf_counter()
    steps = [many.session.run([many.loss, many.tokens, many.train]) for _ in range(args.steps)]
    losses, tokens, _ = map(list, zip(*steps, strict=True))
    rate = float(sum(tokens)) / (time.perf_counter() - start)
    first, last = np.exp([losses[0], np.mean(losses[-10:])], dtype="f8").tolist()
    ops = dict(sorted(collections.Counter(device for device, *_ in ran).items()))
    devices, away = device_names(args.nproc), len(misplaced(ran))
    # A run that is shorter than the default one need not have learned much.
    learned = args.steps < 100 or args.batch_size < 32 or last <= first / 2
    same = diff < (1e-5 if args.dtype == "float32" else 1e-10)
    shared = len(many.variables) == len(one.variables) and set(devices) <= set(ops)
    passed = bool(same and shared and away == 0 and learned and np.isfinite(last))
    print(f"{args.nproc} towers in one process on {' '.join(devices)}; ", end="")
    print(f"variables: {len(many.variables)}, with one tower: {len(one.variables)}")
    counts = ", ".join(f"{device} {number}" for device, number in ops.items())
    print(f"operations in a step: {counts}; on another tower's device: {away}")
    span = f"the last {len(losses[-10:])} of {args.steps}"
    print(f"perplexity {first:.0f} in step 1, {last:.0f} in {span}; {rate:.0f} tokens per second")
    verdict = f"{'PASS' if passed else 'FAIL'} loss and gradients of {args.nproc} towers"
    print(f"{verdict} are one device's (largest relative difference {diff:.1e})")
    if args.json:
        result = {"lesson": 7, "world_size": args.nproc, "backend": "graph"}
        result |= {"device": devices[0][:3], "passed": passed, "variables": len(many.variables)}
        result |= {"ops_per_device": ops, "misplaced": away, "max_grad_diff": diff}
        result |= {"perplexity_first": first, "perplexity_last": last, "tokens_per_second": rate}
        print(json.dumps(result))
    if args.save:  # last: a full disk shall not cost what was measured
        arrays = {f"gradient_{name}": value for name, value in gradients.items()}
        arrays |= {f"weight_{k}": v for k, v in many.session.run(many.variables).items()}
        try:
            save_whole(args.save, loss=losses, **arrays)
        except OSError as error:
            sys.stdout.flush()
            sys.exit(f"can't write {args.save}: {error.strerror}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
