"""Lesson 08: What did Paddle's parallel_do do in each step, and what has replaced it?

parallel_do: one process; in each step it splits the batch, copies the weights to each place, runs
the model there, and adds up the gradients. It is gone. Today paddle.DataParallel has a process for
each place: a worker. Both must train as one place does.

Run it:      bash scripts/lesson_08.sh --nproc 2
PTB's text:  bash scripts/lesson_08.sh --data-dir FOLDER
Or alone:    python lessons/lesson_08_paddle_parallel_do.py --nproc 2

The last line is the launcher's: it compares with what NumPy computes for the whole batch.
Output to expect on a CPU:

    2 workers: perplexity ... in step 1, ... in the last 10 of 20
    2 places, all cpu: perplexity ... in step 1, ... in the last 10 of 20
    PASS 2 places and 2 workers train as one place does (gradients off by ...)
"""

import argparse
import collections
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import paddle

# --- The technique ---


def parallel_do(body, places, weights, *inputs):
    """Call body(weights, *part) on each place; return (outputs, merged; gradients of their sum).

    As Fluid's ParallelDo: split the inputs, copy the weights, run the body, merge what it returns,
    add up the gradients. But Fluid merged before backward(), so a mean could follow; here the loss
    is the outputs' sum. Arrays come in, arrays go out: the CPU's memory is the master.
    """
    outputs, gradients = [], dict.fromkeys(weights, 0)
    parts = [np.array_split(array, len(places)) for array in inputs]
    for number, place in enumerate(places):  # in turn; Fluid had a thread for each place
        paddle.set_device(place)
        mine = [paddle.to_tensor(part[number]) for part in parts]
        copies = {name: paddle.to_tensor(w, stop_gradient=False) for name, w in weights.items()}
        output = body(copies, *mine)
        output.sum().backward()
        outputs.append(output.numpy())
        gradients = {name: gradients[name] + copy.grad.numpy() for name, copy in copies.items()}
    return np.concatenate(outputs), gradients


def train_on_places(body, places, weights, batches, rate):
    """Train with parallel_do in this one process; return the last weights, and all losses."""
    losses = []
    for batch in batches:
        outputs, gradients = parallel_do(body, places, weights, *batch)
        weights = {name: w - rate * gradients[name] for name, w in weights.items()}
        losses.append(outputs.sum())
    return weights, losses


def train(make_layer, batches, rate):
    """Train as one worker that spawn or launch has started; return the layer, and all losses."""
    paddle.distributed.init_parallel_env()
    rank, world_size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    layer, losses = make_layer(), []
    replica = paddle.DataParallel(layer)  # sends rank 0's weights to all, once
    optimizer = paddle.optimizer.SGD(rate, layer.parameters())
    for batch in batches:
        mine = [paddle.to_tensor(np.array_split(array, world_size)[rank]) for array in batch]
        loss = replica(*mine).sum() * world_size  # because DataParallel divides by it:
        loss.backward()  # all-reduces; leaves the mean of the ranks' gradients
        optimizer.step()  # each rank makes the same update
        optimizer.clear_grad()
        losses.append(loss.item())  # of this rank's rows; the mean over the ranks is the batch's
    return layer, losses


def start_workers(function, nproc, *given):
    """Call function(*given) in `nproc` processes; return when all of them have ended."""
    on_gpus = get_places(nproc)[0].is_gpu_place()
    forks = sys.platform == "linux" and not on_gpus  # they have Paddle, but can't use CUDA
    options = {"backend": "nccl" if on_gpus else "gloo"}
    options["start_method"] = "fork" if forks else "spawn"
    paddle.distributed.spawn(function, given, nproc, **options)


def get_places(count):
    """Return `count` places: GPUs if Paddle sees that many, else all of them are the CPU."""
    gpus = paddle.device.cuda.device_count()
    return [paddle.CUDAPlace(k) if gpus >= count else paddle.CPUPlace() for k in range(count)]


def language_model(weights, inputs, targets, share, layers=(1, 2)):
    """Return the rows' parts of the loss, (rows,). `share` (rows, time): what each word counts."""
    words = paddle.unstack(paddle.nn.functional.embedding(inputs, weights["embedding"]), axis=1)
    for layer in layers:
        h = c = paddle.zeros_like(words[0])
        for step, x in enumerate(words):
            z = paddle.concat([x, h], 1) @ weights[f"kernel_{layer}"] + weights[f"bias_{layer}"]
            i, f, g, o = paddle.split(z, 4, axis=1)
            c = (f + 1).sigmoid() * c + i.sigmoid() * g.tanh()
            words[step] = h = o.sigmoid() * c.tanh()
    logits = paddle.stack(words, 1) @ weights["softmax_kernel"] + weights["softmax_bias"]
    losses = paddle.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses.squeeze(-1) * share).sum(1)


class LanguageModel(paddle.nn.Layer):
    """The same model as a layer, which keeps its weights itself."""

    def __init__(self, weights):
        super().__init__()
        for name, w in weights.items():
            fill = paddle.nn.initializer.Assign(w)
            self.add_parameter(name, self.create_parameter(w.shape, fill, str(w.dtype)))

    def forward(self, *rows):
        return language_model(dict(self.named_parameters()), *rows)


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

LEARNING_RATE = 2.0  # that of lesson 07


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
    """Return the first weights, and lesson 07's batches, with each word's share of the loss."""
    sentences = read_sentences(args.data_dir)
    numbers = number_words(sentences)
    weights = {n: w.astype(args.dtype) for n, w in initial_weights(args.seed, len(numbers)).items()}
    batches, found = make_batches(sentences, numbers, args.batch_size, args.seed), []
    for inputs, targets, mask in (next(batches) for _ in range(args.steps)):
        found.append((inputs, targets, (mask / mask.sum()).astype(args.dtype)))
    return weights, found


def work(args):
    """Train as one worker; rank 0 says what came of it."""
    weights, batches = prepare(args)
    _, losses = train(lambda: LanguageModel(weights), batches, LEARNING_RATE)
    losses = paddle.to_tensor(losses, "float64") / args.nproc
    if args.nproc > 1:
        paddle.distributed.all_reduce(losses)
    if paddle.distributed.get_rank() == 0:
        tell(f"{args.nproc} workers", losses.numpy())


def tell(who, losses):
    """Print the perplexity at the beginning and at the end."""
    first, last = np.exp([losses[0], np.mean(losses[-10:])])
    span = f"the last {min(10, len(losses))} of {len(losses)}"
    print(f"{who}: perplexity {first:.0f} in step 1, {last:.0f} in {span}")


def main(args):
    """Train the language model in both ways."""
    start_workers(work, args.nproc, args)  # first: forks of a process that has not computed yet
    (weights, batches), places = prepare(args), get_places(args.nproc)
    _, losses = train_on_places(language_model, places, weights, batches, LEARNING_RATE)
    device = "gpu" if places[0].is_gpu_place() else "cpu"
    tell(f"{args.nproc} places, all {device}", losses)


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nproc", type=int, default=2, help="places, workers, %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="of all places, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--data-dir", metavar="FOLDER", help="with PTB's ptb.train.txt")
    kinds = {"choices": ("float32", "float64"), "default": "float64"}
    parser.add_argument("--dtype", **kinds, help="%(default)s: rounding then hides no mistake")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
