"""What 16 bits lose: updates, gradients, the factor of a loss."""

import math

from lockstep.watch.findings import NOT_MEANT, WRONG, some
from lockstep.watch.findings.training import is_even


def halves(job, report):
    """Judge the updates of each rank by themselves, optimizer by optimizer."""
    for number, rank in job.items():
        for optimizer in rank.optimizers.values():
            updates = [u for u in rank.updates if u["optimizer"] == optimizer["number_of"]]
            for look in (not_finite, clipped_while_scaled, still_scaled, crumbs, lost):
                look(updates, optimizer, number, report)
    if any(rank.updates for rank in job.values()):
        report.look("gradients: no inf, no nan")


def not_finite(updates, optimizer, rank, report):
    """An update is made with inf or nan."""
    for number, update in enumerate(updates, 1):
        bad = [n for n, mean in enumerate(update["means"]) if mean is not None and is_bad(mean)]
        if bad:
            text = f"update {number} is made though the gradient of {optimizer['names'][bad[0]]}"
            text += " has inf or nan"
            if not is_bad(update["own_norms"][bad[0]]):
                text += ", and this rank's own had not: was the sum too large for its type?"
            report.found("inf or nan", WRONG, text, update["where"])
            return


def is_bad(number):
    """Return whether a number is inf or nan."""
    return not math.isfinite(number)


def clipped_while_scaled(updates, optimizer, rank, report):
    """All gradients are divided by one number after they were clipped."""
    for number, update in enumerate(updates, 1):
        pairs = zip(update["means"], update["clipped_to"], strict=True)
        ratios = [to / mean for mean, to in pairs if mean and to]
        if is_even(ratios) and ratios[0] > 1.5:
            text = f"in update {number} gradients are clipped, and then divided by {ratios[0]:.6g}:"
            text += " the largest norm was that of gradients with the factor of the loss"
            report.found("clipped while scaled", NOT_MEANT, text, update["clipped"][-1])
            return


def still_scaled(updates, optimizer, rank, report):
    """A GradScaler has multiplied the loss, and nobody has divided the gradients."""
    for number, update in enumerate(updates, 1):
        if update["factor"] not in (None, 1.0):
            text = (
                f"update {number} takes gradients that are {update['factor']:.6g} times too large:"
            )
            text += " GradScaler has multiplied the loss, and not divided them"
            report.found("still scaled", NOT_MEANT, text, update["where"])
            return


def crumbs(updates, optimizer, rank, report):
    """Gradients are the smallest numbers that float16 has, in more than half of the updates."""
    columns = zip(
        optimizer["names"], zip(*(u["crumbs"] for u in updates), strict=True), strict=False
    )
    names = [name for name, column in columns if 2 * sum(column) > len(column)]
    if names:
        text = (
            f"gradients of {some(names)} are float16's smallest numbers, and most digits are lost"
        )
        report.found("lost in float16", NOT_MEANT, text, updates[0]["where"])


def lost(updates, optimizer, rank, report):
    """Most weights of 16 bits stay as they are, although they have gradients."""
    pairs = [u["halves"] for u in updates if u["halves"]]
    had, same = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    if 2 * same > had:
        kinds = sorted({kind for kind in optimizer["kinds"] if kind.endswith("float16")})
        text = f"weights are {' and '.join(kinds)}: {same / had:.0%} of the numbers that had a"
        text += " gradient are the same after an update, which was too small for them"
        report.found("updates lost", NOT_MEANT, text, updates[0]["where"])
