"""What one process computes in a session of TensorFlow: what ran where, and what was sent.

Nothing of TensorFlow goes through the hooks for PyTorch, and nothing here imports torch.
"""

import contextlib
import re
import time
from collections import Counter
from itertools import chain
from typing import NamedTuple
from unittest.mock import patch

import tensorflow as tf

v1 = tf.compat.v1


class Step(NamedTuple):
    """What was found in a run of the session that computed a loss. Values are arrays."""

    gradients: dict  # {variable: what its optimizer got}
    batch: list  # what the data set has yielded
    parts: list  # [what entered tower 0, tower 1, ...], in the order in which it is used
    before: dict  # {variable: value}
    after: dict
    ran: list  # [(device, operation)]
    crossed: list  # [(from, to, tensor, bytes)]


class Watch(contextlib.ExitStack):
    """Notes the losses of a script, and looks into the steps with these numbers, from 0 on.

    A step is a run of the session that computes a scalar, once an optimizer has its gradients.
    """

    def __init__(self, looks):
        super().__init__()
        self.looks, self.losses, self.seconds, self.steps = looks, [], [], []
        self.graph, self.variables, self.nodes, self.pairs = None, {}, {}, []

    def __enter__(self):
        self.run, apply = v1.Session.run, v1.train.Optimizer.apply_gradients

        def note_pairs(optimizer, pairs, *given, **named):
            self.pairs = list(pairs)
            return apply(optimizer, self.pairs, *given, **named)

        def run(session, fetches, *given, **named):
            return self.note_run(session, fetches, *given, **named)

        self.enter_context(patch.object(v1.train.Optimizer, "apply_gradients", note_pairs))
        self.enter_context(patch.object(v1.Session, "run", run))
        return self

    def note_run(self, session, fetches, *given, **named):
        """Do what session.run does; if it is a step, note it."""
        scalars = [t for t in tf.nest.flatten(fetches) if tf.is_tensor(t) and t.shape == ()]
        if not (self.pairs and scalars):
            return self.run(session, fetches, *given, **named)
        looks, start = len(self.losses) in self.looks, time.perf_counter()
        run = self.look if looks else self.run
        answers, loss = run(session, [fetches, scalars[0]], *given, **named)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        return answers

    def look(self, session, fetches, feed_dict=None):
        """Do what session.run does, in more detail, and note it as a Step."""
        if session.graph is not self.graph:
            self.find_nodes(session.graph)
        options = v1.RunOptions(trace_level="SOFTWARE_TRACE", output_partition_graphs=True)
        metadata, before = v1.RunMetadata(), self.run(session, self.variables)
        answers, seen = self.run(session, [fetches, self.nodes], feed_dict, options, metadata)
        after = self.run(session, self.variables)
        found = {"ran": what_ran(metadata), "crossed": what_crossed(metadata)}
        self.steps.append(Step(**seen, before=before, after=after, **found))
        return answers

    def find_nodes(self, graph):
        """Find what is to be computed with a step, beside what the script wants."""
        self.graph, batch = graph, []
        for op in graph.get_operations():
            batch += op.outputs if op.type == "IteratorGetNext" else []
        with graph.as_default():
            self.variables = {name_of(v): v for v in v1.trainable_variables()}
            pairs = [(g, v) for g, v in self.pairs if g is not None]
            dense = {name_of(v): tf.convert_to_tensor(g) for g, v in pairs}
        self.nodes = {"gradients": dense, "batch": batch, "parts": what_enters(graph)}


def name_of(variable):
    """Return the name of a variable, without its scope."""
    return variable.op.name.rpartition("/")[2]


def what_enters(graph):
    """Return [the tensors that enter the name scope of tower 0, of tower 1, ...]."""
    found = {}
    for op in graph.get_operations():
        if scope := re.match(r"tower_\d+/", op.name):
            outside = [t for t in op.inputs if not t.name.startswith(scope[0])]
            found.setdefault(scope[0], {}).update({t.name: t for t in outside})
    return [[t for t in tensors.values() if t.dtype != tf.resource] for tensors in found.values()]


def what_ran(metadata):
    """Return [(device, operation)]: what ran where in a recorded step."""
    parts = metadata.step_stats.dev_stats
    pairs = [(part.device.lower().rpartition("device:")[2], part.node_stats) for part in parts]
    return [(device, op.node_name) for device, ops in pairs for op in ops]


def what_crossed(metadata):
    """Return [(from, to, tensor, bytes)]: what one device sends to another in a recorded step."""
    nodes = chain(*(part.node for part in metadata.partition_graphs))
    sends = [node for node in nodes if node.op == "_Send"]
    names = {node.input[0].partition(":")[0] for node in sends}
    sizes, found = Counter(), []
    for op in chain(*(part.node_stats for part in metadata.step_stats.dev_stats)):
        for output in op.output if op.node_name in names else ():  # in a loop more than once
            kind = output.tensor_description
            count = tf.TensorShape(kind.shape).num_elements()
            sizes[op.node_name, output.slot] += count * tf.as_dtype(kind.dtype).size
    for node in sends:
        ends = [node.attr[f"{end}_device"].s.decode().lower() for end in ("send", "recv")]
        if ends[0] != ends[1]:
            name, _, slot = node.input[0].partition(":")
            places = (end.rpartition("device:")[2] for end in ends)
            found.append((*places, node.input[0], sizes[name, int(slot or 0)]))
    return sorted(found)
