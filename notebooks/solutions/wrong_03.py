"""Wrong attempts at the tasks of lesson 03, and words that their verdict must contain."""

import lesson_03_spawn_ddp as lesson
import torch
import torch.distributed as dist
from solutions.lesson_03 import CPU, balanced_accuracy
from torch.utils.data import DistributedSampler

# --- Task 2 ---


def score(pairs, model):
    """Return the balanced accuracy on these images, in one process."""
    by_class = {}
    for image, label in pairs:
        by_class.setdefault(label, []).append(model(image) == label)
    means = [sum(right) / len(right) for right in by_class.values()]
    return sum(means) / max(1, len(means))


def of_its_own_part(rank, world_size, model, test_set):
    return score(test_set[rank::world_size], model)


def mean_over_ranks(rank, world_size, model, test_set):
    mean = torch.tensor(of_its_own_part(rank, world_size, model, test_set))
    dist.all_reduce(mean)
    return mean.item() / world_size


def everything_everywhere(rank, world_size, model, test_set):
    return score(test_set, model)


def with_padding(rank, world_size, model, test_set):
    padded = [test_set[i] for i in DistributedSampler(test_set, shuffle=False)]
    return balanced_accuracy(0, 1, model, padded)


def only_rank_0_works(rank, world_size, model, test_set):
    answer = torch.tensor(score(test_set, model) if rank == 0 else 0.0)
    dist.broadcast(answer, 0)
    return answer.item()


def plain_accuracy(rank, world_size, model, test_set):
    part = test_set[rank::world_size]
    counts = torch.tensor([sum(model(image) == label for image, label in part), len(part)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def counts_empty_classes(rank, world_size, model, test_set):
    counts = torch.zeros(2, 10, dtype=torch.int64)
    for image, label in test_set[rank::world_size]:
        counts[0, label] += model(image) == label
        counts[1, label] += 1
    dist.all_reduce(counts)
    return (counts[0] / counts[1].clamp(min=1)).mean().item()


def leaves_out_classes_without_a_right_answer(rank, world_size, model, test_set):
    counts = torch.zeros(2, 10, dtype=torch.int64)
    for image, label in test_set[rank::world_size]:
        counts[0, label] += model(image) == label
        counts[1, label] += 1
    dist.all_reduce(counts)
    right, images = counts[:, counts[0] > 0]
    return (right / images).mean().item()


def sends_every_answer(rank, world_size, model, test_set):
    mine = [(model(image), label) for image, label in test_set[rank::world_size]]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)
    pairs = [pair for theirs in everyone for pair in theirs]
    return score(pairs, lambda answer: answer)


def not_a_number(rank, world_size, model, test_set):
    balanced_accuracy(rank, world_size, model, test_set)
    return float("nan")


def returns_nothing(rank, world_size, model, test_set):
    balanced_accuracy(rank, world_size, model, test_set)


# --- Task 3 ---


def as_given(rank, world_size, model, test_set):
    if rank == 0:
        return lesson.accuracy(lesson.evaluate(model, test_set, CPU))
    return None


def rank_0_stays_away(rank, world_size, model, test_set):
    if rank == 0:
        return 0.5
    lesson.evaluate(model, test_set, CPU)


def everybody_returns(rank, world_size, model, test_set):
    return lesson.accuracy(lesson.evaluate(model, test_set, CPU))


def alone(model, test_set):
    """Return the accuracy, computed by this rank without the others."""
    images, labels = map(torch.stack, zip(*test_set, strict=True))
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


def each_for_itself(rank, world_size, model, test_set):
    accuracy = alone(model, test_set)
    return accuracy if rank == 0 else None


def rank_0_does_it_all(rank, world_size, model, test_set):
    return alone(model, test_set) if rank == 0 else None


def others_only_answer_the_all_reduce(rank, world_size, model, test_set):
    if rank == 0:
        return lesson.accuracy(lesson.evaluate(model, test_set, CPU))
    dist.all_reduce(torch.zeros(10, 10, dtype=torch.int64))


def a_number_by_heart(rank, world_size, model, test_set):
    lesson.evaluate(model, test_set, CPU)
    return 0.0774 if rank == 0 else None


def nobody_returns(rank, world_size, model, test_set):
    lesson.evaluate(model, test_set, CPU)


WRONG = {
    "images_dealt": {
        "the test set": (297, "the same number of images"),
        "some left out": (294, "the same number of images"),
        "all to each": (2079, "the same number of images"),
    },
    "balanced_accuracy": {
        "of its own part": (of_its_own_part, "with 2 ranks"),
        "mean over ranks": (mean_over_ranks, "rank 0 returned"),
        "everything everywhere": (everything_everywhere, "it needs each image once"),
        "with padding": (with_padding, "it needs each image once"),
        "only rank 0 works": (only_rank_0_works, "they must differ by one image at most"),
        "plain accuracy": (plain_accuracy, "rank 0 returned"),
        "empty classes": (counts_empty_classes, "images rank 0 returned"),
        "classes without a right answer": (
            leaves_out_classes_without_a_right_answer,
            "images rank 0 returned",
        ),
        "sends every answer": (sends_every_answer, "bytes to collectives, not 160"),
        "nan": (not_a_number, "rank 0 returned nan"),
        "returns nothing": (returns_nothing, "returned NoneType, not a number"),
    },
    "evaluate_on_rank_0": {
        "as given": (
            as_given,
            "because rank 1 had already returned",
        ),
        "rank 0 stays away": (rank_0_stays_away, "because rank 0 had already returned"),
        "everybody returns": (everybody_returns, "the other ranks must return None"),
        "each for itself": (each_for_itself, "with 2 ranks: 594 images were evaluated"),
        "rank 0 does it all": (rank_0_does_it_all, "297, 0 images, not equal shares"),
        "others only answer": (others_only_answer_the_all_reduce, "149 images were evaluated"),
        "by heart": (a_number_by_heart, "which is not the accuracy"),
        "nobody returns": (nobody_returns, "rank 0 returned None"),
    },
}
