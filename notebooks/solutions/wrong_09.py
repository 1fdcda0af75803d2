"""Wrong attempts at the tasks of lesson 09, and words that their verdict must contain."""

import torch
import torch.distributed as dist
from solutions.lesson_09 import gradient_of_the_rows, statistics_of_all_images
from torch.distributed._functional_collectives import all_reduce

# --- Task 2 ---


HALF = torch.float16, torch.bfloat16


def by_channel(images):
    return images.transpose(0, 1).flatten(1)


def in_half_precision(rank, world_size, images):
    """Sums and counts in the type of the images."""
    values = by_channel(images)
    sums = torch.cat([values.sum(1), values.new_tensor([values.shape[1]])])
    dist.all_reduce(sums)
    mean = sums[:-1] / sums[-1]
    squares = (values - mean[:, None]).square().sum(1)
    dist.all_reduce(squares)
    return mean, squares / sums[-1]


def two_sums(rank, world_size, images):
    """C + 1 numbers, then C: as few, with one more wait."""
    wide = images.float() if images.dtype in HALF else images
    mean, variance = in_half_precision(rank, world_size, wide)
    return mean.to(images.dtype), variance.to(images.dtype)


def only_float16_in_float32(rank, world_size, images):
    if images.dtype is torch.bfloat16:
        return in_half_precision(rank, world_size, images)
    return two_sums(rank, world_size, images)


def own_part_only(rank, world_size, images):
    return by_channel(images).mean(1), by_channel(images).var(1, correction=0)


def mean_of_means(rank, world_size, images):
    mean, variance = own_part_only(rank, world_size, images)
    dist.all_reduce(mean)
    dist.all_reduce(variance)
    return mean / world_size, variance / world_size


def mean_of_variances(rank, world_size, images):
    values = by_channel(images)
    squares = (values - values.sum(1, True) / max(values.shape[1], 1)).square().sum(1)
    sums = torch.cat([values.sum(1), squares, values.new_tensor([values.shape[1]])])
    dist.all_reduce(sums)
    mean, squares = sums[:-1].chunk(2)
    return mean / sums[-1], squares / sums[-1]


def one_pass(rank, world_size, images, shift=0.0):
    values = by_channel(images) - shift
    count = values.new_tensor([values.shape[1]])
    sums = torch.cat([values.sum(1), values.square().sum(1), count])
    dist.all_reduce(sums)
    mean, squares = (sums[:-1] / sums[-1]).chunk(2)
    return mean + shift, squares - mean**2


def shifted_by_channel_0(rank, world_size, images):
    shift = by_channel(images).sum(1)[0] / max(by_channel(images).shape[1], 1)
    shift = shift.reshape(1)
    dist.broadcast(shift, world_size - 1)
    return one_pass(rank, world_size, images, shift)


def one_pass_in_float64_and_back(rank, world_size, images):
    mean, variance = one_pass(rank, world_size, images.double())
    return mean.to(images.dtype), variance.to(images.dtype)


def sends_the_images(rank, world_size, images):
    parts = [None] * world_size
    dist.all_gather_object(parts, by_channel(images))
    whole = torch.cat(parts, dim=1)
    return whole.mean(1), whole.var(1, correction=0)


def counts_images(rank, world_size, images):
    mean, variance = statistics_of_all_images(rank, world_size, images)
    pixels = images.shape[2] * images.shape[3]
    return mean * pixels, variance * pixels


def changes_the_images(rank, world_size, images):
    answer = statistics_of_all_images(rank, world_size, images)
    images.zero_()
    return answer


def three_channels(rank, world_size, images):
    values = images.transpose(0, 1).reshape(3, -1)
    return statistics_of_all_images(rank, world_size, values.T[:, :, None, None])


def into_one_tensor(rank, world_size, images):
    """The same numbers by all_gather_single, and the count as a whole number."""
    values = by_channel(images.float() if images.dtype in HALF else images)
    mean = values.sum(1) / max(values.shape[1], 1)
    own = torch.cat([mean, (values - mean[:, None]).square().sum(1)])
    everyone, counts = (
        own.new_empty(world_size, len(own)),
        [torch.tensor(0) for _ in range(world_size)],
    )
    dist.all_gather_single(everyone.view(-1), own)
    dist.all_gather(counts, torch.tensor(values.shape[1]))
    counts = torch.stack(counts)[:, None]
    means, squares = everyone.chunk(2, dim=1)
    mean = (counts * means).sum(0) / counts.sum()
    variance = (squares + counts * (means - mean).square()).sum(0) / counts.sum()
    return mean.to(images.dtype), variance.to(images.dtype)


def unbiased(rank, world_size, images):
    mean, variance = statistics_of_all_images(rank, world_size, images)
    count = torch.tensor(by_channel(images).shape[1])
    dist.all_reduce(count)
    return mean, variance * count / (count - 1)


def in_float64(rank, world_size, images):
    return statistics_of_all_images(rank, world_size, images.double())


def one_tensor(rank, world_size, images):
    return torch.stack(statistics_of_all_images(rank, world_size, images))


def in_the_shape_of_images(rank, world_size, images):
    mean, variance = statistics_of_all_images(rank, world_size, images)
    return mean.view(1, -1, 1, 1), variance


def first_two_ranks(rank, world_size, images):
    return statistics_of_all_images(rank, world_size, images if rank < 2 else images[:0])


# --- Task 3 ---


def as_given(rank, world_size, gradient, normalised, scale, count):
    through_mean, through_variance = gradient.mean(0), (gradient * normalised).mean(0)
    return scale * (gradient - through_mean - normalised * through_variance)


def as_constants(rank, world_size, gradient, normalised, scale, count):
    return scale * gradient


def through_the_mean_only(rank, world_size, gradient, normalised, scale, count):
    total = gradient.sum(0)
    dist.all_reduce(total)
    return scale * (gradient - total / count)


def own_sums(rank, world_size, gradient, normalised, scale, count):
    sums = gradient.sum(0), (gradient * normalised).sum(0)
    return scale * (gradient - sums[0] / count - normalised * sums[1] / count)


def mean_of_means_of_gradients(rank, world_size, gradient, normalised, scale, count):
    own = max(len(gradient), 1)
    sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)]) / own
    dist.all_reduce(sums, dist.ReduceOp.AVG)
    return scale * (gradient - sums[0] - normalised * sums[1])


def reduces_the_gradient(rank, world_size, gradient, normalised, scale, count):
    answer = as_given(rank, world_size, gradient, normalised, scale, count)
    total = answer.nan_to_num().sum(0)
    dist.all_reduce(total)
    return answer - total / count


def sends_gradients(rank, world_size, gradient, normalised, scale, count):
    parts = [None] * world_size
    dist.all_gather_object(parts, (gradient, normalised))
    gradients, rows = (torch.cat(part) for part in zip(*parts, strict=True))
    sums = gradients.mean(0), (gradients * rows).mean(0)
    return scale * (gradient - sums[0] - normalised * sums[1])


def in_place(rank, world_size, gradient, normalised, scale, count):
    sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)]) / count
    dist.all_reduce(sums)
    return gradient.sub_(sums[0]).sub_(normalised * sums[1]).mul_(scale)


def divides_the_scale(rank, world_size, gradient, normalised, scale, count):
    sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)])
    dist.all_reduce(sums)
    return scale.div_(count) * (count * gradient - sums[0] - normalised * sums[1])


def skips_empty_parts(rank, world_size, gradient, normalised, scale, count):
    if len(gradient) == 0:
        return gradient
    return gradient_of_the_rows(rank, world_size, gradient, normalised, scale, count)


def by_functional_collectives(rank, world_size, gradient, normalised, scale, count):
    sums = torch.stack([gradient.sum(0), (gradient * normalised).sum(0)])
    means = all_reduce(sums, "sum", dist.group.WORLD) / count
    return scale * (gradient - means[0] - normalised * means[1])


def for_all_rows(rank, world_size, gradient, normalised, scale, count):
    return gradient_of_the_rows(rank, world_size, gradient, normalised, scale, count).sum(0)


RIGHT = {
    "statistics_of_all_images": [two_sums, into_one_tensor],
    "gradient_of_the_rows": [by_functional_collectives],
}

MEAN = "with parts of different sizes, on 2 ranks, rank 0 has a mean that is off by"
VARIANCE = "with parts of different sizes, on 2 ranks, rank 0 has a variance that is off"
CHANNELS = "with float32, and channel means of 0, 3,000 and -7,000, on 2 ranks, rank 0 has a var"
FAR = "100 million and -300 million, on 2 ranks, rank 0 has a variance that is off"
ROWS = "with [3, 9] rows, rank 0 is off by"

WRONG = {
    "variance_of_all_rows": {
        "within the parts, weighted": (4.5, "their means lie apart"),
        "within the parts": (4, "their means lie apart"),
        "for equal parts": (20, "parts of one size"),
        "something else": (12, "on average, squared"),
    },
    "statistics_of_all_images": {
        "its own part only": (own_part_only, MEAN),
        "the mean of the means": (mean_of_means, MEAN),
        "the mean of the variances": (mean_of_variances, VARIANCE),
        "one pass": (one_pass, CHANNELS),
        "one pass, shifted by channel 0's mean": (shifted_by_channel_0, CHANNELS),
        "one pass in float64, and back": (one_pass_in_float64_and_back, FAR),
        "sends the images": (sends_the_images, "7 numbers are enough"),
        "changes the images": (changes_the_images, "changes its images"),
        "three channels": (three_channels, "with no image on rank 0"),
        "counts images, not pixels": (counts_images, MEAN),
        "the unbiased variance": (unbiased, VARIANCE),
        "in half precision": (in_half_precision, "with float16, and sums above 65,504, on 2 ranks"),
        "only float16 in float32": (only_float16_in_float32, "with bfloat16, and thousands of pi"),
        "in float64": (in_float64, "has a mean in torch.float64, and images in torch.float32"),
        "one tensor": (one_tensor, "rank 0 returned Tensor, not two tensors"),
        "in the shape of images": (in_the_shape_of_images, "not a tensor of 3 numbers"),
        "the first two ranks only": (first_two_ranks, "on 3 ranks, rank 0 has a mean"),
    },
    "gradient_of_the_rows": {
        "as it was given": (as_given, ROWS),
        "mean and variance as constants": (as_constants, ROWS),
        "through the mean only": (through_the_mean_only, ROWS),
        "sums of its own rows": (own_sums, ROWS),
        "the mean of the means": (mean_of_means_of_gradients, ROWS),
        "reduces the result": (reduces_the_gradient, ROWS),
        "sends all gradients": (sends_gradients, "for 4 channels 8 are enough"),
        "in place": (in_place, "changes what it was given"),
        "in place, the scale": (divides_the_scale, "changes what it was given"),
        "an empty part sends nothing": (skips_empty_parts, "call [0, 1] collectives"),
        "one gradient for all rows": (for_all_rows, "returned [4] numbers for [3, 4]"),
    },
    "forwards_that_send": {
        "all": (10, "the forward before leave behind"),
        "those in training": (6, "before the first, the memory is true"),
        "another": (8, "write a list"),
    },
}
