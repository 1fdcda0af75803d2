"""docs/errors.md: its messages are produced, and its cures tried.

A fault and its cure are functions of (rank, world size). All run in the same two ranks, one after
the other; those that end a rank or its group are in claims/test_cures.py and test_lesson_19.py.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from resource import RLIMIT_FSIZE, RLIMIT_NOFILE

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lockstep import errors, job_log
from nbtools import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
PAGE = errors.read_page()
RAISED = "(it raised)"
ROWS = torch.ones(4, 2)

# --- Faults, and their cures ---


class Numbers(IterableDataset):
    """The numbers 0 to 7: all of them for each rank, or each rank its own."""

    def __init__(self, rank=0, world_size=1, length=8):
        self.rank, self.world_size, self.length = rank, world_size, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return itertools.islice(iter(range(8)), self.rank, None, self.world_size)


def all_of(loader):
    """Ask a loader how long it is, then read all rows."""
    return len(loader), list(loader)


def goes_on_with(before, after):
    """Leave a StatefulDataLoader after a row, and go on with another number of workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    fork = {n: {"multiprocessing_context": "fork"} if n else {} for n in (before, after)}
    old = StatefulDataLoader(range(8), num_workers=before, **fork[before])
    next(iter(old))
    new = StatefulDataLoader(range(8), num_workers=after, **fork[after])
    new.load_state_dict(old.state_dict())
    return list(new)


class TwoHeads(nn.Module):
    """A model with a layer that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows):
        return self.used(rows)


class InAList(nn.Module):
    """A model that keeps its layers in a list of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.layers = kind([nn.Linear(2, 2)])


def two_losses(model, together, rows=ROWS, **options):
    """Send two losses of one forward backward, and return the gradient of the first parameter."""
    out = model(rows)
    first, second = out.mean(), out.pow(2).mean()
    if together:
        (first + second).backward()
    else:
        first.backward(**options)
        second.backward()
    return next(model.parameters()).grad


def train(rows=ROWS, model=None, **options):
    replica = DistributedDataParallel(model or nn.Linear(2, 2), **options)
    for _ in range(2):
        replica(rows).mean().backward()
    return replica


def start(function, *args, daemon=False):
    """As mp.spawn, but with forks, which are there at once."""
    mp.start_processes(function, args, nprocs=1, daemon=daemon, start_method="fork")


def is_there(process, world_size):
    """What mp.spawn starts."""


def reads(process):
    return list(DataLoader(range(2), num_workers=1))


def can_be_spawned(thing):
    """Pickle something as a process is given it."""
    multiprocessing.reduction.ForkingPickler.dumps(thing)


def saved(what):
    """Save something, and return the file as it can be loaded."""
    torch.save(what, file := io.BytesIO())
    file.seek(0)
    return file


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def a_local_function():
    def local(process):
        """Has no name in the module."""

    can_be_spawned(local)


def scheduled(first, second):
    optimizer = sgd(nn.Linear(2, 2))
    scheduler = StepLR(optimizer, 1)
    steps = {"optimizer": optimizer.step, "scheduler": scheduler.step}
    steps[first]()
    steps[second]()


def sharded(rank, world_size):
    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world_size,)))


def all_reduce_with(backend):
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend=backend))


def gathered(make):
    def gather(rank, world_size):
        mine = torch.ones(2)
        dist.all_gather(make(mine, world_size), mine)

    return gather


def only_in(members, ranks):
    def call(rank, world_size):
        group = dist.new_group(members)
        if rank in ranks:
            dist.all_reduce(torch.ones(1), group=group)

    return call


def with_unset(name, call):
    """Call without a variable of the environment."""
    value = os.environ.pop(name, None)
    try:
        call()
    finally:
        if value is not None:
            os.environ[name] = value


def start_python(script):
    subprocess.run([sys.executable, script], check=True)


def half_frozen(**options):
    """Shard a model, one layer of which does not learn."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def checkpointed(**options):
    """Train a layer in a checkpoint; its input is data."""
    checkpoint(nn.Linear(2, 2), ROWS, **options).mean().backward()


def unscaled(model):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ROWS.to(model.weight.dtype)).mean()).backward()
    scaler.unscale_(sgd(model))


def scaled(*calls, factor=True):
    """Make a step with a GradScaler, by these of its methods in turn."""
    model = nn.Linear(2, 2)
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(model)
    loss = model(ROWS).mean()
    (scaler.scale(loss) if factor else loss).backward()
    for name in calls:
        getattr(scaler, name)(*([] if name == "update" else [optimizer]))


def with_frozen_layers(optimizer_has):
    """Make a step of which the optimizer has a layer that is used, or another one."""
    used, other, scaler = nn.Linear(2, 2), nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    scaler.scale(used(ROWS).mean()).backward()
    scaler.step(sgd({"used": used, "other": other}[optimizer_has]))


def under_autocast(call):
    """Return call() under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def attention(kind):
    query = torch.ones(1, 1, 2, 2)
    return nn.functional.scaled_dot_product_attention(query, query.to(kind), query)


def give_gradient(kind):
    nn.Parameter(torch.ones(2)).grad = torch.ones(2, dtype=kind)


def clip_an_inf(**options):
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([torch.inf])
    nn.utils.clip_grad_norm_([parameter], 1.0, **options)


def sharded_together(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(kind))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))(ROWS)


def compressed(hook):
    replica = DistributedDataParallel(nn.Linear(2, 2))
    replica.register_comm_hook(None, hook)
    replica(ROWS).mean().backward()


def listening(port=0, **options):
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, **options)


def at_a_taken_port():
    store = listening()
    listening(store.port)


def one_of_two():
    dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=0.2))


def at_a_store_that_went():
    store = listening()
    client = dist.TCPStore("127.0.0.1", store.port)
    del store
    client.get("a key")


def as_it_is_imported(call):
    """Call as a new process does that imports the script, to find the function in it."""
    process = multiprocessing.current_process()
    process._inheriting = True
    try:
        call()
    finally:
        del process._inheriting


def with_limit(what, most, call):
    """Call with a limit of the system's for this process, and so for its workers."""
    old = resource.getrlimit(what)
    resource.setrlimit(what, (most, old[1]))
    try:
        call()
    finally:
        resource.setrlimit(what, old)


def many_batches():
    return DataLoader(range(200), num_workers=1)


class Deadly(Dataset):
    """Rows of which each kills the worker that reads it, as the system does without memory."""

    def __len__(self):
        return 2

    def __getitem__(self, row):
        os.kill(os.getpid(), signal.SIGKILL)


def new():
    return Path(tempfile.mkdtemp(), "model.pt")


def hasty():
    """Return a group that has met, and from now on waits for a second only."""
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    return group


def in_detail():
    """Return a group that compares what its ranks call."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def four_at_once(group):
    """Wait in vain: the first two, one for each thread of gloo, cost the others the connections."""
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(4)]
    for work in works[:-1]:
        with contextlib.suppress(RuntimeError):
            work.wait()
    works[-1].wait()


def reduce(group):
    dist.all_reduce(torch.ones(2), group=group)


def loads(state, strict=True):
    nn.Linear(2, 3).load_state_dict(state, strict)


def file_of(state):
    """Load a file of the optimizer into that of another model."""
    sgd(nn.Linear(2, 2)).load_state_dict(sgd(state).state_dict())


def without_prefix(state):
    consume_prefix_in_state_dict_if_present(state, "module.")
    return state


WRAPPED = {"module.weight": torch.ones(3, 2), "module.bias": torch.ones(3)}
PLAIN = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
SMALL = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}

# The words: (a fault, its cure or None).
FAULTS = {
    "Can't pickle local object": (
        lambda *_: a_local_function(),
        lambda *_: can_be_spawned(mp.spawn),
    ),
    "cannot pickle '…' object": (
        lambda *_: can_be_spawned(threading.Lock()),
        lambda *_: can_be_spawned("the file's name"),
    ),
    "missing 1 required positional argument": (
        lambda *_: start(is_there),
        lambda *_: start(is_there, 1),
    ),
    "Value after * must be an iterable, not int": (
        lambda *_: mp.start_processes(is_there, (2), 1, start_method="fork"),
        lambda *_: mp.start_processes(is_there, (2,), 1, start_method="fork"),
    ),
    "daemonic processes are not allowed to have children": (
        lambda *_: start(reads, daemon=True),
        lambda *_: start(reads),
    ),
    "context has already been set": (
        lambda *_: [mp.set_start_method("spawn"), mp.set_start_method("spawn")],
        lambda *_: mp.get_context("spawn"),
    ),
    "No module named": (lambda *_: __import__("no_such_module"), None),
    "trying to initialize the default process group twice": (
        lambda *_: dist.init_process_group("gloo"),
        lambda *_: dist.is_initialized() or dist.init_process_group("gloo"),
    ),
    "environment variable … expected, but not set": (
        lambda *_: with_unset("RANK", lambda: list(dist.rendezvous("env://"))),
        None,
    ),
    "KeyError: 'LOCAL_RANK'": (
        lambda *_: with_unset("LOCAL_RANK", lambda: os.environ["LOCAL_RANK"]),
        None,
    ),
    "can't open file": (lambda *_: start_python("nosuch.py"), lambda *_: start_python(os.devnull)),
    "device_ids and output_device arguments only work with": (
        lambda rank, _: DistributedDataParallel(nn.Linear(2, 2), device_ids=[rank]),
        lambda *_: DistributedDataParallel(nn.Linear(2, 2)),
    ),
    "Must flatten tensors with uniform": (
        lambda *_: half_frozen(),
        lambda *_: half_frozen(use_orig_params=True),
    ),
    "element 0 of tensors does not require grad": (
        lambda *_: checkpointed(use_reentrant=True),
        lambda *_: checkpointed(use_reentrant=False),
    ),
    "ZeroDivisionError": (
        lambda *_: 1 / len(DataLoader(range(2), batch_size=4, drop_last=True)),
        lambda *_: 1 / len(DataLoader(range(2), batch_size=4)),
    ),
    "batch_size should be a positive integer value, but got batch_size=0": (
        lambda _, world_size: DataLoader(range(4), batch_size=1 // world_size),
        lambda _, world_size: DataLoader(range(4), batch_size=2 // world_size),
    ),
    "Attempting to unscale FP16 gradients": (
        lambda *_: unscaled(nn.Linear(2, 2).half()),
        lambda *_: unscaled(nn.Linear(2, 2)),
    ),
    "No inf checks were recorded for this optimizer": (
        lambda *_: with_frozen_layers("other"),
        lambda *_: with_frozen_layers("used"),
    ),
    "No inf checks were recorded prior to update": (
        lambda *_: scaled("update"),
        lambda *_: scaled("step", "update"),
    ),
    "Attempted step but _scale is None": (
        lambda *_: scaled("step", factor=False),
        lambda *_: scaled("step"),
    ),
    "Attempted unscale_ but _scale is None": (
        lambda *_: scaled("unscale_", factor=False),
        lambda *_: scaled("unscale_"),
    ),
    "Attempted update but _scale is None": (lambda *_: scaled("update", factor=False), None),
    "unscale_() has already been called on this optimizer": (
        lambda *_: scaled("unscale_", "unscale_"),
        lambda *_: scaled("unscale_", "step", "update"),
    ),
    "unscale_() is being called after step()": (lambda *_: scaled("step", "unscale_"), None),
    "step() has already been called since the last update()": (
        lambda *_: scaled("step", "step"),
        None,
    ),
    "mat1 and mat2 must have the same dtype": (
        lambda *_: nn.Linear(2, 2).bfloat16()(ROWS),
        lambda *_: under_autocast(lambda: nn.Linear(2, 2)(ROWS)),
    ),
    "expected m1 and m2 to have the same dtype": (
        lambda *_: ROWS @ ROWS.T.half(),
        lambda *_: under_autocast(lambda: ROWS @ ROWS.T.half()),
    ),
    "Input type (…) and bias type (…) should be the same": (
        lambda *_: nn.Conv2d(1, 1, 1)(ROWS.view(1, 1, 4, 2).half()),
        lambda *_: nn.Conv2d(1, 1, 1)(ROWS.view(1, 1, 4, 2)),
    ),
    "Expected query, key, and value to have the same dtype": (
        lambda *_: attention(torch.half),
        lambda *_: under_autocast(lambda: attention(torch.half)),
    ),
    "mixed dtype (CPU): expect parameter to have scalar type of Float": (
        lambda *_: nn.BatchNorm1d(2).bfloat16()(ROWS),
        lambda *_: nn.BatchNorm1d(2)(ROWS),
    ),
    "attempting to assign a gradient with dtype": (
        lambda *_: give_gradient(torch.half),
        lambda *_: give_gradient(torch.float32),
    ),
    "The total norm of order … for gradients from … is non-finite": (
        lambda *_: clip_an_inf(error_if_nonfinite=True),
        lambda *_: clip_an_inf(),
    ),
    "Got unsupported ScalarType BFloat16": (
        lambda *_: ROWS.bfloat16().numpy(),
        lambda *_: ROWS.bfloat16().float().numpy(),
    ),
    "FSDP expects uniform original parameter dtype": (
        lambda *_: sharded_together(torch.bfloat16),
        lambda *_: sharded_together(torch.float32),
    ),
    "BF16 all reduce communication hook required": (
        lambda *_: compressed(default_hooks.bf16_compress_hook),
        lambda *_: compressed(
            lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        ),
    ),
    "Target … is out of bounds": (
        lambda *_: nn.functional.cross_entropy(torch.ones(1, 3), torch.tensor([3])),
        lambda *_: nn.functional.cross_entropy(torch.ones(1, 4), torch.tensor([3])),
    ),
    "rank parameter missing": (lambda *_: next(dist.rendezvous("tcp://127.0.0.1:1")), None),
    "No rendezvous handler for": (lambda *_: next(dist.rendezvous("127.0.0.1:29500")), None),
    "Address already in use": (lambda *_: at_a_taken_port(), lambda *_: listening()),
    "Timed out after … clients joined": (lambda *_: one_of_two(), None),
    "No backend type associated with device type": (
        lambda *_: all_reduce_with("cuda:gloo"),
        lambda *_: all_reduce_with("cpu:gloo,cuda:gloo"),
    ),
    "Expected to have finished reduction in the prior iteration": (
        lambda *_: train(model=TwoHeads()),
        lambda *_: train(model=TwoHeads(), find_unused_parameters=True),
    ),
    "'DistributedDataParallel' object has no attribute": (
        lambda *_: DistributedDataParallel(nn.Linear(2, 2)).in_features,
        lambda *_: DistributedDataParallel(nn.Linear(2, 2)).module.in_features,
    ),
    "DistributedDataParallel is not needed when a module …": (
        lambda *_: DistributedDataParallel(nn.ReLU()),
        None,
    ),
    "got mixed torch.Tensor and DTensor": (
        lambda *it: sharded(*it).weight + torch.ones(2, 2),
        lambda *it: [sharded(*it)(ROWS), sharded(*it).weight.full_tensor() + torch.ones(2, 2)],
    ),
    "Trying to backward through the graph a second time": (
        lambda *_: two_losses(DistributedDataParallel(nn.Linear(2, 2)), together=False),
        lambda *_: two_losses(DistributedDataParallel(nn.Linear(2, 2)), together=True),
    ),
    "optimizer got an empty parameter list": (
        lambda *_: sgd(InAList(list)),
        lambda *_: sgd(InAList(nn.ModuleList)),
    ),
    "grad can be implicitly created only for scalar outputs": (
        lambda *_: nn.Linear(2, 2)(ROWS).backward(),
        lambda *_: nn.Linear(2, 2)(ROWS).mean().backward(),
    ),
    "invalid root rank": (
        lambda rank, world_size: dist.broadcast(torch.ones(1), src=world_size),
        lambda rank, world_size: dist.broadcast(torch.ones(1), src=world_size - 1),
    ),
    "is not part of group": (
        lambda rank, _: dist.broadcast(torch.ones(1), 0, group=dist.new_group([1])),
        lambda rank, _: dist.broadcast(torch.ones(1), 1, group=dist.new_group([1])),
    ),
    "takes … positional … given": (
        lambda *_: start(is_there, 1, 2),
        lambda *_: start(is_there, 1),
    ),
    "invalid tensor size at index": (
        gathered(lambda mine, world_size: [torch.ones(3)] * world_size),
        gathered(lambda mine, world_size: [torch.empty_like(mine) for _ in range(world_size)]),
    ),
    "invalid output tensor list at index": (gathered(lambda *_: [torch.ones(2)]), None),
    "Invalid usage of tensors with different dtypes": (
        gathered(lambda mine, world_size: [torch.ones(2).double()] * world_size),
        None,
    ),
    "DataLoader with IterableDataset: expected unspecified sampler": (
        lambda *_: DataLoader(Numbers(), sampler=DistributedSampler(range(8))),
        lambda *it: DataLoader(Numbers(*it)),
    ),
    "DataLoader with IterableDataset: expected unspecified shuffle": (
        lambda *_: DataLoader(Numbers(), shuffle=True),
        None,
    ),
    "DataLoader with IterableDataset: expected unspecified batch_sampler": (
        lambda *_: DataLoader(Numbers(), batch_sampler=[[0, 1]]),
        None,
    ),
    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last": (
        lambda *_: DataLoader(range(8), batch_size=2, batch_sampler=[[0, 1]]),
        lambda *_: DataLoader(range(8), batch_sampler=[[0, 1]]),
    ),
    "persistent_workers option needs num_workers > 0": (
        lambda *_: DataLoader(range(8), persistent_workers=True),
        lambda *_: DataLoader(range(8), persistent_workers=False),
    ),
    "prefetch_factor option could only be specified in multiprocessing": (
        lambda *_: DataLoader(range(8), prefetch_factor=2),
        lambda *_: DataLoader(range(8), prefetch_factor=None),
    ),
    "State doesn't contain key '_snapshot' expected": (
        lambda *_: goes_on_with(0, 1),
        lambda *_: goes_on_with(1, 1),
    ),
    "State doesn't contain key '_num_yielded' expected": (
        lambda *_: goes_on_with(1, 0),
        lambda *_: goes_on_with(0, 0),
    ),
    "sampler option is mutually exclusive with shuffle": (
        lambda *_: DataLoader(range(8), sampler=DistributedSampler(range(8)), shuffle=True),
        lambda *_: DataLoader(range(8), sampler=DistributedSampler(range(8), shuffle=True)),
    ),
    "Invalid rank … rank should be in the interval": (
        lambda rank, world_size: DistributedSampler(range(8), 2, rank=2 + rank),
        lambda rank, world_size: DistributedSampler(range(8)),
    ),
    "stack expects each tensor to be equal size": (
        lambda *_: list(DataLoader([torch.ones(2), torch.ones(3)], batch_size=2)),
        lambda *_: list(
            DataLoader([torch.ones(2), torch.ones(3)], 2, collate_fn=nn.utils.rnn.pad_sequence)
        ),
    ),
    "Caught … in DataLoader worker process": (
        lambda *_: list(DataLoader([torch.ones(2), None], num_workers=1)),
        None,
    ),
    "Expected more than 1 value per channel when training": (
        lambda *_: nn.BatchNorm1d(2)(ROWS[:1]),
        None,
    ),
    "modified by an inplace operation": (
        lambda *_: nn.Linear(2, 2)(ROWS).sigmoid().add_(1).sum().backward(),
        lambda *_: (nn.Linear(2, 2)(ROWS).sigmoid() + 1).sum().backward(),
    ),
    "can't allocate memory": (lambda *_: torch.empty(2**60), None),
    "Unexpected key(s) in state_dict": (
        lambda *_: loads(dict(WRAPPED)),
        lambda *_: loads(without_prefix(dict(WRAPPED))),
    ),
    "Missing key(s) in state_dict": (
        lambda *_: loads({"weight": PLAIN["weight"]}),
        lambda *_: loads({"weight": PLAIN["weight"]}, strict=False),
    ),
    "size mismatch for": (lambda *_: loads(SMALL), lambda *_: loads({}, strict=False)),
    "loaded state dict contains a parameter group …": (
        lambda *_: file_of(TwoHeads()),
        lambda *_: file_of(nn.Linear(2, 2)),
    ),
    "Weights only load failed": (
        lambda *_: torch.load(saved({"folder": Path("data")})),
        lambda *_: torch.load(saved({"folder": "data"})),
    ),
    "unrecognized arguments: --local-rank": (
        lambda *_: __import__("argparse").ArgumentParser().parse_args(["--local-rank=0"]),
        None,
    ),
    "An attempt has been made to start a new process": (
        lambda *_: as_it_is_imported(lambda: mp.spawn(is_there, (1,))),
        None,
    ),
    "Connection was likely closed. Did the remote server shutdown or crash?": (
        lambda *_: at_a_store_that_went(),
        None,
    ),
    "DDP expects same model across all ranks, …": (
        lambda rank, _: train(model=nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)])),
        lambda rank, _: train(),
    ),
    "appears not to match sizes of the same param in process 0": (
        lambda rank, _: train(model=nn.Linear(2, 2 + rank), process_group=hasty()),
        None,
    ),
    "Too many open files": (
        lambda *_: with_limit(RLIMIT_NOFILE, 64, lambda: list(many_batches())),
        lambda *_: with_limit(RLIMIT_NOFILE, 64, lambda: [row.clone() for row in many_batches()]),
    ),
    "unable to resize file": (
        lambda *_: with_limit(RLIMIT_FSIZE, 1000, lambda: torch.ones(1000).share_memory_()),
        lambda *_: with_limit(RLIMIT_FSIZE, 1000, lambda: torch.ones(10).share_memory_()),
    ),
    "DataLoader worker … is killed by signal: Killed": (
        lambda *_: list(DataLoader(Deadly(), num_workers=1)),
        None,
    ),
    "unexpected pos … vs …": (
        lambda *_: with_limit(RLIMIT_FSIZE, 1000, lambda: torch.save(torch.ones(1000), new())),
        None,
    ),
    "PytorchStreamReader failed reading": (
        lambda *_: torch.load(io.BytesIO(saved(torch.ones(99)).read()[:-99])),
        lambda *_: torch.load(saved(torch.ones(99))),
    ),
    "Application timeout caused pair closure": (
        lambda rank, _: [four_at_once(group) for group in [hasty()] if rank == 0],
        None,
    ),
    "Detected mismatch between collectives on ranks": (
        lambda rank, _: [reduce, dist.barrier][rank](group=in_detail()),
        lambda *_: reduce(group=in_detail()),
    ),
    "FileExistsError": (
        lambda *_: os.makedirs(tempfile.gettempdir()),
        lambda *_: os.makedirs(tempfile.gettempdir(), exist_ok=True),
    ),
    # Only warnings:
    "did not find any unused parameters": (
        lambda *_: train(find_unused_parameters=True),
        lambda *_: train(),
    ),
    "which does not belong to the given group": (only_in([0], [0, 1]), only_in([0], [0])),
    "Length of IterableDataset … was reported to be … samples have been fetched": (
        lambda *_: all_of(DataLoader(Numbers(length=7))),
        lambda *_: all_of(DataLoader(Numbers())),
    ),
    "This DataLoader will create … worker processes": (
        lambda *_: DataLoader(range(8), num_workers=10**4),
        None,
    ),
    "Detected call of … lr_scheduler.step()": (
        lambda *_: scheduled("scheduler", "optimizer"),
        lambda *_: scheduled("optimizer", "scheduler"),
    ),
}
WITHOUT_GPU = {
    "Torch not compiled with CUDA enabled": (lambda *_: nn.Linear(2, 2).cuda(), None),
    "Distributed package doesn't have NCCL built in": (
        lambda *_: dist.new_group(backend="nccl"),
        lambda *_: dist.new_group(backend="gloo"),
    ),
    "Attempting to deserialize object on a CUDA device": (
        lambda *_: torch.load(saved(torch.ones(1)), map_location="cuda"),
        lambda *_: torch.load(saved(torch.ones(1)), map_location="cpu"),
    ),
}
if not torch.cuda.is_available():
    FAULTS |= WITHOUT_GPU


def what_they_say(rank, world_size, faults):
    """Return [(what a fault prints, what its cure prints, or "")] on this rank."""
    said = []
    for fault, cure in faults:
        broken = printed(fault, rank, world_size)
        multiprocessing.set_start_method(None, force=True)
        said.append((broken, printed(cure, rank, world_size) if cure else ""))
    return said


def printed(function, *args):
    """Return what a call prints on stderr, C++ included, with its error as the end of a rank."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = show
                function(*args)
        except (Exception, SystemExit):
            traceback.print_exc()
            print(RAISED, file=sys.stderr)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def show(*warning):
    """Print a warning as Python does when nobody has changed that."""
    print(warnings.formatwarning(*warning[:4]), file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def said():
    """{words: [(what the fault says, what the cure says), by rank]}."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    by_rank = run(what_they_say, 2, list(FAULTS.values()), deadline=600)
    return dict(zip(FAULTS, zip(*by_rank, strict=True), strict=True))


def found_in(text):
    """Return the entries of the page that explain finds in a text."""
    log = job_log.Log(PAGE)
    log.read(io.BytesIO(text.encode()))
    return [said.entry for said in log.said]


@pytest.mark.parametrize("words", FAULTS)
def test_the_page_knows_what_a_fault_says_and_its_cure_cures_it(words, said):
    entry = entry_with(words)
    assert any(entry in found_in(fault) for fault, _ in said[words]), said[words]
    for _, cure in said[words]:
        assert entry not in found_in(cure) and RAISED not in cure, cure


def gradients_of_two_losses(rank, world_size):
    """Return this rank's gradients: of the losses together, and one after the other."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2))
    rows = torch.full((4, 2), 1.0 + rank)
    together = two_losses(model, True, rows).clone()
    model.zero_grad()
    return together, two_losses(model, False, rows, retain_graph=True).clone()


def test_a_second_backward_with_retain_graph_is_not_averaged():
    (mine, my_second), (other, other_second) = run(gradients_of_two_losses, 2)
    assert torch.equal(mine, other) and not torch.allclose(my_second, other_second)


def weights_of_a_cast_model(rank, world_size, after_wrapping):
    """Return this rank's weights after a step of a model that was cast to 32 bits."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2).half()
    wrapped = DistributedDataParallel(model) if after_wrapping else None
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    wrapped = wrapped or DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(torch.full((4, 2), 1.0 + rank)).square().sum().backward()
    optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("after_wrapping", [False, True])
def test_a_model_is_cast_before_ddp_wraps_it(after_wrapping):
    mine, other = run(weights_of_a_cast_model, 2, after_wrapping)
    assert torch.equal(mine, other) != after_wrapping


def entry_with(words):
    """Return the entry of the page with these words, or that begins with them."""
    begin = words.removesuffix(" …")
    return next(e for e in PAGE for w in e.wordings if w.words.startswith(begin))


def test_the_page_says_of_each_message_where_it_was_seen_or_read():
    """Seen is what is produced above, is in another test, or in an output on a page."""
    others = [path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__)]
    pages = ROOT.glob("notebooks/*.ipynb")
    seen = "".join(path.read_text(encoding="utf-8") for path in [*others, *pages])
    seen = seen.replace("\\", "")  # of a pattern, or of JSON
    produced = [entry_with(words) for words in FAULTS]
    for entry in PAGE:
        elsewhere = any(wording.longest in seen for wording in entry.wordings)
        read = "not run here: " in entry.source and "](http" in entry.source
        assert read or "seen" in entry.source, entry.source
        assert read or entry in produced or elsewhere, entry.wordings[0].words
