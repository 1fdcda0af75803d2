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
import resource
import signal
import sys
import tempfile
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lesson_06_checkpoint_map_location as lesson
import torch
from lockstep.watch import claims
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves

KEEP_VALUES = 10**9  # of the first two updates, and of the end
LIMITS = {"--steps": (2, 10**6), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
LIMITS["--save-every"] = (1, 10**6)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or go on with that folder, or None."""
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    here = args.checkpoints is not None and os.environ.get("RANK", "0") == "0"
    wrong = wrong_in_folder(args) if here else None  # of a first machine; the others have another
    return f"argument --checkpoints: {wrong}" if wrong else None


def wrong_in_folder(args):
    """Return why the job can't go on in the folder --checkpoints, or None."""
    folder, mine = args.checkpoints, {"seed": args.seed, "batch_size": args.batch_size}
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return f"can't write in {folder}"
    try:
        job = read_job(folder)
        theirs = {name: job[name] for name in mine} if job else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"job.json in {folder} can't be read: {error!r:.80}"
    found = lesson.checkpoints(folder)
    if found and not job:
        return f"no job.json in {folder}: these files are another program's"
    step = int(found[-1].stem.rpartition("_")[2]) if found else -1
    if found and (theirs != mine or step >= args.steps):
        made = f"seed {job['seed']}, batch size {job['batch_size']}"
        return f"the job in {folder} has {made}, and is at step {step}"
    return None


def read_job(folder):
    """Return what job.json says of the job in this folder; {} if no job has begun there."""
    path = Path(folder, "job.json")
    return json.loads(path.read_text()) if path.exists() else {}


def turns(args, world_size, place):
    """Return what the ranks run, in new processes: (flags, the update after which SIGTERM comes).

    The folder gets a note of who trains there. `place` is a folder for what nobody wants to keep.
    """
    folder, anew = args.checkpoints or Path(place, "stopped"), Path(place, "never_stopped")
    for made in filter(lambda path: not os.path.exists(path), (folder, anew)):
        os.makedirs(made)
    job = read_job(folder) or {"seed": args.seed, "batch_size": args.batch_size, "ranks": []}
    ranks = f"{world_size} ranks on {'cuda' if torch.cuda.is_available() else 'cpu'}"
    job["ranks"] = sorted({ranks, *(job["ranks"] if lesson.checkpoints(folder) else [])})
    Path(folder, "job.json").write_text(json.dumps(job))
    stops = [after - before for before, after in pairwise([0, *stops_of(args, world_size)])]
    flags = ["--checkpoints", str(folder)]
    return [*((flags, stop) for stop in stops), (flags, 0), (["--checkpoints", str(anew)], 0)]


def stops_of(args, world_size):
    """Return after which steps a job is stopped: at the end of an epoch, and in the middle."""
    stops = {per_epoch(args, world_size), min(7, args.steps - 1)}
    return [stop for stop in sorted(stops) if stop < args.steps]


def per_epoch(args, world_size):
    """Return how many steps an epoch has."""
    return claims.steps_per_epoch(100 - 100 % world_size, world_size, args.batch_size)


def judge(jobs, args, started, launcher):
    """Return the verdict on the jobs of all turns, each {rank: what was seen of it}."""
    *stopped, whole = jobs
    renames = [event for job in stopped for event in job[0].of("rename")]
    problem = [wrong_in_turns(jobs, args, started)] + [wrong_in_saves(job) for job in jobs]
    if any(problem) or not renames:
        first = next(filter(None, problem), "nothing was saved")
        return claims.Verdict("a job that was stopped goes on", [first], {}, [])
    folder = Path(renames[-1]["new"]).parent
    makers, begun = read_job(folder)["ranks"], args.steps - sum(len(j[0].updates) for j in stopped)
    ends = [job[0].values_at_end() for job in (stopped[-1], whole)]
    now = position(whole, args.steps - len(stopped[-1][0].updates), args)
    numbers = {"world_size": started, "backend": whole[0].group["backend"]}
    numbers |= {"device": whole[0].optimizers[0]["device"], "resumed_from_step": now["step"]}
    numbers["max_param_diff"] = claims.off(*map(claims.as_vector, ends))
    numbers["checkpoints_kept"] = len(lesson.checkpoints(folder))
    numbers["bytes_written"] = sum(event["bytes"] for event in renames)
    wrong = wrong_in_files(folder, stopped, whole, args, begun) + wrong_in_words(jobs, args, begun)
    wrong += [wrong_in_training(whole, ends, args)]
    if len(makers) == 1:
        wrong += wrong_in_bits(stopped, whole, args, begun)
    if not any(wrong):
        numbers["kills"], problem = killed_saves()
        wrong = [problem, wrong_in_loading(), wrong_in_rest(), wrong_beside_newer()]
    claim = f"the parameters of {started} ranks differ by {numbers['max_param_diff']} from those"
    claim += f" of {args.steps} steps without a stop"
    return claims.Verdict(claim, list(filter(None, wrong)), numbers, lines_of(numbers, makers))


def lines_of(numbers, makers):
    """Return what a reader wants to know beside the script's own words."""
    ranks = f"ranks: {numbers['world_size']}, over {numbers['backend']} on {numbers['device']}"
    left = "each time the old file was left, or the new one, whole"
    lines = [f"{ranks}; checkpoints kept: {numbers['checkpoints_kept']}"]
    lines += [f"a save was killed at {numbers.get('kills', 0)} moments: {left}"]
    several = f"saved by {' and '.join(makers)}: dropout and rounding are now different"
    return lines + [several] * (len(makers) > 1)


# --- What the ranks did ---


def wrong_in_turns(jobs, args, started):
    """All ranks take all turns together, and each stops where it should."""
    planned = stops_of(args, started)
    if len(jobs) != len(planned) + 2:
        return f"{len(jobs)} turns were seen, and not {len(planned) + 2}"
    if wrong := next(filter(None, (claims.wrong_in_group(job, started) for job in jobs)), None):
        return wrong
    made = [[len(rank.updates) for rank in job.values()] for job in jobs]
    step = begun = beginning(jobs[0])
    wanted = []
    for stop in [*(b - a for a, b in pairwise([0, *planned])), args.steps]:
        wanted.append(min(stop, args.steps - step))
        step += wanted[-1]
    if made != [[count] * started for count in [*wanted, args.steps]]:
        return f"from step {begun} on, the turns have {made} updates, and not {wanted}"
    return None


def beginning(job):
    """Return the step from which a job says that it goes on; what it says is compared later."""
    said = [event["text"].split() for event in job[0].of("said")]
    return next((int(words[3].strip(",")) for words in said if words[0] == "resumed"), 0)


def position(whole, step, args):
    """Return where a job is after a step, by the rows that the job without a stop has asked for."""
    epoch = (step - 1) // per_epoch(args, len(whole))
    asked = [*chain(*claims.steps(whole)[epoch * per_epoch(args, len(whole)) : step])]
    return {"step": step, "epoch": epoch, "rows": sum(len(update["asked"]) for update in asked)}


def wrong_in_words(jobs, args, begun):
    """Each turn says from where it goes on, and what it has reached; one that saves tells it."""
    wrong, step = [], begun
    for job in jobs:
        step = 0 if job is jobs[-1] else step
        where = "resumed from step {step}, {rows} rows into epoch {epoch}"
        lines = [where.format(**position(jobs[-1], step, args))] * (step > 0)
        step += len(job[0].updates)
        weight = float(job[0].values_at_end()["1.weight"][0])
        wrong += [claims.wrong_in_words(job, [*lines, f"step {step} of {args.steps}: first weight {weight}"])]
    return wrong


def wrong_in_saves(job):
    """After an update the ranks ask each other; to save, all meet twice, and rank 0 writes between.

    The data are on the disk before the name, and the name before anybody goes on.
    """
    meet = ["all_reduce", "gather_object", "barrier"]
    for rank, seen in job.items():
        for events in after_updates(seen):
            calls = [event["name"] for event in events if event["what"] == "call"]
            kinds = [event["what"] for event in events]
            if calls not in (meet, meet[:1]) or any(e.get("members", []) is None for e in events):
                return f"rank {rank} does not meet the others, in a group that waits, but {calls}"
            if len(calls) > 1 and kinds != (SAVES if rank == 0 else ["call"] * 3):
                return f"rank {rank} saves by {kinds}"
            for data, name, entry in [events[2:5]] if len(kinds) > 3 else []:
                if any(data[key] != name[key] for key in ("file", "bytes")):
                    return f"{name['new']} could be there before its data"
                if entry["file"] != name["home"] or name["stray"]:
                    return "a name was not sent to the disk, or comes from another folder"
    return None


SAVES = ["call", "call", "sync", "rename", "sync", "call"]


def after_updates(seen):
    """Return for each update of a rank what it then called, and sent to the disk."""
    found = []
    for event in seen.events:
        if event["what"] == "update":
            found.append([])
        elif found and (event["what"] in ("sync", "rename") or event.get("own")):
            found[-1].append(event)
    return found


def wrong_in_files(folder, stopped, whole, args, begun):
    """The files have the right names, two older ones stay, and the last has all that belongs to it."""
    steps = {*range(0, args.steps, args.save_every), args.steps}
    reached = begun
    for job in stopped:
        reached += len(job[0].updates)
        steps.add(reached)
    names = [f"step_{step:08}.pt" for step in sorted(steps) if step > begun]
    renames = [event for job in stopped for event in job[0].of("rename")]
    saved = [Path(event["new"]).name for event in renames]
    older = [sum(name < new for name in e["beside"]) for e, new in zip(renames, saved, strict=True)]
    left = [path.name for path in lesson.checkpoints(folder)]
    rules = {
        f"saved were {', '.join(saved)}, and not {', '.join(names)}": saved == names,
        f"{older} older files were there when a new one was whole": begun > 0
        or older == [min(2, number) for number in range(len(names))],
        f"{len(left)} files are left of 2 wanted": left[-2:] == saved[-2:] and len(left) <= 2,
    }
    if wrong := claims.broken(rules):
        return wrong
    states = []
    for place in (folder, Path(whole[0].of("rename")[-1]["new"]).parent):
        try:
            states.append(lesson.load(lesson.checkpoints(place)[-1])[0])
        except Exception as error:
            return [f"the last file can't be used: {error!r:.80}"]
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(*map(tree_leaves, states), strict=False)]
    rules = {
        "the file has not the keys of a model without DDP": list(states[0].get("model", []))
        == ["1.weight", "1.bias"],
        "the file has another position": states[0]["now"] == position(whole, args.steps, args),
        "the last file is not that of a job without a stop": all(same)
        or len(read_job(folder)["ranks"]) > 1,
    }
    return claims.broken(rules)


def wrong_in_bits(stopped, whole, args, begun):
    """Each rank has the same rows and parameters after each step, and all rows come."""
    wrong, even = [], 100 - 100 % len(whole)
    joined = {}
    for rank, seen in whole.items():
        resumed = [update for job in stopped for update in job[rank].updates]
        joined[rank] = SimpleNamespace(updates=seen.updates[:begun] + resumed)
        for step, pair in enumerate(zip(seen.updates[begun:], resumed, strict=True), begun + 1):
            for what in ("after", "asked", "settings"):
                if pair[0][what] != pair[1][what]:
                    wrong.append(f"rank {rank} is in another state than without a stop: step {step}")
    return [*wrong[:1], claims.wrong_in_rows(joined, even, args.batch_size)]


def wrong_in_training(whole, ends, args):
    """Both jobs have learned, and the learning rate has fallen."""
    data, model = lesson.make_job(args.seed)
    losses = []
    for values in (whole[0].values(whole[0].updates[0])["before"], *ends):
        claims.fill(model.eval(), values)
        losses.append(mse_loss(model(data.tensors[0]), data.tensors[1]).item())
    if not max(losses[1:]) < losses[0]:
        return f"the loss has not fallen: {losses}"
    rates = [update["settings"][0]["lr"] for update in whole[0].updates]
    return None if args.steps < 4 or rates[-1] < rates[0] else "the learning rate has not fallen"


# --- What one process plays ---


def state_of(step):
    """Return what could be a checkpoint: its weights tell its step."""
    return {"step": step, "weights": torch.full((5000,), float(step))}


def killed_saves():
    """Kill a save in its write, at each line and rename; return (kills, what is wrong, or None)."""
    with tempfile.TemporaryDirectory() as folder:
        path, moment, killed = Path(folder, "step_00000002.pt"), 0, True
        while killed:
            path.unlink(missing_ok=True)  # what a killed save has left besides stays there
            try:
                lesson.save(state_of(2), path)
            except OSError as error:
                return moment, f"what a killed save has left is in the way of the next: {error}"
            if (child := os.fork()) == 0:
                save_and_die(path, moment)
            killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
            try:
                state, _ = lesson.load(path)
            except Exception as error:
                return moment, f"a save was killed, and its file is lost: {error!r:.80}"
            if not torch.equal(state["weights"], state_of(state["step"])["weights"]):
                return moment, "a save was killed, and its file has wrong numbers"
            moment += 1
    return moment - 1, None if state["step"] == 3 else "a save that nobody has killed is not there"


def save_and_die(path, moment):
    """Save; be killed in the write (moment 0), or before a line, rename or removal. No return."""
    moments = 0

    def begin(event, *_):
        nonlocal moments
        counts = event in ("line", "os.rename", "os.remove")
        moments += counts
        if counts and moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame, event, _):
        if frame.f_code.co_filename != lesson.save.__code__.co_filename:
            return None
        begin(event)
        return trace

    if moment == 0:  # the kernel kills who writes more than 10,000 bytes, and Python lets it
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    else:
        sys.addaudithook(begin)  # Python calls it before it renames or removes
        sys.settrace(trace)
    try:
        lesson.save(state_of(3), path)
    finally:
        os._exit(0)


def load_as_ranks(*folders):
    """Let ranks load, each from its {name: bytes}; return the step that each has, or its word."""
    own, ends = [["?"]] * len(folders), []

    def gather(everyone, told, group):
        own[rank] = told
        everyone[:] = own

    for rank, files in [*enumerate(folders)] * 2:  # first, to learn what each of them tells
        ranks = {"get_rank": lambda rank=rank: rank, "get_world_size": lambda: len(folders)}
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.multiple(lesson.dist, all_gather_object=gather, **ranks),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            try:
                state = lesson.load_together(folder, None)
                ends.append(state["step"] if state else 0)
            except SystemExit as stop:
                ends.append(str(stop).partition(":")[0])
    return ends[len(folders) :]


def some_files():
    """Return {name: bytes} of four checkpoints, saved on a GPU as it were; the last has a path."""
    files = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("torch.serialization.location_tag", lambda storage: "cuda:1"),
    ):
        for step in (1, 2, 3, 4):
            path = Path(folder, f"step_{step:08}.pt")
            lesson.save(state_of(step) | ({"not on the list": path} if step == 4 else {}), path)
            files[path.name] = path.read_bytes()
    return files


def wrong_in_loading():
    """All ranks load the latest file that is whole, or all leave and name the one that differs."""
    (one, old), (two, new), (three, newest), (four, code) = some_files().items()
    bit = {two: new[: len(new) // 2] + bytes([new[len(new) // 2] ^ 1]) + new[len(new) // 2 + 1 :]}
    same, late = {one: old, two: new}, newest[: len(newest) // 2]
    cases = {"no file": ({}, {}, 0), "the same files": (same, same, 2)}
    for name, files in {"a part of one": {three: late}, "an empty one": {three: b""}}.items():
        cases[name] = same | files, same | files, 2
    cases["one that could run code"] = same | {four: code}, same | {four: code}, 2
    cases["one with a wrong bit"] = {one: old} | bit, {one: old} | bit, 1
    cases["only a damaged one"] = bit, bit, "rank 0"
    for name, files in {"an older one": {one: old}, "nothing": {}, "damage": bit}.items():
        cases[name] = same, files, "rank 1"
    cases["other bytes"] = same, {two: newest}, "rank 1"
    cases["more than nothing"] = {}, same, "rank 1"
    cases["also a newer one"] = same, same | {three: newest}, "rank 1"
    for name, (ours, theirs, wanted) in cases.items():
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
