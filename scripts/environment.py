"""Make the Python environment of the course, or check that one has all that the course needs.

    python scripts/environment.py --check    exit code 0 if this interpreter has the requirements
    python scripts/environment.py --make     make .venv, or repair it; called by setup.sh

Only the standard library is used, because this file runs before anything is installed.
"""

import fcntl
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements.txt"
ENVIRONMENT = ROOT / ".venv"
STATE = ROOT / ".venv.state"  # says "installing" from before the first file until the last one


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
    return subprocess.run([interpreter, __file__, "--check"], capture_output=True).returncode == 0


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
        print(
            f"installing the requirements into {ENVIRONMENT}\n"
            "(once only: some GB, a few minutes; README.md says how to get the small CPU build)",
            file=sys.stderr,
        )
        STATE.write_text("installing")
        interpreter = ENVIRONMENT / "bin" / "python"
        if not interpreter.exists():
            venv.create(ENVIRONMENT, with_pip=True, symlinks=True)
        install = [interpreter, "-m", "pip", "install", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", REQUIREMENTS], stdout=sys.stderr, check=True)
        STATE.write_text("complete")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(1 if missing_requirements() else 0)
    if sys.argv[1:] != ["--make"]:
        sys.exit(__doc__)
    try:
        make()
    except subprocess.CalledProcessError as error:
        sys.exit(f"setup failed: see above (exit code {error.returncode})")
    except KeyboardInterrupt:
        sys.exit("setup was interrupted; the next run starts it again")
    except OSError as error:
        sys.exit(f"setup failed: {error}")
