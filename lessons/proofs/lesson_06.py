"""What lesson 06 claims: a job that was stopped ends with the bits of a job that was not.

The script knows nothing of this file; see lesson_02.py. Its ranks run it in several turns, each in
a new process: in the first ones the last rank, and no other, gets SIGTERM in the middle; then the
job comes to its end; and in the last turn another job begins anew. What does not happen in these
turns is tried here, in one process: a save is killed, ranks find other files, or damage.
"""

import contextlib
import io
import json
import os
import tempfile
from itertools import accumulate, chain, count, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lesson_06_checkpoint_map_location as lesson
import torch
from lockstep.watch import claims, threads
from lockstep.watch.kills import fate
from torch.nn.functional import mse_loss

KEEP_VALUES = 10**9  # of the first two updates, and of the end
LIMITS = {"--steps": (2, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
LIMITS["--save-every"] = (1, 10**6)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or go on in that folder, or None."""
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    first = os.environ.get("RANK", "0") == "0"  # the other machines use the folder of the first
    wrong = wrong_in_folder(args) if args.checkpoints is not None and first else None
    return f"argument --checkpoints: {wrong}" if wrong else None


def wrong_in_folder(args):
    """Return why the job can't go on in the folder --checkpoints, or None."""
    folder = args.checkpoints
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return f"can't write in {folder}"
    try:
        job = read_job(folder)
        made = job and f"seed {job['seed']}, batch size {job['batch_size']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"job.json in {folder} can't be read: {error!r:.80}"
    steps = [int(path.stem.removeprefix("step_")) for path in lesson.checkpoints(folder)]
    if steps and not made:
        return f"no job.json in {folder}: these files are another program's"
    mine = f"seed {args.seed}, batch size {args.batch_size}"
    if steps and (made != mine or steps[-1] >= args.steps):
        return f"the job in {folder} has {made}, and is at step {steps[-1]}"
    return None


def read_job(folder):
    """Return what job.json says of the job in this folder; {} if no job has begun there."""
    path = Path(folder, "job.json")
    return json.loads(path.read_text()) if path.exists() else {}


def turns(args, world_size, place):
    """Return what the ranks run, turn by turn: (flags, after how many updates SIGTERM comes).

    The folder gets a note of who trains there. `place` has room for what nobody wants to keep.
    """
    folder, anew = Path(args.checkpoints or Path(place, "stopped")), Path(place, "never_stopped")
    for made in (folder, anew):
        made.mkdir(parents=True, exist_ok=True)
    job = read_job(folder) or {"seed": args.seed, "batch_size": args.batch_size, "ranks": []}
    ranks = f"{world_size} ranks on {'cuda' if torch.cuda.is_available() else 'cpu'}"
    job["ranks"] = sorted({ranks, *(job["ranks"] if lesson.checkpoints(folder) else [])})
    if os.environ.get("LOCKSTEP_NODE_RANK", "0") == "0":  # of the machines, the first
        (folder / "job.json").write_text(json.dumps(job))
    flags = ["--checkpoints", str(folder)]
    stops = [(flags, updates) for updates in stops_of(args, world_size)]
    return [*stops, (flags, 0), (["--checkpoints", str(anew)], 0)]


def stops_of(args, world_size):
    """Return after how many updates of a turn SIGTERM comes: an epoch ends, and in the middle."""
    steps = {0, per_epoch(args, world_size), min(7, args.steps - 1)}
    return [b - a for a, b in pairwise(sorted(step for step in steps if step < args.steps))]


def per_epoch(args, world_size):
    """Return how many steps an epoch has, without the rows that are left out."""
    return claims.steps_per_epoch(100 - 100 % world_size, world_size, args.batch_size)


def judge(jobs, args, started, launcher):
    """Return the verdict on the jobs of all turns, each {rank: what was seen of it}."""
    *stopped, whole = jobs
    renames = [event for job in stopped for event in job[0].of("rename")]
    wrong = [wrong_in_turns(jobs, args, started), *map(wrong_in_saves, jobs)]
    wrong += [None if renames else "nothing was saved"]
    if any(wrong):
        return claims.Verdict("a stopped job goes on", [*filter(None, wrong)][:1], {}, [])
    folder = Path(renames[-1]["new"]).parent
    makers, found = read_job(folder)["ranks"], lesson.checkpoints(folder)
    ends = [job[0].values_at_end() for job in jobs[-2:]]
    off = claims.off(*map(claims.as_vector, ends))
    numbers = {"world_size": started, "backend": whole[0].group["backend"]}
    numbers |= {"device": whole[0].optimizers[0]["device"], "max_param_diff": off}
    numbers["resumed_from_step"] = args.steps - len(jobs[-2][0].updates)
    numbers |= {"checkpoints_kept": len(found), "bytes_written": sum(e["bytes"] for e in renames)}
    wrong = wrong_in_words(jobs, args) + wrong_in_files(found, renames, ends[0], jobs, args)
    wrong += [wrong_in_training(whole, ends, args)]
    wrong += wrong_in_bits(jobs, args) if len(makers) == 1 else []
    if not any(wrong):
        numbers["kills"], problem = killed_saves()
        wrong = [problem, wrong_in_loading(), wrong_in_rest(), wrong_beside_newer()]
    claim = f"the parameters of {started} ranks differ by {off} from those of {args.steps} steps"
    lines = lines_of(numbers, makers)
    return claims.Verdict(f"{claim} without a stop", [*filter(None, wrong)], numbers, lines)


def lines_of(numbers, makers):
    """Return what a reader wants to know beside the script's own words."""
    ranks = f"ranks: {numbers['world_size']}, over {numbers['backend']} on {numbers['device']}"
    left = "each time the old file was left, or the new one, whole"
    lines = [f"{ranks}; checkpoints kept: {numbers['checkpoints_kept']}"]
    lines += [f"a save was killed at {numbers.get('kills', 0)} moments: {left}"]
    several = f"saved by {' and '.join(makers)}: dropout and rounding are now different"
    return lines + [several] * (len(makers) > 1)


# --- What the ranks did ---


def reached(jobs, args):
    """Return which step the job that goes on has reached before each of its turns, and at last."""
    made = [len(job[0].updates) for job in jobs[:-1]]
    return [*accumulate(made, initial=args.steps - sum(made))]


def wrong_in_turns(jobs, args, started):
    """All ranks take all turns together, and each turn ends where it should."""
    stops, before = [*stops_of(args, started), args.steps], reached(jobs, args)
    if len(jobs) != len(stops) + 1:
        return f"{len(jobs)} turns were seen, and not {len(stops) + 1}"
    wanted = [min(stop, args.steps - a) for stop, a in zip(stops, before, strict=False)]
    wrong = [claims.wrong_in_group(job, started) for job in jobs]
    pairs = zip(jobs, [*wanted, args.steps], strict=True)
    return next(filter(None, wrong + [claims.wrong_in_count(*pair) for pair in pairs]), None)


def position(whole, step, args):
    """Return where a job is after a step, by the rows that the job without a stop has asked for."""
    epoch, per = (step - 1) // per_epoch(args, len(whole)), per_epoch(args, len(whole))
    asked = chain(*claims.steps(whole)[epoch * per : step])
    return {"step": step, "epoch": epoch, "rows": sum(len(update["asked"]) for update in asked)}


def wrong_in_words(jobs, args):
    """Each turn says from where it goes on, and what it has reached."""
    wrong, steps = [], reached(jobs, args)
    for job, (begun, step) in zip(jobs, [*pairwise(steps), (0, args.steps)], strict=True):
        weight = job[0].values_at_end()["1.weight"][0].item()
        where = "resumed from step {step}, {rows} rows into epoch {epoch}"
        lines = [where.format(**position(jobs[-1], begun, args))] if begun else []
        lines.append(f"step {step} of {args.steps}: first weight {weight}")
        wrong.append(claims.wrong_in_words(job, lines))
    return wrong


def wrong_in_saves(job):
    """After an update the ranks ask each other; to save, all meet twice, and rank 0 writes between.

    They meet in a group of their own, which waits for an hour at least, also to load.
    """
    for rank, seen in job.items():
        default = {call["name"] for call in seen.calls if call["own"] and call["members"] is None}
        if default != {"broadcast_object_list"} or seen.of("new_group")[0]["seconds"] < 3600:
            return f"rank {rank}: a slow disk ends who waits in {', '.join(default)}"
        for events in seen.after_updates():
            calls = [event["name"] for event in events if event["what"] == "call"]
            kinds = [event["what"] for event in events]
            if calls not in (MEETINGS, MEETINGS[:1]):
                return f"rank {rank} does not meet the others, but calls {', '.join(calls)}"
            if kinds != (SAVE if rank == 0 and calls == MEETINGS else ["call"] * len(calls)):
                return f"rank {rank} calls, and sends to the disk: {', '.join(kinds)}"
            if wrong := claims.wrong_on_disk(events):
                return wrong
    return None


MEETINGS = ["all_reduce", "gather_object", "barrier"]
SAVE = ["call", "call", "sync", "rename", "sync", "call"]


def wrong_in_files(found, renames, ends, jobs, args):
    """Files have the right names, older ones stay, and the last is that of a job without a stop."""
    steps = reached(jobs, args)
    at = {*range(0, args.steps, args.save_every), *steps[1:]}
    names = [f"step_{step:08}.pt" for step in sorted(at) if step > steps[0]]
    saved = [Path(event["new"]).name for event in renames]
    older = [sum(name < new for name in e["beside"]) for e, new in zip(renames, saved, strict=True)]
    there = older if steps[0] else [min(2, number) for number in range(len(names))]
    rules = {
        f"saved were {', '.join(saved)}, and not {', '.join(names)}": saved == names,
        f"older files that were there when a new one was whole: {older}": older == there,
        f"{len(found)} files are left of 2 wanted": [path.name for path in found] == names[-2:]
        or steps[0] > 0,
    }
    try:
        anew = Path(jobs[-1][0].of("rename")[-1]["new"])
        ours, theirs = (lesson.load(path)[0] for path in (found[-1], anew))
    except Exception as error:
        return [*claims.broken(rules), f"a file can't be used: {error!r:.80}"]
    rules["it has not the keys of a model without DDP"] = [*ours.get("model", [])] == [*ends]
    makers = read_job(found[-1].parent)["ranks"]
    same = len(makers) > 1 or claims.same_bits(ours, theirs)
    rules["the last file is not that of a job without a stop"] = same
    return claims.broken(rules)


def wrong_in_bits(jobs, args):
    """Each rank has the same rows and parameters after each step, and all rows come."""
    *stopped, whole = jobs
    begun, joined = reached(jobs, args)[0], {}
    for rank, seen in whole.items():
        resumed = [update for job in stopped for update in job[rank].updates]
        joined[rank] = SimpleNamespace(updates=seen.updates[:begun] + resumed)
        for step, pair in enumerate(zip(seen.updates[begun:], resumed, strict=True), begun + 1):
            if any(pair[0][what] != pair[1][what] for what in ("after", "asked", "settings")):
                return [f"rank {rank} is in another state than without a stop: step {step}"]
    return [claims.wrong_in_rows(joined, 100 - 100 % len(whole), args.batch_size)]


def wrong_in_training(whole, ends, args):
    """Both jobs have learned."""
    (rows, targets), model = (made := lesson.make_job(args.seed))[0].tensors, made[1].eval()
    losses = []
    for values in (whole[0].values(whole[0].updates[0])["before"], *ends):
        claims.fill(model, values)
        losses.append(mse_loss(model(rows), targets).item())
    return None if max(losses[1:]) < losses[0] else f"the loss has not fallen: {losses}"


# --- What one process plays ---


def state_of(step):
    """Return what could be a checkpoint: its weights tell its step."""
    return {"step": step, "weights": torch.full((5000,), float(step))}


def killed_saves():
    """Kill a save in its write, at each line and rename; return (kills, what is wrong, or None)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_00000002.pt")
        for kills in count():
            path.unlink(missing_ok=True)  # what a killed save has left besides stays there
            try:
                lesson.save(state_of(2), path)
            except OSError as error:
                return kills, f"what a killed save has left is in the way of the next: {error}"
            when = {"moment": kills} if kills else {"limit": 10_000}  # bytes: in the write
            end = fate(lesson.save, state_of(3), path, **when)
            try:
                state, _ = lesson.load(path)
            except Exception as error:
                return kills, f"a save was killed, and its file is lost: {error!r:.80}"
            if not torch.equal(state["weights"], state_of(state["step"])["weights"]):
                return kills, "a save was killed, and its file has wrong numbers"
            if end >= 0:
                return kills, None if state["step"] == 3 else "a save that ends is not there"


def load_as_ranks(*folders):
    """Let ranks load, each from its {name: bytes}; return the step that each has, or its word."""

    def load(rank, world_size):
        with tempfile.TemporaryDirectory() as folder:
            for name, data in folders[rank].items():
                Path(folder, name).write_bytes(data)
            try:
                state = lesson.load_together(folder, None) or state_of(0)
            except SystemExit as stop:
                return str(stop).partition(":")[0]
        return state["step"] if state["weights"].is_cpu else "not on the CPU"

    with contextlib.redirect_stderr(io.StringIO()):
        return threads.play(lesson.dist, len(folders), load)


def file_of(step, **more):
    """Return the bytes of a checkpoint, saved on a GPU as it were."""
    tag = patch("torch.serialization.location_tag", lambda storage: "cuda:1")
    with tempfile.TemporaryDirectory() as folder, tag:
        lesson.save(state_of(step) | more, path := Path(folder, "step.pt"))
        return path.read_bytes()


def wrong_in_loading():
    """All ranks load the latest file that is whole, or all leave and name the one that differs."""
    one, two, three, four = (f"step_{step:08}.pt" for step in (1, 2, 3, 4))
    old, new, newest, code = *map(file_of, (1, 2, 3)), file_of(4, not_on_the_list=Path())
    same, middle = {one: old, two: new}, len(new) // 2
    bad = {two: new[:middle] + bytes([new[middle] ^ 1]) + new[middle + 1 :]}  # one bit
    for name, ours, theirs, wanted in (
        ("no file", {}, {}, 0),
        ("the same files", same, same, 2),
        ("an empty file", same | {three: b""}, same | {three: b""}, 2),
        ("a file that could run code", same | {four: code}, same | {four: code}, 2),
        ("a wrong bit", same | bad, same | bad, 1),
        ("only a damaged file", bad, bad, "rank 0"),
        ("an older one on rank 1", same, {one: old}, "rank 1"),
        ("nothing on rank 1", same, {}, "rank 1"),
        ("damage on rank 1", same, bad, "rank 1"),
        ("other bytes on rank 1", same, {two: newest}, "rank 1"),
        ("nothing on rank 0", {}, same, "rank 1"),
        ("a newer one on rank 1", same, same | {three: newest}, "rank 1"),
    ):
        if (found := load_as_ranks(ours, theirs)) != [wanted] * 2:
            return f"{name}: the ranks load {found}, and not {wanted}"
    return None


def wrong_in_rest():
    """Where other ranks have used 31 of 100 rows, all ranks share the others, whatever number."""
    order = lesson.rest_of_epoch(100, 0, 0, 0, 1)
    for ranks in range(1, 9):
        dealt = [*chain(*(lesson.rest_of_epoch(100, 0, 31, rank, ranks) for rank in range(ranks)))]
        if not len({*dealt} & {*order[31:]}) == len(dealt) == 69 - 69 % ranks:
            return f"{ranks} ranks do not get the 69 rows that a job of other ranks has left"
    return None


def wrong_beside_newer():
    """A save leaves newer files alone: they are damaged, and the job went on from before them."""
    ranks = {"get_rank": lambda: 0, "get_world_size": lambda: 1}
    ranks |= {"gather_object": lambda *_, group: None, "barrier": lambda group: None}
    with tempfile.TemporaryDirectory() as folder, patch.multiple(lesson.dist, **ranks):
        for step in (8, 9):
            Path(folder, f"step_{step:08}.pt").touch()
        lesson.save_together(folder, {}, {"step": 7}, None)
        return None if len(lesson.checkpoints(folder)) == 3 else "it removes a file that is newer"
