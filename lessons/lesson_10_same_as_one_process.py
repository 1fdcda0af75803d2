"""Lesson 10: what must hold so that N ranks train exactly as one process?

Each condition is kept once and removed once, in float64. The numbers say how far the
parameters end from those of one process (evaluation: the loss; accumulation: the gradient).
New: weights by count, no_sync, join; and train_digits, for the notebook's last question.

Run it:     bash scripts/lesson_10.sh --nproc 2
Or alone:   python lessons/lesson_10_same_as_one_process.py --nproc 2

Output to expect on a CPU:

    2 ranks over gloo on cpu, 24 rows in a step; off by, if kept, and if removed:
    a part of its own for each rank    ...e-1...   0.163
    ...
    bytes for the all-reduce, 4 micro-batches: 96 with no_sync, 384 without
    PASS 2 ranks equal one process (off by ...); a removed condition is off by 1.3e-02 or more
"""

import argparse
import contextlib
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
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


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


# --- New in this lesson ---

mean_loss = nn.functional.mse_loss


class Job:
    """One training, done twice: by one process with whole batches, by ranks with parts of them."""

    def __init__(self, rank, world_size, device, steps=12, batch_size=24, seed=0):
        self.rank, self.world_size, self.device, self.seed = rank, world_size, device, seed
        self.rows, self.targets, _ = (part.to(device) for part in make_toy(seed))
        self.total = batch_size // world_size * world_size  # rows in a step, of all ranks
        self.steps, self.epoch = steps, 100 // self.total  # an epoch has this many steps
        self.whole, self.parts = self.deal(0, 1), self.deal(rank, world_size)

    def start(self, seed=0):
        """Return the toy's layer with its first weights; another `seed` gives others."""
        return make_toy(self.seed + seed)[2].to(self.device)

    def deal(self, rank, world_size, new_order=True):
        """Return row numbers for each step, as DistributedSampler deals them to a rank (B5)."""
        rows = range(self.epoch * self.total)  # each step is full, so nothing is padded
        sampler = DistributedSampler(rows, world_size, rank, seed=self.seed)
        size, batches = self.total // world_size, []
        for step in range(self.steps):
            sampler.set_epoch(step // self.epoch if new_order else 0)
            batches.append(list(sampler)[step % self.epoch * size :][:size])
        return batches

    def train(self, model, batches, weighted=False, mask=None):
        """Update with each batch of row numbers; return the parameters, one vector.

        `weighted`: a mean loss counts as often as it has rows. `mask(step, numbers)` is dropout's.
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, numbers in enumerate(batches):
            rows = self.rows[numbers] * (mask(step, numbers).to(self.device) if mask else 1)
            loss = mean_loss(model(rows), self.targets[numbers])
            optimizer.zero_grad()
            # DDP will divide by the number of ranks. So each row is left with 1 / rows of all.
            (loss * (len(numbers) * self.world_size / self.total if weighted else 1)).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def off(self, batches, model=None, whole_mask=None, **options):
        """Return how far the ranks' parameters end from those of one process, at most."""
        ranks = self.train(model or DistributedDataParallel(self.start()), batches, **options)
        return worst(ranks - self.train(self.start(), self.whole, mask=whole_mask))


def worst(differences):
    """Return the largest of the differences, over all ranks, as a float."""
    largest = differences.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # one number from each rank
    return largest.item()


def cut_unevenly(job):
    """Return this rank's part of each batch if rank 0 takes more rows than the others."""
    small = job.total // job.world_size // 2
    sizes = [job.total - small * (job.world_size - 1)] + [small] * (job.world_size - 1)
    return [torch.tensor(whole).split(sizes)[job.rank].tolist() for whole in job.whole]


def mask_of_row(step, numbers):
    """Return a dropout mask (rows, 5) of 0 and 2 that depends on step and row, on no rank."""
    seeds = [torch.Generator().manual_seed(100 * step + number) for number in numbers]
    return 2.0 * torch.stack([torch.rand(5, generator=seed) < 0.5 for seed in seeds])


def evaluate(job, numbers):
    """Return the mean loss of the toy's first weights over the rows `numbers` of all ranks (C4)."""
    losses = mean_loss(job.start()(job.rows[numbers]), job.targets[numbers], reduction="none")
    sums = torch.stack([losses.sum(), torch.ones_like(losses).sum()]).detach()
    dist.all_reduce(sums)  # two numbers from each rank: a sum, and of how many
    return sums[0] / sums[1]


def join_the_end(job, divide_by_all):
    """Let rank 0 train one batch more than the others (B7); return how far it is from one process.

    Inside join, a rank without a batch answers the all-reduce of the others with zeros. The sum
    is divided by the number of all ranks, or of those that still have rows.
    """
    end, replica = job.epoch - 1, DistributedDataParallel(job.start())
    with replica.join(divide_by_initial_world_size=divide_by_all):
        job.train(replica, job.parts[: end + (job.rank == 0)])
    alone = job.train(job.start(), [*job.whole[:end], job.deal(0, job.world_size)[end]])
    return worst(nn.utils.parameters_to_vector(replica.parameters()) - alone)


def accumulate(job, sync_always=False, divide=True):
    """Make one gradient of an epoch's micro-batches; return (how far off, bytes for all-reduce).

    With no_sync, each rank adds up its gradients; only the last backward() averages over ranks.
    `sync_always` averages in each of them. Without `divide`, the losses are added, not averaged.
    """
    replica, alone, sent = DistributedDataParallel(job.start()), job.start(), []

    def count_bytes(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)  # what DDP does without a hook

    replica.register_comm_hook(None, count_bytes)
    for number, part in enumerate(job.parts[: job.epoch], 1):
        wait = number < job.epoch and not sync_always
        with replica.no_sync() if wait else contextlib.nullcontext():  # around the forward, too
            loss = mean_loss(replica(job.rows[part]), job.targets[part])
            (loss / (job.epoch if divide else 1)).backward()
    everything = torch.tensor(job.whole[: job.epoch]).flatten()
    mean_loss(alone(job.rows[everything]), job.targets[everything]).backward()
    gradients = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (replica, alone))
    return worst(next(gradients) - next(gradients)), sum(sent)


def try_conditions(job):
    """Return {condition: (how far off if it is kept, if it is removed)}, the same on all ranks."""
    rank, ranks, wrap = job.rank, job.world_size, DistributedDataParallel
    equal, uneven = job.off(job.parts), cut_unevenly(job)
    row_masks = job.off(job.parts, mask=mask_of_row, whole_mask=mask_of_row)
    torch.manual_seed(job.seed + rank)  # the masks of nn.Dropout come from this random state
    own_masks = job.off(job.parts, wrap(nn.Sequential(nn.Dropout(0.5), job.start())), mask_of_row)
    apart = job.off(job.parts, wrap(job.start(rank), init_sync=False))
    repaired = job.off(job.parts, wrap(job.start(rank)))  # rank 0's weights are sent to all
    exact = mean_loss(job.start()(job.rows[: ranks + 1]), job.targets[: ranks + 1])
    padded = list(DistributedSampler(range(ranks + 1), ranks, rank, shuffle=False))
    once = evaluate(job, range(rank, ranks + 1, ranks))
    return {
        "a part of its own for each rank": (equal, job.off(job.deal(0, ranks))),
        "equal parts": (equal, job.off(uneven)),
        "uneven parts: weights by count": (job.off(uneven, weighted=True), job.off(uneven)),
        "the same first weights": (repaired, apart),
        "set_epoch: the same new order": (equal, job.off(job.deal(rank, ranks, new_order=False))),
        "dropout: a mask of the row": (row_masks, own_masks),
        "evaluation: each row once": (worst(once - exact), worst(evaluate(job, padded) - exact)),
        "join: divide by those at work": (join_the_end(job, False), join_the_end(job, True)),
        "accumulation: divided losses": (accumulate(job)[0], accumulate(job, divide=False)[0]),
    }


def train_digits(batch_size, rate, warm_up=0, seed=0, epochs=30):
    """Train on 1,024 digits in one process; return the accuracy on the other 773.

    In the first `warm_up` epochs the rate rises to `rate`, from the one for 32 rows (1706.02677).
    """
    digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.data)[order] / 16, torch.tensor(digits.target)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    start, steps = 32 / batch_size if warm_up else 1, warm_up * 1024 // batch_size
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start, total_iters=steps)
    for _ in range(epochs):
        for batch in torch.randperm(1024).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return (model(images[1024:]).argmax(1) == labels[1024:]).double().mean().item()


# --- The experiment ---


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


def measure(cfg):
    """Try all conditions on this rank; return what all ranks measured together, as a dict."""
    rank, world_size, device = setup()
    job = Job(rank, world_size, device, cfg.steps, cfg.batch_size, cfg.seed)
    trained = job.train(DistributedDataParallel(job.start()), job.parts)
    return {
        "backend": dist.get_backend(),
        "device": device.type,
        "rows_per_step": job.total,
        "param_change": worst(trained - job.train(job.start(), [])),
        "off": try_conditions(job),
        "bytes": [accumulate(job)[1], accumulate(job, sync_always=True)[1]],
    }


def reason(error):
    """Return the line that says what went wrong in a rank, from the error that mp.spawn raised."""
    lines = str(error).strip().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[places[-1] + 1 :] if places else lines
    return next(line for line in after if not line.startswith(" "))


def main(argv=None):
    """Run the lesson; return 0 if its claim holds, else 1."""
    parser = Arguments(__doc__, nproc=2, steps=12, batch_size=24)
    args = parser.parse_args(argv)
    epoch = 100 // max(1, args.batch_size // args.nproc * args.nproc)
    for name, low, high in (("batch_size", 2 * args.nproc, 50), ("steps", epoch + 1, 10**6)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name.replace('_', '-')}: must be from {low} to {high}")
    try:
        result = launch_job(args, measure)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nrank {error.error_index} failed: {reason(error)}")
    print(f"{args.nproc} ranks over {result['backend']} on {result['device']}", end=", ")
    print(f"{result['rows_per_step']} rows in a step; off by, if kept, and if removed:")
    for name, (kept, removed) in result["off"].items():
        print(f"{name:34} {kept:7.1e} {removed:7.3g}")
    once, always = result["bytes"]
    print(f"bytes for the all-reduce, {epoch} micro-batches: {once} with no_sync, {always} without")
    pairs = result["off"].values()
    limit = 1e-6 if args.nproc > 1 else -1  # one rank has no other to differ from
    passed = all(kept < 1e-12 and removed > limit for kept, removed in pairs)
    passed = passed and 0 < result["param_change"] < float("inf") and 0 < once == always / epoch
    kept, removed = max(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    print(f"{'PASS' if passed else 'FAIL'} {args.nproc} ranks equal one process", end=" ")
    damage = f"is off by {removed:.1e} or more" if args.nproc > 1 else "can't be seen by one rank"
    print(f"(off by {kept:.1e}); a removed condition {damage}")
    if args.json:
        print(json.dumps({"lesson": 10, "world_size": args.nproc, "passed": passed} | result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
