"""Solutions of the tasks of lesson 15, and their checks, on virtual devices of the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from proofs import lesson_15 as proof

jax.config.update("jax_num_cpu_devices", 4)  # before the first array
jax.config.update("jax_enable_x64", True)


def mesh_of(count):
    """Return a mesh of so many devices, along one axis, "data"."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=devices)


# --- Task 1: predict ---

times_too_large = 16  # 4 devices: grad adds up, then psum multiplies by 4


def check_times_too_large(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == times_too_large:
        return None
    if guess == 4:
        return "so much it is with pmean, whose sum is divided by 4 again; psum does not divide"
    if guess == 1:
        return "that needs a gradient that nobody has added up yet"
    return "follow one number: what does grad return on each device, and what are four of these?"


# --- Task 2: build ---


def data_parallel_gradient(loss_of, mesh):
    """Return a function (weights, rows, answers, real): the gradients of the mean of real rows."""

    def on_each_device(weights, rows, answers, real):
        def own_sum(weights):
            return jnp.sum(loss_of(weights, rows, answers) * real)

        own = jax.lax.pcast(weights, "data", to="varying")
        sums = jax.grad(own_sum)(own)
        sums, count = jax.lax.psum((sums, jnp.sum(real)), "data")
        return jax.tree.map(lambda total: total / count, sums)

    specs = {"in_specs": (P(), P("data"), P("data"), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, **specs))


def squares(weights, rows, answers):
    """Return the loss of each row."""
    return (jnp.tanh(rows @ weights["w"]) @ weights["v"] + weights["b"] - answers) ** 2


def toy_batch():
    """Return weights, 12 rows and their answers."""
    generator = np.random.default_rng(0)
    weights = {"w": generator.normal(size=(3, 4)), "v": generator.normal(size=4), "b": np.ones(1)}
    rows = generator.normal(size=(12, 3))
    return weights, rows, rows.sum(1)


def check_data_parallel_gradient(attempt):
    """Return None if the attempt is right on 1, 2 and 3 devices, else what is wrong."""
    weights, *batch = toy_batch()
    masks = np.arange(12) < 7, np.arange(12) % 5 == 2  # the first seven; two with others between
    for count, real in [(count, real) for count in (1, 2, 3) for real in masks]:
        given, kept = (weights, *batch, real * 1.0), [array[real] for array in batch]
        right = jax.grad(lambda w, kept=kept: jnp.mean(squares(w, *kept)))(weights)
        program = jax.jit(attempt(squares, mesh_of(count))).lower(*given).compile()
        found = program(*given)
        if not isinstance(found, dict) or sorted(found) != sorted(right):
            return "it does not return a dictionary with a gradient for each weight"
        factors = [float(jnp.vdot(found[n], g) / jnp.vdot(g, g)) for n, g in right.items()]
        for name, gradient in right.items():
            if not np.allclose(found[name], gradient, rtol=1e-9, atol=1e-12):
                text = f"on {count} device{'s' * (count > 1)} the gradient of {name} is wrong"
                same = max(factors) - min(factors) < 1e-9
                return text + f": {factors[0]:.4g} times the right one" * same
        if problem := waste(program, count, given):
            return problem
    return None


def waste(program, count, given):
    """Return what a compiled program computes or sends too much, or None."""
    if count == 1:
        return None
    text, sent = program.as_text(), proof.bytes_in_hlo(program.as_text())
    budget = 8 * (sum(w.size for w in given[0].values()) + 2)
    others = "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    places = zip(program.input_shardings[0][1:], given[1:], strict=True)
    whole = any(place.shard_shape(array.shape) == array.shape for place, array in places)
    if whole or sent == 0 or any(f" {name}" in text for name in others):
        return f"on {count} devices every device computes with all rows: divide them"
    if sent > budget:
        return f"on {count} devices each hands in {sent} bytes; {budget} are enough"
    return None


# --- Task 3: repair ---


def fill_up(batch, share, count):
    """Return the arrays of a batch, and the shares, with rows at the end that do not count."""
    missing = -len(share) % count
    longer = [np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for array in batch]
    return longer, np.pad(share, (0, missing))


def check_fill_up(attempt):
    """Return None if the attempt is right for 1 to 4 devices, else what is wrong."""
    weights, rows, answers = toy_batch()
    words = np.arange(12, dtype="i4") % 3

    def loss(weights, words, rows, answers, share):
        return (squares(weights, rows + jnp.eye(3)[words], answers) * share).sum()

    for size, count in [(size, count) for size in (10, 11, 2) for count in (1, 2, 3, 4)]:
        batch, share = [words[:size], rows[:size], answers[:size]], np.arange(1.0, size + 1) / 55
        right = jax.grad(loss)(weights, *batch, share)
        longer, shares = attempt([array.copy() for array in batch], share.copy(), count)
        sizes, case = {len(array) for array in (*longer, shares)}, f"{size} rows, count {count}"
        if sizes != {size + -size % count}:
            return f"{case}: there must be {size + -size % count} rows, not {sorted(sizes)}"
        found = jax.grad(loss)(weights, *longer, shares)
        off = max(float(abs(found[n] - g).max() / abs(g).max()) for n, g in right.items())
        if not off < 1e-9:
            return f"{case}: a gradient is off by {off:.2g}: which rows count?"
    return None


TASKS = {
    "times_too_large": (check_times_too_large, times_too_large),
    "data_parallel_gradient": (check_data_parallel_gradient, data_parallel_gradient),
    "fill_up": (check_fill_up, fill_up),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "times_too_large": (
        "Two things add up here, one after the other. The first has been done when `grad` "
        "returns. What does the second one make of equal numbers on all devices?"
    ),
    "data_parallel_gradient": (
        "A device can't know the mean, but the sum over its own real rows. Which two things must "
        "be added up over the devices, and what is left then? Who would add up too early?"
    ),
    "fill_up": (
        "JAX wants equal parts, so the rows must become more. What must hold for a row that "
        "nobody has asked for, so that neither the loss nor a gradient notices it?"
    ),
}
