"""A clean script with an IterableDataset that is split by rank and by worker."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Stream(IterableDataset):
    epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        part, parts = rank * worker.num_workers + worker.id, world_size * worker.num_workers
        rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        for row in rows[order[part::parts]]:
            yield row, row.sum(0, keepdim=True)


data = Stream()
loader = DataLoader(data, 4, num_workers=2)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    data.epoch = epoch
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
