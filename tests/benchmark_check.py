"""What the check costs: time, memory and the size of what it writes down, watched and unwatched.

    python tests/benchmark_check.py [RUNS]      3 runs of each by default; on an idle machine

Runs alternate, so that what else the machine does meets both. `updates` is the time of the updates
alone, by the script's own clock; `wall` and `processor` are of the whole command.
"""

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

from lockstep import check  # noqa: E402

SCRIPT = """
import resource, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
width, layers, rows, batch, updates = map(int, sys.argv[1:])
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(rows, 32), torch.randn(rows, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch, sampler=sampler)
hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(nn.Linear(32, width), *hidden, nn.Linear(width, 1))
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
made, epoch = 0, 0
while made < updates:
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        if made == 1:
            begin = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        nn.functional.mse_loss(replica(inputs), targets).backward()
        optimizer.step()
        made += 1
        if made == updates:
            break
    epoch += 1
if dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("took", time.perf_counter() - begin[0], time.process_time() - begin[1], peak)
dist.destroy_process_group()
"""

CASES = {  # name: width, hidden layers, rows, rows of a batch, updates
    "50 updates, 1 million parameters": (700, 2, 10**4, 32, 50),
    "400 updates, 1 million parameters": (700, 2, 10**5, 32, 400),
    "100,000 rows, batches of 1,000": (700, 2, 10**5, 1000, 50),
    "100 million parameters": (3200, 10, 10**3, 32, 10),
}


def run(watched, script, numbers):
    """Run the script; return {what: number}."""
    with tempfile.TemporaryDirectory() as folder:
        args = check.read_flags(["--updates=0", str(script), *map(str, numbers)])
        job = check.Job(args, Path(folder))
        environment = job.environment()
        if not watched:
            environment = {k: v for k, v in environment.items() if not k.startswith("LOCKSTEP")}
            environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        options = {"capture_output": True, "text": True, "check": True}
        done = subprocess.run(job.command(), env=environment, **options)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
    updates, busy, peak = map(float, re.search(r"took (\S+) (\S+) (\S+)", done.stdout).groups())
    found = {"wall s": wall, "processor s": processor, "updates s": updates}
    return found | {"updates' processor s": busy, "peak MB": peak, "facts MB": size}


def main(runs=3, wanted=""):
    """Measure all cases and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for name, numbers in CASES.items():
            if wanted not in name:
                continue
            print(f"{name} (load {os.getloadavg()[0]:.1f})")
            pairs = [[run(w, script, numbers) for w in (False, True)] for _ in range(runs)]
            for what in pairs[0][0]:
                plain, watched = ([pair[n][what] for pair in pairs] for n in (0, 1))
                ratios = [b / a for a, b in zip(plain, watched, strict=True) if a]
                shown = [f"{statistics.median(of):8.2f}" for of in (plain, watched)]
                times = f"{statistics.median(ratios):.2f}" if ratios else ""
                spread = f"({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
                print(f"    {what:<22}{shown[0]}{shown[1]}  times {times} {spread}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
