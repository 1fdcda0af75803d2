"""Lesson 20: each row goes to one worker of one rank, and the job goes on in the middle."""

import lesson_20_feed_ranks as lesson
import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from lockstep import lessons, proofs

LESSON = lessons.find("20")
SOURCE = LESSON.script.read_text()

PART = "yield self.make(batch[self.rank :: self.world_size], own)"
TURN = "number >= first and (number - first) % workers == turn"
OWN = '{self.seed} {epoch} {number} {self.rank}"'
PLACE = "torch.zeros(2, dtype=torch.int64).share_memory_()"
ORDER = "rows[self.lengths[rows].argsort(stable=True)]"
FEW = "[: count * self.batch_size]"
SUM = "    dist.all_reduce(found)"
DRAWN = 'now["step"] * world_size + rank'
BREAKS = {
    "a stream not split by rank": (PART, "yield self.make(batch[:: self.world_size], own)"),
    "each rank gets the whole batch": (PART, "yield self.make(batch, own)"),
    "a stream not split by worker": (TURN, "number >= first"),
    "workers count from the epoch's first batch": (
        TURN,
        TURN.replace("(number - first)", "number"),
    ),
    "batches that were trained come again": (TURN, TURN.replace("number >= first and ", "")),
    "workers that stay do not see the epoch": (PLACE, PLACE.replace(".share_memory_()", "")),
    "the epoch is not told": ('start_at(now["epoch"], now', "start_at(0, now"),
    "the place is not told": ('now["epoch"], now["batch"])', 'now["epoch"], 0)'),
    "the place does not grow": ('now["batch"] += 1  #', "pass  #"),
    "the place is what workers have read": ('now["batch"] += 1  #', 'now["batch"] += 3  #'),
    "an order for each rank": (
        "partial(stream, files, seed=args.seed)",
        "partial(stream, files, seed=args.seed + rank)",
    ),
    "the files in one order": ("chance.sample(files, len(files))", "files"),
    "the lines in one order": ("        chance.shuffle(lines)", "        pass"),
    "an order for all epochs": ('random.Random(f"{seed} {epoch}")', 'random.Random(f"{seed}")'),
    "the same orders with each seed": ('random.Random(f"{seed} {epoch}")', "random.Random(epoch)"),
    "a last batch of fewer rows": ("self.batch_size))) == self.batch_size:", "self.batch_size))):"),
    "all ranks draw the same": (OWN, '{self.seed} {epoch} {number}"'),
    "all epochs draw the same": (OWN, '{self.seed} {number} {self.rank}"'),
    "all batches draw the same": (OWN, '{self.seed} {epoch} {self.rank}"'),
    "numbers of the worker's own": (PART, PART.replace(", own)", ", random)")),
    "by length, each rank deals its own": (
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed + self.epoch + self.rank)",
    ),
    "by length, the order of an epoch comes again": (
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
    ),
    "by length, all ranks get the same": (
        "batch[self.rank :: self.world_size].to",
        "batch[::2].to",
    ),
    "by length, not sorted": (ORDER, "rows"),
    "by length, short rows first": ("rows[torch.randperm(count, generator=generator)]", "rows"),
    "by length, the longest never come": (FEW, ""),
    "by length, trained batches come again": ("[self.first :]:", ":"),
    "torch's own generator": ("DataLoader(generator=own, ", "DataLoader("),
    "one seed for the workers of all ranks": (DRAWN, 'now["step"] * world_size'),
    "after a stop the same numbers again": (DRAWN, "rank"),
    "the evaluation fills up": (
        "sampler=mine,",
        "sampler=torch.utils.data.DistributedSampler(rows, shuffle=False),",
    ),
    "all ranks evaluate the same rows": ("range(dist.get_rank(), len(rows)", "range(0, len(rows)"),
    "nobody adds up": (SUM, "    pass"),
    "a mean of means": ("double().square().sum()", "double().square().mean()"),
    "the momentum is left out": ("now, model=model, optimizer=optimizer)", "now, model=model)"),
    "the checkpoint is not read": (
        "now = resume(args.checkpoint, now,",
        "resume(args.checkpoint, now,",
    ),
    "every rank prints": ("if rank == 0:\n        at", "if True:\n        at"),
    "another first sum": (
        "replica(torch.ones(1, 1, dtype=int, device=device)).backward()",
        "pass",
        (3,),
    ),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(20, BREAKS, nproc)
