"""Puts all hooks in place in a process that has just imported torch."""

import os

import wrapt


def start():
    """Watch this process from now on."""
    from lockstep.watch import end, facts, messages, models, output, rows, updates

    facts.begin()
    if os.environ.get("LOCKSTEP_WATCH_DEVICES") == "cpu":
        from lockstep.watch import on_cpu

        on_cpu.start()
    parts = [messages, rows, models, updates, output, end]
    if facts.settings["times"]:
        from lockstep.watch import clock

        parts = [messages, output, end, clock]
    for part in parts:
        part.watch()


class Hook(wrapt.FunctionWrapper):
    """A function that is watched. It is pickled by its name, as a plain function is."""

    def __reduce_ex__(self, protocol):
        return self.__qualname__


def around(owner, name, wrapper):
    """Replace owner.name: wrapper(wrapped, instance, args, kwargs) is called in its place."""
    wrapt.wrap_object(owner, name, Hook, (wrapper,))
