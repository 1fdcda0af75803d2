"""PASS means it: take a part of the technique away, and the lesson's own verdict is FAIL.

Each tests/test_lesson_NN.py has a table BREAKS = {name: (text in the script, text in its place)} of
such mistakes, and hands it to check_breaks(). A break is tried on 2 ranks. Where it is a mistake on
other numbers of ranks only, or shows another thing there, a third part of its row, a tuple, has
them (in lesson 13 meshes, in 18 stages).
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cloudpickle
from conftest import QUICK_JAX
from lockstep import lessons, proofs
from lockstep.watch import read
from nbtools import free_ports, run
from nbtools.run import process_group

# Send the functions of this file to the ranks, so that no rank has to import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def check_breaks(number, breaks, nproc, *flags, machines=1, mesh=None, usual=None):
    """Run a lesson's script as it is, then with each of its breaks, on `nproc` ranks.

    A break is tried on the `usual` number of ranks, or 2, unless its row has other numbers.

    The script as it is runs on each of them, a break only where it is to be tried. With two
    machines, half of the ranks are told that they run on the second, and 3 ranks are the fewest, so
    that the machines differ. All runs share one
    start of the ranks, so a break costs what its steps cost. A lesson that is one process gets a
    new process for each: lesson 01 registers its stand-ins for devices once in a process. So does a
    lesson that starts its own ranks, whose meeting can't be left out; its ranks are forks. A lesson
    of another framework has one process for all, also for several numbers of ranks, nproc=(2, 3):
    importing it takes seconds, and two frameworks in a process can crash. Of a lesson of several
    frameworks, only the one that a break is in is trained again, on the first of the numbers.
    """
    lesson = lessons.find(f"{number:02}")
    source = lesson.script.read_text()
    sources = {"as it is": source}
    assert len(breaks) >= 6
    for name, (part, other, *_) in breaks.items():
        assert source.count(part) == 1, f"{name}: {part!r} is there {source.count(part)} times"
        sources[name] = source.replace(part, other)
    where = {name: row[2] if row[2:] else (usual or machines + 1,) for name, row in breaks.items()}
    if lesson.frameworks():
        numbers = nproc if isinstance(nproc, tuple) else (nproc,)
        several = "torch" in lesson.compares_with
        judge_in_new_processes = judge_by_framework if several else judge_beside_torch
        given = numbers, [str(flag) for flag in flags]
        return judge_in_new_processes(lesson, sources, where, *given)
    for name, numbers in where.items():
        if (mesh or nproc) not in numbers:
            del sources[name]
    importlib.import_module("sklearn.datasets")  # then run() imports it once, not in each rank
    if lesson.start not in (lessons.TORCHRUN, lessons.REHEARSAL):
        flags = [*flags, "--nproc", nproc]
    words = [str(flag) for flag in flags]
    said = {}
    if lesson.start == lessons.ONE_PROCESS:
        for name, text in sources.items():
            said[name] = run(verdict_of_one_process, 1, lesson, text, words)[0]
    elif lesson.start == lessons.ITSELF:
        with ThreadPoolExecutor(3) as pool:
            ways = pool.map(partial(verdict_of_examination, lesson, words), sources.values())
            said = dict(zip(sources, ways, strict=True))
    else:
        said = verdicts_of_proof(lesson, sources, nproc, words, machines)
    judge_breaks(said)


def judge_breaks(said):
    """Fail if the script as it is does not say PASS, or if one of its breaks does."""
    passed, claim = said.pop("as it is")
    assert passed, claim
    survived = {name: claim for name, (passed, claim) in said.items() if passed}
    assert survived == {}, survived


def judge_beside_torch(lesson, sources, where, numbers, flags):
    """Run them on these numbers of ranks, in one new process in which nobody imports torch."""
    scripts = str(lessons.ROOT / "scripts")
    program = f"import sys\nsys.path.append({scripts!r})\n" + BESIDE_TORCH
    program += inspect.getsource(verdict_of_one_process) + JUDGE
    runs = []  # [name, number of ranks]
    for name in sources:
        runs += [[name, nproc] for nproc in numbers if nproc in where.get(name, numbers)]
    ran = run_python(program, json.dumps([sources, runs, flags, lesson.number]))
    found = json.loads(ran.stdout.splitlines()[-1])
    for number in numbers:
        judge_breaks({name: said for (name, nproc), said in found if nproc == number})


def run_python(program, text):
    """Run a program of Python that reads a text; when it is over, or we are, all its ranks are."""
    with process_group(farewell="true") as group:
        options = {"input": text, "capture_output": True, "text": True, "process_group": group}
        options["env"] = os.environ | QUICK_JAX
        ran = subprocess.run([sys.executable, "-c", program], timeout=1500, **options)
    assert ran.returncode == 0, ran.stderr
    return ran


BESIDE_TORCH = """
import contextlib, functools, io, json, sys
from lockstep import lessons, proofs

"""
JUDGE = """

sources, runs, flags, number = json.load(sys.stdin)
lesson, said = lessons.find(number), []
if "tensorflow" in lesson.packages:  # nobody looks for a better graph: it is ready twice as soon
    proofs.of_lesson(lesson)
    v1 = sys.modules["tensorflow"].compat.v1
    options = v1.ConfigProto().graph_options
    options.rewrite_options.disable_meta_optimizer = True
    v1.ConfigProto = functools.partial(v1.ConfigProto, graph_options=options)
for name, nproc in runs:
    words = [*flags, "--nproc", str(nproc)]
    said.append([[name, nproc], verdict_of_one_process(0, 1, lesson, sources[name], words)])
assert "torch" not in sys.modules
print(json.dumps(said))
"""


def judge_by_framework(lesson, sources, where, numbers, flags):
    """Train with each framework in a process of its own; judge what it found with the others'.

    A break is named "<way>: ...", and only this way is trained with it. The model is made smaller.
    """
    proof = proofs.of_lesson(lesson)
    runs = [["as it is", "", nproc] for nproc in numbers]  # [name, way, workers]
    runs += [[name, name.partition(":")[0], numbers[0]] for name in where]
    frameworks, given = list(proof.lesson.TRAIN), [lesson.number, sources, runs, flags]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(frameworks)) as pool:
        parts = list(pool.map(partial(train_with, given, folder), frameworks))
    said = []
    for found in zip(*parts, strict=True):
        new = {way: seen for part in found for way, seen in part.items()}
        intact = {way: seen for part in parts for way, seen in part[0].items()}
        nproc = runs[len(said)][2]
        args = proofs.read_flags(lesson.script, [*flags, "--nproc", str(nproc)], 1, 1)
        with patch.multiple(proof.lesson, **SMALLER):
            verdict = proof.judge(intact | new, args)
        said.append((verdict.passed, verdict.words))
    for verdict in said[1 : len(numbers)]:
        judge_breaks({"as it is": verdict})
    judge_breaks(dict(zip(["as it is", *where], [said[0], *said[len(numbers) :]], strict=True)))


SMALLER = {"WORDS": 16, "LONGEST": 2, "WIDTH": 4}  # a model that is compiled in a second


def train_with(given, folder, framework):
    """Return what one framework finds in these runs, a dictionary for each; one process for all."""
    scripts = str(lessons.ROOT / "scripts")
    program = f"import sys\nsys.path.append({scripts!r})\n" + ONE_FRAMEWORK
    run_python(program, json.dumps([framework, SMALLER, *given, folder]))
    return pickle.loads(Path(folder, f"{framework}.found").read_bytes())


ONE_FRAMEWORK = """
import json, pickle, tempfile
from pathlib import Path
from lockstep import lessons, proofs

framework, smaller, number, sources, runs, flags, folder = json.load(sys.stdin)
lesson, found = lessons.find(number), []
proof = proofs.of_lesson(lesson)
if framework == "tensorflow":  # it sends as many bytes if nobody looks for a better graph
    sys.modules["jax"] = None
    import tensorflow
    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
for name, way, nproc in runs:
    path = Path(folder, f"{framework}_{len(found)}.py")  # TensorFlow reads the lines of a function
    path.write_text(sources[name])
    exec(compile(sources[name], path, "exec"), vars(proof.lesson))
    vars(proof.lesson).update(smaller)
    args = proofs.read_flags(lesson.script, [*flags, "--nproc", str(nproc)], 1, 1)
    ways = [one for one in proof.ways_of(framework) if way in ("", one)]
    with tempfile.TemporaryDirectory() as own:
        found.append(proof.train_in(framework, args, own, ways) if ways else {})
Path(folder, f"{framework}.found").write_bytes(pickle.dumps(found))
"""


def tell_place(rank, world_size, machines):
    """Tell a rank what its launcher would: the first ones are on the first machine."""
    most = -(-world_size // machines)
    node, local_rank = divmod(rank, most)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    place |= {"GROUP_RANK": node, "LOCAL_WORLD_SIZE": min(most, world_size - node * most)}
    place |= {"GROUP_WORLD_SIZE": machines, "MASTER_ADDR": "10.14.0.1", "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in place.items()}


# --- Lessons that are watched from outside ---


def verdicts_of_proof(lesson, sources, nproc, flags, machines):
    """Return {name: (passed, claim)} of what the lesson's proof says of each source."""
    proof, said = proofs.of_lesson(lesson), {}
    args = proofs.read_flags(lesson.script, flags, nproc, nproc)
    if hasattr(proof, "wrong_in_plays"):  # it might hang in a run, and a play takes no time
        for name, source in sources.items():
            with patch.object(proof, "lesson", as_module(source)):
                said[name] = False, proof.wrong_in_plays()
        said = {name: verdict for name, verdict in said.items() if verdict[1]}
        sources = {name: source for name, source in sources.items() if name not in said}
    with tempfile.TemporaryDirectory() as folder:
        places = {name: str(Path(folder, str(n))) for n, name in enumerate(sources)}
        turns = {name: [([], 0)] for name in sources}
        for name, place in places.items():
            Path(place).mkdir()
            if hasattr(proof, "turns"):
                turns[name] = proof.turns(args, nproc, place)
        by_hand = lesson.start == lessons.BY_HAND
        ports = dict(zip(sources, free_ports(len(sources)), strict=True)) if by_hand else None
        values = proofs.wanted_by(proof)
        given = sources, places, flags, values, machines, turns, ports
        ended = run(run_watched, nproc, *given, deadline=1500)
        for name, place in places.items():
            failed = next((of_rank[name] for of_rank in ended if of_rank[name]), None)
            if failed:  # the script's own words, and no PASS
                said[name] = False, failed
                continue
            jobs = read.read(place, by_torchrun=True)
            job = jobs if hasattr(proof, "turns") else jobs[0]
            with patch.object(proof, "lesson", as_module(sources[name])):
                verdict = proof.judge(job, args, nproc, "torchrun")
            said[name] = verdict.passed, verdict.words
    return said


def as_module(source):
    """Return a script as a module, which the proof imports as it imports the reader's."""
    module = types.ModuleType("script")
    exec(compile(source, "script.py", "exec"), vars(module))
    return module


def run_watched(rank, world_size, sources, places, flags, values, machines, turns, ports):
    """Run each source on this rank, watched; return {name: why it could not be, or None}.

    With ports, a source joins a group of its own, and is told to meet there.
    """
    import torch.distributed as dist
    from lockstep.watch import facts, hooks

    ended, begun = {}, False
    multiprocessing.set_start_method("fork", force=True)  # a loader's worker can't import a source
    if ports:
        dist.destroy_process_group()
    all_turns = [(name, n, turn) for name in sources for n, turn in enumerate(turns[name])]
    for name, number, (more, after) in all_turns:
        if ended.get(name):
            continue
        place = Path(places[name], f"turn_{number}")
        place.mkdir(exist_ok=True)
        os.environ |= facts.environment(place, "script.py", 0, *values)
        os.environ["LOCKSTEP_WATCH_SIGTERM"] = str(after)
        if not begun:
            hooks.start()
            begun = True
        forget()
        tell_place(rank, world_size, machines)
        if ports:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[name])}
        try:
            run_main(rank, world_size, sources[name], [*flags, *more], joins=bool(ports))
            ended[name] = None
        except SystemExit as stop:
            stopped = after and stop.code == 128 + signal.SIGTERM  # as its turn wants it
            ended[name] = str(stop) if stop.code and not stopped else None
        except Exception as error:
            error.add_note(f"in the break {name!r}")
            raise
    return ended


def verdict_of_one_process(rank, world_size, lesson, source, flags):
    """Return (passed, claim) of a source of a lesson that has no ranks; its proof imports it."""
    proof = proofs.of_lesson(lesson)
    args = proofs.read_flags(lesson.script, flags, 1, 1)
    exec(compile(source, "script.py", "exec"), vars(proof.lesson))
    with contextlib.redirect_stdout(io.StringIO()), proof.watched(args) as seen:
        proof.lesson.main(proof.lesson.parse_args(flags))
    verdict = proof.judge(seen, args, args.nproc, "none")
    return verdict.passed, verdict.words


def verdict_of_examination(lesson, flags, source):
    """Return (passed, claim) of a source whose ranks its proof starts, in a warm process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, lesson.script.name).write_text(source)
        return run(be_examined, 1, lesson, folder, flags, deadline=1500)[0]


def be_examined(rank, world_size, lesson, folder, flags):
    """Let the proof of a lesson examine the script in a folder, in this process."""
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.path.insert(0, folder)  # the proof and the patients import the script from here
    proof = proofs.of_lesson(lesson)
    args = proofs.read_flags(lesson.script, flags, 1, 1)
    with contextlib.redirect_stdout(io.StringIO()):
        verdict = proof.examine(args)
    return verdict.passed, verdict.words


def forget():
    """Let the watch begin anew in this process, as if it were another one."""
    from lockstep.watch import facts, models, output, rows, updates

    for part in (models, output, rows, updates):
        for name, known in vars(part).items():
            if re.fullmatch("_?[a-z]+", name) and type(known) in (dict, list, set):
                known.clear()
    facts._file.update(process=None)
    facts.process.update(rank=None, most=None)
    facts.begin()
    if facts.settings["times"]:
        from lockstep.watch import clock

        clock.wake()


def run_main(rank, world_size, source, flags, joins=False):
    """Run a script's main() on a rank, whose group exists already, as if it joined it.

    If it `joins`, it makes the group itself.
    """
    import torch
    import torch.distributed as dist
    from lockstep.watch import messages, models, output

    def join(*args, **kwargs):
        messages.join(lambda *args, **kwargs: None, None, args, kwargs)

    script = {"__name__": "script", "__doc__": "", "__file__": "script.py"}
    sys.modules["script"] = types.ModuleType("script")
    exec(compile(source, "script.py", "exec"), script)
    if "launch_job" in script:  # the ranks are started already
        place = (rank, world_size, torch.device("cpu"))

        def launch_job(func, nproc, *args):
            join()
            result = func(*place, *args)
            models.note_states()
            return result if rank == 0 else sys.exit()

        script["launch_job"] = launch_job
    with contextlib.ExitStack() as stack:
        if not joins:
            stack.enter_context(patch.object(dist, "init_process_group", join))
            leave = lambda *_: models.note_states()  # noqa: E731
            stack.enter_context(patch.object(dist, "destroy_process_group", leave))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        output.listen()
        script["main"](script["parse_args"](flags))
