"""What lesson 15 claims: six ways, in four frameworks, make the update of one device.

The script knows nothing of this file. The hooks for PyTorch see nothing of the other frameworks,
which work in C++, and two frameworks in a process can crash. So each framework has a process here,
and each worker of Paddle and PyTorch a fork of it. Every one of them runs the script's main(),
whose six functions are wrapped. The same program on one device stands here; NumPy compares.
"""

import ast
import contextlib
import difflib
import importlib.util
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import lesson_15_four_frameworks as lesson
import numpy as np
from lockstep import ending, imports
from lockstep.watch import claims

LIMITS = {"--nproc": (1, 4), "--steps": (1, 10**4), "--batch-size": (1, 10**6)}
LIMITS |= {"--seed": (0, 2**32 - 1)}
SENTENCES = 10**6  # so many words, in four frameworks, have room in 2 GiB
WAYS = {"tensorflow towers": "tensorflow_towers", "tensorflow mirrored": "tensorflow_mirrored"}
WAYS |= {"paddle": "paddle_data_parallel", "pytorch": "pytorch_ddp"}
WAYS |= {"jax shard_map": "jax_shard_map", "jax jit": "jax_jit"}
START = "fork" if sys.platform == "linux" else "spawn"


def refuse(args, world_size, ranks_here):
    """Return what is wrong with the flags, or None."""
    least, most = args.nproc, SENTENCES // args.steps
    if least <= args.batch_size <= most:
        return None
    return f"argument --batch-size: must be from {least}, --nproc, to {most} in {args.steps} steps"


def examine(args):
    """Let the frameworks that are installed train; print what they say; return the verdict."""
    there = [f for f in lesson.TRAIN if importlib.util.find_spec(f.replace("pytorch", "torch"))]
    if len(there) < 2:
        wrong = [f"installed: {', '.join(there) or 'none'}"]
        return claims.Verdict(f"of {len(lesson.TRAIN)} frameworks two are needed", wrong, {}, [])
    with tempfile.TemporaryDirectory() as folder:
        found = in_processes(there, args, folder)
    for seen in found.values():
        print(seen["said"])
    return judge(found, args)


# --- The same program on one device: what gradients must be, and what lines are counted from ---


def tensorflow_alone(loss_of, weights, rate):
    """Return step(*batch), and the variables."""
    import tensorflow as tf

    variables = {n: tf.Variable(w) for n, w in weights.items()}

    @tf.function
    def step(*batch):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *batch)
        gradients = tape.gradient(loss, variables)
        for name, variable in variables.items():
            variable.assign_sub(rate * tf.convert_to_tensor(gradients[name]))
        return loss

    return step, variables


def paddle_alone(layer, rate):
    """Return step(*batch)."""
    import paddle

    optimizer = paddle.optimizer.SGD(rate, layer.parameters())

    def step(*batch):
        loss = layer(*[paddle.to_tensor(array) for array in batch])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss.item()

    return step


def pytorch_alone(model, rate):
    """Return step(*batch)."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(*batch):
        loss = model(*[torch.from_numpy(array) for array in batch])
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


# --- A way, watched ---
# A function that is called watch_... takes the place of `make`, one of the script's six, and notes
# in `seen` what its steps do; `alone` is the weights after a step of one device.


def note(seen, loss, weights):
    """Note a step's loss, and the weights after it, {name: array} of each worker that is here."""
    seen["loss"].append(float(loss))
    seen["weights"] = weights
    seen.setdefault("after_one", weights[0])
    return loss


def watch_tensorflow(make, seen, args, rank, loss_of, weights, devices, rate):
    def counted(given, inputs, *rest):
        rows.append(inputs.shape[0])
        return loss_of(given, inputs, *rest)

    def read():  # a mirrored variable has a value for each device
        every = {name: getattr(v, "values", [v]) for name, v in variables.items()}
        copies = range(len(every["kernel"]))
        return [{name: copy[k].numpy() for name, copy in every.items()} for k in copies]

    def watched(*batch):
        if "bytes" in seen:
            return note(seen, step(*batch), read())
        loss, seen["bytes"], busy = record_step(step, batch)
        seen["rows"] = rows[:busy]
        return note(seen, loss, read())

    if "tensorflow" not in ALONE:
        step, variables = tensorflow_alone(loss_of, weights, rate)
        step(*lesson.make_problem(args)[1][0])
        ALONE["tensorflow"] = read()[0]
    rows = []
    step, variables = make(counted, weights, devices, rate)
    return watched, variables


def record_step(step, batch):
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


def watch_replica(make, seen, args, rank, model, rate):
    """Watch Paddle or PyTorch, whose ranks have other weights until those of rank 0 are copied."""

    def read():
        return {name: w.detach().numpy().copy() for name, w in parameters.items()}

    def counted(inputs, *rest):
        seen["rows"] = [inputs.shape[0]]
        return forward(inputs, *rest)

    def counted_update(*given):
        seen["updates"][0] += 1
        return update(*given)

    def watched(*batch):
        loss, seen["bytes"] = step_on_wire(step, batch) if in_torch else (step(*batch), None)
        return note(seen, loss, [read()])

    parameters = {name.rpartition(".")[2]: w for name, w in model.named_parameters()}
    first, forward = read(), model.forward
    in_torch = make.__name__ == "pytorch_ddp"
    alone, home = (pytorch_alone, "torch.optim") if in_torch else (paddle_alone, "paddle.optimizer")
    alone(model, rate)(*lesson.make_problem(args)[1][0])
    seen.update(alone=read(), updates=[0])
    fill(parameters, {name: w * (1 + rank) for name, w in first.items()})
    model.forward = counted
    sgd = importlib.import_module(home).SGD
    update, sgd.step = sgd.step, counted_update
    step = make(model, rate)
    return watched


def fill(parameters, values):
    """Write these values into the parameters of a model of Paddle or PyTorch."""
    for name, w in parameters.items():
        new = values[name]
        w.set_value(new) if hasattr(w, "set_value") else w.data.copy_(w.new_tensor(new))


def step_on_wire(step, batch):
    """Make a step of PyTorch; return the loss, and the bytes handed to collectives."""
    import torch
    from lockstep.watch.wire import Wire

    with Wire() as wire:
        loss = step(*batch)
    sent = sum(nbytes for _, nbytes in wire.calls)
    return loss, sent * (torch.distributed.get_world_size() > 1)


def watch_jax(make, seen, args, rank, loss_of, mesh, rate):
    import jax

    def copies(weights):  # what each device has
        shards = {name: w.addressable_shards for name, w in weights.items()}
        return [{name: np.array(s[k].data) for name, s in shards.items()} for k in range(mesh.size)]

    def watched(weights, *batch):
        weights = jax.device_put(weights, jax.NamedSharding(mesh, jax.P()))
        if "bytes" not in seen:
            compiled.append(step.lower(weights, *batch).compile())
            seen["bytes"] = bytes_in_hlo(compiled[0].as_text()) * (mesh.size > 1)
            places = zip(compiled[0].input_shardings[0][1:], batch, strict=True)
            rows = max(place.shard_shape(array.shape)[0] for place, array in places)
            seen["rows"] = [rows] * mesh.size
        weights, loss = compiled[0](weights, *batch)
        return weights, note(seen, loss, copies(weights))

    if "jax" not in ALONE:
        weights, batches = lesson.make_problem(args)
        ALONE["jax"] = jax.tree.map(np.array, jax_alone(loss_of, rate)(weights, *batches[0])[0])
    step, compiled = make(loss_of, mesh, rate), []
    return watched


ALONE = {}  # of frameworks with one process for all workers
WATCH = {"tensorflow": watch_tensorflow, "paddle": watch_replica, "pytorch": watch_replica}
WATCH["jax"] = watch_jax
IDLE = {"tensorflow": lambda *_: (lambda *_: 0.0, {}), "jax": lambda *_: lambda w, *_: (w, 0.0)}


def bytes_in_hlo(text):
    """Return how many bytes collectives leave on a device; an all-reduce takes as many."""
    names, total = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", 0
    for shapes in re.findall(rf" = (.*?) (?:{names})(?:-start)?\(", text):
        for bits, sizes in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shapes):
            total += int(bits) // 8 * int(np.prod([int(n) for n in sizes.split(",") if n]))
    return total


# --- Processes, and what they leave ---


def ways_of(framework):
    """Return the ways of a framework."""
    return [way for way in WAYS if way.startswith(framework)]


def end_with_parent():
    """Let this process end when the one that has started it does.

    Elsewhere than on Linux a thread sees to it, but not while C++ code holds Python's lock.
    """
    parent = multiprocessing.parent_process()
    os.environ["LOCKSTEP_PARENT"] = str(parent.pid)
    ending.end_with_parent(signal.SIGKILL)
    if sys.platform != "linux":
        threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()


def train(framework, args, ways, rank=0):
    """Run the script's main() in this process, in some of its ways; return {way: what was seen}."""
    found, said = {way: {"loss": []} for way in ways}, io.StringIO()
    with contextlib.ExitStack() as stack:
        for way in ways_of(framework):
            given = getattr(lesson, WAYS[way]), found.get(way), args, rank
            new = partial(WATCH[framework], *given) if way in ways else IDLE[framework]
            stack.enter_context(patch.object(lesson, WAYS[way], new))
        stack.enter_context(contextlib.redirect_stdout(said))
        lesson.main(Namespace(**vars(args) | {"framework": framework}))
    lines = said.getvalue().splitlines()
    for way, seen in found.items():
        seen["said"] = "\n".join(line for line in lines if line.startswith(f"{way} "))
        seen.setdefault("alone", ALONE.get(framework))
    return found


def be_paddle_rank(args, ways):
    """Be one of Paddle's workers."""
    import paddle

    paddle.distributed.init_parallel_env()
    found = train("paddle", args, ways, paddle.distributed.get_rank())
    if paddle.distributed.is_initialized():  # not if it is alone
        paddle.distributed.barrier()  # rank 0 has the store in which all meet: it must not leave
    return found


def be_pytorch_rank(rank, args, folder, ways):
    """Be one of PyTorch's workers. They meet in a file."""
    import torch.distributed as dist

    end_with_parent()
    place = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": args.nproc}
    join = partial(dist.init_process_group, **place)
    with patch.object(dist, "init_process_group", join):
        found = train("pytorch", args, ways, rank)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    os._exit(0)  # to take torch to pieces costs half a second


def train_in(framework, args, folder, ways):
    """Train with a framework in this process, or in forks of it; return {way: what was seen}."""
    if framework == "paddle":
        import paddle
        from lockstep.watch.paddle_ranks import answers

        with answers() as ranks:
            options = {"nprocs": args.nproc, "backend": "gloo", "start_method": START}
            paddle.distributed.spawn(be_paddle_rank, (args, ways), **options)
    elif framework == "pytorch":
        import torch.distributed.nn
        import torch.multiprocessing as mp

        importlib.import_module("lockstep.watch.wire")  # the forks then have it
        torch.optim.SGD([torch.zeros(1)])  # imports much, which the forks then have
        torch.set_num_threads(1)  # in each of them
        mp.start_processes(be_pytorch_rank, (args, folder, ways), args.nproc, start_method=START)
        ranks = [pickle.loads(Path(folder, str(n)).read_bytes()) for n in range(args.nproc)]
    else:
        ranks = [train(framework, args, ways)]
    return {way: of_all_ranks([rank[way] for rank in ranks]) for way in ways}


def of_all_ranks(ranks):
    """Return what was seen on all ranks: the parts of the loss, added up, and all weights."""
    found = {"loss": [sum(parts) for parts in zip(*(rank["loss"] for rank in ranks), strict=True)]}
    for name in ("rows", "weights", "updates"):
        found[name] = [one for rank in ranks for one in rank.get(name, [])]
    return ranks[0] | found


def be_a_framework(framework, args, folder):
    """Be the process of a framework: leave what was seen, or the reason why there is nothing."""
    end_with_parent()
    imports.hush()
    (own := Path(folder, framework)).mkdir()
    os.environ |= {"TMPDIR": str(own), "CUDA_VISIBLE_DEVICES": ""}  # else TensorFlow takes a GPU
    if framework == "tensorflow":
        sys.modules["jax"] = None  # else its converter for phones imports it, too
    try:
        found = train_in(framework, args, str(own), ways_of(framework))
        Path(folder, f"{framework}.found").write_bytes(pickle.dumps(found))
    except (Exception, SystemExit) as error:  # a rank of Paddle that fails is a SystemExit
        name = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        Path(folder, f"{framework}.error").write_text(f"{name}{error}".strip().splitlines()[-1])
        raise


def in_processes(frameworks, args, folder):
    """Let each framework train in a process of its own; return {way: what was seen}."""
    context, found = multiprocessing.get_context("spawn"), {}
    jobs = {f: context.Process(target=be_a_framework, args=(f, args, folder)) for f in frameworks}
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


# --- The verdict ---


def judge(found, args):
    """Return the verdict on what was seen of some ways, {way: what was seen}."""
    first, batches = lesson.make_problem(args)
    wrong = [f"{w}: {said}" for w in found for said in wrong_in_way(w, found[w], first, args)]
    wrong += wrong_in_problem(found, batches, args)
    pairs, of_pairs = compare(found, first)
    there = [f for f in lesson.TRAIN if any(way.startswith(f) for way in found)]
    numbers = {"world_size": args.nproc, "backend": "four", "device": "cpu", "frameworks": there}
    numbers["missing"] = [f for f in lesson.TRAIN if f not in there]
    numbers |= {"max_grad_diff": pairs, "weights": sum(w.size for w in first.values())}
    numbers["loss_first"] = {way: seen["loss"][0] for way, seen in found.items()}
    numbers["loss_last"] = {way: seen["loss"][-1] for way, seen in found.items()}
    for name in ("rows", "bytes"):
        numbers[f"{name}_per_step"] = {way: seen[name] for way, seen in found.items()}
    numbers["lines_added"] = {way: lines_added(way) for way in found}
    claim = f"{len(there)} frameworks, {len(found)} ways, {args.nproc} workers"
    claim += f": gradients differ by {max(pairs.values()):.1e} at most"
    return claims.Verdict(claim, wrong + of_pairs, numbers, lines_of(numbers, args))


def difference(one, other):
    """Return the largest difference of two {name: array}, relative to the largest value of each."""
    return float(max(np.max(abs(one[n] - other[n])) / np.max(abs(other[n])) for n in other))


def gradient_of(seen, first, what="after_one"):
    """Return the gradient of step 1: what the weights have lost, divided by the rate."""
    return {name: (w - seen[what][name]) / lesson.RATE for name, w in first.items()}


def bytes_to_expect(way, first, args):
    """Return the least and the most bytes of a step; `jit` may merge each word's gradient."""
    least, others = sum(w.nbytes for w in first.values()), args.nproc - 1
    words = lesson.LONGEST + 1
    there_and_back = others * (2 * least + 20 * args.batch_size * words + 8)
    times = {"pytorch": 1, "jax shard_map": 1, "jax jit": words}.get(way)
    return (least, times * (least + 8) if times else there_and_back) if others else (0, 0)


def wrong_in_way(way, seen, first, args):
    """Return what is wrong with one way, by itself: a list of sentences."""
    off = difference(gradient_of(seen, first), gradient_of(seen, first, "alone"))
    most, copies = [args.nproc, -(-args.batch_size // args.nproc)], seen["weights"]
    apart = max(difference(copy, copies[0]) for copy in copies)
    rows, sent, (least, enough) = seen["rows"], seen["bytes"], bytes_to_expect(way, first, args)
    said = f"{way:20} loss {seen['loss'][0]:.4f} to {seen['loss'][-1]:.4f}"
    return claims.broken(
        {
            f"its gradient is off by {off:.2g} from that of one device": off < 1e-10,
            f"its workers get {rows} of {args.batch_size} rows": [len(rows), max(rows)] == most,
            f"the weights of its workers differ by {apart:.2g}": apart == 0,
            "a worker does not update in each step": {*seen["updates"]} <= {args.steps},
            f"{sent} bytes in a step, not {least} to {enough}": sent is None
            or least <= sent <= enough,
            f"it says {seen['said']!r}, and not {said!r}": seen["said"] == said,
        }
    )


def compare(found, first):
    """Return the largest difference of gradients of each pair of frameworks, and what is wrong."""
    pairs, wrong = {}, []
    for (way, one), (other, two) in itertools.combinations(found.items(), 2):
        off = difference(gradient_of(one, first), gradient_of(two, first))
        apart = abs(np.divide(one["loss"], two["loss"]) - 1)
        last = difference(one["weights"][0], two["weights"][0])
        worst = np.max(apart)
        rules = {f"step 1 differs by {off:.2g}, {apart[0]:.2g}": np.max([off, apart[0]]) < 1e-10}
        rules |= {f"losses differ by {worst:.2g}": worst < 1e-8}
        rules |= {f"last weights differ by {last:.2g}": last < 1e-8}
        wrong += [f"{way} and {other}: {sentence}" for sentence in claims.broken(rules)]
        names = [name.partition(" ")[0] for name in (way, other)]
        if names[0] != names[1]:
            pair = " and ".join(names)
            pairs[pair] = max(pairs.get(pair, 0.0), off)
    return pairs, wrong


def wrong_in_problem(found, batches, args):
    """Return what is wrong with the words, or with what was learned of them."""
    start = max(seen["loss"][0] for seen in found.values())
    learned = max(seen["loss"][-1] for seen in found.values()) < start - 0.5
    shifted = all((inputs[:, 1:] == targets[:, :-1]).all() for inputs, targets, _ in batches)
    uniform = abs(start - np.log(lesson.WORDS)) < 0.05
    rules = {
        "the targets are not the words that follow": shifted,
        f"the first loss, {start:.3g}, is not log {lesson.WORDS}": uniform,
        "it has not learned": learned or args.steps < 20 or args.batch_size < 32,
    }
    return claims.broken(rules)


def lines_added(way):
    """Return how many lines of a way's function the program for one device does not have.

    Lines of code, as Python writes them from its syntax tree: no comment and no docstring counts.
    """
    texts = []
    alone = globals()[f"{way.partition(' ')[0]}_alone"]
    for function in (alone, getattr(lesson, WAYS[way])):
        tree = ast.parse(inspect.getsource(function)).body[0]
        tree.name, tree.body = "way", tree.body[1:]
        texts.append(ast.unparse(tree).splitlines())
    return sum(line[0] == "+" for line in list(difflib.unified_diff(*texts, n=0))[2:])


def lines_of(numbers, args):
    """Return what a reader wants to know."""
    rows = " and ".join(map(str, next(iter(numbers["rows_per_step"].values()))))
    line = f"{args.nproc} workers, {rows} of {args.batch_size} sentences in a step;"
    lines = [f"{line} {numbers['weights']:,} weights, {8 * numbers['weights']:,} bytes"]
    for way, sent in numbers["bytes_per_step"].items():
        told = "bytes are not counted" if sent is None else f"{sent:,} bytes in a step"
        lines.append(f"{way:20} {told}; {numbers['lines_added'][way]} lines more")
    return lines + [f"{name:20} is not installed, and left out" for name in numbers["missing"]]
