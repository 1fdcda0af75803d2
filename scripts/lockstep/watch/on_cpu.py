"""Lets a script that asks for GPUs run on CPU ranks: each cuda device is the CPU, nccl is gloo.

It computes the same, but for rounding. What can't be the same: memory figures and streams are
empty, autocast computes in float32, torch.compile is left out.
"""

import contextlib
import os
import threading
import types
from collections import defaultdict

import wrapt

from lockstep.watch.hooks import around

RANKS = int(os.environ.get("LOCKSTEP_WATCH_RANKS", 2))
NOW = {"device": int(os.environ.get("LOCAL_RANK", 0))}


def start():
    """Play the GPUs from now on, in this process."""
    play_cuda()
    play_accelerator()
    play_tensors_and_modules()
    play_precision()
    play_group()


def here(place):
    """Return the CPU for a cuda device, and other arguments as they are."""
    import torch

    cuda = isinstance(place, str) and place.startswith("cuda")
    cuda |= isinstance(place, torch.device) and place.type == "cuda"
    return torch.device("cpu") if cuda or type(place) is int else place


def set_device(device):
    """Take note of the device that is chosen. Raises RuntimeError if it is none of the ranks'."""
    import torch

    index = device if type(device) is int else torch.device(device).index or 0
    if index >= RANKS:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}, of {RANKS}")
    NOW["device"] = index


class Nothing(float):
    """Stands in for streams, events and devices, and for what they return: the number 0."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __getattr__(self, name):
        return Nothing

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def play_cuda():
    """torch.cuda: as many devices as ranks, and nothing happens on them."""
    import torch

    facts = {"name": "played by the CPU", "total_memory": 2**33, "major": 8, "minor": 0}
    properties = types.SimpleNamespace(**facts, multi_processor_count=1)
    played = {"is_available": True, "is_initialized": True, "device_count": RANKS, "init": None}
    played |= {"get_device_name": properties.name, "get_device_properties": properties}
    played |= {"get_device_capability": (8, 0), "is_bf16_supported": True}
    played |= {"mem_get_info": (2**33, 2**33), "get_arch_list": ["sm_80"]}
    played |= {"can_device_access_peer": True, "memory_summary": "memory of the CPU\n"}
    played |= dict.fromkeys(NOT_DONE) | dict.fromkeys(ZERO, 0) | play_memory()
    for name, value in played.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.memory._record_memory_history = torch.cuda.memory._dump_snapshot = Nothing
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.get_rng_state_all = lambda: [torch.get_rng_state()] * RANKS
    torch.cuda.initial_seed = torch.initial_seed
    torch.cuda.default_generators = (torch.default_generator,) * RANKS
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    torch.cuda.set_device = set_device
    torch.cuda.current_device = lambda: NOW["device"]
    for name in ("Stream", "Event", "stream", "device", "current_stream", "default_stream"):
        setattr(torch.cuda, name, Nothing)
    for kind in ("Float", "Double", "Half", "Long", "Int", "Byte", "Bool"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, Nothing)


# Functions of torch.cuda that do nothing here, and those that return 0.
NOT_DONE = ["manual_seed", "manual_seed_all", "seed", "seed_all", "synchronize", "ipc_collect"]
NOT_DONE += ["set_rng_state", "set_rng_state_all", "set_sync_debug_mode"]
NOT_DONE += ["set_per_process_memory_fraction", "reset_max_memory_cached", "memory_snapshot"]
ZERO = ["utilization", "memory_usage", "temperature", "power_draw", "clock_rate"]
ZERO += ["memory_cached", "max_memory_cached"]


def play_memory():
    """Return {function: what it returns} of the memory of torch.cuda and torch.accelerator."""
    played = {"memory_stats": defaultdict(int)}
    for name in ("memory_allocated", "memory_reserved"):
        played |= {name: 0, f"max_{name}": 0}
    done = ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats")
    return played | dict.fromkeys((*done, "reset_max_memory_allocated"))


def play_accelerator():
    """torch.accelerator is torch.cuda by another name."""
    import torch

    played = {"is_available": True, "device_count": RANKS, "synchronize": None} | play_memory()
    for name, value in played.items():
        setattr(torch.accelerator, name, lambda *_, value=value, **__: value)
    torch.accelerator.set_device_index = torch.accelerator.set_device_idx = set_device
    torch.accelerator.current_device_index = lambda: NOW["device"]
    torch.accelerator.device_index = Nothing
    torch.accelerator.current_stream = Nothing  # Adam asks it whether a graph is being captured
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")


def play_tensors_and_modules():
    """Tensors, modules and loaders that are sent to a GPU stay where they are."""
    import torch
    from torch.distributed import device_mesh
    from torch.overrides import TorchFunctionMode
    from torch.utils import _device

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            kwargs = dict(kwargs or {})
            if name in ("cuda", "pin_memory", "record_stream"):
                return args[0]
            if name == "to":
                args = (args[0], *map(here, args[1:]))
            if name == "type" and args[1:] and isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch."))
            if name == "__get__" and getattr(function, "__self__", None) is torch.Tensor.is_cuda:
                return True
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            kwargs.pop("pin_memory", None)
            if name == "scaled_dot_product_attention" and hasattr(args[0], "to_local"):
                return attention_of_parts(function, args, kwargs)
            return function(*args, **kwargs)

    def attention_of_parts(function, args, kwargs):
        """On a CPU attention does not know DTensor: each rank computes that of its own heads."""
        query = args[0]
        parts = [part.to_local() if hasattr(part, "to_local") else part for part in args]
        heads = function(*parts, **kwargs)
        return type(query).from_local(heads, query.device_mesh, query.placements, run_check=False)

    def in_here_too(function, instance, args, kwargs):
        with OnCpu():
            return function(*args, **kwargs)

    def with_type(init, mesh, args, kwargs):
        kwargs = dict(zip(("device_type", "mesh"), args, strict=False)) | kwargs
        kwargs["device_type"] = here(kwargs["device_type"])
        return init(**kwargs | {"device_type": str(kwargs["device_type"])})

    def moved(function, instance, args, kwargs):
        return function(*map(here, args), **{name: here(value) for name, value in kwargs.items()})

    def without_pinning(function, instance, args, kwargs):
        kwargs.pop("pin_memory", None)
        kwargs.pop("pin_memory_device", None)
        return function(*args, **kwargs)

    def loaded(function, instance, args, kwargs):
        kwargs["map_location"] = "cpu"
        return function(*args[:1], **kwargs)

    def without_parts(init, parallel, args, kwargs):
        init(*args, **kwargs)
        parallel.device_ids = []  # it calls the module as it is

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, here(device))

    torch.Generator = Generator
    around(_device.DeviceContext, "__init__", moved)
    around(torch.nn.DataParallel, "__init__", without_parts)
    around(torch.nn.Module, "to", moved)
    around(torch.nn.Module, "cuda", lambda function, module, args, kwargs: module)
    around(torch.utils.data.DataLoader, "__init__", without_pinning)
    around(torch, "load", loaded)
    around(threading.Thread, "_bootstrap_inner", in_here_too)
    around(torch.autograd, "_engine_run_backward", in_here_too)  # it may call Python code
    around(device_mesh.DeviceMesh, "__init__", with_type)
    OnCpu().__enter__()


def play_precision():
    """Mixed precision computes in float32, and nothing is compiled."""
    import torch

    def in_float32(function, instance, args, kwargs):
        return function("cpu", enabled=False)

    around(torch.autocast, "__init__", in_float32)
    around(torch.amp.GradScaler, "__init__", in_float32)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: True
    torch.compile = lambda model=None, *_, **__: (lambda f: f) if model is None else model


def play_group():
    """The group is over gloo, which has no average: it is divided first, then added up."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    def over_gloo(init, instance, args, kwargs):
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        kwargs.pop("backend", None)
        return init("gloo", *args[1:], **kwargs)

    def group_over_gloo(make, instance, args, kwargs):
        for name in ("backend", "device_id", "pg_options"):
            kwargs.pop(name, None)
        return make(*args[:2], **kwargs)

    def on_the_cpu(init, ddp, args, kwargs):
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        return init(*args[:1], **kwargs)

    def averaged(function, instance, args, kwargs):
        given = [*args, *kwargs.values()]
        if any(map(is_average, given)):
            tensor = args[0] if args else kwargs["tensor"]
            group = next((one for one in given if isinstance(one, c10d.ProcessGroup)), None)
            tensor.div_(c10d.get_world_size(group))
            args = [c10d.ReduceOp.SUM if is_average(one) else one for one in args]
            if "op" in kwargs:
                kwargs["op"] = c10d.ReduceOp.SUM
        return function(*args, **kwargs)

    def is_average(one):
        return isinstance(one, c10d.ReduceOp.RedOpType) and one == c10d.ReduceOp.AVG

    def of_all(function, instance, args, kwargs):
        kwargs.pop("device_ids", None)
        return function(*args, **kwargs)

    def sharded_on_the_cpu(module):
        def with_device(init, sharded, args, kwargs):
            return init(*args, **kwargs | {"device_id": torch.device("cpu")})

        around(module.FullyShardedDataParallel, "__init__", with_device)

    fsdp = "torch.distributed.fsdp.fully_sharded_data_parallel"
    wrapt.register_post_import_hook(sharded_on_the_cpu, fsdp)
    hooks = {"init_process_group": over_gloo, "new_group": group_over_gloo}
    hooks |= {"all_reduce": averaged, "reduce": averaged, "barrier": of_all}
    for name, hook in hooks.items():
        around(c10d, name, hook)
        for module in (torch.distributed, torch.distributed.device_mesh):
            if hasattr(module, name):
                setattr(module, name, getattr(c10d, name))
    for module in (c10d, torch.distributed):
        module.is_nccl_available = lambda: True
    ddp = torch.nn.parallel.DistributedDataParallel
    around(ddp, "__init__", on_the_cpu)
    ddp._passing_sync_batchnorm_handle = lambda *_: None  # it refuses SyncBatchNorm on a CPU
    around(torch.nn.SyncBatchNorm, "forward", synchronised)
    with contextlib.suppress(AttributeError):
        torch.backends.cudnn.is_available = lambda: True


def synchronised(function, layer, args, kwargs):
    """SyncBatchNorm over gloo: its own code needs a GPU. All ranks' rows, autograd sends back."""
    import torch
    from torch.distributed.nn.functional import all_reduce

    inputs = args[0]
    if not layer.training and layer.track_running_stats:
        kept = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return torch.nn.functional.batch_norm(inputs, *kept, False, 0.0, layer.eps)
    axes = [0, *range(2, inputs.dim())]
    count = torch.tensor([inputs.numel() / inputs.shape[1]])
    sums = all_reduce(torch.cat([inputs.sum(axes), inputs.square().sum(axes), count]))
    width = inputs.shape[1]
    total, squares, count = sums.tensor_split([width, 2 * width])
    mean, shape = total / count, [1, -1, *[1] * (inputs.dim() - 2)]
    variance = squares / count - mean.square()
    if layer.track_running_stats:
        with torch.no_grad():
            layer.num_batches_tracked += 1
            share = layer.momentum if layer.momentum is not None else 1 / layer.num_batches_tracked
            layer.running_mean.lerp_(mean, float(share))
            layer.running_var.lerp_(variance * count / (count - 1), float(share))
    outputs = (inputs - mean.view(shape)) * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        outputs = outputs * layer.weight.view(shape) + layer.bias.view(shape)
    return outputs
