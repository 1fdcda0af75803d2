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
from lockstep.watch.language_model import differences, train_by_hand
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
    right, ranks, places = (
        train_by_hand(first, batches, lesson.LEARNING_RATE),
        together(seen.ranks),
        seen.places,
    )
    if len(ranks) != started or not places["loss"]:
        wrong = [f"{started} workers and places are to train; {len(ranks)} workers do"]
        return claims.Verdict("both train as one place does", wrong, {}, [])
    numbers = numbers_of(places, started, batches)
    off = [differences(found, right) for found in (places, *ranks)]
    numbers["max_grad_diff"] = float(np.max(off, 0)[0])  # nan if one of them is
    small = (1e-12, 1e-9) if args.dtype == "float64" else (1e-5, 1e-2)  # rounding: step 1, later
    calls = places["calls"]
    rows = [[call[0] for call in calls[n : n + started]] for n in range(0, len(calls), started)]
    wrong = wrong_in_training("places", off[0], small, rows, batches)
    rows = [*zip(*(rank["rows"] for rank in ranks), strict=False)]
    wrong += wrong_in_training("workers", np.max(off[1:], 0), small, rows, batches)
    wrong += claims.broken(rules_of_places(places) | rules_of_ranks(ranks))
    wrong += wrong_in_losses(args, right["loss"], len(first["embedding"]))
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
def watch_model():
    """Yield a list that gets (rows, outputs, where its tensors were made) of each call."""
    calls, homes, now = [], {}, [None]
    model, set_device, to_tensor = lesson.language_model, paddle.set_device, paddle.to_tensor

    def at(place):
        now[0] = place
        return set_device(place)

    def to(data, dtype=None, place=None, stop_gradient=True):
        tensor = to_tensor(data, dtype, place, stop_gradient)
        homes[tensor.data_ptr()] = place or now[0]  # until the model has been given it
        return tensor

    def language_model(weights, *rows):
        given = [homes.pop(tensor.data_ptr(), None) for tensor in (*weights.values(), *rows)]
        output = model(weights, *rows)
        calls.append((rows[0].numpy(), output.numpy(), given))
        return output

    ours = patch.object(lesson, "language_model", language_model)
    with ours, patch.multiple(paddle, set_device=at, to_tensor=to):
        yield calls


@contextlib.contextmanager
def watch_places():
    """Yield what is seen of the training on places, in this process."""
    do, train, found = lesson.parallel_do, lesson.train_on_places, {"gradient": {}}
    found |= {"weight": {}, "loss": [], "merged": [], "places": []}

    def parallel_do(body, places, *given):
        merged, gradients = do(body, places, *given)
        found["gradient"] = found["gradient"] or gradients  # those of step 1 stay
        found["merged"].append(merged)
        found["loss"].append(float(merged.sum()))
        found["places"] += places
        return merged, gradients

    def train_on_places(*given):
        start = time.perf_counter()
        found["weight"], losses = train(*given)
        found["seconds"] = time.perf_counter() - start
        return found["weight"], losses

    ours = {"parallel_do": parallel_do, "train_on_places": train_on_places}
    with watch_model() as found["calls"], patch.multiple(lesson, **ours):
        yield found


def watch_rank(function, *args):
    """Call function(*args) as one rank; return what is seen of it.

    The weights of all ranks but the first are zeros, so that they have to be sent.
    """
    found, update = {"gradient": {}}, paddle.optimizer.SGD.step

    class Layer(lesson.LanguageModel):
        def __init__(self, weights):
            first = paddle.distributed.get_rank() == 0
            super().__init__({name: w if first else 0 * w for name, w in weights.items()})
            found["layer"] = self

    def step(optimizer):
        pairs = [*found["layer"].named_parameters()]
        slopes = {name: w.grad.numpy() for name, w in pairs if w.grad is not None}
        found["gradient"] = found["gradient"] or slopes
        update(optimizer)

    ours = patch.object(lesson, "LanguageModel", Layer)
    steps = patch.object(paddle.optimizer.SGD, "step", step)
    with ours, steps, watch_model() as calls, claims.hear() as said, handed_over() as sent:
        function(*args)
    found["weight"] = {name: w.numpy() for name, w in found.pop("layer").named_parameters()}
    rows, outputs = [call[0] for call in calls], [float(call[1].sum()) for call in calls]
    return found | {"rows": rows, "own_loss": outputs, "sent": sum(sent), "said": said}


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


def wrong_in_training(who, off, small, rows, batches):
    """Return what is wrong with the training of places or workers: a list of sentences."""
    sizes = [[len(part) for part in step] for step in rows]
    even = all(max(step) - min(step) < len(step) for step in sizes)  # as Fluid's are, too
    whole = [sorted(row.tolist() for part in step for row in part) for step in rows]
    shared = even and whole == [sorted(inputs.tolist()) for inputs, *_ in batches]
    rules = {
        f"a gradient of the {who} is off by {off[0]:.2g}": off[0] < small[0],
        f"losses or last weights of the {who} are off by {off[1]:.2g}": off[1] < small[1],
        f"the {who} do not share the rows evenly": shared,
    }
    return claims.broken(rules)


def rules_of_places(seen):
    """Return {what is wrong: whether all is well} of what only places can do."""
    pairs = zip(seen["calls"], seen["places"], strict=False)
    own = all(home is place for (*_, homes), place in pairs for home in homes)
    outputs = np.concatenate([output for _, output, _ in seen["calls"]])
    same = np.array_equal(outputs, np.concatenate(seen["merged"]))
    rules = {"a place has rows or weights of another one": own}
    return rules | {"the merged outputs are not those of the places, in order": same}


def rules_of_ranks(ranks):
    """Return {what is wrong: whether all is well} of what only ranks can do."""
    last = ranks[0]["weight"]
    nbytes = sum(w.nbytes for w in last.values())
    more = max(rank["sent"] for rank in ranks) - nbytes  # 1 %: the losses are sent, to print them
    sent = f"besides the weights, once, and backward()'s gradients, collectives get {more:,} bytes"
    same = [np.array_equal(rank["weight"][name], last[name]) for rank in ranks for name in last]
    return {sent: more <= nbytes / 100, "the workers' last weights differ": all(same)}


def wrong_in_losses(args, losses, words):
    """A model that knows no word better than another has a loss of log(words); then it learns."""
    first, last = losses[0], np.mean(losses[-10:])
    short = args.steps < 20 or args.batch_size < 32  # too short to learn
    well = abs(first - np.log(words)) < 0.05 and (short or last < first - 0.5)
    return [] if well else [f"the loss goes from {first:.3g} to {last:.3g}"]


def numbers_of(places, count, batches):
    """Return the numbers for --json."""
    on_gpus = lesson.get_places(count)[0].is_gpu_place()
    words, losses = sum((share > 0).sum() for *_, share in batches), places["loss"]
    numbers = {"world_size": count, "loss": losses}
    numbers["backend"], numbers["device"] = ("nccl", "gpu") if on_gpus else ("gloo", "cpu")
    first, last = np.exp([losses[0], np.mean(losses[-10:])]).tolist()
    numbers |= {"perplexity_first": first, "perplexity_last": last}
    return numbers | {"tokens_per_second": float(words / places["seconds"])}


def wrong_in_words(seen, ranks, numbers):
    """The script tells what both have learned, in its own words."""
    with claims.hear() as wanted, contextlib.redirect_stdout(None):
        lesson.tell(f"{len(ranks)} workers", ranks[0]["loss"])
        lesson.tell(f"{len(ranks)} places, all {numbers['device']}", numbers["loss"])
    return ["what it says is not what was seen"] * (seen.said != wanted)
