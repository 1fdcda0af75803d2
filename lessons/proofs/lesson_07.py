"""What lesson 07 claims: several towers make the update of the whole batch, each on its device.

The script knows nothing of this file. It is one process, and TensorFlow does its work: the hooks
for PyTorch see nothing of it, and two frameworks in a process can crash. So the launcher runs it in
`watched`, which listens to the sessions of TensorFlow, and nobody imports torch here. Loss and
gradients of the whole batch are computed in NumPy.
"""

import contextlib
import re
from collections import Counter
from itertools import islice

import lesson_07_tf_make_parallel as lesson
import numpy as np
from lockstep.watch import claims
from lockstep.watch.graphs import Watch
from lockstep.watch.language_model import by_hand, difference

LIMITS = {"--nproc": (1, 64), "--steps": (1, 10**6), "--batch-size": (1, 10**6)}
LIMITS |= {"--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return what is wrong with the text to read, or None."""
    try:
        count = len(lesson.read_sentences(args.data_dir))
    except (UnicodeError, OSError) as error:
        return f"argument --data-dir: {error}"
    if args.batch_size > count:
        return f"argument --batch-size: there are only {count} sentences"
    return None


@contextlib.contextmanager
def watched(args):
    """Look into the first two steps of the script and the last; note the lines that it prints."""
    with claims.hear() as said, Watch({0, 1, args.steps - 1}) as watch:
        yield watch, said


def judge(seen, args, started, launcher):
    """Return the verdict on what `watched` has seen of the script, with so many towers."""
    watch, said = seen
    looked = sorted(number for number in watch.looks if number < args.steps)
    if (len(watch.losses), len(watch.steps)) != (args.steps, len(looked)):
        wrong = f"{args.steps} steps ran the session {len(watch.losses)} times"
        return claims.Verdict("towers train one model", [wrong], {}, [])
    first, make = lesson.prepare(args)
    batches, devices = [*islice(make(), args.steps)], lesson.device_names(started)
    off, wrong = [], []
    for number, step in zip(looked, watch.steps, strict=True):
        far, rules = compare(step, watch.losses[number], first, batches[number], args.dtype)
        wrong += [*claims.broken(rules), wrong_in_parts(step.parts, batches[number], started)]
        off.append(far)
    numbers = numbers_of(watch, batches, devices, looked) | {"max_grad_diff": claims.worst(off)}
    wrong += wrong_in_places(watch, len(first), devices) + wrong_in_bytes(watch, first, devices)
    wrong += wrong_in_learning(first["embedding"], watch.steps[-1].after, batches, numbers)
    wrong.append(wrong_in_words(said, numbers, devices, args.steps))
    claim = f"loss, gradients and updates of {started} towers are those of the whole batch"
    claim += f" (off by {claims.worst(off):.1e})"
    wrong = [*dict.fromkeys(filter(None, wrong))]
    return claims.Verdict(claim, wrong, numbers, lines_of(numbers, args.batch_size))


# --- A step ---


def compare(step, loss, first, batch, dtype):
    """Compare a step with the whole batch: (difference, {what is wrong: whether all is well})."""
    small = 1e-5 if dtype == "float32" else 1e-10
    before = first | step.before  # all, if a variable is missing
    weights = {name: before[name] for name in first}
    right, gradients = by_hand(weights, *batch)
    off = [difference(step.gradients.get(name), g) for name, g in gradients.items()]
    moved = {name: before[name] - np.float64(step.after.get(name, np.nan)) for name in first}
    rate = lesson.LEARNING_RATE
    updates = [difference(moved[name] / rate, g) for name, g in gradients.items()]
    same = len(step.batch) == 3 and all(map(np.array_equal, step.batch, batch))
    rules = {
        "a step has another batch than the next one": same,
        f"a loss is {loss:.6g}, not {right:.6g}": difference(loss, right) < small,
        f"a gradient is off by {np.max(off):.1e}": np.max(off) < small,
        # The difference of two rounded weights has few digits left in float32.
        f"an update is off by {np.max(updates):.1e}": np.max(updates) < 50 * small,
    }
    return float(np.max([difference(loss, right), *off])), rules  # nan if one of them is nan


def wrong_in_parts(parts, batch, towers):
    """Each tower has as many rows, together those of the batch; what fills them up is masked."""
    most = -(-len(batch[0]) // towers)
    if [[len(array) for array in part] for part in parts] != [[most] * 3] * towers:
        return f"the towers have {rows_of(parts)} rows of {len(batch[0])}, not {most} each"
    joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    same = all(np.array_equal(a[: len(b)], b) for a, b in zip(joined, batch, strict=True))
    extra = joined[2][len(batch[0]) :].any()
    return None if same and not extra else "the towers' rows are not those of the batch, once each"


def rows_of(parts):
    """Return the numbers of rows that the towers have."""
    return [len(part[-1]) for part in parts]


# --- Who computes, and what is sent ---


def misplaced(ran):
    """Return operations named after a tower, but for reads and look-ups, that ran elsewhere."""
    towers = [(re.search(r"tower_(\d+)/", name), device, name) for device, name in ran]
    away = [name for tower, device, name in towers if tower and tower[1] != device[4:]]
    return [name for name in away if not re.search("ReadVariableOp|/embedding_lookup", name)]


def wrong_in_places(watch, wanted, devices):
    """Each tower computes on its device; the variables, shared, are on the first; one update."""
    ran, count, towers = watch.steps[0].ran, len(watch.variables), len(devices)
    places = {variable.device.lower()[-5:] for variable in watch.variables.values()}
    types = [node.type for node in watch.graph.get_operations()]
    changes = sum(bool(re.match("Resource.*(Apply|Scatter)|Assign.*Var", kind)) for kind in types)
    named = len({name for _, op in ran for name in re.findall(r"tower_\d+/", op)})
    rules = {
        f"{count} variables, not {wanted}: the towers do not share them": count == wanted,
        f"{named} of {towers} towers have names": named == towers,
        f"{len(misplaced(ran))} operations of a tower ran on another one's device": not misplaced(
            ran
        ),
        f"the variables are on {sorted(places)}": places == {devices[0]},
        # One node gives a variable its first value.
        f"{changes - count} nodes update {count} variables": changes == 2 * count,
        "no batch is made ahead": "PrefetchDataset" in types,
    }
    return claims.broken(rules)


def wrong_in_bytes(watch, first, devices):
    """Say which device sent another one too much or too little in the first step."""
    (home, *others), sent, wanted = devices, Counter(), Counter()
    for one, other, _, size in watch.steps[0].crossed:
        sent[one, other] += size
    for device, (*_, targets, mask) in zip(others, watch.steps[0].parts[1:], strict=False):
        rows, time = mask.shape
        # Both ways: six weights, rows of the embedding, four last states, and one number.
        both = sum(w.nbytes for name, w in first.items() if name != "embedding")
        both += rows * (time + 4) * first["embedding"][0].nbytes + first["embedding"].itemsize
        wanted[home, device] = both + targets.nbytes + mask.nbytes
        wanted[device, home] = both
    ways = [] if "gpu" in home else sorted(sent | wanted)  # beside GPUs, the host sends as well
    texts = {way: f"{' to '.join(way)}: {sent[way]:,} bytes, not {wanted[way]:,}" for way in ways}
    return [texts[way] for way in ways if sent[way] != wanted[way]]


# --- All steps ---


def wrong_in_learning(before, after, batches, numbers):
    """Say whose update is missing, and whether too little was learned."""
    first, last = numbers["perplexity_first"], numbers["perplexity_last"]
    short = len(batches) < 100 or len(batches[0][0]) < 32  # too short to have learned much
    moved = (after.get("embedding", before) != before).any(1)  # by the steps that read this word
    missing = sum(not moved[inputs].all() for inputs, *_ in batches)
    rules = {
        f"the update of {missing} steps is missing": not missing,
        f"the perplexity went from {first:.0f} to {last:.0f} only": np.isfinite(last)
        and (short or last <= first / 2),
    }
    return claims.broken(rules)


def numbers_of(watch, batches, devices, looked):
    """Return the numbers for --json; the speed is that of steps at which nobody looks."""
    alone = [n for n in range(len(batches)) if n not in looked] or looked
    rate = sum(batches[n][2].sum() for n in alone) / sum(watch.seconds[n] for n in alone)
    losses, step = watch.losses, watch.steps[0]
    first, last = np.exp([losses[0], np.mean(losses[-10:])], dtype="f8").tolist()
    return {
        "world_size": len(devices),
        "backend": "graph",
        "device": devices[0][:3],
        "variables": len(watch.variables),
        "misplaced": len(misplaced(step.ran)),
        "tokens_per_second": float(rate),
        "rows_per_tower": rows_of(step.parts),
        "ops_per_device": dict(sorted(Counter(device for device, _ in step.ran).items())),
        "perplexity_first": first,
        "perplexity_last": last,
    }


def wrong_in_words(said, numbers, devices, steps):
    """The script has told its devices, and what it has learned."""
    first, last = numbers["perplexity_first"], numbers["perplexity_last"]
    span = f"the last {min(10, steps)} of {steps}"
    wanted = [f"{len(devices)} towers in one process, on {' '.join(devices)}"]
    wanted.append(f"perplexity {first:.0f} in step 1, {last:.0f} in {span}")
    return None if said == wanted else f"it says {said}, and not {wanted}"


def lines_of(numbers, sentences):
    """Return what a reader wants to know of a step."""
    rows = f"each tower has {max(numbers['rows_per_tower'], default=0)} of {sentences} sentences"
    speed = f"{numbers['tokens_per_second']:.0f} tokens per second"
    counts = ", ".join(f"{device} {count}" for device, count in numbers["ops_per_device"].items())
    away = f"on another tower's device: {numbers['misplaced']}"
    lines = [f"{rows}; {numbers['variables']} variables; {speed}"]
    return [*lines, f"operations in a step: {counts}; {away}"]
