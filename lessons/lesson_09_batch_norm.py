"""Lesson 09: what does BatchNorm see when the batch is cut into parts?

BatchNorm normalises with the mean and the variance of the rows that it is given. A
replica is given its part of the batch, so N replicas use N means. Evaluation uses
running averages of them: DataParallel keeps the master's. Under DDP each rank has its
own, and by default takes rank 0's before a forward, if the one before had gradients.
Synchronised BatchNorm first adds up sums over all ranks: two small all-reduces, and two
more in its backward.

Run it:     bash scripts/lesson_09.sh --nproc 2
Or alone:   python lessons/lesson_09_batch_norm.py --nproc 2

Output to expect on a CPU:

    2 ranks over gloo on cpu; one channel's mean:
                           used in step 1    kept after the last step
    one process             0.082             0.085
    DataParallel            0.118  0.046      0.134
    DDP                     0.118  0.046      0.134  0.135
    DDP, buffers not sent   0.118  0.046      0.134  0.049
    synchronised            0.082  0.082      0.085  0.085
    plain BatchNorm: DDP is DataParallel to ... (in step 1), and off one process by 0.278
    PASS synchronised BatchNorm on 10 + 20 rows is one process's (largest difference ...)
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Arguments(argparse.ArgumentParser):
    """The flags of all lessons. A bad value: one line on stderr, from rank 0, and exit code 2."""

    def __init__(self, text, **defaults):
        super().__init__(description=text, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, value in {**defaults, "seed": 0}.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
        self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        limits = {"nproc": (1, 64), "seed": (0, 2**32 - 1)}
        for name in ("nproc", "steps", "batch_size", "seed"):
            low, high = limits.get(name, (1, 10**6))
            if not low <= getattr(args, name, low) <= high:
                self.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" * (os.environ.get("RANK", "0") == "0"))

    def exit(self, status=0, message=""):
        if len(message) > 300:  # it repeats a long value
            message = f"{message[:200]} ... {message[-50:]}"
        super().exit(status, message)


def setup(backend=None, store=None):
    """Join the process group; return (rank, world_size, device) (claims A10, A12, B3, E12).

    The launcher's variables say who we are; without them we are a world of one, no address needed.
    nccl where each rank of this machine has its own GPU, else gloo. A group joined before is kept.
    """
    import torch.distributed.nn  # DDP would do it later, and then no gloo thread could ever end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            rank, world_size, store = 0, 1, dist.HashStore()
        backend = backend or ("nccl" if enough_gpus and dist.is_nccl_available() else "gloo")
        place = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group(backend, timeout=timedelta(minutes=2), **place)
    if dist.get_backend() != "nccl":
        return dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


def make_toy(seed):
    """Return the article's toy: 100 rows of 5 numbers, targets of width 2, and a layer 5 -> 2.

    The targets are a fixed linear function of the rows, plus noise: there is something to learn.
    float64: rounding is then so small that it can't hide a mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    targets = rows @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    targets += 0.5 * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rows, targets, model


def make_model(norm, seed):
    """Return a network that maps the toy's rows (n, 5) to (n, 2), with the layer `norm(8)`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.ReLU(), nn.Linear(8, 2)).double()


# --- New in this lesson ---


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, with a gradient.

    Each rank's sum depends on each rank's tensor. So the gradient of one tensor is the sum of the
    gradients of all those sums: the backward is an all-reduce too, and all ranks must call it.
    """

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def batch_statistics(rows):
    """Return mean (C,), variance (C,) and number of the rows (n, C) of all ranks together.

    `n` may differ between ranks, and may be 0. Two all-reduces: C + 1 numbers, then C. With the
    sums of squares in the first, one would do, but E[x^2] - E[x]^2 loses digits if the mean is
    large. Raises ValueError, on all ranks, for less than two rows.
    """
    sums = SumOverRanks.apply(torch.cat([rows.sum(0), rows.new_tensor([len(rows)])]))
    count = sums[-1].item()  # the same on every rank, so all go on or all raise
    if count < 2:
        raise ValueError(f"Expected more than 1 row on all ranks together, got {count:.0f}")
    mean = sums[:-1] / count
    return mean, SumOverRanks.apply((rows - mean).square().sum(0)) / count, count


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """BatchNorm of rows (n, C) that acts like the whole batch (claim A7), also on CPUs."""

    def forward(self, rows):
        if not self.training:
            return super().forward(rows)
        mean, variance, count = batch_statistics(rows)
        with torch.no_grad():  # the same numbers on every rank: the running statistics stay equal
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)  # unbiased
        return (rows - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def data_parallel(model, rows, replicas):
    """Return the outputs of lesson 01's DataParallel, computed in one process.

    The replicas share the parameters, so autograd adds up their gradients. All but the master,
    which has the first part, write their running statistics into copies that are lost (claim A7).
    """
    first, *others = rows.chunk(replicas)
    outputs = [model(first)]
    for part in others:
        copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs.append(torch.func.functional_call(model, copies, (part,)))
    return torch.cat(outputs)


# --- The experiment ---


def flat(tensors):
    """Return a copy of all numbers of some tensors, as one vector on the CPU."""
    return torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


def mean_used(rows, outputs):
    """Return the mean (C,) with which a new BatchNorm made `outputs` of `rows` (n, C), n > 1.

    Solved from outputs = (rows - mean) / scale, at the smallest and the largest row.
    """
    (low, high), (low_output, high_output) = rows.aminmax(dim=0), outputs.aminmax(dim=0)
    return low - (high - low) / (high_output - low_output) * low_output


def train(model, forward, batches, part=slice(None), ranks=1):
    """Train on `part` of each batch; return what this rank had in step 1, and at the end.

    DDP divides the sum of the gradients by `ranks`, but the mean is over the rows of all ranks.
    So the loss is a sum, times ranks, divided by the whole batch. Parts may have different sizes.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, record = [], {}
    hook = model[1].register_forward_hook(lambda _, rows, outputs: seen.append((*rows, outputs)))
    for rows, targets in batches:
        optimizer.zero_grad()
        outputs = forward(rows[part])
        loss = (outputs - targets[part]).square().sum() * ranks / targets.numel()
        loss.backward()
        if not record:
            hook.remove()
            means = [mean_used(*pair)[0].item() if len(pair[0]) > 1 else None for pair in seen]
            record = {"used": means, "rows": len(outputs), "outputs": outputs.detach().cpu()}
            record |= {"gradient": flat(parameter.grad for parameter in model.parameters())}
            record |= {"kept in step 1": flat(model.buffers())}
        optimizer.step()
    return record | {"kept": flat(model.buffers()), "parameters": flat(model.parameters())}


def difference(records, one, names=("gradient", "parameters", "kept")):
    """Return the largest difference between the ranks' records and that of one process."""
    pairs = [(torch.cat([record["outputs"] for record in records]), one["outputs"])]
    pairs += [(record[name], one[name]) for record in records for name in names]
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()  # nan stays nan


def compare(cfg):
    """Train in each way from the same weights on the same batches; return what was measured.

    The first two ways need one process. With the synchronised ones, the ranks have parts of
    different sizes: 1, 2, 3 ... shares of a batch.
    """
    rank, world_size, device = setup()
    share = cfg.batch_size // world_size
    rows, targets, _ = make_toy(cfg.seed)
    rows, targets = (tensor.to(device).split(share * world_size) for tensor in (rows, targets))
    batches = list(zip(rows, targets, strict=True))[: 100 // (share * world_size)]  # full ones
    batches = [batches[step % len(batches)] for step in range(cfg.steps)]
    even = slice(share * rank, share * (rank + 1))
    uneven = slice(*(share * r * (r + 1) // (world_size + 1) for r in (rank, rank + 1)))
    ways = {
        "one process": (nn.BatchNorm1d, None),
        "DataParallel": (nn.BatchNorm1d, None),
        "DDP": (nn.BatchNorm1d, even),
        "DDP, buffers not sent": (nn.BatchNorm1d, even),
        "synchronised": (SynchronisedBatchNorm, uneven),
    }
    if device.type == "cuda":  # it refuses CPUs
        ways["nn.SyncBatchNorm"] = (nn.SyncBatchNorm, uneven)
    records, ours = {}, None
    for way, (norm, part) in ways.items():
        model = make_model(norm, cfg.seed).to(device)
        if part is None:
            replicas = 1 if way == "one process" else world_size
            forward = functools.partial(data_parallel, model, replicas=replicas)
            records[way] = [train(model, forward, batches)]
            continue
        # forward_sync_buffers, once broadcast_buffers: before a forward rank 0 sends its own, but
        # not after a forward without gradients, or inside no_sync. There is none of these here.
        ddp = DistributedDataParallel(model, forward_sync_buffers=way != "DDP, buffers not sent")
        ours, records[way] = train(model, ddp, batches, part, world_size), [None] * world_size
        dist.all_gather_object(records[way], ours)
    one = records["one process"][0]
    exact = [difference(records[way], one) for way in list(ways)[4:]]
    # In step 1 only: with few rows plain BatchNorm magnifies rounding, from step to step.
    master, ddp = records["DataParallel"][0], records["DDP"]
    start = [difference(ddp, master, ["gradient"])]
    start += [(ddp[0]["kept in step 1"] - master["kept in step 1"]).abs().max().item()]
    initial = flat(make_model(nn.BatchNorm1d, cfg.seed).parameters())
    return {
        "backend": dist.get_backend(),
        "device": device.type,
        "parts": [record["rows"] for record in records["synchronised"]],
        # Of the first channel: means used in step 1; running means and variances at the end.
        "used": {way: [mean for r in records[way] for mean in r["used"]] for way in ways},
        "kept": {way: [record["kept"][0].item() for record in records[way]] for way in ways},
        "kept_variance": {way: [r["kept"][8].item() for r in records[way]] for way in ways},
        "plain_diff": difference(records["DDP"], one),
        "ddp_diff": torch.tensor(start).max().item(),
        "sync_diff": torch.tensor(exact).max().item(),  # nan stays nan
        "param_change": (one["parameters"] - initial).abs().max().item(),
    }


def launch_job(cfg, func):
    """Call `func(cfg)` on `cfg.nproc` ranks; return what rank 0 returned (claims B4, C2)."""
    if cfg.nproc == 1:  # one device: no other process is needed
        result = func(cfg)
        dist.destroy_process_group()
        return result
    with tempfile.TemporaryDirectory() as cfg.folder:
        mp.spawn(run, args=(func, cfg), nprocs=cfg.nproc, join=True, daemon=True)
        return json.loads(Path(cfg.folder, "result.json").read_text())


def run(local_rank, func, cfg):
    """Be one rank: join the group in a file that only this job knows (not port 9999, C9)."""
    mp._prctl_pr_set_pdeathsig(9)  # Linux: SIGKILL for this rank if the launcher is killed
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(cfg.nproc))
    torch.set_num_threads(max(1, torch.get_num_threads() // cfg.nproc))  # share the cores
    setup(store=dist.FileStore(os.path.join(cfg.folder, "rendezvous"), cfg.nproc))
    try:
        result = func(cfg)
    except Exception:
        # mp.spawn names the rank that leaves first. The others lose this one, fail, and wait too.
        time.sleep(1)  # so the rank with the true cause leaves first
        raise
    if local_rank == 0:
        Path(cfg.folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()  # not in a `finally`: it would make the others fail first


def reason(error):
    """Return the line that says what went wrong in a rank, from the error that mp.spawn raised."""
    lines = str(error).strip().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[places[-1] + 1 :] if places else lines
    return next(line for line in after if not line.startswith(" "))


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=20, batch_size=30)
    args = parser.parse_args(argv)
    if not 2 * args.nproc <= args.batch_size <= 100:
        parser.error(f"argument --batch-size: must be from {2 * args.nproc}, 2 per rank, to 100")
    try:
        result = launch_job(args, compare)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nrank {error.error_index} failed: {reason(error)}")
    plain, sync = result["plain_diff"], result["sync_diff"]
    passed = sync < 1e-10 and result["ddp_diff"] < 1e-10 and (plain > 1e-3) == (args.nproc > 1)
    passed = passed and 0.0 < result["param_change"] < float("inf")
    print(f"{args.nproc} ranks over {result['backend']} on {result['device']}; one channel's mean:")
    width = max(18, 7 * args.nproc + 4)
    print(f"{'':23}{'used in step 1':{width}}kept after the last step")
    for way, used in result["used"].items():
        used = ["     -" if mean is None else f"{mean:6.3f}" for mean in used]  # too few rows
        kept = " ".join(f"{mean:6.3f}" for mean in result["kept"][way])
        print(f"{way:23}{' '.join(used):{width}}{kept}")
    print(f"plain BatchNorm: DDP is DataParallel to {result['ddp_diff']:.2g} (in step 1),", end=" ")
    print(f"and off one process by {plain:.3g}")
    parts = " + ".join(map(str, result["parts"]))
    verdict = f"{'PASS' if passed else 'FAIL'} synchronised BatchNorm on {parts} rows"
    print(f"{verdict} is one process's (largest difference {sync:.2g})")
    if args.json:
        print(json.dumps({"lesson": 9, "world_size": args.nproc, "passed": passed} | result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
