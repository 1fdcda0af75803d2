"""Wrong attempts at the tasks of lesson 13, and words that their verdict must contain."""

import lesson_13_tensor_and_hybrid as lesson
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

# --- Task 2 ---


def found_here(part, tokens, rank):
    first = rank * len(part)
    here = (tokens >= first) & (tokens < first + len(part))
    return part[torch.where(here, tokens - first, 0)] * here.unsqueeze(-1)


def not_added_up(part, tokens, group):
    return found_here(part, tokens, dist.get_rank(group))


def without_zeros(part, tokens, group):
    first = dist.get_rank(group) * len(part)
    found = part[(tokens - first).clamp(0, len(part) - 1)]
    return lesson.SumInForward.apply(found, group)


def past_autograd(part, tokens, group):
    found = found_here(part, tokens, dist.get_rank(group)).detach()
    dist.all_reduce(found, group=group)
    return found


def sum_in_backward_too(part, tokens, group):
    found = found_here(part, tokens, dist.get_rank(group))
    found = lesson.SumInBackward.apply(found, group)
    return lesson.SumInForward.apply(found, group)


def f_in_place_of_g(part, tokens, group):
    return lesson.SumInBackward.apply(found_here(part, tokens, dist.get_rank(group)), group)


def rank_of_the_world(part, tokens, group):
    return lesson.SumInForward.apply(found_here(part, tokens, dist.get_rank()), group)


def half_of_the_table(part, tokens, group):
    first = dist.get_rank(group) * 6
    here = (tokens >= first) & (tokens < first + 6)
    found = part[torch.where(here, tokens - first, 0)] * here.unsqueeze(-1)
    return lesson.SumInForward.apply(found, group)


def whole_table(part, tokens, group):
    """Right rows and right gradients, but all of the table on each rank."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach(), group=group)
    parts[dist.get_rank(group)] = part
    return torch.cat(parts)[tokens]


def sum_in_backward_and_divided(part, tokens, group):
    """Right rows and right gradients, but a second all-reduce, in backward."""
    found = found_here(part, tokens, dist.get_rank(group))
    found.register_hook(lambda gradient: gradient / dist.get_world_size(group))
    return sum_of_both(found, group)


def sum_of_both(found, group):
    return lesson.SumInForward.apply(lesson.SumInBackward.apply(found, group), group)


def for_one_shape(part, tokens, group):
    first = dist.get_rank(group) * len(part)
    here = (tokens >= first) & (tokens < first + len(part))
    found = part[torch.where(here, tokens - first, 0)] * here.reshape(5, 6, 1)
    return lesson.SumInForward.apply(found, group)


def fails(*_):
    raise ValueError("my own mistake")


# --- Task 3 ---


def as_given(whole, parts, limit, group):
    return clip_grad_norm_([*whole, *parts], limit).item()


def norm_of(squares, whole, parts, limit):
    norm = squares.sqrt()
    for parameter in [*whole, *parts]:
        parameter.grad *= min(1, limit / norm)
    return norm.item()


def squares_of(parameters):
    return sum(parameter.grad.square().sum() for parameter in parameters)


def whole_counted_by_each(whole, parts, limit, group):
    squares = squares_of([*whole, *parts])
    dist.all_reduce(squares, group=group)
    return norm_of(squares, whole, parts, limit)


def norms_added(whole, parts, limit, group):
    norm = squares_of(parts).sqrt()
    dist.all_reduce(norm, group=group)
    return norm_of(norm**2 + squares_of(whole), whole, parts, limit)


def mean_of_squares(whole, parts, limit, group):
    squares = squares_of(parts)
    dist.all_reduce(squares, group=group)
    squares = squares / dist.get_world_size(group) + squares_of(whole)
    return norm_of(squares, whole, parts, limit)


def total_squares(whole, parts, group):
    squares = squares_of(parts)
    dist.all_reduce(squares, group=group)
    return squares + squares_of(whole)


def forgets_the_group(whole, parts, limit, group):
    return norm_of(total_squares(whole, parts, None), whole, parts, limit)


def first_part_only(whole, parts, limit, group):
    return norm_of(total_squares(whole, parts[:1], group), whole, parts, limit)


def parts_only(whole, parts, limit, group):
    return norm_of(total_squares(whole, parts, group), [], parts, limit)


def always_scaled(whole, parts, limit, group):
    norm = total_squares(whole, parts, group).sqrt()
    for parameter in [*whole, *parts]:
        parameter.grad *= limit / norm
    return norm.item()


def constant(whole, parts, limit, group):
    """The norm of the first gradient that the check tries."""
    squares = torch.tensor(169.0)
    dist.all_reduce(torch.zeros(1), group=group)
    return norm_of(squares, whole, parts, limit)


def gathers_objects(whole, parts, limit, group):
    squares = [None] * dist.get_world_size(group)
    dist.all_gather_object(squares, squares_of(parts), group=group)
    return norm_of(sum(squares) + squares_of(whole), whole, parts, limit)


def one_message_for_each(whole, parts, limit, group):
    squares = squares_of(whole)
    for parameter in parts:
        squares = squares + total_squares([], [parameter], group)
    return norm_of(squares, whole, parts, limit)


def right_by_the_library(whole, parts, limit, group):
    """Not wrong: PyTorch's own two halves of clip_grad_norm_."""
    norm = total_squares(whole, parts, group).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*whole, *parts], limit, norm)
    return norm.item()


RIGHT = {"clip": [right_by_the_library]}  # other right answers

WRONG = {
    "megabytes_handed_in": {
        "forward only": (402.65, "half of it"),
        "one for each block": (201.3, "How many does a block make?"),
        "divided by 8 ranks": (100.7, "How many does a block make?"),
    },
    "look_up": {
        "not added up": (not_added_up, "has not found the rows"),
        "without zeros": (without_zeros, "has not found the rows"),
        "past autograd": (past_autograd, "no gradient can flow"),
        "a sum in backward too": (sum_in_backward_too, "2.00 times as long"),
        "f, not g": (f_in_place_of_g, "has not found the rows"),
        "rank of the world": (rank_of_the_world, "of which [1, 2] form the group"),
        "for two ranks": (half_of_the_table, "IndexError: index"),
        "a sum in backward, divided": (sum_in_backward_and_divided, "in backward(), where nothing"),
        "the whole table": (whole_table, "sent allgather of"),
        "for one shape": (for_one_shape, "RuntimeError: shape"),
        "returns nothing": (lambda *_: None, "returned (), not shape (5, 6, 4)"),
        "fails": (fails, "ValueError: my own mistake"),
    },
    "clip": {
        "as given": (as_given, "with 2 ranks: the norm of the whole gradient is 13"),
        "whole counted by each": (whole_counted_by_each, "has found 13.93"),
        "norms added": (norms_added, "the norm of the whole gradient is 13"),
        "mean of squares": (mean_of_squares, "the norm of the whole gradient is 13"),
        "parts only": (parts_only, "limit 6.5: rank 0 has scaled its `whole` by 1"),
        "always scaled": (always_scaled, "limit 20: rank 0 has scaled its `whole` by 1.54"),
        "a constant": (constant, "the norm of the whole gradient is 5"),
        "gathers objects": (gathers_objects, "one all-reduce of one number is enough"),
        "a message for each": (one_message_for_each, "one all-reduce of one number is enough"),
        "forgets the group": (forgets_the_group, "in groups of [[1, 2], [0]]: the norm"),
        "first part only": (first_part_only, "with 2 ranks: the norm of the whole gradient is 13"),
        "fails": (fails, "ValueError: my own mistake"),
    },
    "parts_for_40_gb": {
        "too few": (2, "does not fit"),
        "as for 40 blocks": (4, "does not fit"),
        "two machines": (16, "fits, but"),
        "not a choice": (5, "choose one of"),
    },
}
