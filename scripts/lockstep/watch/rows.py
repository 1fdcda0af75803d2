"""Which rows each DataLoader is asked for, epoch by epoch; what is drawn while rows are read."""

import contextlib
import itertools
import random
import sys
import weakref
import zlib
from collections import deque

from lockstep.watch import facts
from lockstep.watch.hooks import around

_loaders = {}  # (line, id of the data): [number, how often it has begun, the data]
_numbers = itertools.count()
_looks = []  # at reading rows: a few are enough
SHARED = {"torch", "random", "numpy"}  # generators that everybody draws from


def watch():
    """Put the hooks in place."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import fetch

    iterator = dataloader._BaseDataLoaderIter
    around(dataloader.DataLoader, "__init__", make)
    around(dataloader.DataLoader, "__iter__", begin)
    around(iterator, "__init__", prepare)
    around(iterator, "_reset", prepare)
    around(iterator, "_next_index", ask)
    around(iterator, "__next__", deliver)
    around(dataloader._MultiProcessingDataLoaderIter, "_process_data", take)
    around(fetch._MapDatasetFetcher, "fetch", read)
    around(fetch._IterableDatasetFetcher, "fetch", read)


def make(init, loader, args, kwargs):
    """A DataLoader is made: at which line?"""
    init(*args, **kwargs)
    loader.__dict__["_made_at"] = facts.where()


def begin(iterate, loader, args, kwargs):
    """An epoch begins."""
    from torch.utils.data import IterableDataset

    place = loader.__dict__.get("_made_at") or facts.where()
    known = number_of(place, loader.dataset)
    if not facts.room("rows", known[0], 0):
        loader.__dict__["_epoch_now"] = None
        return iterate()
    known[1] += 1
    loader.__dict__["_epoch_now"] = known[0], known[1]
    sampler, data = getattr(loader.batch_sampler, "sampler", None), loader.dataset
    sampler = sampler or loader.sampler
    about = {"sampler": type(sampler).__name__, "shuffle": getattr(sampler, "shuffle", None)}
    about |= {"replaces": bool(getattr(sampler, "replacement", False))}
    about |= {"replicas": getattr(sampler, "num_replicas", None), "rows": None}
    with contextlib.suppress(TypeError, NotImplementedError):
        about["rows"] = len(data)
    about |= {"part": part_of(data), "iterable": isinstance(data, IterableDataset)}
    about["workers"] = loader.num_workers
    about |= {"stays": loader.persistent_workers and loader._iterator is not None}
    about |= {"told": told(data), "own": sorted(own_generators(data))}
    facts.note("epoch", loader=known[0], epoch=known[1], where=place, **about)
    return iterate()


def number_of(place, data):
    """Return what is known of a loader; one that is made anew for each epoch is the same."""
    found = _loaders.get((place, id(data)))
    if found is None or found[2]() is not data:
        found = [next(_numbers), -1, reference(data)]
        _loaders[place, id(data)] = found
    return found


def reference(data):
    """Return a function that returns the data, without keeping it alive where that is possible."""
    try:
        return weakref.ref(data)
    except TypeError:  # a list, for example
        return lambda: data


def told(data):
    """Return {name: value} of attributes of a data set of which each worker has a copy.

    Plain ones, such as an epoch, and small tensors that are not in shared memory.
    """
    import torch

    found = {}
    for name, one in getattr(data, "__dict__", {}).items():
        with contextlib.suppress(Exception):  # a tensor may have no numbers: on meta, for example
            if isinstance(one, bool | int | float | str):
                found[name] = repr(one)[:80]
            elif isinstance(one, torch.Tensor) and one.numel() <= 16 and not one.is_shared():
                found[name] = repr(one.tolist())
    return dict(list(found.items())[:16])


def own_generators(data):
    """Return {name: a number for its state} of the generators that a data set has of its own."""
    found = {}
    for name, one in getattr(data, "__dict__", {}).items():
        with contextlib.suppress(Exception):  # not each has a state: random.SystemRandom has none
            state = state_of(one)
            if state is not None:
                found[name] = state
    return found


def state_of(generator):
    """Return a number for the state of a generator; None for what is none."""
    import torch

    if isinstance(generator, torch.Generator):
        return facts.checksum(generator.get_state())
    if isinstance(generator, random.Random):
        return hash(generator.getstate()[1])
    if type(generator).__module__.startswith("numpy.random"):
        state = getattr(generator, "bit_generator", generator)
        state = state.state if hasattr(state, "state") else generator.get_state()
        return zlib.crc32(repr(state).encode())
    return None


def part_of(data):
    """Return a number for the rows of which a Subset consists; None for another data set."""
    from torch.utils.data import Subset

    return zlib.crc32(repr(list(data.indices)).encode()) if type(data) is Subset else None


def prepare(function, iterator, args, kwargs):
    """An iterator over a loader starts, or starts again."""
    iterator._asked = deque()
    loader = args[0] if args else kwargs["loader"]
    iterator._epoch_now = loader.__dict__["_epoch_now"]
    return function(*args, **kwargs)


def ask(function, iterator, args, kwargs):
    """The loader asks for the rows of a batch."""
    index = function()
    if iterator._epoch_now:
        iterator._asked.append(index)
    return index


def deliver(function, iterator, args, kwargs):
    """The loader hands over a batch."""
    if not iterator._epoch_now:
        return function()
    loader, epoch = iterator._epoch_now
    iterator.__dict__["_from"] = None
    try:
        batch = function()
    except StopIteration:
        facts.note("ended", loader=loader, epoch=epoch)
        raise
    index = iterator._asked.popleft() if iterator._asked else None
    index = list(index) if isinstance(index, list | tuple) else [index]
    known = all(isinstance(one, int) for one in index)
    marks = marks_of(batch, len(index) if known else None)
    if not facts.room("rows", loader, len(index if known else marks or index)):
        iterator._epoch_now = None
        return batch
    rows = [number_in_whole(iterator._dataset, one) for one in index] if known else None
    made_by = iterator.__dict__["_from"]
    facts.note("batch", loader=loader, epoch=epoch, rows=rows, marks=marks, worker=made_by)
    return batch


def take(function, iterator, args, kwargs):
    """A batch of a worker is taken: of which one? (Older PyTorch does not say.)"""
    iterator.__dict__["_from"] = args[1] if len(args) > 1 else kwargs.get("worker_idx")
    return function(*args, **kwargs)


def number_in_whole(data, row):
    """Return the number of a row in the data set of which `data` is a Subset of a Subset."""
    from torch.utils.data import Subset

    while type(data) is Subset:
        data, row = data.dataset, data.indices[row]
    return int(row)


def marks_of(batch, count):
    """Return a checksum of each row's label: of the last tensor with so many rows; or None.

    Of a stream the number of rows is that of the first tensor.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    fitting = [x for x in leaves if len(x) == (len(leaves[0]) if count is None else count)]
    return facts.row_checksums(fitting[-1]) if fitting else None


def read(fetch, fetcher, args, kwargs):
    """Rows are read, here or in a worker: does that draw random numbers, and which?

    Of a generator of the data set's own counts also where it ends: one that is seeded for each row
    begins alike everywhere, and ends apart. In a stream it counts from the second look on: with
    the first rows it may have made their order, which is to be alike.
    """
    if len(_looks) >= 2:
        return fetch(*args, **kwargs)
    _looks.append(True)
    import torch

    before = states(fetcher.dataset)
    batch = fetch(*args, **kwargs)
    after = states(fetcher.dataset)
    drawn = {source: state for source, state in before.items() if after.get(source) != state}
    first = len(_looks) == 1 and isinstance(fetcher.dataset, torch.utils.data.IterableDataset)
    for source in drawn.keys() - SHARED:
        drawn[source] = hash((drawn[source], after.get(source)))
        if first:
            del drawn[source]
    if drawn:
        worker = torch.utils.data.get_worker_info()
        number = worker.id if worker else None
        facts.note("drawn", states=drawn, worker=worker is not None, number_of=number)
    return batch


def states(data):
    """Return {source of random numbers: a number for its state}."""
    import torch

    found = {f"its own {name}": state for name, state in own_generators(data).items()}
    found["torch"] = facts.checksum(torch.default_generator.get_state())
    found["random"] = hash(random.getstate()[1])  # of whole numbers: the same in each process
    if "numpy" in sys.modules:
        _, numbers, place, *_ = sys.modules["numpy"].random.get_state()
        found["numpy"] = zlib.crc32(numbers.tobytes(), place)
    return found
