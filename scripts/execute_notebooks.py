"""Execute notebooks in place, and store their outputs.

    bash scripts/execute_notebooks.sh                                       all of them
    bash scripts/execute_notebooks.sh notebooks/lesson_01_data_parallel.ipynb   one

What is stored is what `pytest --nbval` compares with later. A second run leaves the files as they
are: nothing that changes from run to run, such as times, is kept.
"""

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


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
