"""Lesson 04: how ranks find each other, how that fails, and who is named."""

import contextlib
import io
import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import cloudpickle
import lesson_04_init_methods as lesson
import pytest
import torch
import torch.distributed as dist
from breaks import check_breaks
from conftest import ENVIRONMENT, ROOT, finish, run_lesson, run_warm, start_program
from lockstep import by_hand, network, proofs
from nbtools import run
from warm_launcher import be_launcher

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BREAKS = {
    "no roll call": ("    call_the_roll(store, rank, world_size, limit)\n", ""),
    "a rank that comes twice goes unnoticed": ('f"rank {rank}", 1) > 1', 'f"rank {rank}", 1) > 9'),
    "nobody compares world sizes": ("if size != str(world_size)", "if False"),
    "who is missing is not said": ("if not store.check([f", "if store.check([f"),
    "the others are not told": ('store.compare_set("verdict", "", problem)', "pass"),
    "two jobs in one store": ('f"{job}, attempt {attempt}"', 'f"attempt {attempt}"'),
    "a restart finds the marks of the first attempt": ('f"{job}, attempt {attempt}"', "job"),
    "no key space of one's own": ("store = dist.PrefixStore(", "dist.PrefixStore("),
    "rank taken for local rank": ('int(os.environ["RANK"])', 'int(os.environ["LOCAL_RANK"])'),
    "world size of one machine": ('["WORLD_SIZE"])', '["LOCAL_WORLD_SIZE"])'),
    "a socket that nobody closes": ("server.detach()", "os.dup(server.detach())"),
    "another address": ('create_server((host.strip("[]")', 'create_server(("127.0.1.1"'),
    "a port of its own choice": ("int(port)), family", "29517), family"),
    "on all addresses": ('create_server((host.strip("[]"), int', 'create_server(("", int'),
    "rank 0 is not looked for": ("r in range(world_size) if", "r in range(1, world_size) if"),
    "numbers below zero": ("not 0 <= rank < world_size", "rank >= world_size"),
    "numbers that are none": ("not 0 <= rank < world_size", "False"),
    "who comes late is let in": ("verdict = problem or ", "verdict = "),
    "rank 0 leaves before the others are told": ("if rank == 0:  # who", "if False:  # who"),
    "nobody says that it is told": ('        store.add("told", 1)\n', ""),
    "complete, whatever was found": ('compare_set("verdict", "", "c', 'set("verdict", "c'),
    "each sets the world size, then reads it": (
        'store.compare_set("world size", "", str(world_size)).decode()',
        '(store.set("world size", str(world_size)), store.get("world size").decode())[1]',
    ),
    "looks first whether a rank is taken, then takes it": (
        'store.add(f"rank {rank}", 1) > 1',
        'store.check([f"rank {rank}"]) or store.set(f"rank {rank}", "1")',
    ),
    "only rank 0 calls the roll": ("    call_the_roll(store,", "    rank or call_the_roll(store,"),
    "waits twice as long as it was told": ('["verdict"], limit)', '["verdict"], 2 * limit)'),
    "numbers that are not added up": ("dist.all_reduce(numbers)", "numbers *= world_size"),
    "each rank adds the same": ("(args.batch_size,), rank + 1", "(args.batch_size,), 1"),
    "gloo, whatever backend was asked for": ("group(backend, ", 'group("gloo", '),
    "the group meets without the store": ("store=store, rank=rank,", "rank=rank,", (2, 3)),
    "rank 0 waits for all, before the roll call": (', "wait_for_workers": False', ""),
    "rank 0 listens under torchrun, too": ('!= "True":', '!= "true":'),
    "the group has another timeout": ("world_size, timeout=limit", "world_size"),
    "every rank holds a store": ("if rank == 0 and", "if"),
    "all join as rank 0": ("store=store, rank=rank,", "store=store, rank=0,"),
    "each joins a world of its own": (" world_size=world_size,", " world_size=1,"),
}
with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    BREAKS |= {  # where there is IPv6
        "calls a host in brackets": ('TCPStore(host.strip("[]")', "TCPStore(host"),
        "listens at a host in brackets": ('create_server((host.strip("[]")', "create_server((host"),
    }


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(4, BREAKS, nproc)


# --- The launcher, and the script in its hands ---


RUNS = {"tcp": (3, 21), "file": (2, 13), "store": (2, 13)}  # method: (ranks, their sum)
with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    RUNS["tcp://[::1]"] = (2, 13)  # where there is IPv6; a port is added


@pytest.mark.claim("E7", "E9", "E11", "E14", "C9")
@pytest.mark.parametrize("method", RUNS)
def test_ranks_meet_by_each_method(method):
    nproc, total = RUNS[method]
    place = f"{method}:{network.free_ports(1)[0]}" if method.endswith("]") else method
    flags = ["--init", place, "--nproc", nproc, "--seed", 5, "--steps", 2, "--json"]
    if method == "file":  # in new processes: what a rank has imported decides whether it closes it
        facts = run_lesson(4, *flags).json
    else:
        ((code, stdout, stderr),) = run(be_launcher, 1, flags)
        assert (code, stderr) == (0, []), stdout
        facts = json.loads(stdout[-1])
    assert (facts["passed"], facts["init"]) == (True, method.partition(":")[0])
    assert (facts["ranks_seen"], facts["all_reduce"]) == (list(range(nproc)), total)


def test_one_rank_by_hand_is_judged_by_what_is_seen_of_it():
    place = f"tcp://127.0.0.1:{network.free_ports(1)[0]}"
    ((code, stdout, _),) = run(be_launcher, 1, ["--init", place, "--rank", 0, "--nproc", 1])
    assert code == 0 and stdout[-1].startswith("PASS rank 0 met by tcp, and name"), stdout


def test_a_rank_that_is_killed_is_named_and_leaves_no_file(tmp_path):
    flags = ["--init", f"file://{tmp_path}/meeting_place"]
    ((code, _, stderr),) = run(be_launcher, 1, flags, 1)
    assert (code, stderr) == (1, ["rank 1 failed: killed by SIGKILL"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.claim("C9")
def test_a_port_that_is_taken_is_said_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        flag = f"--init=tcp://127.0.0.1:{other_job.getsockname()[1]}"
        ((code, _, stderr),) = run(be_launcher, 1, [flag])
    assert code == 1 and re.match("rank 0 failed: OSError: .*Address already in use", *stderr)


def be_typed(rank, world_size, lines):
    """Be what was typed into terminal `rank`: variables, and flags; return what it prints."""
    dist.destroy_process_group()
    for name in by_hand.OF_A_JOB:
        os.environ.pop(name, None)
    variables, flags = lines[rank]
    os.environ |= {name: str(value) for name, value in variables.items()}
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        lesson.main(lesson.parse_args(flags))
    return stdout.getvalue().splitlines()[-1]


@pytest.mark.claim("B6", "B2", "E12")
@pytest.mark.parametrize("method", ["env", "tcp"])
def test_printed_lines_start_the_ranks_by_hand(method):
    """The rank is the number of the process."""
    args = lesson.parse_args([f"--init={method}"])
    place = f"127.0.0.1:{network.free_ports(1)[0]}"
    lines = [by_hand.what_is_typed(args, method, place, rank) for rank in (0, 1)]
    said = [f"rank {rank} has met all 2; the sum is 3" for rank in (0, 1)]
    assert run(be_typed, 2, lines) == said


RESTARTED = """
import os, signal
import lesson_04_init_methods as lesson
lesson.main(lesson.parse_args([]))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.claim("E10")
def test_under_torchrun_ranks_meet_also_after_a_restart(tmp_path):
    """Its agent holds the store, which still has what the dead ranks have left."""
    (tmp_path / "restarted.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--local-addr=127.0.0.1", "--log-dir=/dev/null", "--nproc-per-node=2"]
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "lessons")}
    ended = finish(start_program(*command, tmp_path / "restarted.py", env=ENVIRONMENT | more))
    assert ended.returncode == 0, ended.stderr
    assert "failed to listen" not in ended.stderr
    assert len(re.findall("has met all 2; the sum is 3", ended.stdout)) == 4


BAD = {
    "--init carrier-pigeon": "--init",
    "--init tcp --rank 0": "--init",
    "--init env://127.0.0.1:29500 --rank 0": "--rank",
    "--init tcp://127.0.0.1": "--init",
    "--init tcp://127.0.0.1:0": "--init",
    "--init store://127.0.0.1:65536": "--init",
    "--init tcp://::1:29500": "--init",
    "--init file://relative/path": "--init",
    "--init file:///no/such/folder/file": "--init",
    "--init file:///dev": "'/dev' is a folder",
    "--init file:///dev/null --rank 0": "'/dev/null' is a folder or a device",
    "--init tcp://127.0.0.1:29500 --rank 2": "--rank",
    f"--init file://{shlex.quote(__file__)}": "is left from an earlier run",
}


@pytest.mark.claim("E11")
@pytest.mark.parametrize("flags", BAD)
def test_bad_values_are_refused(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(lesson.__file__, shlex.split(flags), 1, 1)
    assert stop.value.code == 2 and BAD[flags] in capsys.readouterr().err


@pytest.mark.claim("E12")
def test_env_needs_numbers_and_an_address(monkeypatch, capsys):
    good = dict(zip(by_hand.VARIABLES, ("0", "2", "::1", "29500"), strict=True))
    monkeypatch.setattr(os, "environ", {**os.environ, **good})
    assert by_hand.told(proofs.read_flags(lesson.__file__, [], 1, 1)) == 0
    for bad in [*({name: ""} for name in by_hand.VARIABLES), {"RANK": "x"}]:
        monkeypatch.setattr(os, "environ", {**os.environ, **good, **bad})
        with pytest.raises(SystemExit):
            proofs.read_flags(lesson.__file__, [], 1, 1)
        assert "set WORLD_SIZE" in capsys.readouterr().err


def test_the_technique_runs_in_a_project_of_ones_own(tmp_path):
    technique = Path(lesson.__file__).read_text().partition("# --- The example ---")[0]
    own = (
        "place, *who = told_by_environment()\njoin(open_store(place, *who), *who)\ndist.barrier()\n"
    )
    (tmp_path / "own.py").write_text(technique + own)
    assert run_warm(tmp_path / "own.py", 2) == [(0, "")] * 2


def test_each_message_of_the_page_is_in_the_list_of_errors():
    """In docs/errors.md the page's words stand between backticks, with other numbers."""
    page = json.loads((ROOT / "notebooks" / "lesson_04_init_methods.ipynb").read_text())
    streams = [out for cell in page["cells"] for out in cell.get("outputs", []) if "text" in out]
    lines = [line for out in streams for line in out["text"] if re.search(r"Error: \S", line)]
    listed = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "errors.md").read_text())
    parts = [re.sub(r"\d+", "0", words).split("…") for words in listed if " " in words]
    assert len(lines) > 10
    for line in lines:
        said = re.sub(r"\d+", "0", line)
        assert any(all(part in said for part in words) for words in parts), line


@pytest.mark.claim("E4")
def test_backend_is_nccl_only_if_each_rank_has_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    chosen = []
    for nccl in (True, False):
        monkeypatch.setattr(dist, "is_nccl_available", lambda nccl=nccl: nccl)
        for gpus in (0, 1, 2, 8):
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            chosen.append(lesson.choose_device(1, 2)[0])
    assert chosen == ["gloo", "gloo", "nccl", "nccl"] + ["gloo"] * 4


@pytest.mark.gpu
@pytest.mark.claim("E1", "E2", "E4", "C9")
def test_on_gpus_the_script_uses_nccl():
    facts = run_lesson(4, "--nproc", torch.cuda.device_count(), "--json").json
    assert (facts["backend"], facts["device"], facts["passed"]) == ("nccl", "cuda", True)
