"""Flags of the commands: argparse, whose errors are one line here."""

import argparse
import re


class Flags(argparse.ArgumentParser):
    """A parser without abbreviations. A mistake costs one line on stderr, and exit code 2."""

    def __init__(self, prog, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message[:300]}\n")


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
            problem = f"must be a whole number from {low} to {high}, not {text[:40]!r}"
            raise argparse.ArgumentTypeError(problem)
        return int(text)

    return number


def split_at_dashes(arguments):
    """Return (what stands before "--", what follows it and is for somebody else as it is)."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]
