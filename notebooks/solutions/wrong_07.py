"""Wrong answers to the task of lesson 07, each with what the check must say about it."""

from solutions.lesson_07 import solution


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
def order(value, n):
    return [value[k::n] for k in range(n)]


@guarded
def padded(value, n):
    import tensorflow as tf

    return tf.split(tf.pad(value, [[0, -count_rows(value) % n], [0, 0]]), n)


@guarded
def always_4(value, n):
    return solution(value, 4)


def as_float(value, n):
    import tensorflow as tf

    return solution(tf.cast(value, "float32"), n)


def no_device(value, n):
    return solution(value, max(1, n))


WRONG = {
    "split_rows": {
        "tf.split": (split, "divides only rows"),
        "value.shape": (shape, "tf.shape"),
        "rows are lost": (lost, "some are lost"),
        "uneven parts": (uneven, "must differ by one"),
        "another order": (order, "another order"),
        "padded": (padded, "some were added"),
        "always 4": (always_4, "towers: 5: a list of 5 tensors is needed"),
        "another type": (as_float, "the parts are float32, the value is int32"),
        "no device": (no_device, "ValueError"),
    }
}
