"""The clinic: what ranks leave, by lesson 19, and whom it names by that in a job that hangs."""

import pickle
import re
import sys
import threading
import time
from types import SimpleNamespace

import lesson_19_hang_clinic as lesson
import pytest
from conftest import ENVIRONMENT, ROOT, finish, start_program
from lockstep import proofs
from lockstep.lessons import find
from lockstep.watch import clinic

proof = proofs.of_lesson(find("19"))


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
                call |= {"name": "new_group", "group": clinic.NEW}
                call["members"] = tuple(map(int, peer))
                frames = [("/home/me/train.py", int(line), "train")]
                notes.append(call | {"number": made, "frames": frames, "waits": "..." in each})
            elif mark:
                frames = [("/home/me/train.py", int(line), "train")]
                call |= {"name": name, "group": group, "number": number}
                call |= {"peer": int(peer)} if peer else {}  # of recv from any: none
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


def test_a_list_counts_if_the_job_stood_still(tmp_path):
    waits = "7 all_reduce, 7 all_reduce, 7 all_reduce ..."
    for seconds, apart, named in ((10, 0, [1]), (0, 0, []), (3, 4, []), (10, 4, [1])):
        leave_files(
            tmp_path, waits, "7 all_reduce, 7 all_reduce; 40 get", seconds=seconds, apart=apart
        )
        assert clinic.tell(tmp_path) == named, (seconds, apart)


EPOCH = "7 all_reduce, 7 all_reduce, 9 barrier"
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
        "the cause is who should have given it: another rank, or another thread",
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
    "of two, one has made a call where the other has never been": (  # validation on rank 0
        [
            "7 all_reduce, " * 3 + "9 all_reduce, 7 all_reduce, 7 all_reduce, 7 all_reduce ...",
            "7 all_reduce, " * 6 + "11 barrier ...",
        ],
        [],
        "rank 0 was alone at all_reduce in group 0 at train.py:9, call 4 of group 0:",
    ),
    "a message left out after two rounds": (  # what came before the first counts as a round
        [
            "6 recv<2, 9 broadcast, 6 recv<2, 9 broadcast, 6 recv<2 ...",
            "5 send>0, 9 broadcast, 5 send>0, 9 broadcast, 5 send>0, 9 broadcast ...",
            "5 send>0, 9 broadcast, 5 send>0, 9 broadcast, 9 broadcast ...",
        ],
        [2],
        "rank 2 has always called before it came here, and not as often this time: send to 0",
    ),
    "a message left out after one round": (
        [
            "6 recv<2, 9 broadcast, 6 recv<2 ...",
            "5 send>0, 9 broadcast, 5 send>0, 9 broadcast ...",
            "5 send>0, 9 broadcast, 9 broadcast ...",
        ],
        [],
        "which of ranks 0, 2 is it?",
    ),
    "one has not made a group, and the others go on": (  # 8 comes after it, and is not left out
        [f"{LOOP}, 6 all_reduce, 8 all_reduce, 7 all_reduce, 9 new_group+012 ..."] * 3
        + [f"{LOOP}, 6 all_reduce, 8 all_reduce, 7 all_reduce, 5 new_group+01 ..."],
        [3],
        "rank 3 is alone against 3",
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
    "two have left out a call, and have been there in other rounds": (
        ["7 all_reduce, 9 barrier, " * 2 + "7 all_reduce ..."]
        + ["7 all_reduce, 9 barrier, " * 2 + "9 barrier ..."] * 2,
        [],
        "or should rank 0 have left it out, too? Most have",
    ),
    "two have left out a call of each round": (
        ["7 all_reduce, 9 barrier, " * 3 + "7 all_reduce ..."]
        + ["7 all_reduce, 9 barrier, " * 3 + "9 barrier ..."] * 2,
        [],  # or the one has called what was called in the first rounds only
        "and not as often this time: all_reduce in group 0 at train.py:7",
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
    "all have ended": ([f"{LOOP}; ended"] * 2, [], "all ranks have come to the end"),
    "nobody waits for another one": ([f"{LOOP}; 40 get"] * 2, [], "no rank holds up another"),
    "a thread has ended": (  # all wait for their threads, and these for that of rank 1
        [f"{LOOP}, 6 all_reduce/1, 6 all_reduce/1 ...; 40 get", f"{LOOP}, 6 all_reduce/1; 40 get"],
        [1],
        "in another thread rank 0 waits for rank 1: all_reduce in group 1 at train.py:6",
    ),
    "a thread has never come there": (
        [f"{LOOP}, 6 all_reduce/1 ...; 40 get", f"{LOOP}; 40 get"],
        [],
        "or the others made one too many?",
    ),
    "who has not sent, to one that takes from any": (
        [
            "3 recv_anysource<, 3 recv_anysource<, 8 broadcast, " * 2
            + "3 recv_anysource< ...; 3 recv",
            "5 send>0, 8 broadcast, " * 2 + "5 send>0, 8 broadcast ...",
            "5 send>0, 8 broadcast, " * 2 + "8 broadcast ...",
        ],
        [2],
        "rank 0 and rank 1 wait for each other: recv from any",
    ),
    "a slow one, awaited by one that takes from any": (
        [
            "3 recv_anysource<, 8 broadcast, 3 recv_anysource< ...; 3 recv",
            "5 send>0, 8 broadcast, 5 send>0, 8 broadcast ...",
            "5 send>0, 8 broadcast; 40 get",
        ],
        [2],
        "or it is only slow",
    ),
    "after DDP's first epoch, which has other calls": (
        [
            f"7 all_reduce, 6 broadcast, 7 all_reduce, 9 barrier, {EPOCH}, {EPOCH}, {end} ..."
            for end in (EPOCH, EPOCH, "7 all_reduce, 7 all_reduce, 7 all_reduce")
        ],
        [2],
        "not as often this time: barrier in group 0 at train.py:9",
    ),
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
    assert (clinic.tell(tmp_path), words in (said := capsys.readouterr().out)) == (named, True), (
        said
    )


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
        assert clinic.where(text) == (("train.py:41", "dist_utils.py:4"), "all_reduce")
        assert clinic.shown(clinic.where(text)[0]) == "train.py:41 > dist_utils.py:4"


def test_files_that_name_nobody(tmp_path, capsys):
    assert "has left no stacks_0" in proof.refuse(SimpleNamespace(files=str(tmp_path)), 3, 3)
    nothing = {"entries": [], "notes": [], "groups": {}, "ended": False}
    (tmp_path / "stacks_0").write_text("2 ranks\n")
    (tmp_path / "stacks_1").write_text("2 ranks\n")
    (tmp_path / "calls_0").write_bytes(pickle.dumps(nothing))
    (tmp_path / "calls_1").write_bytes(b"torn")
    (tmp_path / "stacks_2").write_text("3 ranks\n")  # of an earlier job
    assert proof.read_files(tmp_path) == 1  # a victim would be named as easily
    said = capsys.readouterr().out
    assert "rank 1: no list of calls, or one of a job that still ran\n" in said
    (tmp_path / "calls_1").write_bytes((tmp_path / "calls_0").read_bytes())
    for rank, line in enumerate((3, 4)):
        stack = f'Stack (most recent call first):\n  File "train.py", line {line} in train\n'
        (tmp_path / f"stacks_{rank}").write_text(f"2 ranks\n{stack}")
    assert proof.read_files(tmp_path) == 1  # lists without a call are no evidence
    assert "no list of calls" in capsys.readouterr().out
    (tmp_path / "calls_1").write_bytes(b"torn")
    assert "nobody is named" in said and "rank 2" not in said
    (tmp_path / "stacks_0").write_text("")  # a disk may be full
    assert proof.read_files(tmp_path) == 1


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
    assert clinic.way_of(note["frames"])[-1].startswith("test_clinic.py:") and not note["waits"]
    with pytest.raises(RuntimeError):
        lesson.noting_waits(wait)(work)
    assert (seen, note["waits"]) == ([True], True)  # it has not come
    lesson.noting_waits(lambda work, timeout: True)(work, timeout=1)
    assert not note["waits"]


FORKS = """
import multiprocessing, os, pickle, sys, time
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
print("torch._dynamo" in sys.modules)  # which optimizers import, and the list in its thread
print([note["name"] for note in lesson.NOTES], dist.ProcessGroup.send.__name__)


def deep(n):
    return n and deep(n - 1)


sys.setswitchinterval(1e-4)
lesson.leave_stacks("stacks_busy", 0.001)
while (text := open("stacks_busy").read()).count("(most recent call first)") < 600:
    deep(500)
print("Stacks of all threads" in text, "Timeout" in text)
dist.destroy_process_group()
"""


def test_forks_leave_no_stacks_and_a_rank_that_computes_lives_on(tmp_path):
    """faulthandler's clock, which takes no lock, kills this one after 10 to 300 stacks."""
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "lessons")}
    ended = finish(start_program(sys.executable, "-c", FORKS, cwd=tmp_path, env=env))
    said = "-15 ['stacks_0'] ['1', 'ranks']\nTrue\n['broadcast'] noted\nTrue False\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    dump = pickle.loads((tmp_path / "calls_0").read_bytes())
    (call,) = clinic.history(dump, 0)
    assert (call.what, call.waits, dump["ended"]) == ("1 Float root 0", False, True)
