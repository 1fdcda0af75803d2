"""Lesson 19: ten jobs that hang or fail; what each tool says is measured, and PASS means it."""

import inspect
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from pathlib import Path

import lesson_19_hang_clinic as lesson
import psutil
import pytest
from breaks import check_breaks, verdict_of_warm_run
from conftest import ENVIRONMENT, ROOT, finish, run_lesson, run_warm, start_lesson, start_program
from nbtools import RankFailed

PLACES = 'seen = {rank: looks(run.text(rank, "stacks")) for rank in range(args.nproc)}'
CELL = '{"verdict": verdict(found, guilty, world_size)}'

BREAKS = {
    "a patient that is healthy": ("if step >= steps and loss < 0.01:", "if step > 2 * steps:"),
    "another rank is the guilty one": (
        "scale = 0.01 if rank == world_size - 1 else",
        "scale = 0.01 if rank == 1 else",
    ),
    "the stacks are not asked for": ('        leave_stacks(run.folder / f"stacks_{rank}")\n', ""),
    "the stacks are those of rank 0": (PLACES, PLACES.replace("text(rank", "text(0")),
    "the stacks come from the first ranks only": (
        PLACES,
        PLACES.replace("range(args.nproc)", "[0, 1]"),
    ),
    "the guilty rank is taken to be with the most": (
        "if said[rank] != most]",
        "if said[rank] == most]",
    ),
    "the recorder is read without its last call": (
        '.get("entries", []):',
        '.get("entries", [])[:-1]:',
    ),
    "the recorder writes nothing": (
        "write_bytes(pickle.dumps(dump))",
        'write_bytes(b"")',
    ),
    "the clock of the calls does not start": ("daemon=True).start()", "daemon=True)"),
    "the calls are not left": ('leave_calls(run.folder / f"calls_{rank}", 0.8', "abs(0.8"),
    "the analyzer reads the ranks in another order": (
        "str(path)) for path in paths}",
        "str(path)) for path in reversed(paths)}",
    ),
    "the analyzer is not mended": ('dump["pg_config"] = {n:', 'dump["pg_names"] = {n:'),
    "DETAIL is not set": ('"DETAIL" if run.kind == "detail" else "OFF"', '"OFF"'),
    "the roll is called elsewhere": ("line = lines.most_common(1)[0][0] if lines else", "line ="),
    "nobody calls the roll": (
        "    dist.monitored_barrier(gloo_group, timedelta(seconds=seconds), wait_all_ranks=True)",
        "    pass",
    ),
    "the matrix is written and not measured": (
        CELL,
        '{"verdict": dict(zip(TOOLS, EXPECTED.get(name, "nothing " * 6).split()))[tool]}',
    ),
    "a tool names whom it likes": (
        '    return "guilty" if guilty.issuperset(finding.ranks) else "victim"',
        '    return "guilty"',
    ),
}
FOR_FOUR = {name: BREAKS[name] for name in list(BREAKS)[:6]}


def test_each_break_ends_in_fail():
    check_breaks(19, BREAKS, 3, "--limit", 4)


def test_breaks_of_reading_end_in_fail_on_four_ranks_too():
    check_breaks(19, FOR_FOUR, 4, "--limit", 4)


OTHERS = {  # patient and tool: (text in the script, text in its place)
    ("slow_rank", "stacks"): ("seen[rank][-last:]}) > 1]", "seen[rank][-last:]}) > 9]"),
    ("validation", "all"): (
        'order = ("recorder", "stacks", "detail", "timeout")',
        'order = ("stacks", "recorder", "detail", "timeout")',
    ),
    ("other_shape", "timeout"): ("len(data)", "last"),
    ("dead_loader", "timeout"): ("if index == self.too_large:", "if index == -1:"),
    ("unused_branch", "recorder"): ("            rare.zero_()\n", "            pass\n"),
    ("group_order", "recorder"): ("        work.reverse()\n", "        pass\n"),
}


def test_breaks_of_other_patients_end_in_fail(tmp_path):
    source = Path(lesson.__file__).read_text()
    for (patient, tool), (part, other) in OTHERS.items():
        assert source.count(part) == 1, part
        place = tmp_path / f"{patient}.py", source.replace(part, other)
        passed, claim = verdict_of_warm_run(place, ["--patient", patient, "--tool", tool])
        assert not passed and patient in claim, claim


# --- The script ---


@pytest.mark.claim("B7")
def test_default_run(default_run):
    result = default_run(19).json
    row = result["matrix"]["early_stop"]
    assert " ".join(cell["verdict"] for cell in row.values()) == lesson.EXPECTED["early_stop"]
    assert (result["named"], result["advice"]) == (["early_stop"], {"early_stop": [2]})
    line = lesson.truth("early_stop", 3)[1]
    assert inspect.getsource(lesson).splitlines()[line - 1].strip() == "dist.barrier()"
    assert [row[tool]["line"] for tool in ("stacks", "recorder", "detail")] == [line] * 3
    assert all(cell["words"] and cell["seconds"] > 0 for cell in row.values())


@pytest.mark.slow
@pytest.mark.claim("B7")
@pytest.mark.parametrize("nproc", (3, 4))
def test_the_whole_matrix(nproc):
    result = run_lesson(19, "--patient", "all", "--nproc", nproc, "--json").json
    matrix = {name: [c["verdict"] for c in row.values()] for name, row in result["matrix"].items()}
    assert matrix == {name: words.split() for name, words in lesson.EXPECTED.items()}
    guilty = {name: sorted(lesson.truth(name, nproc)[0]) for name in lesson.PATIENTS}
    assert (result["passed"], result["advice"]) == (True, guilty)
    assert set(result["named"]) == set(lesson.PATIENTS) - {"slow_rank"}


@pytest.mark.slow
def test_a_rank_that_is_long_about_its_end_does_not_move(tmp_path):
    """The groups of this patient give up while the doctor looks: rank 1 is then seen to end."""
    source = Path(lesson.__file__).read_text()
    for part, other in (
        ("limit - 1 + 0.2 * number", "limit - 1 + 0.25 * number"),
        (
            "        sys.excepthook(*sys.exc_info())\n        path",
            "        time.sleep(rank == 1)\n        path",
        ),
    ):
        assert source.count(part) == 1, part
        source = source.replace(part, other)
    place = tmp_path / "late.py", source
    passed, claim = verdict_of_warm_run(place, ["--patient", "group_order", "--nproc", "4"])
    assert passed, claim


def under_torchrun(patient, *flags, env=ENVIRONMENT):
    """Start a patient as a reader does by hand; return how it has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["--local-addr=127.0.0.1", lesson.__file__, "--patient", patient, *flags]
    env = env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return finish(start_program(*command, env=env))


@pytest.mark.slow
@pytest.mark.parametrize("patient", [*lesson.PATIENTS, "healthy"])
def test_patients_hang_or_fail_under_torchrun_as_well(patient):
    flags = ["--limit", "20"] if patient == "slow_rank" else []
    ended = under_torchrun(patient, *flags)
    ill = patient in lesson.PATIENTS and patient != "slow_rank"
    assert (ended.returncode != 0) == ill, ended.stderr
    assert ill or f"PASS {patient} has come to its end" in ended.stdout


@pytest.mark.slow
def test_what_the_page_says_about_detail_holds_under_torchrun():
    ended = under_torchrun(
        "uneven_batches", env=ENVIRONMENT | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    assert "SIGSEGV" in ended.stderr
    ended = under_torchrun("early_stop", env=ENVIRONMENT | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    said = re.findall(r"Rank (\d) is running collective.*but Rank (\d) is", ended.stderr)
    assert set.intersection(*map(set, said)) == {"2"}


def test_flags_that_do_not_fit(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    for flags, words in (
        ("--nproc 2", "from 3 to 4"),
        ("--patient nobody", "invalid choice: 'nobody'"),
        ("--tool hammer", "invalid choice: 'hammer'"),
        ("--limit 1", "from 2 to 60"),
        ("--patient all", "one rank of a job has one patient"),
    ):
        with pytest.raises(SystemExit) as stop:
            lesson.parse_args(flags.split())
        assert stop.value.code == 2 and words in capsys.readouterr().err


# --- Whatever happens, nothing is left ---


def end_in_the_middle(process, signal_number, folder):
    """Send a signal while ranks run; return who of all processes still lives, and what is left."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(list(folder.rglob("here_*"))) < 12:
        time.sleep(0.02)
    assert len(list(folder.rglob("here_*"))) == 12, "the ranks of two jobs, in two ways"
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal_number)
    process.communicate(timeout=60)
    _, living = psutil.wait_procs(started, timeout=60)
    left = [path.name for path in folder.iterdir()]  # torch makes an empty folder, and leaves it
    return living, [name for name in left if not name.startswith("torchinductor_")]


@pytest.mark.parametrize("signal_number", (signal.SIGINT, signal.SIGKILL), ids=("INT", "KILL"))
def test_an_end_in_the_middle_leaves_nothing(signal_number, tmp_path):
    env = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    if signal_number == signal.SIGINT:
        process = start_lesson(19, "--patient", "dead_loader", env=env)
    else:
        process = start_program(sys.executable, lesson.__file__, env=env)
    assert end_in_the_middle(process, signal_number, tmp_path) == ([], [])


# --- The technique ---


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
        assert lesson.not_arrived(dict(enumerate(places))) == named, places


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
        found, here = lesson.parted(calls)
        where = [each and each[0][-1].partition(":")[2] for each in here.values()]
        assert (found, where) == (named, lines), calls


def test_files_of_another_environment_are_read_as_well():
    """Torch was installed elsewhere: its lines are not those of the job."""
    for place in ("/opt/conda/lib/python3.12/site-packages", "/home/me/.venv/lib64/python3.13"):
        text = "3 ranks\nStack (most recent call first):\n"
        for file, line, function in (
            (f"{place}/torch/distributed/distributed_c10d.py", 2806, "all_reduce"),
            (f"{place}/torch/distributed/c10d_logger.py", 83, "wrapper"),
            ("/home/me/project/dist_utils.py", 4, "total"),
            ("/home/me/project/train.py", 41, "train"),
            (f"{place}/runpy.py", 88, "_run_code"),
        ):
            text += f'  File "{file}", line {line} in {function}\n'
        assert lesson.where(text) == (("train.py:41", "dist_utils.py:4"), "all_reduce")
        assert lesson.shown(lesson.where(text)[0]) == "train.py:41 > dist_utils.py:4"


def test_calls_are_written_again_and_again(monkeypatch, tmp_path):
    """Nobody knows when a job will hang: a file of minute ten says nothing about hour three."""
    written, twice = [], threading.Event()

    def write(path):
        written.append(path)
        if len(written) == 2:
            twice.set()
            threading.Event().wait()  # this thread has done enough

    monkeypatch.setattr(lesson, "write_calls", write)
    monkeypatch.setattr(lesson, "take_notes", lambda: None)  # nor one that takes notes
    monkeypatch.setattr(lesson.atexit, "register", lambda *_: None)  # this is no rank that ends
    lesson.leave_calls(tmp_path / "calls_0", 0.01)
    assert twice.wait(30) and written == [tmp_path / "calls_0"] * 2


def test_a_recorder_that_has_forgotten_its_oldest_calls_is_compared_by_number():
    a = call(1, "all_reduce")
    calls = {0: {7: a, 8: a}, 1: {7: a, 8: a}, 2: {6: a, 7: a}}
    assert lesson.parted(calls) == ([2], {0: a, 1: a, 2: None})


def page_block(start):
    """Return the first block of code in the texts of the page that begins so."""
    page = json.loads((ROOT / "notebooks" / "lesson_19_hang_clinic.ipynb").read_text())
    texts = ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "markdown"]
    blocks = [b for text in texts for b in re.findall("```python\n(.*?)```", text, re.DOTALL)]
    return next(block for block in blocks if block.startswith(start))


def test_the_script_of_the_page_runs_beside_the_technique_alone(tmp_path, capsys):
    """By its own clock, that is without a signal. Then the files name the rank."""
    source = Path(lesson.__file__).read_text()
    technique = source.partition("# --- The technique ---")[2].partition("# --- The patients")[0]
    imports = [line for line in source.splitlines() if re.match("import |from .* import ", line)]
    (tmp_path / "traces.py").write_text("\n".join(imports) + technique)
    script = page_block("import os").replace("300)", "2.5)").replace("minutes=30", "seconds=12")
    assert script.count("2.5)") == 2 and "seconds=12" in script
    script = script.replace("/shared/hang", str(tmp_path / "hang"))
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{script}"
    )
    with pytest.raises(RankFailed):
        run_warm(tmp_path / "train.py", 3)
    args = lesson.parse_args(["--files", str(tmp_path / "hang")])
    with pytest.raises(SystemExit) as stop:
        lesson.main(args)
    said = capsys.readouterr().out
    assert stop.value.code == 0 and said.splitlines()[-1] == "rank 0 is named"
    assert "train.py:19, in barrier" in said, said


def leave_files(folder, *ranks, seconds=10, apart=0):
    """Leave what ranks leave so many seconds after their last call; their calls are `apart`.

    A rank is a text: "7 all_reduce, 8 broadcast=2/1*5, 9 recv<1 ...". Here it has called all_reduce
    at line 7, then at line 8 a broadcast of 5 numbers from rank 2 in group 1, and it waits at line
    9 for a message of rank 1; "6 new_group+01" has made a group of ranks 0 and 1. It ends with
    "...", or with where it stands: "; 40 get", "; ended".
    """
    for rank, text in enumerate(ranks):
        calls, _, stands = text.partition("; ")
        calls = [call for call in calls.split(", ") if call]
        entries, notes, counted = [], [], dict.fromkeys("01234", 0)
        for number, each in enumerate(calls):
            line, rest = each.split()[:2]
            name, mark, peer, group, size = re.fullmatch(
                r"(\w+)([=<>+]?)(\d*)(?:/(\d))?(?:\*(\d+))?", rest
            ).groups()
            group = group or "0"
            moment = time.time() - seconds - apart * (len(calls) - 1 - number)
            call = {"time_created_ns": 10**9 * moment, "frames": []}
            if mark == "+":
                made = sum("+" in other for other in calls[: number + 1])
                call |= {"name": f"new_group of ranks {', '.join(peer)}", "group": lesson.NEW}
                call["members"] = tuple(map(int, peer))
                frames = [("/home/me/train.py", int(line), "train")]
                notes.append(call | {"number": made, "frames": frames, "waits": "..." in each})
            elif mark:
                frames = [("/home/me/train.py", int(line), "train")]
                call |= {"name": name, "peer": int(peer), "group": group, "number": number}
                notes.append(call | {"frames": frames, "waits": each.endswith("...")})
            if mark in ("", "="):
                counted[group] += 1
                frame = {"filename": "/home/me/train.py", "line": int(line), "name": "train"}
                call |= {"record_id": number, "op_id": number, "frames": [frame]}
                call |= {"profiling_name": f"gloo:{name}", "process_group": (group, "")}
                call |= {"input_sizes": [[int(size or 4)]], "input_dtypes": ["Float"]}
                call |= {"collective_seq_id": counted[group], "retired": not each.endswith("...")}
                entries.append(call)
        groups = {"0": range(len(ranks)), "1": (0, 1), "2": (2, 3), "3": (1, 3), "4": range(3)}
        dump = {"entries": entries, "notes": notes, "groups": groups, "ended": stands == "ended"}
        (folder / f"calls_{rank}").write_bytes(pickle.dumps(dump))
        line, _, called = (stands or f"{line} {name}").partition(" ")
        text = f"{len(ranks)} ranks\n"
        called, _, file = called.partition("@")
        for place in line.split("|"):
            text += "Stack (most recent call first):\n"
            text += f'  File "/lib/python3.12/site-packages/torch/{file or "c10d"}.py", line 1'
            text += f" in {called}\n"
            text += f'  File "/home/me/train.py", line {place} in train\n'
        (folder / f"stacks_{rank}").write_text(text)


def test_a_list_bears_the_moment_at_which_it_was_begun(monkeypatch, tmp_path):
    """The first dump takes seconds, and the rank goes on meanwhile."""

    def dump():
        begun.append(time.time())
        time.sleep(0.5)
        return pickle.dumps({})

    begun = []
    monkeypatch.setattr(lesson.torch._C._distributed_c10d, "_dump_fr_trace", dump)
    lesson.write_calls(tmp_path / "calls_0")
    assert (tmp_path / "calls_0").stat().st_mtime < begun[0] + 0.1


def test_a_list_counts_if_the_job_stood_still(tmp_path):
    waits = "7 all_reduce, 7 all_reduce, 7 all_reduce ..."
    for seconds, apart, named in ((10, 0, [1]), (0, 0, []), (3, 4, []), (10, 4, [1])):
        leave_files(
            tmp_path, waits, "7 all_reduce, 7 all_reduce; 40 get", seconds=seconds, apart=apart
        )
        assert lesson.tell(tmp_path) == named, (seconds, apart)


LOOP = "7 all_reduce, 7 all_reduce"
TWO = "6 all_reduce, 6 all_reduce"
STEP = "3 recv<1, 5 send>1, 7 all_reduce, "
LAST = "3 recv<0, 5 send>0, 7 all_reduce, "
MESH = "6 all_reduce/{}, 7 all_reduce/{}, 8 all_reduce, "
HANGS = {  # what ranks have left; whom that names; words that it says
    "of two, one has not come": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 40 get"],
        [1],
        "rank 0 waits",
    ),
    "or is the call one too many?": (
        [f"{LOOP}, 9 all_reduce ...", f"{LOOP}; 40 get"],
        [],
        "has rank 1 left this call out, or has rank 0 made a call too many?",
    ),
    "half are behind": ([f"{LOOP}, 7 all_reduce ..."] * 2 + [f"{LOOP}; 40 get"] * 2, [2, 3], "40"),
    "most are behind": ([f"{LOOP}, 7 all_reduce ..."] + [f"{LOOP}; 40 get"] * 2, [1, 2], "40"),
    "at the first call": (
        ["7 all_reduce ..."] * 2 + ["; 40 get"],
        [2],
        "ranks 0, 1 wait for rank 2",
    ),
    "one is slow": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 40|41 get"],
        [],
        "rank 1 was elsewhere",
    ),
    "a list that is not of this moment": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 7 all_reduce"],
        [],
        "",
    ),
    "forward without a call is at work": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 6 forward"],
        [1],
        "",
    ),
    "a message in a pipeline": (
        ["3 recv<1, 3 recv<1 ...", "5 send>0, 3 recv<2, 3 recv<2 ...", "5 send>1; 40 acquire"],
        [2],
        "rank 1 waits for rank 2: recv from 2",
    ),
    "irecv and wait": (
        ["3 recv<1, 3 recv<1 ...; 4 Work.wait", "5 send>0; 40 get"],
        [1],
        "recv from 1",
    ),
    "a send that nobody takes": (["3 send>1, 3 send>1 ...", "5 recv<0; 40 get"], [1], "send to 1"),
    "a send was left out": (
        [STEP * 3 + "3 recv<1 ...", LAST.replace("3 recv<0, ", "") * 3 + "7 all_reduce ..."],
        [1],
        "send to 0 in group 0 at train.py:5",
    ),
    "both send first": (
        ["3 send>1 ...", "3 send>0 ...", "7 all_reduce ..."],
        [],
        "1 wait for each other",
    ),
    "another group than ever before": (
        [MESH.format(1, 1) * 3 + "6 all_reduce/1, 7 all_reduce/1, 8 all_reduce ..."] * 2
        + [MESH.format(2, 2) * 3 + "6 all_reduce/2, 7 all_reduce/2 ..."]
        + [MESH.format(2, 2) * 3 + "6 all_reduce/2, 7 all_reduce/3 ..."],
        [3],
        "all_reduce in group 2 at train.py:7",
    ),
    "two groups in the other order": (
        ["7 all_reduce ...", "7 all_reduce ...", "8 all_reduce/4 ..."],
        [2],
        "rank 2 is alone against 2",
    ),
    "groups made in another order": (  # no call of the groups is wrong, and rank 1 hangs
        [
            "6 new_group+01, 6 new_group+12, 7 all_reduce ...",
            "6 new_group+01, 6 new_group+12 ...",
            "6 new_group+12, 6 new_group+01, 7 all_reduce ...",
        ],
        [2],
        "rank 2: new_group of ranks 1, 2 at train.py:6",
    ),
    "a new group that is in no list": (  # one against two, but for an unknown reason
        ["7 all_reduce ...", "; 9 new_group", "7 all_reduce ..."],
        [],
        "new_group in group -: waits for ranks 0, 2",
    ),
    "a group's call made in the group of all": (
        [
            "6 all_reduce, 8 all_reduce/1, " * 3 + "6 all_reduce, 8 all_reduce/1 ...",
            "6 all_reduce, 8 all_reduce/1, " * 3 + "6 all_reduce, 9 all_reduce*8 ...",
            "6 all_reduce, " * 4 + "6 all_reduce ...",
        ],
        [1],
        "from here on: all_reduce in group 0 at train.py:9",
    ),
    "who is not in the group is no witness": (  # has 1 left a call of 0 and 1 out?
        ["6 all_reduce, 7 all_reduce/1 ...", *["6 all_reduce, 6 all_reduce ..."] * 2],
        [],
        "which of ranks 0, 1 is it?",
    ),
    "a call left out after several by one line": (  # one call for each parameter
        [
            "6 all_reduce, 6 all_reduce, 7 all_reduce/1, " * 2 + f"{TWO}, 7 all_reduce/1 ...",
            "6 all_reduce, 6 all_reduce, 7 all_reduce/1, " * 2 + f"{TWO}, 6 all_reduce ...",
            "6 all_reduce, " * 6 + "6 all_reduce ...",
        ],
        [1],
        "all_reduce in group 1 at train.py:7",
    ),
    "one asks again and again whether its call is complete": (  # 40: while not work.is_completed()
        [f"{LOOP}, 7 all_reduce/1 ...; 40 get", *[f"{LOOP}, 7 all_reduce/4 ..."] * 2],
        [],
        "rank 0 has not finished all_reduce in group 1 at train.py:7",
    ),
    "an open call, and one that is waited for": (  # rank 0 waits in group 4, not in group 1
        [
            f"{LOOP}, 6 all_reduce/1 ..., 7 all_reduce/4 ...; 7 Work.wait",
            f"{LOOP}, 7 all_reduce/4 ...",
            f"{LOOP}; 40 get",
        ],
        [2],
        "call 1 of group 4 (ranks 0, 1, 2): waits for rank 2",
    ),
    "a pipe of its own, and no message": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 40 recv"],
        [1],
        "",
    ),
    "one waits for what another holds": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 40 acquire"],
        [2],
        "the cause is the rank that should have given it back",
    ),
    "another source": (
        [
            "8 broadcast=0, 8 broadcast=0, 9 barrier ...",
            "8 broadcast=0, 8 broadcast=0 ...",
            "8 broadcast=0, 8 broadcast=2 ...",
        ],
        [2],
        "root 2",
    ),
    "of two, another source": (
        ["8 broadcast=0 ...", "8 broadcast=1 ..."],
        [],
        "which of ranks 0, 1",
    ),
    "another size": (
        ["7 all_reduce ...", "7 all_reduce ...", "7 all_reduce*5 ..."],
        [2],
        "5 Float",
    ),
    "pieces differ rightly": (
        ["7 scatter*8 ...", "7 scatter ...", "; 40 get"],
        [2],
        "waits for rank 2",
    ),
    "of two, another call": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}, 9 barrier ..."],
        [],
        "which of ranks 0, 1",
    ),
    "one has left the loop": (
        [f"{LOOP}, 7 all_reduce ..."] * 2 + [f"{LOOP}, 9 barrier ..."],
        [2],
        "from here on: barrier in group 0 at train.py:9",
    ),
    "two have left the loop": (
        [f"{LOOP}, 7 all_reduce ..."] + [f"{LOOP}, 9 barrier ..."] * 2,
        [],
        "which",
    ),
    "two have left out a call, and have been there in other rounds": (  # after two rounds only
        ["7 all_reduce, 9 barrier, " * 2 + "7 all_reduce ..."]
        + ["7 all_reduce, 9 barrier, " * 2 + "9 barrier ..."] * 2,
        [],
        "which of ranks 0, 1, 2",
    ),
    "two have left out a call of each round": (
        ["7 all_reduce, 9 barrier, " * 3 + "7 all_reduce ..."]
        + ["7 all_reduce, 9 barrier, " * 3 + "9 barrier ..."] * 2,
        [],  # or the one has called what was called in the first rounds only
        "rank 2 has always called before it came here, and not this time: all_reduce in group 0",
    ),
    "one has called where it stood alone": (
        ["7 broadcast, 6 broadcast, 7 broadcast ..."]
        + ["7 broadcast, 7 broadcast, 8 all_reduce ..."] * 2,
        [0],
        "from here on: broadcast in group 0 at train.py:6",
    ),
    "main process first": (
        ["4 barrier, 7 all_reduce, 9 barrier ..."]
        + ["5 barrier, 7 all_reduce, 8 broadcast ..."] * 2,
        [0],
        "from here on: barrier in group 0 at train.py:9",
    ),
    "the others have ended": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; ended"],
        [],
        "has rank 1 left this call out",
    ),
    "one has ended early": (
        [f"{LOOP}, 7 all_reduce ..."] * 2 + [f"{LOOP}; ended"],
        [2],
        "rank 2 has ended",
    ),
    "all have ended": ([f"{LOOP}; ended"] * 2, [], "no rank holds up another"),
    "a worker of a loader": (
        [f"{LOOP}, 7 all_reduce ...", f"{LOOP}; 40 _next_data@utils/data/dataloader"],
        [1],
        "rank 1 waits for a worker of its loader",
    ),
    "a new group is for all": (
        [f"{LOOP}; 9 new_group"] * 2 + [f"{LOOP}; 40 get"],
        [2],
        "new_group",
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_who_holds_up_the_others(name, tmp_path, capsys):
    left, named, words = HANGS[name]
    leave_files(tmp_path, *left)
    assert (lesson.tell(tmp_path), words in (said := capsys.readouterr().out)) == (named, True), (
        said
    )


def test_a_message_is_noted_and_whether_its_rank_waits(monkeypatch):
    class Group:
        group_name = "1"

        def _get_sequence_number_for_group(self):
            return 5

    class Work:
        pass

    def wait(work):
        seen.append(lesson.NOTES[-1]["waits"])
        raise RuntimeError("timed out")

    seen = []
    monkeypatch.setattr(lesson, "NOTES", [])
    monkeypatch.setattr(lesson.dist, "get_global_rank", lambda group, rank: rank + 2)
    work = lesson.noting("recv", lambda group, tensors, source, tag: Work())(Group(), [], 1, 0)
    (note,) = lesson.NOTES
    assert (note["name"], note["peer"], note["group"], note["number"]) == ("recv", 3, "1", 5)
    assert lesson.way_of(note["frames"])[-1].startswith("test_lesson_19.py:") and not note["waits"]
    with pytest.raises(RuntimeError):
        lesson.noting_waits(wait)(work)
    assert (seen, note["waits"]) == ([True], True)  # it has not come
    lesson.noting_waits(lambda work, timeout: True)(work, timeout=1)
    assert not note["waits"]


FORKS = """
import multiprocessing, os, pickle, time
import torch
import torch.distributed as dist
import lesson_19_hang_clinic as lesson
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lesson.leave_stacks("stacks_0")
lesson.leave_calls("calls_0")
dist.broadcast(torch.ones(1), 0)


def read_data():
    begun.set()
    time.sleep(300)


begun = multiprocessing.Event()
reader = multiprocessing.get_context("fork").Process(target=read_data)
reader.start()
begun.wait()
reader.terminate()
reader.join()
print(reader.exitcode, os.listdir(), open("stacks_0").read().split())
print([note["name"] for note in lesson.NOTES], dist.ProcessGroup.send.__name__)
dist.destroy_process_group()
"""


def test_a_process_that_reads_data_leaves_no_stack_of_its_own(tmp_path):
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "lessons")}
    ended = finish(start_program(sys.executable, "-c", FORKS, cwd=tmp_path, env=env))
    said = "-15 ['stacks_0'] ['1', 'ranks']\n['broadcast'] noted\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    dump = pickle.loads((tmp_path / "calls_0").read_bytes())
    (call,) = lesson.history(dump)
    assert (call.what, call.waits, dump["ended"]) == ("1 Float root 0", False, True)


def test_files_that_name_nobody(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        lesson.parse_args(["--files", str(tmp_path)])
    assert stop.value.code == 2 and "has left no stacks_0" in capsys.readouterr().err
    nothing = {"entries": [], "notes": [], "groups": {}, "ended": False}
    (tmp_path / "stacks_0").write_text("2 ranks\n")
    (tmp_path / "stacks_1").write_text("2 ranks\n")
    (tmp_path / "calls_0").write_bytes(pickle.dumps(nothing))
    (tmp_path / "calls_1").write_bytes(b"torn")
    (tmp_path / "stacks_2").write_text("3 ranks\n")  # of an earlier job
    assert lesson.read_files(tmp_path) == 1  # a victim would be named as easily
    said = capsys.readouterr().out
    assert "rank 1: no list of calls, or one of a job that still ran\n" in said
    (tmp_path / "calls_1").write_bytes((tmp_path / "calls_0").read_bytes())
    for rank, line in enumerate((3, 4)):
        stack = f'Stack (most recent call first):\n  File "train.py", line {line} in train\n'
        (tmp_path / f"stacks_{rank}").write_text(f"2 ranks\n{stack}")
    assert lesson.read_files(tmp_path) == 1  # lists without a call are no evidence
    assert "no list of calls" in capsys.readouterr().out
    (tmp_path / "calls_1").write_bytes(b"torn")
    assert "nobody is named" in said and "rank 2" not in said
    (tmp_path / "stacks_0").write_text("")  # a disk may be full
    assert lesson.read_files(tmp_path) == 1
