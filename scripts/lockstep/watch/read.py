"""Reads the facts that all processes of a script have left, rank by rank."""

import functools
import json
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path


class Rank:
    """What one rank did, in order: its epochs, forwards, updates, calls, and how it ended."""

    def __init__(self, events, stack="", calls=None, folder=None):
        self.events, self.stack, self.folder = events, stack, folder
        self.last_calls = calls  # what traces.write_calls has left in a hang, in bytes
        self.epochs, self.forwards, self.updates, self.calls = [], [], [], []
        self.models, self.wrapped, self.optimizers, self.states = {}, {}, {}, {}
        self.hooked = False  # gradients are averaged by a function of the script's own
        self.drawn, self.group, self.error, self.ended = [], None, None, None
        self.memory = {}  # the most bytes after an update, by kind
        self._open, self._last = {}, None  # epochs by (loader, epoch); the last one with a batch
        self._rows, self._past = [], []  # since the last update
        self._batch, self._asked = None, []  # row numbers: of the last batch; trained since then
        self._given = None  # the last batch
        self.tested = []  # row numbers that a model was called with without gradients
        self.made, self.left_out = [], {}  # what there was no room for, and since which event
        for number, event in enumerate(events):
            event["number"] = number
            take = getattr(self, f"take_{event['what']}", None)
            if take:
                take(event)

    def take_epoch(self, event):
        event |= {"batches": [], "marks": [], "trains": False, "over": False}
        self._open[event["loader"], event["epoch"]] = event
        self.epochs.append(event)

    def take_batch(self, event):
        self._last = self._open[event["loader"], event["epoch"]]
        self._last["batches"].append(event["rows"])
        self._last["marks"].append(event["marks"] or [])
        self._batch, self._given = event["rows"], event
        self.forwards.append(event)

    def take_ended(self, event):
        self._open[event["loader"], event["epoch"]]["over"] = True

    def take_forward(self, event):
        event["epoch"], event["batch"] = self._last, self._given
        self.forwards.append(event)
        if event["train"] and event["grad"]:
            self._rows.append(event["rows"])
            self._past += [event["where"]] if event["past"] else []
            self._asked += self._batch or []
            self._batch = None
        elif not event["grad"]:
            self.tested += self._batch or []
            self._batch = None

    def take_hook(self, event):
        self.hooked = True

    def take_update(self, event):
        trained = [f for f in self.forwards[-9:] if f["what"] == "forward" and f["grad"]]
        trained = [] if "forwards" in self.left_out else trained
        event |= {"past": self._past, "mode": trained[-1]["train"] if trained else None}
        event["asked"] = self._asked
        event["given"] = [*chain(*filter(None, self._rows))]  # checksums of what a model got
        self._rows, self._past, self._asked = [], [], []
        if self._last and "rows" not in self.left_out:
            self._last["trains"] = True
        self.updates.append(event)

    def take_call(self, event):
        self.calls.append(event)

    def take_model(self, event):
        self.models[event["number_of"]] = event

    def take_wrapped(self, event):
        self.wrapped[event["number_of"]] = event

    def take_optimizer(self, event):
        self.optimizers[event["number_of"]] = event

    def take_state(self, event):
        self.states[event["number_of"]] = event

    def take_drawn(self, event):
        self.drawn.append(event)

    def take_group(self, event):
        self.group = event

    def take_error(self, event):
        self.error = event

    def take_memory(self, event):
        numbers = {kind: n for kind, n in event.items() if kind not in ("what", "at", "number")}
        self.memory = {kind: max(n, self.memory.get(kind, 0)) for kind, n in numbers.items()}

    def take_made(self, event):
        self.made = event["updates"]

    def take_left_out(self, event):
        self.left_out.setdefault(event["kind"], event["number"])

    def take_end(self, event):
        self.ended = "end"

    def take_enough(self, event):
        self.ended = "enough"

    def of(self, what):
        """Return all events of one kind."""
        return [event for event in self.events if event["what"] == what]

    def after_updates(self):
        """Return for each update what the script then called itself, and sent to the disk."""
        found = []
        for event in self.events:
            if event["what"] == "update":
                found.append([])
            elif found and (event["what"] in ("sync", "rename") or event.get("own")):
                found[-1].append(event)
        return found

    def heard(self, stream):
        """Return all that it has written to "stdout" or to "stderr", as one text."""
        return "".join(event["text"] for event in self.of("voice") if event["stream"] == stream)

    def values(self, update):
        """Return {"before", "gradients", "after"} of an update: {name: vector}; None if not kept.

        Before and after are the parameters'. A vector is None where there is no gradient.
        """
        if update["values"] is None:
            return None
        import numpy as np

        names = self.names(update)
        found = {what: dict.fromkeys(names) for what in ("before", "gradients", "after")}
        with np.load(Path(self.folder, update["values"])) as kept:
            for key in kept.files:
                what, number = key.split("/")
                found[what][names[int(number)]] = kept[key]
        return found

    def values_at_end(self):
        """Return the last parameters of the first model that was seen: {name: vector}."""
        kept = self.kept(self.states[0])
        return {name: kept[f"after/{n}"] for n, name in enumerate(self.models[0]["names"])}

    def kept(self, event):
        """Return all vectors of an event that has them in a file of its own: {name: vector}."""
        import numpy as np

        with np.load(Path(self.folder, event["values"])) as kept:
            return dict(kept)

    def count(self):
        """Return how many updates were made, by all optimizers."""
        return max(len(self.updates), sum(self.made))

    def most_updates(self):
        """Return how many updates the optimizer has made that has made most."""
        seen = Counter(u["optimizer"] for u in self.updates).values()
        return max([*seen, *self.made], default=0)

    def names(self, update):
        """Return the names of the parameters of an update."""
        return self.optimizers[update["optimizer"]]["names"]

    @functools.cached_property
    def seen(self):
        """Return {loader: {row: [checksums of what the model got, checksums of its label]}}."""
        found, batch, shown = defaultdict(lambda: defaultdict(lambda: [set(), set()])), None, []
        for event in self.forwards:
            if event["number"] > self.left_out.get("rows", event["number"]):
                break  # from here on a forward may have another batch
            if event["what"] == "batch":
                batch, shown = event, []
                for row, mark in zip(event["rows"] or [], event["marks"] or [], strict=False):
                    found[event["loader"]][row][1].add(mark)
            elif batch and batch["rows"] and event["rows"]:
                shown += event["rows"]
                if len(shown) == len(batch["rows"]):
                    for row, content in zip(batch["rows"], shown, strict=True):
                        found[batch["loader"]][row][0].add(content)
                    batch = None
        return found


def read(folder, by_torchrun):
    """Return the jobs of a run, each {rank: Rank}, in order: a script may start ranks twice."""
    ranks, workers, said = [], defaultdict(list), []
    for path in sorted(Path(folder).rglob("*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        start = events[0]
        group = next((event for event in events if event["what"] == "group"), None)
        if group:
            rank = group["rank"]
        elif start["child_of"] is not None:
            workers[start["child_of"]] += events  # a loader's worker
            continue
        elif start["RANK"] and by_torchrun:
            rank = int(start["RANK"])
        elif any(event["what"] in ("update", "forward") for event in events):
            rank = 0  # a script of one process
        else:
            said += [event for event in events if event["what"] == "said"]
            continue  # the process that has started the ranks
        stack = path.with_suffix(".stack")
        stack = stack.read_text() if stack.exists() else ""
        calls = path.with_suffix(".calls")
        calls = calls.read_bytes() if calls.exists() else None
        ranks.append((start["at"], rank, events, stack, calls, path.parent))
    jobs = []
    for _, rank, events, *left in sorted(ranks, key=lambda one: one[:2]):
        job = next((job for job in jobs if rank not in job), None)
        if job is None:
            jobs.append(job := {})
        job[rank] = Rank(events, *left)
        job[rank].drawn += [event for event in workers[rank] if event["what"] == "drawn"]
    if jobs and 0 in jobs[-1]:
        jobs[-1][0].events += said  # what is told in the end, it tells for rank 0
    return [dict(sorted(job.items())) for job in jobs]
