"""What one process does on several devices, step by step: calls of layers, copies, updates."""

import contextlib
import threading
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.watch.facts import row_checksums

KINDS = ("rows", "parameters", "outputs", "gradients of the outputs", "gradients")
MOVED = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}  # which argument


class Step(NamedTuple):
    """One update, and what led to it."""

    visits: list  # (device, checksums of the rows) of each call of a linear layer, by device
    together: bool  # whether as many layers as were expected have waited for each other
    copies: list  # (what, of KINDS, source, target, bytes)
    outside: int  # rows that mse_loss got
    gradient: torch.Tensor  # as one vector
    after: torch.Tensor  # the parameters, as one vector

    def sent(self):
        """Return {what: bytes} that have gone from one device to another."""
        return {kind: sum(n for what, _, _, n in self.copies if what == kind) for kind in KINDS}


class Copies(TorchDispatchMode):
    """Writes down each copy between devices that its thread makes; None is the CPU."""

    def __init__(self):
        super().__init__()
        self.copies, self.outside = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in MOVED and args[MOVED[function]].device != result.device:
            moved = args[MOVED[function]]
            ends = moved.device.index, result.device.index
            self.copies.append((kind_of(moved), *ends, result.nbytes))
        if function is torch.ops.aten.mse_loss.default:
            self.outside = len(args[0])
        return result


def kind_of(tensor):
    """Return what a tensor is, of the KINDS of things that a step sends. Device 0 is the master."""
    from_master = tensor.device.index == 0
    if torch._C._current_graph_task_id() != -1:  # backward() runs
        return "gradients of the outputs" if from_master else "gradients"
    if isinstance(tensor, nn.Parameter):
        return "parameters"
    return "rows" if from_master else "outputs"


class Watch(Copies):
    """Writes down what happens in its block, and with each update a Step.

    No layer computes before `expected` of them have been called, or five seconds have passed.
    """

    def __init__(self, expected=1):
        super().__init__()
        self.visits, self.steps = [], []
        self.meeting = threading.Barrier(expected, timeout=5)

    def __enter__(self):
        self.hooks = [register_module_forward_pre_hook(self.visit)]
        self.hooks.append(register_optimizer_step_post_hook(self.update))
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def visit(self, layer, inputs):
        """A layer is called."""
        device = inputs[0].device.index
        if isinstance(layer, nn.Linear) and device is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait()
            self.visits.append((device, inputs[0].detach()))

    def update(self, optimizer, args, kwargs):
        """An update is made."""
        parameters = optimizer.param_groups[0]["params"]
        copies = [copy for copy in self.copies if None not in copy]
        visits = sorted((device, row_checksums(rows)) for device, rows in self.visits)
        seen = visits, not self.meeting.broken, copies, self.outside
        self.steps.append(Step(*seen, gradient(parameters), as_vector(parameters)))
        self.copies, self.visits = [], []


def gradient(parameters):
    """Return the gradient that the last backward() left, as one vector."""
    return as_vector(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)


def as_vector(tensors):
    """Return the numbers of these tensors as one vector on the CPU."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
