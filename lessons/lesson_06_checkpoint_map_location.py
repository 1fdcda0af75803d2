"""Lesson 06: what must be saved so that a killed job goes on as if nothing had happened?

Every 5 steps, and at SIGTERM, rank 0 writes all that the job needs to go on; the others wait.
A job that was stopped must end with the same bits as a job that was not.

Run it:  bash scripts/lesson_06.sh --nproc 2
Stop it: bash scripts/lesson_06.sh --checkpoints FOLDER --steps 9999   (and again: it resumes)

Output to expect on a CPU:

    ranks: 2, over gloo on cpu; checkpoints kept: 2
    a save was killed at 11 moments: each time the old file was left, or the new one, whole
    stopped by SIGTERM after steps 4 and 7
    resumed from step 7, 90 rows into epoch 1
    PASS the parameters of 2 ranks differ by 0.0 from those of 12 steps without a stop
"""

import argparse
import io
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from datetime import timedelta
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- The technique ---


def save(state, path):
    """Write `state` to `path`, a Path; killed at any moment, it leaves the old file or the new."""
    unfinished = path.with_suffix(".unfinished")  # in the same folder: a rename stays on one disk
    with open(unfinished, "wb") as file:  # no checkpoint has this name: nobody will load it
        torch.save(state, file)  # from Python to the operating system
        os.fsync(file.fileno())  # and to the disk, before the name is there
    os.replace(unfinished, path)  # in one step: the name has all its data, or is not there
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the name is an entry of the folder: to the disk with it
    os.close(folder)


def load(path):
    """Return the checkpoint in a file, on the CPU, and its checksums; an error if it is damaged."""
    with zipfile.ZipFile(path) as file:
        if file.testzip():  # reads all of it once; torch.load does not compare the checksums
            raise ValueError("a checksum is wrong")
        checksums = [part.CRC for part in file.infolist()]
    # mmap: no second copy; the ranks of a machine share the one in the system's memory
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True), checksums


def checkpoints(folder):
    """Return the paths of the checkpoints in `folder`, the oldest first."""
    return sorted(path for path in Path(folder).glob("step_????????.pt") if path.is_file())


def load_latest(folder):
    """Return the latest checkpoint that is whole, and [name, checksums]; None, [] if there is none.

    If all are damaged, None and [name]. To start anew would in time delete what can be repaired.
    """
    found = checkpoints(folder)[::-1]
    for path in found:
        try:
            state, checksums = load(path)
            return state, [path.name, checksums]
        except Exception as error:  # damage has many forms, and all mean: take the one before
            print(f"{path.name} can't be used: {error!r:.80}", file=sys.stderr)
    return None, [path.name for path in found[:1]]


def load_together(folder, group=None):
    """Return the latest checkpoint that is whole, on every rank the same; None if there is none.

    If a rank finds none that is whole, or another one, all leave, with a line that names it.
    """
    state, own = load_latest(folder)  # all ranks at once: none waits while rank 0 reads
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, group)  # so all ranks know, and none goes on alone
    for rank, found in enumerate(everyone):
        if len(found) == 1:
            sys.exit(f"rank {rank}: no checkpoint in {folder} is whole")
        if found != everyone[0]:
            names = [other[0] if other else "nothing" for other in (everyone[0], found)]
            what = "other bytes" if names[0] == names[1] else names[1]
            sys.exit(f"rank {rank}: rank 0 goes on from {names[0]}, this rank found {what}")
    return state


def random_states():
    """Return the states of all generators of this process; each rank has its own."""
    name, numbers, *rest = np.random.get_state()
    states = {"numpy": (name, numbers.tolist(), *rest)}  # torch.load would refuse its array
    states |= {"random": random.getstate(), "torch": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state_all()}  # [] without a GPU


def set_random_states(states):
    """Let all generators of this process go on from these states."""
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state_all(states["cuda"])


def save_together(folder, parts, now, group=None, keep=2):
    """Save `parts`, where we are `now`, and all random states, on rank 0; the others wait."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(random_states(), everyone, group=group)
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        path = Path(folder, f"step_{now['step']:08}.pt")
        save(state | {"now": now, "random": everyone}, path)
        older = [other for other in checkpoints(folder) if other <= path]
        for old in older[:-keep]:
            old.unlink(missing_ok=True)  # last of all: only now is there something newer
    dist.barrier(group)  # nobody goes on before the file is on the disk


def resume(folder, parts, group):
    """Load `parts` and the random states from the latest checkpoint; return where it was saved."""
    saved = load_together(folder, group) if folder else None
    if saved is None:
        return {"step": 0, "epoch": 0, "rows": 0}  # rows of the epoch that all ranks have used
    for name, part in parts.items():
        part.load_state_dict(saved[name])  # copies from the CPU to the device of the part
    if len(saved["random"]) == dist.get_world_size():
        set_random_states(saved["random"][dist.get_rank()])  # last: nothing may draw after it
    return saved["now"]


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that deals what is left of an epoch when `used` rows of it are used.

    All ranks get as many rows; the last ones, fewer than there are ranks, are left out. Its length
    is that of what is left.
    """

    used = 0

    def set_epoch(self, epoch, used=0):
        self.epoch, self.used = epoch, used

    def __iter__(self):
        order = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)  # one rank: of all
        order.set_epoch(self.epoch)
        rest = list(order)[self.used :]  # so it fits any number of ranks; no row is read
        return iter(rest[self.rank :: self.num_replicas][: len(self)])

    def __len__(self):
        return (len(self.dataset) - self.used) // self.num_replicas


def start_workers(loader):
    """Return an iterator over a loader; its workers never get SIGTERM: torchrun sends it to all."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # each child is born with it
    batches = iter(loader)  # starts the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the rank gets it again
    return batches


def note(number):
    """Let this signal do nothing but fill the list that is returned."""
    noted = []
    signal.signal(number, lambda *_: noted.append(number))
    return noted


def on_any_rank(noted, group):
    """Return whether a rank has noted something: the same answer on all ranks."""
    flag = torch.tensor(len(noted))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return flag.item() > 0


def update(replica, optimizer, schedule, rows, targets):
    """Make one step."""
    optimizer.zero_grad()
    nn.functional.mse_loss(replica(rows), targets).backward()
    optimizer.step()
    schedule.step()


def train(model, data, steps, batch_size, device, folder=None, seed=0, every=5):
    """Train to step `steps`; with a `folder`, from its latest checkpoint, and save there.

    Return whether SIGTERM has stopped it: then after the same step on all ranks, and saved.
    """
    replica = nn.parallel.DistributedDataParallel(model.to(device))
    replica(data[0][0][None].to(device)).sum().backward()  # DDP sorts its bucket: before all steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    sampler, world_size = ResumableSampler(data, seed=seed), dist.get_world_size()
    options = {"sampler": sampler, "generator": torch.Generator()}
    loader = DataLoader(data, batch_size // world_size, **options)
    patient = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # longer than any save
    now = resume(folder, parts, patient)
    noted, stop = note(signal.SIGTERM), False
    while now["step"] < steps and not stop:
        sampler.set_epoch(now["epoch"], now["rows"])
        loader.generator.manual_seed(now["epoch"] * world_size + dist.get_rank())  # for workers
        for rows, targets in start_workers(loader):
            update(replica, optimizer, schedule, rows.to(device), targets.to(device))
            now |= {"step": now["step"] + 1, "rows": now["rows"] + len(rows) * world_size}
            stop = on_any_rank(noted, patient)
            if folder and (stop or now["step"] % every == 0 or now["step"] == steps):
                save_together(folder, parts, now, patient)
            if stop or now["step"] == steps:
                break
        now |= {"epoch": now["epoch"] + 1, "rows": 0}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on it ends this process again
    return stop


# --- The proof ---


def make_toy(seed):
    """Return the article's toy: 100 rows of 5 numbers, targets of width 2, and a layer 5 -> 2.

    The targets are a fixed linear function of the rows, plus noise: there is something to learn.
    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    targets += 0.5 * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rows, targets, model


class Watched(TensorDataset):
    """Rows that `random` and NumPy change a little at each look; it notes which were asked for."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        row, target = super().__getitem__(number)
        return random.uniform(0.9, 1.1) * row + np.random.normal(scale=0.1), target


class Disk:
    """Notes what a rank sends to the disk: ("sync", file, bytes), ("rename", file, bytes, name)."""

    def __init__(self, seconds=0.0):
        self.notes, self.strays, self.older = [], 0, []
        self.seconds = seconds  # how slow a rename is

    def __enter__(self):
        self.real = os.fsync, os.replace
        os.fsync, os.replace = self.sync, self.rename
        return self

    def __exit__(self, *error):
        os.fsync, os.replace = self.real

    def sync(self, handle):
        facts = os.fstat(handle)
        self.notes.append(("sync", facts.st_ino, facts.st_size))
        self.real[0](handle)

    def rename(self, old, new):
        time.sleep(self.seconds)
        self.strays += Path(old).parent != Path(new).parent
        if dist.get_rank() > 0:  # it has written: a mistake, which is noted, and not put in place
            self.notes.append(("rename", None, 0, Path(new).name))
            return
        facts = os.stat(old)
        self.older.append(sum(other < new for other in checkpoints(Path(new).parent)))
        self.notes.append(("rename", facts.st_ino, facts.st_size, Path(new).name))
        self.real[1](old, new)

    def wrong(self, folder):
        """Return what a power cut could destroy, or None; rank 0 has written into `folder`."""
        home = os.stat(folder).st_ino
        if self.strays:
            return "a file was written in another folder, which may be on another disk"
        for number, (what, *file, name) in enumerate(self.notes):
            if what == "rename":
                if self.notes[max(0, number - 1)] != ("sync", *file):
                    return f"{name} could be there before its data"
                if [note[:2] for note in self.notes[number + 1 :][:1]] != [("sync", home)]:
                    return f"nobody has sent the name {name} to the disk"
        return None

    def written(self):
        """Return {name: bytes} of the files that got their names."""
        return {note[3]: note[2] for note in self.notes if note[0] == "rename"}


def numbers_of(parts):
    """Return a copy of all numbers of these tensors, one after the other, on the CPU."""
    return torch.cat([part.detach().flatten().cpu() for part in parts])


def start_anew(seed):
    """Seed all generators, as a script does at its start."""
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)


def run_job(args, steps, device, folder=None, sigterm=None):
    """Train the toy as a new process would; return what this rank has seen, step by step.

    After so many steps the last rank, and no other, gets SIGTERM, if it has a handler for it.
    """
    rank, before, seen, sizes = dist.get_rank(), signal.getsignal(signal.SIGTERM), [], []
    start_anew((args.seed + rank) % 2**32)  # each rank draws its own numbers
    rows, targets, layer = make_toy(args.seed)
    model, data = nn.Sequential(nn.Dropout(0.2), layer), Watched(rows, targets)
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))

    def after_update(optimizer, *_):
        group = optimizer.param_groups[0]
        momentum = [optimizer.state[p]["momentum_buffer"] for p in group["params"]]
        state = [*model.parameters(), *momentum, torch.tensor([group["lr"]])]
        seen.append((data.asked[-sizes[-1] :], numbers_of(state)))
        handled = signal.getsignal(signal.SIGTERM) != before
        if handled and (len(seen), rank) == (sigterm, dist.get_world_size() - 1):
            signal.raise_signal(signal.SIGTERM)

    handle = register_optimizer_step_post_hook(after_update)
    with Disk() as disk:
        cut = train(model, data, steps, args.batch_size, device, folder, args.seed, args.save_every)
    handle.remove()
    signal.signal(signal.SIGTERM, before)
    if cut and sigterm is None:  # somebody else wants this process to end
        sys.exit(128 + signal.SIGTERM)
    draws = torch.rand(1), torch.tensor([random.random()]), torch.tensor([np.random.rand()])
    seen.append(([], numbers_of([*model.parameters(), *draws])))  # and where the generators are
    return seen, disk


def steps_per_epoch(length, world_size, batch_size):
    """Return how many steps an epoch has: all ranks get as many rows, in batches of their own."""
    return math.ceil(math.ceil(length / world_size) / (batch_size // world_size))


def wrong_in_rows(batches, length, batch_size):
    """Return what is wrong with the row numbers of all steps and ranks, or None.

    batches[step][rank] are the row numbers of that rank in that step.
    """
    world_size = len(batches[0]) if batches else 1
    share, each = batch_size // world_size, math.ceil(length / world_size)
    per_epoch, beginnings = steps_per_epoch(length, world_size, batch_size), set()
    for number, step in enumerate(batches):
        sizes, wanted = [len(rows) for rows in step], min(share, each - number % per_epoch * share)
        if sizes != [wanted] * world_size:
            return f"step {number + 1}: {sizes} rows, rank by rank, and not {wanted} each"
    for first in range(0, len(batches), per_epoch):
        epoch = batches[first : first + per_epoch]
        dealt = [*chain(*chain(*epoch))]
        repeated = len(dealt) - len(Counter(dealt))
        if repeated > -length % world_size:  # so many fill the last places: 102 for 100 rows
            return f"epoch {first // per_epoch}: {repeated} rows went to two ranks, or came twice"
        if len(epoch) == per_epoch and len(Counter(dealt)) < length:
            return f"epoch {first // per_epoch}: only {len(Counter(dealt))} of {length} rows came"
        if len(dealt) >= 8 and tuple(dealt[:8]) in beginnings:
            return f"epoch {first // per_epoch}: the order is that of an earlier one"
        beginnings.add(tuple(dealt[:8]))
    return None


def from_all_ranks(value):
    """Return what all ranks hand in, a list, the same on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# Saving and loading, tried out.


def killed_saves():
    """Kill a save in its write, at each of its lines, at its rename; return (kills, problem).

    Before this process joins a group: a fork has none of the threads that others have begun.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, moment, alive = Path(name), 0, False
        while not alive:
            for path in folder.glob("*.pt"):  # what a killed save has left besides stays there
                path.unlink()
            try:
                save({"step": 1, "weights": torch.ones(5000)}, folder / "step_00000001.pt")
                save({"step": 2, "weights": torch.zeros(5000)}, folder / "step_00000002.pt")
            except OSError as error:
                return moment, f"what a killed save has left is in the way of the next: {error}"
            child = os.fork()
            if child == 0:
                save_and_die(folder, moment)
            alive = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            try:
                state, _ = load(folder / "step_00000002.pt")
            except Exception as error:
                return moment, f"a save was killed, and its file is lost: {error!r:.80}"
            if not torch.equal(state["weights"], torch.full((5000,), state["step"] - 2.0)):
                return moment, "a save was killed, and its file has wrong numbers"
            moment += 1
    return moment - 1, None if state["step"] == 3 else "a save that nobody has killed is not there"


def save_and_die(folder, moment):
    """Save; be killed in the write (moment 0), or before a line, rename or removal. No return."""
    moments = 0

    def begin(event, _=None):
        nonlocal moments
        counts = event in ("line", "os.rename", "os.remove")
        moments += counts
        if counts and moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame, event, _):
        ours = frame.f_code.co_filename == save.__code__.co_filename
        if not ours or frame.f_code is begin.__code__:
            return None
        begin(event)
        return trace

    if moment == 0:  # the kernel kills who writes more than 10,000 bytes, and Python lets it
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    else:
        sys.addaudithook(begin)  # Python calls it before it renames or removes
        sys.settrace(trace)
    try:
        save({"step": 3, "weights": torch.ones(5000)}, folder / "step_00000002.pt")
    finally:
        os._exit(0)


def save_slowly(folder):
    """Save on all ranks, with a slow disk; return what is wrong on this rank, or None."""
    torch.manual_seed(dist.get_rank())
    names = [f"step_{step:08}.pt" for step in (7, 8, 9)]
    if dist.get_rank() == 0:
        for name in names[1:]:  # newer ones that are damaged: the job went on from before them
            Path(folder, name).write_bytes(b"")
    with Disk(seconds=0.3) as disk:
        save_together(folder, {}, {"step": 7})
    here = [path.name for path in checkpoints(folder)]  # before anything else is waited for
    first_machine = os.environ.get("GROUP_RANK", "0") == "0"  # elsewhere a file may appear late
    if first_machine and here != names:
        return f"when a rank goes on after saving {names[0]} there is {', '.join(here)}"
    if len(disk.written()) != (dist.get_rank() == 0):
        return f"rank {dist.get_rank()} has written {len(disk.written())} files"
    return disk.wrong(folder) if dist.get_rank() == 0 else None


def some_files():
    """Return files by name, as if saved on a GPU, and again with one bit changed, or another step.

    Each storage in a file names the device that it was saved from; here there may be no GPU.
    """
    files, device = {}, patch("torch.serialization.location_tag", lambda storage: "cuda:1")
    with tempfile.TemporaryDirectory() as folder, device:
        for step in (1, 2, 3):
            path = Path(folder, f"step_{step:08}.pt")
            save({"step": step, "weights": torch.ones(5000)}, path)
            files[path.name] = path.read_bytes()
        save({"step": 4, "weights": torch.ones(5000), "not on the list": Path()}, path)
        files["step_00000004.pt"] = path.read_bytes()
    damaged = {name: bytearray(data) for name, data in files.items()}
    for data in damaged.values():
        data[len(data) // 2] ^= 1
    return files, {name: bytes(data) for name, data in damaged.items()}


def load_these(files):
    """Load together, where this rank finds these files; return the step, or why the run ends."""
    with tempfile.TemporaryDirectory() as folder, patch("sys.stderr", io.StringIO()):
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        try:
            state = load_together(folder)
        except SystemExit as stop:
            return str(stop).partition(":")[0]
    if state is None:
        return 0
    return state["step"] if state["weights"].device.type == "cpu" else "not on the CPU"


def wrong_in_loading():
    """Return what goes wrong if the last rank finds other files than the rest, or None."""
    files, damaged = from_all_ranks(some_files() if dist.get_rank() == 0 else None)[0]
    (one, old), (two, new), (three, newest), (four, other) = files.items()
    last, same, worse = dist.get_world_size() - 1, {one: old, two: new}, {two: damaged[two]}
    cases = {"no file": ({}, {}, 0), "the same files": (same, same, 2)}
    cases["a damaged file"] = (same | {three: damaged[three]},) * 2 + (2,)
    cases["an empty file"] = (same | {three: b""},) * 2 + (2,)
    cases["a file that could run code"] = (same | {four: other},) * 2 + (2,)
    cases["only a damaged file"] = worse, worse, "rank 0"
    if last > 0:
        for name, theirs in {"an older one": {one: old}, "nothing": {}, "damage": worse}.items():
            cases[name] = same, theirs, f"rank {last}"
        cases["other bytes"] = same, {two: newest}, f"rank {last}"
        cases["more than nothing"] = {}, same, f"rank {last}"
        cases["also a newer one"] = same, same | {three: newest}, f"rank {last}"
    for name, (ours, theirs, wanted) in cases.items():
        found = from_all_ranks(load_these(theirs if dist.get_rank() == last else ours))
        if found != [wanted] * len(found):
            return f"{name} on rank {last}: the ranks load {found}, and not {wanted}"
    return None


# The whole job.


def read_job(folder):
    """Return what job.json says of the job in this folder; {} if no job has begun there."""
    path = Path(folder, "job.json")
    return json.loads(path.read_text()) if path.exists() else {}


def begin(args, device, folder):
    """Note in the folder who trains there; return all who have, and whether the job is new."""
    job = read_job(folder) or {"seed": args.seed, "batch_size": args.batch_size, "ranks": []}
    ranks = f"{dist.get_world_size()} ranks on {device.type}"
    new = not checkpoints(folder)
    job["ranks"] = sorted({ranks, *([] if new else job["ranks"])})
    Path(folder, "job.json").write_text(json.dumps(job))
    return job["ranks"], new


def where(folder):
    """Return the position in the checkpoint from which a job would now go on, or None."""
    try:
        with patch("sys.stderr", io.StringIO()):
            return load_latest(folder)[0]["now"]
    except Exception:
        return None


def observe(args, device, folder, another):
    """Stop a job twice, resume it, and compare it with one that was never stopped."""
    makers, new = from_all_ranks(begin(args, device, folder) if dist.get_rank() == 0 else None)[0]
    jobs, stops = [], stops_of(args) if new else []
    for begun, stop in zip([0, *stops], stops, strict=False):
        jobs.append(run_job(args, args.steps, device, folder, sigterm=stop - begun))
    now = from_all_ranks(where(folder) if dist.get_rank() == 0 else None)[0]
    if now is None:
        sys.exit("the first job has left no checkpoint that can be loaded")
    jobs.append(run_job(args, args.steps, device, folder))
    whole, _ = run_job(args, args.steps, device)
    resumed = [*chain(*(seen[:-1] for seen, _ in jobs)), jobs[-1][0][-1]]
    facts = {"makers": makers, "now": now, "exact": len(makers) == 1, "stops": stops}
    facts["off"] = (resumed[-1][1][:12] - whole[-1][1][:12]).abs().max().item()
    facts["written"] = [disk.written() for _, disk in jobs]
    facts["older"] = [*chain(*(disk.older for _, disk in jobs))]
    wrong = [disk.wrong(folder) for _, disk in jobs if dist.get_rank() == 0]
    wrong.append(wrong_in_files(folder, facts, args) if dist.get_rank() == 0 else None)
    if facts["exact"]:
        begun = 0 if new else now["step"]
        wrong += compare(from_all_ranks(whole), from_all_ranks(resumed), args, begun)
    wrong.append(wrong_in_training(args, whole, resumed))
    wrong.append(wrong_on_other_ranks(args, device, folder, Path(another, "other ranks")))
    return facts, wrong


def stops_of(args):
    """Return after which steps the job is stopped: at the end of an epoch, and in the middle."""
    even = 100 - 100 % dist.get_world_size()  # the rest is left out
    per_epoch = steps_per_epoch(even, dist.get_world_size(), args.batch_size)
    return [stop for stop in sorted({per_epoch, min(7, args.steps - 1)}) if stop < args.steps]


def wrong_on_other_ranks(args, device, folder, another):
    """Go on where a job of other ranks has used 31 rows; return what is wrong with ours, or None.

    2, 3 or 4 ranks can't have used so many together: a position that is one of each rank shows.
    """
    world_size = dist.get_world_size()
    if dist.get_rank() == 0:
        another.mkdir()
        state, _ = load_latest(folder)
        state["random"] = state["random"][:1] * (world_size + 1)
        state["now"] = {"step": 1, "epoch": 0, "rows": 31}
        save(state, another / "step_00000001.pt")
    from_all_ranks(None)  # nobody looks for the file before it is there
    steps = math.ceil(69 // world_size / (args.batch_size // world_size))
    seen, _ = run_job(args, 1 + steps, device, another)
    dealt = [*chain(*from_all_ranks([*chain(*(rows for rows, _ in seen[:-1]))]))]
    rest = list(DistributedSampler(range(100), 1, 0, seed=args.seed))[31:]
    twice = len(dealt) - len(set(dealt) & set(rest))
    if twice or len(dealt) != 69 - 69 % world_size:
        said = f"of the 69 rows left by a job of other ranks, {len(dealt) - twice} came"
        return f"{said}, and {twice} that were used"
    return None


def compare(whole, resumed, args, begun):
    """Return what is wrong with the steps of a resumed job; both are lists by rank, then by step.

    The last entry is no step: it says where the generators are.
    """
    lengths = {len(of_rank) - 1 for of_rank in whole}, {len(of_rank) - 1 for of_rank in resumed}
    if lengths != ({args.steps}, {args.steps - begun}):
        return [f"from step {begun} it makes {lengths[1]} steps, and without a stop {lengths[0]}"]
    wrong = []
    for rank, (one, other) in enumerate(zip(whole, resumed, strict=True)):
        for step, pair in enumerate(zip(one[begun:], other, strict=True), begun + 1):
            if not torch.equal(pair[0][1], pair[1][1]):
                wrong.append(f"rank {rank} is in another state than without a stop: step {step}")
    jobs = [one[:begun] + other[:-1] for one, other in zip(whole, resumed, strict=True)]
    batches = [[rows for rows, _ in of_ranks] for of_ranks in zip(*jobs, strict=True)]
    even = 100 - 100 % dist.get_world_size()  # the rest is left out
    return [*wrong[:1], wrong_in_rows(batches, even, args.batch_size)]


def wrong_in_files(folder, facts, args):
    """Return what is wrong with the files that rank 0 has left, or None."""
    names = [name for of_job in facts["written"] for name in of_job]
    found = checkpoints(folder)
    steps = {*range(0, args.steps, args.save_every), *facts["stops"], args.steps} - {0}
    if facts["stops"] and names != [f"step_{step:08}.pt" for step in sorted(steps)]:
        return f"saved were {', '.join(names)}, and not after the steps {sorted(steps)}"
    if facts["stops"] and facts["older"] != [min(2, number) for number in range(len(names))]:
        return f"older files that were there when a new one was whole: {facts['older']}"
    if facts["stops"] and [path.name for path in found] != names[-2:]:
        return f"{len(found)} files are left of 2 wanted"
    try:
        keys = list(load(found[-1])[0].get("model", []))
    except Exception as error:
        return f"{found[-1].name} can't be used: {error!r:.80}"
    if keys != ["1.weight", "1.bias"]:
        return f"the file has not the keys of a model without DDP, but {keys}"
    return None


def wrong_in_training(args, whole, resumed):
    """Return what is wrong with how this rank has learned, or None."""
    rows, targets, layer = make_toy(args.seed)
    losses = [nn.functional.mse_loss(layer(rows), targets).item()]
    for _, numbers in (whole[-1], resumed[-1]):
        nn.utils.vector_to_parameters(numbers[:12], layer.parameters())
        losses.append(nn.functional.mse_loss(layer(rows), targets).item())
    if not all(loss < losses[0] for loss in losses[1:]):
        return f"the loss has not fallen: {losses}"
    rates = [numbers[-1].item() for _, numbers in whole[:-1]]
    return None if args.steps < 4 or rates[-1] < rates[0] else "the learning rate has not fallen"


def try_and_observe(args, device, folder, another):
    """Return what all ranks have measured, and all that is wrong, a list of sentences."""
    wrong = [save_slowly(another), wrong_in_loading()]
    try:
        facts, more = observe(args, device, folder, another)
    except OSError as error:
        raise RuntimeError(f"checkpoints in {folder}: {error}") from error
    except SystemExit as stop:  # of load_together: on all ranks, or on none
        if isinstance(stop.code, int):
            raise
        return None, [str(stop)]
    everyone = from_all_ranks((facts, [problem for problem in wrong + more if problem]))
    for rank, (of_rank, _) in enumerate(everyone):
        names = list(chain(*of_rank["written"]))
        if bool(names) != (rank == 0):
            everyone[0][1].append(f"rank {rank} has written {len(names)} files")
    facts = everyone[0][0] | {"max_param_diff": max(of_rank["off"] for of_rank, _ in everyone)}
    return facts, list(chain(*(problems for _, problems in everyone)))


def report(result, facts):
    """Print what a reader wants to know."""
    where = f"over {result['backend']} on {result['device']}"
    print(f"ranks: {result['world_size']}, {where}; checkpoints kept: {result['checkpoints_kept']}")
    left = "each time the old file was left, or the new one, whole"
    print(f"a save was killed at {result['kills']} moments: {left}")
    if facts["stops"]:
        print("stopped by SIGTERM after steps", " and ".join(map(str, facts["stops"])))
    print("resumed from step {step}, {rows} rows into epoch {epoch}".format_map(facts["now"]))
    if not facts["exact"]:
        makers = " and ".join(facts["makers"])
        print(f"saved by {makers}: dropout and rounding are now different")


def main(args):
    """Run the lesson on this rank; return whether its claim holds, the claim, and the numbers."""
    kills, problem = killed_saves() if os.environ.get("RANK", "0") == "0" else (0, None)
    rank, world_size, device = join_group()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as another:
        folder, another = from_all_ranks((args.checkpoints or folder, another))[0]
        facts, wrong = try_and_observe(args, device, folder, another)
        if facts is None:
            return False, wrong[0], {}
        kept = len(checkpoints(folder))
        dist.barrier()  # nobody removes a folder that another still looks into
    result = {"lesson": 6, "world_size": world_size, "backend": dist.get_backend()}
    result |= {"device": device.type, "max_param_diff": facts["max_param_diff"], "kills": kills}
    result |= {"resumed_from_step": facts["now"]["step"], "checkpoints_kept": kept}
    result["bytes_written"] = sum(sum(of_job.values()) for of_job in facts["written"])
    dist.destroy_process_group()
    if rank == 0:
        report(result, facts)
    wrong += [problem] if problem else []
    claim = f"the parameters of {world_size} ranks differ by {result['max_param_diff']} from those"
    claim = "; ".join([f"{claim} of {args.steps} steps without a stop", *dict.fromkeys(wrong)])
    same_bits = result["max_param_diff"] == 0.0 or not facts["exact"]
    return same_bits and not wrong, claim, result


def parse_args(argv=None):
    """Return the flags; a bad one costs one line and exit code 2, before any rank has started."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.usage = argparse.SUPPRESS  # an error is one line
    parser.allow_abbrev = False
    parser.add_argument("--steps", type=whole(2, 10**6), default=12, help="%(default)s")
    size = {"type": whole(1, 10**6), "default": 30}
    parser.add_argument("--batch-size", **size, help="of all ranks together, %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="%(default)s")
    parser.add_argument("--save-every", type=whole(1, 10**6), default=5, help="%(default)s steps")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="keep them in this folder")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size < world_size:
        parser.error(f"argument --batch-size: must be at least the number of ranks, {world_size}")
    rank_0 = os.environ.get("RANK", "0") == "0"  # the others look when it has chosen
    if args.checkpoints is not None and rank_0:
        problem = wrong_in_folder(args)
        if problem:
            parser.error(f"argument --checkpoints: {problem}")
    return args


def wrong_in_folder(args):
    """Return why the job can't go on in the folder --checkpoints, or None."""
    folder = args.checkpoints
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return f"can't write in {folder}"
    try:
        job = read_job(folder)
        made = f"seed {job['seed']}, batch size {job['batch_size']}" if job else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"job.json in {folder} can't be read: {error!r:.80}"
    found = checkpoints(folder)
    if not found:
        return None
    if made is None:
        return f"no job.json in {folder}: these files are another program's"
    step = found[-1].stem[len("step_") :]
    if made != f"seed {args.seed}, batch size {args.batch_size}" or not step < f"{args.steps:08}":
        return f"the job in {folder} has {made}, and is at step {step.lstrip('0')}"
    return None


# --- The frame: the same in every lesson ---


def join_group(backend=None, store=None):
    """Choose a device, then join the group; return (rank, world_size, device).

    nccl where each rank of this machine can have a GPU of its own, else gloo on the CPU. If only
    some machines have GPUs, pass `backend`. If a rank may keep the others waiting for more than
    two minutes, raise `timeout`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    enough_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= ranks_here
    backend = backend or ("nccl" if enough_gpus else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()  # alone, nobody has to be found
    place = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    return rank, world_size, device


def whole(low, high):
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def number(text):
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            limits = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{limits}, not {text[:40]!r}")
        return int(text)

    return number


def conclude(passed, claim, numbers, as_json):
    """Let rank 0 print the verdict as the last line, or before the JSON; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("PASS" if passed else "FAIL", claim)
        if as_json:
            print(json.dumps(numbers | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse_args()
    sys.exit(conclude(*main(args), args.json))
