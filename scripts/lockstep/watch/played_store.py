"""A stage for ranks that agree on something through a store: many orders, and no time.

Ranks are threads, of which one goes on at a time: before each request chance says which. So an
order that comes seldom is tried, and comes again with its seed.
"""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor


class Stage:
    """Plays ranks. It has a store, and, in place of the module `time`, a clock of its own.

    The clock goes on while a rank sleeps, and when all wait: then to the first limit. A store that
    is `closed` answers nobody, as one whose process has left.
    """

    def __init__(self, seed):
        self.chance, self.now, self.closed, self.keys = random.Random(seed), 0.0, False, {}
        self.turns, self.turn, self.parked = threading.Condition(), None, {}
        self.here = threading.local()  # its number: which rank this thread plays
        self.store = Table("", self)

    def play(self, parts):
        """Call all functions of a list, a thread for each; return what they return."""
        with ThreadPoolExecutor(len(parts)) as pool:
            ends = [pool.submit(self.be, n, part, len(parts)) for n, part in enumerate(parts)]
            return [end.result() for end in ends]

    def be(self, number, part, count):
        """Play one part, once all have come to the stage."""
        self.here.number = number
        self.pause(first=count)
        try:
            return part()
        finally:
            with self.turns:
                self.go_on()

    def pause(self, ready=lambda: True, until=math.inf, first=1):
        """Let others go on, until it is our turn, and ready() or the clock has reached `until`."""
        number = self.here.number
        with self.turns:
            self.parked[number] = ready, until
            if len(self.parked) >= first:
                self.go_on()
            self.turns.wait_for(lambda: self.turn == number)
            self.turn = None

    def go_on(self):
        """Choose who goes on, of those who can."""
        limits = [until for _, until in self.parked.values()]
        can = [n for n, (ready, until) in self.parked.items() if ready() or until <= self.now]
        if not can and limits:
            self.now = min(limits)
            can = [n for n, (_, until) in self.parked.items() if until == self.now]
        if can:
            self.turn = self.chance.choice(sorted(can))
            del self.parked[self.turn]
            self.turns.notify_all()

    def monotonic(self):
        """Return the seconds since the beginning."""
        return self.now

    def sleep(self, seconds):
        """Let others go on, then the clock."""
        self.pause()
        self.now += seconds


class Table:
    """The store of a stage, or what stands in it behind a prefix, as a PrefixStore of PyTorch."""

    def __init__(self, prefix, below):
        self.stage = getattr(below, "stage", below)
        self.prefix = f"{getattr(below, 'prefix', '')}{prefix}/"

    def ask(self, keys=(), until=math.inf):
        """Wait for our turn, and for these keys; return whether they are there."""
        keys, there = [self.prefix + key for key in keys], self.stage.keys
        self.stage.pause(lambda: all(key in there for key in keys) or self.stage.closed, until)
        if self.stage.closed:
            raise RuntimeError("Connection was likely closed")
        return all(key in there for key in keys)

    def set(self, key, value):
        self.ask()
        self.stage.keys[self.prefix + key] = value.encode()

    def get(self, key):
        self.ask([key])
        return self.stage.keys[self.prefix + key]

    def add(self, key, amount):
        self.ask()
        value = int(self.stage.keys.get(self.prefix + key, 0)) + amount
        self.stage.keys[self.prefix + key] = str(value).encode()
        return value

    def compare_set(self, key, old, new):
        self.ask()
        found = self.stage.keys.get(self.prefix + key, b"")
        if found == old.encode():
            found = self.stage.keys[self.prefix + key] = new.encode()
        return found

    def check(self, keys):
        self.ask()
        return all(self.prefix + key in self.stage.keys for key in keys)

    def wait(self, keys, limit):
        if not self.ask(keys, self.stage.now + limit.total_seconds()):
            raise RuntimeError("Wait timeout")
