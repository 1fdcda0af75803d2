"""Start a lesson, after a look at what it needs: its packages, and memory for its ranks.

    python scripts/start.py LESSON.py [--nproc RANKS] [--force] [other flags of the lesson]

What is missing costs one line on stderr and exit code 2. --force starts the lesson although the
memory is not enough. The lesson gets all other flags, and takes the place of this process.
"""

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path

import memory

ROOT = Path(__file__).resolve().parent.parent
ONE_PROCESS = ("lesson_01", "lesson_07")  # their --nproc is a number of devices, not of processes
PIP_NAMES = {"sklearn": "scikit-learn", "paddle": "paddlepaddle"}  # where `import` has another name


def imported_packages(script):
    """Return the names of all packages that a script imports, at its top or in its functions."""
    names = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return sorted({name.split(".")[0] for name in names})


def missing_packages(script):
    """Return one line that says which packages a script lacks and how to get them, or None."""
    sys.path.append(str(ROOT / "lessons"))  # how_fast_report.py imports a lesson
    missing = [n for n in imported_packages(script) if importlib.util.find_spec(n) is None]
    if not missing:
        return None
    names = [PIP_NAMES.get(name, name) for name in missing]
    pins = re.findall(r"^\S+==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    pins = [pin for pin in pins if pin.split("==")[0] in names]
    return f"error: needs {', '.join(names)}: {sys.executable} -m pip install {' '.join(pins)}"


def main(script, *flags):
    """Check, then become the lesson; or return 2."""
    problem = missing_packages(Path(script))
    asked = re.findall(r"(?:^| )--nproc[ =](\d\d?)(?= |$)", " ".join(flags))
    if asked and "--force" not in flags and not Path(script).stem.startswith(ONE_PROCESS):
        problem = problem or memory.too_little(int(asked[-1]))
    if problem:
        print(f"{Path(script).name}: {problem}", file=sys.stderr)
        return 2
    flags = [flag for flag in flags if flag != "--force"]
    os.execv(sys.executable, [sys.executable, script, *flags])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
