"""The table of lessons: number, script, how its ranks start, what it needs installed."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent

# How the ranks of a lesson start.
TORCHRUN = "torchrun"  # ranks.py starts them, as the command torchrun does
LAUNCH_JOB = "launch_job"  # the script does, by launch_job(func, nproc, *args); all on one machine
REHEARSAL = "rehearsal"  # rehearsal.py does: two launchers play two machines
ITSELF = "itself"  # the script or its proof does, in its own ways; all on one machine
BY_HAND = "by hand"  # by_hand.py does, by lines that a person could type; all on one machine
ONE_PROCESS = "one process"  # there are no ranks: --nproc is a number of devices

ON_SEVERAL_MACHINES = (TORCHRUN, LAUNCH_JOB, REHEARSAL)
FRAMEWORKS = ("tensorflow", "paddlepaddle", "jax", "jaxlib")  # only 07, 08 and 15 need them
IMPORT_NAMES = {"scikit-learn": "sklearn", "paddlepaddle": "paddle"}  # where pip has another name


class Lesson(NamedTuple):
    """A row of the table. Packages are named as in requirements.txt."""

    number: str
    slug: str
    start: str
    packages: tuple
    compares_with: tuple = ()  # installed for it, and not missed where it is not there

    def frameworks(self):
        """Return the large packages that it uses, with which torch does not share a process."""
        return [name for name in self.packages + self.compares_with if name in FRAMEWORKS]

    @property
    def script(self):
        """Return the path of the script."""
        return ROOT / "lessons" / f"lesson_{self.number}_{self.slug}.py"

    @property
    def proof(self):
        """Return the path of the file that judges what its ranks were seen to do, if it has one."""
        return ROOT / "lessons" / "proofs" / f"lesson_{self.number}.py"


TORCH = ("torch", "numpy")
WATCHED = (*TORCH, "wrapt")  # the launcher watches what the ranks do
TABLE = (
    Lesson("01", "data_parallel", ONE_PROCESS, WATCHED),
    Lesson("02", "launch_ddp", TORCHRUN, WATCHED),
    Lesson("03", "spawn_ddp", LAUNCH_JOB, (*WATCHED, "scikit-learn")),
    Lesson("04", "init_methods", BY_HAND, WATCHED),
    Lesson("05", "rank_zero_output", TORCHRUN, (*WATCHED, "tqdm", "tensorboard")),
    Lesson("06", "checkpoint_map_location", TORCHRUN, WATCHED),
    Lesson("07", "tf_make_parallel", ONE_PROCESS, ("tensorflow", "numpy")),
    Lesson("08", "paddle_parallel_do", ITSELF, ("paddlepaddle", "numpy")),
    Lesson("09", "batch_norm", TORCHRUN, WATCHED),
    Lesson("10", "same_as_one_process", TORCHRUN, (*WATCHED, "scikit-learn")),
    Lesson("11", "how_fast", TORCHRUN, WATCHED),
    Lesson("12", "pipeline_parallel", TORCHRUN, WATCHED),
    Lesson("13", "tensor_and_hybrid", TORCHRUN, WATCHED),
    Lesson("14", "several_machines", REHEARSAL, WATCHED),
    Lesson(
        "15",
        "four_frameworks",
        ITSELF,
        ("numpy",),
        ("torch", "tensorflow", "paddlepaddle", "jax", "jaxlib"),
    ),
    Lesson("16", "all_reduce", TORCHRUN, WATCHED),
    Lesson("17", "ddp_from_scratch", TORCHRUN, WATCHED),
    Lesson("18", "sharding", TORCHRUN, WATCHED),
    Lesson("19", "hang_clinic", ITSELF, WATCHED),
    Lesson("20", "feed_ranks", TORCHRUN, WATCHED),
    Lesson("21", "half_precision", TORCHRUN, WATCHED),
)


def find(number):
    """Return the lesson with this number, "3" or "03"; None if there is none."""
    return next((lesson for lesson in TABLE if lesson.number == number.zfill(2)), None)


def of_script(path):
    """Return the lesson whose script this is, or None."""
    path = Path(path).resolve()
    return next((lesson for lesson in TABLE if lesson.script == path), None)


def pins(file=ROOT / "requirements.txt"):
    """Return {name: "name==version"} of all that a requirements file pins."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [line.split()[0] for line in lines if "==" in line.partition("#")[0]]
    return {pin.partition("==")[0]: pin for pin in found}


def packages_for(what):
    """Return the packages that `what` needs, named as in requirements.txt.

    `what` is a lesson's number, "doctor", "check", "notebooks" (all but FRAMEWORKS), or "all".
    Raises LookupError for anything else.
    """
    if what == "doctor":
        return TORCH
    if what == "check":
        return (*TORCH, "wrapt", "psutil")
    if what in ("all", "notebooks"):
        return tuple(name for name in pins() if what == "all" or name not in FRAMEWORKS)
    lesson = find(what)
    if lesson is None:
        raise LookupError(f"there is no lesson {what[:40]!r}")
    return lesson.packages + lesson.compares_with
