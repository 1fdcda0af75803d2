"""Run the launcher of a lesson, or the check of a script, as a reader does in a terminal."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from nbtools.blame import RankFailed
from nbtools.run import process_group

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 5  # seconds that ranks have to end politely, with torchrun and with us


class LaunchFailed(RankFailed):
    """A lesson's launcher ended with an error. `details` has all of its output."""


def launch(lesson, deadline=1500, **flags):
    """Run `scripts/lesson_NN.sh --json` with `flags` and return its last line as a dict.

    `batch_size=30` becomes `--batch-size 30`; True becomes a flag without a value. Raises
    LaunchFailed, with the last line of stderr, when the exit code is not 0 or time is up. In any
    case the launcher and its ranks end, also when this process is interrupted or killed.
    """
    words = []
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    result = _result_of_the_tests(lesson, words)
    if result is not None:
        return result
    command = ["bash", str(ROOT / "scripts" / f"lesson_{lesson:02}.sh"), "--json", *words]
    process = _run(command, f"lesson {lesson:02}", deadline)
    if process.returncode != 0:
        said = process.stderr.strip() or process.stdout.strip() or "no output"
        code = f"exit code {process.returncode}"
        message = f"lesson {lesson:02} ended with {code}: {said.splitlines()[-1]}"
        raise LaunchFailed(message, process.stdout + process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def check(script, edits=(), nproc=2, updates=50, deadline=600):
    """Return what `scripts/check.sh` says of a script after these edits: a list of findings.

    After `updates` of an optimizer the script is ended; 0: it comes to its end.

    An edit is (text that is there once, text in its place). A finding is a dict with the keys of
    `--json`, among them `strength`, `text`, `place` (such as "train.py:41") and `ranks`. Raises
    LaunchFailed if the script could not be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--json", *_words_of_check(folder, script, edits, nproc, updates)]
        process = _run(["bash", str(ROOT / "scripts" / "check.sh"), *words], "the check", deadline)
    if process.returncode not in (0, 1):
        raise LaunchFailed(process.stderr.strip(), process.stdout + process.stderr)
    return json.loads(process.stdout)["findings"]


def check_each(script, cases, nproc=2, updates=50, deadline=600):
    """Return what check() would say after each of these lists of edits, in a fraction of the time.

    PyTorch is imported once, and the ranks of all checks are forks. The script must be one that a
    launcher starts, as torchrun. Raises LaunchFailed if it could not be run.
    """
    with contextlib.ExitStack() as stack:
        lines = []
        for edits in cases:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            lines.append(json.dumps(_words_of_check(folder, script, edits, nproc, updates)))
        command = [sys.executable, str(Path(__file__).with_name("warm_check.py"))]
        process = _run(command, "the check", deadline, "".join(f"{line}\n" for line in lines))
    if process.returncode != 0:
        raise LaunchFailed(process.stderr.strip(), process.stdout + process.stderr)
    return [json.loads(line)["findings"] for line in process.stdout.splitlines()]


def _words_of_check(folder, script, edits, nproc, updates):
    """Write the script, after these edits, into a folder; return the flags to check it."""
    text = Path(script).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    path = Path(folder, "train.py")
    path.write_text(text)
    return [f"--nproc={nproc}", f"--updates={updates}", str(path)]


def _run(command, name, deadline, text=""):
    """Run a launcher that reads this text to its end; return the CompletedProcess."""
    # The lesson is not in the launcher's process group: the launcher has to end it. So it is asked
    # politely first, and gets the time that torchrun gives its ranks, and a little more.
    farewell = f"kill -TERM 0; sleep {PATIENCE + 3}"
    settings = {
        "LOCKSTEP_PYTHON": sys.executable,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(PATIENCE),
    }
    with process_group(farewell) as group:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=group,
            env={**os.environ, **settings},
        )
        try:
            stdout, stderr = process.communicate(text, timeout=deadline)
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"{name} had not finished after {deadline} s") from None
        finally:
            _end(process, group)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end(process, group):
    """End a launcher and its process group: politely first, because it has a lesson to end."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(group, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE + 3)


# --- Under pytest ---


def file_of_run(folder, lesson, words):
    """Return the file in which the tests keep a run of this lesson with these flags."""
    return Path(folder, " ".join([f"{lesson:02}", *words]).replace("/", "%"))


def _result_of_the_tests(lesson, words):
    """Return the JSON of a run that the tests have made in this session of pytest, or None.

    Their folder is in LOCKSTEP_RUNS; conftest.py writes there, and says which runs are good enough.
    One that is under way is waited for. One without flags also counts for those who ask for the
    number of ranks that it had.
    """
    folder = os.environ.get("LOCKSTEP_RUNS", "")
    for known in (words, []):
        path = file_of_run(folder, lesson, known)
        if not folder or not path.exists():
            continue
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            run = json.loads(file.read() or "{}")
        if run.get("for_notebooks_of") == str(ROOT):
            result = json.loads(run["stdout"].splitlines()[-1])
            if known == words or words == ["--nproc", str(result["world_size"])]:
                return result
    return None
