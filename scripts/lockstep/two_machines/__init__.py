"""Two machines made of one: network namespaces, what runs on them, and the usual mistakes."""

from lockstep import run
from lockstep.lessons import ITSELF, ROOT


def main(arguments):
    """Call run.py of this folder in a process that is watched; return its exit code."""
    environment = run.on_this_machine_alone()
    environment.pop("GLOO_SOCKET_IFNAME", None)  # two machines do not meet at lo
    package = ROOT / "scripts" / "lockstep"
    return run.start(ITSELF, package, ["on-two-machines", *arguments], environment)
