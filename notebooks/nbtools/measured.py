"""Numbers that a run has measured, shown to the reader and still checked.

`pytest --nbval` compares the text of outputs. It is told (`nbval_sanitize.cfg`) to ignore the
digits that follow the sign ≈, and nothing else. So the reader sees the number, a machine that
differs in the third digit stays green, and the bound that the number must keep stands in the cell.
"""


class OutOfBounds(AssertionError):
    """A measured number is not where the notebook says it must be."""


def measured(value, low, high, digits=3):
    """Return `value` as text, ≈0.412, with `digits` digits, if low <= value <= high.

    Raises OutOfBounds if it is not, also for nan.
    """
    value = float(value)
    if not low <= value <= high:
        raise OutOfBounds(f"measured {value:.{digits}g}, which is not from {low} to {high}")
    return f"≈{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"≈{value:.{digits}g}"
