"""Make the Python environment of the course, or check that one has what is asked for.

    python scripts/lockstep environment --check WHAT    if this interpreter has it, print its path
    python scripts/lockstep environment --make WHAT     make .venv, or complete it; as setup.sh does

WHAT: a lesson's number, doctor, notebooks, all; or site, for what builds the web site (.venv.site).
Exit codes: 0; 1 if something is missing, or could not be installed; 2 if there is no such WHAT.

Only the standard library is used, because this file runs before anything is installed.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from lockstep import lessons

ROOT = lessons.ROOT

# What an installation takes of the disk at its highest, in GB: a package's files and those of what
# it needs, and twice the download, in pip's temporary folder and in its cache. Measured on Linux
# with the versions of requirements.txt.
DISK_GB = {
    "torch, CPU": 1.3,
    "torch, CUDA": 10.4,
    "tensorflow": 3.4,
    "paddlepaddle": 1.2,
    "scikit-learn": 0.3,
    "jupyterlab": 0.2,
    "Sphinx": 0.3,
}
OTHER_GB = 0.03

# What pip writes after all files of a package, and after all packages that it needs.
LAST = "INSTALLER"
HAS_PIP = f"""
from importlib.metadata import distribution
assert distribution("pip").read_text("{LAST}")
"""

CAUSES = {  # what the output of pip or ensurepip contains: what it means, and the cure
    "No space left|quota exceeded": "the disk is full. Make room on it",
    "connection broken|Max retries|timed out|IncompleteRead": "the package index can't be reached. "
    "Look at the network, and at a proxy or PIP_INDEX_URL if you have set one",
    "No matching distribution": "the package index has no version for this Python and system. "
    "Use another Python, or look at PIP_INDEX_URL if you have set it",
}


class SetupFailed(Exception):
    """The requirements could not be installed; the last line says why, and what to do."""


class Wanted:
    """What an environment is to have: `pins`, as "name==version", in the folder `place`."""

    def __init__(self, what):
        self.what = what
        is_site = what == "site"
        pins = lessons.pins(ROOT / ("docs/requirements.txt" if is_site else "requirements.txt"))
        names = pins if is_site else lessons.packages_for(what)
        self.pins = [pins[name] for name in names]
        self.place = ROOT / (".venv.site" if is_site else ".venv")
        self.python = self.place / "bin" / "python"
        self.state = ROOT / f"{self.place.name}.state"  # "installing", "complete", or nothing

    def site_packages(self, pattern="."):
        """Return the paths in the environment's site-packages that match the pattern."""
        return list(self.place.glob(f"lib/python*/site-packages/{pattern}"))

    def is_cut_off(self):
        """Return whether an installation has not come to its end: it was ended, or it runs now."""
        return self.state.exists() and self.state.read_text() == "installing"

    def is_broken(self):
        """Return whether pip was ended while it replaced a package by another version of it.

        Until the new one is complete, the old one has a name with ~.
        """
        return self.is_cut_off() and self.site_packages("~*") != []

    def missing(self, folders):
        """Return the pins that are not installed in these folders."""
        return [pin for pin in self.pins if not is_installed(*pin.split("=="), folders)]

    def is_here(self):
        """Return whether this interpreter has all that is wanted."""
        in_place = Path(sys.prefix).resolve() == self.place.resolve()
        return not (in_place and self.is_broken()) and not self.missing(sys.path)

    def is_there(self):
        """Return whether the environment has all that is wanted."""
        package = ROOT / "scripts" / "lockstep"
        return succeeds(self.python, package, "environment", "--check", self.what)


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
    with open(wanted.state, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that is installing ...", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not wanted.is_there():
            complete(wanted, lock)


def complete(wanted, lock):
    """Install what is missing, while nobody else does."""
    gone = wanted.python.is_symlink() and not wanted.python.exists()
    if gone or wanted.is_broken():
        print(f"{wanted.place} can't be used: it is made anew", file=sys.stderr)
        shutil.rmtree(wanted.place, ignore_errors=True)
    is_new = not wanted.place.exists()
    if wanted.is_cut_off():
        forget_what_is_half(wanted)
    missing = wanted.missing(wanted.site_packages()) or wanted.pins
    check_disk(missing)
    names = ", ".join(pin.partition("==")[0] for pin in missing)
    names = names if len(missing) <= 5 else f"{len(missing)} packages"
    print(f"installing {names} into {wanted.place}", file=sys.stderr)
    print("(once only; it takes some minutes)", file=sys.stderr)
    wanted.state.write_text("installing")
    try:
        install(wanted, lock)
        wanted.state.write_text("complete")
    finally:
        if is_new and wanted.is_cut_off():
            shutil.rmtree(wanted.place, ignore_errors=True)


def forget_what_is_half(wanted):
    """Let pip install again what it has not finished, in place of the files that are there."""
    for package in wanted.site_packages("*.dist-info"):
        if not (package / LAST).exists():
            shutil.rmtree(package)


def check_disk(pins):
    """Raise SetupFailed if the disk has no room for all that will be downloaded and installed."""
    addresses = os.environ.get("PIP_INDEX_URL", "") + os.environ.get("PIP_EXTRA_INDEX_URL", "")
    build = "CPU" if sys.platform == "darwin" or "/cpu" in addresses else "CUDA"
    names = [pin.partition("==")[0].replace("torch", f"torch, {build}") for pin in pins]
    needed = sum(DISK_GB.get(name, OTHER_GB) for name in names)
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        with_cuda = "torch, CUDA" in names
        build = " (CUDA build of torch)" * with_cuda
        smaller = ", or take the CPU build (docs/install.md)" * with_cuda
        raise SetupFailed(
            f"it needs {needed:.2g} GB of the disk of {ROOT}{build}, and {free:.2g} GB are free. "
            f"Make room{smaller}"
        )


def install(wanted, lock):
    """Make the environment if there is none, and install what is wanted into it."""
    if not wanted.python.exists():
        venv.create(wanted.place, symlinks=True)
    if not succeeds(wanted.python, "-I", "-c", HAS_PIP):
        call(wanted, lock, "ensurepip", "--default-pip")
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    call(wanted, lock, "pip", "install", *options, *wanted.pins)


def call(wanted, lock, module, *arguments):
    """Call a module of the environment's Python with `arguments`; raise SetupFailed if that fails.

    Its output is shown on a terminal only, one line in place of the other. It does not go on after
    this function. `lock` is the open file that is locked: if this process is killed, the next run
    waits for the call to end.
    """
    temporary = wanted.place / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # if the last call was killed
    temporary.mkdir()
    process = subprocess.Popen(
        [wanted.python, "-I", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=[lock.fileno()],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    output, erase = [], "\r\033[K" * sys.stderr.isatty()
    try:
        for line in process.stdout:
            output.append(line)
            if erase:
                print(erase + line.strip()[:79], end="", file=sys.stderr, flush=True)
        process.wait()
    finally:
        print(end=erase, file=sys.stderr)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(temporary, ignore_errors=True)
    if process.returncode != 0:
        raise SetupFailed(explain(module, "".join(output)))


def explain(module, output):
    """Return what the output of a failed call means, and the cure; if unknown, also its end."""
    for signs, text in CAUSES.items():
        if re.search(signs, output, re.IGNORECASE):
            return text
    end = [line[:200] for line in output.splitlines() if line.strip()][-2:]
    cure = "Mend what it names"
    if module == "ensurepip":
        cure = "Use another Python, or, on Debian and Ubuntu, apt install python3-venv"
    return "\n".join([*end, f"{module} ended with the error above. {cure}"])


# --- The command ---

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(number, frame):
    """Handle a signal: leave through each `finally`. Further signals are ignored."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def main(arguments):
    """Check or make an environment; return the exit code."""
    how, what = arguments if len(arguments) == 2 else ("--help", "")
    if how not in ("--check", "--make"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        wanted = Wanted(what)
    except LookupError as error:
        print(f"setup failed: {error}; take a number, notebooks, all or site", file=sys.stderr)
        return 2
    if how == "--make":
        return make_or_explain(wanted)
    if wanted.is_here():
        print(sys.executable)
        return 0
    return 1


def make_or_explain(wanted):
    """Make the environment; return the exit code, and say in one line why it is not 0."""
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        make(wanted)
    except KeyboardInterrupt as error:
        print("setup was interrupted: run the same command again", file=sys.stderr)
        return 128 + error.args[0]
    except SetupFailed as error:
        *above, cause = str(error).splitlines()
        failed = f"setup failed: {cause}; then run the same command again"
        print("\n".join([*above, failed]), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    return 0
