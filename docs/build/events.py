"""Read the events that the pictures of the notebooks carry, and hand them to the site's player.

`nbtools.pictures` puts what a picture shows into the text of its PNG, and the PNG is stored in the
notebook. So the player can show nothing else than the notebook does. No package is needed.
"""

import base64
import json
import zlib
from pathlib import Path

SIGNATURE = b"\x89PNG\r\n\x1a\n"
STORIES = {  # name in player.js: (lesson, kind, title of the picture)
    "ring": (
        "11",
        "strip",
        "A ring: sums grow in the first half of the steps, and go round in the second",
    ),
    "data_parallel": (
        "01",
        "strip",
        "One step: everything goes out from device 0, and comes back to it",
    ),
    "buckets": ("02", "lanes", "Small buckets: gradients travel while backward still computes"),
    "one_f_one_b": ("12", "lanes", "1F1B: each backward comes as early as it can"),
}


def recorded(notebook):
    """Return what the stored pictures of a notebook carry, in their order: a list of dicts."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = ["".join(kinds["image/png"]) for kinds in data if "image/png" in kinds]
    texts = [png_text(base64.b64decode(picture)) for picture in pictures]
    carried = [text["Description"] for text in texts if "Description" in text]
    return [json.loads(description) for description in carried]


def png_text(png):
    """Return the text of a PNG: {keyword: text}."""
    if not png.startswith(SIGNATURE):
        raise ValueError("this is no PNG")
    found, place = {}, len(SIGNATURE)
    while place < len(png):
        length = int.from_bytes(png[place : place + 4], "big")
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword, _, rest = content.partition(b"\0")
            found[keyword.decode("latin-1")] = chunk_text(kind, rest)
        place += 12 + length  # length, kind and check sum have four bytes each
    return found


def chunk_text(kind, rest):
    """Return the text of a chunk; `rest` is what comes after its keyword."""
    if kind == b"tEXt":
        return rest.decode("latin-1")
    if kind == b"zTXt":  # one byte for the method comes first
        return zlib.decompress(rest[1:]).decode("latin-1")
    compressed = rest[0] == 1
    _, _, text = rest[2:].split(b"\0", 2)  # a language, and the keyword in it
    return (zlib.decompress(text) if compressed else text).decode("utf-8")


def find_story(root, name):
    """Return the story `name` as the picture in its notebook carries it, and its lesson."""
    lesson, kind, title = STORIES[name]
    notebooks = list(Path(root, "notebooks").glob(f"lesson_{lesson}_*.ipynb"))
    stories = [story for notebook in notebooks for story in recorded(notebook)]
    for story in stories:
        if (story["kind"], story["title"]) == (kind, title):
            return story | {"lesson": lesson}
    known = ", ".join(f"{story['kind']} '{story['title']}'" for story in stories) or "none"
    raise LookupError(
        f"lesson_{lesson} has no picture of kind {kind} with the title '{title}' that carries its"
        f" events (it has: {known}). Execute the notebook again, or change STORIES."
    )


def write_player_data(root, file):
    """Write the stories for player.js: a script, because a page from a file may not fetch JSON."""
    stories = {name: find_story(root, name) for name in STORIES}
    text = json.dumps(stories, ensure_ascii=False, separators=(",", ":"))
    Path(file).write_text(f"const RECORDED = {text};\n", encoding="utf-8")
