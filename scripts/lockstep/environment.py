"""Make the Python environment of the course, or check that one has what is asked for.

    python scripts/lockstep environment --check WHAT    exit code 0 if this interpreter has it
    python scripts/lockstep environment --make WHAT     make .venv, or complete it; as setup.sh does

WHAT: a lesson's number, doctor, notebooks, all; or site, for what builds the web site (.venv.site).

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

from lockstep import lessons

ROOT = lessons.ROOT

# What an installation takes of the disk at its highest, in GB: its files, and twice the download,
# in pip's temporary folder and in its cache. Measured on Linux with the versions of
# requirements.txt; all that is not named here takes OTHERS together.
DISK_GB = {"torch, CPU": 1.2, "torch, CUDA": 10.2, "tensorflow": 3.2, "paddlepaddle": 1.2}
OTHERS, SITE_GB = 1.0, 0.5

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
        site = what == "site"
        names = None if site else lessons.packages_for(what)
        file = ROOT / ("docs/requirements.txt" if site else "requirements.txt")
        pins = re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", file.read_text(encoding="utf-8"))
        self.pins = ["==".join(pin) for pin in pins if names is None or pin[0] in names]
        self.place = ROOT / (".venv.site" if site else ".venv")
        self.state = ROOT / (
            self.place.name + ".state"
        )  # "installing" until the last file is there

    def missing(self):
        """Return the pins that this interpreter lacks."""
        return [pin for pin in self.pins if not is_installed(*pin.split("=="))]

    def is_there(self):
        """Return whether the last installation came to its end, and all that is wanted is there."""
        interpreter = self.place / "bin" / "python"
        cut_off = self.state.exists() and self.state.read_text() == "installing"
        if cut_off or not interpreter.exists():
            return False
        check = [interpreter, ROOT / "scripts" / "lockstep", "environment", "--check", self.what]
        return subprocess.run(check, capture_output=True).returncode == 0

    def gigabytes(self):
        """Return what installing all of it takes of the disk, and which build of torch that is."""
        if self.what == "site":
            return SITE_GB, "no torch"
        addresses = os.environ.get("PIP_INDEX_URL", "") + os.environ.get("PIP_EXTRA_INDEX_URL", "")
        build = "CPU" if sys.platform == "darwin" or "/cpu" in addresses else "CUDA"
        names = {pin.split("==")[0] for pin in self.pins}
        names = {"torch, " + build if name == "torch" else name for name in names}
        return OTHERS + sum(DISK_GB.get(name, 0) for name in names), build


def is_installed(name, version):
    """Return whether this interpreter has the package in this version."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return found.split("+")[0] == version  # "2.13.0+cpu" names a build of 2.13.0


def check_disk(wanted):
    """Raise SetupFailed if the disk has no room for all that will be downloaded and installed."""
    needed, build = wanted.gigabytes()
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        smaller = ", or take the CPU build (docs/install.md)" * (build == "CUDA")
        raise SetupFailed(
            f"it needs {needed:.1f} GB of the disk of {ROOT} ({build} build of torch), "
            f"and {free:.1f} GB are free. Make room{smaller}"
        )


def call(place, lock, *arguments):
    """Call the Python of the environment `place` with `arguments`; raise SetupFailed if that fails.

    Its output is shown on a terminal only, one line in place of the other. It does not go on after
    this function. `lock` is the open file that is locked: if this process is killed, the next run
    waits for the call to end.
    """
    process = subprocess.Popen(
        [place / "bin" / "python", "-I", "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=[lock.fileno()],
        env={**os.environ, "TMPDIR": str(place)},  # what is left there is removed with it
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
    if process.returncode != 0:
        raise SetupFailed(explain(arguments[0], "".join(output)))


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


def install(wanted, lock):
    """Make the environment if there is none, and install what is wanted into it."""
    place = wanted.place
    if not (place / "bin" / "python").exists():
        venv.create(place, symlinks=True)
        call(place, lock, "ensurepip", "--default-pip")
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    call(place, lock, "pip", "install", *options, *wanted.pins)


def make(wanted):
    """Make it complete. Two calls at once take turns; a call that was cut off is begun anew."""
    # The lock is on an open file: the operating system lifts it even if this process is killed.
    with open(wanted.state, "a+") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that is installing ...", file=sys.stderr)
            fcntl.flock(state, fcntl.LOCK_EX)
        if not wanted.is_there():
            complete(wanted, state)


def complete(wanted, lock):
    """Install what is wanted, while nobody else does."""
    if wanted.state.read_text() == "installing":
        print("the last installation was cut off: starting again", file=sys.stderr)
        shutil.rmtree(wanted.place, ignore_errors=True)
    is_new = not (wanted.place / "bin" / "python").exists()
    check_disk(wanted)
    names = "all packages" if len(wanted.pins) > 5 else ", ".join(wanted.pins)
    print(f"installing {names} into {wanted.place}", file=sys.stderr)
    print("(once only; it takes some minutes)", file=sys.stderr)
    wanted.state.write_text("installing")
    try:
        install(wanted, lock)
        wanted.state.write_text("complete")
    except SetupFailed:
        wanted.state.write_text("failed")  # in good order: what was there before still is
        raise
    finally:
        if is_new and wanted.state.read_text() != "complete":
            shutil.rmtree(wanted.place, ignore_errors=True)


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
    if how == "--check":
        return 1 if wanted.missing() else 0
    return make_or_explain(wanted)


def make_or_explain(wanted):
    """Make the environment; return the exit code, and say in one line why it is not 0."""
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        make(wanted)
    except KeyboardInterrupt as error:
        print("setup was interrupted: run the same command again, it starts anew", file=sys.stderr)
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
