"""How much memory autograd keeps between forward and backward.

`import nbtools` does not import this module, because it needs torch.
"""

import torch


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for backward inside `with Saved(...) as saved`.

    saved.most: the most bytes that were kept at a time. Memory that two functions keep counts once,
    and that of the tensors `there_anyway` (parameters, the batch) does not count.
    """

    def __init__(self, *there_anyway):
        self.ignored = {_address(tensor) for tensor in there_anyway}
        self.users = {}  # address of some memory: how many functions keep it
        self.now = self.most = 0
        super().__init__(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)

    def __enter__(self):
        super().__enter__()
        return self


class _Kept:
    """A tensor that a function of autograd keeps, until autograd forgets it."""

    def __init__(self, saved, tensor):
        self.saved, self.tensor, self.address = saved, tensor, _address(tensor)
        self.nbytes = 0 if self.address in saved.ignored else tensor.untyped_storage().nbytes()
        users = saved.users.get(self.address, 0)
        saved.users[self.address] = users + 1
        if users == 0:
            saved.now += self.nbytes
            saved.most = max(saved.most, saved.now)

    def __del__(self):
        self.saved.users[self.address] -= 1
        if self.saved.users[self.address] == 0:
            self.saved.now -= self.nbytes


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
