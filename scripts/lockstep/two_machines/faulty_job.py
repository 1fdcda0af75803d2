"""Be a launcher, or a rank, of a job in which something goes wrong; say how it ends, and when.

python .../faulty_job.py launcher [flags of torchrun]
python .../faulty_job.py rank

faults.py starts the launchers, and they start the ranks.
"""

import os
import sys
import time
from datetime import timedelta

RANK_WAITS = 20  # seconds


def be_launcher(arguments):
    """Call torchrun; say how it has failed."""
    from torch.distributed import run

    start = time.monotonic()
    try:
        run.main(arguments)
    except BaseException as error:
        say("launcher", start, error)
        sys.exit(1)


def be_rank(arguments):
    """Join the group, then call all-reduce until something happens; say what."""
    import torch
    import torch.distributed as dist

    start = time.monotonic()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_WAITS))
        print("met", flush=True)
        while True:
            start = time.monotonic()
            dist.all_reduce(torch.zeros(1))
    except Exception as error:
        say(f"rank {os.environ['RANK']}", start, error)
        os._exit(1)


def say(who, start, error):
    """Print the type and the first line of an error, and the seconds that it took."""
    text = (str(error).strip() or "(no text)").splitlines()[0]
    name = type(error).__name__
    if name == "ChildFailedError":
        text = "(names the rank that failed first)"
    print(f"{who}, after {time.monotonic() - start:.1f} s: {name}: {text}", flush=True)


if __name__ == "__main__":
    {"launcher": be_launcher, "rank": be_rank}[sys.argv[1]](sys.argv[2:])
