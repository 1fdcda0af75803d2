"""Lesson 11: how fast is it, and how fast would it be on another machine?

One process, DataParallel (n threads) and DDP (n processes) compute the gradient of one batch
in turn, with equally many compute threads. One model is heavy in Python, one in arithmetic.
Bytes are counted. A cost model, fitted on some sizes, tested on others, predicts the speed-up.

Run it: bash scripts/lesson_11.sh --nproc 4 [--steps REPEATS]
A link: --link LATENCY_US GB_PER_S DEVICES (microseconds per message, 10^9 bytes per second)

Output to expect on a CPU:

    4 workers over gloo on cpu, threads each: ..., CPU cores: ...
    many small layers, 1 x one process: ... ms (... to ...), speed-up 1
    ...
    PASS each gradient is that of one process (difference ...); ...bytes...; cost model: wrong ...
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SHAPES = {"many small layers": (100, 16), "few large layers": (4, 512)}  # (layers, width)
VARIANTS = ("one process", "DataParallel", "DDP", "share alone")  # the last is for predictions
SIZES = [2**power for power in range(12, 25, 2)]  # bytes, 4 kB to 16 MB; every second one is fitted
UNDISTURBED = 0.9  # of the processor time that an idle machine gives: less is disturbed
LINKS = [[10, 16, 8], [10, 150, 8], [20, 12.5, 256]]  # PCIe 3.0 x16, NVLink, 100 Gbit/s


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


# --- New in this lesson ---
def all_reduce_cost(n, size):
    """Return (messages, bytes) that each of n ranks sends when a ring all-reduces `size` bytes."""
    return 2 * (n - 1), 2 * (n - 1) / n * size


def predict_all_reduce(link, n, size):
    """Return seconds. `link`: the price of sending, (seconds per message, seconds per byte)."""
    return sum(price * much for price, much in zip(link, all_reduce_cost(n, size), strict=True))


def fit_link(times):
    """Return the link with the least squared relative error on `times`, [(n, bytes, seconds)]."""
    from sklearn.linear_model import LinearRegression  # not for the ranks: it takes long to import

    costs = [[much / seconds for much in all_reduce_cost(n, size)] for n, size, seconds in times]
    fit = LinearRegression(fit_intercept=False, positive=True).fit(costs, [1.0] * len(times))
    return fit.coef_.tolist()  # positive: no price is below 0


def predict_speedup(alone, share, sending):
    """Estimate the speed-up (if nothing overlaps, if all does). `alone`: one worker's time."""
    return alone / (share + sending), alone / max(share, sending)


def make_problem(shape, batch_size, seed, device):
    """Return (model, rows, targets), in float64; random rows are cheap on purpose (claim C10)."""
    layers, width = SHAPES[shape]
    torch.manual_seed(seed)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    for linear in parts[::2]:
        nn.init.orthogonal_(linear.weight)  # else no gradient would reach the first of 100 layers
    rows, targets = torch.randn(2, batch_size, width, dtype=torch.float64).to(device)
    return nn.Sequential(*parts).to(device, torch.float64), rows, targets


def backward(network, rows, targets, weight):
    """Leave the gradient of `weight` times the summed squared error in the parameters."""
    network.zero_grad()
    (nn.functional.mse_loss(network(rows), targets, reduction="sum") * weight).backward()


def data_parallel(model, rows, targets, n, sent):
    """Return a function that leaves the gradient in `model`: n threads of one process (A3, A6)."""
    replicas = [model, *(copy.deepcopy(model) for _ in range(n - 1))]
    pool = ThreadPoolExecutor(n, "", torch.set_num_threads, [torch.get_num_threads()])
    sides = [[*replica.parameters()] for replica in replicas]  # kept, unlike in lesson 01
    both = [pair for other in sides[1:] for pair in zip(sides[0], other, strict=True)]
    batches = rows.tensor_split(n), targets.tensor_split(n), [1 / targets.numel()] * n

    def compute():
        for ours, theirs in both:  # the master sends all parameters to each replica
            theirs.data.copy_(ours.data)
            sent["parameters"] += ours.nbytes
        list(pool.map(backward, replicas, *batches))
        for ours, theirs in both:  # and it receives all gradients of each replica
            ours.grad += theirs.grad
            sent["gradients"] += theirs.grad.nbytes

    return compute


def make_variant(name, model, rows, targets, n, rank, group, sent):
    """Return a function that leaves the gradient of the mean squared error in `model` (E6)."""
    if name == "DataParallel" and not rows.is_cuda:
        return data_parallel(model, rows, targets, n, sent)
    part, wanted, weight = rows, targets, 1 / targets.numel()
    if name == "DataParallel":
        model = nn.DataParallel(model, list(range(n)))
    if name in ("DDP", "share alone"):
        part, wanted = rows.tensor_split(n)[rank], targets.tensor_split(n)[rank]
    if name == "DDP":
        # It divides the sum over the ranks by n. Times n, it is right for unequal parts as well.
        model, weight = nn.parallel.DistributedDataParallel(model, process_group=group), n * weight
    return lambda: backward(model, part, wanted, weight)


def time_calls(call, count):
    """Return the mean seconds of `count` calls, after one call that is not counted."""
    ends = []
    for _ in range(count + 1):
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / count


def bytes_written():
    """Return how many bytes this process has written, also to sockets; None without /proc."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[3]) if counts.exists() else None


def count_cores():
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor_share(seconds=0.01):
    """Compute for a while; return processor time / time on the clock: 1 on an idle machine."""
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + seconds:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - start)


def ask_processor(rank, control):
    """Return [processor_share()] of one rank for each core, all at the same time; else []."""
    shares = [processor_share()] if rank < count_cores() else []
    dist.barrier(control)
    return shares


def measure(cfg):
    """Measure on all ranks, variant after variant; return what all ranks have seen, as a dict."""
    torch.set_num_threads(cfg.threads)  # first: new threads inherit it
    rank, world_size, device = setup()
    control = dist.new_group(backend="gloo")  # who waits in its barrier keeps no core busy
    workers = sorted({n for n in (1, 2, 4, 8, 16, 32, world_size) if n <= world_size})
    groups = {n: dist.new_group(list(range(n))) for n in workers}
    times, ours, shares = [], {}, []
    for n, size in [(n, size) for n in workers[1:] for size in SIZES]:
        shares += ask_processor(rank, control)
        if rank < n:
            call = partial(dist.all_reduce, torch.zeros(size // 4, device=device), group=groups[n])
            times += [[n, size, statistics.median(time_calls(call, 3) for _ in range(cfg.steps))]]
        dist.barrier(control)
    turns = [(shape, n, name) for shape in SHAPES for n in workers for name in VARIANTS]
    for shape, n, name in turns:
        if rank == 0 or (name == "DDP" and rank < n):
            whole, *batch = make_problem(shape, cfg.batch_size, cfg.seed, device)
            facts = {"shape": shape, "workers": n, "variant": name, "rank": rank, "seconds": []}
            model, facts["parameters"], facts["gradients"] = copy.deepcopy(whole), 0, 0
            compute = make_variant(name, model, *batch, n, rank, groups[n], facts)
            compute()
            backward(whole, *batch, 1 / batch[1].numel())
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            wrong = [(one.grad - two.grad).norm() / two.grad.norm() for one, two in pairs]
            facts["difference"] = 0.0 if name == "share alone" else torch.stack(wrong).max().item()
            ours[shape, n, name] = facts, compute
    for turn in turns * cfg.steps:
        shares += ask_processor(rank, control)
        if turn in ours:
            facts, compute = ours[turn]
            torch.set_num_threads(cfg.threads * (turn[1] if turn[2] == "one process" else 1))
            facts.update(parameters=0, gradients=0, written=bytes_written())
            facts["seconds"].append(time_calls(compute, 1))  # 2 calls: the first is not timed
            facts["written"] = facts["written"] and (bytes_written() - facts["written"]) / 2
        dist.barrier(control)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, ([facts for facts, _ in ours.values()], shares), control)
    result = {"backend": dist.get_backend(), "device": device.type, "all_reduce": times}
    result["processor"] = statistics.fmean(share for _, theirs in everyone for share in theirs)
    return result | {"turns": [facts for theirs, _ in everyone for facts in theirs]}


def is_right(turn, size, on_cpu):
    """Return True if the gradient was right, and what was sent is what the formulas say."""
    n, name, written = turn["workers"], turn["variant"], turn["written"]
    sent = all_reduce_cost(n, size)[1] if name == "DDP" else 0
    copied = 2 * (n - 1) * size if name == "DataParallel" and on_cpu else 0  # in two steps
    wire = written is None or not on_cpu or sent <= written <= sent * (1 + max(0.02, 0.0025 * n))
    return wire and turn["difference"] < 1e-10 and turn["parameters"] == turn["gradients"] == copied


def analyse(result, cfg):
    """Add what follows from the measurements to `result`; return the lines that report it."""
    kind, times, rows, alone, errors = result["device"], result["all_reduce"], [], {}, []
    cores = count_cores()
    start = f"{cfg.nproc} workers over {result['backend']} on {kind}, threads each: {cfg.threads}"
    lines = [f"{start}, CPU cores: {cores}"]
    fitted = [t for t in times if t[1] in SIZES[::2] and t[0] < max(times[-1][0], 3)]
    link = fit_link(fitted) if fitted else [0, 0]
    for part in (fitted, [t for t in times if t not in fitted]) if fitted else ():
        ratios = [predict_all_reduce(link, n, size) / seconds for n, size, seconds in part]
        factors = [max(ratio, 1 / ratio) for ratio in ratios]  # too low is as bad as too high
        errors.append([statistics.median(factors), max(factors)])
    for shape, n in dict.fromkeys((turn["shape"], turn["workers"]) for turn in result["turns"]):
        ours = [t for t in result["turns"] if (t["shape"], t["workers"]) == (shape, n)]
        size = 8 * SHAPES[shape][0] * SHAPES[shape][1] * (SHAPES[shape][1] + 1)
        ms = {t["variant"]: [1000 * s for s in t["seconds"]] for t in ours if t["rank"] == 0}
        median = {name: statistics.median(ms[name]) for name in VARIANTS}
        one = alone.setdefault(shape, median["one process"])  # one worker
        crowd = max(1, n * cfg.threads / cores) if kind == "cpu" else 1  # they share the cores
        share, sending = median["share alone"] * crowd, 1000 * predict_all_reduce(link, n, size)
        guess = predict_speedup(one, share, sending) if n > 1 else None
        row = {"shape": shape, "workers": n, "bytes": size, "ms": ms, "predicted": guess}
        row["right"] = all(is_right(turn, size, kind == "cpu") for turn in ours)
        row["speedup"] = {name: one / median[name] for name in VARIANTS[:3]}
        ddp = row["speedup"]["DDP"]
        row["off"] = max(guess[0] / ddp, ddp / guess[1], 1) if guess else None  # 1: as predicted
        for name, speedup in row["speedup"].items():
            spread = f"{median[name]:.3g} ms ({min(ms[name]):.3g} to {max(ms[name]):.3g})"
            lines += [f"{shape}, {n} x {name}: {spread}, speed-up {speedup:.3g}"]
        lines[-1] += ", predicted {:.3g} to {:.3g}".format(*guess) if guess else ""
        rows.append(row)
    if errors:
        lines += [f"all-reduce: {1e6 * link[0]:.3g} us per message, {1e9 * link[1]:.3g} s per GB; "]
        text = "wrong by a factor of {:.2g} (median), {:.2g} (worst) where fitted; {:.2g}, {:.2g}"
        lines[-1] += text.format(*errors[0], *errors[1]) + " elsewhere"
    for us, gb, n in cfg.link:  # each of these n devices computes a whole batch of the last model
        sending = 1000 * predict_all_reduce((us / 1e6, 1e-9 / gb), n, row["bytes"])
        guess = "predicted {:.3g} to {:.3g}".format(*predict_speedup(n * one, one, sending))
        lines += [f"{row['shape']}, {n:g} devices, {us:g} us, {gb:g} GB/s: {guess}"]
    result.update(passed=all(row["right"] for row in rows), rows=rows, link=link, errors=errors)
    return lines


def caution(result):
    """Say how far the cost model was off, and if there are signs that the times were disturbed."""
    text, off = "", [row["off"] for row in result["rows"] if row["off"]]
    if off:
        worst = max(worst for _, worst in result["errors"])  # where it was fitted, and elsewhere
        text = f"; cost model: wrong by a factor of up to {worst:.2g} (all-reduce)"
        text += f", {max(off):.2g} (speed-up of DDP)"
    if result["processor"] < UNDISTURBED:
        got = f"the ranks got {result['processor']:.0%} of the processor time of an idle machine"
        text += f"; times DISTURBED: {got}"
    return text


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
    parser = Arguments(__doc__, nproc=4, steps=5, batch_size=512)
    link = {"metavar": ("LATENCY_US", "GB_PER_S", "DEVICES"), "help": "one more; may be repeated"}
    parser.add_argument("--link", nargs=3, type=float, action="append", default=LINKS, **link)
    parser.add_argument("--report", help="is gone: notebook 11 and --json have its numbers")
    args = parser.parse_args(argv)
    if args.report is not None:
        parser.error("argument --report: is gone; notebook 11 and --json have its numbers")
    if not all(0 <= us < 1e9 and 0 < gb < 1e9 and 2 <= n < 1e9 for us, gb, n in args.link):
        parser.error("argument --link: LATENCY_US from 0, GB_PER_S above 0, DEVICES from 2")
    args.threads = max(1, torch.get_num_threads() // args.nproc)
    try:
        result = launch_job(args, measure)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nrank {error.error_index} failed: {reason(error)}")
    print("\n".join(analyse(result, args)))
    print("PASS" if result["passed"] else "FAIL", "each gradient is that of one process", end=" ")
    worst = max(turn["difference"] for turn in result["turns"])
    counted = result["device"] == "cpu" and any(turn["written"] for turn in result["turns"])
    wire = f"bytes on the sockets: the formula's, plus at most {max(2, args.nproc / 4):g} %"
    wire = wire if counted else "no bytes on sockets were counted"
    print(f"(difference {worst:.3g}); {wire}{caution(result)}")
    if args.json:
        print(json.dumps({"lesson": 11, "world_size": args.nproc} | result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
