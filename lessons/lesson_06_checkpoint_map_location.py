"""Lesson 06: what must be saved so that a killed job goes on as if nothing had happened?

Every 5 steps, and at SIGTERM, rank 0 writes all that the job needs to go on; the others wait. The
launcher stops this script twice, lets it come to its end, and runs it anew: the same bits.

Run it:    bash scripts/lesson_06.sh --nproc 2 [--checkpoints FOLDER]
Or alone:  torchrun --standalone --nproc-per-node=2 lessons/lesson_06_checkpoint_map_location.py

Output to expect on a CPU:

    step 4 of 12: first weight ...
    resumed from step 4, 100 rows into epoch 0
    step 7 of 12: first weight ...
    resumed from step 7, 90 rows into epoch 1
    step 12 of 12: first weight ...
    step 12 of 12: first weight ...
    ranks: 2, over gloo on cpu; checkpoints kept: 2
    a save was killed at 11 moments: each time the old file was left, or the new one, whole
    PASS the parameters of 2 ranks differ by 0.0 from those of 12 steps without a stop
"""

import argparse
import os
import random
import signal
import sys
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# --- The technique ---


def save(state, path):
    """Write `state` to `path`, a Path; killed at any moment, it leaves the old file or the new."""
    unfinished = path.with_suffix(".unfinished")  # in the same folder: a rename stays on one disk
    with open(unfinished, "wb") as file:
        torch.save(state, file)  # from Python to the operating system
        os.fsync(file.fileno())  # and to the disk, before the name is there
    os.replace(unfinished, path)  # in one step
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the name is an entry of the folder: to the disk with it
    os.close(folder)


def load(path):
    """Return the checkpoint in a file, on the CPU, and its checksums; an error if it is damaged."""
    with zipfile.ZipFile(path) as file:
        if file.testzip():  # torch.load does not compare the checksums
            raise ValueError("a checksum is wrong")
        checksums = [part.CRC for part in file.infolist()]
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True), checksums


def checkpoints(folder):
    """Return the paths of the checkpoints in `folder`, the oldest first."""
    return sorted(path for path in Path(folder).glob("step_????????.pt") if path.is_file())


def load_latest(folder):
    """Return the latest checkpoint that is intact, and [name, checksums]; else None and a word."""
    for path in reversed(checkpoints(folder)):
        try:
            state, checksums = load(path)
            return state, [path.name, checksums]
        except Exception as error:  # damage has many forms, and all mean: take the one before
            print(f"{path.name} can't be used: {error!r:.80}", file=sys.stderr)
    return None, ["damage" if checkpoints(folder) else "nothing"]


def load_together(folder, group):
    """Return the latest checkpoint that is intact, or None; if ranks find others, all leave."""
    state, own = load_latest(folder)  # all ranks at once: none waits while rank 0 reads
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, group)  # so all ranks know, and none goes on alone
    for rank, found in enumerate(everyone):
        if found == ["damage"]:  # to start anew would in time delete what can be repaired
            sys.exit(f"rank {rank}: no checkpoint in {folder} is intact")
        if found != everyone[0]:
            what = "other bytes" if found[0] == everyone[0][0] else found[0]
            sys.exit(f"rank {rank}: rank 0 goes on from {everyone[0][0]}, this rank found {what}")
    return state


def random_states():
    """Return the states of all generators of this process; each rank has its own."""
    name, numbers, *rest = np.random.get_state()
    states = {"numpy": (name, numbers.tolist(), *rest), "random": random.getstate()}  # no array
    return states | {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def save_together(folder, parts, now, group, keep=2):
    """Save `parts`, where we are `now`, and all random states, on rank 0; the others wait."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(random_states(), everyone, group=group)
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        path = Path(folder, f"step_{now['step']:08}.pt")
        save(state | {"now": now, "random": everyone}, path)
        for old in [other for other in checkpoints(folder) if other <= path][:-keep]:
            old.unlink(missing_ok=True)  # last of all: only now is there something newer
    dist.barrier(group)  # nobody goes on before the file is on the disk


def resume(folder, parts, group):
    """Load `parts` and the random states from the latest checkpoint; return where it was saved."""
    saved = load_together(folder, group) if folder else None
    if saved is None:
        return {"step": 0, "epoch": 0, "rows": 0}  # rows of the epoch that all ranks have used
    for name, part in parts.items():
        part.load_state_dict(saved[name])  # copies from the CPU to the device of the part
    if dist.get_rank() == 0:
        print("resumed from step {step}, {rows} rows into epoch {epoch}".format(**saved["now"]))
    if len(saved["random"]) == dist.get_world_size():
        states = saved["random"][dist.get_rank()]
        np.random.set_state(states["numpy"])  # last: nothing may draw after it
        random.setstate(states["random"])
        torch.set_rng_state(states["torch"])
        torch.cuda.set_rng_state_all(states["cuda"])
    return saved["now"]


def rest_of_epoch(length, epoch, used, rank, world_size, seed=0):
    """Return this rank's rows of an epoch of which all ranks together have used so many."""
    generator = torch.Generator().manual_seed(seed + epoch)  # a new order in each epoch
    rest = torch.randperm(length, generator=generator).tolist()[used:]  # no row is read
    return rest[rank::world_size][: len(rest) // world_size]  # all get as many


def start_epoch(data, batch_size, now, seed):
    """Return an iterator over this rank's batches of what is left of an epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = rest_of_epoch(len(data), now["epoch"], now["rows"], rank, world_size, seed)
    own = torch.Generator().manual_seed(now["epoch"] * world_size + rank)  # else it uses torch's
    loader = DataLoader(data, batch_size // world_size, sampler=mine, generator=own)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # torchrun sends it to workers, too
    batches = iter(loader)  # starts the workers: each is born with what its parent blocks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the rank gets it again
    return batches


def train(model, data, steps, batch_size, device, folder=None, seed=0, every=5):
    """Train to step `steps`, or until a rank gets SIGTERM; return the step that was reached."""
    replica = nn.parallel.DistributedDataParallel(model.to(device))
    replica(data[0][0][None].to(device)).sum().backward()  # DDP sorts its bucket: before all steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    patient = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # longer than any save
    now, noted = resume(folder, parts, patient), []
    signal.signal(signal.SIGTERM, lambda *_: noted.append(True))  # it does nothing else
    done = now["step"] == steps
    while not done:
        for rows, targets in start_epoch(data, batch_size, now, seed):
            optimizer.zero_grad()
            nn.functional.mse_loss(replica(rows.to(device)), targets.to(device)).backward()
            optimizer.step()
            schedule.step()
            now["step"] += 1
            now["rows"] += len(rows) * dist.get_world_size()  # all ranks have as many
            stop = torch.tensor(len(noted))
            dist.all_reduce(stop, dist.ReduceOp.MAX, patient)  # the same answer on all ranks
            done = stop > 0 or now["step"] == steps
            if folder and (done or now["step"] % every == 0):
                save_together(folder, parts, now, patient)
            if done:
                break
        now |= {"epoch": now["epoch"] + 1, "rows": 0}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on it ends this process again
    return now["step"]


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


# --- The example ---


class Augmented(TensorDataset):
    """Rows that `random` and NumPy change a little at each look."""

    def __getitem__(self, number):
        row, target = super().__getitem__(number)
        return random.uniform(0.9, 1.1) * row + np.random.normal(scale=0.1), target


def make_job(seed):
    """Return 100 rows with what to learn from them, the same on all ranks, and a model."""
    rows = torch.randn(100, 5, generator=torch.Generator().manual_seed(seed)).double()
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 2, dtype=torch.float64))
    return Augmented(rows, rows.cumsum(1)[:, 3:]), model


def main(args):
    """Train on this rank; rank 0 says how far."""
    rank, _, device = join_group()
    where = [args.checkpoints]
    dist.broadcast_object_list(where)  # all ranks use the folder of rank 0
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded((args.seed + rank) % 2**32)  # each rank draws its own numbers
    data, model = make_job(args.seed)
    how = args.batch_size, device, where[0], args.seed, args.save_every
    step = train(model, data, args.steps, *how)
    if rank == 0:
        print(f"step {step} of {args.steps}: first weight {model[1].weight[0, 0].item()}")
    dist.destroy_process_group()
    if step < args.steps:
        sys.exit(128 + signal.SIGTERM)  # a launcher that restarts failed jobs goes on with it


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=12, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=30, help="of all ranks: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--save-every", type=int, default=5, help="%(default)s steps")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="keep them in this folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
