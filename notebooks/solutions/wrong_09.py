"""Wrong answers to the task of lesson 09, each with what the check must say about it."""

import torch
import torch.distributed as dist
from solutions.lesson_09 import solution


def by_channel(images):
    return images.transpose(0, 1).flatten(1)


def own_part_only(rank, world_size, images):
    return by_channel(images).mean(1), by_channel(images).var(1, correction=0)


def mean_of_means(rank, world_size, images):
    mean, variance = own_part_only(rank, world_size, images)
    dist.all_reduce(mean)
    dist.all_reduce(variance)
    return mean / world_size, variance / world_size


def mean_of_variances(rank, world_size, images):
    mean, _ = solution(rank, world_size, images)
    numbers = by_channel(images)
    sums = torch.cat([(numbers - numbers.mean(1, True)).square().sum(1), numbers.new_tensor([0.0])])
    sums[-1] = numbers.shape[1]
    dist.all_reduce(sums.nan_to_num_())
    return mean, sums[:-1] / sums[-1]


def one_pass(rank, world_size, images):
    numbers = by_channel(images)
    sums = torch.stack([numbers.sum(1), numbers.square().sum(1), numbers.new_ones(3)])
    sums[2] = numbers.shape[1]
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean, sums[1] / sums[2] - mean**2


def one_pass_in_float64(rank, world_size, images):
    return one_pass(rank, world_size, images.double())


def one_pass_in_float64_and_back(rank, world_size, images):
    mean, variance = one_pass(rank, world_size, images.double())
    return mean.to(images.dtype), variance.to(images.dtype)


def eight_numbers_in_an_image(rank, world_size, images):
    if rank:
        return solution(rank, world_size, images)
    mean, variance = solution(rank, world_size, images)
    return mean * (images.shape[2] * images.shape[3] / 8), variance


def sends_the_images(rank, world_size, images):
    parts = [None] * world_size
    dist.all_gather_object(parts, by_channel(images))
    whole = torch.cat(parts, dim=1)
    return whole.mean(1), whole.var(1, correction=0)


def counts_images(rank, world_size, images):
    mean, variance = solution(rank, world_size, images)
    return mean * 8, variance * 8


def unbiased(rank, world_size, images):
    mean, variance = solution(rank, world_size, images)
    count = torch.tensor(by_channel(images).shape[1])
    dist.all_reduce(count)
    return mean, variance * count / (count - 1)


def wrong_on_rank_1(rank, world_size, images):
    mean, variance = solution(rank, world_size, images)
    return mean + (rank == 1), variance


def one_tensor(rank, world_size, images):
    return torch.stack(solution(rank, world_size, images))


def numbers_of_images(rank, world_size, images):
    mean, variance = solution(rank, world_size, images)
    return mean.view(1, 3, 1, 1), variance


def first_two_ranks(rank, world_size, images):
    return solution(rank, world_size, images if rank < 2 else images[:0])


WRONG = {
    "statistics_of_all_images": {
        "its own part only": (
            own_part_only,
            "with parts of different sizes, on 2 ranks, the mean of rank 0 is off by",
        ),
        "the mean of the means": (
            mean_of_means,
            "with parts of different sizes, on 2 ranks, the mean of rank 0 is off by",
        ),
        "the mean of the variances": (
            mean_of_variances,
            "with parts of different sizes, on 2 ranks, the variance of rank 0 is off",
        ),
        "one pass": (
            one_pass,
            "with float32, and a mean near 1000, on 2 ranks, the variance of rank 0 is off by",
        ),
        "one pass in float64": (
            one_pass_in_float64,
            "the mean of rank 0 is torch.float64, the images are torch.float32",
        ),
        "one pass in float64, and back": (
            one_pass_in_float64_and_back,
            "with float64, and a mean near 100 million, on 2 ranks, the variance of rank 0 is off",
        ),
        "8 numbers in every image": (
            eight_numbers_in_an_image,
            "with no image on rank 0, on 2 ranks, the mean of rank 0 is off by",
        ),
        "sends the images": (sends_the_images, "to allgather: send sums only"),
        "counts images, not numbers": (counts_images, "the mean of rank 0 is off by"),
        "the unbiased variance": (unbiased, "the variance of rank 0 is off by"),
        "wrong on rank 1": (wrong_on_rank_1, "the mean of rank 1 is off by"),
        "one tensor": (one_tensor, "rank 0 returned Tensor, not two tensors"),
        "a mean in the shape of the images": (
            numbers_of_images,
            "the mean of rank 0 is not a tensor of 3 numbers",
        ),
        "the first two ranks only": (
            first_two_ranks,
            "with parts of different sizes, on 3 ranks, the mean of rank 0 is off by",
        ),
    }
}
