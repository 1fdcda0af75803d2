"""Make the Python environment of the course, or check that one has all that the course needs.

    python scripts/environment.py --check    exit code 0 if this interpreter has the requirements
    python scripts/environment.py --make     make .venv, or repair it; called by setup.sh

With `site` behind it, the same for the environment that builds the web site: .venv.site.

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

ROOT = Path(__file__).resolve().parent.parent
FOR_THE_SITE = sys.argv[2:] == ["site"]
SITE_GB = 0.5  # of the disk, as below; measured: 0.3
REQUIREMENTS = ROOT / ("docs/requirements.txt" if FOR_THE_SITE else "requirements.txt")
ENVIRONMENT = ROOT / (".venv.site" if FOR_THE_SITE else ".venv")
STATE = ROOT / f"{ENVIRONMENT.name}.state"  # "installing" from before the first file to the last

# What an installation takes of the disk at its highest, in GB: the files of .venv, and twice the
# downloads, in pip's temporary folder and in its cache. Measured on Linux with the versions of
# requirements.txt: 4.2 + 2 x 1.1 with the CPU build of torch, 8.3 + 2 x 3.6 with the CUDA build.
DISK_GB = {"CPU": 6.5, "CUDA": 15.5}

CAUSES = {  # what the output of pip or ensurepip contains: what it means, and the cure
    "No space left|quota exceeded": "the disk is full. Make room on it",
    "connection broken|Max retries|timed out|IncompleteRead": "the package index can't be reached. "
    "Look at the network, and at a proxy or PIP_INDEX_URL if you have set one",
    "No matching distribution": "the package index has no version for this Python and system. "
    "Use another Python, or look at PIP_INDEX_URL if you have set it",
}
LARGE = "some GB, a few minutes; README.md says how to get the small CPU build)"


class SetupFailed(Exception):
    """The requirements could not be installed; the last line says why, and what to do."""


def missing_requirements():
    """Return the pinned requirements, as `name==version`, that this interpreter lacks."""
    missing = []
    for line in REQUIREMENTS.read_text().splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
        if match is None:
            continue
        name, version = match.groups()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = None
        # A local label, as in "2.13.0+cpu", names a build of the same version.
        if installed is None or installed.split("+")[0] != version:
            missing.append(f"{name}=={version}")
    return missing


def is_complete():
    """Return whether .venv was installed to the end and has the requirements of today."""
    interpreter = ENVIRONMENT / "bin" / "python"
    if not interpreter.exists() or (STATE.exists() and STATE.read_text() == "installing"):
        return False
    check = [interpreter, __file__, "--check", *sys.argv[2:]]
    return subprocess.run(check, capture_output=True).returncode == 0


def check_disk():
    """Raise SetupFailed if the disk has no room for all that will be downloaded and installed."""
    addresses = os.environ.get("PIP_INDEX_URL", "") + os.environ.get("PIP_EXTRA_INDEX_URL", "")
    build = "CPU" if sys.platform == "darwin" or "/cpu" in addresses else "CUDA"
    free = shutil.disk_usage(ROOT).free / 1e9
    if FOR_THE_SITE and free < SITE_GB:
        raise SetupFailed(f"it needs {SITE_GB} GB of the disk of {ROOT}. Make room")
    if not FOR_THE_SITE and free < DISK_GB[build]:
        smaller = ", or take the CPU build (README.md, A smaller download)" * (build == "CUDA")
        raise SetupFailed(
            f"it needs {DISK_GB[build]} GB of the disk of {ROOT} ({build} build of torch), "
            f"and {free:.1f} GB are free. Make room{smaller}"
        )


def call(lock, *arguments):
    """Call .venv's Python with `arguments`; raise SetupFailed if that fails.

    Its output is shown on a terminal only, one line in place of the other. It does not go on after
    this function. `lock` is the open file that is locked: if this process is killed, the next run
    waits for the call to end.
    """
    process = subprocess.Popen(
        [ENVIRONMENT / "bin" / "python", "-I", "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=[lock.fileno()],
        env={**os.environ, "TMPDIR": str(ENVIRONMENT)},  # what is left there is removed with it
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


def install(lock):
    """Make .venv if there is none, and install the requirements into it."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        venv.create(ENVIRONMENT, symlinks=True)
        call(lock, "ensurepip", "--default-pip")
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    call(lock, "pip", "install", *options, "-r", str(REQUIREMENTS))


def make():
    """Make .venv complete. Two calls at once take turns; a call that was cut off is begun anew."""
    # The lock is on an open file: the operating system lifts it even if this process is killed.
    with open(STATE, "a+") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that is installing ...", file=sys.stderr)
            fcntl.flock(state, fcntl.LOCK_EX)
        if is_complete():
            return
        if STATE.read_text() == "installing":
            print("the last installation was cut off: starting again", file=sys.stderr)
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        is_new = not (ENVIRONMENT / "bin" / "python").exists()
        if is_new:
            check_disk()
        print(f"installing the requirements into {ENVIRONMENT}", file=sys.stderr)
        print("(once only: " + ("0.3 GB, a minute)" if FOR_THE_SITE else LARGE), file=sys.stderr)
        STATE.write_text("installing")
        try:
            install(state)
            STATE.write_text("complete")
        except SetupFailed:
            STATE.write_text("failed")  # in good order: what was in .venv before is still there
            raise
        finally:
            if is_new and STATE.read_text() != "complete":
                shutil.rmtree(ENVIRONMENT, ignore_errors=True)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(number, frame):
    """Handle a signal: leave through each `finally`. Further signals are ignored."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        sys.exit(1 if missing_requirements() else 0)
    if sys.argv[1:2] != ["--make"]:
        sys.exit(__doc__)
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        make()
    except KeyboardInterrupt as error:
        print("setup was interrupted: run the same command again, it starts anew", file=sys.stderr)
        sys.exit(128 + error.args[0])
    except SetupFailed as error:
        *above, cause = str(error).splitlines()
        sys.exit("\n".join([*above, f"setup failed: {cause}; then run the same command again"]))
    except OSError as error:
        sys.exit(f"setup failed: {error}")
