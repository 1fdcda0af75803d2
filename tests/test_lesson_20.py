"""Lesson 20: each row goes to one worker of one rank, and the job goes on in the middle."""

import sys
from functools import partial
from unittest.mock import patch

import cloudpickle
import lesson_20_feed_ranks as lesson
import pytest
import torch
from breaks import check_breaks, verdicts_of_proof
from lockstep import lessons, proofs
from nbtools import run

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LESSON = lessons.find("20")
SOURCE = LESSON.script.read_text()

PART = "yield self.make(batch[self.rank :: self.world_size], own)"
TURN = "number >= first and (number - first) % workers == turn"
OWN = '{self.seed} {epoch} {number} {self.rank}"'
PLACE = "torch.zeros(2, dtype=torch.int64).share_memory_()"
ORDER = "rows[self.lengths[rows].argsort(stable=True)]"
CUT = "[: count * self.batch_size]"
SORTED = f"{CUT}\n        rows = {ORDER}"
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
    "the place does not grow": ('now["batch"] += 1  #', 'now["batch"] = 1  #'),
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
    "by length, the longest never come": (SORTED, f"\n        rows = {ORDER}{CUT}"),
    "by length, trained batches come again": ("[self.first :]:", ":"),
    "each worker makes all batches, and throws most away": (
        TURN,
        f"self.make(batch[self.rank :: self.world_size], random) and {TURN}",
    ),
    "by length, the same orders with each seed": (
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.epoch)",
    ),
    "workers end with each epoch": ("persistent_workers=workers > 0", "persistent_workers=False"),
    "a seed of the process's own": ("manual_seed(seed)  #", "manual_seed(seed + os.getpid())  #"),
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
    "another first sum": (
        "replica(torch.ones(1, 1, dtype=int, device=device)).backward()",
        "pass",
        (3,),
    ),
    "every rank saves": ("if args.checkpoint and rank == 0:", "if args.checkpoint:"),
    "every rank prints": ("if rank == 0:\n        way", "if True:\n        way"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    """Five rows are left over in each epoch, and the stop is in the second one."""
    flags = "--workers 1 --rows 101 --batch-size 48 --steps 6"
    check_breaks(20, BREAKS, nproc, *flags.split())


@pytest.mark.parametrize("nproc, flags", [(2, ""), (1, "--steps 3 --workers 3")])
def test_other_sizes_pass_too(nproc, flags):
    """Also where each epoch has all rows, and where a rank is alone."""
    ((passed, claim),) = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags.split(), 1).values()
    assert passed and "the same bits" in claim, claim


def test_a_job_goes_on_with_other_ranks_and_workers(tmp_path):
    """3 ranks go on where 2 were: together they have each row of the epoch once."""
    file = str(tmp_path / "job.pt")
    for nproc, flags in ((2, "--steps 6"), (3, "--steps 11 --workers 0"), (2, "--by-length")):
        flags = [*flags.split(), "--checkpoint", file]
        verdicts = verdicts_of_proof(LESSON, {"": SOURCE}, nproc, flags, 1)
        assert all(passed for passed, _ in verdicts.values()), verdicts
    now = torch.load(file, weights_only=True)["now"]
    assert now == {"step": 12, "epoch": 2, "batch": 4, "batch_size": 24}


FLAGS = {  # a part of the complaint: flags
    "argument --workers: must be": "--workers -1",
    "an epoch has 4 batches": "--workers 5",
    "23 rows fill no batch": "--rows 23",
    "must be at least the number of ranks, 2": "--batch-size 1",
    "there is no *.txt in": "--data FOLDER",
    "counts batches of 24 rows, this job of 20": "--batch-size 20 --checkpoint FOLDER/job.pt",
    "is at step 6": "--steps 6 --checkpoint FOLDER/job.pt",
    "can't be read": "--checkpoint FOLDER/no.pt",
    "there is no folder": "--checkpoint FOLDER/none/job.pt",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_bad_flag_costs_one_line_and_nothing_starts(tmp_path, capsys, words):
    now = {"step": 6, "epoch": 1, "batch": 2, "batch_size": 24}
    torch.save({"now": now}, tmp_path / "job.pt")
    (tmp_path / "no.pt").write_text("no checkpoint")
    flags = FLAGS[words].replace("FOLDER", str(tmp_path)).split()
    with pytest.raises(SystemExit) as stop:
        proofs.read_flags(LESSON.script, flags, 2, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and words in line


# --- The technique in a project of one's own ---


def test_data_that_end_before_the_first_batch_are_an_error():
    source = lesson.Dealt(lambda epoch: ["a"], lambda rows, chance: rows, 2, 0, 1)
    now = {"step": 0, "epoch": 0, "batch": 0}
    loader = lesson.make_loader(0, 0, dataset=source, batch_size=None)
    with pytest.raises(ValueError, match="no batch in epoch 0: fewer rows than a batch has"):
        lesson.train(None, None, loader, source, now, 1, "cpu")


def test_a_checkpoint_of_other_batches_is_an_error(tmp_path):
    now = {"step": 6, "epoch": 1, "batch": 2, "batch_size": 24}
    torch.save({"now": now}, tmp_path / "job.pt")
    alone = {"get_rank": lambda: 0, "broadcast_object_list": lambda saved: None}
    with patch.multiple(lesson.dist, **alone):
        assert lesson.resume(tmp_path / "job.pt", now) == now
        assert lesson.resume(tmp_path / "none.pt", {"step": 0}) == {"step": 0}
        with pytest.raises(ValueError, match="counts batches of 24 rows"):
            lesson.resume(tmp_path / "job.pt", now | {"batch_size": 20})


def evaluated(rank, world_size, count):
    """Return what the lesson's evaluation says of so many rows, on each rank."""
    model = torch.nn.EmbeddingBag(9, 1, padding_idx=0)
    torch.nn.init.constant_(model.weight, 0.5)
    rows = lesson.make_lines(count, 0)
    make = partial(lesson.make_batch, left_out=0)
    return *lesson.evaluate(model, rows, make, torch.device("cpu")), [
        float(r.split()[0]) for r in rows
    ]


@pytest.mark.parametrize("count", (1, 10))
def test_the_evaluation_is_exact_also_where_a_rank_has_no_row(count):
    (error, counted, targets), other = run(evaluated, 2, count)
    wanted = sum((0.5 - target) ** 2 for target in targets) / count
    assert counted == count and abs(error - wanted) < 1e-6 and other[0] == error
