"""Execute notebooks in place, and store their outputs.

    bash scripts/execute_notebooks.sh                                       all of them
    bash scripts/execute_notebooks.sh notebooks/lesson_01_data_parallel.ipynb   one

What is stored is what `pytest --nbval` compares with later. A second run leaves the files as they
are: nothing that changes from run to run, such as times, is kept.
"""

import argparse
import base64
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"


def execute(path):
    """Execute one notebook on this interpreter; write it back only if every cell succeeds."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        merge_streams(cell)
    nbformat.write(notebook, path)
    save_readme_picture(notebook)


def save_readme_picture(notebook):
    """Write the first figure of the cell that is tagged `readme-picture`, if there is one."""
    for cell in notebook.cells:
        if "readme-picture" in cell.metadata.get("tags", []):
            figures = [output.data for output in cell.outputs if "data" in output]
            picture = next(data["image/png"] for data in figures if "image/png" in data)
            (ROOT / "docs").mkdir(exist_ok=True)
            (ROOT / "docs" / "overlap.png").write_bytes(base64.b64decode(picture))


def merge_streams(cell):
    """Join neighbouring pieces of one stream: where they are cut depends on timing."""
    merged = []
    for output in cell.get("outputs", []):
        same = merged and output.output_type == merged[-1].output_type == "stream"
        if same and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    if "outputs" in cell:
        cell.outputs = merged


def main():
    """Execute the notebooks named on the command line, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", nargs="*", type=Path)
    paths = parser.parse_args().notebook or sorted(NOTEBOOKS.glob("lesson_*.ipynb"))
    for path in paths:
        if not path.is_file():
            parser.error(f"no such notebook: {path}")
    for path in paths:
        print(f"executing {path.name} ...", flush=True)
        try:
            execute(path.resolve())
        except CellExecutionError as error:
            sys.exit(f"{path.name} was left as it was: {error}")


if __name__ == "__main__":
    main()
