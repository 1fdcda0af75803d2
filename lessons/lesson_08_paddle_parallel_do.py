"""Lesson 08: What did Paddle's parallel_do do in each step, and what has replaced it?

parallel_do: one process; in each step it splits the batch, copies the weights to each place, runs
the model there, and adds up the gradients. It is gone. Today paddle.DataParallel has a process for
each place. Both must train as one place does, and as TensorFlow, if lesson 07's script is here.
Run it: bash scripts/lesson_08.sh --nproc 2 [--data-dir FOLDER, with PTB's text]
Output to expect on a CPU:

    perplexity ... first, ... in the last 10 steps
    TensorFlow's loss and gradient: within ...
    PASS 2 places (all cpu), 2 workers: they train as one place does (gradients off by ...)
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np

warnings.filterwarnings("ignore", "No ccache found")  # Paddle says it to all who import it
try:
    import paddle
except ImportError as error:
    if error.name != "paddle":
        print("paddlepaddle is broken: pip install paddlepaddle==3.3.1", file=sys.stderr)
    raise error if error.name == "paddle" else SystemExit(2) from None

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
    """Train with parallel_do in this one process; return the last weights."""
    for batch in batches:
        _, gradients = parallel_do(body, places, weights, *batch)
        weights = {name: w - rate * gradients[name] for name, w in weights.items()}
    return weights


def train(make_layer, batches, rate):
    """Train as one of the processes that spawn or launch has started; return the layer."""
    paddle.distributed.init_parallel_env()
    rank, world_size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    layer = make_layer()
    replica = paddle.DataParallel(layer)  # sends rank 0's weights to all, once
    optimizer = paddle.optimizer.SGD(rate, layer.parameters())
    for batch in batches:
        mine = [paddle.to_tensor(np.array_split(array, world_size)[rank]) for array in batch]
        loss = replica(*mine).sum() * world_size  # because DataParallel divides by it:
        loss.backward()  # all-reduces; leaves the mean of the ranks' gradients
        optimizer.step()  # each rank makes the same update
        optimizer.clear_grad()
    return layer


# --- The proof ---

# The problem: exactly the same in lessons 07 and 08; only Python and NumPy.


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


LEARNING_RATE = 2.0  # that of lesson 07


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


def make_problem(args):
    """Return {name: first weights}, and lesson 07's batches, with each word's share of the loss."""
    sentences = read_sentences(args.data_dir)
    numbers = number_words(sentences)
    weights = {n: w.astype(args.dtype) for n, w in initial_weights(args.seed, len(numbers)).items()}
    batches, found = make_batches(sentences, numbers, args.batch_size, args.seed), []
    for inputs, targets, mask in (next(batches) for _ in range(args.steps)):
        found.append((inputs, targets, (mask / mask.sum()).astype(args.dtype)))
    return weights, found


def get_places(count):
    """Return `count` places: GPUs if Paddle sees that many, else all of them are the CPU."""
    gpus = paddle.device.cuda.device_count()
    return [paddle.CUDAPlace(k) if gpus >= count else paddle.CPUPlace() for k in range(count)]


def arrays_of(kind, tensors):
    """Return {kind_name: array} of a layer's or a place's tensors."""
    return {f"{kind}_{name}": np.array(t) for name, t in tensors.items() if t is not None}


def train_alone(args):
    """Train on one place, all rows; return gradients of step 1, losses, outputs, last weights."""
    paddle.set_device(get_places(1)[0])
    weights, batches = make_problem(args)
    found = {"loss": [], "outputs": []}
    for batch in batches:
        tensors = {n: paddle.to_tensor(w, stop_gradient=False) for n, w in weights.items()}
        parts = language_model(tensors, *map(paddle.to_tensor, batch))
        parts.sum().backward()
        slopes = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
        found = arrays_of("gradient", slopes) | found  # those of step 1 stay
        found["loss"].append(float(parts.sum()))
        found["outputs"].append(parts.numpy())
        weights = {name: w - LEARNING_RATE * slopes[name] for name, w in weights.items()}
    return found | arrays_of("weight", weights)


def watch_places(args, places):
    """Train with parallel_do; return what is seen of it from outside."""
    (weights, batches), start = make_problem(args), time.perf_counter()
    found = {"loss": [], "outputs": [], "rows": [], "places": [], "now": None}
    made, technique, set_device, to_tensor = {}, parallel_do, paddle.set_device, paddle.to_tensor

    def at(place):
        found["now"] = place
        return set_device(place)

    def to(data, dtype=None, place=None, stop_gradient=True):
        tensor = to_tensor(data, dtype, place, stop_gradient)
        made[tensor.data_ptr()] = place or found["now"]  # until a place has been given it
        return tensor

    def body(copies, *rows):
        found["rows"].append(rows[0].numpy())
        found["places"].append([made.pop(t.data_ptr(), None) for t in (*copies.values(), *rows)])
        return language_model(copies, *rows)

    def do(*given):
        output, gradients = technique(*given)
        found.update(arrays_of("gradient", gradients) | found)  # those of step 1 stay
        found["outputs"].append(output)
        found["loss"].append(float(output.sum()))
        return output, gradients

    with patch.dict(globals(), parallel_do=do), patch.multiple(paddle, set_device=at, to_tensor=to):
        last = train_on_places(body, places, weights, batches, LEARNING_RATE)
    return found | arrays_of("weight", last) | {"seconds": time.perf_counter() - start}


def watch_rank(args):
    """Train as one rank; return what is seen of it from outside. Only rank 0 has the weights."""
    (weights, batches), found = make_problem(args), {"loss": [], "rows": [], "rates": []}
    model, update = language_model, paddle.optimizer.SGD.step

    def make_layer():
        first = paddle.distributed.get_rank() == 0
        found["layer"] = LanguageModel({n: w if first else 0 * w for n, w in weights.items()})
        return found["layer"]

    def watched(weights, *rows):
        output = model(weights, *rows)
        found["rows"].append(rows[0].numpy())
        found["loss"].append(float(output.sum()))
        return output

    def step(optimizer):
        slopes = arrays_of("gradient", {n: w.grad for n, w in found["layer"].named_parameters()})
        found.update(slopes | found | {"rates": [*found["rates"], optimizer.get_lr()]})
        update(optimizer)

    watch_model = patch.dict(globals(), language_model=watched)
    with watch_model, patch.object(paddle.optimizer.SGD, "step", step), handed_over() as sent:
        train(make_layer, batches, LEARNING_RATE)
    found["sent"] = sum(sent)
    if paddle.distributed.is_initialized():  # not if it is alone
        paddle.distributed.barrier()  # rank 0 has the store in which all meet: it must not leave
    return arrays_of("weight", dict(found.pop("layer").named_parameters())) | found


@contextlib.contextmanager
def handed_over():
    """Yield a list that gets the bytes of a ProcessGroup's collectives, if Python calls them.

    So DataParallel's broadcasts are in it, but not its all-reduces, which C++ calls in backward().
    """
    sent, kind = [], paddle.base.core.ProcessGroup

    def watched(method):
        def call(*given):
            tensors = filter(paddle.is_tensor, paddle.utils.flatten(given))
            sent.extend(tensor.size * tensor.element_size() for tensor in tensors)
            return method(*given)

        return call

    methods = {name: watched(getattr(kind, name)) for name in dir(kind) if name[0] != "_"}
    with patch.multiple(kind, **methods):
        yield sent


def watch_ranks(args):
    """Train with DataParallel; return what is seen of each rank, and all rows' loss."""
    ranks = on_ranks(watch_rank, args.nproc, args)
    losses = [sum(parts) for parts in zip(*(rank["loss"] for rank in ranks), strict=False)]
    return [rank | {"own_loss": rank["loss"], "loss": losses} for rank in ranks]


def be_a_rank(function, args, folder):
    """Be a new process: call function(*args), and leave what it returns in `folder`."""
    end_with_parent()
    os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)  # what Paddle's C++ code reports
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (a notebook has others)
    try:
        found = pickle.dumps(function(*args))
        Path(folder, os.environ["PADDLE_TRAINER_ID"]).write_bytes(found)
    except Exception:
        time.sleep(1)  # the others wait for this rank; when it leaves, they fail as well
        raise


def end_with_parent():
    """Let this process end when the one that has started it does.

    On Linux the kernel sees to it (when the thread ends that has started us, which waits for us).
    Elsewhere a thread does, but not while C++ code holds Python's lock.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it has ended meanwhile
            os._exit(1)
    else:
        threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()


def wait_for(job):
    """Return when all ranks have ended well. SystemExit names the rank that failed."""
    try:
        while not any(codes := [p.exitcode for p in job.processes]) and None in codes:
            time.sleep(0.02)
        if any(codes):  # a rank that loses a neighbour aborts (-6), maybe before that one is gone
            end = time.monotonic() + 10
            while None in codes and set(codes) <= {None, 0, -6} and time.monotonic() < end:
                time.sleep(0.02)
                codes = [process.exitcode for process in job.processes]
            rank = min(range(len(codes)), key=lambda r: (codes[r] in (None, 0), codes[r] == -6))
            told = job.error_queues[rank]
            why = f"exit code {codes[rank]}" if told.empty() else told.get().strip()
            sys.exit(f"rank {rank} failed: {why.splitlines()[-1]}")
    finally:
        for process in job.processes:
            process.kill()


def on_ranks(function, nproc, *args):
    """Call function(*args) in `nproc` processes; return what each has returned, by rank."""
    logging.disable(logging.INFO)  # the ports that spawn has found
    warnings.filterwarnings("ignore", ".*trained under CPUONLY mode")  # by gloo: we know
    for name in [*os.environ]:  # else spawn starts nothing: we would be a part of that other job
        if name.startswith("PADDLE_") or name in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    backend = "nccl" if get_places(nproc)[0].is_gpu_place() else "gloo"
    fork = backend == "gloo" and sys.platform == "linux"  # it has Paddle; CUDA can't be used in it
    options = {"backend": backend, "start_method": "fork" if fork else "spawn"}
    with tempfile.TemporaryDirectory() as folder:
        given = function, args, folder
        job = paddle.distributed.spawn(be_a_rank, given, nproc, False, True, **options)
        wait_for(job)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(nproc)]


@contextlib.contextmanager
def tensorflow_beside(args):
    """Run lesson 07 in a process of its own; yield what waits for its arrays, or returns None."""
    script = Path(__file__).with_name("lesson_07_tf_make_parallel.py")
    if not script.is_file() or importlib.util.find_spec("tensorflow") is None:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tensorflow.npz")
        flags = {**vars(args), "json": None, "save": path}
        flags = [f"--{n.replace('_', '-')}={v}" for n, v in flags.items() if v is not None]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, script, *flags], **pipes) as process:
            try:
                yield lambda: read_arrays(path, process.communicate()[1])
            finally:
                process.kill()


def read_arrays(path, stderr):
    """Return the arrays of a file that lesson 07 has written; SystemExit says why it has not."""
    if not path.exists():
        said = stderr.strip().rpartition("\n")[2]
        sys.exit("lesson 07 failed: " + said.partition(": error: ")[2] or said)
    return dict(np.load(path))


def difference(one, other, *starts):
    """Return the largest relative difference of the first losses, and of arrays with such names."""
    pairs = [(one.get(n, np.nan), array) for n, array in other.items() if n.startswith(starts)]
    pairs.append((one["loss"][0], other["loss"][0]))
    return float(np.max([np.max(abs(a - b)) / np.max(abs(b)) for a, b in pairs]))


def parts_are_wrong(seen, batches):
    """Return whether the parts of each step are not its rows, or differ by as many as they are."""
    whole = [sorted(row.tolist() for part in parts for row in part) for parts in seen]
    uneven = any(max(map(len, parts)) - min(map(len, parts)) >= len(parts) for parts in seen)
    return uneven or whole != [sorted(inputs.tolist()) for inputs, *_ in batches]


def wrong_on_places(seen, places, alone, batches, limits):
    """Return what is wrong with the training on places: a list of sentences."""
    off, grown = differences(seen, alone)
    rows = [seen["rows"][n : n + len(places)] for n in range(0, len(seen["rows"]), len(places))]
    pairs = zip(seen["places"], places * len(rows), strict=False)
    own = all(home is place for homes, place in pairs for home in homes)
    merged, right = (np.concatenate(found["outputs"]) for found in (seen, alone))
    same = merged.shape == right.shape and np.allclose(merged, right, rtol=limits[1], atol=0)
    rules = {
        f"a gradient of the places is off by {off:.2g}": off < limits[0],
        f"losses or last weights of the places are off by {grown:.2g}": grown < limits[1],
        "the places do not share the rows evenly": not parts_are_wrong(rows, batches),
        "a place has rows or weights of another one": own,
        "the merged outputs are not those of one place": same,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_on_ranks(ranks, alone, batches, limits):
    """Return what is wrong with the training in processes: a list of sentences."""
    off, grown = np.max([differences(rank, alone) for rank in ranks], axis=0)
    rows = [*zip(*(rank["rows"] for rank in ranks), strict=False)]
    names = [name for name in alone if name.startswith("weight_")]
    same = all((rank[name] == ranks[0][name]).all() for rank in ranks for name in names)
    rates, nbytes = [LEARNING_RATE] * len(batches), sum(alone[name].nbytes for name in names)
    more = max(rank["sent"] for rank in ranks) - nbytes  # 1 %: the loss may be sent, to print it
    sent = f"besides the weights, once, and backward()'s gradients, collectives get {more:,} bytes"
    updates = f"{len(batches)} updates with SGD and the rate {LEARNING_RATE}"
    rules = {
        f"not each worker makes {updates}": all(rank["rates"] == rates for rank in ranks),
        sent: more <= nbytes / 100,
        f"a gradient of the workers is off by {off:.2g}": off < limits[0],
        f"losses or last weights of the workers are off by {grown:.2g}": grown < limits[1],
        "the workers do not share the rows evenly": not parts_are_wrong(rows, batches),
        "the workers' last weights differ": same,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def differences(found, alone):
    """Return how far step 1 is from one place's, and how far all losses and last weights are."""
    if len(found["loss"]) != len(alone["loss"]):
        return np.nan, np.nan
    losses = np.max(abs(np.array(found["loss"]) / alone["loss"] - 1))
    return difference(found, alone, "gradient_"), max(difference(found, alone, "weight_"), losses)


def wrong_in_losses(args, losses, words, batches):
    """Return what is wrong with the loss of one place: a list of sentences."""
    first, last = losses[0], np.mean(losses[-10:])
    short = args.steps < 20 or args.batch_size < 32  # too short to learn
    rules = {
        "not all words count equally": all(np.ptp(b[2][b[2] > 0]) == 0 for b in batches),
        f"the first loss, {first:.3g}, is not log {words}": abs(first - np.log(words)) < 0.05,
        "it has not learned": short or last < first - 0.5,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_tensorflow(theirs, alone, limits):
    """Return in what TensorFlow differs, if it is there: a list of sentences."""
    if theirs is None:
        return []
    apart, grown = differences(alone, theirs)
    rules = {
        f"TensorFlow's gradient is off by {apart:.2g}": apart < 1000 * limits[0],
        f"TensorFlow's losses are off by {grown:.2g}": grown < limits[1],
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers."""
    paddle.disable_signal_handler()  # else a page about C++ when someone ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave each `with`
    places, (weights, batches) = get_places(args.nproc), make_problem(args)
    limits = (1e-12, 1e-9) if args.dtype == "float64" else (1e-5, 1e-2)  # rounding: step 1, later
    with tensorflow_beside(args) as tensorflow:
        ranks = watch_ranks(args)  # first: forks of a process that has not computed yet
        seen, alone = watch_places(args, places), train_alone(args)
        theirs = tensorflow()
    wrong = wrong_on_places(seen, places, alone, batches, limits)
    wrong += wrong_on_ranks(ranks, alone, batches, limits)
    wrong += wrong_in_losses(args, alone["loss"], len(weights["embedding"]), batches)
    wrong += wrong_in_tensorflow(theirs, alone, limits)
    backend, device = ("nccl", "gpu") if places[0].is_gpu_place() else ("gloo", "cpu")
    numbers = {"lesson": 8, "world_size": args.nproc, "backend": backend, "device": device}
    diff = np.max([difference(found, alone, "gradient_") for found in (seen, *ranks)]).item()
    numbers |= {"max_grad_diff": diff} | numbers_of(seen, theirs, alone, batches)
    report(numbers)
    right = [f"they train as one place does (gradients off by {diff:.1e})"]
    claim = f"{args.nproc} places (all {device}), {args.nproc} workers: {'; '.join(wrong or right)}"
    return not wrong, claim, numbers


def numbers_of(seen, theirs, alone, batches):
    """Return what is measured of the training on places, and how far TensorFlow is away."""
    first, last = np.exp([seen["loss"][0], np.mean(seen["loss"][-10:])]).tolist()
    words = sum((share > 0).sum() for *_, share in batches)
    numbers = {"perplexity_first": first, "perplexity_last": last, "loss": seen["loss"]}
    numbers["tokens_per_second"] = float(words / seen["seconds"])
    numbers["max_diff_to_tensorflow"] = theirs and difference(alone, theirs, "gradient_")
    return numbers | {"loss_tensorflow": theirs and theirs["loss"].tolist()}


def report(numbers):
    """Print what a reader wants to know."""
    first, last, steps = numbers["perplexity_first"], numbers["perplexity_last"], numbers["loss"]
    print(f"perplexity {first:.0f} first, {last:.0f} in the last {len(steps[-10:])} steps")
    apart = numbers["max_diff_to_tensorflow"]
    missing = "not compared: that needs tensorflow, and lesson 07's script in this folder"
    print("TensorFlow's loss and gradient:", missing if apart is None else f"within {apart:.1e}")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before anything is started."""
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, **options)
    few, many = whole(1, 64), whole(1, 10**6)
    parser.add_argument("--nproc", type=few, default=2, help="places, workers, %(default)s")
    parser.add_argument("--steps", type=many, default=20, help="%(default)s")
    parser.add_argument("--batch-size", type=many, default=32, help="of all places, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--data-dir", metavar="FOLDER", help="with PTB's ptb.train.txt")
    kinds = {"choices": ("float32", "float64"), "default": "float64"}
    parser.add_argument("--dtype", **kinds, help="%(default)s: rounding then hides no mistake")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    try:
        sentences = len(read_sentences(args.data_dir))
    except (UnicodeError, OSError) as error:
        parser.error(f"argument --data-dir: {error}")
    if not args.nproc <= args.batch_size <= sentences:
        parser.error(f"argument --batch-size: must be from --nproc, {args.nproc}, to {sentences}")
    return args


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
