"""Lesson 07: how did make_parallel train one TensorFlow model on several devices?

In DDP each process has its own parameters. Here one process builds one graph, and make_parallel
builds the model in it once per device: a tower. All towers share one set of variables. In each
step a tower is sent them (of the embedding, the rows of its words), its targets and its mask, and
sends its gradients back. This is article D's way, of 2018; it runs today as tf.compat.v1.

Run it:      bash scripts/lesson_07.sh --nproc 2
PTB's text:  bash scripts/lesson_07.sh --data-dir FOLDER
Or alone:    python lessons/lesson_07_tf_make_parallel.py --nproc 2

The launcher watches from outside; the last three lines are its own.
Output to expect on a CPU:

    2 towers in one process, on cpu:0 cpu:1
    perplexity ... in step 1, ... in the last 10 of 100
    each tower has 16 of 32 sentences; 7 variables; ... tokens per second
    operations in a step: cpu:0 ..., cpu:1 ...; on another tower's device: 0
    PASS loss, gradients and updates of 2 towers are those of the whole batch (off by ...)
"""

import argparse
import collections
import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tensorflow as tf

# --- The technique ---

v1 = tf.compat.v1  # TensorFlow as it was in version 1
v1.disable_control_flow_v2()  # loops as in 2018


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
        # One CPU can play several devices.
        count = {"CPU": len(devices), "GPU": len(devices) * ("gpu" in devices[0])}
        session = v1.Session(config=v1.ConfigProto(device_count=count))
        session.run([v1.global_variables_initializer(), iterator.initializer])
    begin = iterator.initializer
    return SimpleNamespace(session=session, begin=begin, loss=loss, update=update)


def train(graph, steps):
    """Make so many steps; return the loss of each, as it was before its update."""
    return [graph.session.run([graph.loss, graph.update])[0] for _ in range(steps)]


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


# --- The example ---

LEARNING_RATE = 2.0


def read_sentences(data_dir=None):
    """Return the sentences to train on, each a list of words (claim D12).

    Python's own documentation, which comes with Python; with `data_dir`, PTB's text from there.
    """
    if data_dir is not None:
        text = Path(data_dir, "ptb.train.txt").read_text(encoding="utf-8")
        return [line.split() for line in text.splitlines() if line.strip()]
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    parts = re.split(r"[.!?]\s|\n\s*\n", re.sub(r"\d+", " N ", text))
    sentences = [re.findall(r"[a-z]+|N", part) for part in parts]
    return [words for words in sentences if 4 <= len(words) <= 30]


def number_words(sentences, size=2000):
    """Return {word: number} of the most frequent words; 0 ends a sentence, 1 is any other word."""
    counts = collections.Counter(word for words in sentences for word in words)
    counts.pop("<unk>", None)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: number for number, word in enumerate(["<eos>", "<unk>", *frequent])}


def make_batches(sentences, numbers, batch_size, seed):
    """Yield (inputs, targets, mask) without end: integers, integers, floats, (batch_size, time).

    Targets are the inputs, one word later. A sentence is moved as one, so pairs stay together.
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


def prepare(args):
    """Return the first weights, and a function that makes the batches."""
    sentences = read_sentences(args.data_dir)
    numbers = number_words(sentences)
    weights = {n: w.astype(args.dtype) for n, w in initial_weights(args.seed, len(numbers)).items()}
    return weights, functools.partial(make_batches, sentences, numbers, args.batch_size, args.seed)


def main(args):
    """Train the language model on the devices, and say what came of it."""
    devices = device_names(args.nproc)
    print(f"{args.nproc} towers in one process, on {' '.join(devices)}")
    weights, batches = prepare(args)
    tower = functools.partial(language_model, weights)
    graph = build(tower, devices, batches, args.dtype, LEARNING_RATE)
    losses = train(graph, args.steps)
    first, last = np.exp([losses[0], np.mean(losses[-10:])])
    span = f"the last {min(10, args.steps)} of {args.steps}"
    print(f"perplexity {first:.0f} in step 1, {last:.0f} in {span}")
    graph.session.run(graph.begin)  # ends the thread that makes batches
    graph.session.close()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nproc", type=int, default=2, help="towers, %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="of all towers, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--data-dir", metavar="FOLDER", help="with PTB's ptb.train.txt")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
