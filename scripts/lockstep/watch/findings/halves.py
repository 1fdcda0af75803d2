"""What 16 bits lose: updates, gradients, the factor of a loss."""

import math
import statistics

from lockstep.watch.findings import NOT_MEANT, WRONG, some
from lockstep.watch.findings.training import is_even


def halves(job, report):
    """Judge the updates of each rank by themselves, optimizer by optimizer."""
    for rank in job.values():
        for key, optimizer in rank.optimizers.items():
            updates = updates_of(rank, key)
            theirs = [updates_of(other, key) for other in job.values()]
            for look in (not_finite, clipped_while_scaled, still_scaled, crumbs, lost):
                look(updates, theirs, optimizer, report)
    every = [update for rank in job.values() for update in rank.updates]
    if every and not any(bad_in(update) for update in every):
        report.look("gradients: no inf, no nan")


def updates_of(rank, optimizer):
    """Return the updates that an optimizer of a rank has made."""
    return [update for update in rank.updates if update["optimizer"] == optimizer]


def bad_in(update):
    """Return the numbers of the gradients that have inf or nan."""
    return [n for n, mean in enumerate(update["means"]) if mean is not None and is_bad(mean)]


def not_finite(updates, theirs, optimizer, report):
    """An update is made with inf or nan. (A fused optimizer is called, and changes nothing.)"""
    for number, update in enumerate(updates, 1):
        bad = bad_in(update)
        if bad and update["before"] != update["after"]:
            text = f"update {number} is made though the gradient of {optimizer['names'][bad[0]]}"
            text += " has inf or nan" + origin(bad[0], number, update, theirs)
            report.found("inf or nan", WRONG, text, update["where"])
            return


def origin(n, number, update, theirs):
    """Say where inf or nan in a gradient came from, as far as the ranks' own gradients tell it.

    A rank that has skipped an update counts otherwise, so it can't be asked.
    """
    if is_bad(update["own_norms"][n]):
        return ""
    at = {sum(len(u["backwards"]) for u in of[:number]) for of in theirs}
    if len(at) > 1 or any(len(of) < number for of in theirs):
        return ", and this rank's own had not"
    norms = [of[number - 1]["own_norms"][n] for of in theirs]
    if bad := [rank for rank, norm in enumerate(norms) if is_bad(norm)]:
        return f", and this rank's own had not: it came from rank {bad[0]}"
    text = ", and no rank's own had: is it, or the sum, too large for the type it is sent in?"
    return text if any(norms) else ", and this rank's own had not"


def is_bad(number):
    """Return whether a number is inf or nan."""
    return not math.isfinite(number)


def clipped_while_scaled(updates, theirs, optimizer, report):
    """All gradients are divided by one number after they were clipped to a small norm."""
    for number, update in enumerate(updates, 1):
        pairs = zip(update["means"], update["clipped_to"], strict=True)
        ratios = [to / mean for mean, to in pairs if mean and to]
        if is_even(ratios) and ratios[0] > 1.5 and update["limit"] < 0.01 * ratios[0]:
            text = f"in update {number} gradients are clipped to {update['limit']:.3g}, and then"
            text += f" divided by {ratios[0]:.6g}: the norm was that of gradients with the factor"
            text += " of the loss (right, if the limit has the factor in it, too)"
            report.found("clipped while scaled", NOT_MEANT, text, update["clipped"][-1])
            return


def still_scaled(updates, theirs, optimizer, report):
    """A GradScaler has multiplied the loss, and nobody has divided the gradients."""
    for number, update in enumerate(updates, 1):
        factor = update["factor"]
        if factor and factor > 1 and is_undivided(update, factor, number, theirs):
            text = f"update {number} takes gradients that are {factor:.6g} times too large:"
            text += " GradScaler has multiplied the loss, and nobody has divided them"
            report.found("still scaled", NOT_MEANT, text, update["where"])
            return


def is_undivided(update, factor, number, theirs):
    """Return whether gradients, before they were clipped, are what backward() has handed over.

    They are about the mean of the ranks' own then, and not a part of it, by the factor.
    """
    one = [of[number - 1] for of in theirs if len(of) >= number]
    ratios = []
    for n, mean in enumerate(update["means"]):
        first = update["unclipped"][n]
        given = mean if first is None else first
        own = sum(u["own"][n] for u in one) / len(one)
        length = sum(u["own_norms"][n] for u in one) / len(one)
        if given and math.isfinite(given / (own or 1)) and abs(own) > 0.1 * length > 0:
            ratios.append(abs(given / own))
    return bool(ratios) and statistics.median(ratios) > factor**-0.5


def crumbs(updates, theirs, optimizer, report):
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


def lost(updates, theirs, optimizer, report):
    """Most weights of 16 bits stay as they are, although they have gradients."""
    pairs = [u["halves"] for u in updates if u["halves"]]
    had, same = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    if 2 * same > had:
        kinds = sorted({kind for kind in optimizer["kinds"] if kind.endswith("float16")})
        text = f"weights are {' and '.join(kinds)}: {same / had:.0%} of the numbers that had a"
        text += " gradient are the same after an update, which was too small for them (right, if"
        text += " the optimizer rounds at random)"
        report.found("updates lost", NOT_MEANT, text, updates[0]["where"])
