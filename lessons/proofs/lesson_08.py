"""What lesson 08 claims: on places, and with workers, training is that of the whole batch.

Paddle does its work in C++, the hooks for PyTorch see nothing of it, and what parallel_do merges
are arrays of NumPy. So this proof runs the script's `main` itself, and wraps functions of the
script and of Paddle: in this process for the places, in each rank for the workers. What both are
compared with is computed in NumPy, as in lesson 07: no framework has a part in it.
"""

import contextlib
import time
from types import SimpleNamespace
from unittest.mock import patch

import lesson_08_paddle_parallel_do as lesson
import numpy as np
import paddle
from lockstep.watch import claims
from lockstep.watch.language_model import by_hand, difference
from lockstep.watch.paddle_ranks import answers, handed_over

LIMITS = {"--nproc": (1, 64), "--steps": (1, 10**6), "--batch-size": (1, 10**6)}
LIMITS |= {"--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return what is wrong with the text to read or the number of rows, or None."""
    try:
        count = len(lesson.read_sentences(args.data_dir))
    except (UnicodeError, OSError) as error:
        return f"argument --data-dir: {error}"
    if not args.nproc <= args.batch_size <= count:
        return f"argument --batch-size: must be from --nproc, {args.nproc}, to {count}"
    return None


def examine(args):
    """Run the script in its wrappers; return the verdict."""
    with watched(args) as seen:
        lesson.main(args)
    return judge(seen, args, args.nproc, "none")


def judge(seen, args, started, launcher):
    """Return the verdict on what `watched` has seen."""
    first, batches = lesson.prepare(args)
    right, ranks = train_by_hand(first, batches), together(seen.ranks)
    if len(ranks) != started or not seen.places["loss"]:
        wrong = [f"{started} workers and places are to train; {len(ranks)} workers do"]
        return claims.Verdict("both train as one place does", wrong, {}, [])
    numbers = numbers_of(seen.places, started, batches)
    limits = (1e-12, 1e-9) if args.dtype == "float64" else (1e-5, 1e-2)  # rounding: step 1, later
    off = [differences(found, right) for found in (seen.places, *ranks)]
    numbers["max_grad_diff"] = float(np.max(off, 0)[0])  # nan if one of them is
    wrong = wrong_on_places(seen.places, started, off[0], batches, limits)
    wrong += wrong_on_ranks(ranks, np.max(off[1:], 0), batches, limits)
    wrong += wrong_in_learning(args, right["loss"], len(first["embedding"]))
    wrong += wrong_in_words(seen, ranks, numbers)
    claim = f"{started} places and {started} workers train as one place does"
    claim += f" (gradients off by {numbers['max_grad_diff']:.1e})"
    return claims.Verdict(claim, wrong, numbers, [])


# --- What is seen ---


@contextlib.contextmanager
def watched(args):
    """Wrap what the script calls; yield what is seen of ranks and places, and the lines."""
    start, ranks = lesson.start_workers, []

    def start_workers(*given):
        with answers(watch_rank) as found:
            start(*given)
        ranks.extend(found)
        for line in (line for rank in found for line in rank["said"]):
            print(line)

    ours = patch.object(lesson, "start_workers", start_workers)
    with claims.hear() as said, watch_places() as places, ours:
        yield SimpleNamespace(ranks=ranks, places=places, said=said)


@contextlib.contextmanager
def watch_places():
    """Yield what is seen of the training on places, in this process."""
    found = {"loss": [], "rows": [], "gradient": {}, "weight": {}, "strays": 0, "unmerged": 0}
    homes, now, do, train = {}, [None], lesson.parallel_do, lesson.train_on_places
    set_device, to_tensor = paddle.set_device, paddle.to_tensor

    def at(place):
        now[0] = place
        return set_device(place)

    def to(data, dtype=None, place=None, stop_gradient=True):
        tensor = to_tensor(data, dtype, place, stop_gradient)
        homes[tensor.data_ptr()] = place or now[0]  # until a place has been given it
        return tensor

    def parallel_do(body, places, weights, *inputs):
        parts, outputs = [], []

        def own(copies, *rows):
            given = [homes.pop(tensor.data_ptr(), None) for tensor in (*copies.values(), *rows)]
            place = places[len(parts)]
            found["strays"] += sum(home is not place for home in given)
            parts.append(rows[0].numpy())
            outputs.append(body(copies, *rows))
            return outputs[-1]

        merged, gradients = do(own, places, weights, *inputs)
        found["rows"].append(parts)
        found["unmerged"] += not np.array_equal(merged, np.concatenate(outputs))
        found["loss"].append(float(merged.sum()))
        found["gradient"] = found["gradient"] or gradients  # those of step 1 stay
        return merged, gradients

    def train_on_places(*given):
        start = time.perf_counter()
        found["weight"], losses = train(*given)
        return found.update(seconds=time.perf_counter() - start) or (found["weight"], losses)

    ours = {"parallel_do": parallel_do, "train_on_places": train_on_places}
    with patch.multiple(lesson, **ours), patch.multiple(paddle, set_device=at, to_tensor=to):
        yield found


def watch_rank(function, *args):
    """Call function(*args) as one rank; return what is seen of it.

    The weights of all ranks but the first become zeros, so that they have to be sent.
    """
    found, layers = {"own_loss": [], "rows": [], "rates": [], "gradient": {}}, []
    model, train, update = lesson.language_model, lesson.train, paddle.optimizer.SGD.step

    def make(make_layer):
        layers.append(make_layer())
        for weight in layers[0].parameters() if paddle.distributed.get_rank() else ():
            weight.set_value(0 * weight)
        return layers[0]

    def own_model(weights, *rows):
        output = model(weights, *rows)
        found["rows"].append(rows[0].numpy())
        found["own_loss"].append(float(output.sum()))
        return output

    def step(optimizer):
        slopes = {n: w.grad.numpy() for n, w in layers[0].named_parameters() if w.grad is not None}
        found["gradient"] = found["gradient"] or slopes
        found["rates"].append(optimizer.get_lr())
        update(optimizer)

    ours = {"language_model": own_model, "train": lambda m, *more: train(lambda: make(m), *more)}
    steps = patch.object(paddle.optimizer.SGD, "step", step)
    with patch.multiple(lesson, **ours), steps, claims.hear() as said, handed_over() as sent:
        function(*args)
    found["weight"] = {name: w.numpy() for name, w in layers[0].named_parameters()}
    return found | {"sent": sum(sent), "said": said}


def together(ranks):
    """Return what is seen of each rank, with the losses of all rows."""
    losses = [sum(parts) for parts in zip(*(rank["own_loss"] for rank in ranks), strict=False)]
    return [rank | {"loss": losses} for rank in ranks]


def on_ranks(function, nproc, *args):
    """Call function(*args) in processes, as the script starts them; return what each returned."""
    with answers() as found:
        lesson.start_workers(function, nproc, *args)
    return found


# --- What is wrong ---


def train_by_hand(weights, batches):
    """Train in NumPy with all rows; return the losses, step 1's gradients, and the last weights."""
    found = {"loss": []}
    for inputs, targets, share in batches:
        loss, slopes = by_hand(weights, inputs, targets, share > 0)  # all words count alike
        found["loss"].append(loss)
        found.setdefault("gradient", slopes)
        weights = {name: w - lesson.LEARNING_RATE * slopes[name] for name, w in weights.items()}
    return found | {"weight": weights}


def differences(found, right):
    """Return how far step 1 is off, and how far all losses and the last weights are; relative."""
    if len(found["loss"]) != len(right["loss"]):
        return np.nan, np.nan
    off = {}
    for kind in ("gradient", "weight"):
        off[kind] = [difference(found[kind].get(n), array) for n, array in right[kind].items()]
    losses = abs(np.array(found["loss"]) / right["loss"] - 1)
    return np.max([losses[0], *off["gradient"]]), np.max([*losses, *off["weight"]])


def rows_are_shared(seen, count, batches):
    """Return whether the parts of each step are so many, its rows in order, and almost equal."""
    sizes = [[len(rows) for rows in parts] for parts in seen]
    even = all(len(step) == count and max(step) - min(step) < count for step in sizes)
    whole = [np.concatenate(parts).tolist() for parts in seen]
    return even and whole == [inputs.tolist() for inputs, *_ in batches]


def wrong_on_places(seen, count, off, batches, limits):
    """Return what is wrong with the training on places: a list of sentences."""
    rules = {
        f"a gradient of the places is off by {off[0]:.2g}": off[0] < limits[0],
        f"losses or last weights of the places are off by {off[1]:.2g}": off[1] < limits[1],
        "the places do not share the rows evenly": rows_are_shared(seen["rows"], count, batches),
        "a place has rows or weights of another one": seen["strays"] == 0,
        "the merged outputs are not those of the places, in order": seen["unmerged"] == 0,
    }
    return claims.broken(rules)


def wrong_on_ranks(ranks, off, batches, limits):
    """Return what is wrong with the training in processes: a list of sentences."""
    rows = [*zip(*(rank["rows"] for rank in ranks), strict=False)]
    last, rates = ranks[0]["weight"], [lesson.LEARNING_RATE] * len(batches)
    nbytes = sum(w.nbytes for w in last.values())
    more = max(rank["sent"] for rank in ranks) - nbytes  # 1 %: the losses are sent, to print them
    sent = f"besides the weights, once, and backward()'s gradients, collectives get {more:,} bytes"
    updates = f"{len(batches)} updates with SGD and the rate {lesson.LEARNING_RATE}"
    same = [np.array_equal(rank["weight"][name], last[name]) for rank in ranks for name in last]
    rules = {
        f"not each worker makes {updates}": all(rank["rates"] == rates for rank in ranks),
        sent: more <= nbytes / 100,
        f"a gradient of the workers is off by {off[0]:.2g}": off[0] < limits[0],
        f"losses or last weights of the workers are off by {off[1]:.2g}": off[1] < limits[1],
        "the workers do not share the rows evenly": rows_are_shared(rows, len(ranks), batches),
        "the workers' last weights differ": all(same),
    }
    return claims.broken(rules)


def wrong_in_learning(args, losses, words):
    """Say whether the model knew something before, or knows too little now."""
    short = args.steps < 20 or args.batch_size < 32  # too short to learn
    rules = {
        f"the first loss, {losses[0]:.3g}, is not log {words}": abs(losses[0] - np.log(words))
        < 0.05,
        "it has not learned": short or np.mean(losses[-10:]) < losses[0] - 0.5,
    }
    return claims.broken(rules)


def numbers_of(places, count, batches):
    """Return the numbers for --json."""
    on_gpus = lesson.get_places(count)[0].is_gpu_place()
    words, losses = sum((share > 0).sum() for *_, share in batches), places["loss"]
    first, last = np.exp([losses[0], np.mean(losses[-10:])]).tolist()
    return {
        "world_size": count,
        "backend": "nccl" if on_gpus else "gloo",
        "device": "gpu" if on_gpus else "cpu",
        "loss": losses,
        "perplexity_first": first,
        "perplexity_last": last,
        "tokens_per_second": float(words / places["seconds"]),
    }


def wrong_in_words(seen, ranks, numbers):
    """The script tells what both have learned, in its own words."""
    with claims.hear() as wanted, contextlib.redirect_stdout(None):
        lesson.tell(f"{len(ranks)} workers", ranks[0]["loss"])
        lesson.tell(f"{len(ranks)} places, all {numbers['device']}", numbers["loss"])
    return [f"it says {seen.said}, and not {wanted}"] * (seen.said != wanted)
