"""What can this machine do, and do ranks meet on it? Under torchrun: do the machines meet?

    bash scripts/doctor.sh [--nproc RANKS] [--json]             this machine
    torchrun --nnodes=2 ... scripts/lockstep doctor [--json]    on each machine: the way between

Each line begins with one of these words:

    ok         nothing to do
    limited    the course runs; the line says what does not
    not ok     the line says what to do
    unknown    cannot be said here; the line says why

Exit code: 0 if no line says "not ok", 1 if one does, 2 after a bad flag.

No fixed port is used. On one machine nothing listens beyond 127.0.0.1; under torchrun each rank
listens, while the doctor runs, at the address that gloo would use, and tells a random word.
"""

# Only the standard library is used above the ranks, and no syntax that is younger than Python 3.8:
# this file has to run where Python is too old, and where torch is missing or broken.

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from lockstep.lessons import ROOT

SETUP = "bash scripts/setup.sh"
OTHER_FRAMEWORKS = ("tensorflow", "paddlepaddle")  # only lessons 07 and 08 need them
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets
METHODS = {"env": "env://", "tcp": "tcp://", "store": "a TCPStore handed over", "file": "file://"}

ASK_TORCH = """
import json, torch, torch.distributed as dist
names = ("gloo", "nccl", "mpi", "ucc")
there = [n for n in names if dist.is_available() and getattr(dist, f"is_{n}_available")()]
count = torch.cuda.device_count()
gpus = [torch.cuda.get_device_properties(n) for n in range(count)]
gpus = [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus]
print(json.dumps([torch.__version__, there, gpus, torch.version.cuda]))
"""


def row(check, state, text, remedy=None):
    """Return one line of the report. `state`: ok, limited, not ok or unknown."""
    return {"check": check, "state": state, "text": text, "remedy": remedy}


def show(each):
    """Print one line of the report."""
    cure = " -> " + each["remedy"] if each["remedy"] else ""
    print("{:<8} {}: {}{}".format(each["state"], each["check"], each["text"], cure), flush=True)


# --- The machine ---


def look_at_python():
    version = ".".join(map(str, sys.version_info[:3]))
    here = f"{version}, {sys.executable}"
    if (3, 11) <= sys.version_info < (3, 14):
        return row("Python", "ok", here)
    cure = "install Python 3.11, 3.12 or 3.13, then " + SETUP
    return row("Python", "not ok", here, cure)


def look_at_versions():
    """Compare what is installed with requirements.txt."""
    state = ROOT / ".venv.state"
    if state.exists() and state.read_text() == "installing":
        cure = "wait if it runs now; else " + SETUP + " begins it anew"
        return row("versions", "not ok", "an installation into .venv was cut off", cure)
    from importlib import metadata

    lacking = []
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    for name, wanted in pins:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        if found.split("+")[0] != wanted:  # "2.13.0+cpu" is a build of 2.13.0
            lacking.append((name, f"{name} {found}, tested with {wanted}"))
    if not lacking:
        return row("versions", "ok", f"{len(pins)} packages as in requirements.txt")
    text = "; ".join(text for _, text in lacking)
    if all(name in OTHER_FRAMEWORKS for name, _ in lacking):
        return row("versions", "limited", text, "lessons 07 and 08 need it: " + SETUP)
    own = os.environ.get("LOCKSTEP_PYTHON")
    cure = sys.executable + " -m pip install -r requirements.txt" if own else SETUP
    return row("versions", "not ok", text, cure)


def look_at_torch():
    """Ask torch in a process of its own: a broken one may crash. Return rows."""
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        run = subprocess.run(command, capture_output=True, timeout=120, text=True)
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    except subprocess.TimeoutExpired:
        run, lines = None, ["import torch took longer than 120 s"]
    if run is None or run.returncode != 0:
        cure = SETUP
        if os.environ.get("LOCKSTEP_PYTHON"):
            cure = sys.executable + " -m pip install --force-reinstall torch"
        elif (ROOT / ".venv").exists():
            cure = "remove .venv and .venv.state, then " + SETUP
        return [row("torch", "not ok", lines[-1][:200], cure)]
    version, backends, gpus, cuda = json.loads(run.stdout.splitlines()[-1])
    rows = [row("torch", "ok", version)]
    cure = None if "gloo" in backends else "install the torch of requirements.txt: " + SETUP
    state = "ok" if "gloo" in backends else "not ok"
    rows.append(row("backends", state, ", ".join(backends) or "none", cure))
    return [*rows, look_at_gpus(gpus, cuda)]


def look_at_gpus(gpus, cuda):
    if gpus:
        cure = f"bash scripts/lesson_02.sh --nproc {len(gpus)} does"
        text = "{}; this does not try nccl".format("; ".join(gpus))
        return row("GPUs", "ok", text, cure)
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return row("GPUs", "ok", "none; ranks compute on the CPU, over gloo")
    if cuda is None:
        cure = "install the CUDA build (README.md, A smaller download, says which one comes)"
        return row("GPUs", "limited", "there are some, but this torch is a CPU build", cure)
    cure = "look at nvidia-smi, the driver's version, and CUDA_VISIBLE_DEVICES"
    return row("GPUs", "limited", "there are some, but torch sees none", cure)


def look_at_cores():
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    load = os.getloadavg()[0]
    text = f"{cores}, load {load:.1f}"
    if load > cores + 1:
        cure = "times will be too long; look with top who computes"
        return row("cores", "limited", text, cure)
    return row("cores", "ok", text)


def read(path):
    """Return the text of a file, or "" if there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def look_at_memory(nproc):
    from lockstep import needs

    free = needs.free_memory()
    limit, used = (read("/sys/fs/cgroup/memory." + name) for name in ("max", "current"))
    if limit.strip().isdigit() and used.strip().isdigit():  # a container's
        free = min(free, max(0, int(limit) - int(used)))
    needed = nproc * needs.GB_PER_RANK
    text = f"{free / 1e9:.1f} GB free, {nproc} ranks take about {needed:.1f}"
    if free / 1e9 < needed:
        return row("memory", "not ok", text, "end what takes it, or take a smaller --nproc")
    return row("memory", "ok", text)


def look_at_shared_memory(folder="/dev/shm"):
    if not Path(folder).is_dir():
        return row("shared memory", "unknown", "this system has no " + folder)
    status = os.statvfs(folder)
    size, free = (blocks * status.f_frsize / 1e9 for blocks in (status.f_blocks, status.f_bavail))
    text = f"{folder} has {size:.2g} GB, {free:.2g} free"
    if free < 0.5:
        cure = "for --workers, and nccl, more is needed: docker run --shm-size=1g, or see"
        cure += " scripts/cluster/lesson.yaml; else remove old files there"
        return row("shared memory", "limited", text, cure)
    return row("shared memory", "ok", text)


def look_at_host_name():
    """gloo gives its address to the other ranks, and torchrun looks it up."""
    from lockstep import network as net

    name, begin = socket.gethostname(), time.monotonic()
    addresses = net.addresses_of(name)
    seconds = time.monotonic() - begin
    here = "{} is {}".format(name, ", ".join(addresses) or "no address")
    interface = (net.outward() or ["the interface that joins them"])[0]
    cure = "on several machines, on this one: export GLOO_SOCKET_IFNAME=" + interface
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        chosen = "; GLOO_SOCKET_IFNAME={GLOO_SOCKET_IFNAME} counts".format(**os.environ)
        return row("host name", "ok", here + chosen)
    if seconds > 1:
        text = f"{here}, which took {seconds:.0f} s to find out"
        return row("host name", "limited", text, "put it into /etc/hosts; " + cure)
    if not addresses or any(net.is_loopback(address) for address in addresses[:1]):
        text = here + ", where other machines do not find it"
        return row("host name", "limited", text, cure)
    return row("host name", "ok", here)


def look_at_interfaces():
    from lockstep import network as net

    found = net.interfaces()
    text = ", ".join("{} {}".format(name, address or "-") for name, address in found.items())
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        for name in filter(None, wanted.split(",")):
            if not found.get(name):
                cure = "set it to one of these, or unset it"
                return row("interfaces", "not ok", f"{variable}={name}; {text}", cure)
    if not found:
        return row("interfaces", "unknown", "the system names none")
    return row("interfaces", "ok", text)


def look_at(check, look, *arguments):
    """Return the rows of one check, also where it fails itself: then it can't be said."""
    try:
        found = look(*arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [row(check, "unknown", text, "look at it by hand")]
    return found if isinstance(found, list) else [found]


def look_at_machine(nproc):
    """Yield the rows of all that does not need several ranks."""
    yield from look_at("Python", look_at_python)
    yield from look_at("versions", look_at_versions)
    yield from look_at("torch", look_at_torch)
    yield from look_at("cores", look_at_cores)
    yield from look_at("memory", look_at_memory, nproc)
    yield from look_at("shared memory", look_at_shared_memory)
    yield from look_at("host name", look_at_host_name)
    yield from look_at("interfaces", look_at_interfaces)


# --- The ranks of one machine ---


def start_ranks(nproc, timeout, folder):
    """Start the ranks; return the processes. Rank 0 gets sockets that listen on 127.0.0.1."""
    from lockstep import network

    environment = dict(os.environ, OMP_NUM_THREADS="1")
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        environment.pop(name, None)
    name = network.loopback()
    if name:
        environment["GLOO_SOCKET_IFNAME"] = name
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = ",".join(str(listener.getsockname()[1]) for listener in listeners)
    processes = []
    for rank in range(nproc):
        given = [listener.fileno() for listener in listeners] if rank == 0 else []
        script = str(Path(__file__).with_name("ranks.py"))
        command = [sys.executable, script, str(rank), str(nproc), str(timeout), folder, ports]
        processes.append(
            subprocess.Popen(
                [*command, ",".join(map(str, given))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                pass_fds=given,
                start_new_session=True,
            )
        )
    for listener in listeners:
        listener.close()  # rank 0 has them
    return processes


def look_at_ranks(nproc, timeout):
    """Yield the rows of what ranks on this machine can do together."""
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes += start_ranks(nproc, timeout, folder)
            try:
                output, errors = processes[0].communicate(timeout=60 + 12 * timeout)
                found = json.loads(output.splitlines()[-1]) if output else None
            except subprocess.TimeoutExpired:
                found, errors = None, f"they did not end within {60 + 12 * timeout} s"
        finally:
            for process in processes:
                process.kill()
            others = [process.communicate()[1] for process in processes[1:]]
    if found is None:
        lines = [text.strip().splitlines()[-1][:200] for text in [errors, *others] if text.strip()]
        cure = "look at memory and load above, then run it again"
        yield row("ranks", "not ok", "; ".join(lines[:2]) or "killed by the system", cure)
        return
    for method, result in found["methods"].items():
        check = "meeting by " + METHODS[method]
        if isinstance(result, str):
            cure = "look for a firewall on this machine; what works above can be used instead"
            yield row(check, "not ok", result, cure)
        else:
            yield row(check, "ok", f"{nproc} ranks, {result:.2f} s")
    yield from rows_of_pairs(found)


def rows_of_pairs(found):
    """Yield a row for each pair that doctor_ranks.network has tried."""
    if found["group"]:
        cure = "look at the first line that is not ok"
        yield row("group over gloo", "not ok", found["group"], cure)
    for pair in found["pairs"]:
        a, b = pair["ranks"]
        names = f"rank {a} - rank {b}"
        if pair["machines"][0] != pair["machines"][1]:
            names = "rank {} on {} - rank {} on {}".format(
                a, pair["machines"][0], b, pair["machines"][1]
            )
        each = row(names, pair["state"], pair["text"], pair.get("remedy"))
        yield dict(each, **{key: pair[key] for key in pair if key not in each})


# --- Under torchrun: several machines ---


def wait_for_store(address, port, timeout):
    """Return whether somebody listens there within `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), 2).close()
            return True
        except OSError:
            if time.monotonic() > end:
                return False
        time.sleep(0.2)


def describe(seen):
    """Return what differs between machines, from the facts of their ranks: [(name, text)]."""
    texts = []
    for name in ("python", "torch", "files"):
        values = {}
        for one in seen:
            values.setdefault(one[name], []).append(one["machine"])
        if len(values) > 1:
            each = ("{} on {}".format(v, ", ".join(sorted(set(on)))) for v, on in values.items())
            texts.append((name, "; ".join(each)))
    return texts


def who_am_i():
    """Return the name of this rank's machine, and its number."""
    nodes = os.environ.get("LOCKSTEP_NODES", "").split(",")  # set by scripts/node.py
    node = int(os.environ.get("GROUP_RANK", "0"))
    name = nodes[node] if node < len(nodes) and nodes[node] else socket.gethostname()
    return {"machine": name, "node": node}


def my_facts(world_size):
    """Return what the other machines are to know of this one."""
    import hashlib

    import torch

    code = hashlib.sha256()
    for path in sorted((ROOT / "lessons").glob("*.py")):
        code.update(path.read_bytes())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    found = []
    if local == 0:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        for look in (look_at_python, look_at_versions, look_at_cores, look_at_shared_memory):
            found += look_at(look.__name__, look)
        found += look_at("memory", look_at_memory, here) + look_at("interfaces", look_at_interfaces)
    return {
        "local_rank": local,
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.split("+")[0],
        "files": code.hexdigest()[:8],
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "found": [each for each in found if each["state"] != "ok"],
    }


def missing_row(here, why, world_size):
    """Return the row that says who has not come. `here`: {rank: its facts}."""
    missing = [str(rank) for rank in range(world_size) if rank not in here]
    places = {}
    for rank, facts in sorted(here.items()):
        places.setdefault(facts["machine"], []).append(str(rank))
    came = ", ".join("{} on {}".format(" ".join(v), k) for k, v in places.items())
    text = "rank {} of {} {}; here: {}".format(", ".join(missing), world_size, why, came)
    cure = "start it with the same command, and look at what its own machine says"
    return row("ranks", "not ok", text, cure)


def look_at_machines(rank, world_size, timeout):
    """Return the rows of the way between machines; the same on each rank."""
    import torch.distributed as dist

    from lockstep.doctor import ranks as doctor_ranks

    options = {"wait_for_workers": False, "multi_tenant": True}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not agent
    if not listens and not wait_for_store(address, port, timeout):
        here = socket.gethostname()
        text = f"rank {rank} on {here} finds nobody at {address}, port {port}, in {timeout} s"
        cure = "start rank 0 there; check MASTER_ADDR, MASTER_PORT and the firewall"
        return [row("store", "not ok", text, cure)], not agent or os.environ["LOCAL_RANK"] == "0"
    limit = doctor_ranks.timedelta(seconds=2 * timeout)
    store = dist.TCPStore(address, port, world_size, listens, limit, **options)
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    try:
        found = doctor_ranks.network(store, rank, world_size, timeout, who_am_i(), my_facts)
        rows = rows_of_machines(found)
    except doctor_ranks.Missing as error:
        rows = [missing_row(*error.args, world_size)]
        return rows, store.add("speaker", 1) == 1
    finally:
        leave(store, rank, world_size)
    return rows, rank == 0


def leave(store, rank, world_size):
    """Rank 0, which may hold the store, leaves last."""
    try:
        store.add("left", 1)
        end = time.monotonic() + 5
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError:
        pass  # the store has gone, and everybody with it


def rows_of_machines(found):
    """Return the rows of a report on several machines."""
    rows, seen = [], found["ranks"]
    for one in seen:
        if one["local_rank"] == 0:
            count = len([other for other in seen if other["node"] == one["node"]])
            here = (count, one["cores"], one["gpus"], one["address"][0])
            text = "{} ranks, {} cores, {} GPUs, gloo at {}".format(*here)
            rows.append(row("machine " + one["machine"], "ok", text))
            for each in one["found"]:
                rows.append(dict(each, check=each["check"] + " of " + one["machine"]))
    different = describe(seen)
    for name, text in different:
        cure = "the same on all machines: " + ("git pull" if name == "files" else SETUP)
        rows.append(row(name, "not ok", text, cure))
    if not different:
        text = "Python {python}, torch {torch}, lessons {files} on all".format(**seen[0])
        rows.append(row("versions", "ok", text))
    return rows + list(rows_of_pairs(found))


# --- The report ---


def conclude(rows, as_json):
    """Print what is to be done, or all rows as JSON; return the exit code."""
    wrong = [each["check"] for each in rows if each["state"] == "not ok"]
    if as_json:
        print(json.dumps({"ok": not wrong, "checks": rows}))
    elif wrong:
        print("not ok   {} to mend: {}".format(len(wrong), "; ".join(wrong)))
    else:
        print("ok       all that is needed is here")
    return 1 if wrong else 0


def read_flags(arguments):
    parser = argparse.ArgumentParser("doctor.sh", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    prefix = f"{parser.prog}: error: "
    speaks = os.environ.get("RANK", "0") == "0"
    parser.error = lambda text: parser.exit(2, (prefix + text[:300] + "\n") * speaks)
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine; default: 2")
    parser.add_argument(
        "--timeout", type=int, default=30, help="seconds to wait for a rank; default: 30"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--check", action="store_true", help="check the flags, start nothing")
    flags = parser.parse_args(arguments)
    for name, low, high in (("nproc", 1, 64), ("timeout", 1, 3600)):
        if not low <= getattr(flags, name) <= high:
            parser.error(f"argument --{name}: must be from {low} to {high}")
    return flags


def one_machine(flags):
    """Examine this machine; return the exit code."""
    rows = []

    def tell(found):
        for each in found:
            rows.append(each)
            if not flags.json:
                show(each)

    tell(look_at_machine(flags.nproc))
    broken = [each["check"] for each in rows if each["state"] == "not ok"]
    if {"torch", "backends", "memory"} & set(broken):
        why = "not tried, because of " + " and ".join(broken)
        tell([row("ranks", "unknown", why, "mend that, then run it again")])
    else:
        try:
            tell(look_at_ranks(flags.nproc, flags.timeout))
        except OSError as error:
            tell([row("ranks", "not ok", str(error), "look at the lines above, and run it again")])
    return conclude(rows, flags.json)


def several_machines(flags):
    """Be one rank of torchrun; return the exit code, the same on all."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        rows, speaks = look_at_machines(rank, world_size, flags.timeout)
    except Exception as error:
        text = f"rank {rank} on {socket.gethostname()}: {error}".splitlines()[0][:300]
        cure = "on that machine: bash scripts/doctor.sh, without torchrun, says more"
        rows, speaks = [row("ranks", "not ok", text, cure)], True
    if not speaks:
        return 1 if any(each["state"] == "not ok" for each in rows) else 0
    if not flags.json and len(rows) > 1:
        for each in rows:
            show(each)
    elif not flags.json:
        show(rows[0])
        return 1
    return conclude(rows, flags.json)


def main(arguments):
    """Examine this machine, or be one rank of several machines; return the exit code."""
    flags = read_flags(arguments)
    if flags.check:  # in the launcher's own process, which goes on: change nothing there
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    code = examine(flags)
    sys.stdout.flush()
    if "RANK" in os.environ:  # a group that has failed may keep threads that never end
        watch = threading.Timer(10, os._exit, [code])
        watch.daemon = True
        watch.start()
    return code


def examine(flags):
    """Examine this machine, or the way between several; return the exit code."""
    if set(OF_A_RANK) <= set(os.environ):
        return several_machines(flags)
    return one_machine(flags)


def interrupt(number, frame):
    """Leave through each `finally`, once."""
    signal.signal(number, signal.SIG_IGN)
    print("interrupted: all that was started has ended", file=sys.stderr)
    sys.exit(128 + number)
