"""What all tests and notebooks need: how nbval compares, starting lessons, the record of claims."""

import contextlib
import fcntl
import functools
import gc
import importlib.util
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
from jupyter_client.connect import LocalPortCache
from lockstep import ending, lessons, network
from nbtools import free_ports, run
from nbtools.launch import file_of_run

ROOT = Path(__file__).resolve().parent
# Threads that wait for each other sleep: at full speed, as OpenMP likes it, a step of two threads
# takes six times as long on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ENVIRONMENT = {**os.environ, "LOCKSTEP_PYTHON": sys.executable}
# XLA compiles three times as fast with the first, and with both as fast as with the first alone on
# one device; what it computes is the same.
QUICK_JAX = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
QUICK_JAX["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
GPUS_ARE_HERE = any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd"))

gc.disable()  # until all tests are imported: nothing that they import is garbage

# A shell starts a background job with SIGINT ignored. What the tests start would inherit that, and
# would never hear the interrupt that they send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A notebook's kernel listens at five ports a second after Jupyter has chosen them. So it chooses
# among ports that no other program is given meanwhile.
LocalPortCache.find_available_port = lambda self, ip: free_ports(1)[0]

# A framework's name for `import`, and for pip. Without it, what needs it is skipped.
FRAMEWORKS = {lessons.IMPORT_NAMES.get(name, name): name for name in lessons.FRAMEWORKS}
MISSING = {name: pip for name, pip in FRAMEWORKS.items() if importlib.util.find_spec(name) is None}

OUTCOMES = {}  # claim id -> outcomes of the tests that carry it, in this run
UNPROVEN = []


# --- Starting a lesson as a reader does ---


class Finished(subprocess.CompletedProcess):
    """A launcher that has ended. `open_ports`: where others could have reached it."""

    open_ports = ()

    @property
    def json(self):
        """Return the last line of stdout as a dict."""
        return json.loads(self.stdout.splitlines()[-1])


def start_lesson(number, *flags, **options):
    """Start scripts/lesson_NN.sh in a session of its own; return the running process."""
    return start_program("bash", ROOT / "scripts" / f"lesson_{number:02}.sh", *flags, **options)


def start_program(*command, cwd=ROOT, env=ENVIRONMENT, **options):
    """Start a program in a session of its own; return the running process."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def run_lesson(number, *flags, **options):
    """Run scripts/lesson_NN.sh to its end; return its exit code, stdout and stderr."""
    return finish(start_lesson(number, *flags, **options))


def finish(process):
    """Wait for a launcher, at most 20 minutes; return its exit code, stdout and stderr."""
    try:
        stdout, stderr = process.communicate(timeout=1200)
    finally:
        process.terminate()  # its ranks end with it
    return Finished(process.args, process.returncode, stdout, stderr)


def watch_ports(launcher, found):
    """Add to `found` each address beyond this machine at which a process of a lesson listens."""
    while launcher.poll() is None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                for connection in process.net_connections("inet"):
                    address = connection.laddr.ip if connection.status == "LISTEN" else "127.0.0.1"
                    if not ipaddress.ip_address(address).is_loopback:
                        found.add(f"{address} by {' '.join(process.cmdline())}")
        time.sleep(0.5)  # a look takes 20 ms of a processor


def run_once(number, *flags):
    """Return what `lesson_NN.sh --json` with these flags does on CPUs.

    It is run once for all who ask in this session of pytest: tests, also those in other processes
    of pytest-xdist, and, if it succeeds, the notebooks' launch(). Who asks first runs it.
    """
    words = [str(flag) for flag in flags]
    with open(file_of_run(os.environ["LOCKSTEP_RUNS"], number, words), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = file.read()
        if not known:
            with tempfile.TemporaryDirectory(prefix="a folder with a space ") as folder:
                run = run_and_watch(number, words, Path(folder))
            honest = run.returncode == 0 and not GPUS_ARE_HERE  # a notebook would use them
            known = json.dumps({**vars(run), "for_notebooks_of": str(ROOT) if honest else None})
            file.write(known)
    facts = json.loads(known)
    run = Finished(*(facts[name] for name in ("args", "returncode", "stdout", "stderr")))
    run.open_ports = facts["open_ports"]
    return run


@pytest.fixture(scope="session")
def lesson_run():
    """Return run_once: lesson_run(3, "--steps", 5) is `lesson_03.sh --json --steps 5`."""
    return run_once


def pytest_runtest_setup(item):
    """Run the lesson that a notebook's cell is about to launch, where tests will find the run."""
    if item.path.suffix == ".ipynb" and not GPUS_ARE_HERE:
        launched = re.search(r"\blaunch\((\d+)(, nproc=2)?\)", item.cell.source)
        if launched:
            run_once(int(launched[1]))


def run_and_watch(number, words, folder):
    """Run a lesson in an empty folder without GPUs; return what finish() does, and `open_ports`."""
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    launcher = start_lesson(number, "--json", *words, cwd=folder, env=environment)
    open_ports = set()
    watcher = threading.Thread(target=watch_ports, args=(launcher, open_ports))
    watcher.start()
    run = finish(launcher)
    watcher.join()
    run.open_ports = sorted(open_ports)
    assert list(folder.iterdir()) == [], "the lesson left files in this folder"
    return run


@pytest.fixture(scope="session")
def default_run(lesson_run):
    """Return a function: default_run(3) is lesson_run(3), without flags."""
    return lesson_run


def run_warm(script, nproc, *flags, unset=()):
    """Run a script in ranks as torchrun starts them; return [(exit code, stdout)], by rank.

    A rank is a fork of a process that has imported torch, and is ready in 0.1 s instead of 3. What
    the script would spawn is a fork, too. The variables in `unset` are those that it does not get.
    """
    import torch.distributed as dist

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a rank does not import pytest
    listener = network.listen_at("127.0.0.1", 0)  # as under torchrun: the launcher has the store
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore("127.0.0.1", port, is_master=True, **options)
    words = [str(flag) for flag in flags]
    values = run(be_a_rank, nproc, str(script), words, store.port, unset, deadline=1500)
    del store  # not before
    return values


def be_a_rank(rank, world_size, script, words, port, unset):
    """Be one rank of a script; return (exit code, stdout)."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    dist.destroy_process_group()  # the one that run() has joined: the script joins its own
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": world_size}
    if "MASTER_PORT" not in unset:
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    for name in unset:
        del os.environ[name]
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    sys.argv = [script, *words]
    code = None
    with tempfile.TemporaryFile("w+") as stdout:
        os.dup2(stdout.fileno(), 1)  # for the forks as well
        try:
            ending.run_script(script)
        except SystemExit as stop:
            code = stop.code
        stdout.seek(0)
        return code or 0, stdout.read()


@pytest.fixture(autouse=True)
def same_environment():
    """Give the next test the environment that this one has found: a lesson may set a variable."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# --- Options, and what is skipped ---


def pytest_addoption(parser):
    parser.addoption("--claim", metavar="ID", help="run the tests of one claim, for example A5")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist share this folder
        runs = tempfile.TemporaryDirectory(prefix="lockstep_runs_")
        config.add_cleanup(runs.cleanup)
        os.environ["LOCKSTEP_RUNS"] = runs.name  # nbtools.launch looks there
    if hasattr(config.option, "nbval_sanitize_with"):  # absolute: pytest may start anywhere
        config.option.nbval_sanitize_with = str(ROOT / "notebooks/nbtools/nbval_sanitize.cfg")
    claim = config.option.claim
    if claim is not None and claim not in read_claims():
        raise pytest.UsageError(f"--claim {claim}: CLAIMS.md has no such claim")


def pytest_collection_modifyitems(config, items):
    """Choose what runs, and what is skipped."""
    wanted = config.option.claim
    chosen = [item for item in items if wanted is None or wanted in claims_of(item)]
    if wanted is not None:
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    for item in items:
        number = getattr(getattr(item, "callspec", None), "params", {}).get("lesson")
        item.user_properties.append(("claims", claims_of(item)))
        skip_what_is_not_here(item, number)


def pytest_collection_finish():
    """Look for garbage again, but not in what has been imported."""
    gc.enable()
    gc.freeze()


def skip_what_is_not_here(item, number):
    """Skip what needs a GPU, or a framework, where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    if item.path.suffix == ".ipynb":
        number = item.path.name[len("lesson_") :][:2]
    lesson = lessons.find(str(number))
    packages = lesson.packages + lesson.compares_with if lesson else ()
    for name in needed + [lessons.IMPORT_NAMES.get(package, package) for package in packages]:
        if name in MISSING:
            item.add_marker(pytest.mark.skip(reason=f"{MISSING[name]} is not installed"))


# --- Claims ---


def read_claims():
    """Return {claim id: verdict} from the table of CLAIMS.md."""
    verdicts = {}
    for line in (ROOT / "CLAIMS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 4 and re.fullmatch(r"[A-E]\d+", cells[0]):
            assert cells[0] not in verdicts, f"two rows for {cells[0]}"
            verdicts[cells[0]] = cells[2]
    return verdicts


def claims_of(item):
    """Return the claim ids that a test carries: @pytest.mark.claim("A5")."""
    return [claim for mark in item.iter_markers("claim") for claim in mark.args]


def unproven(verdicts, outcomes):
    """Return a line for each claim whose tests ran and did not prove it.

    A skipped test proves nothing: the verdict must say that it needs a GPU. Claims of which no test
    was selected can't be judged; nor can those whose framework is not installed.
    """
    lines = []
    for claim, seen in outcomes.items():
        seen = set(seen) - {"not installed"}
        verdict = verdicts.get(claim, "")
        excused = {"skipped"} if "GPU" in verdict else set()
        missing = not seen & {"passed"} and not (seen <= excused)
        if missing or seen - {"passed"} - excused:
            lines.append(f"{claim} is not proven: its tests {', '.join(sorted(seen))}")
    return lines


def pytest_runtest_logreport(report):
    """Remember how the tests of each claim ended; a skip counts as a skip, not as a pass."""
    if report.when == "call" or report.outcome != "passed":
        absent = re.search("is not installed|needs root", str(report.longrepr))
        not_installed = report.skipped and absent
        outcome = "not installed" if not_installed else report.outcome
        for claim in dict(report.user_properties).get("claims", []):
            OUTCOMES.setdefault(claim, []).append(outcome)


def pytest_sessionfinish(session):
    """Fail the run if it left a claim unproven."""
    if hasattr(session.config, "workerinput"):
        return  # one of several processes of pytest-xdist: the one that started them judges
    wanted = session.config.option.claim
    UNPROVEN.extend(unproven(read_claims(), OUTCOMES))
    if wanted and "passed" not in OUTCOMES.get(wanted, []):
        UNPROVEN.append(f"{wanted}: no test of it has passed")
    if UNPROVEN and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Say what became of the claims, and which frameworks were missing."""
    wanted = config.option.claim
    if wanted:
        seen = OUTCOMES.get(wanted, [])
        counts = ", ".join(f"{seen.count(outcome)} {outcome}" for outcome in sorted(set(seen)))
        terminalreporter.section(f"claim {wanted}")
        terminalreporter.line(f"verdict: {read_claims()[wanted]}")
        terminalreporter.line(f"its tests: {counts or 'none'}")
    if UNPROVEN:
        terminalreporter.section("claims of CLAIMS.md that were not proven", red=True)
        for line in UNPROVEN:
            terminalreporter.line(line)
    if any("not installed" in outcomes for outcomes in OUTCOMES.values()):
        names = " and ".join(MISSING.values())
        terminalreporter.line(f"skipped what needs {names}: not installed here")
