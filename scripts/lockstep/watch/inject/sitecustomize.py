"""Python runs this in every process below a check, because its folder is on PYTHONPATH.

So ranks are watched alike, whoever starts them: a launcher, mp.spawn or multiprocessing. Nothing
happens in a process before it imports torch.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LAUNCHERS = {"torch.distributed.run", "torch.distributed.launch"}


def run_the_other_sitecustomize():
    """Run the one that this file hides, if the environment has one."""
    path = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def rename_the_flag_of_the_launcher():
    """An older script knows --local_rank only, and the launcher of PyTorch 2 says --local-rank."""
    name = os.environ.get("LOCKSTEP_WATCH_LOCAL_RANK", "--local-rank")
    sys.argv[:] = [re.sub("^--local-rank(?==)", name, flag) for flag in sys.argv]


def watch_after_torch():
    """Start the watch as soon as this process has imported torch."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    if package not in sys.path:
        sys.path.append(package)
    import wrapt

    def start(torch):
        from lockstep.watch import hooks

        hooks.start()

    wrapt.register_post_import_hook(start, "torch")


run_the_other_sitecustomize()
if "LOCKSTEP_WATCH" in os.environ and not LAUNCHERS & set(sys.orig_argv):
    rename_the_flag_of_the_launcher()
    watch_after_torch()
