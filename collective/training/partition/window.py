"""How many bytes of values that are sent alone may be in memory at a time.

A gradient of which each rank needs its piece is whole in memory until it is sent. Wide layers
make theirs faster than ranks send them, so in the end all would be in memory; and so would
what an optimizer computes in pieces of its slots, until it is joined. What makes such a value
therefore waits until those before the last few are sent. The wire has work all the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import tensorflow as tf

from collective.training.keras_compat.model import bytes_of
from collective.training.partition import pieces
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import OWNED, SUM, WHOLE, Sharded
from collective.training.partition.sizes import about, product

#: Of values that are made, or may be, and not sent; but two values at least.
UNSENT_BYTES = 16 << 20


def makers(graph: Graph, rows: int | None, ranks: int) -> dict[Node, Value]:
    """Return what makes each large gradient of which each rank needs a piece.

    Not if it is smaller than what it is made of, which stays in memory as long as it waits.
    And nothing but the gradient depends on such a node: else what is sent before it might
    wait for it.

    Args:
        rows: The number of rows of a batch that is expected, if any is.
        ranks: Over which they are shared out.
    """
    waited_for = {before for node in graph.nodes for before in node.control}
    found = {}
    for value in (v for node in graph.nodes for v in node.outputs):
        if not value.is_read_owned or value.layout != SUM:
            continue
        maker = _maker(value) if _is_large(value) else None
        if maker is None or maker in waited_for:
            continue
        if any(read.layout == OWNED for read in maker.inputs):
            continue  # weights are joined when what has read those before is made
        if _bytes_read(maker, rows, ranks) < bytes_of(value):
            found[maker] = value
    return found


def behind_joined(graph: Graph) -> dict[Node, Value]:
    """Return what computes each large value in pieces that is joined and read once, whole.

    That is the change of a weight, of which the slots are all that has to be kept.
    """
    waited_for = {before for node in graph.nodes for before in node.control}
    found: dict[Node, Value] = {}
    for node in graph.nodes:
        for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
            if value.layout == OWNED and layout == WHOLE and _is_large(value):
                found |= dict.fromkeys(_for_alone(value, waited_for), value)
    return found


def _for_alone(value: Value, waited_for: Collection[Node]) -> Iterator[Node]:
    """Yield the nodes that compute a value, and nothing else."""
    ahead = [value]
    while ahead:
        value = ahead.pop()
        node = value.node
        if node is None or len(node.outputs) != 1 or len(value.users) != 1:
            continue
        if node.is_stateful or node.bodies or node in waited_for:
            continue
        yield node
        ahead += [v for v in node.inputs if v.layout == OWNED]


def _is_large(value: Value) -> bool:
    """Return whether a value is sent alone; the others are sent together, last."""
    return bytes_of(value) >= pieces.LARGE * value.dtype.size


def _bytes_read(node: Node, rows: int | None, ranks: int) -> int:
    """Return about how many bytes a rank has of what a node reads."""
    bytes_ = 0
    for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
        if value.shape is not None:
            size = about(product(value.shape), rows) * value.dtype.size
            bytes_ += size // ranks if isinstance(layout, Sharded) else size
    return bytes_


def _maker(value: Value) -> Node | None:
    """Return what makes the memory of a gradient, or None if that makes something else, too."""
    found = None
    while True:
        node = value.node
        if node is None or len(node.outputs) != 1 or node.is_stateful or node.bodies:
            return found
        found = node
        sums = [v for v in node.inputs if v.layout == SUM]
        if len(sums) != 1 or len(sums[0].users) != 1:
            return found
        (value,) = sums


class Window:
    """The gates that hold values back, for one emitted graph."""

    def __init__(self) -> None:
        self._gates: dict[Value, tf.Operation] = {}

    def gate(self, value: Value) -> tf.Operation:
        """Return the operation for which what makes a value waits."""
        if value not in self._gates:
            with tf.control_dependencies(None):
                self._gates[value] = tf.no_op()
        return self._gates[value]

    def opened_by(self, sent: Sequence[Value]) -> list[list[tf.Operation]]:
        """Return for each of some values, which are sent in order, the gates that it opens."""
        opens: list[list[tf.Operation]] = [[] for _ in sent]
        unsent: deque[tuple[int, int]] = deque()
        bytes_ = 0
        for place, value in enumerate(sent):
            if value not in self._gates:
                continue
            gate, before = self._gates.pop(value), None
            size = bytes_of(value)
            while len(unsent) > 1 and bytes_ + size > UNSENT_BYTES:
                before, freed = unsent.popleft()
                bytes_ -= freed
            if before is not None:
                opens[before].append(gate)
            unsent.append((place, size))
            bytes_ += size
        return opens
