"""Wrong attempts at the tasks of lesson 16, and words that their verdict must contain."""

import lesson_16_all_reduce as lesson
import torch
import torch.distributed as dist
from solutions.lesson_16 import my_reduce_scatter, my_ring


def place():
    return dist.get_rank(), dist.get_world_size()


def from_left(leaving, like=None, step=1):
    """Swap: one goes to the rank that is `step` further, and what comes from the left returns."""
    rank, n = place()
    arrived = torch.empty_like(leaving if like is None else like)
    lesson.swap(leaving, (rank + step) % n, arrived, (rank - step) % n)
    return arrived


def in_turn(sends_first, tensor, target, part, source):
    """Send and receive, one after the other."""
    if sends_first:
        dist.send(tensor, target)
    dist.recv(part, source)
    if not sends_first:
        dist.send(tensor, target)


# --- Task 1 ---


def as_given(tensor):
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    for step in range(1, n):
        other = (rank + step) % n
        in_turn(rank < other, tensor, other, parts[other], other)
    tensor.copy_(sum(parts))


def odd_and_even(tensor):
    """On 4 ranks 0 and 2 both send first."""
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    for step in range(1, n):
        target, source = (rank + step) % n, (rank - step) % n
        in_turn(rank % 2 == 0, tensor, target, parts[source], source)
    tensor.copy_(sum(parts))


def one_partner(tensor):
    """The partner of my partner is another one."""
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    for step in range(1, n):
        other = (rank + step) % n
        lesson.swap(tensor, other, parts[other], other)
    tensor.copy_(sum(parts))


def one_buffer(tensor):
    """What arrives is written over what is still being sent."""
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    for step in range(1, n):
        source = (rank - step) % n
        lesson.swap(parts[source], (rank + step) % n, parts[source], source)
    tensor.copy_(sum(parts))


def adds_as_it_comes(tensor):
    tensor += sum(from_left(tensor, step=step) for step in range(1, place()[1]))


def twice(tensor):
    copies = tensor.clone()
    adds_in_order(tensor)
    adds_in_order(copies)


def adds_in_order(tensor):
    """A right attempt: pairs take turns, and every rank takes the others in the same order."""
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    for other in [other for other in range(n) if other != rank]:
        in_turn(rank < other, tensor, other, parts[other], other)
    tensor.copy_(sum(parts))


def with_isend(tensor):
    """A right attempt: all messages are under way at once."""
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    group = dist.group.WORLD
    others = [other for other in range(n) if other != rank]
    works = [dist.irecv(parts[other], group=group, group_src=other, tag=7) for other in others]
    works += [dist.isend(tensor, group_dst=other, tag=7) for other in others]
    for work in works:
        work.wait()
    tensor.copy_(sum(parts))


def waits_too_late(tensor):
    rank, n = place()
    parts = [tensor.clone() for _ in range(n)]
    others = [other for other in range(n) if other != rank]
    works = [dist.irecv(parts[other], other) for other in others]
    works += [dist.isend(tensor, other) for other in others]
    tensor.copy_(sum(parts))
    for work in works:
        work.wait()


def by_the_library(tensor):
    dist.all_gather(parts := [torch.empty_like(tensor) for _ in range(place()[1])], tensor)
    tensor.copy_(sum(parts))


# --- Task 2 ---


def whole_tensors(tensor):
    passing, total = tensor.clone(), tensor.clone()
    for _ in range(place()[1] - 1):
        passing = from_left(passing)
        total += passing
    tensor.copy_(total)


def only_whole_chunks(tensor):
    my_ring(tensor[: len(tensor) // place()[1] * place()[1]])


def first_half(tensor):
    rank, n = place()
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        mine += from_left(chunks[(rank - step) % n], like=mine)


def with_chunk(tensor):
    rank, n = place()
    chunks = list(tensor.chunk(n))  # of 2 numbers on 3 ranks it makes 2 chunks
    for step in range(2 * (n - 1)):
        coming = chunks[(rank - step - 1) % n]
        arrived = from_left(chunks[(rank - step) % n], like=coming)
        coming.copy_(coming + arrived if step < n - 1 else arrived)


def padded(tensor, multiple=1):
    """A right attempt: equal chunks, with zeros at the end."""
    whole = torch.cat([tensor, tensor.new_zeros(-len(tensor) % (multiple * place()[1]))])
    my_ring(whole)
    tensor.copy_(whole[: len(tensor)])


def padded_to_twelve(tensor):
    padded(tensor, 4)


def each_to_each(tensor):
    rank, n = place()
    chunks = tensor.tensor_split(n)
    chunks[rank].copy_(my_reduce_scatter(tensor))
    for step in range(1, n):
        target, source = (rank + step) % n, (rank - step) % n
        lesson.swap(chunks[rank], target, chunks[source], source)


def strided(tensor):
    from_left(torch.stack([tensor, tensor], 1)[:, 0], like=tensor)


# --- Task 3 ---


def all_reduce_and_cut(tensor):
    my_ring(tensor)
    return tensor.tensor_split(place()[1])[place()[0]]


def half_a_ring(tensor):
    """A right attempt: it begins one chunk earlier, so that it ends with its own."""
    rank, n = place()
    parts = [part.clone() for part in tensor.tensor_split(n)]
    for step in range(n - 1):
        mine = parts[(rank - step - 2) % n]
        mine += from_left(parts[(rank - step - 1) % n], like=mine)
    return parts[rank]


def the_neighbours_part(tensor):
    first_half(tensor)
    rank, n = place()
    return tensor.tensor_split(n)[(rank + 1) % n]


def returns_nothing(tensor):
    my_reduce_scatter(tensor)


def fails(tensor):
    raise ValueError("my own mistake")


RIGHT = {
    "everybody": [adds_in_order, with_isend],
    "my_ring": [padded],
    "my_reduce_scatter": [half_a_ring],
}

WRONG = {
    "everybody": {
        "as given": (
            as_given,
            "with 3 ranks: it does not come to an end: "
            "rank 0 sends to 1; rank 1 sends to 2; rank 2 receives from 0",
        ),
        "odd and even": (odd_and_even, "with 4 ranks: it does not come to an end: rank 0 sends to"),
        "one partner": (one_partner, "rank 1 receives from 2 and sends to 2; rank 2"),
        "one buffer": (one_buffer, "arrives in memory that another one still uses"),
        "as it comes": (adds_as_it_comes, "with 3 ranks: of 9 numbers, the ranks' sums differ"),
        "twice": (twice, "bytes are sent, and 36 are enough"),
        "too late": (waits_too_late, "of 9 numbers, on rank 0,"),
        "the library": (by_the_library, "beside send and receive it calls"),
    },
    "my_ring": {
        "whole tensors": (whole_tensors, "with 3 ranks: of 9 numbers, on rank 0, 72 bytes are"),
        "whole chunks": (only_whole_chunks, "the sum is not right"),
        "chunk": (with_chunk, "IndexError"),
        "too much padding": (padded_to_twelve, "bytes are sent, and"),
        "each to each": (each_to_each, "messages go to [1, 2], not to the right only"),
        "strided": (strided, "ontiguous"),
        "fails": (fails, "ValueError: my own mistake"),
    },
    "my_reduce_scatter": {
        "all-reduce": (all_reduce_and_cut, "bytes are sent, and"),
        "the neighbour's": (the_neighbours_part, "part number 1 of the sum comes back, and 0 is"),
        "nothing": (returns_nothing, "it returns NoneType, not a tensor"),
    },
    "last_bytes": {
        "the ring": (744_000, "another one has done so before"),
        "kilobytes": (37.2, "in bytes"),
        "megabytes": (0.0372, "in bytes"),
        "bits": (297_700, "eight bits"),
        "one": (1000, "write both as formulas"),
    },
}
