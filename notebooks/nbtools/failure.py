"""Why a rank has failed, in one line."""

import re
import time
import traceback
from typing import NamedTuple

import cloudpickle

from nbtools.where import find_place

# What gloo and the stores say to a rank whose neighbour has gone, or does not come.
LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Connection was likely closed"
    "|Broken pipe|Socket closed|connectFullMesh failed"
)
LATE = re.compile("timed out|timeout", re.IGNORECASE)


class Failure(NamedTuple):
    """Why a rank has failed. A failure is secondary if it only tells that another rank is gone."""

    time: float
    secondary: bool
    message: str  # follows the words "rank 0"
    details: str = ""


class NotSent(Exception):
    """Something can't travel to another process."""


def pickle(thing, name):
    """Return `thing` as bytes; raises NotSent."""
    try:
        return cloudpickle.dumps(thing)
    except Exception as error:
        raise NotSent(f"{name} can't be pickled: {first_line(error)}") from error


def unpickle(data, name):
    """Return what was pickled; raises NotSent."""
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise NotSent(f"{name} can't be unpickled: {first_line(error)}") from error


def describe(error):
    """Return the Failure of the rank that has caught `error`."""
    stack = traceback.extract_tb(error.__traceback__)
    place = find_place([(frame.filename, frame.lineno, frame.name) for frame in reversed(stack)])
    text = first_line(error)
    from_neighbour = isinstance(error, RuntimeError)  # so are the errors of torch.distributed
    lost = from_neighbour and LOST.search(str(error))
    late = from_neighbour and LATE.search(str(error))
    if isinstance(error, NotSent):
        message = f": {error}"
    elif lost and place:
        message = f" lost its connection {place}"
    elif place:
        message = f": {text} (in {place.function}, line {place.line})"
    else:
        message = f": {text} (in {stack[-1].name}, line {stack[-1].lineno})"
    return Failure(time.monotonic(), bool(lost or late), message, traceback.format_exc())


def first_line(error):
    """Return the type of an exception and the first line of its message, as Python prints them."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return in_plain_words(lines[0])


def in_plain_words(text):
    """Return what C++ code said, without the place in its source."""
    sizes = re.search(r"(\d+) vs (\d+)\. Received data size doesn't match expected size", text)
    if sizes:
        received, expected = sizes.groups()
        return (
            f"{received} bytes came where {expected} were expected:"
            " do all ranks pass tensors of the same size and type?"
        )
    return re.sub(r"\[[^][]*\.(cc|cpp|h):\d+\] ", "", text)
