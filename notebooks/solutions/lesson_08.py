"""The exercise of lesson 08: scale the loss, so that an average of gradients is the right gradient.

Paddle is imported in `check` only: whoever imports this file need not have it, or wait for it.
"""

import sys

import numpy as np
from lesson_08_paddle_parallel_do import import_paddle


def solution(loss_sum, words, world_size, all_reduce_sum):
    """Return this rank's loss, a scalar tensor, for a framework that averages gradients.

    `loss_sum` is the sum over this rank's `words` real words. `all_reduce_sum(number)` returns the
    sum of that number over all ranks; every rank has to call it.
    """
    return loss_sum * world_size / all_reduce_sum(words)


def average_gradient(paddle, attempt, rows, masks):
    """Let the attempt be each rank in turn; return average gradient and loss, or what is wrong.

    Each rank is asked twice. The first time we learn what it adds to the sums; the second time
    `all_reduce_sum` returns the sums of all ranks.
    """
    added, gradients, losses = [], [], []
    for totals in (None, added):
        for rank, (part, mask) in enumerate(zip(rows, masks, strict=True)):
            calls = []

            def all_reduce_sum(number, calls=calls, totals=totals):
                calls.append(float(number))
                if totals is None:
                    return calls[-1] or 1.0  # not yet a sum, but no 0 that nobody can divide by
                return sum(ours[len(calls) - 1] for ours in totals)

            weight = paddle.to_tensor(np.ones(3), stop_gradient=False)
            loss_sum = ((paddle.to_tensor(part) @ weight).exp() * paddle.to_tensor(mask)).sum()
            loss = attempt(loss_sum, float(mask.sum()), len(rows), all_reduce_sum)
            if not isinstance(loss, paddle.Tensor) or loss.stop_gradient:
                return f"rank {rank} returned no tensor that depends on loss_sum"
            if totals is None:
                added.append(calls)
            else:
                losses.append(float(loss.sum()))
                loss.sum().backward()
                gradients.append(weight.grad.numpy())
        if len({len(calls) for calls in added}) > 1:
            return "all_reduce_sum was not called by every rank: who calls it waits for the others"
    return sum(gradients) / len(rows), sum(losses) / len(rows)


def check(attempt, nproc=2):
    """Return None if the attempt is right, else one sentence about what is wrong."""
    return check_ranks(attempt, nproc) or check_ranks(attempt, nproc + 1)


def check_ranks(attempt, nproc):
    """Return None if the attempt is right for so many ranks, else what is wrong."""
    import_paddle()
    paddle = sys.modules["paddle"]
    generator = np.random.default_rng(0)
    none = [0, *[3] * (nproc - 1)] if nproc > 1 else [3]  # rank 0 of several has no words
    for lengths in (range(4, 4 + nproc), range(1, 1 + 5 * nproc, 5), [3] * nproc, none):
        rows = [generator.normal(size=(8 * nproc, 3)) for _ in lengths]
        masks = [(np.arange(8 * nproc) < length).astype("f8") for length in lengths]
        found = average_gradient(paddle, attempt, rows, masks)
        place = f"with {nproc} ranks that have {' + '.join(map(str, lengths))} words"
        if isinstance(found, str):
            return f"{place}: {found}"
        found, loss = found
        all_rows, mask = np.concatenate(rows), np.concatenate(masks)
        outputs = np.exp(all_rows.sum(1)) * mask
        expected = outputs @ all_rows / mask.sum()
        if not np.allclose(found, expected, rtol=1e-9, atol=0):
            ratio = float(found @ expected / (expected @ expected))
            hint = "some words count more than others"
            if np.isnan(found).any():
                hint = "it is nan"
            if np.allclose(found, ratio * expected):
                hint = f"it is {ratio:.3g} times the right one"
            return f"{place} the average of the gradients is not that of one process: {hint}"
        if not np.isclose(loss, outputs.sum() / mask.sum(), rtol=1e-9, atol=0):
            return f"{place} the gradients are right, but the average of the losses is {loss:.3g}"
    return None


# The task of the notebook: its check, and its solution.
TASKS = {"scale_loss": (check, solution)}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "scale_loss": (
        "Write down the gradient of the whole batch's mean, and under it what the ranks' average "
        "makes of `loss_sum`. In which two numbers do they differ, and which of them does no "
        "rank know by itself?"
    ),
}
