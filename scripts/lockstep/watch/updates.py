"""Every update of every optimizer: gradients, parameters and settings, before and after."""

import functools
import os
import signal
import sys
import time
import zlib

from lockstep.watch import facts, memory, models
from lockstep.watch.hooks import around

_optimizers = {}  # id: {number, optimizer, parameters, where, ...}
_own = {}  # id of a parameter: what backward() has handed it on this rank since it was cleared
_backwards = []  # since the last update: [line, whether no_sync() was on]
_clipped = []  # since the last update: lines
_unclipped = {}  # id of a parameter: the projection of its gradient before it was first clipped
_clipped_to = {}  # id of a parameter: the projection of its gradient after it was last clipped
_limits = []  # since the last update: the largest norm, or number, that gradients were clipped to
_scaled = []  # since the last update: factors by which a GradScaler has multiplied losses
_unscaled = set()  # ids of optimizers whose gradients it has divided since
LIMITS = ("max_norm", "clip_value")  # how the two functions that clip name them
_inside = []  # frames that make an update now: an optimizer may be made of another


def watch():
    """Put the hooks in place."""
    import torch
    from torch.optim import optimizer

    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)
    around(torch.optim.Optimizer, "add_param_group", add)
    around(torch.optim.Optimizer, "zero_grad", clear)
    around(torch.nn.Module, "zero_grad", clear)
    around(torch.autograd, "backward", backward)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        around(torch.nn.utils, name, clip)
    around(torch.amp.GradScaler, "scale", scale)
    around(torch.amp.GradScaler, "unscale_", unscale)


def made():
    """Return how many updates each optimizer has made."""
    return [known["made"] for known in _optimizers.values()]


def owned():
    """Return the ids of all parameters that an optimizer has."""
    return {id(p) for known in _optimizers.values() for p in known["parameters"]}


# --- Gradients, as they come ---


def backward(function, instance, args, kwargs):
    """backward() is called."""
    silent = any(not ddp.require_backward_grad_sync for ddp in models.replicas)
    _backwards.append([facts.where(), silent])
    if facts.settings["values"]:
        tensors = args[0] if args else kwargs["tensors"]
        loss = tensors if hasattr(tensors, "numel") else tensors[0]
        facts.note("loss", value=loss.item() if loss.numel() == 1 else None)
    if not is_kept(max(made(), default=0)):
        return function(*args, **kwargs)
    from lockstep.watch.wire import Wire

    with Wire() as wire:
        result = function(*args, **kwargs)
    facts.note("sent", calls=wire.calls)
    return result


def clip(function, instance, args, kwargs):
    """Gradients are clipped."""
    import torch

    _clipped.append(facts.where())
    _limits.append(float([*args[1:2], *(kwargs.get(n) for n in LIMITS if n in kwargs)][0]))
    given = args[0] if args else kwargs["parameters"]
    given = [given] if isinstance(given, torch.Tensor) else list(given)
    for p in given:
        if p.grad is not None and id(p) not in _unclipped:
            _unclipped[id(p)] = facts.projection(p.grad)
    args = (given, *args[1:])  # it may have been a generator
    kwargs.pop("parameters", None)
    result = function(*args, **kwargs)
    _clipped_to.update({id(p): facts.projection(p.grad) for p in given if p.grad is not None})
    return result


def scale(function, scaler, args, kwargs):
    """A GradScaler multiplies a loss."""
    result = function(*args, **kwargs)
    if scaler.is_enabled():
        _scaled.append(scaler.get_scale())
        _unscaled.clear()
    return result


def unscale(function, scaler, args, kwargs):
    """A GradScaler divides the gradients of an optimizer."""
    _unscaled.add(id(args[0] if args else kwargs["optimizer"]))
    return function(*args, **kwargs)


def clear(function, owner, args, kwargs):
    """Gradients are set to zero, or to None."""
    result = function(*args, **kwargs)
    groups = getattr(owner, "param_groups", None)
    for p in [p for g in groups for p in g["params"]] if groups else owner.parameters():
        if id(p) in _own:
            _own[id(p)] |= nothing_yet()
    return result


def nothing_yet():
    """Return what a parameter has got since its gradient was cleared: nothing."""
    return {"sum": 0.0, "norm": 0.0, "carried": False, "crumbs": False}


def on_gradient(p, gradient):
    """A backward of this rank hands a parameter its gradient, before anything is averaged."""
    import torch

    own = _own[id(p)]
    if not facts.room("updates", count=0):
        return
    with torch.no_grad():
        if p.grad is None:
            own |= nothing_yet()
        elif own["fresh"]:
            own["carried"] = bool(facts.flat(p.grad).any())
        own["fresh"] = False
        vector = facts.flat(gradient)
        own["sum"] += facts.projection(vector)
        length = facts.norm(vector)
        own["norm"] += length
        own["crumbs"] |= are_crumbs(vector, length)


def are_crumbs(vector, length):
    """Return whether a gradient, if it was a float16, has kept next to nothing of its digits.

    Such numbers are small multiples of 2**-24, 16 times that on average at most.
    """
    if not 0 < length < 2.0**-20 * len(vector) ** 0.5:
        return False
    steps = vector.double() * 2.0**24
    return bool((steps == steps.round()).all())


# --- Optimizers ---


def add(function, optimizer, args, kwargs):
    """An optimizer is made, or gets more parameters."""
    result = function(*args, **kwargs)
    found = [p for group in optimizer.param_groups for p in group["params"]]
    known = _optimizers.setdefault(id(optimizer), {"number": len(_optimizers), "made": 0})
    known |= {"optimizer": optimizer, "parameters": found, "where": facts.where(), "told": False}
    for p in found:
        if p.requires_grad and p.is_leaf and id(p) not in _own:
            _own[id(p)] = nothing_yet() | {"fresh": True}
            p.register_hook(functools.partial(on_gradient, p))
    return result


def tell_of(known):
    """Write down what an optimizer has, at its first update."""
    known["told"] = True
    found = known["parameters"]
    about = {"names": models.names_of(found)}
    about["kinds"] = [str(p.dtype).removeprefix("torch.") for p in found]
    about["device"] = found[0].device.type
    about["wanted"] = [p.requires_grad for p in found]
    about["shards"] = [hasattr(p, "to_local") for p in found]
    about["sharded"] = any(about["shards"])
    facts.note("optimizer", number_of=known["number"], where=known["where"], **about)


def settings(optimizer):
    """Return the settings of each group of parameters: learning rate, weight decay and so on."""
    import torch

    simple = int | float | bool | tuple | list
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    groups = [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in groups
    ]
    return [{k: v for k, v in group.items() if isinstance(v, simple)} for group in groups]


def is_running(frame):
    """Return whether a frame is on the stack."""
    here = sys._getframe(1)
    while here and here is not frame:
        here = here.f_back
    return here is frame


def look_at(gradient):
    """Return (checksum, projection, whether it is not all zero) of a gradient that there may be."""
    if gradient is None:
        return None, None, False
    vector = facts.flat(gradient)
    projection = facts.projection(vector)
    return facts.checksum(vector), projection, projection != 0 or bool(vector.any())


def before(optimizer, args, kwargs):
    """An update begins."""
    import torch

    known = _optimizers[id(optimizer)]
    step = sys._getframe(1)
    _inside[:] = [frame for frame in _inside if is_running(frame)]  # one may have failed
    _inside.append(step)
    if len(_inside) > 1:
        return
    if not known["told"]:
        tell_of(known)
    found = known["parameters"]
    if not facts.room("updates", count=len(found) + 4):
        return
    with torch.no_grad():
        looks = [look_at(p.grad) for p in found]
        own = [_own.get(id(p), nothing_yet()) for p in found]
        known["now"] = {
            "grads": [checksum for checksum, _, _ in looks],
            "means": [projection for _, projection, _ in looks],
            "some": [some for _, _, some in looks],
            "unclipped": [_unclipped.get(id(p)) for p in found],
            "clipped_to": [_clipped_to.get(id(p)) for p in found],
            "limit": _limits[-1] if _limits else None,
            "factor": factor_in(optimizer, kwargs),
            "crumbs": [one["crumbs"] for one in own],
            "own": [one["sum"] for one in own],
            "own_norms": [one["norm"] for one in own],
            "carried": any(one["carried"] for one in own),
            "before": [facts.checksum(p) for p in found],
            "settings": settings(optimizer),
            "where": facts.where(),
            "backwards": _backwards[:],
            "clipped": _clipped[:],
        }
        known["halves"] = {p: facts.flat(p) for p in found if p.dtype.itemsize == 2}
        known["values"] = None
        if is_kept(known["made"]):
            known["values"] = numbers("before", found)
            known["values"] |= numbers("gradients", [p.grad for p in found])


def factor_in(optimizer, kwargs):
    """Return the factor that a GradScaler has left in the gradients, or None.

    A fused optimizer gets it from the scaler, and divides inside of the update.
    """
    divides = getattr(optimizer, "grad_scale", None) is not None or "grad_scaler" in kwargs
    return _scaled[-1] if _scaled and id(optimizer) not in _unscaled and not divides else None


def is_kept(made):
    """Return whether all values of the update after `made` others are written down, for a proof.

    Of the first two they are; then of every so many on average, without a period.
    """
    every = facts.settings["values"]
    return bool(every) and (made < 2 or zlib.crc32(b"%d" % made) % every == 0)


def numbers(what, tensors):
    """Return {"what/3": a copy of the fourth tensor as a vector}, without those that are None."""
    pairs = [(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    return {f"{what}/{number}": facts.flat(tensor).numpy().copy() for number, tensor in pairs}


def after(optimizer, args, kwargs):
    """An update is made."""
    known = _optimizers[id(optimizer)]
    _inside.pop()
    if _inside:
        return
    if "now" in known:
        sums = [facts.checksum(p) for p in known["parameters"]]
        kept = known.pop("values")
        if kept:
            kept |= numbers("after", known["parameters"])
            kept = facts.keep(kept, f"{known['number']}_{known['made']}")
        about = known.pop("now") | {"halves": lost_in(optimizer, known.pop("halves"))}
        facts.note("update", optimizer=known["number"], after=sums, values=kept, **about)
    _backwards.clear()
    _clipped.clear()
    for noted in (_unclipped, _clipped_to, _limits, _scaled, _unscaled):
        noted.clear()
    known["made"] += 1
    if known["made"] <= 2:  # an optimizer may make its states in its first update
        memory.note([one["optimizer"] for one in _optimizers.values()])
    for p in known["parameters"]:
        if id(p) in _own:
            _own[id(p)]["fresh"] = True
    if known["made"] == facts.settings["sigterm"]:
        terminate()
    most = facts.settings["updates"]
    if most and known["made"] >= most:
        leave()


def lost_in(optimizer, halves):
    """Return of how many numbers of 16 bits an update had a gradient, and how many are as before.

    None if the parameters {parameter: its numbers before} are none. Those are left out of which
    the optimizer keeps a finer copy, which is what it updates.
    """
    had, same = 0, 0
    for p, before in halves.items():
        if p.grad is not None and not any(is_master(t, p) for t in optimizer.state[p].values()):
            some = facts.flat(p.grad) != 0
            had += int(some.sum())
            same += int((some & (facts.flat(p) == before)).sum())
    return [had, same] if had else None


def is_master(state, p):
    """Return whether a state of an optimizer is a finer copy of its parameter."""
    if getattr(state, "shape", None) != p.shape or state.dtype.itemsize <= p.dtype.itemsize:
        return False
    return bool((facts.flat(state).to(p.dtype) == facts.flat(p)).all())


def terminate():
    """For a proof: the last rank, and no other, gets SIGTERM, if it has a handler for it."""
    import torch.distributed as dist

    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)


def leave():
    """End this rank: it has made as many updates as were asked for."""
    models.note_states()
    facts.note("enough")
    sys.stdout.flush()
    sys.stderr.flush()
    wait_for_the_others()
    os._exit(0)


def wait_for_the_others(seconds=5):
    """Wait until all ranks have made as many: they may still need what we have sent."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    folder, world = facts.settings["folder"], dist.get_world_size()
    open(os.path.join(folder, f"enough_{dist.get_rank()}"), "w").close()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(os.path.exists(os.path.join(folder, f"enough_{r}")) for r in range(world)):
            return
        time.sleep(0.02)
