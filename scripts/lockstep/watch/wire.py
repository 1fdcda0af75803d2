"""For a proof: what is sent inside backward(), by whomever. DDP calls its collectives from C++."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wire(TorchDispatchMode):
    """Writes down the collectives that are called while it is on: [[name, bytes], ...].

    On the CPU backward() runs in the thread that calls it; on a GPU its threads get the mode, too.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own collectives come here one by one
        if "c10d" in function.namespace:  # PyTorch has two libraries of collectives
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.calls.append([function.overloadpacket.__name__, nbytes])
        return function(*args, **(kwargs or {}))
