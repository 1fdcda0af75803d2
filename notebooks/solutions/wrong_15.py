"""Wrong attempts at the tasks of lesson 15, and words that their verdict must contain."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

SPECS = {"in_specs": (P(), P("data"), P("data"), P("data")), "out_specs": P()}

# --- Task 2 ---


def divided(work):
    """Return an attempt whose devices call work(loss_of, weights, rows, answers, real)."""

    def attempt(loss_of, mesh):
        def on_each_device(*given):
            return work(loss_of, *given)

        return jax.jit(jax.shard_map(on_each_device, mesh=mesh, **SPECS))

    return attempt


def own(weights):
    return jax.lax.pcast(weights, "data", to="varying")


def total(loss_of, rows, answers, real):
    """Return the function of weights whose value is the sum of the real rows' losses."""
    return lambda w: jnp.sum(loss_of(w, rows, answers) * real)


def mean(loss_of, *batch):
    """Return the function of weights whose value is the mean of the real rows' losses."""
    return lambda w: total(loss_of, *batch)(w) / jnp.maximum(jnp.sum(batch[-1]), 1)


def divide(sums, count):
    return jax.tree.map(lambda summed: summed / count, sums)


def mean_of_own_means(loss_of, weights, *batch):
    return jax.lax.pmean(jax.grad(mean(loss_of, *batch))(own(weights)), "data")


def fell_into_the_trap(loss_of, weights, *batch):
    sums = jax.grad(total(loss_of, *batch))(weights)
    return divide(*jax.lax.psum((sums, jnp.sum(batch[-1])), "data"))


def pmean_in_the_loss(loss_of, weights, *batch):
    def mean_of_all(w):
        sums = total(loss_of, *batch)(w), jnp.sum(batch[-1])
        return jnp.divide(*jax.lax.pmean(sums, "data"))

    return jax.lax.pmean(jax.grad(mean_of_all)(own(weights)), "data")


def knows_the_count(loss_of, weights, *batch):
    return divide(jax.lax.psum(jax.grad(total(loss_of, *batch))(own(weights)), "data"), 7)


def first_rows(loss_of, weights, rows, answers, real):
    return sum_over_count(loss_of, weights, rows, answers, jnp.arange(len(real)) < jnp.sum(real))


def sum_over_count(loss_of, weights, *batch):
    return fell_into_the_trap(loss_of, own(weights), *batch)  # and did not: the weights vary


def cuts_rows_itself(loss_of, mesh):
    def on_each_device(weights, rows, answers, real):
        first = jax.lax.axis_index("data") * len(real)
        rows = jax.lax.dynamic_slice_in_dim(own(rows), first, len(real))
        return sum_over_count(loss_of, weights, rows, answers, real)

    specs = SPECS | {"in_specs": (P(), P(), P("data"), P("data"))}
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, **specs))


def counts_all_rows(loss_of, weights, *batch):
    sums = jax.grad(total(loss_of, *batch))(own(weights))
    return jax.lax.pmean(divide(sums, len(batch[-1])), "data")


def gathers_all_rows(loss_of, weights, *batch):
    every = [jax.lax.all_gather(array, "data", tiled=True) for array in batch]
    return mean_of_own_means(loss_of, weights, *every)


def all_rows_on_each(loss_of, mesh):
    def on_each_device(weights, *batch):
        return jax.lax.pmean(jax.grad(mean(loss_of, *batch))(own(weights)), "data")

    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=P(), out_specs=P()))


def on_one_device(loss_of, mesh):
    return jax.jit(lambda weights, *batch: jax.grad(mean(loss_of, *batch))(weights))


def one_collective_too_many(loss_of, weights, *batch):
    sums = jax.lax.psum(jax.grad(total(loss_of, *batch))(own(weights)), "data")
    twice = jax.lax.pmean(own(sums), "data")
    return divide(twice, jax.lax.psum(jnp.sum(batch[-1]), "data"))


# --- Task 3 ---


def longer(batch, share, missing, row=0):
    """Return batch and share with so many rows more: `row` times the last one."""
    *arrays, shares = [np.concatenate([a, *[row * a[-1:]] * missing]) for a in (*batch, share)]
    return arrays, shares


def repeats_the_last_row(batch, share, count):
    return longer(batch, share, -len(share) % count, row=1)


def equal_shares(batch, share, count):
    arrays, shares = longer(batch, share, -len(share) % count)
    return arrays, np.full(len(shares), 1 / len(shares))


def words_become_floats(batch, share, count):
    missing = -len(share) % count
    every = [np.concatenate([a, np.zeros((missing, *a.shape[1:]))]) for a in (*batch, share)]
    return every[:-1], every[-1]


def drops_rows(batch, share, count):
    kept = len(share) // count * count
    return [array[:kept] for array in batch], share[:kept]


def two_rows(batch, share, count):
    return longer(batch, share, 2 * (count > 2))


def always_fills_up(batch, share, count):
    return longer(batch, share, count - len(share) % count)


WRONG = {
    "times_too_large": {
        "that of pmean": (4, "psum does not divide"),
        "right": (1, "nobody has added up yet"),
        "half": (8, "follow one number"),
    },
    "data_parallel_gradient": {
        "the mean of means": (divided(mean_of_own_means), "on 2 devices the gradient of"),
        "the trap": (divided(fell_into_the_trap), "2 times the right one"),
        "a pmean in the loss": (divided(pmean_in_the_loss), "0.5 times the right one"),
        "all rows count": (divided(counts_all_rows), "0.5833 times the right one"),
        "knows the count": (divided(knows_the_count), "0.2857 times the right one"),
        "no holes": (divided(first_rows), "the gradient of"),
        "cuts rows itself": (cuts_rows_itself, "computes with all rows"),
        "gathers all rows": (divided(gathers_all_rows), "computes with all rows"),
        "all rows on each": (all_rows_on_each, "computes with all rows"),
        "one device": (on_one_device, "computes with all rows"),
        "two all-reduces": (divided(one_collective_too_many), "bytes; "),
    },
    "fill_up": {
        "repeats the last row": (repeats_the_last_row, "which rows count?"),
        "equal shares": (equal_shares, "which rows count?"),
        "words become floats": (words_become_floats, "float64"),
        "drops rows": (drops_rows, "there must be 12 rows"),
        "two rows, always": (two_rows, "11 rows, count 2: there must be 12"),
        "always": (always_fills_up, "there must be 10 rows"),
    },
}
