"""The page docs/errors.md as a table: which messages it knows, and what it says of each.

A message of the page is a heading of the third order: its words stand between backticks, and an
ellipsis stands for any words. Below it, up to the next heading, stand what has happened, a
paragraph that begins with "**Cure.**", and a last line whose first word is the message's role.
"""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("errors.md")  # a link to docs/errors.md

# Who says such a message, the most telling role first.
CAUSE = "Cause"  # the rank that has made a mistake, or to which something has happened
MISMATCH = "Mismatch"  # a rank that met another one in the wrong call: either can be wrong
WAIT = "Wait"  # a rank that waited in vain
ECHO = "Echo"  # a rank that lost another one
WARNING = "Warning"  # anybody, also in a job that trains well
ROLES = [CAUSE, MISMATCH, WAIT, ECHO, WARNING]


class Entry(NamedTuple):
    """A message of the page.

    `lessons` has the two digits of each, `group` is the title above, `source` says where the
    message was seen or read, in Markdown.
    """

    wordings: tuple
    role: str
    happened: str
    cure: str
    lessons: tuple
    group: str
    source: str

    def words_in(self, line):
        """Return the words of the message that this line has, or None."""
        return next((wording.words for wording in self.wordings if wording.is_in(line)), None)


class Wording:
    """Words with ellipses. Their longest part is looked for first: that is quick."""

    def __init__(self, words):
        self.words = words
        parts = [part.strip() for part in words.split("…")]
        self.longest = max(parts, key=len)
        self.pattern = re.compile(".*?".join(re.escape(part) for part in parts) + r"(?!\d)")

    def is_in(self, line):
        return self.longest in line and self.pattern.search(line) is not None


def read_page(path=PAGE):
    """Return the entries of the page, in its order."""
    text = path.read_text(encoding="utf-8").partition("\n[01]: ")[0]  # then come the links' ends
    entries = []
    for group in text.split("\n## ")[1:]:
        title, *parts = group.split("\n### ")
        entries += [entry_of(part, title.strip()) for part in parts if part.startswith("`")]
    return entries


def entry_of(part, group):
    """Return the entry of a heading and what stands below it."""
    heading, *paragraphs = [paragraph.strip() for paragraph in part.strip().split("\n\n")]
    *said, last = paragraphs
    cures = [number for number, paragraph in enumerate(said) if paragraph.startswith("**Cure.**")]
    role = re.match(r"\w+", last).group()
    if role not in ROLES or len(cures) != 1:
        raise ValueError(f"errors.md: {heading} has no role, or not one cure")
    return Entry(
        wordings=tuple(Wording(words) for words in re.findall("`([^`]+)`", heading)),
        role=role,
        happened=plain(" ".join(said[: cures[0]])),
        cure=plain(" ".join(said[cures[0] :])).removeprefix("Cure. "),
        lessons=tuple(re.findall(r"\[(\d\d)\]", last)),
        group=group,
        source=last,
    )


def plain(markdown):
    """Return the words of a paragraph, without its marks; of a link, its text."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"\*\*?([^*` ][^*`]*)\*\*?", r"\1", text)
    return re.sub(r"\s+", " ", text.replace("`", ""))
