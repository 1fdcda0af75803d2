"""Ten jobs that hang or fail, the patients of lesson 19, and a healthy one.

One of the ten, early_stop, is the script's.

Each is one rank of a job, and nothing in it knows that it is watched. By hand, as in life:

    torchrun --standalone --nproc-per-node=3 lessons/proofs/patients.py both_send --files FOLDER
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parent.parent))
from lesson_19_hang_clinic import be_one_of, early_stop, parse_args


def healthy(rank, world_size, steps, rows):
    """Train, and nothing is wrong: no tool may find anything here."""
    model = nn.Linear(4, 1)
    for _ in range(steps):
        model(torch.randn(rows, 4)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / world_size
            parameter.grad = None
    dist.barrier()


def rank_zero_only(rank, world_size, steps, rows):
    """Train, then let rank 0 print the mean loss."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.randn(rows, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    if rank == 0:
        total = loss.detach()
        dist.all_reduce(total)
        print(f"mean loss {total / world_size:.3f}")
    dist.barrier()


def uneven_batches(rank, world_size, steps, rows):
    """Train on rows that are dealt out like cards; the last batch may be smaller."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(world_size * steps * rows + 1, 4)
    mine = data[rank::world_size]
    for batch in mine.split(rows):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()


class TwoHeads(nn.Module):
    """A model with a head for rare rows, which is not called if there are none."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, batch, rare):
        out = self.usual(batch)
        if rare.any():
            out = out + self.rare(batch) * rare
        return out


def unused_branch(rank, world_size, steps, rows):
    """Train the model with two heads; one row in four is rare, if there is one at all."""
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        batch = torch.randn(rows, 4)
        rare = (torch.arange(rows) % 4 == 0).float()[:, None]
        if step == 1 and rank == world_size - 1:
            rare.zero_()
        loss = model(batch, rare).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()


def validation(rank, world_size, steps, rows):
    """Train with BatchNorm; after each epoch rank 0 looks at rows that it has not trained on."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held_back = torch.randn(rows, 4)
    for _ in range(2):
        for _ in range(steps):
            loss = model(torch.randn(rows, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            print(f"validation loss {model(held_back).square().mean():.3f}")
            model.train()
    dist.barrier()


def both_send(rank, world_size, steps, rows):
    """Two neighbours swap the edges of their parts; then all add up what is left to do."""
    part, edge = torch.randn(rows, 4), torch.empty(4)
    for _ in range(steps):
        residual = part.square().mean()
        if rank < 2:
            neighbour = 1 - rank
            dist.send(part[-1], neighbour)
            dist.recv(edge, neighbour)
            part[-1] = (part[-1] + edge) / 2
        dist.all_reduce(residual)
        part *= 0.9
    dist.barrier()


def group_order(rank, world_size, steps, rows):
    """Add up two kinds of gradients, each in a group of its own."""
    limit = timedelta(seconds=2.5)  # else half an hour: a new group does not inherit the limit
    dense, sparse = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    work = [(dense, torch.randn(rows)), (sparse, torch.randn(rows))]
    if rank == world_size - 1:
        work.reverse()
    for _ in range(steps):
        for group, gradient in work:
            dist.all_reduce(gradient, group=group)
            gradient /= world_size
    dist.barrier()


def other_shape(rank, world_size, steps, rows):
    """Predict each rank's part of the rows, and gather the predictions everywhere."""
    model, data = nn.Linear(4, 1), torch.randn(world_size * rows + 1, 4)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    first = rank * rows
    last = first + rows if rank < world_size - 1 else len(data)
    for _ in range(steps):
        with torch.no_grad():
            predicted = model(data[first:last])
        parts = [torch.empty_like(predicted) for _ in range(world_size)]
        dist.all_gather(parts, predicted)
    dist.barrier()


class Rows(Dataset):
    """Rows of a file. One of them takes long to decode, and needs more memory than there is."""

    def __init__(self, count, too_large):
        self.count, self.too_large = count, too_large

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.too_large:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is full
        return torch.randn(4)


def dead_loader(rank, world_size, steps, rows):
    """Train on rows that a worker process reads."""
    model = nn.Linear(4, 1)
    count = (steps + 1) * rows
    data = Rows(count, count - 1 if rank == world_size - 1 else None)
    loader = DataLoader(data, rows, num_workers=1)
    for batch in loader:
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / world_size
            parameter.grad = None
    dist.barrier()


def read(name):
    """Return the rows of a file, which takes a moment."""
    time.sleep(0.25)  # the disk turns
    return torch.randn(8, 4)


def score(rows):
    """Return how good the rows are, which takes a moment."""
    time.sleep(0.25)  # numbers are crunched
    return rows.square().mean()


def slow_rank(rank, world_size, steps, rows):
    """Train; one rank also has files to look at, and takes the time that it takes."""
    gradient = torch.randn(rows)
    for step in range(steps):
        if step == 1 and rank == world_size - 1:
            for number in range(20):
                batch = read(f"file_{number}")
                best = score(batch)
        dist.all_reduce(gradient)
        gradient /= world_size
    if rank == world_size - 1 and steps > 1:
        print(f"the last score is {best:.3f}")
    dist.barrier()


class Patient(NamedTuple):
    """A job, the ranks that are guilty (-1: the last one), the line that gives them away, and why.

    The line is where a guilty rank does what the others do not, or does not do what they do.
    """

    job: object
    guilty: tuple
    line: str
    why: str


PATIENTS = (
    Patient(early_stop, (-1,), "dist.barrier()", "a rank leaves the loop by its own loss"),
    Patient(rank_zero_only, (0,), "dist.all_reduce(total)", "only rank 0 adds up the losses"),
    Patient(uneven_batches, (0,), "loss.backward()", "rank 0 has a batch more than the others"),
    Patient(unused_branch, (-1,), "loss = model(", "a rank leaves out a part of DDP's model"),
    Patient(validation, (0,), "model(held_back)", "rank 0 validates through DDP with buffers"),
    Patient(both_send, (0, 1), "dist.send(", "two neighbours both send first"),
    Patient(group_order, (-1,), "dist.all_reduce(", "a rank takes two groups in the other order"),
    Patient(other_shape, (-1,), "dist.all_gather(", "a rank gathers one row more than the others"),
    Patient(dead_loader, (-1,), "in loader", "a process that reads a rank's rows is killed"),
    Patient(slow_rank, (), "", "nobody is guilty: a rank is at work, for long"),
)
PATIENTS = {patient.job.__name__: patient for patient in PATIENTS}


def job_of(name):
    """Return the job of a patient, or the healthy one."""
    return PATIENTS[name].job if name in PATIENTS else healthy


if __name__ == "__main__":
    be_one_of(job_of(sys.argv[1]), parse_args(sys.argv[2:]))
