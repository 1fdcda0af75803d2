"""A clean script: DDP, two micro-batches, dropout, an evaluation, a schedule, a checkpoint."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def make_data(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(120, 6, generator=generator)
    labels = (rows @ torch.randn(6, 3, generator=generator)).argmax(1)
    data = TensorDataset(rows, labels)
    return Subset(data, range(83)), Subset(data, range(83, 120))


@torch.no_grad()
def evaluate(model, data, rank, world_size):
    model.eval()
    right = torch.zeros(2)
    mine = Subset(data, range(rank, len(data), world_size))
    for rows, labels in DataLoader(mine, 8):
        right += torch.tensor([(model(rows).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(right)
    model.train()
    return right[0] / right[1]


def main(path):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data, tests = make_data(0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, labels in loader:
            optimizer.zero_grad()
            parts = list(zip(rows.chunk(2), labels.chunk(2), strict=True))
            for number, (inputs, wanted) in enumerate(parts, 1):
                last = number == len(parts)
                with contextlib.nullcontext() if last else replica.no_sync():
                    loss = cross_entropy(replica(inputs), wanted, reduction="sum") / len(labels)
                    loss.backward()
            optimizer.step()
            schedule.step()
        score = evaluate(model, tests, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.2f}")
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(path, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
