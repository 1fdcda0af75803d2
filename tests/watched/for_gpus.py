"""A script that is written for GPUs and nccl, and knows nothing of a CPU."""

import argparse
import os
import threading

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


class Back(torch.autograd.Function):
    """Its backward asks for a GPU."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(device)


def all_else_that_a_script_may_ask():
    """Streams, memory, generators, default devices, threads, and a group of its own."""
    with torch.cuda.stream(torch.cuda.Stream()), torch.device(device):
        assert torch.zeros(2).sum() == 0
    torch.set_default_device("cuda")
    assert torch.ones(2).sum() == 2
    torch.set_default_device("cpu")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.current_stream().record_event()
    end.synchronize()
    assert f"{begin.elapsed_time(end) / 1000:.1f}" == "0.0"
    assert torch.cuda.memory_summary() and not torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    torch.randn(2, generator=torch.Generator(device).manual_seed(0), device=device)
    assert nn.DataParallel(nn.Linear(2, 2).cuda())(torch.ones(3, 2).cuda()).shape == (3, 2)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2).cuda()))
    thread.start()
    thread.join()
    mean = torch.full((3,), float(local_rank), device=device)
    dist.all_reduce(mean, dist.ReduceOp.AVG, dist.new_group(backend="nccl"))
    assert found and mean.tolist() == [0.5] * 3


all_else_that_a_script_may_ask()
for _ in range(2):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(Back.apply(replica(inputs)), targets)
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
