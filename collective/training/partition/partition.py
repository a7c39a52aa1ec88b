"""A traced function, partitioned by the rows of its batch.

``Partition`` reads the graph of a function that was traced for a whole global batch, and
makes it again for the rows of one process: the same operations on the same variables, with
sums over the replicas if the rows of several meet. ``docs/explanation/partitioned-step.md``
has a picture of a small one.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# These declare what is known of types of operations.
from collective.training.partition import computed_sizes as computed_sizes
from collective.training.partition import rules as rules
from collective.training.partition import whole_shapes as whole_shapes
from collective.training.partition import window
from collective.training.partition.emission import Emission, Traffic
from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Value, read
from collective.training.partition.layouts import WHOLE, Layout
from collective.training.partition.plans import NeedsWholeLists, Rows
from collective.training.partition.propagation import propagate
from collective.training.partition.schedule import without_rows
from collective.training.partition.shares import Share


@contextmanager
def many_objects() -> Iterator[None]:
    """Look for no garbage meanwhile: what is made here stays, and is much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Placed:
    """How a variable lies of which each replica has a part.

    Attributes:
        layout: Of the variable; a rank's piece of it is ``OWNED``.
        handles: The handle of each replica's part in this process, or one for all.
    """

    layout: Layout
    handles: Sequence[tf.Tensor]


def share_rows(values: Sequence[Value], rows: Rows) -> Rows:
    """Give values whose first axis is as long one symbol for its size."""
    open_ = [v for v in values if v.shape and not isinstance(v.shape[0], int)]
    for value in open_:
        assert value.shape is not None
        value.shape = (open_[0].symbol(0), *value.shape[1:])
    return dataclasses.replace(rows, batch=open_[0].symbol(0)) if open_ else rows


class Partition:
    """The graph of a function, and how everything in it lies over the replicas.

    Args:
        function: A concrete function.
        layouts: Of its arguments, one for each tensor; ``Sharded(0)`` has rows.
        rows: What is known of the rows of a batch.
        gradients: By the name of a tensor: the variable whose gradient it is.
        placed: How the variables lie of which a replica has a part, by the ``id`` of the
            handle that the function was traced with.
        alike: Arguments, by their places, that are whole and have the rows of one batch.
        is_compiled: Whether XLA compiles the function if it is not partitioned.
    """

    @many_objects()
    def __init__(
        self,
        function: Any,
        layouts: Sequence[Layout],
        rows: Rows,
        gradients: Mapping[str, Any] | None = None,
        placed: Mapping[int, Placed] | None = None,
        alike: Sequence[int] = (),
        is_compiled: bool = False,
    ):
        self.function = function
        self.graph = read(function.graph, gradients, is_compiled)
        rows = share_rows([self.graph.inputs[place] for place in alike], rows)
        self.rows = rows
        rules.moments.find(self.graph)
        self._arguments = len(layouts)
        self._placed = placed or {}
        captured = [
            self._placed[id(outer)].layout if id(outer) in self._placed else WHOLE
            for outer, _ in function.graph.captures
        ]
        self.layouts = [*layouts, *captured]
        try:
            propagate(self.graph, self.layouts, rows)
        except NeedsWholeLists:
            self.rows = dataclasses.replace(rows, whole_lists=True)
            propagate(self.graph, self.layouts, self.rows)

    @many_objects()
    def emit(
        self,
        arguments: Sequence[list[tf.Tensor]],
        share: Share,
        exchange: Exchange,
        traffic: Traffic | None = None,
        wanted: Sequence[Layout] | None = None,
        attached: Sequence[tf.Tensor] = (),
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """Make the graph of this process, inside of a graph that is being made.

        Args:
            arguments: For each argument of the function, this process' part of it for each
                replica, or one tensor that all have.
            share: The rows that its replicas have.
            exchange: The sums over the ranks.
            traffic: Notes what is exchanged.
            wanted: The layout of each output; by default all are whole.
            attached: More tensors of this process that are summed over the ranks.

        Returns:
            For each tensor that the function returns, one for each replica, or one for
            all where it is whole; and the sums of what is attached.
        """
        emission = self.begun(arguments, share, exchange, traffic or Traffic())
        emission.pending.attached = list(attached)
        outputs = emission.run(wanted or [WHOLE] * len(self.graph.outputs))
        sums = emission.pending.attached
        with tf.control_dependencies(emission.effects()):
            return [[tf.identity(t) for t in tensors] for tensors in outputs], sums

    def begun(
        self,
        arguments: Sequence[list[tf.Tensor]],
        share: Share,
        exchange: Exchange,
        traffic: Traffic,
    ) -> Emission:
        """Return an emission that has the inputs of the graph, and nothing else so far.

        Args:
            arguments, share, exchange, traffic: As of ``emit``.
        """
        emission = Emission(self.graph, share, self.rows.rows, exchange, traffic)
        emission.held_back = window.behind_joined(self.graph)
        # Pieces of the rows take turns, and a gradient is sent after the last one's.
        if len(share.own) == 1:
            ranks = exchange.place[1]
            emission.held_back |= window.makers(self.graph, self.rows.expected, ranks)
        first = self._arguments
        for value, layout, tensors in zip(
            self.graph.inputs[:first], self.layouts[:first], arguments, strict=True
        ):
            emission.put(value, layout, list(tensors))
        for value, layout, tensors in self._captured(exchange):
            emission.put(value, layout, tensors)
        return emission

    def emit_without_rows(self, exchange: Exchange) -> tf.Tensor:
        """Make the writes that do not depend on rows; return an empty vector."""
        none = [tf.zeros([], tf.int64)] * 2
        share = Share.of(none[0], [(*none, none[0])] * max(len(exchange.devices), 1))
        graph = without_rows(self.graph, self.graph.inputs[: self._arguments])
        emission = Emission(graph, share, self.rows.rows, exchange, Traffic())
        for value, layout, tensors in self._captured(exchange):
            emission.put(value, layout, tensors)
        emission.run([])
        with tf.control_dependencies(emission.effects()):
            return tf.zeros([0])

    def _captured(
        self, exchange: Exchange
    ) -> Iterator[tuple[Value, Layout, list[tf.Tensor]]]:
        """Return what the function captures, in this process."""
        variables = {id(v.handle): v for v in self.function.graph.variables}
        first = self._arguments
        for value, layout, (outer, _) in zip(
            self.graph.inputs[first:],
            self.layouts[first:],
            self.function.graph.captures,
            strict=True,
        ):
            if id(outer) in self._placed:
                yield value, layout, list(self._placed[id(outer)].handles)
            elif id(outer) in variables:
                yield value, layout, list(exchange.copies(variables[id(outer)]))
            else:
                yield value, layout, [outer]

    @property
    def fallbacks(self) -> list[Any]:
        """Return the nodes that no rule applied to, though rows have a part in them."""
        return [
            node
            for node in self.graph.nodes
            if node.plan.is_fallback
            and any(value.layout != WHOLE for value in node.inputs)
        ]
