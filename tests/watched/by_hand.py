"""A clean script that averages gradients by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = torch.randn(64, 5)
data = TensorDataset(rows, 9 * rows.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
