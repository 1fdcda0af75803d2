"""Lesson 06: what must be saved so that a killed job goes on as if nothing had happened?

After every step rank 0 writes a checkpoint: the model, the momentum, the learning-rate
schedule, the position in the epoch, and the random state of every rank, which each rank
sends to rank 0 (5,056 bytes on a CPU). The others wait until the file is on the disk.
To go on, rank 0 chooses a file, and a rank that sees other bytes in its place ends the run.
A job that was stopped must end with the same bits as a job that was not.

Run it:  bash scripts/lesson_06.sh --nproc 2
Kill it: bash scripts/lesson_06.sh --checkpoints FOLDER --steps 9999   (and again: it resumes)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu; checkpoints kept: 2
    resumed from step 5, 30 rows into epoch 1
    PASS the parameters of 2 ranks differ by 0.0 from those of 12 steps without a stop
"""

import argparse
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler


class Arguments(argparse.ArgumentParser):
    """The flags of all lessons. A bad value: one line on stderr, from rank 0, and exit code 2."""

    def __init__(self, text, **defaults):
        super().__init__(description=text, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, value in {**defaults, "seed": 0}.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
        self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        limits = {"nproc": (1, 64), "seed": (0, 2**32 - 1)}
        for name in ("nproc", "steps", "batch_size", "seed"):
            low, high = limits.get(name, (1, 10**6))
            if not low <= getattr(args, name, low) <= high:
                self.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" * (os.environ.get("RANK", "0") == "0"))

    def exit(self, status=0, message=""):
        if len(message) > 300:  # it repeats a long value
            message = f"{message[:200]} ... {message[-50:]}"
        super().exit(status, message)


def setup(backend=None, store=None):
    """Join the process group; return (rank, world_size, device) (claims A10, A12, B3, E12).

    The launcher's variables say who we are; without them we are a world of one, no address needed.
    nccl where each rank of this machine has its own GPU, else gloo. A group joined before is kept.
    """
    import torch.distributed.nn  # DDP would do it later, and then no gloo thread could ever end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            rank, world_size, store = 0, 1, dist.HashStore()
        backend = backend or ("nccl" if enough_gpus and dist.is_nccl_available() else "gloo")
        place = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    if dist.get_backend() != "nccl":
        return dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


# --- New in this lesson ---


def on_cpu(item):
    """Return nested dicts and lists, each tensor on the CPU; the live ones stay (A15, A16)."""
    if isinstance(item, dict):
        return {key: on_cpu(value) for key, value in item.items()}
    if isinstance(item, list):
        return [on_cpu(value) for value in item]
    return item.cpu() if isinstance(item, torch.Tensor) else item


UNFINISHED = "lesson_06_unfinished.tmp"  # a name that nobody else uses: we remove this file


def checkpoints(folder):
    """Return the paths in `folder` that are named step_XXXXXXXX.pt, the oldest first.

    No other file is ours: neither step_00000003_best.pt nor step_0.md is ever read or removed.
    """
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step_[0-9]{8}\.pt", name)]
    return [Path(folder, name) for name in sorted(names)]


def save_atomically(state, folder, step, keep=2):
    """Write `state` to folder/step_XXXXXXXX.pt, keep the latest `keep`; return the bytes (A17).

    Killed at any moment, or on a full or read-only disk (OSError), it leaves the old files whole.
    """
    buffer = io.BytesIO()  # torch.save on a full disk raises "unexpected pos"; a write says why
    torch.save(state, buffer)
    target, unfinished = Path(folder, f"step_{step:08}.pt"), Path(folder, UNFINISHED)
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a file, and not replaced", target.name)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # two jobs in one folder take turns; freed when we end
    try:
        unfinished.unlink(missing_ok=True)  # that of a job that was killed
        with open(unfinished, "xb") as file:  # not the name of a checkpoint: nobody will load it
            file.write(buffer.getbuffer())
            file.flush()  # from Python to the operating system
            os.fsync(file.fileno())  # and to the disk: else the name could be there before the data
        os.replace(unfinished, target)  # in one step: the name has its data, or is not there
        os.fsync(handle)  # the name is an entry of the folder: to the disk with it
    finally:
        unfinished.unlink(missing_ok=True)  # after an error: give the space back
        os.close(handle)
    files = [path for path in checkpoints(folder) if path.is_file()]
    for old in [path for path in files if path <= target][:-keep]:
        old.unlink(missing_ok=True)  # last of all: only now is there something newer
    return buffer.tell()


def load(path, part=None):
    """Return the checkpoint in this file, on the CPU (A15); an error of some kind if it is damaged.

    With `part`, a checkpoint that has no such part is another program's, and is not used either.
    """
    if not path.is_file():  # to open a FIFO would be to wait for its writer
        raise ValueError("it is not a file")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # other bytes, another digest
        if zipfile.ZipFile(file).testzip():  # torch.load does not compare the checksums
            raise ValueError("a checksum is wrong")
        file.seek(0)
        # map_location: else all ranks load to the one device that the file names, and fill it.
        # weights_only: tensors and plain containers; a file that carries code is refused.
        state = torch.load(file, map_location="cpu", weights_only=True)
    if part is not None and part not in state:
        raise ValueError("it is another program's")
    return state | {"name": path.name, "digest": digest}


def load_latest(folder, part=None):
    """Return the latest intact checkpoint, or None if there is none; OSError if none is intact."""
    complaints = []  # a line for each newer one that is damaged, or is not ours
    for path in reversed(checkpoints(folder)):
        try:
            return load(path, part) | {"complaints": complaints}
        except Exception as error:  # damage has many forms, and all mean: use the one before
            complaints.append(f"{path.name} can't be used: {error!r:.80}")
    if complaints:  # to start anew would in time delete what can perhaps be repaired
        raise OSError(f"no checkpoint is intact in {folder}: {'; '.join(complaints)}")


def load_the_same(folder, chosen, digest, part):
    """Return the checkpoint that rank 0 has chosen (None: it sees none); else an error."""
    names = [path.name for path in checkpoints(folder)]
    latest = names[-1] if names else "nothing"
    if chosen is None and names:
        raise ValueError(f"rank 0 sees nothing, this rank sees {latest}")
    if chosen is None:
        return None
    if chosen not in names:
        raise ValueError(f"rank 0 loads {chosen}, this rank sees {latest}")
    try:
        saved = load(Path(folder, chosen), part)
    except Exception as error:
        raise ValueError(f"{chosen} can't be used: {error!r:.80}") from error
    if saved["digest"] != digest:
        raise ValueError(f"{chosen} has other bytes than on rank 0")
    return saved


def load_together(folder, part=None):
    """Return the checkpoint that rank 0 chooses, on every rank the same bytes, or None.

    A rank that can't load these bytes ends the run: all ranks leave, with a line that names it.
    """
    saved, problem, choice = None, None, [None, None]
    if dist.get_rank() == 0:
        try:
            saved = load_latest(folder, part)
            choice = [saved["name"], saved["digest"]] if saved else choice  # the name has the step
        except OSError as error:
            problem = f"checkpoints in {folder}: {error}"
    dist.broadcast_object_list(choice)  # from rank 0, also if it has failed: the others wait here
    if dist.get_rank() != 0:
        try:
            saved = load_the_same(folder, *choice, part)
        except (OSError, ValueError) as error:
            problem = f"checkpoints in {folder}: {error}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)  # so all ranks know, and none goes on alone
    for rank, problem in enumerate(problems):
        if problem is not None:
            sys.exit(f"rank {rank}: {problem}")
    return saved


def save_together(state, folder, generator, device):
    """Save on rank 0, with every rank's random state; the others wait (A17). Return the bytes."""
    own = generator.get_state().to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.gather(own, everyone if dist.get_rank() == 0 else None)  # on a CPU 5,056 bytes each
    state = on_cpu(state | {"random": dict(enumerate(everyone))})
    written = save_atomically(state, folder, state["step"]) if dist.get_rank() == 0 else 0
    dist.barrier()  # nobody goes on before the file is on the disk
    return written


def train(rank, world_size, device, steps, batch_size=30, seed=0, folder=None, dropout=0.2):
    """Train to step `steps`, from the latest file in `folder`; return 12 parameters and facts."""
    torch.manual_seed(seed)  # the same data and the same first weights on all ranks
    rows = torch.randn(100, 5)
    targets = rows @ torch.randn(5, 2) + 0.5 * torch.randn(100, 2)
    model = nn.Sequential(nn.Dropout(dropout), nn.Linear(5, 2)).to(device)
    replica = nn.parallel.DistributedDataParallel(model)
    # After its first backward DDP sorts its bucket, which can change the last bit of gloo's sums.
    replica(rows[:1].to(device)).sum().backward()  # so every step that counts comes after that
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    parts = {"model": replica.module, "optimizer": optimizer, "schedule": schedule}  # A8: module
    sampler = DistributedSampler(rows, world_size, rank, seed=seed)
    on_gpu = device.type == "cuda"  # dropout draws from the generator of its device
    generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
    now = {"seed": seed, "batch_size": batch_size, "step": 0, "epoch": 0, "rows": 0, "losses": []}
    saved, written = load_together(folder, "makers") if folder else None, 0
    if saved:
        now = {name: saved[name] for name in now}
        for name, part in parts.items():
            part.load_state_dict(saved[name])  # copies from the CPU to the device of the part
    torch.manual_seed(seed + rank + 1000 * now["step"])  # each rank draws its own dropout
    by = f"{world_size} ranks on {device.type}"
    makers = sorted({*(saved["makers"] if saved else ()), by})  # all that have trained this model
    if saved and saved["by"] == by:  # else the file has no random state for each of us
        generator.set_state(saved["random"][rank])
    while now["step"] < steps:
        sampler.set_epoch(now["epoch"])  # one order for all; each takes every world_size-th row
        mine = list(sampler)[now["rows"] // world_size :][: batch_size // world_size]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(rows[mine].to(device)), targets[mine].to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        now |= {"step": now["step"] + 1, "rows": now["rows"] + len(mine) * world_size}
        now |= {"losses": [*now["losses"], loss.item()]}
        if now["rows"] >= sampler.total_size:
            now |= {"epoch": now["epoch"] + 1, "rows": 0}
        if folder:
            state = now | {name: part.state_dict() for name, part in parts.items()}
            state |= {"by": by, "makers": makers}
            written += save_together(state, folder, generator, device)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    return now | {"saved": saved, "bytes_written": written, "parameters": parameters}


def parse_args(argv=None):
    """Return the flags; `new` says whether there is nothing to go on from.

    A bad flag costs one line and exit code 2, before any rank has started.
    """
    parser = Arguments(__doc__, steps=12, batch_size=30)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="keep them in this folder")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.batch_size < int(os.environ.get("WORLD_SIZE", 1)):
        parser.error("--steps must be at least 2, --batch-size at least the number of ranks")
    saved, rank_0 = None, os.environ.get("RANK", "0") == "0"
    if args.checkpoints is not None and rank_0:  # the others look when rank 0 has chosen
        try:
            saved = load_latest(args.checkpoints, "makers")
        except OSError as error:
            parser.error(f"argument --checkpoints: {error}")
        if not os.access(args.checkpoints, os.W_OK | os.X_OK):
            parser.error(f"argument --checkpoints: can't write in {args.checkpoints}")
    made = saved and [saved[name] for name in ("seed", "batch_size", "step")]
    if saved and (made[:2] != [args.seed, args.batch_size] or made[2] >= args.steps):
        parser.error("argument --checkpoints: seed {}, batch size {}, at step {}".format(*made))
    args.new = saved is None
    return args


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    args = parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Linux: if torchrun is killed, its ranks end as well
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    rank, world_size, device = setup()
    temporary = None if rank or args.checkpoints else tempfile.TemporaryDirectory()
    job = [args.batch_size, args.seed, temporary.name if temporary else args.checkpoints]
    new = [args.new]
    dist.broadcast_object_list(job)  # rank 0's folder is that of all ranks
    dist.broadcast_object_list(new)  # and it says whether there is something to go on from
    written = 0
    try:
        if new[0]:  # a first job, which stops early
            first = train(rank, world_size, device, min(5, args.steps - 1), *job)
            written = first["bytes_written"]
        resumed = train(rank, world_size, device, args.steps, *job)
    except OSError as error:
        sys.exit(f"rank {rank}: checkpoints in {job[2]}: {error}")
    kept = len(checkpoints(job[2])) if rank == 0 else 0
    temporary = temporary and temporary.cleanup()
    whole = train(rank, world_size, device, args.steps, *job[:2])
    diffs, saved = [None] * world_size, resumed["saved"]
    dist.all_gather_object(diffs, (resumed["parameters"] - whole["parameters"]).abs().max().item())
    backend = dist.get_backend()
    dist.destroy_process_group()
    exact = saved["makers"] == [f"{world_size} ranks on {device.type}"]
    moved = not torch.equal(resumed["parameters"][:10], saved["model"]["1.weight"].flatten())
    passed = moved and all(diff == 0.0 if exact else diff < float("inf") for diff in diffs)
    if rank == 0:
        sys.stderr.writelines(f"{line}\n" for line in saved["complaints"])
        print(f"ranks: {world_size}, over {backend} on {device.type}; checkpoints kept: {kept}")
        print("resumed from step {step}, {rows} rows into epoch {epoch}".format_map(saved))
        if not exact:
            makers = " and ".join(saved["makers"])
            print(f"saved by {makers}: dropout and rounding are now different")
        found = f"the parameters of {world_size} ranks differ by {max(diffs)} from those of"
        print(f"{'PASS' if passed else 'FAIL'} {found} {args.steps} steps without a stop")
        if args.json:
            result = {"lesson": 6, "world_size": world_size, "backend": backend}
            result |= {"device": device.type, "passed": passed, "max_param_diff": max(diffs)}
            result |= {"resumed_from_step": saved["step"], "checkpoints_kept": kept}
            print(json.dumps(result | {"bytes_written": written + resumed["bytes_written"]}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
