"""Execute notebooks in place, and store their outputs.

    bash scripts/notebooks.sh --execute                                             all of them
    bash scripts/notebooks.sh --execute notebooks/lesson_01_data_parallel.ipynb     one

What is stored is what `pytest --nbval` compares with later. A second run leaves the files as they
are: nothing that changes from run to run, such as times, is kept.
"""

import base64
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lockstep.flags import Flags
from lockstep.lessons import ROOT


def execute(path):
    """Execute one notebook on this interpreter; write it back only if every cell succeeds."""
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, kernel_name="python3", resources=place, **options).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    nbformat.write(notebook, path)
    save_readme_picture(notebook)


def save_readme_picture(notebook):
    """Write the first figure of the cell that is tagged `readme-picture`, if there is one."""
    for cell in notebook.cells:
        if "readme-picture" in cell.metadata.get("tags", []):
            figures = [output.data for output in cell.outputs if "data" in output]
            picture = next(data["image/png"] for data in figures if "image/png" in data)
            (ROOT / "docs" / "overlap.png").write_bytes(base64.b64decode(picture))


def main(arguments):
    """Execute the notebooks that are named, or all of them; return the exit code."""
    parser = Flags("notebooks.sh --execute", description=__doc__)
    parser.add_argument("notebook", nargs="*", type=Path)
    paths = parser.parse_args(arguments).notebook or sorted(ROOT.glob("notebooks/lesson_*.ipynb"))
    for path in paths:
        if not path.is_file():
            parser.error(f"no such notebook: {path}")
    for path in paths:
        print(f"executing {path.name} ...", flush=True)
        try:
            execute(path.resolve())
        except CellExecutionError as error:
            sys.exit(f"{path.name} was left as it was: {error}")
    return 0
