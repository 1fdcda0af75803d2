"""A clean script whose loader workers draw random numbers, other ones on each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Noisy(Dataset):
    rows = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return row + 0.1 * torch.randn(5), row.sum(0, keepdim=True)


torch.manual_seed(rank)
sampler = DistributedSampler(Noisy())
loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=2)
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
