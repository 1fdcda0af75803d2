"""What the forkserver of run() imports, once for all ranks."""

from lockstep.imports import import_quickly

import_quickly("torch.distributed", "torch._dynamo", "cloudpickle", "nbtools.run", "nbtools.record")
