"""Makes the graph of this process from the plans of the whole one.

``Emission`` walks through the nodes and makes each as its plan says, for every replica
that this process plays. A node that needs a sum or a gather waits. When nothing else can
be made, all that wait leave together in one exchange; and variables are written when
nothing waits any more, so that a step is whole or absent when a rank dies.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import copy_operation
from collective.training.partition import atomics, pieces
from collective.training.partition.copies import (
    first_replicas,
    placed_by_tensorflow,
    times_made,
)
from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.known import Known, on_host
from collective.training.partition.layouts import (
    MOMENTS,
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Listed,
    Sharded,
    SomeRows,
    is_convertible,
    is_whole,
)
from collective.training.partition.listed import list_as
from collective.training.partition.operations import (
    Made,
    all_outputs,
    emitted,
    is_small,
)
from collective.training.partition.own_part import OtherRows, OwnPart
from collective.training.partition.pending import Pending, is_weight
from collective.training.partition.plans import Plan, is_single
from collective.training.partition.schedule import Queue, is_write, writes_pieces
from collective.training.partition.shares import Share, sliced, tell_shape
from collective.training.partition.sizes import AnySize, Symbol, symbolic
from collective.training.partition.traffic import Traffic as Traffic
from collective.training.partition.turns import Turns


class Emission(OwnPart):
    """Makes one graph: a step's, or that of a loop's body or a branch in it.

    Args:
        graph: Whose nodes have plans.
        share: The rows of the batch, and of each replica that this process plays.
        rows: The size that stands for the rows of the batch.
        exchange: The sums over ranks.
        traffic: Notes what is exchanged.
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
        self.exchange = exchange
        self.traffic = traffic
        # The places of a model axis are no pieces of rows: each has all rows.
        devices = len(exchange.devices) if share.places is None else len(share.own)
        self.turns = Turns(len(share.own), devices)
        self.pending = Pending(exchange, traffic, self.turns)
        # What makes values that wait until others are sent; see ``window``.
        self.held_back: dict[Node, Value] = {}
        self._forms: dict[tuple[Value, Layout], list[tf.Tensor]] = {}
        self._made = Made(self.turns)
        super().__init__(share, rows, Known(self._symbol))
        self._others: dict[SomeRows, OtherRows] = {}

    def _symbol(self, symbol: Symbol) -> tf.Tensor:
        """Return what a symbol stands for in this step: int64 scalar."""
        for part in (self, *self._others.values()):
            own = part.number_of_replica(symbol)
            if own is not None:
                return own
        if symbol.made_of is not None:
            with on_host():
                whole = self.number(symbol.made_of)
                if symbol.fraction is not None:
                    return whole // symbol.fraction.parts
                return tf.maximum(whole, 0)
        if symbol.origin is None:
            return self.share.total
        value, axis = symbol.origin
        for layout in (WHOLE, value.layout):
            tensors = self._forms.get((value, layout))
            if tensors and not (isinstance(layout, Sharded) and layout.axis == axis):
                with tf.device(None):  # where the tensor is: on the host it is copied
                    sizes = tf.shape(tensors[0], tf.int64)
                return sizes[axis]
        if self.parent is None:
            raise NotImplementedError(f"the size {symbol} is not at hand")
        return self.parent.known.number(symbolic(symbol))

    def of(self, layout: Layout) -> Emission:
        """Return what has the rows that a layout shares out, as rules ask for them."""
        if not isinstance(layout, Sharded) or layout.of is None:
            return self
        if layout.of not in self._others:
            self._others[layout.of] = OtherRows(self, layout.of)
        # It hands on whatever it is not asked as a part.
        return cast(Emission, self._others[layout.of])

    # --- values ---------------------------------------------------------------------

    def put(self, value: Value, layout: Layout, tensors: list[tf.Tensor]) -> None:
        """Keep a value in a layout: a tensor for each replica, or one for all."""
        if value.shape is not None and not value.is_handle and layout != MOMENTS:
            for replica, tensor in enumerate(tensors):
                tell_shape(tensor, value, layout, self.of(layout).rows_of(replica))
        self._forms[value, layout] = tensors

    def made_of(self, value: Value) -> tf.Tensor | None:
        """Return the first replica's tensor of a value, whole if it was made whole."""
        for layout in (WHOLE, value.layout):
            if tensors := self._forms.get((value, layout)):
                return tensors[0]
        return None

    def drop(self, value: Value, layout: Layout) -> None:
        """Forget a form of a value, which is made again when it is read next."""
        if value not in self.graph.outputs:
            self._forms.pop((value, layout), None)

    def get(self, value: Value, layout: Layout) -> list[tf.Tensor] | None:
        """Return a value in a layout, or None if it waits for an exchange."""
        key = value, layout
        if key not in self._forms:
            found = self._converted(value, layout)
            if found is None:
                return None
            self.put(value, layout, found)
            if not is_single(layout):
                self.turns.made([tensor.op] for tensor in found)
        return self._forms[key]

    def at_hand(self, value: Value, layout: Layout) -> list[tf.Tensor]:
        """Return a value in a layout for which it waits for no exchange."""
        found = self.get(value, layout)
        assert found is not None, value
        return found

    def _converted(self, value: Value, layout: Layout) -> list[tf.Tensor] | None:
        have = value.layout
        if not is_convertible(have, layout, value.shape, self.rows):
            raise NotImplementedError(
                f"{value.node or value.source.name}: {value} was asked for as {layout}, "
                "and is not known to have as many places"
            )
        if isinstance(have, Listed):
            return list_as(self, self._forms[value, have], have, layout)
        node = value.node
        if layout == WHOLE:
            if self._is_known(value):
                return [self._as_known(value)]
            if node is not None and node.plan.whole is not None:
                return self._remade(node, value)
            self.pending.add(value, have)
            return None
        is_at_hand = (value, WHOLE) in self._forms
        if layout == OWNED and have == SUM and value.is_read_owned and not is_at_hand:
            self.pending.add(value, OWNED)
            return None
        whole = self.get(value, WHOLE)
        if whole is None:
            return None
        if layout == OWNED:
            return [pieces.cut(whole[0], *self.exchange.place)]
        if isinstance(layout, Sharded):
            return [self._slice_of(value, layout) for _ in self.each()]
        assert layout == SUM, layout
        return [
            tf.where(self.share.is_lead[i], mine, tf.zeros_like(mine))
            for i in self.each()
            for mine in [self._of_replica(whole)]
        ]

    def _is_known(self, value: Value) -> bool:
        """Return whether a value is a constant or a size, which is made when it is read."""
        node = value.node
        if node is None or value.layout != WHOLE or node.bodies or node.is_stateful:
            return False
        if value.const is not None or node.type == "Const":
            return True
        return value.sizes is not None and self.knows(value.sizes)

    def _as_known(self, value: Value) -> tf.Tensor:
        assert value.node is not None
        if value.const is not None:
            return self.known.constant(value.const, value.dtype)
        if value.node.type == "Const":  # text
            with tf.control_dependencies(None):
                return copy_operation(value.node.op, []).outputs[0]
        if not isinstance(value.sizes, tuple):
            return self.scalar(value.sizes, value.dtype)
        if value.rank == 1:
            return self.vector(value.sizes, value.dtype)
        flat = [size for row in value.sizes for size in row]
        return tf.reshape(self.vector(flat, value.dtype), value.shape)

    def _remade(self, node: Node, value: Value) -> list[tf.Tensor] | None:
        """Compute all outputs of a node whole, without an exchange."""
        inputs = [self.get(v, WHOLE) for v in node.inputs]
        if any(part is None for part in inputs):
            return None
        assert node.plan.whole is not None
        outputs = node.plan.whole(self, [part[0] for part in inputs if part])
        for other, tensor in zip(node.outputs, outputs, strict=True):
            if other is not value:
                self.put(other, WHOLE, [tensor])
        return [outputs[value.index]]

    def _slice_of(self, value: Value, layout: Sharded) -> tf.Tensor:
        node = value.node
        if node is not None and node.plan.share is not None:
            cheap = node.plan.share(self.of(layout), layout)
            if cheap is not None:
                return cheap
        whole = self._of_replica(self._forms[value, WHOLE])
        return sliced(self.of(layout), whole, layout)

    def whole_of(self, value: Value) -> tf.Tensor | None:
        """Return the whole value, if it is at hand."""
        if (value, WHOLE) not in self._forms and not self._is_known(value):
            return None
        found = self.get(value, WHOLE)
        return None if found is None else found[0]

    def read_next(self, values: Collection[Value]) -> Iterator[Value]:
        """Yield the weights in pieces that are read behind some values, in their order.

        Args:
            values: None of them is yielded, nor what is whole already.
        """
        known = {*values, *(value for value, layout in self._forms if layout == WHOLE)}
        reads = (pair for pair in self._joined_reads if not self._made.is_made(pair[0]))
        is_behind = False
        for _, value in reads:
            is_behind = is_behind or value in values
            if is_behind and value not in known and (value, OWNED) in self._forms:
                known.add(value)
                yield value

    @functools.cached_property
    def _joined_reads(self) -> list[tuple[Node, Value]]:
        """Return what reads a weight in pieces whole, and the weight, in their order."""
        return [
            (node, value)
            for node in self.graph.nodes
            for value, layout in zip(node.inputs, node.plan.inputs, strict=True)
            if layout == WHOLE and value.layout == OWNED and is_weight(value)
        ]

    def each(self) -> Iterator[int]:
        """Make one replica after the other, each on its device."""
        for replica in range(len(self.share.own)):
            self._replica = replica
            with self._on_device(), self.turns.of(replica):
                yield replica
        self._replica = 0

    def _on_device(self) -> AbstractContextManager[object]:
        """Surround what is made for this replica."""
        if not self.exchange.devices:
            return nullcontext()
        return self.known.on(self._of_replica(self.exchange.devices))

    def _of_replica(self, parts: Sequence[Any]) -> Any:
        """Return what the replica that is made now has of one thing for all, or of several.

        Args:
            parts: For each replica, or for each device; or one for all.
        """
        return parts[self.replica * len(parts) // len(self.share.own)]

    def width(self, layout: Layout) -> int:
        """Return how many tensors a value has that goes into a loop or branch."""
        if is_whole(layout):
            return len(self.exchange.devices) if self.exchange.copies_variables else 1
        return len(self.share.own)

    def of_rank_zero(self, value: Value, tensor: tf.Tensor) -> tf.Tensor:
        """Return rank 0's tensor of a value that each rank has made whole.

        A handle stands for what is in the memory of one process, and is not sent.
        """
        is_read = value.users or value in self.graph.outputs
        if self.exchange.place[1] == 1 or not is_read or value.is_handle:
            return tensor
        return self.pending.broadcast(value, tensor)

    # --- nodes ----------------------------------------------------------------------

    def run(self, wanted: Sequence[Layout | None]) -> list[list[tf.Tensor]]:
        """Make everything; return the outputs of the graph.

        Args:
            wanted: The layout of each output. If None, the one it is computed in.
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
            if self.pending:
                self.pending.exchange(self)
                queue.resume()
            elif not queue.release_writes():
                break
            self.turns.end()
        self.turns.end()
        return [
            self.at_hand(value, layout)
            for value, layout in zip(self.graph.outputs, layouts, strict=True)
        ]

    def effects(self) -> list[tf.Operation]:
        """Return the operations that must run, whatever is read of the outputs, once each."""
        stateful = (node for node in self.graph.nodes if node.is_stateful)
        made = [op for node in stateful for op in self._made.of(node)]
        # A node may be made of one operation that has several of its outputs.
        return list(dict.fromkeys([*made, *self.pending.last]))

    def _ask_for(self, layouts: Sequence[Layout]) -> None:
        """Have outputs that are made travel with everything else that waits."""
        for value, layout in zip(self.graph.outputs, layouts, strict=True):
            if (value, value.layout) in self._forms or self._is_known(value):
                self.get(value, layout)

    def _ask_for_inputs(self, node: Node) -> None:
        for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
            if layout is not None:
                self.get(value, layout)

    def _make(self, node: Node) -> bool:
        """Make a node; False if it has to wait for an exchange."""
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
        count = self.traffic.in_groups
        self._made.meet(node)
        last: list[tf.Operation] = []
        if is_write(node):
            comes_early = writes_pieces(node) or self.pending.joined.intersection(
                node.inputs
            )
            if self.exchange.holds_writes and not comes_early:
                last = self.pending.last
            self.traffic.writes = True
        if node in self.held_back:
            last = [*last, self.pending.window.gate(self.held_back[node])]
        if plan.joint is not None:
            self._make_jointly(node, plan, inputs, [*self._made.before(node), *last])
            return True
        outputs, made = self._make_each(node, plan, inputs, last)
        for value, layout, tensors in zip(
            node.outputs, plan.outputs, outputs, strict=True
        ):
            few = is_single(layout) and not plan.is_single
            self.put(value, layout, tensors[:1] if few else tensors)
            if value.is_needed_whole and is_small(value):
                self.get(value, WHOLE)  # travels with the next exchange
            if value.is_read_owned and value.layout == SUM:
                self.get(value, OWNED)  # so that no whole gradient is kept
        self._made.note(node, made)
        for value, layout in zip(node.inputs, plan.inputs, strict=True):
            if layout == WHOLE != value.layout:
                self.pending.read(value, self._made.of(node))
        if self.traffic.in_groups > count:
            self.turns.end()
        return True

    def _make_each(
        self,
        node: Node,
        plan: Plan,
        inputs: list[list[tf.Tensor] | None],
        last: list[tf.Operation],
    ) -> tuple[list[list[tf.Tensor]], list[list[tf.Operation]]]:
        """Make a node for each replica that has something of its own of it.

        Args:
            last: Operations that it waits for, besides those of the piece before.

        Returns:
            For each output its tensors, and for each time the operations.
        """
        made: list[list[tf.Operation]] = []
        outputs: list[list[tf.Tensor]] = [[] for _ in node.outputs]
        is_first = plan.is_of_rank_zero or (
            plan.is_single and atomics.is_of_rank_zero(node, self.exchange)
        )
        times = times_made(node, inputs) if plan.is_single else len(self.share.own)
        times = 1 if is_first else times
        makes = first_replicas(len(self.share.own), times)
        for replica in self.each():
            if replica not in makes:
                continue
            mine = [None if part is None else self._of_replica(part) for part in inputs]
            before = [*self._made.before(node, replica), *last]
            with (
                tf.control_dependencies(before) if before else nullcontext(),
                placed_by_tensorflow(self.exchange, times, node, inputs),
            ):
                tensors, ops = emitted(self, node, mine)
            if is_first:
                tensors = [
                    self.of_rank_zero(value, tensor)
                    for value, tensor in zip(node.outputs, tensors, strict=True)
                ]
            made.append(ops)
            for of_output, tensor in zip(outputs, tensors, strict=True):
                of_output.append(tensor)
        return outputs, made

    def _make_jointly(
        self, node: Node, plan: Plan, inputs: list[Any], before: list[tf.Operation]
    ) -> None:
        """Make a loop or branch: all replicas together, for they exchange within."""
        assert plan.joint is not None
        count = self.traffic.exchanges
        with tf.control_dependencies([*before, *self.pending.last]):
            outputs, op = plan.joint(self, inputs)
        outputs = all_outputs(node, outputs)
        for value, layout, tensors in zip(
            node.outputs, plan.outputs, outputs, strict=True
        ):
            self.put(value, layout, tensors)
        self._made.note(node, [[op]])
        if self.traffic.exchanges > count:
            self.pending.last = [op]
        if not plan.is_single:
            self.turns.end()
