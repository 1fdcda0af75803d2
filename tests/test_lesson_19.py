"""Lesson 19: ten jobs that hang or fail; what each tool says is measured, and PASS means it."""

import inspect
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import lesson_19_hang_clinic as lesson
import psutil
import pytest
from breaks import check_breaks
from conftest import ENVIRONMENT, ROOT, finish, run_lesson, run_warm, start_lesson, start_program
from lockstep import proofs
from lockstep.lessons import find
from nbtools import RankFailed

proof = proofs.of_lesson(find("19"))
patients = sys.modules["proofs.patients"]

BREAKS = {
    "a patient that is healthy": ("if step >= steps and loss < 0.01:", "if step > 2 * steps:"),
    "another rank is the guilty one": (
        "scale = 0.01 if rank == world_size - 1 else",
        "scale = 0.01 if rank == 1 else",
    ),
    "all leave the loop together": ("if step >= steps and loss < 0.01:", "if step >= steps:"),
    "the ranks do not wait for each other in the end": (
        "        optimizer.step()\n    dist.barrier()\n",
        "        optimizer.step()\n",
    ),
    "nobody can ask where a rank stands": (
        "    faulthandler.register(signal.SIGUSR1, file, all_threads=False)\n",
        "",
    ),
    "the file of the stacks is closed": (
        "    os.register_at_fork(after_in_child=leave_no_stacks)",
        "    file.close()",
    ),
    "a rank leaves no stacks from the beginning": (
        '    print(dist.get_world_size(), "ranks", file=file, flush=True)\n',
        "    return\n",
    ),
    "the recorder writes nothing": ("write_bytes(pickle.dumps(dump))", 'write_bytes(b"")'),
    "the list stays beside its place": ("    unfinished.rename(path)", "    unfinished.touch()"),
    "nobody calls the roll": (
        "    dist.monitored_barrier(gloo_group, timedelta(seconds=seconds), wait_all_ranks=True)",
        "    pass",
    ),
}


def test_each_break_ends_in_fail():
    check_breaks(19, BREAKS, 3, "--limit", 4, usual=3)


@pytest.mark.claim("B7")
def test_default_run(default_run):
    result = default_run(19).json
    row = result["matrix"]["early_stop"]
    assert " ".join(cell["verdict"] for cell in row.values()) == proof.EXPECTED["early_stop"]
    assert (result["named"], result["advice"]) == (["early_stop"], {"early_stop": [2]})
    line = proof.truth("early_stop", 3)[1]
    assert inspect.getsource(lesson).splitlines()[line - 1].strip() == "dist.barrier()"
    assert [row[tool]["line"] for tool in ("stacks", "recorder", "detail")] == [line] * 3
    assert all(cell["words"] and cell["seconds"] > 0 for cell in row.values())


@pytest.mark.slow
@pytest.mark.claim("B7")
@pytest.mark.parametrize("nproc", (3, 4))
def test_the_whole_matrix(nproc):
    result = run_lesson(19, "--patient", "all", "--nproc", nproc, "--json").json
    matrix = {name: [c["verdict"] for c in row.values()] for name, row in result["matrix"].items()}
    assert matrix == {name: words.split() for name, words in proof.EXPECTED.items()}
    guilty = {name: sorted(proof.truth(name, nproc)[0]) for name in patients.PATIENTS}
    assert (result["passed"], result["advice"]) == (True, guilty)
    assert set(result["named"]) == set(patients.PATIENTS) - {"slow_rank"}


def under_torchrun(patient, *flags, env=ENVIRONMENT):
    """Start a patient as a reader does by hand; return how it has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["--local-addr=127.0.0.1", patients.__file__, patient, *flags]
    env = env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return finish(start_program(*command, env=env))


@pytest.mark.slow
@pytest.mark.parametrize("patient", [*patients.PATIENTS, "healthy"])
def test_patients_hang_or_fail_under_torchrun_as_well(patient):
    flags = ["--limit", "20"] if patient == "slow_rank" else []
    ended = under_torchrun(patient, *flags)
    ill = patient in patients.PATIENTS and patient != "slow_rank"
    assert (ended.returncode != 0) == ill, ended.stderr
    assert ill or "rank 0 of 3 has come to the end of " in ended.stdout


@pytest.mark.slow
def test_what_the_page_says_about_detail_holds_under_torchrun():
    ended = under_torchrun(
        "uneven_batches", env=ENVIRONMENT | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    assert "SIGSEGV" in ended.stderr
    ended = under_torchrun("early_stop", env=ENVIRONMENT | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    said = re.findall(r"Rank (\d) is running collective.*but Rank (\d) is", ended.stderr)
    assert set.intersection(*map(set, said)) == {"2"}


def test_flags_that_do_not_fit(capsys):
    for flags, words in (
        ("--nproc 2", "from 3 to 4"),
        ("--patient nobody", "invalid choice: 'nobody'"),
        ("--tool hammer", "invalid choice: 'hammer'"),
        ("--limit 1", "from 2 to 60"),
    ):
        with pytest.raises(SystemExit) as stop:
            proofs.read_flags(lesson.__file__, flags.split(), 1, 1)
        assert stop.value.code == 2 and words in capsys.readouterr().err


def end_in_the_middle(process, signal_number, folder):
    """Send a signal while ranks run; return who of all processes still lives, and what is left."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(list(folder.rglob("said_*"))) < 12:
        time.sleep(0.02)
    assert len(list(folder.rglob("said_*"))) == 12, "the ranks of two jobs, in two ways"
    while time.monotonic() < deadline and not list(folder.rglob("pymp-*")):
        time.sleep(0.02)  # the loader of a rank makes a folder, too
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal_number)
    process.communicate(timeout=60)
    _, living = psutil.wait_procs(started, timeout=60)
    left = [path.name for path in folder.iterdir()]  # torch makes an empty folder, and leaves it
    return living, [name for name in left if not name.startswith("torchinductor_")]


@pytest.mark.parametrize("signal_number", (signal.SIGINT, signal.SIGKILL), ids=("INT", "KILL"))
def test_an_end_in_the_middle_leaves_nothing(signal_number, tmp_path):
    env = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    process = start_lesson(19, "--patient", "dead_loader", env=env)
    assert end_in_the_middle(process, signal_number, tmp_path) == ([], [])


def at(line, call):
    """Return a place: the way to this line of a script, and what it has called."""
    return (("train.py:90", f"train.py:{line}"), call)


def test_who_has_not_arrived():
    waits, elsewhere = at(10, "all_reduce"), at(20, "barrier")
    for places, named in (
        ([waits, waits, elsewhere], [2]),
        ([elsewhere, waits, waits], [0]),
        ([waits, waits, at(30, "send")], [2]),
        ([at(30, "send"), at(30, "send"), waits], [0, 1]),  # not the one that waits for them
        ([waits, None, at(7, "")], [1, 2]),
        ([waits, waits, waits], []),
        ([at(9, "Work.wait"), at(9, "Work.wait"), elsewhere], [2]),
        ([at(9, "all_gather_object"), at(9, "all_gather_object"), elsewhere], [2]),
        ([at(9, "isend"), at(9, "isend"), elsewhere], [0, 1]),
        ([waits, elsewhere], []),  # of two, neither is the odd one
    ):
        assert proof.not_arrived(dict(enumerate(places))) == named, places


def call(line, operation, group="0", sizes=""):
    return ("train.py:90", f"train.py:{line}"), operation, group, sizes


def test_who_has_parted_from_the_rest():
    a, b, c = call(1, "all_reduce"), call(2, "barrier"), call(3, "broadcast")
    first, other_way = call(9, "barrier"), call(8, "all_reduce")
    for calls, named, lines in (
        ([[a, b], [a, b], [a]], [2], ["2", "2", None]),
        ([[a, c, b], [a, b], [a, b]], [0], ["3", "2", "2"]),
        ([[], [], [a]], [0, 1], [None, None, "1"]),
        ([[a], [a], [a]], [], []),
        ([[a], [b]], [], ["1", "2"]),
        ([[first, a], [b, a], [b, a]], [], []),  # two barriers at two lines are no mistake,
        ([[first, a, c], [b, a, c], [b, a]], [2], ["3", "3", None]),  # also if there is another
        ([[other_way, a, a], [a, a, c], [a, a, c]], [0], ["8", "1", "1"]),  # here 0 had parted
    ):
        calls = {rank: dict(enumerate(own)) for rank, own in enumerate(calls)}
        found, here = proof.parted(calls)
        where = [each and each[0][-1].partition(":")[2] for each in here.values()]
        assert (found, where) == (named, lines), calls


def page_block(language, start):
    """Return the first block of a language in the texts of the page that begins so."""
    page = json.loads((ROOT / "notebooks" / "lesson_19_hang_clinic.ipynb").read_text())
    texts = ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "markdown"]
    blocks = [b for text in texts for b in re.findall(f"```{language}\n(.*?)```", text, re.DOTALL)]
    return next(block for block in blocks if block.startswith(start))


def test_the_script_of_the_page_runs_beside_the_technique_alone(tmp_path, capsys):
    """By its own clock, that is without a signal. Then the files say what the page shows."""
    source = Path(lesson.__file__).read_text()
    technique = source.partition("# --- The technique ---")[2].partition("# --- The example")[0]
    imports = [line for line in source.splitlines() if re.match("import |from .* import ", line)]
    (tmp_path / "traces.py").write_text("\n".join(imports) + technique)
    script = page_block("python", "import os").replace("300)", "2.5)")
    script = script.replace("minutes=30", "seconds=12")
    assert script.count("2.5)") == 2 and "seconds=12" in script
    script = script.replace("/shared/hang", str(tmp_path / "hang"))
    script = script.replace(
        "import os\n", f"import os, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    )
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(RankFailed):
        run_warm(tmp_path / "train.py", 3)
    assert proof.read_files(tmp_path / "hang") == 0
    said = re.sub(r"\b(run|conftest).py:\d+ > ", "", capsys.readouterr().out)
    assert said == page_block("text", "rank 0 stands")
