"""Before a lesson starts: setup.sh, packages that are missing or broken, memory, long values."""

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, run_lesson

sys.path.append(str(ROOT / "scripts"))
environment, needs, memory = map(importlib.import_module, ("environment", "needs", "memory"))

# --- setup.sh, in a copy of the repository that requires one empty package ---


@pytest.fixture
def setup(tmp_path):
    """Return a function that starts setup.sh in tmp_path; it has the package, and disk enough."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script = tmp_path / "scripts" / "environment.py"
    script.write_text(re.sub(r"(DISK_GB = ).*", r'\1{"CPU": 0, "CUDA": 0}', script.read_text()))
    (tmp_path / "requirements.txt").write_text("nothing==1.0\n")
    with zipfile.ZipFile(tmp_path / "nothing-1.0-py3-none-any.whl", "w") as wheel:
        name = "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n"
        wheel.writestr("nothing-1.0.dist-info/METADATA", name)
        wheel.writestr("nothing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("nothing-1.0.dist-info/RECORD", "")
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python3").chmod(0o755)

    def run(**settings):
        settings = {"CONFIG_FILE": os.devnull, "RETRIES": 1, "DEFAULT_TIMEOUT": 300, **settings}
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("PIP_")}
        kept |= {f"PIP_{name}": str(value) for name, value in settings.items()}
        kept |= {"LOCKSTEP_PYTHON": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        kept |= {"no_proxy": "127.0.0.1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", tmp_path / "scripts/setup.sh"], env=kept, **pipes)

    yield run
    for process in processes_in(tmp_path):  # after a test that failed
        process.kill()


def processes_in(folder):
    """Return the processes whose command line names the folder."""
    every = psutil.process_iter(["cmdline"])
    return [p for p in every if str(folder) in " ".join(p.info["cmdline"] or ())]


def test_setup_without_network(setup, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = setup(INDEX_URL=f"http://127.0.0.1:{port}")
    lines = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == 1 and len(lines) <= 6
    assert "index can't be reached. Look at the network" in lines[-1]
    assert not (tmp_path / ".venv").exists()


def test_setup_that_is_ended_leaves_no_pip_and_the_next_runs_take_turns(setup, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        index.settimeout(300)
        address = f"http://127.0.0.1:{index.getsockname()[1]}"
        ended = setup(INDEX_URL=address)
        with index.accept()[0]:
            ended.terminate()  # the shell alone
            lines = ended.communicate(timeout=300)[1].splitlines()
            assert processes_in(tmp_path) == [] and not (tmp_path / ".venv").exists()
        assert ended.returncode == 143 and len(lines) <= 6
        assert lines[-1].startswith("setup was interrupted: run the same command again")
        killed = setup(INDEX_URL=address, RETRIES=0)
        with index.accept()[0]:
            for process in processes_in(tmp_path / "scripts"):
                process.send_signal(signal.SIGKILL)  # pip goes on, and still has the lock
            killed.communicate()
            runs = [setup(NO_INDEX=1, FIND_LINKS=tmp_path) for _ in range(2)]
            for run in runs:
                assert run.stderr.readline().startswith("waiting for another run")
    ends = [run.communicate(timeout=300) for run in runs]
    assert [stdout for stdout, _ in ends] == [f"ready: {tmp_path}/.venv/bin/python\n"] * 2, ends
    assert "".join(stderr for _, stderr in ends).count("installing the requirements") == 1


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Let environment.py work in tmp_path, on a disk with 16 GB free."""
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(environment, "STATE", tmp_path / ".venv.state")
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=16e9))
    return tmp_path


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize(
    "command, why",
    [
        ("echo boom; exit 1", "boom\n(ensure)?pip ended with the error above"),
        ("[ $3 = ensurepip ] || { echo '[Errno 28] No space left'; exit 1; }", "the disk is full"),
    ],
)
def test_setup_explains_what_failed(monkeypatch, folder, capsys, command, why, made_before):
    def create(place, **options):  # with a false Python
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").write_text(f"#!/bin/sh\n{command}\n")
        (place / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if made_before:  # for an earlier version of the course
        create(folder / ".venv")
    with pytest.raises(environment.SetupFailed, match=f"^{why}"):
        environment.make()
    assert (folder / ".venv").exists() == made_before
    assert (folder / ".venv.state").read_text() == "failed"
    assert re.search("\r\033\\[K.*(boom|left)\r\033\\[K$", capsys.readouterr().err)


@pytest.mark.parametrize("address, needed", [("", 15.5), ("https://some.where/whl/cpu", 6.5)])
def test_setup_looks_for_room_on_the_disk_first(monkeypatch, folder, address, needed):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2e9))
    monkeypatch.setattr(environment.venv, "create", None)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", address)
    with pytest.raises(environment.SetupFailed, match=rf"needs {needed} GB .* 2\.0 GB are free"):
        environment.make()


# --- What a lesson needs, and what is given to it ---


@pytest.mark.parametrize(
    "by, lesson, package, flag, words",
    [
        ("launcher", "03", "sklearn", "--json", "needs scikit-learn"),
        ("launcher", "11", "matplotlib", "--report=x.html", "needs matplotlib"),
        ("hand", "03", "sklearn", "--json", "needs scikit-learn"),
        ("hand", "05", "tensorboard", "--check", "needs tensorboard"),
        ("launcher", "07", "tensorflow", "--json", "tensorflow is broken"),
        ("launcher", "08", "paddle", "--json", "paddlepaddle is broken"),
    ],
)
def test_a_missing_or_broken_package_costs_one_line(tmp_path, by, lesson, package, flag, words):
    (tmp_path / f"{package}.py").write_text("raise ImportError('in\\ntwo lines')")
    if words.startswith("needs"):  # None: `import` finds nothing
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None")
    (script,) = (ROOT / "lessons").glob(f"lesson_{lesson}_*.py")
    launcher = ["bash", ROOT / "scripts" / f"lesson_{lesson}.sh"]
    command = launcher if by == "launcher" else [sys.executable, script]
    options = {"cwd": tmp_path, "env": {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}}
    run = subprocess.run([*command, flag], capture_output=True, text=True, **options)
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (2, "", 1), run.stderr
    assert words in run.stderr and "pip install" in run.stderr


def test_ranks_that_do_not_fit_into_the_memory_are_refused(monkeypatch):
    assert 1e8 < memory.free_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "free_memory", lambda: 10e9)
    one, four = (next((ROOT / "lessons").glob(f"lesson_{number}_*.py")) for number in ("01", "04"))
    for flags in ["--nproc", "64"], ["--nproc=64"], ["--nproc=2", "--nproc", "34", "--json"]:
        line = needs.problem(four, flags)
        assert "ranks need about" in line and "10.0 GB are free" in line and "\n" not in line
    assert needs.problem(four, ["--nproc", "33"]) is None
    assert needs.problem(four, ["--force", "--nproc=64"]) is None
    assert needs.problem(one, ["--nproc=64"]) is None  # a lesson of one process


@pytest.mark.parametrize("flags, code", [(["--nproc=64"], 2), (["--nproc=64", "--force"], 0)])
def test_the_launcher_asks_before_it_starts_anything(tmp_path, flags, code):
    (tmp_path / "lesson_99_none.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (tmp_path / "memory.py").write_text("def too_little(ranks):\n    return 'too little'\n")
    for name in ("run_lesson.py", "needs.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path)
    command = [sys.executable, tmp_path / "run_lesson.py", tmp_path / "lesson_99_none.py", *flags]
    (tmp_path.parent / "requirements.txt").touch()
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == code
    assert run.stdout == ("['--nproc=64']\n" if code == 0 else "")
    assert run.stderr == ("" if code == 0 else "lesson_99_none.py: too little\n")


@pytest.mark.parametrize("lesson, flag", [(4, "--init=tcp://"), (7, "--save="), (11, "--report=")])
def test_a_long_value_is_shortened(lesson, flag):
    run = run_lesson(lesson, flag + 5000 * "9")
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
    assert flag.partition("=")[0] in run.stderr and len(run.stderr) < 400
