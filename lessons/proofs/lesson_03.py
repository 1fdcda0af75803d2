"""What lesson 03 claims: one model, trained on all images, and each test image counts once.

The script knows nothing of this file; see lesson_02.py. The gradients of some updates, and the
scores, are compared with those of one process.
"""

import importlib.util
import re
from itertools import chain

import lesson_03_spawn_ddp as lesson
import torch
from lockstep.watch import claims
from torch.nn.functional import cross_entropy

KEEP_VALUES = 20  # of the first two updates, and of one in twenty after them
LIMITS = {"--nproc": (1, 64), "--steps": (1, 10**6), "--batch-size": (1, 10**6)}
LIMITS |= {"--seed": (0, 2**32 - 1), "--workers": (0, 16)}


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    if args.batch_size < args.nproc:
        return f"argument --batch-size: must be at least --nproc, {args.nproc}"
    if importlib.util.find_spec("sklearn") is None:  # load_data imports it, when the ranks run
        return "needs scikit-learn: pip install scikit-learn"
    return None


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    train_set, test_set = lesson.load_data()
    model = lesson.make_model()
    if wrong := claims.wrong_in_optimizer(job, model):
        return claims.Verdict("the ranks train one model", [wrong], {}, [])
    losses = [[event["value"] for event in rank.of("loss")] for rank in job.values()]
    scores = scores_of_one_process(job, model, test_set)
    numbers = numbers_of(job, args, started, losses) | {"accuracy": scores["accuracy"]}
    wrong = [claims.wrong_in_count(job, args.steps), claims.wrong_in_group(job, started)]
    wrong += [claims.wrong_in_rows(job, len(train_set), args.batch_size)]
    wrong += [claims.wrong_in_replicas(job), wrong_in_gradients(job, model, train_set, losses)]
    wrong += [wrong_in_tested(job, len(test_set)), wrong_in_modes(job), wrong_in_rates(job)]
    wrong += [wrong_in_words(job, args, losses, scores, len(test_set))]
    if not 0 < numbers["param_change"] < float("inf"):
        wrong.append("the training has changed nothing, or too much")
    wanted = wanted_accuracy(args.steps, args.batch_size)
    if numbers["accuracy"] < wanted:
        wrong.append("the accuracy is too low")
    claim = f"accuracy {numbers['accuracy']:.3f} on {numbers['images_evaluated']} images"
    line = f"a parameter differs between ranks by {numbers['param_spread']} at most"
    wrong = list(filter(None, wrong))
    return claims.Verdict(f"{claim}, asked for: {wanted}", wrong, numbers, [line])


def wanted_accuracy(steps, batch_size):
    """Return the accuracy that is asked for: a short run can't learn as much."""
    return 0.95 if steps >= 300 and batch_size >= 60 else 0.0


def numbers_of(job, args, started, losses):
    """Return the numbers for --json that need no second look; times are in seconds."""
    first, last = job[0].of("forward")[0]["at"], job[0].updates[-1]["at"]
    start = claims.as_vector(job[0].values(job[0].updates[0])["before"])
    ends = [claims.as_vector(rank.values_at_end()) for rank in job.values()]
    means = [sum(of_step) / len(of_step) for of_step in zip(*losses, strict=False)]
    images = sum(len(update["asked"]) for rank in job.values() for update in rank.updates)
    return {
        "world_size": started,
        "backend": job[0].group["backend"],
        "device": job[0].optimizers[0]["device"],
        "seconds_training": last - first,
        "images_per_second": images / (last - first),
        "loss_per_rank": losses,
        "loss_first": means[0],
        "loss_last": means[-1],
        "param_change": claims.off(ends[0], start),
        "param_spread": claims.worst([claims.off(end, ends[0]) for end in ends]),
        "images_evaluated": sum(len(rank.tested) for rank in job.values()),
    }


def wrong_in_gradients(job, model, train_set, losses):
    """The gradient, and the mean loss, are those of one process on the images of all ranks."""
    for number, step in enumerate(claims.steps(job)):
        kept = job[0].values(step[0])
        if kept is None:
            continue
        claims.fill(model, kept["before"])
        asked = [train_set[row] for update in step for row in update["asked"]]
        images, labels = map(torch.stack, zip(*asked, strict=True))
        model.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        wanted = claims.numbers_of(model, lambda parameter: parameter.grad)
        off = claims.off(claims.as_vector(kept["gradients"]), wanted) / abs(wanted).max()
        if not off < 0.01:  # a GPU rounds to 10 bits; one image of 60 weighs more
            return f"in step {number + 1} the gradient is {off:.2g} off one process's"
        mean = sum(of_rank[number] for of_rank in losses) / len(losses)
        if not abs(mean - loss.item()) < 0.01 * loss.item() + 1e-3:
            return f"in step {number + 1} the mean loss is {mean:.3g}, not {loss:.3g}"
    return None


def wrong_in_tested(job, images):
    """Each test image is evaluated once, by ranks that have equal shares."""
    tested = [rank.tested for rank in job.values()]
    if sorted(chain(*tested)) != list(range(images)):
        return f"{sum(map(len, tested))} images were evaluated, not {images} once"
    sizes = [len(numbers) for numbers in tested]
    return None if max(sizes) - min(sizes) <= 1 else f"the ranks evaluated {sizes} images"


def wrong_in_modes(job):
    """It trains in train mode, evaluates in eval mode, and leaves the mode as it was."""
    for rank in job.values():
        forwards = rank.of("forward")
        if any(forward["train"] != forward["grad"] for forward in forwards):
            return "it trains or evaluates in the wrong mode"
        if not rank.states[0]["training"]:
            return "the evaluation has left the model in another mode"
    return None


def wrong_in_rates(job):
    """The learning rate falls in every step."""
    for rank in job.values():
        rates = [update["settings"][0]["lr"] for update in rank.updates]
        if sorted(set(rates), reverse=True) != rates:
            return "the learning rate did not fall in every step"
    return None


def scores_of_one_process(job, model, test_set):
    """Return accuracy and macro F1 of rank 0's last parameters, by their definitions."""
    claims.fill(model.eval(), job[0].values_at_end())
    images, labels = map(torch.stack, zip(*test_set, strict=True))
    with torch.no_grad():
        answers = model(images).argmax(1)
    model.train()
    f1 = []
    for digit in range(10):
        right = ((answers == digit) & (labels == digit)).sum().item()
        precision = right / max((answers == digit).sum().item(), 1)
        recall = right / max((labels == digit).sum().item(), 1)
        f1.append(2 * precision * recall / ((precision + recall) or 1))
    return {"accuracy": (answers == labels).float().mean().item(), "macro F1": sum(f1) / 10}


WORDS = re.compile(
    r"digits, (?P<ranks>\d+) ranks .*\n"
    r"mean loss (?P<first>\S+) at first, (?P<last>\S+) in step (?P<step>\d+); by rank .*\n"
    r"accuracy (?P<accuracy>\S+), macro F1 (?P<f1>\S+), from the same counts of (?P<images>\d+) .*"
)


def wrong_in_words(job, args, losses, scores, images):
    """What rank 0 has printed is what was seen; a tie of two answers may go either way."""
    text = "\n".join(event["text"] for event in job[0].of("said"))
    said = WORDS.fullmatch(text)
    if said is None:
        return f"its words are not those that were expected: {text[:60]!r}"
    told = {name: float(value) for name, value in said.groupdict().items()}
    first, last = (sum(of_rank[at] for of_rank in losses) / len(losses) for at in (0, -1))
    wanted = {"ranks": (len(job), 0), "step": (args.steps, 0), "images": (images, 0)}
    wanted |= {"first": (first, 0.001 + 0.01 * first), "last": (last, 0.001 + 0.01 * last)}
    wanted |= {"accuracy": (scores["accuracy"], 0.008), "f1": (scores["macro F1"], 0.012)}
    for name, (value, most) in wanted.items():
        if not abs(told[name] - value) <= most:
            return f"it says {told[name]:g} ({name}), and {value:g} was seen"
    return None
