"""Lessons that are watched from outside: their flags, their ranks, their verdict.

Such a lesson has a file in lessons/proofs/. Its script trains and prints, and knows nothing of it.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import sys
import tempfile
import types
import zipfile
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from lockstep import ending, imports, lessons
from lockstep.flags import Flags, whole


def of_script(script):
    """Return the proof of a lesson's script, a module; None if it has none.

    Under a check the script is one like any other, so it has none there.
    """
    lesson = lessons.of_script(script)
    if lesson is None or "LOCKSTEP_WATCH" in os.environ:
        return None
    return of_lesson(lesson)


def of_lesson(lesson):
    """Return the proof of a lesson, a module. It imports the script."""
    folder = str(lesson.script.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    if "tensorflow" in lesson.packages:
        imports.import_tensorflow()
    if "paddlepaddle" in lesson.packages:
        imports.import_paddle()
    return importlib.import_module(f"proofs.{lesson.proof.stem}")


# --- Flags ---


def read_flags(script, flags, world_size, ranks_here):
    """Return the flags of a lesson that has a proof, as its own parser reads them, and `json`.

    Limits are the proof's. A mistake costs one line on stderr, and exit code 2.
    """
    proof = of_script(script)
    parsers = []

    class LessonFlags(Flags):
        """The parser that the script makes, with limits, and with a flag --json."""

        def __init__(self, **options):
            super().__init__(Path(script).name, usage=argparse.SUPPRESS, **options)
            parsers.append(self)

        def add_argument(self, *names, **options):
            limits = proof.LIMITS.get(names[0])
            if limits:
                options["type"] = whole(*limits)
            return super().add_argument(*names, **options)

        def parse_args(self, argv=None):
            if hasattr(proof, "add_flags"):
                proof.add_flags(self)
            self.add_argument("--json", action="store_true", help="end with one line of JSON")
            return super().parse_args(argv)

    ours = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": LessonFlags})
    with patch.object(proof.lesson, "argparse", ours):
        args = proof.lesson.parse_args(flags)
    problem = proof.refuse(args, world_size, ranks_here)
    if problem:
        parsers[0].error(problem)
    return args


# --- The watched run ---


def wanted_by(proof):
    """Return how a proof wants the ranks to be watched: `values`, `storages`, `times` of facts."""
    return proof.KEEP_VALUES, *(getattr(proof, name, False) for name in ("STORAGES", "TIMES"))


class Watch:
    """Watches the processes that start while it is on, of a script that has a proof; else nothing.

    What they do is in a folder that goes with it; it is made in `place`, if that is given. If the
    proof has turns(args, world_size, folder), ranks run the script as often (rank.py).
    """

    def __init__(self, script, place=None, args=None, world_size=0):
        self.script, self.proof = str(script), of_script(script)
        self.place, self.folder = place, None
        self.args, self.world_size = args, world_size

    def __enter__(self):
        if self.proof:
            from lockstep.watch import facts

            self.folder = tempfile.TemporaryDirectory(prefix="lockstep_facts_", dir=self.place)
            wanted = wanted_by(self.proof)
            os.environ.update(facts.environment(self.folder.name, self.script, 0, *wanted))
            if hasattr(self.proof, "turns"):
                turns = self.proof.turns(self.args, self.world_size, self.place)
                os.environ["LOCKSTEP_TURNS"] = json.dumps(turns)
        return self

    def __exit__(self, *error):
        if self.folder:
            self.folder.cleanup()

    def judge(self, args, started, launcher):
        """Print the verdict, and the numbers if `args` asks for JSON; return the exit code."""
        from lockstep.watch import claims, facts, read

        logging.disable(logging.NOTSET)  # torchrun, which ranks.py has silenced, has ended
        jobs = read.read(self.folder.name, by_torchrun=launcher != "none")
        first = facts.process["rank"] or 0  # of a rank that is started by hand, only it is seen
        if jobs and first in jobs[0]:  # ranks that have not met are several jobs, the first small
            seen = jobs if hasattr(self.proof, "turns") else jobs[0]
            verdict = self.proof.judge(seen, args, started, launcher)
        else:
            verdict = claims.Verdict("the ranks train", ["rank 0 was not seen"], {}, [])
        return tell(verdict, self.script, args)


def tell(verdict, script, args):
    """Print a verdict, and the numbers if `args` asks for JSON; return the exit code."""
    for line in verdict.lines:
        print(line)
    print("PASS" if verdict.passed else "FAIL", verdict.words)
    if args.json:
        number = int(lessons.of_script(script).number)
        print(json.dumps({"lesson": number} | verdict.numbers | {"passed": verdict.passed}))
    return 0 if verdict.passed else 1


def run_in_one_process(script, args):
    """Run a lesson that has no ranks, in hooks of its proof, and judge it; return the exit code."""
    proof = of_script(script)
    with proof.watched(args) as seen:
        ending.run_script(script)
    return tell(proof.judge(seen, args, args.nproc, "none"), script, args)


# --- Several machines ---

SECONDS = timedelta(seconds=60)  # for a machine to hand in what its ranks did, once ours have ended


def judge(seen, args, own, job):
    """Judge the ranks of all machines on the first one; return the exit code, on each of them.

    The launchers, not the ranks, send what was seen, through the store at which they have met.
    """
    if len(job.nodes) == 1:
        return seen.judge(args, own.nproc, own.launcher)
    job.store.set(f"ranks/{job.node_rank}", str(own.nproc))
    if job.node_rank > 0:
        job.store.set(f"facts/{job.node_rank}", packed(seen.folder.name))
        return hear_verdict(job)
    started = own.nproc
    for node in range(1, len(job.nodes)):
        with contextlib.suppress(RuntimeError):  # it did not come in time
            job.store.wait([f"facts/{node}"], SECONDS)
            facts = job.store.get(f"facts/{node}")
            started += int(job.store.get(f"ranks/{node}"))
            zipfile.ZipFile(io.BytesIO(facts)).extractall(Path(seen.folder.name, str(node)))
    code = seen.judge(args, started, own.launcher)
    job.store.set("verdict", str(code))
    with contextlib.suppress(RuntimeError):
        job.store.wait([f"heard/{node}" for node in range(1, len(job.nodes))], SECONDS)
    return code


def hear_verdict(job):
    """Return the exit code that the first machine tells; 1 if it has left without a word."""
    try:
        job.store.wait(["verdict"], 2 * SECONDS)
        code = int(job.store.get("verdict"))
        job.store.set(f"heard/{job.node_rank}", "")
        return code
    except RuntimeError:
        return 1


def send_nothing(seen, job):
    """Ranks of this machine have failed: nobody waits for what they did."""
    if seen.proof and job.store and job.node_rank > 0:
        with contextlib.suppress(RuntimeError):
            job.store.set(f"ranks/{job.node_rank}", "0")
            job.store.set(f"facts/{job.node_rank}", packed(seen.folder.name))


def packed(folder):
    """Return all files of a folder as the bytes of a zip file."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for path in Path(folder).iterdir():
            file.write(path, path.name)
    return stream.getvalue()
