"""Solutions of the tasks of lesson 03, and their checks."""

import lesson_03_spawn_ddp as lesson
import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from nbtools.record import Wire

CPU = torch.device("cpu")
BUDGET = 160  # bytes that a rank may hand to collectives: two integers for each class

# --- Task 1: predict ---

images_dealt = 7 * -(-297 // 7)


def check_images_dealt(guess):
    """Return None if `guess` is right, else a hint."""
    if guess == images_dealt:
        return None
    return "every rank gets the same number of images, and none is left out"


# --- Task 2: build ---


def balanced_accuracy(rank, world_size, model, test_set):
    """Return the balanced accuracy on the whole test set, the same number on every rank."""
    counts = torch.zeros(2, 10, dtype=torch.int64)  # right answers and images of each class
    for image, label in test_set[rank::world_size]:
        counts[0, label] += model(image) == label
        counts[1, label] += 1
    dist.all_reduce(counts)  # 160 bytes from each rank
    right, images = counts[:, counts[1] > 0]
    return (right / images).mean().item()


class Model:
    """Answers with a digit, and remembers the images that it was asked about."""

    def __init__(self):
        self.asked = []

    def __call__(self, image):
        self.asked.append(image)
        return (image % 10 + (image % 7 == 0)) % 10  # wrong about every seventh image


def make_test_set(images):
    """Return [(image, label)] in which the classes have different numbers of images."""
    return [(image, image % 10) for image in range(images) if image % 10 < 4 or image % 3 == 0]


def examine_balanced_accuracy(rank, world_size, attempt, test_set):
    """Run the attempt on this rank; return its answer, the images it used, the bytes it sent."""
    model = Model()
    with Wire() as wire:
        score = attempt(rank, world_size, model, test_set)
    return score, model.asked, sum(call.nbytes for call in wire.calls)


def check_balanced_accuracy(attempt):
    """Return None if the attempt is right on 2 and 3 ranks, else what is wrong."""
    for nproc in (2, 3):
        for images in (97, 40, 2):  # the last: fewer images than ranks
            test_set = make_test_set(images)
            where = f"with {nproc} ranks and {len(test_set)} images"
            try:
                answers = run(examine_balanced_accuracy, nproc, attempt, test_set, deadline=20)
            except RankFailed as error:
                return f"{where}: {error}"
            scores, used, sent = zip(*answers, strict=True)
            problem = compare_shares(used, test_set) or compare_scores(scores, test_set)
            if problem:
                return f"{where} {problem}"
            if max(sent) > BUDGET:
                return f"{where} a rank hands {max(sent)} bytes to collectives, not {BUDGET}"
    return None


def compare_shares(used, test_set):
    """Return what is wrong with the images that each rank used, or None."""
    asked = sorted(image for of_rank in used for image in of_rank)
    if asked != [image for image, _ in test_set]:
        return f"the model was asked {len(asked)} times: it needs each image once"
    shares = [len(of_rank) for of_rank in used]
    if max(shares) - min(shares) > 1:
        return f"the shares are {shares}: they must differ by one image at most"
    return None


def compare_scores(scores, test_set):
    """Return what is wrong with the ranks' scores, or None."""
    model, by_class = Model(), {}
    for image, label in test_set:
        by_class.setdefault(label, []).append(model(image) == label)
    expected = sum(sum(right) / len(right) for right in by_class.values()) / len(by_class)
    for rank, score in enumerate(scores):
        if not isinstance(score, (int, float, torch.Tensor)):
            return f"rank {rank} returned {type(score).__name__}, not a number"
        if not abs(score - expected) < 1e-6:
            return f"rank {rank} returned {float(score):.4f}, not {expected:.4f}"
    return None


# --- Task 3: repair ---


def evaluate_on_rank_0(rank, world_size, model, test_set):
    """Return the accuracy on rank 0, None on the others.

    All ranks call `evaluate`, because there is a collective in it. Only one uses the result.
    """
    counts = lesson.evaluate(model, test_set, CPU)
    if rank == 0:
        return lesson.accuracy(counts)
    return None


def examine_evaluate(rank, world_size, attempt, seed, images, labels):
    """Run the attempt on this rank with an untrained model; count the images that it sees."""
    model, seen = lesson.make_model(seed), []
    model.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    answer = attempt(rank, world_size, model, list(zip(images, labels, strict=True)))
    return answer, sum(seen)


def check_evaluate_on_rank_0(attempt):
    """Return None if the attempt ends and is right on 2 and 3 ranks, else what is wrong."""
    images, labels = map(torch.stack, zip(*lesson.load_data()[1], strict=True))
    for nproc, count in ((2, 297), (3, 100)):
        where, case = f"with {nproc} ranks", (nproc, images[:count], labels[:count])
        try:
            answers = run(examine_evaluate, nproc, attempt, *case, deadline=20)
        except RankFailed as error:
            return f"{where}: {str(error).partition(': do all ranks')[0]}"  # that is the answer
        (accuracy, *others), seen = zip(*answers, strict=True)
        if sum(seen) != count:
            return f"{where}: {sum(seen)} images were evaluated, not {count}"
        if max(seen) - min(seen) > 1:
            return f"{where}: they evaluated {', '.join(map(str, seen))} images, not equal shares"
        expected = accuracy_of_one_process(*case)
        if not isinstance(accuracy, float) or not abs(accuracy - expected) < 1e-6:
            return f"{where}: rank 0 returned {accuracy}, which is not the accuracy"
        if any(other is not None for other in others):
            return f"{where}: the other ranks must return None"
    return None


@torch.no_grad()
def accuracy_of_one_process(seed, images, labels):
    """Return the share of right answers of an untrained model."""
    answers = lesson.make_model(seed).eval()(images).argmax(1)
    return (answers == labels).double().mean().item()


# What test_tasks.py asks: (check, solution) of each task.
TASKS = {
    "images_dealt": (check_images_dealt, images_dealt),
    "balanced_accuracy": (check_balanced_accuracy, balanced_accuracy),
    "evaluate_on_rank_0": (check_evaluate_on_rank_0, evaluate_on_rank_0),
}

# What a stuck reader is told: the next thought, not the answer. (A literal: a site reads it.)
HINTS = {
    "images_dealt": (
        "The sampler may repeat an image but leave none out, so to which side does it round when "
        "it computes the share of one rank? The question is about all the shares together."
    ),
    "balanced_accuracy": (
        "Do as `evaluate` does for macro F1: find what the score is made of, for each class, and "
        "let the ranks send that. Which step has to wait until after the sum?"
    ),
    "evaluate_on_rank_0": (
        "Find the line of `evaluate` in which the ranks meet, and ask who reaches it here. Doing "
        "the work and using its result are two decisions."
    ),
}
