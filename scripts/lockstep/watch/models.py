"""The models: wrapped or not, what they are called with, in which mode, their buffers."""

import itertools

from lockstep.watch import facts
from lockstep.watch.hooks import around

_models = {}  # id: [number, the module, whether it draws dropout masks]
_wrapped = {}  # id of each module inside a DDP, and the module
replicas = []  # the DDP objects: one that dies after its group may wait for ever, so none dies
_inside = []
_norms = itertools.count()  # forwards of BatchNorm layers, for a proof


def watch():
    """Put the hooks in place."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    around(DistributedDataParallel, "__init__", wrap)
    around(DistributedDataParallel, "join", join)
    around(DistributedDataParallel, "register_comm_hook", hook)
    around(torch.nn.Module, "__call__", call)


def wrap(init, ddp, args, kwargs):
    """A model is wrapped in DDP."""
    import torch.distributed as dist

    init(*args, **kwargs)
    module = ddp.module
    for part in module.modules():
        _wrapped[id(part)] = part
    ddp.__dict__["_parameters_then"] = list(module.parameters())
    replicas.append(ddp)
    about = {"init_sync": kwargs.get("init_sync", True), "sends_buffers": ddp.broadcast_buffers}
    about["members"] = dist.get_process_group_ranks(ddp.process_group)
    number = know(module)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    about["ignored"] = sorted(ignored)
    sums = [facts.checksum(p) for n, p in module.named_parameters() if n not in ignored]
    facts.note("wrapped", number_of=number, sums=sums, where=facts.where(), **about)


def join(function, ddp, args, kwargs):
    """The ranks may have unequal numbers of batches from here on."""
    facts.note("join", where=facts.where())
    return function(*args, **kwargs)


def hook(function, ddp, args, kwargs):
    """A function of the script's own averages gradients, perhaps in another type."""
    facts.note("hook", where=facts.where())
    return function(*args, **kwargs)


def know(module):
    """Return the number of a model; write down what it has when it is seen for the first time."""
    from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if id(module) not in _models:
        sizes = [p.numel() for p in module.parameters()]
        if sum(sizes) > facts.LARGE:
            facts.process["most"] = facts.MOST // len(sizes)
        parts = list(module.modules())
        norms = [m for m in parts if isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm)]
        drops = any(isinstance(m, _DropoutNd) and m.p > 0 for m in parts)
        number = len(_models)
        _models[id(module)] = [number, module, drops]
        about = {"norms": sum(m.track_running_stats for m in norms), "dropout": drops}
        about["synced"] = sum(isinstance(m, SyncBatchNorm) for m in parts)
        about["names"] = [name for name, _ in module.named_parameters()]
        about["sums"] = [facts.checksum(p) for p in module.parameters()]
        about["sharded"] = any(hasattr(p, "to_local") for p in module.parameters())
        about |= {"size": sum(sizes), "most": facts.process["most"]}
        about["shares_rows"] = ranks_of_fsdp(parts)
        about["sharded"] |= about["shares_rows"] is not None
        facts.note("model", number_of=number, type=type(module).__name__, **about)
        if facts.settings["values"]:
            for part in [m for m in parts if isinstance(m, _BatchNorm)]:
                part.register_forward_hook(note_norm)
    return _models[id(module)][0]


def call(function, module, args, kwargs):
    """A model is called: from which line, in which mode, with which rows?"""
    import torch
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    again = torch._C._current_graph_task_id() != -1  # backward computes a checkpointed part again
    if _inside or again:
        return function(*args, **kwargs)
    ddp = isinstance(module, DistributedDataParallel)
    inner = module.module if ddp or isinstance(module, DataParallel) else module
    if next(inner.parameters(), None) is None:
        return function(*args, **kwargs)  # a loss, for example
    _inside.append(module)
    if ddp:
        look_for_others(module)
    try:
        grad, past = torch.is_grad_enabled(), not ddp and id(module) in _wrapped
        number, place = None if past else know(inner), facts.where()
        if not facts.room("forwards", place):
            return function(*args, **kwargs)
        about = {"past": past, "train": inner.training, "grad": grad}
        about["rows"] = rows_of(args, kwargs, place)
        if number is not None and _models[id(inner)][2] and module.training and grad:
            about["masks"] = facts.checksum(torch.default_generator.get_state())
        facts.note("forward", model=number, where=place, **about)
        return function(*args, **kwargs)
    finally:
        _inside.pop()


def note_norm(layer, given, outputs):
    """For a proof: a BatchNorm layer was given this, made that of it, and now keeps these."""
    tensors = {"inputs": given[0], "outputs": outputs}
    tensors |= {"mean": layer.running_mean, "variance": layer.running_var}
    values = {what: facts.flat(x).numpy().copy() for what, x in tensors.items() if x is not None}
    file = facts.keep(values, f"norm_{next(_norms)}")
    facts.note("norm", train=layer.training, values=file)


def ranks_of_fsdp(parts):
    """Return among how many ranks FSDP shares out rows; None if none of the modules is in FSDP.

    Ranks that hold parts of the same layer (tensor parallel) get the same rows.
    """
    for part in parts:
        if type(part).__name__ == "FullyShardedDataParallel":
            return part.process_group.size()
        if hasattr(part, "_get_fsdp_state"):
            group = part._get_fsdp_state()._fsdp_param_group
            if group is not None:
                return group.mesh_info.mesh.size()
    return None


def is_called():
    """Return whether a model computes its output right now."""
    return bool(_inside)


def look_for_others(ddp):
    """Write down which parameters have been replaced since a model was wrapped, once."""
    then = {id(p) for p in ddp.__dict__.get("_parameters_then", ())}
    names = [n for n, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in then]
    if names and not ddp.__dict__.get("_told"):
        ddp.__dict__["_told"] = True
        facts.note("replaced", names=names, where=facts.where())


def rows_of(args, kwargs, place):
    """Return a checksum for each row of the first tensor that a model is called with, or None."""
    import torch
    from torch.utils._pytree import tree_leaves

    given = tree_leaves([args, kwargs])
    first = next((x for x in given if isinstance(x, torch.Tensor) and x.dim()), None)
    fits = first is not None and facts.room("rows", place, len(first))
    most = None if facts.settings["values"] else facts.MOST_ROWS
    return facts.row_checksums(first, most) if fits else None


def names_of(parameters):
    """Return the parameters' names in the models that were seen, or what they look like."""
    known = {id(p): n for _, module, _ in _models.values() for n, p in module.named_parameters()}
    others = (f"number {n} of shape {list(p.shape)}" for n, p in enumerate(parameters))
    return [known.get(id(p), other) for p, other in zip(parameters, others, strict=True)]


def note_states():
    """Write down the models as they are now: at the end, or near it."""
    from lockstep.watch import updates

    owned = updates.owned()
    facts.note("made", updates=updates.made())
    for number, module, _ in list(_models.values()):
        buffers = {name: facts.checksum(b) for name, b in module.named_buffers()}
        named = list(module.named_parameters())
        unowned = [name for name, p in named if p.requires_grad and id(p) not in owned]
        trained = any(id(p) in owned for _, p in named)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        sums = [facts.checksum(p) for name, p in named if name not in ignored]
        about = {"buffers": buffers, "unowned": unowned, "trained": trained, "sums": sums}
        about |= {"training": module.training, "values": None}
        if facts.settings["values"]:
            values = updates.numbers("after", module.parameters())
            about["values"] = facts.keep(values, f"end_{number}")
        facts.note("state", number_of=number, **about)
