"""What a lesson needs before it is started: its packages, and memory for its ranks."""

import ast
import importlib.util
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


def problem(script, flags):
    """Return one line that says what a script lacks, with these flags, or None.

    --force among the flags: the memory is not looked at.
    """
    script = Path(script)
    asked = re.findall(r"(?:^| )--nproc[ =](\d\d?)(?= |$)", " ".join(flags))
    found = missing_packages(script)
    if asked and "--force" not in flags and not script.stem.startswith(ONE_PROCESS):
        found = found or memory.too_little(int(asked[-1]))
    return found and f"{script.name}: {found}"
