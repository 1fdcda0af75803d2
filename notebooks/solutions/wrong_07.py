"""Wrong attempts at the tasks of lesson 07, and words that their verdict must contain."""

import numpy as np
from solutions.lesson_07 import loss_per_word, split_rows

# --- Task 2 ---


def guarded(function):
    """Return the function with the error that it must raise when there is no device."""

    def attempt(value, num_devices):
        if num_devices < 1:
            raise ValueError("num_devices must be at least 1")
        return function(value, num_devices)

    return attempt


def count_rows(value):
    import tensorflow as tf

    return tf.shape(value)[0]


def cut(value, size, n):
    return [value[k * size : (k + 1) * size] for k in range(n)]


def split(value, num_devices):
    import tensorflow as tf

    return tf.split(value, num_devices)


@guarded
def shape(value, n):
    return [value[value.shape[0] * k // n :] for k in range(n)]


@guarded
def lost(value, n):
    return cut(value, count_rows(value) // n, n)


@guarded
def uneven(value, n):
    return cut(value, (count_rows(value) + n - 1) // n, n)


@guarded
def asks_a_node(value, n):
    import tensorflow as tf

    rows = count_rows(value)
    return tf.split(value, [rows // n + (1 if k < rows % n else 0) for k in range(n)])


@guarded
def order(value, n):
    return [value[k::n] for k in range(n)]


@guarded
def padded(value, n):
    import tensorflow as tf

    return tf.split(tf.pad(value, [[0, -count_rows(value) % n], [0, 0]]), n)


@guarded
def always_4(value, n):
    return split_rows(value, 4)


def as_float(value, n):
    import tensorflow as tf

    return split_rows(tf.cast(value, "float32"), n)


@guarded
def by_python(value, n):
    import tensorflow as tf

    return tf.numpy_function(
        lambda rows: tuple(np.array_split(rows, n)), [value], [value.dtype] * n
    )


def no_device(value, n):
    return split_rows(value, max(1, n))


# --- Task 3 ---


def published(losses, masks):
    """The article's line: the matrices added, then divided by tf.size."""
    import tensorflow as tf

    positions = tf.add_n([tf.size(mask) for mask in masks])
    return tf.reduce_sum(tf.add_n(losses)) / tf.cast(positions, "float32")


def padded_length(losses, masks):
    import tensorflow as tf

    positions = tf.add_n([tf.size(mask) for mask in masks])
    return tf.add_n([tf.reduce_sum(loss) for loss in losses]) / tf.cast(positions, "float32")


def matrices(losses, masks):
    import tensorflow as tf

    return tf.reduce_sum(tf.add_n(losses)) / tf.add_n([tf.reduce_sum(mask) for mask in masks])


def mean_of_means(losses, masks):
    import tensorflow as tf

    pairs = zip(losses, masks, strict=True)
    return tf.add_n([tf.reduce_sum(a) / tf.reduce_sum(b) for a, b in pairs]) / len(losses)


def concat(losses, masks):
    import tensorflow as tf

    return tf.reduce_sum(tf.concat(losses, 0)) / tf.reduce_sum(tf.concat(masks, 0))


def first_tower_counts(losses, masks):
    import tensorflow as tf

    total = tf.add_n([tf.reduce_sum(loss) for loss in losses])
    return total / tf.reduce_sum(masks[0])


def counted_losses(losses, masks):
    import tensorflow as tf

    words = tf.add_n([tf.math.count_nonzero(loss, dtype="float32") for loss in losses])
    return tf.add_n([tf.reduce_sum(loss) for loss in losses]) / words


def no_gradient(losses, masks):
    import tensorflow as tf

    return tf.stop_gradient(mean_of_means(losses, masks))


def half_a_gradient(losses, masks):
    import tensorflow as tf

    return loss_per_word([tf.stop_gradient(part) / 2 + part / 2 for part in losses], masks)


def zero_gradient(losses, masks):
    import tensorflow as tf

    return tf.stop_gradient(loss_per_word(losses, masks)) + 0 * tf.add_n(
        [tf.reduce_sum(part) for part in losses]
    )


def nothing_is_merged(losses, masks):
    return losses[0]


WRONG = {
    "result_of_the_graph": {
        "the last step": (2100, "when did Python multiply"),
        "always 1": (21, "within the loop"),
        "another": (7, "three multiplications"),
    },
    "split_rows": {
        "tf.split": (split, "divides only rows"),
        "value.shape": (shape, "tf.shape"),
        "a node is asked": (asks_a_node, "a node has no value yet"),
        "rows are lost": (lost, "some are lost"),
        "uneven parts": (uneven, "must differ by one"),
        "another order": (order, "another order"),
        "padded": (padded, "some were added"),
        "always 4": (always_4, "towers: 5: a list of 5 tensors is needed"),
        "another type": (as_float, "the parts are float32, the value is int32"),
        "by Python": (by_python, "made by Python in each step"),
        "no device": (no_device, "ValueError"),
    },
    "loss_per_word": {
        "the published line": (published, "padding is counted as words"),
        "the padded length": (padded_length, "padding is counted as words"),
        "matrices are added": (matrices, "matrices of different lengths can be neither"),
        "a mean of means": (mean_of_means, "a mean of the towers' means"),
        "concat": (concat, "matrices of different lengths can be neither"),
        "the first tower's words": (first_tower_counts, "should the sum be divided by"),
        "nonzero losses are counted": (counted_losses, "should the sum be divided by"),
        "stopped": (no_gradient, "the gradient does not get through"),
        "half a gradient": (half_a_gradient, "its gradient is another one's"),
        "zero gradient": (zero_gradient, "the gradient does not get through"),
        "nothing is merged": (nothing_is_merged, "a scalar is wanted"),
    },
    "bytes_of_rows": {
        "the table": (8_000_000, "the whole table"),
        "both ways, or both towers": (1_120_000, "too much by two"),
        "numbers": (140_000, "how many bytes has each"),
        "another": (700, "for each position"),
    },
}
