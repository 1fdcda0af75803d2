"""Lets a script that asks for GPUs run on CPU ranks: each cuda device is the CPU, nccl is gloo.

It computes the same, but for rounding. What can't be the same: memory figures and streams are
empty, autocast computes in float32, torch.compile is left out.
"""

import contextlib
import os
import types

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


class Nothing:
    """Stands in for streams, events and devices."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: 0

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
    for name in ["manual_seed", "manual_seed_all", "synchronize", "empty_cache", "ipc_collect"]:
        played[name] = None
    for name in ["memory_allocated", "memory_reserved"]:
        played |= {name: 0, f"max_{name}": 0}
    for name in ["reset_peak_memory_stats", "reset_max_memory_allocated"]:
        played[name] = None
    for name, value in played.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.set_device = set_device
    torch.cuda.current_device = lambda: NOW["device"]
    for name in ("Stream", "Event", "stream", "device", "current_stream", "default_stream"):
        setattr(torch.cuda, name, Nothing)
    for kind in ("Float", "Double", "Half", "Long", "Int", "Byte", "Bool"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


def play_accelerator():
    """torch.accelerator is torch.cuda by another name."""
    import torch

    played = {"is_available": True, "device_count": RANKS, "synchronize": None}
    for name, value in played.items():
        setattr(torch.accelerator, name, lambda *_, value=value, **__: value)
    torch.accelerator.set_device_index = torch.accelerator.set_device_idx = set_device
    torch.accelerator.current_device_index = lambda: NOW["device"]
    torch.accelerator.current_stream = Nothing  # Adam asks it whether a graph is being captured
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")


def play_tensors_and_modules():
    """Tensors, modules and loaders that are sent to a GPU stay where they are."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            if name in ("cuda", "pin_memory", "record_stream"):
                return args[0]
            if name == "to":
                args = (args[0], *map(here, args[1:]))
            if name == "__get__" and getattr(function, "__self__", None) is torch.Tensor.is_cuda:
                return True
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

    def moved(function, instance, args, kwargs):
        return function(*map(here, args), **{name: here(value) for name, value in kwargs.items()})

    def without_pinning(function, instance, args, kwargs):
        kwargs.pop("pin_memory", None)
        kwargs.pop("pin_memory_device", None)
        return function(*args, **kwargs)

    def loaded(function, instance, args, kwargs):
        kwargs["map_location"] = "cpu"
        return function(*args[:1], **kwargs)

    around(torch.nn.Module, "to", moved)
    around(torch.nn.Module, "cuda", lambda function, module, args, kwargs: module)
    around(torch.utils.data.DataLoader, "__init__", without_pinning)
    around(torch, "load", loaded)
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

    def on_the_cpu(init, ddp, args, kwargs):
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        return init(*args[:1], **kwargs)

    def averaged(function, instance, args, kwargs):
        average = c10d.ReduceOp.AVG
        given = [*args, *kwargs.values()]
        if any(isinstance(one, c10d.ReduceOp.RedOpType) and one == average for one in given):
            tensor = args[0] if args else kwargs["tensor"]
            tensor.div_(c10d.get_world_size(kwargs.get("group")))
            args = [summed(one) for one in args]
            kwargs = {name: summed(one) for name, one in kwargs.items()}
        return function(*args, **kwargs)

    def summed(op):
        return c10d.ReduceOp.SUM if op == c10d.ReduceOp.AVG else op

    def of_all(function, instance, args, kwargs):
        kwargs.pop("device_ids", None)
        return function(*args, **kwargs)

    hooks = {"init_process_group": over_gloo, "all_reduce": averaged, "reduce": averaged}
    for name, hook in (hooks | {"barrier": of_all}).items():
        around(c10d, name, hook)
        setattr(torch.distributed, name, getattr(c10d, name))
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
