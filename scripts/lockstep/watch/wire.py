"""Which collectives are called, by whomever: for proofs and notebooks. DDP calls them from C++."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(args):
    """Return the tensors among the arguments of a collective, in lists as well."""
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def name_and_bytes(function, args):
    """Return [name, bytes of all tensors] of a collective."""
    return [function.overloadpacket.__name__, sum(tensor.nbytes for tensor in tensors_in(args))]


class Wire(TorchDispatchMode):
    """Writes down the collectives that are called while it is on: `calls`, as tell() tells them.

    On the CPU backward() runs in the thread that calls it; on a GPU its threads get the mode, too.
    """

    def __init__(self, tell=name_and_bytes):
        super().__init__()
        self.tell, self.calls = tell, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own collectives come here one by one
        # PyTorch has two libraries of collectives; the second one has waiting and wrapping, too.
        helps = "wait_tensor" in str(function) or "_wrap_tensor" in str(function)
        if "c10d" in function.namespace and not helps:
            self.calls.append(self.tell(function, args))
        return function(*args, **(kwargs or {}))
