"""What goes over the wire: the collectives that PyTorch calls.

`import nbtools` does not import this module, because it needs torch: the notebooks of lessons 07
and 08 use nbtools with another framework, and two frameworks in one process can crash it.
"""

from collections import namedtuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(namedtuple("Call", "name kind numbers nbytes")):
    """One collective, and the first tensor that was given to it."""

    def __str__(self):
        return f"{self.name} of {self.numbers} {self.kind} = {self.nbytes} bytes"


class Wire(TorchDispatchMode):
    """Writes down every collective inside `with Wire() as wire`: `wire.calls`, a list of Call.

    A call has the collective's name, and the type, the count of numbers and the bytes of the first
    tensor that is given to it. For a broadcast and an all-reduce that is what a rank hands over
    (for all_gather_into_tensor and reduce_scatter_tensor it is the output). It is not what a cable
    carries.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":  # PyTorch's library of collectives
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            name = function._schema.name.removeprefix("c10d::").rstrip("_")
            kind = str(first.dtype).removeprefix("torch.")
            self.calls.append(Call(name, kind, first.numel(), first.nbytes))
        return function(*args, **(kwargs or {}))
