"""Two machines made of one: network namespaces, a lesson on them, and the usual mistakes."""

from lockstep import run
from lockstep.lessons import ITSELF, ROOT


def main(arguments):
    """Call run.py of this folder in a process that is watched; return its exit code."""
    package = ROOT / "scripts" / "lockstep"
    environment = run.on_this_machine_alone()
    return run.start(ITSELF, package, ["on-two-machines", *arguments], environment)
