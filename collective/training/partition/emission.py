"""Makes the graph of this process from the plans of the whole one.

``Emission`` walks through the nodes and makes each as its plan says, for every replica
that this process plays. A node that needs a sum or a gather waits. When nothing else can
be made, all that wait leave together in one exchange; and variables are written when
nothing waits any more, so that a step is whole or absent when a rank dies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import copy_operation
from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Graph, Node, Value, variables_of
from collective.training.partition.known import Known
from collective.training.partition.layouts import (
    SUM,
    WHOLE,
    Layout,
    Listed,
    Partial,
    Shape,
    Sharded,
)
from collective.training.partition.propagation import Plan, is_whole
from collective.training.partition.schedule import Queue, is_write
from collective.training.partition.shares import Share, gathered, sliced
from collective.training.partition.sizes import AnySize, Size, Symbol, symbolic

_COMBINE = {
    "sum": tf.add_n,
    "max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
    "min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "prod": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
    "any": lambda parts: tf.reduce_any(tf.stack(parts), 0),
    "all": lambda parts: tf.reduce_all(tf.stack(parts), 0),
}


class Traffic:
    """What the replicas of an emitted graph exchange."""

    def __init__(self) -> None:
        self.sums: list[list[Value]] = []  # value by value, message by message
        self.gathers: list[Value] = []
        # Whether variables are written, and whether that is before the last exchange.
        self.writes = self.writes_early = False

    @property
    def exchanges(self) -> int:
        """How often something is exchanged."""
        return len(self.sums) + len(self.gathers)


class Emission:
    """Makes one graph: a step's, or that of a loop's body or a branch in it.

    Args:
        graph: Whose nodes have plans.
        share: The rows of the batch, and of each replica that this process plays.
        rows: The size that stands for the rows of the batch.
        exchange: The sums over ranks.
        traffic: Where it notes what is exchanged.
        parent: The emission of the graph around this one.
    """

    def __init__(
        self,
        graph: Graph,
        share: Share,
        rows: AnySize,
        exchange: Exchange,
        traffic: Traffic,
        parent: Emission | None = None,
    ):
        self.parent = parent
        self.graph = graph
        self.share = share
        self.rows = rows
        self.exchange = exchange
        self.traffic = traffic
        self.replica = 0  # for which of them a node is made now
        # Tensors of this process that travel in the first sum; their sums afterwards.
        self.attached: list[tf.Tensor] = []
        self._forms: dict[tuple[Value, Layout], list[tf.Tensor]] = {}
        self._made: dict[int, list[tf.Operation]] = {}  # by the number of a node
        self._pending: dict[Value, Layout] = {}
        self._exchanged: list[tf.Operation] = []  # all exchanges so far
        self._is_attached_sent = False
        count = range(len(share.own))
        self._own = [Symbol(f"own rows {i}") for i in count]
        self._first = [Symbol(f"first row {i}") for i in count]
        self._known = Known(self._symbol)

    # --- for rules ------------------------------------------------------------------

    @property
    def own(self) -> tf.Tensor:
        """int64 scalar: rows of the replica that is made now."""
        return self.share.own[self.replica]

    @property
    def own_rows(self) -> AnySize:
        """The same as a size, to compute others with."""
        return symbolic(self._own[self.replica])

    @property
    def first_row(self) -> AnySize:
        """The index of its first row in the batch."""
        return symbolic(self._first[self.replica])

    def number(self, size: AnySize) -> tf.Tensor:
        """int64 scalar: what a size is in this step."""
        return self._known.number(size)

    def vector(self, sizes: Sequence[AnySize], dtype: tf.DType = tf.int64) -> tf.Tensor:
        """What several sizes are in this step."""
        return self._known.vector(sizes, dtype)

    def scalar(self, size: AnySize, dtype: tf.DType) -> tf.Tensor:
        """What a size is in this step, of any dtype."""
        return self._known.scalar(size, dtype)

    def once(self, key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """What was made before for this replica by this key; else it is made."""
        return self._known.once((self.replica, key), make)

    def knows(self, sizes: Any) -> bool:
        """Whether a size, or each of several, follows from the rows alone."""
        if isinstance(sizes, (tuple, list)):
            return all(map(self.knows, sizes))
        return isinstance(sizes, int) or (
            isinstance(sizes, Size) and all(s.origin is None for s in sizes.symbols)
        )

    def local_size(self, layout: Sharded, size: tf.Tensor | None = None) -> tf.Tensor:
        """int64 scalar: the places of a sharded axis that this replica has.

        Args:
            size: Those of all replicas, where the layout does not say it in numbers.
        """
        if size is None or self.knows(layout.per_row):
            return self.number(self.own_rows * layout.per_row)
        return tf.cast(size, tf.int64) // self.share.total * self.own

    def local_shape(
        self, sizes: tf.Tensor, layout: Layout, shape: Shape = None
    ) -> tf.Tensor:
        """The shape of this replica's part of a tensor whose whole shape is ``sizes``.

        Args:
            shape: The same, as far as it is known beforehand.
        """
        if not isinstance(layout, Sharded):
            return sizes
        axis = layout.axis
        if shape is not None and self.knows(layout.per_row):
            parts = list(shape)
            parts[axis] = self.own_rows * layout.per_row
            if self.knows(parts):
                return self.vector(parts, sizes.dtype)
        local = tf.cast(self.local_size(layout, sizes[axis]), sizes.dtype)
        return tf.concat([sizes[:axis], local[None], sizes[axis + 1 :]], 0)

    def _symbol(self, symbol: Symbol) -> tf.Tensor:
        """int64 scalar: what a symbol stands for in this step."""
        for symbols, numbers in (
            (self._own, self.share.own),
            (self._first, self.share.first),
        ):
            if symbol in symbols:
                return numbers[symbols.index(symbol)]
        if symbol.origin is None:
            return self.share.total
        value, axis = symbol.origin
        for layout in (WHOLE, value.layout):
            tensors = self._forms.get((value, layout))
            if tensors and not (isinstance(layout, Sharded) and layout.axis == axis):
                return tf.shape(tensors[0], tf.int64)[axis]
        if self.parent is None:
            raise NotImplementedError(f"the size {symbol} is not at hand")
        return self.parent._known.number(symbolic(symbol))

    def copy(
        self, node: Node, inputs: Sequence[tf.Tensor], **attributes: Any
    ) -> list[tf.Tensor]:
        """The outputs of the node's operation on other inputs."""
        return list(copy_operation(node.op, inputs, attributes).outputs)

    # --- values ---------------------------------------------------------------------

    def put(self, value: Value, layout: Layout, tensors: list[tf.Tensor]) -> None:
        """Keeps a value in a layout: a tensor for each replica, or one for all."""
        if value.shape is not None and not value.is_handle:
            for tensor in tensors:
                _set_shape(tensor, value, layout)
        self._forms[value, layout] = tensors

    def get(self, value: Value, layout: Layout) -> list[tf.Tensor] | None:
        """A value in a layout; None if it has to be exchanged first, which is noted."""
        key = value, layout
        if key not in self._forms:
            found = self._converted(value, layout)
            if found is None:
                return None
            self.put(value, layout, found)
        return self._forms[key]

    def _converted(self, value: Value, layout: Layout) -> list[tf.Tensor] | None:
        have = value.layout
        if isinstance(have, Listed):
            return self._list_as(self._forms[value, have], have, layout)
        node = value.node
        if layout == WHOLE:
            if self._is_known(value):
                return [self._as_known(value)]
            if node is not None and node.plan.whole is not None:
                return self._remade(node, value)
            self._pending[value] = have
            return None
        whole = self.get(value, WHOLE)
        if whole is None:
            return None
        if isinstance(layout, Sharded):
            return [self._slice_of(value, layout) for _ in self._each()]
        assert layout == SUM, layout
        zeros = tf.zeros_like(whole[0])
        return [
            tf.where(self.share.is_lead[self.replica], whole[0], zeros)
            for _ in self._each()
        ]

    def _is_known(self, value: Value) -> bool:
        """Whether a value is a constant or a size, which is made when it is read."""
        node = value.node
        if node is None or value.layout != WHOLE or node.bodies or node.is_stateful:
            return False
        if value.const is not None or node.type == "Const":
            return True
        return value.sizes is not None and self.knows(value.sizes)

    def _as_known(self, value: Value) -> tf.Tensor:
        assert value.node is not None
        if value.const is not None:
            return self._known.constant(value.const, value.dtype)
        if value.node.type == "Const":  # text
            with tf.control_dependencies(None):
                return copy_operation(value.node.op, []).outputs[0]
        if not isinstance(value.sizes, tuple):
            return self.scalar(value.sizes, value.dtype)
        if value.rank == 1:
            return self.vector(value.sizes, value.dtype)
        flat = [size for row in value.sizes for size in row]
        return tf.reshape(self.vector(flat, value.dtype), value.shape)

    def _list_as(
        self, tensors: list[tf.Tensor], have: Listed, layout: Layout
    ) -> list[tf.Tensor]:
        """A list whose elements lie otherwise; rules ask for no list of shares whole."""
        if layout == WHOLE and is_whole(have):
            return tensors
        assert isinstance(layout, Listed)
        if have.element == layout.element or is_whole(layout):
            assert is_whole(have) or have.element == layout.element, (have, layout)
            return tensors
        if have.element is None:
            return tensors * len(self.share.own)
        assert have.element == WHOLE and have.shape is not None, (have, layout)
        if not isinstance(layout.element, Sharded):
            whole, none = tensors[0], tf.zeros_like(tensors[0])
            return [
                tf.cond(self.share.is_lead[i], lambda: whole, lambda: none)
                for i in range(len(self.share.own))
            ]
        stacked = tf.raw_ops.TensorListStack(
            input_handle=tensors[0],
            element_shape=self.vector(have.shape, tf.int32),
            element_dtype=layout.dtype,
        )
        stacked.set_shape([None] * (1 + len(have.shape)))
        parts = []
        for _ in self._each():
            part = sliced(self, stacked, layout.element.moved(layout.element.axis + 1))
            parts.append(
                tf.raw_ops.TensorListFromTensor(
                    tensor=part, element_shape=tf.shape(part)[1:]
                )
            )
        return parts

    def _remade(self, node: Node, value: Value) -> list[tf.Tensor] | None:
        """All outputs of a node whole; nobody else is asked."""
        inputs = [self.get(v, WHOLE) for v in node.inputs]
        if any(part is None for part in inputs):
            return None
        outputs = node.plan.whole(self, [part[0] for part in inputs if part])
        for other, tensor in zip(node.outputs, outputs, strict=True):
            if other is not value:
                self.put(other, WHOLE, [tensor])
        return [outputs[value.index]]

    def _slice_of(self, value: Value, layout: Sharded) -> tf.Tensor:
        node = value.node
        if node is not None and node.plan.share is not None:
            cheap = node.plan.share(self, layout)
            if cheap is not None:
                return cheap
        return sliced(self, self._forms[value, WHOLE][0], layout)

    def whole_of(self, value: Value) -> tf.Tensor | None:
        """The whole value, where it is at hand."""
        if (value, WHOLE) not in self._forms and not self._is_known(value):
            return None
        found = self.get(value, WHOLE)
        return None if found is None else found[0]

    def _each(self) -> Iterator[int]:
        """One replica after the other."""
        for replica in range(len(self.share.own)):
            self.replica = replica
            yield replica
        self.replica = 0

    # --- exchanges ------------------------------------------------------------------

    def _flush(self) -> None:
        """Exchanges all that wait."""
        self.traffic.writes_early |= self.traffic.writes
        pending, self._pending = self._pending, {}
        by_kind: dict[str, list[Value]] = {}
        for value, layout in pending.items():
            if isinstance(layout, Partial):
                by_kind.setdefault(layout.kind, []).append(value)
        if self.attached and not self._is_attached_sent:
            by_kind.setdefault("sum", [])
        for kind, values in by_kind.items():
            # Scalars behind gradients, of which the first that is not finite is named.
            values.sort(key=lambda value: value.rank == 0)
            parts = [self._forms[value, Partial(kind)] for value in values]
            sums = [p[0] if len(p) == 1 else _COMBINE[kind](p) for p in parts]
            more = [] if kind != "sum" or self._is_attached_sent else self.attached
            with self._in_order():
                totals = self.exchange.reduce(
                    kind, [*sums, *more], variables_of(values)
                )
            if more:
                self.attached, self._is_attached_sent = totals[len(sums) :], True
                totals = totals[: len(sums)]
            self.traffic.sums.append(values)
            self._note(totals)
            for value, total in zip(values, totals, strict=True):
                self.put(value, WHOLE, [total])
        for value, layout in pending.items():
            if isinstance(layout, Sharded):
                with self._in_order():
                    whole = gathered(self, self._forms[value, layout], layout)
                self.traffic.gathers.append(value)
                self._note([whole])
                self.put(value, WHOLE, [whole])

    def _in_order(self) -> Any:
        """Exchanges run one after the other: in the same order on every rank."""
        return tf.control_dependencies(self._exchanged[-1:])

    def _note(self, tensors: Sequence[tf.Tensor]) -> None:
        if tensors:  # behind all exchanges before, even if they made no operation
            with tf.control_dependencies([*self._exchanged[-1:], *tensors]):
                self._exchanged.append(tf.no_op())

    # --- nodes ----------------------------------------------------------------------

    def run(self, wanted: Sequence[Layout | None]) -> list[list[tf.Tensor]]:
        """Makes everything; returns the outputs of the graph.

        Args:
            wanted: The layout of each; None: as it comes.
        """
        layouts = [
            value.layout if layout is None else layout
            for value, layout in zip(self.graph.outputs, wanted, strict=True)
        ]
        queue = Queue(self.graph)
        while True:
            for node in queue:
                if not self._make(node):
                    queue.waits(node)
                else:
                    queue.done(node)
            self._ask_for(layouts)
            for node in queue.writes:
                self._ask_for_inputs(node)
            if self._pending or (self.attached and not self._is_attached_sent):
                self._flush()
                queue.resume()
            elif not queue.release_writes():
                break
        results = []
        for value, layout in zip(self.graph.outputs, layouts, strict=True):
            found = self.get(value, layout)
            assert found is not None, value
            results.append(found)
        return results

    def effects(self) -> list[tf.Operation]:
        """The operations that must run, whatever is read of the outputs."""
        made = [
            op
            for node in self.graph.nodes
            if node.is_stateful
            for op in self._made.get(node.number, ())
        ]
        return [*made, *self._exchanged[-1:]]

    def _ask_for(self, layouts: Sequence[Layout]) -> None:
        """Has outputs that are made travel with everything else that waits."""
        for value, layout in zip(self.graph.outputs, layouts, strict=True):
            if (value, value.layout) in self._forms or self._is_known(value):
                self.get(value, layout)

    def _ask_for_inputs(self, node: Node) -> None:
        for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
            if layout is not None:
                self.get(value, layout)

    def _make(self, node: Node) -> bool:
        """Makes a node; False if it has to wait for an exchange."""
        plan: Plan = node.plan
        if node.outputs and all(map(self._is_known, node.outputs)):
            return True  # made when it is read
        inputs: list[list[tf.Tensor] | None] = []
        is_ready = True
        for value, layout in zip(node.inputs, plan.inputs, strict=True):
            found = None if layout is None else self.get(value, layout)
            is_ready = is_ready and (layout is None or found is not None)
            inputs.append(found)
        if not is_ready:
            return False
        before = [op for n in node.control for op in self._made.get(n.number, ())]
        if is_write(node):
            before += self._exchanged[-1:]
            self.traffic.writes = True
        if plan.joint is not None:
            self._make_jointly(node, plan, inputs, before)
            return True
        once = plan.is_whole
        made: list[tf.Operation] = []
        outputs: list[list[tf.Tensor]] = [[] for _ in node.outputs]
        for replica in self._each():
            if once and replica:
                continue
            mine = [
                None if part is None else part[replica if len(part) > 1 else 0]
                for part in inputs
            ]
            with tf.control_dependencies(before) if before else nullcontext():
                tensors, ops = self._emitted(node, plan, mine)
            made += ops
            for of_output, tensor in zip(outputs, tensors, strict=True):
                of_output.append(tensor)
        for value, layout, tensors in zip(
            node.outputs, plan.outputs, outputs, strict=True
        ):
            self.put(value, layout, tensors[:1] if is_whole(layout) else tensors)
        self._made[node.number] = made
        return True

    def _make_jointly(
        self, node: Node, plan: Plan, inputs: list[Any], before: list[tf.Operation]
    ) -> None:
        """Makes a loop or branch: all replicas together, for they exchange within."""
        assert plan.joint is not None
        count = self.traffic.exchanges
        with tf.control_dependencies([*before, *self._exchanged[-1:]]):
            outputs, op = plan.joint(self, inputs)
        for value, layout, tensors in zip(
            node.outputs, plan.outputs, outputs, strict=True
        ):
            self.put(value, layout, tensors)
        self._made[node.number] = [op]
        if self.traffic.exchanges > count:
            self._exchanged.append(op)

    def _emitted(
        self, node: Node, plan: Plan, inputs: list[Any]
    ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        if plan.emit is None:
            op = copy_operation(node.op, inputs)
            return list(op.outputs), [op]
        made = plan.emit(self, inputs)
        if isinstance(made, tf.Operation):
            return list(made.outputs), [made]
        return list(made), [tensor.op for tensor in made]


def _set_shape(tensor: tf.Tensor, value: Value, layout: Layout) -> None:
    """Tells TensorFlow the sizes that are numbers."""
    assert value.shape is not None
    sizes: list[int | None] = [
        None if isinstance(size, Size) else size for size in value.shape
    ]
    if isinstance(layout, Sharded):
        sizes[layout.axis] = None
    try:
        tensor.set_shape(sizes)
    except ValueError as error:
        raise ValueError(
            f"the rule of {value.node}: {value} was made with shape {tensor.shape}"
        ) from error
