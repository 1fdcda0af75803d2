"""What this machine has: a row for each thing that a job needs, without starting a rank."""

import json
import os
import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from lockstep import lessons, needs, network
from lockstep.doctor.report import Row

ASK_TORCH = """
import json, torch, torch.distributed as dist
names = ("gloo", "nccl", "mpi", "ucc")
there = [n for n in names if dist.is_available() and getattr(dist, f"is_{n}_available")()]
count = torch.cuda.device_count()
gpus = [torch.cuda.get_device_properties(n) for n in range(count)]
gpus = [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus]
print(json.dumps([torch.__version__, there, gpus, torch.version.cuda]))
"""


def look_at_machine(nproc):
    """Yield the rows of all that does not need several ranks, for so many of them."""
    for look in (look_at_python, look_at_versions, look_at_torch):
        yield from look_at(look)
    for look in (look_at_cores, look_at_memory, look_at_open_files):
        yield from look_at(look, nproc)
    for look in (look_at_shared_memory, look_at_host_name, look_at_interfaces):
        yield from look_at(look)


def look_at(look, *arguments):
    """Return the rows of one check, also where it fails itself: then it can't be said."""
    try:
        found = look(*arguments)
    except Exception as error:
        check = look.__name__.replace("look_at_", "").replace("_", " ")
        why = f"{type(error).__name__}: {first_line(error)}"
        return [Row(check, "unknown", why, "look at it by hand")]
    return [found] if isinstance(found, Row) else found


def first_line(error):
    """Return the first line of an error's message, at most 200 letters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


# --- What is installed ---


def look_at_python():
    """Say which Python runs this; the course was tested with three."""
    here = "{}.{}.{}, ".format(*sys.version_info[:3]) + sys.executable
    if (3, 11) <= sys.version_info < (3, 14):
        return Row("Python", "ok", here)
    cure = "install Python 3.11, 3.12 or 3.13, then " + install(lessons.TORCH)
    return Row("Python", "not ok", here, cure)


def install(names):
    """Return the command that installs these packages for the Python that runs this."""
    if os.environ.get("LOCKSTEP_PYTHON"):  # setup.sh leaves that one as it is
        pins = lessons.pins()
        return f"{sys.executable} -m pip install {' '.join(pins[name] for name in names)}"
    return "bash scripts/setup.sh" + " 02" * (set(names) <= set(lessons.TORCH))


def look_at_versions():
    """Compare what is installed with requirements.txt.

    A package that is absent is no fault, but for torch and numpy: each launcher installs what its
    lesson needs, or, with LOCKSTEP_PYTHON, says what it lacks.
    """
    wrong, absent = {}, []
    for name, pin in lessons.pins().items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if f"{name}=={found.split('+')[0]}" != pin:  # "2.13.0+cpu" is a build of 2.13.0
            wrong[name] = f"{name} {found}, tested with {pin}"
    wrong.update({name: f"there is no {name}" for name in lessons.TORCH if name in absent})
    if wrong:
        return Row("versions", "not ok", "; ".join(wrong.values()), install(wrong))
    text = f"{len(lessons.pins()) - len(absent)} packages as in requirements.txt"
    if absent:
        text += f"; not installed: {', '.join(absent)}; a launcher says what its lesson needs"
    return Row("versions", "ok", text)


def look_at_torch():
    """Ask torch in a process of its own: a broken one may crash. Return rows."""
    command = [sys.executable, "-c", ASK_TORCH]
    run = subprocess.run(command, capture_output=True, timeout=600, text=True)
    if run.returncode != 0:
        why = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1][:200]
        cure = install(["torch"])
        if "No module named 'torch'" not in why:
            given = os.environ.get("LOCKSTEP_PYTHON")
            cure = f"{cure} --force-reinstall" if given else f"remove .venv, then {cure}"
        return [Row("torch", "not ok", why, cure)]
    version, backends, gpus, cuda = json.loads(run.stdout.splitlines()[-1])
    there = Row("backends", "ok", ", ".join(backends) or "none")
    if "gloo" not in backends:
        there = there._replace(state="not ok", remedy=install(["torch"]))
    return [Row("torch", "ok", version), there, look_at_gpus(gpus, cuda)]


def look_at_gpus(gpus, cuda):
    """Say which GPUs torch sees, and why none. `cuda`: the version it was built for, or None."""
    if gpus:
        cure = f"bash scripts/lesson_02.sh --nproc {len(gpus)} does"
        return Row("GPUs", "ok", f"{'; '.join(gpus)}; this does not try nccl", cure)
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Row("GPUs", "ok", "none; ranks compute on the CPU, over gloo")
    if cuda is None:
        cure = "install the CUDA build (docs/install.md says which one comes)"
        return Row("GPUs", "limited", "there are some, but this torch is a CPU build", cure)
    cure = "look at nvidia-smi, the driver's version, and CUDA_VISIBLE_DEVICES"
    return Row("GPUs", "limited", "there are some, but torch sees none", cure)


# --- What it has for processes ---


def count_cores():
    """Return how many cores this process may use; a job may have less than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def look_at_cores(nproc):
    """Say whether each rank has a core."""
    cores = count_cores()
    if nproc <= cores:
        return Row("cores", "ok", str(cores))
    cure = "times will be too long; in a Slurm job ask for more with --cpus-per-task"
    return Row("cores", "limited", f"{cores}, for {nproc} ranks", cure)


def look_at_memory(nproc):
    """Say whether the ranks fit into the memory."""
    free, needed = needs.free_memory() / 1e9, nproc * needs.GB_PER_RANK
    text = f"{free:.1f} GB free, {nproc} ranks take about {needed:.1f}"
    if free < needed:
        return Row("memory", "not ok", text, "end what takes it, or take a smaller --nproc")
    return Row("memory", "ok", text)


def look_at_open_files(nproc):
    """Say whether a rank may open as many files as it needs: sockets and pipes count.

    Measured over gloo: 11, one for each rank, and 7 for each worker of a DataLoader. A batch of a
    worker is an open file as well, as long as it is kept.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Row("open files", "ok", "no limit (ulimit -n)")
    needed, workers = 11 + nproc + 8 * 7, "with 8 workers of a DataLoader"
    text = f"at most {soft} for a process (ulimit -n), a rank takes about {needed} {workers}"
    if soft >= max(1024, 4 * needed):
        return Row("open files", "ok", text)
    can_be_more = hard == resource.RLIM_INFINITY or hard >= 4096
    more = "ulimit -n 4096" if can_be_more else "a higher hard limit (limits.conf)"
    return Row("open files", "limited", text, f"for workers whose batches are kept: {more}")


def look_at_shared_memory(folder="/dev/shm"):
    """Say whether there is enough for nccl and for a DataLoader's workers."""
    if not Path(folder).is_dir():  # as on a Mac, which needs none
        return []
    status = os.statvfs(folder)
    size, free = (blocks * status.f_frsize / 1e9 for blocks in (status.f_blocks, status.f_bavail))
    text = f"{folder} has {size:.2g} GB, {free:.2g} free"
    if free < 0.5:
        cure = "for --workers, and nccl, more is needed: docker run --shm-size=1g, or see"
        cure += " scripts/cluster/lesson.yaml; else remove old files there"
        return Row("shared memory", "limited", text, cure)
    return Row("shared memory", "ok", text)


# --- Where others find it ---


def look_at_host_name():
    """gloo gives its address to the other ranks, and torchrun looks it up."""
    name = socket.gethostname()
    addresses = network.addresses_of(name)
    here = f"{name} is {', '.join(addresses) or 'no address'}"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen or (addresses and not network.is_loopback(addresses[0])):
        here += f"; on several machines GLOO_SOCKET_IFNAME={chosen} counts" if chosen else ""
        return Row("host name", "ok", here)
    interface = (network.outward() or ["THE_ONE_THAT_LEADS_TO_THE_OTHERS"])[0]
    text = here + ", where other machines do not find it"
    cure = "for one machine, nothing; for torchrun on several: export GLOO_SOCKET_IFNAME="
    return Row("host name", "limited", text, cure + interface)


def look_at_interfaces():
    """Say which there are, and whether gloo is told to use one of them."""
    found = network.interfaces()
    text = ", ".join(f"{name} {address or '-'}" for name, address in found.items())
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if not found.get(name):
            cure = "set it to one of these, or unset it"
            return Row("interfaces", "not ok", f"GLOO_SOCKET_IFNAME={name}; {text}", cure)
    return Row("interfaces", "ok", text)
