"""For a proof: all memory of tensors that lives on a rank, by kind, and what the rank sends."""

import functools
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.watch import facts, models
from lockstep.watch.hooks import around

KINDS = ("parameters", "gradients", "optimizer", "gathered")
_now = []  # the Memory that is on


class Memory(TorchDispatchMode):
    """Sees all memory of tensors that comes, changes its size and goes on this rank; it is on in a
    `with`, in which models are made. `told()` returns what it has seen.

    It asks no class what it keeps: it knows every storage that an operation has returned. What the
    optimizer updates is `parameters`, its state `optimizer`; what was ever a .grad is `gradients`;
    where else a layer found its parameters is `gathered`; the rest is `besides`, but for `given`.
    A tensor whose memory is freed has no numbers that are right: it is filled with not-a-numbers.
    """

    def __init__(self, *given):
        super().__init__()
        self.paused, self.updates, self.wrong, self.given = False, 0, None, set()
        self.storages, self.kinds = {}, {}  # by number: weak reference; [kind], [bytes]
        self.steps, self.events, self.calls, self.computed = [], [], [], [set()]
        self.meet(None, given)
        self.given, self.events, self.hooks = set(self.storages), [], ExitStack()

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_
        spoil = lambda storage, size: self.spoil(storage, size)  # noqa: E731
        self.hooks.enter_context(patch.object(torch.UntypedStorage, "resize_", spoil))
        for handle in (
            modules.register_module_parameter_registration_hook(self.after_registration),
            modules.register_module_forward_pre_hook(self.between),
            modules.register_module_forward_hook(self.after_layer),
            register_optimizer_step_post_hook(self.after_update),
        ):
            self.hooks.callback(handle.remove)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name not in ("aten::detach", "aten::view"):
            for leaf in filter(is_freed, tree_leaves([args, kwargs])):
                self.wrong = f"{function._schema.name} reads parameters that are freed"
                self.spoil(leaf.untyped_storage(), end_of(leaf))  # else the process might crash
        result = function(*args, **(kwargs or {}))
        if not self.paused:
            self.meet(None, tree_leaves(result))
            if function.namespace == "c10d":
                self.events.append("call")
                self.calls.append(handed_over(function, args))
        return result

    def spoil(self, storage, size):
        """Resize a storage, and leave no right number where memory goes, or comes."""
        storage.fill_(255)  # not a number
        self.resize(storage, size)
        self.change(storage._cdata, size)
        return storage.fill_(255)

    def meet(self, kind, things):
        """Get to know the storages of these tensors, or what they are."""
        for tensor in things:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                number = storage._cdata
                if number not in self.storages:
                    gone = functools.partial(self.change, number, 0)
                    self.storages[number] = weakref.ref(storage, gone)
                    self.kinds[number] = [None], [0]
                    self.change(number, storage.nbytes())
                if kind not in (None, "gathered") or not self.kinds[number][0][0]:
                    self.kinds[number][0][0] = kind

    def change(self, number, nbytes, reference=None):
        """Write down that a storage has another size now, or is gone."""
        if number in self.kinds:
            kind, size = self.kinds[number]
            if number not in self.given:
                self.events.append((kind, nbytes - size[0]))
            size[0] = nbytes
            if reference is not None:
                del self.storages[number], self.kinds[number]

    def after_registration(self, module, name, parameter):
        if parameter is not None and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self.after_gradient)

    def after_gradient(self, parameter):
        self.meet("gradients", [parameter.grad])
        self.events.append("computed")

    def after_layer(self, layer, *_):
        self.paused, own = True, list(layer.parameters(recurse=False))
        self.meet("gathered", own)
        self.computed[-1].update(facts.checksum(p.clone()) for p in own)  # numpy pins what it sees
        self.paused = False
        self.events.append("computed")

    def after_update(self, optimizer, *_):
        """Learn from the optimizer what it keeps, and of which parameters."""
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        self.meet("parameters", updated)
        self.meet("gradients", (parameter.grad for parameter in updated))
        self.meet("optimizer", tree_leaves([list(optimizer.state[p].values()) for p in updated]))
        self.updates, self.optimizer = self.updates + 1, optimizer  # it lives until all is seen
        self.events.append("kept")  # here, between two steps, is what a rank keeps

    def between(self, *_):
        """End a step, at the beginning of the first forward after the update."""
        if len(self.steps) == self.updates:
            self.steps.append((self.events, self.calls))
            self.events, self.calls = [], []
            self.computed += [set()] * (self.updates > 0)

    def told(self):
        """Return what lived after each update and now, the most in a step, what each step sent."""
        steps = [*self.steps, ([*self.events, "kept"], self.calls)]
        kept, peak = replay(steps, max(1, self.updates))
        sent = [Counter() for _ in steps]
        for (_, calls), by_name in zip(steps, sent, strict=True):
            for name, nbytes in calls:
                by_name[name] += nbytes
        about = {"kept": kept, "peak": peak, "setup": sorted(sent[0]), "wrong": self.wrong}
        about["sent"] = [dict(by_name) for by_name in sent[1 : self.updates + 1]]
        return about | {"computed": [sorted(sums) for sums in self.computed]}


def end_of(tensor):
    """Return how many bytes a storage needs for this tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in sizes)
    return (last + 1) * tensor.itemsize


def is_freed(leaf):
    """Return whether this is a tensor with numbers whose memory is gone."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return False
    return leaf.untyped_storage().nbytes() < end_of(leaf)


def replay(steps, last):
    """Return (what lives at each "kept", the most in a step); steps[0] is what was before.

    `most` has, too, the largest `piece` of what is besides; how much has come `beside a call` since
    a layer or a gradient was computed; and all that lived in the `setup`, before the first step.
    """
    now = dict.fromkeys((*KINDS, "besides", "together"), 0)
    kept, most, before = [], now | {"piece": 0, "beside a call": 0, "setup": 0}, 0
    for number, (events, _) in enumerate(steps):
        for event in events:
            if event == "kept":
                kept.append(now.copy())
            elif event == "computed" or (number == 0 and event == "call"):
                before = now["besides"]
            elif event == "call":
                most["beside a call"] = max(most["beside a call"], now["besides"] - before)
            else:
                (kind,), nbytes = event
                now[kind or "besides"] += nbytes
                now["together"] += nbytes if kind else 0
                if 0 < number <= last:
                    most |= {name: max(now[name], most[name]) for name in now}
                    most["piece"] = max(most["piece"], 0 if kind else nbytes)
                elif number == 0:
                    most["setup"] = max(most["setup"], now["together"] + now["besides"])
    return kept, most


def handed_over(function, args):
    """Return (what it is, bytes that this rank sends); an all-gather sends by a ring, too."""
    rank, ranks, name = dist.get_rank(), dist.get_world_size(), function._schema.name
    if name == "c10d::send" and args[2] == (rank + 1) % ranks:
        return "reduce_scatter", args[0][0].nbytes
    if name == "c10d::_allgather_base_":
        return "all_gather", (ranks - 1) * args[1].nbytes
    return name, 0


# --- In a rank that is watched ---


def begin():
    """Watch this rank's memory, from the moment at which it has joined its group."""
    put_hooks()
    stop()
    _now.append(Memory())
    _now[0].__enter__()


def stop():
    """Stop to watch it; return what was seen, or None."""
    if not _now:
        return None
    memory = _now.pop()
    told = memory.told()
    memory.__exit__(None, None, None)
    return told


@functools.cache
def put_hooks():
    """What the other hooks take themselves is not the script's; when it leaves, all is told."""
    for name in ("flat", "projection", "row_checksums"):
        around(facts, name, unseen)
    around(models, "note_states", tell)


def unseen(function, instance, args, kwargs):
    if not _now:
        return function(*args, **kwargs)
    _now[0].paused, before = True, _now[0].paused
    try:
        return function(*args, **kwargs)
    finally:
        _now[0].paused = before


def tell(function, instance, args, kwargs):
    told = stop()
    if told:
        facts.note("storages", **told)
    return function(*args, **kwargs)
