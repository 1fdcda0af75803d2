"""The language model of lessons 07 and 08 in NumPy: what their frameworks are held against.

No framework has a part in it, so it can't share a mistake with one of them. The weights are those
of `initial_weights` in the lessons: an embedding, two LSTM layers, and scores for all words.
"""

import numpy as np


def by_hand(weights, inputs, targets, mask):
    """Return the loss of a whole batch, and {name: gradient}, computed in float64.

    The loss is the mean over all words whose mask is 1; inputs are (rows, time).
    """
    w = {name: np.float64(array) for name, array in weights.items()}
    rows, layers = w["embedding"][inputs.T], {}  # (time, rows, width)
    for layer in (1, 2):
        layers[layer] = forward(rows, w[f"kernel_{layer}"], w[f"bias_{layer}"])
        rows = np.stack([h for *_, h in layers[layer]])
    scores = rows @ w["softmax_kernel"] + w["softmax_bias"]
    chances = np.exp(scores - scores.max(2, keepdims=True))
    chances /= chances.sum(2, keepdims=True)
    right = *np.indices(targets.T.shape), targets.T
    share = mask.T / mask.sum()  # of each word in the loss
    loss = -(np.log(chances[right]) * share).sum()
    chances[right] -= 1
    errors = chances * share[..., None]  # the gradient of the scores
    found = {"softmax_kernel": np.einsum("trw,trv->wv", rows, errors, optimize=True)}
    found["softmax_bias"] = errors.sum((0, 1))
    errors = errors @ w["softmax_kernel"].T
    for layer in (2, 1):
        errors, *of_weights = backward(layers[layer], errors, w[f"kernel_{layer}"])
        found[f"kernel_{layer}"], found[f"bias_{layer}"] = of_weights
    found["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(found["embedding"], inputs.T, errors)
    return float(loss), found


def forward(rows, kernel, bias):
    """Return all that an LSTM layer computes for `rows`, word by word; an output is the last."""
    kept, h, c = [], 0 * rows[0], 0 * rows[0]
    for x in rows:
        both, before = np.concatenate([x, h], 1), c
        i, f, g, o = np.split(both @ kernel + bias, 4, 1)
        i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f + 1, o))  # sigmoids
        g = np.tanh(g)
        c = f * before + i * g
        h = o * np.tanh(c)
        kept.append((both, before, i, f, g, o, np.tanh(c), h))
    return kept


def backward(kept, errors, kernel):
    """Return the gradients of a layer's rows, kernel and bias; `errors`: those of its outputs."""
    rows, d_kernel, d_bias = [], 0 * kernel, np.zeros(kernel.shape[1])
    d_c = d_h = 0.0  # from the word that follows
    for (both, before, i, f, g, o, tanh_c, _), error in zip(kept[::-1], errors[::-1], strict=True):
        d_h = d_h + error
        d_c = d_c + d_h * o * (1 - tanh_c**2)
        gates = d_c * g * i * (1 - i), d_c * before * f * (1 - f), d_c * i * (1 - g**2)
        gates = np.concatenate([*gates, d_h * tanh_c * o * (1 - o)], 1)
        d_kernel, d_bias = d_kernel + both.T @ gates, d_bias + gates.sum(0)
        d_x, d_h = np.split(gates @ kernel.T, 2, 1)
        d_c = d_c * f
        rows.append(d_x)
    return np.stack(rows[::-1]), d_kernel, d_bias


def difference(ours, theirs):
    """Return the largest difference, relative to the largest value of `theirs`."""
    if np.shape(ours) != np.shape(theirs):
        return np.inf
    return float(np.max(abs(np.float64(ours) - theirs)) / np.max(abs(theirs)))


def train_by_hand(weights, batches, rate):
    """Return the losses of a training with all rows, step 1's gradients, and the last weights."""
    found = {"loss": []}
    for inputs, targets, mask in batches:
        loss, slopes = by_hand(weights, inputs, targets, mask > 0)  # all words count alike
        found["loss"].append(loss)
        found.setdefault("gradient", slopes)
        weights = {name: w - rate * slopes[name] for name, w in weights.items()}
    return found | {"weight": weights}


def differences(found, right):
    """Return how far step 1 is off, and how far all losses and the last weights are; relative.

    nan, if the losses are not as many as those of `right`, which train_by_hand has returned.
    """
    if len(found["loss"]) != len(right["loss"]):
        return np.nan, np.nan
    off = {}
    for kind in ("gradient", "weight"):
        off[kind] = [difference(found[kind].get(n), array) for n, array in right[kind].items()]
    losses = abs(np.array(found["loss"]) / right["loss"] - 1)
    return np.max([losses[0], *off["gradient"]]), np.max([*losses, *off["weight"]])
