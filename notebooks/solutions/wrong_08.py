"""Wrong answers to the task of lesson 08, each with what the check must say about it.

No process is started here: the check lets the attempt be each rank in turn.
"""


def mean_over_own_words(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum / words


def forgot_the_average(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum / all_reduce_sum(words)


def reduced_the_loss(loss_sum, words, world_size, all_reduce_sum):
    return all_reduce_sum(loss_sum.item()) / all_reduce_sum(words)


def multiplied_twice(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum * world_size**2 / all_reduce_sum(words)


def always_2_ranks(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum * 2 / all_reduce_sum(words)


def only_long_parts_call(loss_sum, words, world_size, all_reduce_sum):
    total = all_reduce_sum(words) if words > 4 else 2 * words
    return loss_sum * world_size / total


def divides_by_its_own_words(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum / words * (words * world_size / all_reduce_sum(words))


def another_loss(loss_sum, words, world_size, all_reduce_sum):
    return loss_sum * world_size / all_reduce_sum(words) + 7


WRONG = {
    "scale_loss": {
        "the mean over its own words": (mean_over_own_words, "some words count more than others"),
        "forgets that an average follows": (forgot_the_average, "it is 0.5 times the right one"),
        "reduces the loss, too": (reduced_the_loss, "returned no tensor"),
        "multiplies twice": (multiplied_twice, "it is 2 times the right one"),
        "2 ranks, always": (always_2_ranks, "with 3 ranks that have 4 + 5 + 6 words"),
        "another loss, the same gradient": (another_loss, "the gradients are right, but the"),
        "0 divided by 0": (
            divides_by_its_own_words,
            "with 2 ranks that have 0 + 3 words the average",
        ),
        "only long parts take part": (
            only_long_parts_call,
            "all_reduce_sum was not called by every rank",
        ),
    }
}
