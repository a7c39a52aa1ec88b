"""The values that wait for an exchange, and the exchanges that have been made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.keras_compat.model import bytes_of
from collective.training.partition.copies import reduced
from collective.training.partition.exchange import Exchange, Message
from collective.training.partition.graph import Value, variables_of
from collective.training.partition.layouts import (
    MOMENTS,
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Partial,
    Sharded,
)
from collective.training.partition.markers import Marker
from collective.training.partition.own import Own
from collective.training.partition.shares import gathered
from collective.training.partition.traffic import Traffic
from collective.training.partition.turns import Turns
from collective.training.partition.window import Window

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

#: Weights that are joined together, at most, but for one that is larger.
JOINED_BYTES = 8 << 20


def is_weight(value: Value) -> bool:
    """Return whether it is what is read of a variable."""
    return value.node is not None and value.node.type == "ReadVariableOp"


class Pending:
    """Exchanges together whatever waits at the same time.

    Args:
        exchange: The sums over ranks.
        traffic: Notes what is exchanged.
        turns: The turns of the replicas of this process.
    """

    def __init__(self, exchange: Exchange, traffic: Traffic, turns: Turns):
        self._exchange = exchange
        self.turns = turns
        self._traffic = traffic
        self.window = Window()
        self._values: dict[Value, Layout] = {}
        # Tensors of this process that travel in the first sum; their sums afterwards.
        self.attached: list[tf.Tensor] = []
        self._is_attached_sent = False
        self.last: list[tf.Operation] = []  # what runs behind all exchanges so far
        # Written as they come, for they are all weights: few are in memory at a time.
        self.joined: set[Value] = set()
        # The weights of the last join, which the next one replaces, by what reads them.
        self._readers: dict[Value, list[tf.Operation]] = {}
        self._readers_before: list[tf.Operation] = []

    def add(self, value: Value, layout: Layout) -> None:
        """Note that a value is to be exchanged.

        Args:
            layout: The layout that it has; OWNED for a sum of which each rank needs only
                its own piece.
        """
        self._values[value] = layout

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._values or self._unsent)

    @property
    def _unsent(self) -> list[tf.Tensor]:
        return [] if self._is_attached_sent else self.attached

    def exchange(self, emission: Emission) -> None:
        """Exchange all that wait, and give the emission the results."""
        self._traffic.writes_early |= self._traffic.writes
        values, self._values = self._taken(emission)
        owned = [v for v, layout in values.items() if v.layout == layout == OWNED]
        # They wait for no result of the step, and travel while it is still computed.
        if weights := [value for value in owned if is_weight(value)]:
            self._join(emission, weights)
        by_kind: dict[str, list[Value]] = {}
        for value, layout in values.items():
            if isinstance(layout, Partial):
                by_kind.setdefault(layout.kind, []).append(value)
        scattered = [v for v in values if (v.layout, values[v]) == (SUM, OWNED)]
        if self._unsent or scattered:
            by_kind.setdefault("sum", [])
        # They are sums, too, and give the means beside the variances.
        if variances := by_kind.pop(MOMENTS.kind, []):
            means = {value.node.mean for value in variances if value.node}
            sums = [v for v in by_kind.get("sum", []) if v not in means]
            by_kind["sum"] = [*sums, *variances]
        for kind, of_kind in by_kind.items():
            self._reduce(emission, kind, of_kind, scattered if kind == "sum" else [])
        for value, layout in values.items():
            if isinstance(layout, Sharded):
                with self._in_order():
                    own = emission.at_hand(value, layout)
                    whole = gathered(emission.of(layout), own, layout)
                self._traffic.gathers.append(value)
                self._note([whole])
                emission.put(value, WHOLE, [whole])
        if others := [value for value in owned if not is_weight(value)]:
            self._join(emission, others)

    def _taken(
        self, emission: Emission
    ) -> tuple[dict[Value, Layout], dict[Value, Layout]]:
        """Split what waits into what is exchanged now and what waits for the next time.

        Weights in pieces are joined in the order in which they are read, some at a time;
        with them those that are read next, as the bias after a kernel.
        """
        now: dict[Value, Layout] = {}
        later: dict[Value, Layout] = {}
        bytes_, most = 0, JOINED_BYTES
        for value, layout in self._values.items():
            if value.layout == layout == OWNED and is_weight(value):
                size = bytes_of(value)
                if later or (bytes_ and bytes_ + size > most):
                    later[value] = layout
                    continue
                bytes_ += size
                most = max(most, size + size // 16)  # a bias goes with any kernel
            now[value] = layout
        if bytes_ and not later:
            for value in emission.read_next(now):
                bytes_ += bytes_of(value)
                if bytes_ > most:
                    break
                now[value] = OWNED
        return now, later

    def _reduce(
        self, emission: Emission, kind: str, values: list[Value], scattered: list[Value]
    ) -> None:
        """Sum values of one kind over all replicas, and ``scattered`` piece by piece."""
        # Scalars after gradients, of which the first that is not finite is named.
        values.sort(key=lambda value: value.rank == 0)
        parts = [emission.at_hand(value, value.layout) for value in values]
        attached = self._unsent if kind == "sum" else []
        own = [self._added(kind, of_one) for of_one in parts]
        own += [self._added(kind, [tensor]) for tensor in attached]
        pieces = [
            self._added(kind, emission.at_hand(value, SUM))._replace(opens=opens)
            for value, opens in zip(
                scattered, self.window.opened_by(scattered), strict=True
            )
        ]
        self.turns.end()
        with self._in_order():
            message = Message(kind, own, variables_of(values), pieces)
            results = reduced(self._exchange, message)
        self._traffic.sums.append([*scattered, *values])
        self._traffic.scattered += scattered
        self._note([tensor for total in results for tensor in total])
        totals = iter(results)
        for value in values:
            total = next(totals)
            if value.layout == MOMENTS and value.node and value.node.mean:
                finish = value.node.plan.finish
                assert finish is not None
                means, total = finish(total)
                emission.put(value.node.mean, WHOLE, means)
            emission.put(value, WHOLE, total)
        if attached:
            self.attached = [next(totals)[0] for _ in attached]
            self._is_attached_sent = True
        for value in scattered:
            emission.put(value, OWNED, next(totals))

    def _added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """Add up the parts of the replicas of this process, each in its piece's turn."""
        own = self._exchange.added(kind, parts)
        self.turns.adds(parts, own.parts)
        return own

    def _join(self, emission: Emission, values: list[Value]) -> None:
        """Make values whole of which each rank has a piece: weights, or others.

        A weight is dropped when it was read and the next is joined, and joined again for
        the backward pass. A join waits for what reads the weights of the last but one:
        the wire is busy while the last are used, and no more are in memory.
        """
        weights = values if is_weight(values[0]) else []
        before = self._readers_before if weights else []
        own = [emission.at_hand(value, OWNED)[0] for value in values]
        with self._in_order(), tf.control_dependencies(before):
            own = [tf.identity(piece) for piece in own] if before else own
            shapes = [value.shape for value in values]
            wholes = self._exchange.join(own, shapes, self.window.opened_by(values))
        self._traffic.joins += values
        self.joined.update(values)
        self._note(wholes)
        for value, whole in zip(values, wholes, strict=True):
            emission.put(value, WHOLE, [whole])
        if weights:
            read = {value: ops for value, ops in self._readers.items() if ops}
            self._readers_before = [op for ops in read.values() for op in ops]
            for value in read:
                emission.drop(value, WHOLE)
            unread = [value for value in self._readers if value not in read]
            self._readers = {value: [] for value in (*unread, *weights)}

    def read(self, value: Value, ops: Sequence[tf.Operation]) -> None:
        """Note what reads a value: a weight that was joined is needed until then."""
        if value in self._readers:
            self._readers[value] += ops

    def at_once(
        self, kind: str, values: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Reduce values in the middle of an operation that is made of several.

        Args:
            values: The parts of each value, one for each replica of this process.
        """
        self._traffic.writes_early |= self._traffic.writes
        own = [self._exchange.added(kind, parts) for parts in values]
        with self._in_order():
            totals = reduced(self._exchange, Message(kind, own))
        self._traffic.in_groups += 1
        self._note([tensor for total in totals for tensor in total])
        return [total[0] for total in totals]

    def joined_at_once(self, piece: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Return a tensor of which each rank has a piece, in the middle of an operation."""
        self._traffic.writes_early |= self._traffic.writes
        with self._in_order():
            (whole,) = self._exchange.join([piece], [shape])
        self._traffic.in_groups += 1
        self._note([whole])
        return whole

    def gathered_at_once(
        self, emission: Emission, parts: Sequence[tf.Tensor], layout: Sharded
    ) -> tf.Tensor:
        """Gather the parts of an operation's tensor that is none of the graph's."""
        self._traffic.writes_early |= self._traffic.writes
        with self._in_order():
            whole = gathered(emission, parts, layout)
        self._traffic.in_groups += 1
        self._note([whole])
        return whole

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return what an exchange along another axis of the mesh makes of tensors, in order."""
        self._traffic.writes_early |= self._traffic.writes
        with self._in_order():
            made = self._exchange.of_marker(marker, op, tensors)
        self._traffic.in_groups += 1
        self._note(made)
        return made

    def broadcast(self, value: Value, tensor: tf.Tensor) -> tf.Tensor:
        """Return rank 0's tensor, of a value that each rank has made whole."""
        self._traffic.writes_early |= self._traffic.writes
        with self._in_order():
            first = self._exchange.broadcast(tensor)
        self._traffic.broadcasts.append(value)
        self._note([first])
        return first

    def _in_order(self) -> AbstractContextManager[None]:
        """Run exchanges one after the other: in the same order on every rank."""
        return tf.control_dependencies(self.last)

    def _note(self, tensors: Sequence[tf.Tensor]) -> None:
        if tensors:  # after all exchanges before, even if they made no operation
            with tf.control_dependencies([*self.last, *tensors]):
                self.last = [tf.no_op()]
