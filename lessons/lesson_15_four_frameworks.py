"""Lesson 15: do the same six steps give the same numbers in TensorFlow, Paddle, PyTorch and JAX?

One language model, the same first weights, the same batches, N workers, written in six ways. A
worker is a device (TensorFlow, JAX) or a process (Paddle, PyTorch). Each framework runs in a
process of its own. Each way is compared with its own framework on one device, and with the others:
loss, gradients, weights; also what crosses between workers, and the lines that one adds.
A framework that is not installed is left out. All of it computes on the CPU.
Run it: bash scripts/lesson_15.sh --nproc 2

Output to expect on a CPU:

    2 workers, 16 and 16 of 32 sentences in a step; 49,140 weights, 393,120 bytes
    tensorflow towers    loss 6.2141 to 4.8746; ... bytes in a step; ... lines more
    tensorflow mirrored  loss 6.2141 to 4.8746; ... bytes in a step; ... lines more
    paddle               loss 6.2141 to 4.8746; bytes are not counted; ... lines more
    pytorch              loss 6.2141 to 4.8746; ... bytes in a step; ... lines more
    jax shard_map        loss 6.2141 to 4.8746; ... bytes in a step; ... lines more
    jax jit              loss 6.2141 to 4.8746; ... bytes in a step; ... lines more
    PASS 4 frameworks, 6 ways, 2 workers: gradients differ by ... at most
"""

import argparse
import ast
import collections
import difflib
import importlib
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

# --- The technique ---
# Six ways to take the same six steps: 1 copy the weights, 2 split the batch, 3 forward,
# 4 backward, 5 merge the gradients, 6 update. A batch is arrays (rows, ...); the loss of some rows
# is their part of the whole batch's, so that the parts add up to it, however unequal they are.


def tensorflow_towers(loss_of, weights, devices, rate):
    """Return step(*batch), and the variables. One device holds them and updates, all compute."""
    import tensorflow as tf

    with tf.device(devices[0]):
        variables = {name: tf.Variable(w) for name, w in weights.items()}

    @tf.function
    def step(*batch):
        losses, gradients = [], []
        for number, device in enumerate(devices):
            mine = [array[number :: len(devices)] for array in batch]  # 2
            with tf.device(device):
                copy = {name: tf.identity(v) for name, v in variables.items()}  # 1: in each step
                with tf.GradientTape() as tape:
                    tape.watch(copy)
                    loss = loss_of(copy, *mine)  # 3
                gradients.append(tape.gradient(loss, copy))  # 4
                losses.append(loss)
        with tf.device(devices[0]):
            for name, variable in variables.items():
                merged = tf.add_n([tf.convert_to_tensor(found[name]) for found in gradients])  # 5
                variable.assign_sub(rate * merged)  # 6: once
            return tf.add_n(losses)

    return step, variables


def tensorflow_mirrored(loss_of, weights, devices, rate):
    """Return step(*batch), and the variables. Each device has its own copy of them."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():  # 1: once, a copy on each device
        added = {"aggregation": tf.VariableAggregation.SUM}  # what an assignment is to do
        variables = {name: tf.Variable(w, **added) for name, w in weights.items()}

    def on_each_device(*batch):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = [array[number :: len(devices)] for array in batch]  # 2
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *mine)  # 3
        gradients = tape.gradient(loss, variables)  # 4
        for name, variable in variables.items():
            gradient = tf.convert_to_tensor(gradients[name])
            variable.assign_sub(rate * gradient)  # 5: the SUM over all devices, 6: on each
        return loss

    @tf.function
    def step(*batch):
        return strategy.reduce("SUM", strategy.run(on_each_device, batch), axis=None)

    return step, variables


def paddle_data_parallel(layer, rate):
    """Return step(*batch), in each of the processes that spawn or launch has started."""
    import paddle

    rank, world_size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    replica = paddle.DataParallel(layer)  # 1: once, rank 0's go to all
    optimizer = paddle.optimizer.SGD(rate, layer.parameters())

    def step(*batch):
        mine = [paddle.to_tensor(array[rank::world_size]) for array in batch]  # 2
        loss = replica(*mine)  # 3
        (loss * world_size).backward()  # 4, 5: an all-reduce leaves the mean on each rank
        optimizer.step()  # 6: on each rank
        optimizer.clear_grad()
        return loss

    return step


def pytorch_ddp(model, rate):
    """Return step(*batch), in each of the processes that torchrun or spawn has started."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)  # 1: once, rank 0's go to all
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(*batch):
        mine = [torch.from_numpy(array[rank::world_size]) for array in batch]  # 2
        loss = replica(*mine)  # 3
        (loss * world_size).backward()  # 4, 5: an all-reduce leaves the mean on each rank
        optimizer.step()  # 6: on each rank
        optimizer.zero_grad()
        return loss.item()

    return step


def jax_shard_map(loss_of, mesh, rate):
    """Return step(weights, *batch). The rows must be a multiple of the mesh's devices."""
    import jax
    from jax.sharding import PartitionSpec as P

    def on_each_device(weights, *mine):
        own = jax.lax.pcast(weights, "data", to="varying")  # else grad adds up over the devices
        found = jax.value_and_grad(loss_of)(own, *mine)  # 3, 4
        loss, gradients = jax.lax.psum(found, "data")  # 5: a sum, as all of these are parts
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), loss  # 6: on each

    specs = {"in_specs": (P(), P("data"), P("data"), P("data")), "out_specs": P()}  # 1, 2
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, **specs))


def jax_jit(loss_of, mesh, rate):
    """Return step(weights, *batch), the program of one device: the compiler divides it."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def step(weights, *batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)  # 3, 4, 5
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), loss  # 6

    all_of_it, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    places = {"in_shardings": (all_of_it, rows, rows, rows), "out_shardings": all_of_it}  # 1, 2
    return jax.jit(step, **places)


# --- The proof ---

# The same program on one device: what the gradients must be, and what the lines are counted from.


def tensorflow_alone(loss_of, weights, rate):
    """Return step(*batch), and the variables."""
    import tensorflow as tf

    variables = {name: tf.Variable(w) for name, w in weights.items()}

    @tf.function
    def step(*batch):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *batch)
        gradients = tape.gradient(loss, variables)
        for name, variable in variables.items():
            gradient = tf.convert_to_tensor(gradients[name])
            variable.assign_sub(rate * gradient)
        return loss

    return step, variables


def paddle_alone(layer, rate):
    """Return step(*batch)."""
    import paddle

    optimizer = paddle.optimizer.SGD(rate, layer.parameters())

    def step(*batch):
        batch = [paddle.to_tensor(array) for array in batch]
        loss = layer(*batch)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    return step


def pytorch_alone(model, rate):
    """Return step(*batch)."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(*batch):
        batch = [torch.from_numpy(array) for array in batch]
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def jax_alone(loss_of, rate):
    """Return step(weights, *batch)."""
    import jax

    def step(weights, *batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), loss

    return jax.jit(step)


# The problem: that of lessons 07 and 08, but smaller; only Python and NumPy.


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


LONGEST, WORDS, WIDTH, RATE = 6, 500, 32, 2.0


def short_sentences():
    """Return sentences of Python's own documentation, each a list of at most LONGEST words."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    parts = re.split(r"[.!?]\s|\n\s*\n", re.sub(r"\d+", " N ", text))
    sentences = [re.findall(r"[a-z]+|N", part) for part in parts]
    return [words for words in sentences if 4 <= len(words) <= LONGEST]


def make_problem(args):
    """Return the first weights, {name: array}, and the batches of all steps, all as wide.

    In place of the mask a batch has each word's share of the loss: JAX compiles a step anew for
    each new shape, so short rows are filled up to the longest sentence that there is.
    """
    sentences = short_sentences()
    numbers = number_words(sentences, WORDS)
    batches, found = make_batches(sentences, numbers, args.batch_size, args.seed), []
    for _ in range(args.steps):
        inputs, targets, mask = next(batches)
        wider = [(0, 0), (0, LONGEST + 1 - inputs.shape[1])]
        found.append([np.pad(a, wider) for a in (inputs, targets.astype("i8"), mask / mask.sum())])
    return initial_weights(args.seed, len(numbers), WIDTH), found


def save_problem(folder, args):
    """Write the weights and the batches to a file, which all frameworks read."""
    weights, batches = make_problem(args)
    inputs, targets, share = map(np.stack, zip(*batches, strict=True))
    arrays = {f"weight_{name}": w for name, w in weights.items()}
    arrays |= {"inputs": inputs, "targets": targets, "share": share}
    np.savez(Path(folder, "problem.npz"), **arrays)


def load_problem(folder):
    """Return what make_problem returned."""
    with np.load(Path(folder, "problem.npz")) as file:
        batches = [*zip(file["inputs"], file["targets"], file["share"], strict=True)]
        return {n.removeprefix("weight_"): file[n] for n in file if n[:7] == "weight_"}, batches


def make_loss(ops, **others):
    """Return loss_of(weights, inputs, targets, share), and a list in which it notes its rows.

    The functions are those of a framework's module `ops`, and `others`. The loss is the sum over
    all words of a word's loss times its share. An LSTM step is the five lines in the middle.
    """
    names, seen = ("concat", "stack", "tanh", "sigmoid", "sum"), []
    ops = SimpleNamespace(**{n: getattr(ops, n) for n in names if n not in others}, **others)

    def loss_of(weights, inputs, targets, share):
        seen.append(inputs.shape[0])
        words = ops.look_up(weights["embedding"], inputs)
        words = [words[:, time] for time in range(LONGEST + 1)]
        for layer in (1, 2):
            h = c = words[0] * 0
            for time, x in enumerate(words):
                z = ops.concat([x, h], 1) @ weights[f"kernel_{layer}"] + weights[f"bias_{layer}"]
                i, f, g, o = (z[:, n * WIDTH : (n + 1) * WIDTH] for n in range(4))
                c = ops.sigmoid(f + 1) * c + ops.sigmoid(i) * ops.tanh(g)
                words[time] = h = ops.sigmoid(o) * ops.tanh(c)
        scores = ops.stack(words, 1) @ weights["softmax_kernel"] + weights["softmax_bias"]
        return ops.sum(ops.losses(scores, targets) * share)

    return loss_of, seen


def follow(step, read, batches):
    """Make a step with each batch; return losses, and weights after the first and the last.

    `read` returns the weights of each worker that has some: a list of {name: array}.
    """
    losses, after_one = [], None
    for batch in batches:
        losses.append(float(step(*batch)))
        after_one = after_one or read()[0]
    return {"loss": losses, "after_one": after_one, "weights": read()}


# Each framework has a process of its own, in which one of these functions trains in all its ways.


def watch_tensorflow(nproc, folder):
    """Train with TensorFlow on virtual devices of the CPU; return {way: what was seen}."""
    tf, (weights, batches) = start_tensorflow(), load_problem(folder)
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
    others = {"look_up": tf.gather, "losses": lambda scores, right: cross_entropy(right, scores)}
    loss_of, seen = make_loss(tf, sum=tf.reduce_sum, **others)

    def train(make, *devices):
        seen.clear()
        step, variables = make(loss_of, weights, *devices, RATE)

        def read():  # a mirrored variable has a value for each device
            every = {name: getattr(v, "values", [v]) for name, v in variables.items()}
            count = len(every["embedding"])
            return [{name: v[n].numpy() for name, v in every.items()} for n in range(count)]

        loss, sent, busy = record_first_step(step, batches[0])
        found = {"after_one": read()[0], "rows": seen[:busy], "bytes": sent}
        rest = follow(step, read, batches[1:] if devices else [])
        return rest | found | {"loss": [float(loss), *rest["loss"]]}

    alone = train(tensorflow_alone)["after_one"]
    devices, found = [f"cpu:{number}" for number in range(nproc)], {}
    for way in ways_of("tensorflow"):
        found[way] = train(WAYS[way], devices) | {"alone": alone}
    return found


def start_tensorflow():
    """Import TensorFlow, and let the CPU play four devices."""
    sys.modules.setdefault("jax", None)  # else its converter for phones imports it, too
    import tensorflow as tf

    four, cpu = [tf.config.LogicalDeviceConfiguration()] * 4, tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(cpu[0]) is None:
        tf.config.set_logical_device_configuration(cpu[0], four)
    return tf


def watch_paddle(nproc, folder):
    """Train with Paddle, in processes that are forks of this one."""
    import paddle

    for name in [*os.environ]:  # else spawn starts nothing: we would be a part of that other job
        if name.startswith("PADDLE_") or name in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    options = {"nprocs": nproc, "backend": "gloo", "start_method": START}
    paddle.distributed.spawn(be_paddle_rank, (folder,), **options)
    return {"paddle": of_all_ranks(nproc, folder)}


def be_paddle_rank(folder):
    """Be one of Paddle's workers."""
    import paddle
    import paddle.nn.functional as F

    end_with_parent()
    paddle.distributed.init_parallel_env()
    rank, (weights, batches) = paddle.distributed.get_rank(), load_problem(folder)
    loss_of, seen = make_loss(
        paddle,
        look_up=lambda table, words: F.embedding(words, table),
        sigmoid=F.sigmoid,
        losses=lambda scores, right: F.cross_entropy(scores, right, reduction="none").squeeze(-1),
    )

    class Layer(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            for name, w in weights.items():
                fill = paddle.nn.initializer.Assign(w * (1 + rank))  # but rank 0's for all
                self.add_parameter(name, self.create_parameter(w.shape, fill, str(w.dtype)))

        def forward(self, *rows):
            return loss_of(dict(self.named_parameters()), *rows)

    _, found = train_rank("paddle", Layer, paddle.optimizer.SGD, batches, seen)
    found["bytes"] = None  # nothing tells
    Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(found))
    if paddle.distributed.is_initialized():  # not if it is alone
        paddle.distributed.barrier()  # rank 0 has the store in which all meet: it must not leave


def watch_pytorch(nproc, folder):
    """Train with PyTorch, in processes that are forks of this one."""
    import torch
    import torch.distributed.nn
    import torch.multiprocessing as mp

    torch.optim.SGD([torch.zeros(1)])  # imports much, which the forks then have
    torch.set_num_threads(1)  # in each of them
    mp.start_processes(be_pytorch_rank, (nproc, folder), nproc, start_method=START)
    return {"pytorch": of_all_ranks(nproc, folder)}


def be_pytorch_rank(rank, nproc, folder):
    """Be one of PyTorch's workers. They meet in a file."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    end_with_parent()
    store = dist.FileStore(str(Path(folder, "meeting_place")), nproc)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nproc)
    weights, batches = load_problem(folder)
    loss_of, seen = make_loss(
        torch,
        look_up=lambda table, words: F.embedding(words, table),
        losses=lambda scores, right: F.cross_entropy(scores.mT, right, reduction="none"),
    )

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, w in weights.items():  # of rank 0; DDP must copy them to the others
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(w * (1 + rank))))

        def forward(self, *rows):
            return loss_of(dict(self.named_parameters()), *rows)

    step, found = train_rank("pytorch", Model, torch.optim.SGD, batches, seen)
    found["bytes"] = bytes_of_collectives(step, batches[0]) if nproc > 1 else 0
    Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()  # nobody leaves before all are through
    os._exit(0)  # to take DDP to pieces after its group can block: here nothing is


def train_rank(way, new_model, sgd, batches, seen):
    """Train as one worker of Paddle or PyTorch; return its step, and what was seen."""
    model, updates, update = new_model(), [], sgd.step
    sgd.step = lambda *given: updates.append(1) or update(*given)

    def read():
        return [{name: np.array(w.detach().numpy()) for name, w in model.named_parameters()}]

    step = WAYS[way](model, RATE)
    found = follow(step, read, batches) | {"rows": seen[:1], "updates": [len(updates)]}
    model = new_model()
    alone = globals()[f"{way}_alone"](model, RATE)
    return step, found | {"alone": follow(alone, read, batches[:1])["after_one"]}


def of_all_ranks(nproc, folder):
    """Return what was seen on all ranks: the parts of the loss, added up, and all weights."""
    ranks = [pickle.loads(Path(folder, f"rank_{rank}").read_bytes()) for rank in range(nproc)]
    found = {"loss": [sum(parts) for parts in zip(*(rank["loss"] for rank in ranks), strict=True)]}
    for name in ("rows", "weights", "updates"):
        found[name] = [one for rank in ranks for one in rank[name]]
    return ranks[0] | found


def watch_jax(nproc, folder):
    """Train with JAX on virtual devices of the CPU; return {way: what was seen}."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_X64": "1"}
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    ops = {"sigmoid": jax.nn.sigmoid, "concat": jax.numpy.concatenate, "losses": jax_losses}
    loss_of, _ = make_loss(jax.numpy, look_up=lambda table, words: table[words], **ops)
    devices, (weights, batches) = jax.devices()[:nproc], load_problem(folder)
    batches = [[np.pad(a, [(0, -len(a) % nproc), (0, 0)]) for a in batch] for batch in batches]
    mesh = jax.make_mesh((nproc,), ("data",), (AxisType.Auto,), devices=devices)
    alone, _ = jax_alone(loss_of, RATE)(weights, *batches[0])
    found = {}
    for way in ways_of("jax"):
        now = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
        compiled = WAYS[way](loss_of, mesh, RATE).lower(now, *batches[0]).compile()
        arrays = zip(compiled.input_shardings[0][1:], batches[0], strict=True)
        rows = max(places.shard_shape(array.shape)[0] for places, array in arrays)
        sent = bytes_in_hlo(compiled.as_text()) if nproc > 1 else 0
        more = {"rows": [rows] * nproc, "bytes": sent, "alone": jax.tree.map(np.array, alone)}
        found[way] = follow_jax(compiled, now, batches, nproc) | more
    return found


def jax_losses(scores, right):
    """Return the loss of each word."""
    import jax

    chosen = jax.numpy.take_along_axis(scores, right[..., None], -1)[..., 0]
    return jax.nn.logsumexp(scores, -1) - chosen


def follow_jax(compiled, now, batches, nproc):
    """Do what follow does with a step that is handed the weights, and returns new ones."""

    def step(*batch):
        nonlocal now
        now, loss = compiled(now, *batch)
        return loss

    def read():  # what each device has
        shards = {name: w.addressable_shards for name, w in now.items()}
        return [{name: np.array(s[n].data) for name, s in shards.items()} for n in range(nproc)]

    return follow(step, read, batches)


WAYS = {
    "tensorflow towers": tensorflow_towers,
    "tensorflow mirrored": tensorflow_mirrored,
    "paddle": paddle_data_parallel,
    "pytorch": pytorch_ddp,
    "jax shard_map": jax_shard_map,
    "jax jit": jax_jit,
}
WATCH = {"tensorflow": watch_tensorflow, "paddle": watch_paddle, "pytorch": watch_pytorch}
WATCH["jax"] = watch_jax
START = "fork" if sys.platform == "linux" else "spawn"


def framework_of(way):
    """Return the framework of a way: its first word."""
    return way.partition(" ")[0]


def ways_of(framework):
    """Return the ways of a framework."""
    return [way for way in WAYS if framework_of(way) == framework]


def bytes_of_collectives(step, batch):
    """Return how many bytes this rank hands to collectives while it makes a step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                leaves = torch.utils._pytree.tree_leaves(args)
                sizes.extend(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            return function(*args, **(kwargs or {}))

    with Messages():
        step(*batch)
    return sum(sizes)


def record_first_step(step, batch):
    """Make a first step; return the loss, the bytes sent, how many devices multiply matrices.

    TensorFlow cuts the graph of a step into one for each device, and puts a node _Send where
    something crosses. Its input is the name of a result in the graph as it was written.
    """
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    loss = step(*batch)
    graphs = context.export_run_metadata().partition_graphs
    context.disable_run_metadata()
    whole, total = step.get_concrete_function(*batch).graph, 0
    for node in (node for graph in graphs for node in graph.node if node.op == "_Send"):
        name, _, number = node.input[0].partition(":")
        if "/ctrl/" not in name:  # that only keeps an order, and is empty
            result = whole.get_tensor_by_name(f"{name}:{number or 0}")  # or an error that names it
            result.shape.assert_is_fully_defined()
            total += result.shape.num_elements() * result.dtype.size
    return loss, total, sum(any("MatMul" in n.op for n in graph.node) for graph in graphs)


def bytes_in_hlo(text):
    """Return how many bytes collectives leave on a device; an all-reduce takes as many."""
    names, total = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", 0
    for shapes in re.findall(rf" = (.*?) (?:{names})(?:-start)?\(", text):
        for bits, sizes in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shapes):
            total += int(bits) // 8 * int(np.prod([int(n) for n in sizes.split(",") if n]))
    return total


# Processes, and what they leave


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


def be_a_framework(framework, nproc, folder):
    """Be the process of a framework: leave what was seen, or the reason why there is nothing."""
    end_with_parent()
    os.dup2(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), 2)  # what C++ code reports
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    (own := Path(folder, framework)).mkdir()
    os.environ |= {"TMPDIR": str(own), "CUDA_VISIBLE_DEVICES": ""}  # else TensorFlow takes a GPU
    try:
        os.link(Path(folder, "problem.npz"), own / "problem.npz")
        Path(folder, f"{framework}.found").write_bytes(pickle.dumps(WATCH[framework](nproc, own)))
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        Path(folder, f"{framework}.error").write_text(lines[-1])
        raise


def in_processes(frameworks, nproc, folder):
    """Let each framework train in a process of its own; return {way: what was seen}."""
    context, found = multiprocessing.get_context("spawn"), {}
    jobs = {f: context.Process(target=be_a_framework, args=(f, nproc, folder)) for f in frameworks}
    try:
        for job in jobs.values():
            job.start()
        for framework, job in jobs.items():
            job.join()
            if job.exitcode != 0:
                why = Path(folder, f"{framework}.error")
                sys.exit(f"{framework} failed: {why.read_text() if why.exists() else job.exitcode}")
            found |= pickle.loads(Path(folder, f"{framework}.found").read_bytes())
    finally:
        for job in jobs.values():
            if job.pid:
                job.kill()
    return found


# The verdict


def difference(one, other):
    """Return the largest difference of two {name: array}, relative to the largest value of each."""
    return float(max(np.max(abs(one[n] - other[n])) / np.max(abs(other[n])) for n in other))


def gradient_of(seen, first, what="after_one"):
    """Return the gradient of step 1: what the weights have lost, divided by the rate."""
    return {name: (w - seen[what][name]) / RATE for name, w in first.items()}


def bytes_to_expect(way, first, args):
    """Return the least and the most bytes of a step; `jit` may merge each word's gradient."""
    least, others = sum(w.nbytes for w in first.values()), args.nproc - 1
    there_and_back = others * (2 * least + 20 * args.batch_size * (LONGEST + 1) + 8)
    times = {"pytorch": 1, "jax shard_map": 1, "jax jit": LONGEST + 1}.get(way)
    return (least, times * (least + 8) if times else there_and_back) if others else (0, 0)


def wrong_in_way(way, seen, first, args):
    """Return what is wrong with one way, by itself: a list of sentences."""
    off = difference(gradient_of(seen, first), gradient_of(seen, first, "alone"))
    most, copies = [args.nproc, -(-args.batch_size // args.nproc)], seen["weights"]
    apart = max(difference(copy, copies[0]) for copy in copies)
    rows, sent, (least, enough) = seen["rows"], seen["bytes"], bytes_to_expect(way, first, args)
    rules = {
        f"its gradient is off by {off:.2g} from that of one device": off < 1e-10,
        f"its workers get {rows} of {args.batch_size} rows": [len(rows), max(rows)] == most,
        f"the weights of its workers differ by {apart:.2g}": apart == 0,
        "a worker does not update in each step": {*seen.get("updates", [])} <= {args.steps},
        f"{sent} bytes in a step, not {least} to {enough}": sent is None or least <= sent <= enough,
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def wrong_in_pair(one, other, first):
    """Return what differs between two ways: a list of sentences."""
    losses = [np.array(seen["loss"]) for seen in (one, other)]
    start = abs(losses[0][0] - losses[1][0]) / losses[1][0]
    grown = float(np.max(abs(losses[0] - losses[1]) / losses[1]))
    off = difference(gradient_of(one, first), gradient_of(other, first))
    last = difference(one["weights"][0], other["weights"][0])
    rules = {
        f"first losses differ by {start:.2g}": start < 1e-10,
        f"gradients differ by {off:.2g}": off < 1e-10,
        f"losses differ by {grown:.2g}": grown < 1e-8,
        f"last weights differ by {last:.2g}": last < 1e-8,
    }
    return off, [sentence for sentence, holds in rules.items() if not holds]


def compare(found, first, batches, args):
    """Return the largest difference of gradients of each pair of frameworks, and what is wrong."""
    wrong = [f"{w}: {said}" for w in found for said in wrong_in_way(w, found[w], first, args)]
    if any((inputs[:, 1:] != targets[:, :-1]).any() for inputs, targets, _ in batches):
        wrong.append("the targets are not the words that follow")
    start = max(seen["loss"][0] for seen in found.values())
    if abs(start - np.log(len(first["embedding"]))) > 0.05:
        wrong.append(f"the first loss, {start:.3g}, is not log {len(first['embedding'])}")
    learned = max(seen["loss"][-1] for seen in found.values()) < start - 0.5
    if args.steps >= 20 and args.batch_size >= 32 and not learned:
        wrong.append("it has not learned")
    pairs = collections.defaultdict(float)
    for one, other in itertools.combinations(found, 2):
        off, said = wrong_in_pair(found[one], found[other], first)
        wrong += [f"{one} and {other}: {sentence}" for sentence in said]
        names = framework_of(one), framework_of(other)
        if names[0] != names[1]:
            pairs[" and ".join(names)] = max(pairs[" and ".join(names)], off)
    return dict(pairs), wrong


def lines_added(way):
    """Return how many lines of a way's function the program for one device does not have.

    Lines of code, as Python writes them from its syntax tree: no comment and no docstring counts.
    """
    texts = []
    for function in (globals()[f"{framework_of(way)}_alone"], WAYS[way]):
        tree = ast.parse(inspect.getsource(function)).body[0]
        tree.name, tree.body = "way", tree.body[1:]
        texts.append(ast.unparse(tree).splitlines())
    return sum(line[0] == "+" for line in list(difflib.unified_diff(*texts, n=0))[2:])


def main(args):
    """Run the lesson; return whether its claim holds, the claim, and the numbers."""
    there = [f for f in WATCH if importlib.util.find_spec({"pytorch": "torch"}.get(f, f))]
    numbers = {"lesson": 15, "world_size": args.nproc, "backend": "four", "device": "cpu"}
    numbers |= {"frameworks": there, "missing": [f for f in WATCH if f not in there]}
    if len(there) < 2:
        return False, f"of {len(WATCH)} frameworks two are needed, installed: {there}", numbers
    with tempfile.TemporaryDirectory() as folder:
        save_problem(folder, args)
        first, batches = load_problem(folder)
        found = in_processes(there, args.nproc, folder)
    pairs, wrong = compare(found, first, batches, args)
    numbers |= {"max_grad_diff": pairs, "weights": sum(w.size for w in first.values())}
    numbers["loss_first"] = {way: seen["loss"][0] for way, seen in found.items()}
    numbers["loss_last"] = {way: seen["loss"][-1] for way, seen in found.items()}
    for name in ("rows", "bytes"):
        numbers[f"{name}_per_step"] = {way: seen[name] for way, seen in found.items()}
    numbers["lines_added"] = {way: lines_added(way) for way in found}
    report(numbers, args)
    right = f"gradients differ by {max(pairs.values()):.1e} at most"
    claim = f"{len(there)} frameworks, {len(found)} ways, {args.nproc} workers: "
    return not wrong, claim + ("; ".join(wrong) or right), numbers


def report(numbers, args):
    """Print what a reader wants to know."""
    rows = " and ".join(map(str, next(iter(numbers["rows_per_step"].values()))))
    print(f"{args.nproc} workers, {rows} of {args.batch_size} sentences in a step;", end=" ")
    print(f"{numbers['weights']:,} weights, {8 * numbers['weights']:,} bytes")
    for way, start in numbers["loss_first"].items():
        sent, lines = numbers["bytes_per_step"][way], numbers["lines_added"][way]
        told = "bytes are not counted" if sent is None else f"{sent:,} bytes in a step"
        print(f"{way:20} loss {start:.4f} to {numbers['loss_last'][way]:.4f};", end=" ")
        print(f"{told}; {lines} lines more")
    for name in numbers["missing"]:
        print(f"{name:20} is not installed, and left out")


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before anything is started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--nproc", type=whole(1, 4), default=2, help="workers, %(default)s")
    parser.add_argument("--steps", type=whole(1, 10**4), default=20, help="%(default)s")
    size = {"type": whole(1, 10**3), "default": 32}
    parser.add_argument("--batch-size", **size, help="sentences, of all workers, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    sentences = len(short_sentences())
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
