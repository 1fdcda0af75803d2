"""Read the events that the pictures of the notebooks carry, and hand them to the site's player.

`nbtools.pictures` puts what a picture shows into the text of its PNG, and the PNG is stored in the
notebook. So the player can show nothing else than the notebook does.
"""

import base64
import json
from io import BytesIO
from pathlib import Path

from PIL import Image

STORIES = {  # name in player.js: (lesson, kind, title of the picture)
    "ring": (
        "11",
        "strip",
        "A ring: sums grow in the first half of the steps, and go round in the second",
    ),
    "tree": (
        "16",
        "strip",
        "A tree of six ranks: sums go up to rank 0, and the whole sum comes down",
    ),
    "doubling": (
        "16",
        "strip",
        "Doubling: every rank sends in every round, and nobody has to be told",
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
    texts = [Image.open(BytesIO(base64.b64decode(picture))).text for picture in pictures]
    carried = [text["Description"] for text in texts if "Description" in text]
    return [json.loads(description) for description in carried]


def find_story(root, name):
    """Return the story `name` as the picture in its notebook carries it, and its lesson."""
    lesson, kind, title = STORIES[name]
    notebooks = list(Path(root, "notebooks").glob(f"lesson_{lesson}_*.ipynb"))
    stories = [story for notebook in notebooks for story in recorded(notebook)]
    for story in stories:
        if (story["kind"], story["title"]) == (kind, title):
            return story | {"lesson": lesson}
    raise LookupError(
        f"lesson_{lesson} has no picture of kind {kind} with the title '{title}' that carries its"
        " events. Execute the notebook again, or change STORIES."
    )


def write_player_data(root, file):
    """Write the stories for player.js: a script, because a page from a file may not fetch JSON."""
    stories = {name: find_story(root, name) for name in STORIES}
    text = json.dumps(stories, ensure_ascii=False, separators=(",", ":"))
    Path(file).write_text(f"const RECORDED = {text};\n", encoding="utf-8")
