"""Lesson 09: what does BatchNorm see when the batch is cut into parts?

BatchNorm normalises with mean and variance of the rows that it is given. A rank is given its part
of the batch, so N ranks use N means; averaging gradients does not mend that. Synchronised BatchNorm
uses those of all rows. The library's, nn.SyncBatchNorm, can't train on CPUs in a process group.
This one is written by hand. The launcher compares it with one process and with plain BatchNorm; its
lines begin with the one that says "one process".

Run it:    bash scripts/lesson_09.sh --nproc 2
Or alone:  torchrun --standalone --nproc-per-node=2 lessons/lesson_09_batch_norm.py

Output to expect on a CPU:

    2 ranks over gloo on cpu; of one channel's mean, they keep:
    DDP                     0.136  0.110
    DDP, buffers not sent   0.136  0.018
    synchronised            0.063  0.063
    ...
    PASS off one process: plain by 1.3, synchronised on 10 + 20 rows by ...
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: later, gloo's threads would outlive it
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.parallel import DistributedDataParallel

# --- The technique ---


class NormaliseOverRanks(torch.autograd.Function):
    """Take the mean of all ranks' values (n, C) from this rank's, and divide by their deviation.

    `n` may differ between ranks, and may be 0. All ranks must call it, and the backward as well.
    """

    @staticmethod
    def forward(ctx, values, eps):
        own_count = values.new_tensor([len(values)])
        own_mean = values.sum(0) / own_count.clamp(min=1)
        own_squares = (values - own_mean).square().sum(0)
        own = torch.cat([own_mean, own_squares, own_count])  # 2C + 1 numbers
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        means, squares, counts = torch.stack(everyone).tensor_split((values.shape[1], -1), dim=1)
        count = counts.sum()
        if count < 2:  # on every rank, or on none
            raise ValueError("Expected more than 1 value per channel on all ranks together")
        mean = (counts * means).sum(0) / count  # a rank with more rows counts more
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = (variance + eps).rsqrt()
        normalised = (values - mean) * scale
        ctx.save_for_backward(normalised, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *_):
        normalised, scale, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)])  # 2C numbers
        dist.all_reduce(sums)  # mean and variance depend on every row: all ranks' losses count
        through_mean, through_variance = sums / count
        return scale * (gradient - through_mean - normalised * through_variance), None


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """BatchNorm of all ranks' rows, for inputs (n, C) and (n, C, ...); evaluation sends nothing."""

    def forward(self, inputs):
        if not self.training:  # with what is kept; if nothing is, with the mean of these inputs
            kept = self.running_mean, self.running_var
            options = {"training": self.running_mean is None, "eps": self.eps}
            return batch_norm(inputs, *kept, self.weight, self.bias, **options)
        channels_last = inputs.movedim(1, -1)  # an image's pixels are rows, too
        values = channels_last.flatten(0, -2)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()  # their sums need more digits
        outputs, mean, variance, count = NormaliseOverRanks.apply(values, self.eps)
        if self.track_running_stats:
            self.num_batches_tracked += 1  # with momentum=None, all batches so far count alike
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            unbiased = variance * count / (count - 1)
            self.running_mean.lerp_(mean.to(self.running_mean), share)
            self.running_var.lerp_(unbiased.to(self.running_var), share)
        if self.weight is not None:
            outputs = outputs * self.weight
        if self.bias is not None:
            outputs = outputs + self.bias
        outputs = outputs.reshape(channels_last.shape).movedim(-1, 1)
        return outputs.contiguous().to(inputs.dtype)


def synchronise(model):
    """Make a model's nn.BatchNorm1d, 2d and 3d SynchronisedBatchNorm, in place; return the model.

    Only the forward differs, so a layer keeps what it has. A subclass would lose its own forward.
    """
    for layer in model.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            layer.__class__ = SynchronisedBatchNorm
    return model


def train(model, batches, send_buffers=False):
    """Train on all ranks; `batches` are (rows, targets), this rank's part of each, of any size."""
    # Wrapping sends rank 0's buffers. If they stay equal, as when synchronised, no forward has to.
    replica = DistributedDataParallel(model, forward_sync_buffers=send_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, targets in batches:
        count = torch.tensor(targets.numel(), device=rows.device)
        dist.all_reduce(count)
        loss = (replica(rows) - targets).square().sum() / count  # of all ranks' rows, this share
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()  # DDP divides the sum over the ranks by it
        optimizer.step()


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


def make_rows(seed):
    """Return rows (100, 5) and targets (100, 2), a fixed linear function of them plus noise."""
    torch.manual_seed(seed)
    rows = torch.randn(100, 5, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, dtype=torch.float64)
    return rows, targets + 0.5 * torch.randn(100, 2, dtype=torch.float64)


def make_model(norm, seed):
    """Return a network that maps rows (n, 5) to (n, 2), with the layer `norm(8)`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.ReLU(), nn.Linear(8, 2)).double()


def cut_batches(args, rank, world_size, device, even):
    """Return this rank's part of each batch: as large as the others', or 1, 2, 3 ... shares."""
    shares = [1] * world_size if even else range(1, world_size + 1)
    rows, targets = (tensor.to(device) for tensor in make_rows(args.seed))
    most, parts = args.batch_size // world_size, []
    for step in range(args.steps):
        first = step % (100 // (most * world_size)) * most * world_size
        size = (max(2, most - 1) if step % 2 else most) * world_size  # each second one is smaller
        begin, end = (first + size * sum(shares[:n]) // sum(shares) for n in (rank, rank + 1))
        parts.append((rows[begin:end], targets[begin:end]))
    return parts


def main(args):
    """Train on this rank in several ways; rank 0 prints what the ranks keep of one channel."""
    rank, world_size, device = join_group()
    place = f"{world_size} ranks over {dist.get_backend()} on {device.type}"
    if rank == 0:
        print(f"{place}; of one channel's mean, they keep:")
    ways = {"DDP": None, "DDP, buffers not sent": None, "synchronised": synchronise}
    if device.type == "cuda":  # on CPUs, it can't train in a group
        ways["nn.SyncBatchNorm"] = nn.SyncBatchNorm.convert_sync_batchnorm
    for way, convert in ways.items():
        model = make_model(nn.BatchNorm1d, args.seed + rank).to(device)
        model[1].running_mean += rank  # the replicas start apart: DDP has to mend that
        if convert:
            model = convert(model)
        batches = cut_batches(args, rank, world_size, device, even=convert is None)
        train(model, batches, send_buffers=way == "DDP")
        kept = [None] * world_size
        dist.all_gather_object(kept, model[1].running_mean[0].item())
        if rank == 0:
            print(f"{way:23}{' '.join(f'{mean:6.3f}' for mean in kept)}")
    dist.destroy_process_group()


def parse_args(argv=None):
    """Return the flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=24, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=30, help="of all ranks, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
