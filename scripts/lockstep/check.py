"""Run a training script, unchanged, on several ranks; say what goes wrong in silence, and where.

    bash scripts/check.sh [--nproc 2] [--updates 50] [--json] train.py [flags of the script]

What stands before the script's name is for the check, what follows it for the script. The ranks
run on the CPU over gloo, also those of a script that is written for GPUs and nccl. No line of it is
changed, and nothing is sent that it does not send. After --updates of an optimizer the run ends.

Exit codes: 1 if something is wrong, else 0; 2 if the script could not be run.
"""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lockstep import lessons, run
from lockstep.flags import Flags, whole
from lockstep.own_time import OwnTime
from lockstep.watch import facts, messages, read, report

FOR_GPUS = re.compile(r"\bnccl\b|\bcuda\b|\baccelerator\b", re.IGNORECASE)
STARTS_RANKS = re.compile(r"\bspawn\(|\bstart_processes\(|\bProcess\(")
LOCAL_RANK = re.compile(r"""["'](--local[-_]rank)["']""")


def read_flags(arguments):
    """Return the flags of the check; `its` are those of the script. Leaves after a mistake."""
    parser = Flags("check", description=__doc__)
    parser.add_argument("--nproc", type=whole(1, 16), default=2, help="ranks (2)")
    parser.add_argument("--updates", type=whole(0, 10**6), default=50, help="0: to its end (50)")
    parser.add_argument("--patience", type=whole(1, 10**5), default=30, help=PATIENCE)
    parser.add_argument("--start", choices=("auto", "torchrun", "launch", "python"), default="auto")
    parser.add_argument(
        "--gpus", action="store_true", help="use the GPUs (no GPU has run this yet)"
    )
    parser.add_argument("--show", action="store_true", help="show what the script prints, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    parser.add_argument("script")
    ours, its = split_at_script(arguments, parser)
    args = parser.parse_args(ours)
    args.its = its
    args.source = source_of(args.script, parser)
    return args


PATIENCE = "seconds in which no rank moves: then it hangs (30)"


def split_at_script(arguments, parser):
    """Return (our flags and the script's name, what follows it)."""
    with_value = {"--nproc", "--updates", "--patience", "--start"}
    number = 0
    while number < len(arguments) and arguments[number].startswith("-"):
        number += 2 if arguments[number] in with_value else 1
    return arguments[: number + 1], arguments[number + 1 :]


def source_of(script, parser):
    """Return the text of the script; leave with one line if it is none."""
    path = Path(script)
    if path.is_dir():
        parser.error(f"{script} is a folder: name the script in it that starts the training")
    if not path.is_file():
        parser.error(f"there is no file {script}")
    if path.suffix == ".ipynb":
        parser.error(f"{script} is a notebook: save its cells as a script (jupyter nbconvert)")
    try:
        text = path.read_bytes()
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        parser.error(f"{script} is no Python: line {error.lineno}: {error.msg}")
    except (OSError, ValueError) as error:
        parser.error(f"{script} can't be read: {error}")
    return text.decode(errors="replace")


def main(arguments):
    """Check a script; return the exit code."""
    args = read_flags(arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep_check_") as folder:
        job = Job(args, Path(folder))
        code = job.run()
        if job.interrupted:
            return code
        return report.tell(args, job, read.read(folder, job.how == lessons.TORCHRUN))


class Job:
    """One watched run of the script: its output, its exit code, whether it hung."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.how, self.launcher = self.how_it_starts()
        flags = set(LOCAL_RANK.findall(args.source)) if self.launcher == "launch" else ()
        self.renamed = flags and "--local-rank" not in flags  # PyTorch 2 names the flag like this
        self.on_cpu = not args.gpus and bool(FOR_GPUS.search(args.source))
        self.hung, self.interrupted, self.began = False, False, time.monotonic()
        self.output, self.code = "", None
        self.clock, self.written = OwnTime(), 0

    def how_it_starts(self):
        """Return (a word of lessons.py, the launcher): from --start, or from the script's text."""
        start, source = self.args.start, self.args.source
        if start == "auto":
            alone = STARTS_RANKS.search(source)
            start = "python" if alone else "launch" if LOCAL_RANK.search(source) else "torchrun"
        if start == "python":
            return lessons.ITSELF, "python"
        return lessons.TORCHRUN, start

    def command(self):
        """Return the command that runs the script, or its ranks."""
        package, script = Path(__file__).parent, str(Path(self.args.script).resolve())
        command = [sys.executable, str(package), "inside", self.how, script]
        if self.how == lessons.ITSELF:
            return command + self.args.its
        ours = [f"--nproc={self.args.nproc}", f"--launcher={self.launcher}"]
        return [*command, *ours, "--", *self.args.its]

    def environment(self):
        """Return what the processes find in their environment."""
        found = run.on_this_machine_alone() | {"PYTHONUNBUFFERED": "1"}
        found |= facts.environment(self.folder, Path(self.args.script).resolve(), self.args.updates)
        found["LOCKSTEP_WATCH_RANKS"] = str(self.args.nproc)
        found["LOCKSTEP_WATCH_DEVICES"] = "cpu" if self.on_cpu else "as they are"
        found.setdefault("OMP_NUM_THREADS", "1")
        found.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
        if self.renamed:
            found["LOCKSTEP_WATCH_LOCAL_RANK"] = "--local_rank"
        if self.how == lessons.ITSELF:  # a script that starts ranks may take these from outside
            place = ("MASTER_ADDR", "MASTER_PORT")
            found |= {name: os.environ[name] for name in place if name in os.environ}
        if self.on_cpu:
            found["CUDA_VISIBLE_DEVICES"] = ""
        return found | ({"LOCKSTEP_VERBOSE": "1"} if self.args.verbose else {})

    def run(self):
        """Run the script; return the exit code."""
        path = self.folder / "output"
        with open(path, "wb") as output:
            asked = []
            self.code = run.watch(self.command(), self.environment(), output, self.look, asked)
        self.interrupted = bool(asked)
        self.output = path.read_text(errors="replace")
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        return self.code

    # --- While it runs ---

    def look(self, process):
        """Look at the job: tell how far it is, and end it if nobody has moved for long."""
        if sys.stderr.isatty():
            seconds = time.monotonic() - self.began
            line = f"\rwatching {self.args.script}: {seconds:.0f} s"
            print(line, end="", file=sys.stderr, flush=True)
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
            if not self.hung and self.stands([process.pid, *(child.pid for child in children)]):
                self.hung = True
                self.ask_who_waits()
                process.terminate()

    def stands(self, processes):
        """Return whether these processes (their ids) have done next to nothing for --patience.

        Seconds are their own: who is not let on a busy machine does not stand.
        """
        written = sum(path.stat().st_size for path in self.folder.glob("*.jsonl"))
        if written != self.written:
            self.clock, self.written = OwnTime(), written
        self.clock.look(processes)
        return self.clock.still > self.args.patience

    def ask_who_waits(self):
        """Let each rank write down its calls and where it stands. It has half a minute."""
        stacks = [path for path in self.folder.glob("*.stack") if psutil.pid_exists(int(path.stem))]
        (self.folder / messages.ASKED).touch()
        end = time.monotonic() + 30
        while time.monotonic() < end and not all(s.with_suffix(".calls").exists() for s in stacks):
            time.sleep(0.1)
        for path in stacks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.stem), signal.SIGUSR1)
        time.sleep(0.5)
