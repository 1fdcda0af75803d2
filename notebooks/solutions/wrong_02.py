"""Wrong attempts at the tasks of lesson 02, and words that their verdict must contain."""

import torch
import torch.distributed as dist
from solutions.lesson_02 import my_ddp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- Task 3 ---


def train_on(numbers, rows, targets, model, batch_size, wrap=DistributedDataParallel):
    """Do what the task's function does, on these row numbers."""
    replica = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [numbers[i : i + batch_size] for i in range(0, len(numbers), batch_size)]
    for batch in batches:
        optimizer.zero_grad()
        mse_loss(replica(rows[batch]), targets[batch]).backward()
        optimizer.step()
    return len(batches)


def as_given(rank, world_size, rows, targets, model, batch_size):
    numbers = list(range(len(rows)))[rank::world_size]
    return train_on(numbers, rows, targets, model, batch_size)


def without_ddp(rank, world_size, rows, targets, model, batch_size):
    numbers = list(range(len(rows)))[rank::world_size]
    return train_on(numbers, rows, targets, model, batch_size, wrap=lambda model: model)


def all_rows_on_all_ranks(rank, world_size, rows, targets, model, batch_size):
    return train_on(list(range(len(rows))), rows, targets, model, batch_size)


def one_batch_only(rank, world_size, rows, targets, model, batch_size):
    numbers = list(range(len(rows)))[rank::world_size][:batch_size]
    return train_on(numbers, rows, targets, model, batch_size)


def nobody_trains(rank, world_size, rows, targets, model, batch_size):
    model(rows[rank:100:world_size])
    return 1


def equal_at_the_end_only(rank, world_size, rows, targets, model, batch_size):
    without_ddp(rank, world_size, rows, targets, model, batch_size)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return 5


def all_nan(rank, world_size, rows, targets, model, batch_size):
    steps = right_share(rank, world_size, rows, targets, model, batch_size)
    torch.nn.init.constant_(model.weight, float("nan"))
    return steps


def other_targets(rank, world_size, rows, targets, model, batch_size):
    return right_share(rank, world_size, rows, targets.flip(0), model, batch_size)


def right_share(rank, world_size, rows, targets, model, batch_size):
    numbers = list(range(len(rows)))[rank::world_size][: len(rows) // world_size]
    return train_on(numbers, rows, targets, model, batch_size)


def one_large_step(rank, world_size, rows, targets, model, batch_size):
    return right_share(rank, world_size, rows, targets, model, len(rows))


def returns_nothing_else(rank, world_size, rows, targets, model, batch_size):
    right_share(rank, world_size, rows, targets, model, batch_size)


def right_by_joining(rank, world_size, rows, targets, model, batch_size):
    """Not wrong: a rank that has no rows left joins the all-reduces of the others with zeros."""
    numbers = list(range(len(rows)))[rank::world_size]
    replica = DistributedDataParallel(model)
    with replica.join():
        return train_on(numbers, rows, targets, model, batch_size, wrap=lambda model: replica)


def right_with_a_loader(rank, world_size, rows, targets, model, batch_size):
    """Not wrong: the way of the lesson."""
    data = TensorDataset(rows, targets)
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data, world_size, rank))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part, goal in loader:
        optimizer.zero_grad()
        mse_loss(replica(part), goal).backward()
        optimizer.step()
    return len(loader)


def raises(rank, world_size, rows, targets, model, batch_size):
    raise ValueError("my own mistake")


def right_for_two_ranks_only(rank, world_size, rows, targets, model, batch_size):
    numbers = list(range(len(rows)))[rank::2][:50]
    return train_on(numbers, rows, targets, model, batch_size)


# --- Task 4 ---


def hook_all(model, hook):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)
    return model


def average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def only_start(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return model


def only_average(model):
    return hook_all(model, average)


def sum_instead_of_mean(model):
    return hook_all(only_start(model), lambda parameter: dist.all_reduce(parameter.grad) and None)


def half_the_sum(model):
    def halve(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2

    return hook_all(only_start(model), halve)


def start_from_the_last_rank(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=dist.get_world_size() - 1)
    return only_average(model)


def average_only_once(model):
    done = set()

    def average_once(parameter):
        if parameter not in done:
            done.add(parameter)
            average(parameter)

    return hook_all(only_start(model), average_once)


def weight_only(model):
    only_start(model).weight.register_post_accumulate_grad_hook(average)
    return model


def hook_tensors(model, hook):
    for parameter in only_start(model).parameters():
        if parameter.requires_grad:
            parameter.register_hook(hook)
    return model


def sum_in_the_hook_of_a_tensor(model):
    def add_up(gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total

    return hook_tensors(model, add_up)


def no_gradient_at_all(model):
    return hook_tensors(model, torch.zeros_like)


def right_in_the_hook_of_a_tensor(model):
    """Not wrong here, where each parameter has one gradient in a backward pass."""

    def average_it(gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return hook_tensors(model, average_it)


def right_without_waiting_at_once(model):
    """Not wrong: the last hook of a backward pass waits for all reductions."""
    trained = [parameter for parameter in only_start(model).parameters() if parameter.requires_grad]
    begun = []

    def begin(parameter):
        begun.append((dist.all_reduce(parameter.grad, async_op=True), parameter))
        if len(begun) == len(trained):
            for work, reduced in begun:
                work.wait()
                reduced.grad /= dist.get_world_size()
            begun.clear()

    return hook_all(model, begin)


def nobody_waits(model):
    def begin(parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True)

    return hook_all(only_start(model), begin)


def divides_before_it_waits(model):
    def begin(parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)
        parameter.grad /= dist.get_world_size()
        work.wait()

    return hook_all(only_start(model), begin)


def hooks_frozen_ones_too(model):
    for parameter in only_start(model).parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def frozen_ones_stay_different(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    return only_average(model)


def layer_by_layer(model):
    """A weight that two layers share is averaged twice: right numbers, and too many bytes."""
    only_start(model)
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
    return model


def all_gradients_in_each_hook(model):
    def average_all(_):
        for parameter in model.parameters():
            if parameter.grad is not None:
                average(parameter)

    return hook_all(only_start(model), average_all)


def as_objects(model):
    def average_it(parameter):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, parameter.grad)
        parameter.grad.copy_(sum(everyone) / len(everyone))

    return hook_all(only_start(model), average_it)


def returns_nothing(model):
    my_ddp(model)


def fails(model):
    raise ValueError("my own mistake")


RIGHT = {  # other right answers
    "deal_and_train": [right_with_a_loader, right_by_joining],
    "my_ddp": [right_in_the_hook_of_a_tensor, right_without_waiting_at_once],
}

WRONG = {
    "rows_in_a_step": {"the batch size": (30, "what // does"), "one rank": (7, "what // does")},
    "megabytes_handed_in": {
        "as lesson 01's master": (307.2, "each of its gradients once"),
        "divided by the ranks": (25.6, "each of its gradients once"),
    },
    "deal_and_train": {
        "as given": (as_given, "do not come to the end: steps begun, rank by rank: 6, 5"),
        "without DDP": (without_ddp, "the ranks' parameters differ"),
        "all rows on all ranks": (all_rows_on_all_ranks, "the ranks' rows overlap"),
        "one batch only": (one_batch_only, "with 2 ranks and 101 rows, only 20 different rows"),
        "nobody trains": (nobody_trains, "are not those of averaged gradients"),
        "equal at the end": (equal_at_the_end_only, "are not those of averaged gradients"),
        "nan": (all_nan, "the ranks' parameters differ"),
        "one large step": (one_large_step, "takes 50 rows in a step, and not the batch size"),
        "returns nothing": (returns_nothing_else, "rank 0 returns None, and has made 5 steps"),
        "other targets": (other_targets, "are not those of averaged gradients"),
        "raises": (raises, "ValueError: my own mistake"),
        "for two ranks": (right_for_two_ranks_only, "with 3 ranks"),
    },
    "my_ddp": {
        "nothing": (lambda model: model, "rank 1 does not hold the parameters that rank 0 had"),
        "DDP itself": (DistributedDataParallel, "DistributedDataParallel itself is not an answer"),
        "only the average": (only_average, "rank 1 does not hold"),
        "from the last rank": (start_from_the_last_rank, "rank 0 does not hold"),
        "only the start": (only_start, "in step 1, rank 0's gradient is"),
        "the sum": (sum_instead_of_mean, "in step 1, rank 0's gradient is"),
        "half the sum": (half_the_sum, "with 3 ranks: in step 1, rank 0's gradient is"),
        "the sum, in a tensor's hook": (
            sum_in_the_hook_of_a_tensor,
            "in step 1, rank 0's gradient",
        ),
        "zeros": (no_gradient_at_all, "in step 1, rank 0's gradient is"),
        "the weight only": (weight_only, "in step 1, rank 0's gradient is"),
        "only once": (average_only_once, "in step 2, rank 0's gradient is"),
        "returns nothing": (returns_nothing, "has a NoneType, not a model"),
        "nobody waits": (nobody_waits, "with 2 ranks: in step 1, rank 0's gradient is nan away"),
        "divides too early": (divides_before_it_waits, "in step 1, rank 0's gradient is"),
        "hooks frozen ones": (hooks_frozen_ones_too, "that doesn't require gradient"),
        "frozen ones differ": (
            frozen_ones_stay_different,
            "whose bias is frozen: with 2 ranks: after the call, rank 1 does not hold",
        ),
        "layer by layer": (layer_by_layer, "share a weight: with 2 ranks: in step 1, rank 0 hands"),
        "all in each hook": (all_gradients_in_each_hook, "in step 1, rank 0"),
        "as objects": (as_objects, "bytes to collectives, and the gradients have 96"),
        "fails": (fails, "ValueError: my own mistake"),
    },
}
