"""Wrong attempts at the tasks of lesson 18, and words that their verdict must contain."""

import torch
import torch.distributed as dist
from solutions.lesson_18 import kept_by_eight

# --- Task 2 ---


def own_part(flat):
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def by_all_reduce(flat):
    dist.all_reduce(flat)
    return own_part(flat)


def by_gloo(flat):
    part = torch.empty_like(own_part(flat))
    dist.reduce_scatter_single(part, flat)
    return part


def by_gathering(flat):
    everything = flat.new_empty(dist.get_world_size() * len(flat))
    dist.all_gather_single(everything, flat)
    return own_part(everything.view(-1, len(flat)).sum(0))


def by_all_to_all(flat):
    """Right, and within the budget: each part goes straight to its rank."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    return received.view(dist.get_world_size(), -1).sum(0)


def by_all_to_all_of_all(flat):
    ranks = dist.get_world_size()
    received = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_to_all(received, [flat] * ranks)
    return own_part(torch.stack(received).sum(0))


# --- Task 3 ---


def gathered(shard, shape):
    whole = shard.new_empty(shape)
    dist.all_gather_single(whole.view(-1), shard)
    return whole


def all_at_once(shards, shape, x):
    for whole in [gathered(shard, shape) for shard in shards]:
        x = torch.tanh(x @ whole)
    return x


def the_old_one_lives(shards, shape, x):
    for shard in shards:
        whole = gathered(shard, shape)
        x = torch.tanh(x @ whole)
    return x


def by_broadcasts(shards, shape, x):
    """Right: the windows of one tensor are filled by their owners."""
    whole = shards[0].new_empty(shape)
    for shard in shards:
        for rank, window in enumerate(whole.view(-1).chunk(dist.get_world_size())):
            if rank == dist.get_rank():
                window.copy_(shard)
            dist.broadcast(window, rank)
        x = torch.tanh(x @ whole)
    return x


def by_a_list(shards, shape, x):
    """Right: a list of windows."""
    for shard in shards:
        whole = shard.new_empty(shape)
        dist.all_gather(list(whole.view(-1).chunk(dist.get_world_size())), shard)
        x = torch.tanh(x @ whole)
        del whole
    return x


def and_waits(shards, shape, x):
    """Right: starts, and waits."""
    whole = shards[0].new_empty(shape)
    for shard in shards:
        dist.all_gather_single(whole.view(-1), shard, async_op=True).wait()
        x = torch.tanh(x @ whole)
    return x


def only_the_shards(shards, shape, x):
    for shard in shards:
        whole = torch.zeros(shape, dtype=shard.dtype)
        whole.view(-1)[: len(shard)] = shard
        x = torch.tanh(x @ whole)
    return x


def in_a_function(shards, shape, x):
    """Right: the name goes when the function ends."""
    for shard in shards:
        x = one_layer(shard, shape, x)
    return x


def one_layer(shard, shape, x):
    return torch.tanh(x @ gathered(shard, shape))


# --- Task 4 ---


def moments_of_the_same_rank(saved, count, rank, ranks):
    length = -(-count // ranks)
    whole = torch.cat([theirs["parameters"] for theirs in saved])[:count]
    whole = torch.cat([whole, whole.new_zeros(length * ranks - count)])
    parts = {"parameters": whole[rank * length : (rank + 1) * length]}
    own = saved[rank % len(saved)]
    for name in ("exp_avg", "exp_avg_sq"):
        parts[name] = torch.cat([own[name], own[name]])[:length]
    return parts


def padding_stays(saved, count, rank, ranks):
    return {n: torch.cat([s[n] for s in saved]).chunk(ranks)[rank] for n in saved[0]}


def new_moments(saved, count, rank, ranks):
    parts = moments_of_the_same_rank(saved, count, rank, ranks)
    return {n: p if n == "parameters" else torch.zeros_like(p) for n, p in parts.items()}


RIGHT = {
    "my_part_of_the_sum": [by_all_to_all],
    "forward_by_shards": [in_a_function, by_broadcasts, by_a_list, and_waits],
}

WRONG = {
    "kept_by_eight": {
        "stage 1": (round(kept_by_eight * 18 / 11), "that is stage 1"),
        "stage 3": (round(kept_by_eight * 4 / 11), "that is stage 3"),
        "four ranks": (round(kept_by_eight * 14 / 11), "one of four ranks"),
        "one average": (round(kept_by_eight * 10 / 11), "Adam's two averages"),
    },
    "my_part_of_the_sum": {
        "no sum": (own_part, "does not return its part of the sum"),
        "all-reduce": (by_all_reduce, "are enough"),
        "gloo's own": (by_gloo, "are enough"),
        "all gradients to all": (by_gathering, "are enough"),
        "all to each": (by_all_to_all_of_all, "are enough"),
    },
    "forward_by_shards": {
        "all at once": (all_at_once, "5.1 whole layers"),
        "the old one lives": (the_old_one_lives, "2.0 whole layers"),
        "nothing is gathered": (only_the_shards, "does not compute what one process computes"),
    },
    "resume": {
        "as given": (moments_of_the_same_rank, "does not go on from what was saved"),
        "padding stays": (padding_stays, "does not go on from what was saved"),
        "new moments": (new_moments, "does not go on from what was saved"),
    },
}
