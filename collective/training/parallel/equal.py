"""What ranks that hold one replica together must have equal, and whether a step keeps it so.

Ranks with other parts of a layer compute other values with them, until a collective of the
group makes these equal again. What a step returns, and what it writes into a variable that
every rank has whole, is equal on all of them only where that has happened: a norm of a
shard, say, is another one on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.backends.tensor_group import is_group
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.model.prepared import PreparedModel
from collective.training.parallel.tensor_parallel_variables import shards_of
from collective.training.partition.explain import place_of
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.partition import Partition
from collective.training.partition.schedule import is_write

_COLLECTIVES = ("CollectiveAllReduce", "CollectiveAllGather", "CollectiveBroadcast")
_OF_SHAPE = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}

_MOST_LOOKED_AT = 500  # nodes, for a line of the user's code


def check(partition: Partition, method: str, prepared: PreparedModel) -> None:
    """Refuse what would part the ranks of a replica; every rank finds the same.

    Args:
        method: The model's method that was traced.

    Raises:
        UsageError: Naming what is written or returned, and the line that computes it.
    """
    captures = [outer for outer, _ in partition.function.graph.captures]
    handles = {id(variable.handle) for variable in cut_variables(prepared)}
    graph = partition.graph
    first = len(graph.inputs) - len(captures)
    differs = [False] * first + [id(outer) in handles for outer in captures]
    known = {id(v.handle): v.name for v in partition.function.graph.variables}
    names = [""] * first + [known.get(id(outer), "") for outer in captures]
    spread = _Spread()
    outputs = spread.through(graph, differs, names)
    found = spread.written
    for value, differ in zip(graph.outputs, outputs, strict=True):
        if differ and value.node is not None:
            found.append((value.node, "its result"))
    for node, name in found[:1]:
        raise UsageError(
            f"{method} of model {prepared.model.name!r} writes or returns what differs "
            f"between the ranks that hold one replica together: {name}, at {spread.place(node)}",
            hint="compute it without the weights of layers in parts, of which each rank has "
            "its own; norms to clip by: clipnorm or global_clipnorm of the optimizer",
        )


def cut_variables(prepared: PreparedModel) -> list[tf.Variable]:
    """Return the variables of a model and its optimizer that are sharded over ranks."""
    shards, parts = shards_of(prepared.model), prepared.partition
    found = [v for v in prepared.model.variables if id(v) in shards]
    if parts is not None:
        slots = prepared.model.optimizer.variables
        found += [v for v in slots if parts.shape_of(v) is not None]
    return [keras_compat.model.tf_variable(v) for v in found]


class _Spread:
    """Follows what differs between the ranks of a group.

    Attributes:
        written: The nodes that write such a value into a variable that is whole, with the
            name of the variable.
    """

    def __init__(self) -> None:
        self.written: list[tuple[Node, str]] = []
        self._differing: set[Value] = set()

    def through(
        self, graph: Graph, differs: Sequence[bool], names: Sequence[str]
    ) -> list[bool]:
        """Return whether each output of a graph differs, from whether its inputs do.

        Args:
            names: The names of the variables that its inputs stand for.
        """
        marked = self._differing
        named = dict(zip(graph.inputs, names, strict=True))
        marked |= {v for v, d in zip(graph.inputs, differs, strict=True) if d}
        for node in graph.nodes:
            inputs = [value in marked for value in node.inputs]
            if node.bodies:
                of_inputs = [named.get(value, "") for value in node.inputs]
                outputs = self._through_bodies(node, inputs, of_inputs)
            elif node.type in _OF_SHAPE or _makes_equal(node):
                continue
            elif node.type == "IdentityN":
                outputs = inputs
            else:
                outputs = [any(inputs)] * len(node.outputs)
                if is_write(node) and any(inputs[1:]) and not inputs[0]:
                    self.written.append((node, repr(named.get(node.inputs[0], ""))))
            marked |= {v for v, d in zip(node.outputs, outputs, strict=True) if d}
        return [value in marked for value in graph.outputs]

    def place(self, node: Node) -> str:
        """Return the line of the user's code nearest before a node, on the way that differs."""
        own, ahead = place_of(node), [node]
        for before in ahead:  # which grows
            if place_of(before) != own:
                return place_of(before)
            if len(ahead) < _MOST_LOOKED_AT:
                made = [v.node for v in before.inputs if v in self._differing]
                ahead += [n for n in made if n is not None and n not in ahead]
        return own

    def _through_bodies(
        self, node: Node, inputs: list[bool], names: list[str]
    ) -> list[bool]:
        """Return what differs between ranks at the end of a branch or loop."""
        if "While" not in node.type:
            ends = [self.through(b, inputs[1:], names[1:]) for b in node.bodies]
            return [inputs[0] or any(of) for of in zip(*ends, strict=True)]
        condition, body = node.bodies
        while True:
            after = self.through(body, inputs, names)
            joined = [a or b for a, b in zip(inputs, after, strict=True)]
            if joined == inputs:
                break
            inputs = joined
        (again,) = self.through(condition, inputs, names)
        return [again or one for one in inputs]


def _makes_equal(node: Node) -> bool:
    return node.type in _COLLECTIVES and is_group(node.attr("process_set"))
