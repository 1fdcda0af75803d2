"""Make the Python environment of the course, or check that one has what is asked for.

    python scripts/lockstep environment --check WHAT    if this interpreter has it, print its path
    python scripts/lockstep environment --make WHAT     make .venv, or complete it; as setup.sh does

WHAT: a lesson's number, doctor, check, notebooks, all; or site: what builds the site (.venv.site).
Exit codes: 0; 1 if something is missing, or could not be installed; 2 if there is no such WHAT.

Only the standard library is used, because this file runs before anything is installed.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import venv
from importlib import metadata

from lockstep import ending, lessons

ROOT = lessons.ROOT

# What an installation takes of the disk at its highest, in GB: a package's files and those of what
# it needs, and twice the download, in pip's temporary folder and in its cache. Measured on Linux
# with the versions of requirements.txt.
DISK_GB = {
    "torch, CPU": 1.3,
    "torch, CUDA": 10.4,
    "tensorflow": 3.4,
    "paddlepaddle": 1.2,
    "jaxlib": 0.6,
}
OTHER_GB = 0.1

LAST = "INSTALLER"  # what pip writes after all files of a package, and of those that it needs
PIP = ["-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wanted:
    """What an environment is to have: `pins`, as "name==version", in the folder `place`."""

    def __init__(self, what):
        is_site = what == "site"
        pins = lessons.pins(ROOT / ("docs/requirements.txt" if is_site else "requirements.txt"))
        names = pins if is_site else lessons.packages_for(what)
        self.pins = [pins[name] for name in names]
        self.place = ROOT / (".venv.site" if is_site else ".venv")
        self.python = self.place / "bin" / "python"

    def site_packages(self, pattern="."):
        """Return the paths in the environment's site-packages that match the pattern."""
        return list(self.place.glob(f"lib/python*/site-packages/{pattern}"))

    def missing(self, folders):
        """Return the pins that are not installed in these folders."""
        return [pin for pin in self.pins if not is_installed(*pin.split("=="), folders)]


def is_installed(name, version, folders):
    """Return whether one of the folders has the package in this version, and complete."""
    for package in metadata.distributions(name=name, path=[str(folder) for folder in folders]):
        found = str(package.version).partition("+")[0]  # "2.13.0+cpu" is a build of 2.13.0
        if found == version and package.read_text(LAST) is not None:
            return True
    return False


def succeeds(*command):
    """Return whether the command can be called, and ends with exit code 0."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


# --- Installing ---


def make(wanted):
    """Make it complete. Two calls at once take turns; the next goes on where one was cut off."""
    # The lock is on an open file: the operating system lifts it even if this process is killed.
    with open(f"{wanted.place}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ending.say("waiting for another run that is installing ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        starts = succeeds(wanted.python, "-c", "")  # not if the Python that made it is gone
        if not starts or wanted.missing(wanted.site_packages()):
            complete(wanted, lock, starts)


def complete(wanted, lock, starts):
    """Install what is missing, while nobody else does."""
    for package in wanted.site_packages("*.dist-info"):
        if not (package / LAST).exists():  # pip was cut off: let it install that one again
            shutil.rmtree(package)
    missing = wanted.missing(wanted.site_packages()) or wanted.pins
    check_disk(missing)
    names = ", ".join(pin.partition("==")[0] for pin in missing)
    ending.say(f"installing {names} into {wanted.place}\n(once only; it takes some minutes)")
    if not succeeds(wanted.python, *PIP, "--version"):
        venv.create(wanted.place, clear=not starts, symlinks=True, with_pip=True)
    install(wanted, lock)


def check_disk(pins):
    """Leave if the disk has no room for all that will be downloaded and installed."""
    addresses = os.environ.get("PIP_INDEX_URL", "") + os.environ.get("PIP_EXTRA_INDEX_URL", "")
    build = "CPU" if sys.platform == "darwin" or "/cpu" in addresses else "CUDA"
    names = [pin.partition("==")[0].replace("torch", f"torch, {build}") for pin in pins]
    needed = sum(DISK_GB.get(name, OTHER_GB) for name in names)
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        smaller = ", or take the CPU build of torch (docs/install.md)" * ("torch, CUDA" in names)
        sys.exit(
            f"setup failed: it needs {needed:.2g} GB of the disk of {ROOT}, and {free:.2g} GB are "
            f"free. Make room{smaller}; then run the same command again"
        )


def install(wanted, lock):
    """Let pip install what is wanted; leave if it fails.

    If this process is killed, pip goes on, and keeps the `lock`: the next run waits for it.
    """
    temporary = wanted.place / "tmp"  # so that nothing large stays elsewhere if pip is killed
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    quiet = ["--quiet"] * (not sys.stderr.isatty())
    try:
        run = subprocess.run(
            [wanted.python, *PIP, "install", "--root-user-action=ignore", *quiet, *wanted.pins],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[lock.fileno()],
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if run.returncode != 0:
        sys.exit(
            "setup failed: pip says why above. Look at the network and the room on the disk, and "
            "at a proxy or PIP_INDEX_URL if you have set one; then run the same command again"
        )


# --- The command ---


def interrupt(number, frame):
    """Handle a signal: leave through each `finally`, and end pip. Further signals are ignored."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main(arguments):
    """Check or make an environment; return the exit code."""
    how, what = arguments if len(arguments) == 2 else ("--help", "")
    if how not in ("--check", "--make"):
        ending.say(__doc__)
        return 2
    try:
        wanted = Wanted(what)
    except LookupError as error:
        ending.say(f"setup failed: {error}; take a number, notebooks, all or site")
        return 2
    if how == "--check":
        if wanted.missing(sys.path):
            return 1
        print(sys.executable)
        return 0
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        make(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"setup failed: {error}")
    except SystemExit as stop:
        if isinstance(stop.code, int):  # from interrupt(); pip has ended, and says nothing after us
            ending.say("setup was interrupted: run the same command again")
        raise
    return 0
