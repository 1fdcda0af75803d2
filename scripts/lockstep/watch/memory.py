"""The bytes that a rank keeps between two updates, counted as in lesson 18: by their storages."""

from lockstep.watch import facts


def note(optimizers):
    """Write down what these optimizers' parameters, their gradients and the states take here.

    What is sharded counts with this rank's part. `whole` are states that are not, although their
    parameter is.
    """
    from torch.utils._pytree import tree_leaves

    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    states = [(p, tree_leaves(list(kept.values()))) for o in optimizers for p, kept in items(o)]
    known = set()
    about = {"parameters": size(parameters, known)}
    about["gradients"] = size([p.grad for p in parameters], known)
    about["optimizer"] = size([one for _, kept in states for one in kept], known)
    whole = [one for p, kept in states for one in kept if is_whole(one, p)]
    facts.note("memory", **about, whole=size(whole, set()))


def items(optimizer):
    """Return the states of an optimizer with their parameters, without making one."""
    import torch

    return [(p, kept) for p, kept in optimizer.state.items() if isinstance(p, torch.Tensor)]


def local(tensor):
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size(things, known):
    """Return the bytes of the storages of these tensors that are not `known`; know them then."""
    import torch

    total = 0
    for tensor in things:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            storage = local(tensor.detach()).untyped_storage()
            total += 0 if storage._cdata in known else storage.nbytes()
            known.add(storage._cdata)
    return total


def is_whole(state, parameter):
    """Return whether a state is as large as its parameter, of which this rank has a part."""
    import torch

    sharded = local(parameter.detach()).numel() < parameter.numel()
    return sharded and isinstance(state, torch.Tensor) and local(state).numel() == parameter.numel()
