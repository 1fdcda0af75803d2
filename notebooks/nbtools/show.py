"""Show the source of the lesson's functions: what you read is what runs."""

import difflib
import inspect
from pathlib import Path


def show(*things):
    """Return the source of one or more functions, classes or files (a Path) as Markdown.

    nbval compares it: when the script changes, the notebook turns red until it is executed again.
    """
    return _code("python", "\n\n\n".join(map(_source, things)))


def _source(thing):
    return (thing.read_text() if isinstance(thing, Path) else inspect.getsource(thing)).rstrip()


def show_difference(old, new):
    """Return what has to change in the source of `old` to get that of `new`, as Markdown.

    Lines that begin with `-` go, lines that begin with `+` come; all other lines stay.
    """
    before, after = _source(old).splitlines(), _source(new).splitlines()
    lines = difflib.unified_diff(before, after, n=len(before) + len(after), lineterm="")
    return _code("diff", "\n".join(list(lines)[3:]))  # without the names of files and the range


def _code(language, text):
    from IPython.display import Markdown

    return Markdown(f"```{language}\n{text}\n```")
