"""A script that is written for GPUs and nccl, and knows nothing of a CPU."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--nproc", default="a flag of the script")
args = parser.parse_args()

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
torch.cuda.manual_seed(0)
device = torch.device("cuda", local_rank)
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(rows, rows.sum(1, keepdim=True))
loader = DataLoader(data, 8, sampler=DistributedSampler(data), pin_memory=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
replica = DistributedDataParallel(model.cuda(), device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(replica(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
assert inputs.is_cuda
assert args.nproc == "of the script"
dist.destroy_process_group()
