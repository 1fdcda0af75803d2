"""A clean script in float16: autocast, a scaler, clipping; gradients are sent as bfloat16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def send_in(dtype, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(dtype)
    sent = dist.all_reduce(half, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = torch.randn(64, 5)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
replica = DistributedDataParallel(model)
replica.register_comm_hook(torch.bfloat16, send_in)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = replica(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
