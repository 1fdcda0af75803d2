"""Lesson 08: what did Paddle's parallel_do do in each step, and what has replaced it?

parallel_do (article D): one process, a list of places. In each step it splits the batch, copies
the weights to each place, runs the model there, and adds up the gradients. It is gone. Today:
paddle.DataParallel, a process per place, over gloo. Both must find one place's gradient, and
TensorFlow must find the same loss and gradient, if lesson 07's script is in this folder.

Run it:     bash scripts/lesson_08.sh --nproc 2
PTB's text: bash scripts/lesson_08.sh --data-dir FOLDER

Output to expect on a CPU:

    perplexity ... first, ... in the last 10 steps
    TensorFlow's loss and gradient: within ...
    PASS 2 places, 2 workers: gradients off by ...
"""

import argparse
import collections
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np

LEARNING_RATE = 2.0  # that of lesson 07


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


def forget_other_jobs():
    """Remove what a launcher or scheduler has told this process: our workers are another job.

    Where PADDLE_TRAINERS_NUM is not 1, Paddle starts no worker; and workers read MASTER_PORT.
    """
    for name in [*os.environ]:
        if name.startswith("PADDLE_") or name in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def import_paddle():
    """Import paddle, quietly. Not above: --help would have to wait for it."""
    global paddle
    warnings.simplefilter("ignore")  # Paddle's warnings are for those who build it
    logging.disable(logging.INFO)  # and so is the list of ports
    os.environ["PYTHONWARNINGS"] = "ignore"  # the same in the workers
    paddle = importlib.import_module("paddle")
    paddle.disable_signal_handler()  # else a page about C++ when someone ends this process


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


def get_places(count):
    """Return `count` places: GPUs if Paddle sees that many (claim D11), else all are the CPU."""
    gpus = paddle.device.cuda.device_count()
    return [paddle.CUDAPlace(k) if gpus >= count else paddle.CPUPlace() for k in range(count)]


def parallel_do(fn, places, weights, **inputs):
    """Run fn(weights, **part) on each place. Return what fn returned, merged, (rows, ...), and
    {name: gradient of its sum}. Arrays in, arrays out: the CPU is the master (claim D5)."""
    outputs, gradients = [], dict.fromkeys(weights, 0)
    parts = {name: np.array_split(array, len(places)) for name, array in inputs.items()}
    for index, place in enumerate(places):  # in turn; Fluid had a thread for each place
        paddle.set_device(place)
        part = {name: paddle.to_tensor(rows[index]) for name, rows in parts.items()}  # read_input
        copies = {n: paddle.to_tensor(w, stop_gradient=False) for n, w in weights.items()}  # sent
        output = fn(copies, **part)
        output.sum().backward()
        outputs.append(output.numpy())
        gradients = {n: gradients[n] + copy.grad.numpy() for n, copy in copies.items()}
    return np.concatenate(outputs), gradients  # write_output: the rows in their old order


def make_problem(args):
    """Return the first weights, {name: array}, and the batches: those of lesson 07."""
    sentences, _ = read_sentences(args.data_dir)
    numbers = number_words(sentences)
    weights = {n: w.astype(args.dtype) for n, w in initial_weights(args.seed, len(numbers)).items()}
    return weights, make_batches(sentences, numbers, args.batch_size, args.seed)


def train(args, places):
    """Return loss (steps,), gradient_<name> of step 1, last weight_<name>; words_per_second."""
    weights, batches = make_problem(args)
    losses, words, start = [], 0, time.perf_counter()
    for inputs, targets, mask in (next(batches) for _ in range(args.steps)):
        share = (mask / mask.sum()).astype(args.dtype)  # of all words of the batch, not of a part
        rows = {"inputs": inputs, "targets": targets, "share": share}
        output, gradients = parallel_do(language_model, places, weights, **rows)
        if not losses:
            found = {f"gradient_{name}": gradient for name, gradient in gradients.items()}
        losses.append(output.sum())
        weights = {name: w - LEARNING_RATE * gradients[name] for name, w in weights.items()}
        words += mask.sum()
    found |= {f"weight_{name}": w for name, w in weights.items()} | {"loss": np.array(losses)}
    return found | {"words_per_second": words / (time.perf_counter() - start)}


def prepare_worker():
    """End this process when its parent is gone, however that ended; silence it; import paddle."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)  # what Paddle's C++ code reports
    import_paddle()


def worker(args, folder, own_words):
    """Be one rank of paddle.DataParallel: leave rank_<rank>.npz with what `train` returns."""
    prepare_worker()
    rank, losses = int(os.environ["PADDLE_TRAINER_ID"]), []
    try:
        paddle.distributed.init_parallel_env()
        (first, batches), layer = make_problem(args), paddle.nn.Layer()
        for name, w in first.items():  # the other ranks start with zeros
            fill = paddle.nn.initializer.Assign(w if rank == 0 else 0 * w)
            layer.add_parameter(name, layer.create_parameter(w.shape, fill, args.dtype))
        weights = dict(layer.named_parameters())
        layer.forward = lambda *rows: language_model(weights, *rows)
        replica = paddle.DataParallel(layer)  # sends rank 0's weights to all, once
        optimizer = paddle.optimizer.SGD(LEARNING_RATE, layer.parameters())
        for batch in (next(batches) for _ in range(args.steps)):
            words, targets, mask = (np.array_split(array, args.nproc)[rank] for array in batch)
            share = mask / (mask.sum() if own_words else batch[2].sum() / args.nproc)
            loss = replica(*map(paddle.to_tensor, (words, targets, share.astype(args.dtype)))).sum()
            loss.backward()  # all-reduce: the sum over the ranks, divided by their number
            if not losses:
                found = {f"gradient_{name}": w.grad.numpy() for name, w in weights.items()}
            losses.append(loss.item() / args.nproc)
            optimizer.step()
            optimizer.clear_grad()
        found |= {f"weight_{name}": w.numpy() for name, w in weights.items()}
        np.savez(f"{folder}/rank_{rank}.npz", **found, loss=losses)
    except Exception:
        time.sleep(1)  # the others wait for this rank; when it leaves, they fail as well
        raise


def wait_for(job):
    """Return when all workers have ended well. SystemExit names the rank that failed."""
    try:
        while not any(codes := [p.exitcode for p in job.processes]) and None in codes:
            time.sleep(0.05)
        if any(codes):
            time.sleep(0.3)  # a rank that loses a neighbour aborts (-6), maybe before it ends
            codes = [process.exitcode for process in job.processes]
            rank = min(range(len(codes)), key=lambda r: (codes[r] in (None, 0), codes[r] == -6))
            told = job.error_queues[rank]
            why = f"exit code {codes[rank]}" if told.empty() else told.get().splitlines()[-1]
            sys.exit(f"rank {rank} failed: {why}")
    finally:
        for process in job.processes:
            process.kill()


def run_workers(args, own_words=False):
    """Train with paddle.DataParallel in args.nproc processes; return what each found, by rank.
    `own_words`: each rank divides by the number of its own words, which is wrong."""
    backend = "nccl" if get_places(args.nproc)[0].is_gpu_place() else "gloo"
    options = {"join": False, "daemon": True, "backend": backend}  # spawn looks for free ports
    with tempfile.TemporaryDirectory() as folder:
        job = paddle.distributed.spawn(worker, (args, folder, own_words), args.nproc, **options)
        wait_for(job)
        found = [dict(np.load(f"{folder}/rank_{rank}.npz")) for rank in range(args.nproc)]
    loss = sum(rank["loss"] for rank in found)  # each rank knows its own rows' part of the loss
    return [rank | {"loss": loss, "own_loss": rank["loss"]} for rank in found]


def ask_tensorflow(args):
    """Run lesson 07 with the same flags in its own process; return its arrays, or None."""
    script = Path(__file__).with_name("lesson_07_tf_make_parallel.py")
    if not script.is_file() or importlib.util.find_spec("tensorflow") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        flags = {**vars(args), "json": None, "save": Path(folder, "tensorflow.npz")}
        flags = [f"--{n.replace('_', '-')}={v}" for n, v in flags.items() if v is not None]
        ended = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True)
        if not Path(folder, "tensorflow.npz").exists():
            said = ended.stderr.strip().rpartition("\n")[2]
            sys.exit("lesson 07 failed: " + said.removeprefix(f"{script.name}: error: "))
        return dict(np.load(f"{folder}/tensorflow.npz"))


def difference(one, other):
    """Return the largest relative difference of the first loss and of a weight's gradient."""
    pairs = [(one["loss"][0], other["loss"][0])]
    pairs += [(one[name], other[name]) for name in other if name.startswith("gradient_")]
    return float(np.max([np.max(abs(a - b)) / np.max(abs(b)) for a, b in pairs]))


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=100, batch_size=32)
    parser.add_argument("--data-dir", metavar="FOLDER", help="with ptb.{train,valid,test}.txt")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args(argv)
    try:
        sentences = len(read_sentences(args.data_dir)[0])
    except (ValueError, OSError) as error:
        parser.error(f"argument --data-dir: {error}")
    if not args.nproc <= args.batch_size <= sentences:
        parser.error(f"argument --batch-size: must be from --nproc, {args.nproc}, to {sentences}")
    if importlib.util.find_spec("paddle") is None:
        parser.error("needs paddlepaddle: pip install paddlepaddle==3.3.1")
    forget_other_jobs()
    try:
        import_paddle()
    except Exception as error:
        broken = f"paddlepaddle is broken, its import ends with {type(error).__name__}"
        parser.error(f"{broken}: pip install --force-reinstall paddlepaddle==3.3.1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave each `with`: remove its folder
    n, gpu = args.nproc, get_places(args.nproc)[0].is_gpu_place()
    theirs = ask_tensorflow(args)  # first: if it fails, no work of ours is lost
    ours = train(args, get_places(n))
    one = train(argparse.Namespace(**{**vars(args), "steps": 1}), get_places(1))
    workers = run_workers(args)
    diff = float(np.max([difference(found, one) for found in (ours, *workers)]))
    apart = difference(ours, theirs) if theirs else None
    small, equal = (1e-5, 1e-5) if args.dtype == "float32" else (1e-12, 1e-9)
    first, last = np.exp([ours["loss"][0], ours["loss"][-10:].mean()], dtype="f8").tolist()
    learned = args.steps < 100 or args.batch_size < 32 or last <= first / 2  # not in a short run
    passed = bool(learned and last < np.inf and diff < small and (not theirs or apart < equal))
    passed &= all((w[n] == workers[0][n]).all() for w in workers for n in w if "weight_" in n)
    result = {"lesson": 8, "world_size": n, "passed": passed, "device": "gpu" if gpu else "cpu"}
    result |= {"backend": "nccl" if gpu else "gloo", "max_grad_diff": diff}
    result |= {"max_diff_to_tensorflow": apart, "tokens_per_second": ours.pop("words_per_second")}
    result |= {"perplexity_first": first, "perplexity_last": last}
    result |= {"loss": ours["loss"].tolist(), "loss_tensorflow": theirs and theirs["loss"].tolist()}
    print(f"perplexity {first:.0f} first, {last:.0f} in the last", len(ours["loss"][-10:]), "steps")
    missing = "not compared: that needs tensorflow, and lesson 07's script in this folder"
    print("TensorFlow's loss and gradient:", f"within {apart:.1e}" if theirs else missing)
    print("PASS" if passed else "FAIL", f"{n} places, {n} workers: gradients off by {diff:.1e}")
    if args.json:
        print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
