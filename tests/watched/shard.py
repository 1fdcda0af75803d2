"""A clean script with fully_shard: each rank keeps a part of each parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(64, 6)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
