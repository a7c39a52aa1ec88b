"""What many layouts of a model's variables would exchange, by one reading of its graph.

Two trials differ in few variables, so most nodes of the graph see what they saw in the
trial before, and the others mostly what they saw in an earlier one. Such a node is not
planned again: in a pass over a model axis, its plan follows from what is known of its inputs
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from collective.training.partition import rules as rules
from collective.training.partition.graph import Graph, Node, Value, read
from collective.training.partition.layouts import (
    WHOLE,
    Layout,
    Partial,
    Sharded,
    is_whole,
)
from collective.training.partition.partition import many_objects, share_rows
from collective.training.partition.plans import NeedsWholeLists, Plan, Rows
from collective.training.partition.propagation import lay_out, mark_needed
from collective.training.partition.schedule import is_write
from collective.training.partition.sizes import product

State = tuple[Any, ...]
"""What is known of a value: see ``Trials._state``."""
Sent = list[tuple[Value, float]]
"""Values that a node takes otherwise than they lie, with the bytes of each."""


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A node as it was planned for inputs of which the same was known.

    Attributes:
        outputs: What is known of each output.
        sent: What it exchanges.
        inside: Bytes that the bodies of a loop or branch exchange.
        has_sums: Whether an input or output is the sum over ranks.
    """

    plan: Plan
    outputs: list[State]
    sent: Sent
    inside: float
    has_sums: bool


class Trials:
    """A traced function whose variables are laid out over a model axis, to weigh layouts.

    Args:
        function: A concrete function; all ranks have its arguments whole.
        size: Ranks along the axis.
        rows: The rows of a batch, to weigh activations by.
        message: Bytes that a message costs beside its content.
    """

    @many_objects()
    def __init__(self, function: Any, size: int, rows: int, message: int):
        self._graph = read(function.graph)
        rules.moments.find(self._graph)
        self._sizes = rows, message
        captures = [id(outer) for outer, _ in function.graph.captures]
        arguments = self._graph.inputs[: len(self._graph.inputs) - len(captures)]
        self._handles = dict(
            zip(self._graph.inputs[len(arguments) :], captures, strict=True)
        )
        # The arguments have the rows of one batch.
        self._places = share_rows(arguments, Rows.places(size))
        self._planned: dict[Any, _Planned] = {}
        # How each node is planned now, and with which rows.
        self._now: dict[Node, _Planned] = {}
        self._rows_now = self._places
        # Equal constants are one array, so that an id says what it holds.
        self._constants: dict[Any, np.ndarray] = {}
        self._by_id: dict[int, np.ndarray | None] = {id(None): None}

    @many_objects()
    def exchanged(
        self, placed: Mapping[int, Layout], open_: Collection[int] = ()
    ) -> float:
        """Return the bytes that a step exchanges over the axis.

        Args:
            placed: How variables are cut, by the ``id`` of the handle.
            open_: Handles of variables whose writes cost nothing.

        Raises:
            UsageError: A variable is used in a way that has no rule.
        """
        changed = set()
        for value, key in self._handles.items():
            layout = placed.get(key, WHOLE)
            if value.layout != layout:
                value.layout = layout
                changed.add(value)
        try:
            self._lay_out(changed, self._places)
        except NeedsWholeLists:
            rows = dataclasses.replace(self._places, whole_lists=True)
            self._lay_out(changed, rows)
        return self._total({v for v, key in self._handles.items() if key in open_})

    def _lay_out(self, changed: set[Value], rows: Rows) -> None:
        """Plan the nodes that read something else than in the last trial.

        Args:
            changed: Inputs of the graph of which something else is known.
        """
        last = self._now if self._rows_now == rows else {}
        self._now, self._rows_now = {}, rows  # none, if a rule raises
        now = {}
        for node in self._graph.nodes:
            before = last.get(node)
            # Who needs a sum whole is found from the first of its readers on.
            if before and not before.has_sums and changed.isdisjoint(node.inputs):
                now[node] = before
                continue
            made = now[node] = self._plan(node, rows)
            if before is None:
                changed.update(node.outputs)
            elif before is not made:
                pairs = zip(node.outputs, before.outputs, made.outputs, strict=True)
                changed.update(value for value, old, new in pairs if old != new)
            mark_needed(node)
        self._now = now

    def _plan(self, node: Node, rows: Rows) -> _Planned:
        states = [(v.is_needed_whole, *self._state(v)) for v in node.inputs]
        key = (node, rows.whole_lists, *states)
        if key not in self._planned:
            lay_out(node, rows)
            self._planned[key] = _Planned(
                node.plan,
                [self._state(value) for value in node.outputs],
                _sent(node, *self._sizes),
                sum(exchanged_bytes(body, *self._sizes) for body in node.bodies),
                any(
                    isinstance(v.layout, Partial) for v in (*node.inputs, *node.outputs)
                ),
            )
        known = self._planned[key]
        node.plan = known.plan
        for value, state in zip(node.outputs, known.outputs, strict=True):
            value.layout, value.shape, value.sizes, value.exchanges, const = state
            value.const, value.is_needed_whole = self._by_id[const], False
        return known

    def _state(self, value: Value) -> State:
        """Return what is known of a value, to look it up by."""
        if id(value.const) not in self._by_id:
            const = np.asarray(value.const)
            key = const.dtype.str, const.shape, const.tobytes()
            value.const = self._constants.setdefault(key, const)
            self._by_id[id(value.const)] = value.const
        known = value.layout, value.shape, value.sizes, value.exchanges
        return *known, id(value.const)

    def _total(self, free: Collection[Value]) -> float:
        """Return the bytes that are exchanged now, but for writes to some variables."""
        total, sent = 0.0, dict[Value, float]()
        for node, now in self._now.items():
            total += now.inside
            if now.sent and not (is_write(node) and node.inputs[0] in free):
                sent.update(now.sent)
        return total + sum(sent.values())


def exchanged_bytes(graph: Graph, rows: int, message: int) -> float:
    """Return bytes that the plans of a graph exchange; the arguments are those of ``Trials``."""
    total, sent = 0.0, dict[Value, float]()
    for node in graph.nodes:
        total += sum(exchanged_bytes(body, rows, message) for body in node.bodies)
        sent.update(_sent(node, rows, message))
    return total + sum(sent.values())


def _sent(node: Node, rows: int, message: int) -> Sent:
    return [
        (value, message + _bytes_of(value, wanted, rows))
        for value, wanted in zip(node.inputs, node.plan.inputs, strict=True)
        if wanted is not None and not value.is_handle and _travels(value.layout, wanted)
    ]


def _travels(have: Layout, wanted: Layout) -> bool:
    """Return whether a value that lies in one way must be exchanged to lie in another."""
    if is_whole(have):
        return False
    return is_whole(wanted) or (isinstance(wanted, Sharded) and wanted != have)


def _bytes_of(value: Value, wanted: Layout, rows: int) -> float:
    """Return the bytes of a value that is exchanged.

    A sum travels once to be in shares, and twice to be whole. Shares along another axis are
    cut of the whole value.
    """
    size = product(value.shape or ())
    if not isinstance(size, int):
        size = sum(f * rows ** len(term) for term, f in size.terms.items())
    times = 2 if isinstance(value.layout, Partial) and is_whole(wanted) else 1
    return float(times * size * value.dtype.size)
