"""Show the source of the lesson's functions: what you read is what runs."""

import difflib
import inspect


def show(*functions):
    """Return the source of one or more functions or classes as Markdown.

    nbval compares it: when the script changes, the notebook turns red until it is executed again.
    """
    sources = [inspect.getsource(function).rstrip() for function in functions]
    return _code("python", "\n\n\n".join(sources))


def show_difference(old, new):
    """Return what has to change in the source of `old` to get that of `new`, as Markdown.

    Lines that begin with `-` go, lines that begin with `+` come; all other lines stay.
    """
    before = inspect.getsource(old).rstrip().splitlines()
    after = inspect.getsource(new).rstrip().splitlines()
    lines = difflib.unified_diff(before, after, n=len(before) + len(after), lineterm="")
    return _code("diff", "\n".join(list(lines)[3:]))  # without the names of files and the range


def _code(language, text):
    from IPython.display import Markdown

    return Markdown(f"```{language}\n{text}\n```")
