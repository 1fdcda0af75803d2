"""Stand-ins: devices for a machine without GPUs, which PyTorch takes for real.

They compute on the CPU. A script that asks torch.accelerator finds them, and nn.DataParallel too.
"""

import copy
import functools
import os
import sys

import torch
from torch.utils._pytree import tree_leaves, tree_map


class StandIn(torch.Tensor):
    """A tensor that PyTorch believes to be on a device of its own; it computes on the CPU."""

    @staticmethod
    def __new__(cls, on_cpu, device):
        layout = {"strides": on_cpu.stride(), "dtype": on_cpu.dtype, "device": device}
        tensor = torch.Tensor._make_wrapper_subclass(cls, on_cpu.shape, **layout)
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Do one operation of PyTorch: open the tensors, compute, say where the result is."""
        if function is torch.ops.aten.copy_.default:
            return write_into(*args)
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        inputs = [tensor.device for tensor in tensors if isinstance(tensor, cls)]
        others = {t.device for t in tensors if t.dim() > 0 or isinstance(t, cls)}  # as CUDA does:
        if len(others) > 1:  # a single number on the CPU may be mixed with a device, no other
            raise RuntimeError(f"{function}: all tensors must be on the same device")
        device = torch.device(options.pop("device", None) or inputs[0])
        result = function(*tree_map(opened, args), **tree_map(opened, options))
        if function is torch.ops.aten._to_copy.default:
            result = result.clone()  # from one device to another nothing is shared
        if device.type == "cpu":
            return result
        return tree_map(lambda x: cls(x, device) if isinstance(x, torch.Tensor) else x, result)


def opened(thing):
    """Return what a stand-in tensor holds; anything else as it is."""
    return thing.on_cpu if isinstance(thing, StandIn) else thing


def write_into(target, source, non_blocking=False):
    """Copy the numbers of `source` into `target`, from whatever device to whatever device."""
    opened(target).copy_(opened(source))
    return target


@functools.cache  # PyTorch takes a kind of device once in a process
def register_stand_ins():
    """Make the kind of device known, and what makes new tensors on it, or moves tensors there."""
    registry = torch.utils.backend_registration
    if not hasattr(registry, "_setup_privateuseone_for_python_backend"):
        problem = f"torch {torch.__version__} can't make stand-ins for GPUs"
        sys.exit(f"{problem}: take the version in requirements.txt")

    class Backend(registry._DummyBackendModule):  # what PyTorch asks a device about
        def device_count(self):
            return 64

        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    def empty(size, stride=None, *, dtype=None, device=None, **options):
        stride = stride or torch.empty(size, device="meta").stride()
        return StandIn(torch.empty_strided(size, stride, dtype=dtype), device)

    setup = registry._setup_privateuseone_for_python_backend  # marked experimental
    setup("standin", backend_module=Backend())
    operations = torch.library.Library("aten", "IMPL")
    operations.impl("empty.memory_format", empty, "PrivateUse1")
    operations.impl("empty_strided", empty, "PrivateUse1")
    operations.impl("_copy_from", lambda source, to, *_: write_into(to, source), "PrivateUse1")
    replace_what_needs_cuda()
    return operations


def replace_what_needs_cuda():
    """Give nn.DataParallel in Python what it has in C++, for CUDA only; and say: no nccl."""

    def send(tensors, devices):
        places = (torch.device("standin", device) for device in devices)
        return [tensor.to(place) for tensor, place in zip(tensors, places, strict=False)]

    def scatter_in_python(tensor, devices, sizes, dim, streams):
        return send(tensor.chunk(len(devices), dim), devices)

    def gather_in_python(tensors, dim, device):
        return torch.cat(send(tensors, [device] * len(tensors)), dim)

    def broadcast_in_python(tensors, devices, buffer_size):
        return [send(tensors, [device] * len(tensors)) for device in devices]

    library = sys.modules["torch.nn.parallel.data_parallel"]
    library._get_available_device_type = lambda: "standin"  # where there is another kind as well
    torch._C._scatter = scatter_in_python
    torch._C._gather = gather_in_python
    torch._C._broadcast_coalesced = broadcast_in_python
    torch.cuda.nccl.is_available = lambda tensors: False


def find_devices(count):
    """Return `count` devices: GPUs if there are that many, else stand-ins, from then on."""
    stand_ins_are_in_use = register_stand_ins.cache_info().currsize > 0
    if torch.cuda.device_count() >= count and not stand_ins_are_in_use:
        return [torch.device("cuda", index) for index in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # too few GPUs: none, for the rest of this process
    register_stand_ins()
    return [torch.device("standin", index) for index in range(count)]


def place(thing, device):
    """Return a copy of a model, or of a tensor, on `device`."""
    return copy.deepcopy(thing).to(device)
