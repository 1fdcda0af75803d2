"""Check many scripts, one after the other: ranks are forks of this process, which has torch.

    python warm_check.py        reads lines of JSON: the arguments of `lockstep check`
It answers each line with one, the JSON of the check, in a second instead of five. Only for scripts
that a launcher starts. It looks and tells as scripts/check.sh does; only the start is another one.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from lockstep import check, ending, imports  # noqa: E402

imports.import_quickly("torch.distributed.nn", "torch.distributed.fsdp", "torch._dynamo")

from lockstep.watch import read, report  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402


class WarmJob(check.Job):
    """A job whose ranks are forks."""

    def run(self):
        """Run the script; return the exit code."""
        self.hung, self.interrupted = False, False
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = {}
        for rank in range(self.args.nproc):
            process = os.fork()
            if process == 0:
                be_rank(self, rank, store.port)
            self.ranks[process] = rank
        codes = self.wait()
        self.output = "".join(self.output_of(rank).read_text() for rank in codes)
        self.code = max(codes.values())
        return self.code

    def output_of(self, rank):
        """Return the file with what a rank prints."""
        return self.folder / f"output_{rank}"

    def wait(self):
        """Return {rank: exit code}; end those that are left when one has failed, or all stand."""
        codes, failed = {}, None
        while len(codes) < len(self.ranks):
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in self.ranks:
                codes[self.ranks[process]] = abs(os.waitstatus_to_exitcode(status))
                if status:
                    failed = failed or time.monotonic()
            alive = [process for process, rank in self.ranks.items() if rank not in codes]
            stands = self.stands(alive)
            if stands or (failed and time.monotonic() - failed > 2):
                self.hung = stands and not failed
                self.end(codes)
            time.sleep(0.01)
        return codes

    def end(self, codes):
        """End the ranks that have not ended."""
        if self.hung:
            self.ask_who_waits()
        for process, rank in self.ranks.items():
            if rank not in codes:
                os.kill(process, 9)
        self.clock = check.OwnTime()  # it has stood, and is not asked again


def be_rank(job, rank, port):
    """Be one rank: run the script, and leave."""
    code = 1
    try:
        output = os.open(job.output_of(rank), os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.environ.clear()
        os.environ.update(job.environment())
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(job.args.nproc), "MASTER_PORT": str(port)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(job.args.nproc)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "warm"}
        script = str(Path(job.args.script).resolve())
        sys.argv = [script, *job.args.its]
        sys.path[0] = os.path.dirname(script)
        code = run_watched(script)
    except BaseException:
        traceback.print_exc()
    finally:
        ending.leave_with(code)


def run_watched(script):
    """Run the script with all hooks; return the exit code."""
    from lockstep.watch import end, hooks

    hooks.start()
    try:
        ending.run_script(script)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException as error:
        end.note_error(error)
        print(f"failed: {ending.reason(error)}", file=sys.stderr)
        return 1
    return 0


def answer(arguments):
    """Return what the check says of a script."""
    args, out, err = check.read_flags(["--json", *arguments]), io.StringIO(), io.StringIO()
    if "tensorboard" in args.source:
        sys.modules["tensorflow"] = None  # TensorBoard would import it, and can do without
        importlib.import_module("torch.utils.tensorboard")  # once for all forks
    folder = tempfile.mkdtemp(prefix="lockstep_check_")  # no TemporaryDirectory: forks would end it
    try:
        job = WarmJob(args, Path(folder))
        job.run()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            report.tell(args, job, read.read(folder, by_torchrun=True))
    finally:
        shutil.rmtree(folder)
    return json.loads(out.getvalue()) | {"stderr": err.getvalue()}


if __name__ == "__main__":
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=results, flush=True)
