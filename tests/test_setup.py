"""Before a lesson starts: setup.sh, packages that are missing or broken, memory, a long value."""

import json
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
from lockstep import environment, lessons, needs, run

# --- setup.sh, in a copy of the repository that requires five empty packages ---

NAMES = ("torch", "numpy", "scikit-learn", "wrapt", "ruff")
EMPTY = {"NO_INDEX": 1}  # pip finds them in the folder
INSTALLING = "installing {} into {}/.venv\n(once only; it takes some minutes)\n"


def make_copy(folder):
    """Put what setup.sh needs into a folder, with empty packages, room for them and a python3."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    script = folder / "scripts" / "lockstep" / "environment.py"
    script.write_text(re.sub(r'"(torch, CUDA)": .*,', r'"\1": 0.0,', script.read_text()))
    (folder / "requirements.txt").write_text("".join(f"{name}==1.0  # empty\n" for name in NAMES))
    for name in NAMES:
        stem = f"{name.replace('-', '_')}-1.0"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    calls = 'echo "$@" >> "${0%/*}/calls"'
    (folder / "python3").write_text(f'#!/bin/sh\n{calls}\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)


def start_setup(folder, what="all", **settings):
    """Start setup.sh in a folder, with these settings of pip; return the process."""
    defaults = {"CONFIG_FILE": os.devnull, "FIND_LINKS": folder.as_uri(), "DEFAULT_TIMEOUT": 300}
    hidden = ("PIP_", "VIRTUAL_ENV", "CONDA_PREFIX", "LOCKSTEP_PYTHON")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    kept |= {f"PIP_{name}": str(value) for name, value in (defaults | settings).items()}
    kept |= {"PATH": f"{folder}:{os.environ['PATH']}", "no_proxy": "127.0.0.1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = ["bash", folder / "scripts" / "setup.sh", what]
    return subprocess.Popen(command, env=kept, cwd="/", start_new_session=True, **pipes)


def finish(process):
    """Return (exit code, stdout, stderr) of setup.sh."""
    stdout, stderr = process.communicate(timeout=1500)
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a copy in which lesson 01 has been prepared, and what that said."""
    folder = tmp_path_factory.mktemp("made once") / "the copy"
    make_copy(folder)
    return folder, finish(start_setup(folder, "01", **EMPTY))


@pytest.fixture
def copy(made, tmp_path):
    """Return a copy in which lesson 01 has been prepared."""
    folder = tmp_path / "a copy"
    shutil.copytree(made[0], folder, symlinks=True)
    yield folder
    for process in processes_in(folder):  # after a test that failed
        process.kill()


def processes_in(folder):
    """Return the processes whose command line names the folder."""
    every = psutil.process_iter(["cmdline"])
    return [p for p in every if str(folder) in " ".join(p.info["cmdline"] or ())]


def installed(folder):
    """Return the names of the packages in the folder's .venv, without pip's own."""
    every = (folder / ".venv").glob("lib/python*/site-packages/*.dist-info")
    return {path.name.partition("-")[0] for path in every} - {"pip", "setuptools"}


def test_a_command_installs_what_it_needs_and_the_next_adds_what_is_missing(made, copy):
    folder, said = made
    ready = f"ready: {folder}/.venv/bin/python\n"
    assert said == (0, ready, INSTALLING.format("torch, numpy, wrapt", folder))
    assert installed(copy) == {"torch", "numpy", "wrapt"}
    ready = f"ready: {copy}/.venv/bin/python\n"
    code, stdout, stderr = finish(start_setup(copy, "03", **EMPTY))
    assert (code, stdout, stderr) == (0, ready, INSTALLING.format("scikit-learn", copy))
    assert installed(copy) == {"torch", "numpy", "scikit_learn", "wrapt"}
    (copy / "calls").unlink()
    assert finish(start_setup(copy, "03")) == (0, ready, "")
    assert not (copy / "calls").exists(), "more than the Python of .venv was asked"


def test_setup_without_network(copy):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nobody = {"INDEX_URL": f"http://127.0.0.1:{port}", "FIND_LINKS": "", "RETRIES": 1}
    code, stdout, stderr = finish(start_setup(copy, "03", **nobody))
    assert (code, stdout) == (1, "") and "No matching distribution found for scikit-learn" in stderr
    assert re.fullmatch("setup failed: pip .* Look at the network .*", stderr.splitlines()[-1])
    assert finish(start_setup(copy, "01"))[::2] == (0, "")  # what was there still is


def test_setup_that_is_ended_leaves_no_pip(copy):
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        index.settimeout(300)
        address = f"http://127.0.0.1:{index.getsockname()[1]}"
        ended = start_setup(copy, INDEX_URL=address)
        with index.accept()[0]:
            os.killpg(ended.pid, signal.SIGINT)  # as Ctrl-C does
            code, _, stderr = finish(ended)
            assert processes_in(copy) == []
    assert code == 130
    assert stderr.splitlines()[-1] == "setup was interrupted: run the same command again"


def test_who_has_its_packages_waits_for_nobody_and_others_take_turns(copy):
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(300)
        address = f"http://127.0.0.1:{index.getsockname()[1]}"
        killed = start_setup(copy, INDEX_URL=address, FIND_LINKS="", RETRIES=0)
        with index.accept()[0]:
            for process in processes_in(copy / "scripts"):
                process.send_signal(signal.SIGKILL)  # pip goes on, and still has the lock
            killed.wait()
            assert finish(start_setup(copy, "01"))[::2] == (0, "")
            runs = [start_setup(copy, **EMPTY) for _ in range(2)]
            for process in runs:
                assert process.stderr.readline().startswith("waiting for another run")
    ends = [finish(process) for process in runs]
    assert [end[:2] for end in ends] == [(0, f"ready: {copy}/.venv/bin/python\n")] * 2, ends
    assert sorted(end[2] for end in ends) == [
        "",
        INSTALLING.format("scikit-learn, ruff", copy),
    ]
    assert not (copy / ".venv" / "tmp").exists()


def test_a_package_that_pip_has_not_finished_is_installed_again(copy):
    (packages,) = (copy / ".venv").glob("lib/python*/site-packages")
    (packages / "numpy-1.0.dist-info" / "INSTALLER").unlink()
    shutil.rmtree(*packages.glob("pip-*.dist-info"))  # and pip itself was cut off
    shutil.rmtree(packages / "pip")
    assert finish(start_setup(copy, "01", **EMPTY))[2] == INSTALLING.format("numpy", copy)
    assert (packages / "numpy-1.0.dist-info" / "INSTALLER").exists()


# --- The rules of environment.py ---


@pytest.mark.parametrize(
    "what, address, needed",
    [("03", "", "11"), ("03", "https://some.where/whl/cpu", "1.6"), ("all", "", "18")],
)
def test_setup_looks_for_room_on_the_disk_first(monkeypatch, tmp_path, what, address, needed):
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1.4e9))
    monkeypatch.setattr(environment.venv, "create", None)
    monkeypatch.setenv("PIP_INDEX_URL", "")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", address)
    with pytest.raises(SystemExit, match=rf"needs {needed} GB .* 1\.4 GB are free"):
        environment.make(environment.Wanted(what))


def test_every_package_of_the_table_is_pinned():
    pins = lessons.pins()
    needed = {name for lesson in lessons.TABLE for name in lesson.packages + lesson.compares_with}
    assert needed <= set(pins) and set(lessons.packages_for("all")) == set(pins)
    assert set(pins) - set(lessons.packages_for("notebooks")) == set(lessons.FRAMEWORKS)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins.values())


# --- What a lesson needs, and what is given to it ---


@pytest.mark.parametrize(
    "lesson, package, flag, words",
    [
        ("03", "sklearn", "--json", "needs scikit-learn"),
        ("05", "tensorboard", "--json", "needs tensorboard"),
        ("07", "tensorflow", "--json", "tensorflow is broken"),
        ("08", "paddle", "--json", "paddlepaddle is broken"),
    ],
)
def test_a_missing_or_broken_package_costs_one_line(tmp_path, lesson, package, flag, words):
    (tmp_path / f"{package}.py").write_text("raise ImportError('in\\ntwo lines')")
    if words.startswith("needs"):  # None: `import` finds nothing
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None")
    launcher = ["bash", ROOT / "scripts" / f"lesson_{lesson}.sh"]
    options = {"cwd": tmp_path, "env": {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}}
    run = subprocess.run([*launcher, flag], capture_output=True, text=True, **options)
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (2, "", 1), run.stderr
    assert words in run.stderr and "pip install" in run.stderr


FIRST_CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
for number, cell in enumerate(json.loads(sys.argv[1])):
    print(f"cell {number}:")
    assert not shell.run_cell(cell).success
"""


def test_a_notebook_without_its_framework_says_what_to_run(tmp_path):
    missing = "import sys\nsys.modules |= dict.fromkeys(['tensorflow', 'paddle', 'jax'])"
    (tmp_path / "sitecustomize.py").write_text(missing)
    cells = []
    for number in ("07", "08", "15"):
        (path,) = (ROOT / "notebooks").glob(f"lesson_{number}_*.ipynb")
        every = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells.append(next("".join(c["source"]) for c in every if c["cell_type"] == "code"))
    command = [sys.executable, "-c", FIRST_CELLS, json.dumps([*cells, "import no_such_thing"])]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "notebooks")])
    options = {"cwd": tmp_path, "env": {**ENVIRONMENT, "PYTHONPATH": path}}
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    _, *answers, other = re.split(r"cell \d:\n", ended.stdout)
    names = {"07": "tensorflow", "08": "paddle", "15": "jax"}
    for (number, name), said in zip(names.items(), answers, strict=True):
        assert len(said.splitlines()) == 1, said
        ours = f"needs {name}: bash scripts/setup.sh {number}; "
        assert re.search(ours + "|needs .* -m pip install .*" + name, said)
    assert "Traceback" in other and "No module named 'no_such_thing'" in other


def test_a_limit_of_a_job_is_seen_and_files_that_were_read_do_not_count(monkeypatch):
    """The limit may stand in a control group above that of the job."""
    files = {
        "/proc/meminfo": "MemAvailable: 64000000 kB",
        "/proc/self/cgroup": "0::/slurm/job_7/step_0",
        "/sys/fs/cgroup/slurm/job_7/memory.max": "4000000000",
        "/sys/fs/cgroup/slurm/job_7/memory.current": "3900000000",
        "/sys/fs/cgroup/slurm/job_7/memory.stat": "anon 7\ninactive_file 1000000000",
    }
    monkeypatch.setattr(needs, "read", lambda path: files.get(str(path), ""))
    assert needs.free_memory() == 1.1e9


def test_ranks_that_do_not_fit_into_the_memory_are_refused(monkeypatch):
    assert 1e8 < needs.free_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(needs, "free_memory", lambda: 10e9)
    one, four = map(lessons.find, ("01", "04"))
    for flags in ["--nproc", "64"], ["--nproc=64"], ["--nproc=2", "--nproc", "34", "--json"]:
        line = needs.problem(four, flags)
        assert "ranks need about" in line and "10.0 GB are free" in line and "\n" not in line
    assert needs.problem(four, ["--nproc", "33"]) is None
    assert needs.problem(four, ["--nproc", "many"]) is None  # the lesson says what is wrong
    assert needs.problem(four, ["--force", "--nproc=64"]) is None
    assert needs.problem(one, ["--nproc=64"]) is None  # a lesson of one process


def test_the_launcher_asks_before_it_starts_anything(monkeypatch, capsys):
    monkeypatch.setattr(needs, "free_memory", lambda: 1e9)
    monkeypatch.setattr(run, "start", lambda how, script, flags, environment: flags)
    assert run.main(["04", "--nproc=64"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert run.main(["04", "--nproc=64", "--force"]) == ["--nproc=64", "--force"]


@pytest.mark.needs("tensorflow")
def test_a_file_name_that_is_too_long_is_shortened():
    ended = run_lesson(7, "--data-dir=" + 5000 * "9")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "--data-dir" in ended.stderr and len(ended.stderr) < 400
