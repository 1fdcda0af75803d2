"""Lesson 15: do the same six steps give the same numbers in TensorFlow, Paddle, PyTorch and JAX?

Run it:    bash scripts/lesson_15.sh --nproc 2        six ways, of all that are installed, compared
Or alone:  python FILE --framework jax --nproc 2      or tensorflow: workers are devices of the CPU
           torchrun --nproc-per-node 2 FILE --framework pytorch         workers are processes
           python -m paddle.distributed.launch --nproc_per_node 2 FILE --framework paddle

Output to expect on a CPU:

    tensorflow towers    loss 6.2... to 5.1...
    ...
    PASS 4 frameworks, 6 ways, 2 workers: gradients differ by ... at most
"""

import argparse
import os
from functools import partial
from itertools import starmap
from operator import getitem

import numpy as np

# --- The technique ---
# 1 copy the weights, 2 split the batch, 3 forward, 4 backward, 5 merge the gradients, 6 update


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
            with tf.device(device), tf.GradientTape() as tape:
                copy = {name: tf.identity(v) for name, v in variables.items()}  # 1: in each step
                tape.watch(copy)
                losses.append(loss_of(copy, *mine))  # 3
                gradients.append(tape.gradient(losses[-1], copy))  # 4
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
        added = tf.VariableAggregation.SUM  # what an assignment is to do
        variables = {n: tf.Variable(w, aggregation=added) for n, w in weights.items()}

    def on_each_device(*batch):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = [array[number :: len(devices)] for array in batch]  # 2
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *mine)  # 3
        gradients = tape.gradient(loss, variables)  # 4
        for name, variable in variables.items():
            variable.assign_sub(rate * tf.convert_to_tensor(gradients[name]))  # 5: SUM, 6: on each
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
        loss = replica(*[paddle.to_tensor(array[rank::world_size]) for array in batch])  # 2, 3
        (loss * world_size).backward()  # 4, 5: an all-reduce leaves the mean on each rank
        optimizer.step()  # 6: on each rank
        optimizer.clear_grad()
        return loss.item()

    return step


def pytorch_ddp(model, rate):
    """Return step(*batch), in each of the processes that torchrun or spawn has started."""
    import torch

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    replica = torch.nn.parallel.DistributedDataParallel(model)  # 1: once, rank 0's go to all
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(*batch):
        loss = replica(*[torch.from_numpy(array[rank::world_size]) for array in batch])  # 2, 3
        (loss * world_size).backward()  # 4, 5: an all-reduce leaves the mean on each rank
        optimizer.step()  # 6: on each rank
        optimizer.zero_grad()
        return loss.item()

    return step


def jax_shard_map(loss_of, mesh, rate):
    """Return step(weights, *batch). The rows must be a multiple of the mesh's devices."""
    import jax

    def on_each_device(weights, *mine):
        own = jax.lax.pcast(weights, "data", to="varying")  # else grad adds up over the devices
        found = jax.value_and_grad(loss_of)(own, *mine)  # 3, 4
        loss, gradients = jax.lax.psum(found, "data")  # 5: a sum, as all of these are parts
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), loss  # 6: on each

    specs = {"in_specs": (jax.P(), *[jax.P("data")] * 3), "out_specs": jax.P()}  # 1, 2
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, **specs))


def jax_jit(loss_of, mesh, rate):
    """Return step(weights, *batch), the program of one device: the compiler divides it."""
    import jax

    def step(weights, *batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)  # 3, 4, 5
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), loss  # 6

    full, rows = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
    return jax.jit(step, in_shardings=(full, rows, rows, rows), out_shardings=full)  # 1, 2


def language_model(ops, log, look_up, weights, inputs, targets, share):
    """Return the loss, of some rows their part of the batch's; `ops` is a framework's module."""
    words = look_up(weights["embedding"], inputs)
    loss, state = 0, words[:, 0] * 0
    for time in range(words.shape[1]):
        state = ops.tanh(words[:, time] + state @ weights["kernel"])
        chances = ops.exp(state @ weights["softmax"])  # their sum is not 1 yet
        is_next = look_up(ops.eye(chances.shape[1], dtype=ops.float64), targets[:, time])
        right = ops.einsum("rw,rw->r", chances, is_next) / ops.einsum("rw->r", chances)
        loss = loss - ops.einsum("r,r->", log(right), share[:, time])
    return loss


# --- The example ---

WORDS, LONGEST, WIDTH, RATE = 500, 6, 32, 2.0


def make_problem(args):
    """Return weights, and batches of made-up words: inputs, targets, shares of the loss."""
    random = np.random.default_rng(args.seed)
    shapes = {"embedding": (WORDS, WIDTH), "kernel": (WIDTH, WIDTH), "softmax": (WIDTH, WORDS)}
    weights = {name: random.uniform(-0.1, 0.1, shape) for name, shape in shapes.items()}
    words = random.zipf(1.5, (args.steps, args.batch_size, LONGEST + 2)) % WORDS
    real = np.arange(LONGEST + 1) <= random.integers(1, LONGEST + 1, words[..., :1].shape)
    share = real / real.sum((1, 2), keepdims=True)
    return weights, [*zip(words[..., :-1].astype("i4"), words[..., 1:], share, strict=True)]


def train_tensorflow(nproc, weights, batches):
    """Train on virtual devices of the CPU; return {way: losses}."""
    import tensorflow as tf

    (cpu,), device = tf.config.list_physical_devices("CPU"), tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device] * nproc)
    loss_of = partial(language_model, tf, tf.math.log, tf.gather)
    names = [f"cpu:{number}" for number in range(nproc)]
    ways = {"tensorflow towers": tensorflow_towers, "tensorflow mirrored": tensorflow_mirrored}
    steps = {name: way(loss_of, weights, names, RATE)[0] for name, way in ways.items()}
    return {name: [*starmap(step, batches)] for name, step in steps.items()}


def train_paddle(nproc, weights, batches):
    """Train as one of the processes; return {way: losses} on the first of them."""
    import paddle

    paddle.distributed.init_parallel_env()
    model = paddle.nn.Layer()
    tensors = {name: paddle.to_tensor(w) for name, w in weights.items()}
    model.w = paddle.nn.ParameterDict({n: paddle.nn.Parameter(t) for n, t in tensors.items()})
    model.forward = partial(language_model, paddle, paddle.log, getitem, model.w)
    losses = paddle.to_tensor([*starmap(paddle_data_parallel(model, RATE), batches)])
    if paddle.distributed.is_initialized():  # it is not, where one process is all
        paddle.distributed.all_reduce(losses)  # each has its parts
    return {} if paddle.distributed.get_rank() else {"paddle": losses.tolist()}


def train_pytorch(nproc, weights, batches):
    """Train as one of the processes; return {way: losses} on the first of them."""
    import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it

    torch.distributed.init_process_group("gloo")
    model = torch.nn.Module()
    model.w = torch.nn.ParameterDict({name: torch.tensor(w) for name, w in weights.items()})
    model.forward = partial(language_model, torch, torch.log, getitem, model.w)
    losses = torch.tensor([*starmap(pytorch_ddp(model, RATE), batches)])  # here DDP ends
    torch.distributed.all_reduce(losses)  # each has its parts
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    return {} if rank else {"pytorch": losses.tolist()}


def train_jax(nproc, weights, batches):
    """Train on virtual devices of the CPU; return {way: losses}."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": f"{nproc}", "JAX_ENABLE_X64": "1"}
    import jax

    mesh = jax.make_mesh((nproc,), ("data",), (jax.sharding.AxisType.Auto,))
    batches = [[np.pad(a, [(0, -len(a) % nproc), (0, 0)]) for a in batch] for batch in batches]
    loss_of = partial(language_model, jax.numpy, jax.numpy.log, getitem)
    ways, losses = {"jax shard_map": jax_shard_map, "jax jit": jax_jit}, {}
    for name, way in ways.items():
        step, now, losses[name] = way(loss_of, mesh, RATE), weights, []
        for batch in batches:
            now, loss = step(now, *batch)
            losses[name].append(loss)
    return losses


TRAIN = dict(tensorflow=train_tensorflow, paddle=train_paddle, pytorch=train_pytorch, jax=train_jax)


def main(args):
    """Train with one framework in each of its ways; print the first loss and the last."""
    for way, losses in TRAIN[args.framework](args.nproc, *make_problem(args)).items():
        print(f"{way:20} loss {losses[0]:.4f} to {losses[-1]:.4f}")


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--framework", choices=TRAIN, default="jax", help="run alone, %(default)s")
    for flag, default in (("--nproc", 2), ("--steps", 20), ("--batch-size", 32), ("--seed", 0)):
        parser.add_argument(flag, type=int, default=default, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
