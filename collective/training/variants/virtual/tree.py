"""Sums along the tree over pieces, whose shape depends on their number alone.

Floating-point addition is not associative: the sum of eight numbers has other bits in
another order. Here piece 2k is added to piece 2k+1, the pair to the next pair, and so on,
whichever process computes them. A process adds up the subtrees that lie in its own
range, as it computes their pieces; ``finish`` adds the rest.

TensorFlow's graph optimizer rewrites ``(a + b) + (c + d)`` as one sum of four, from left
to right. So each addition here is a branch whose condition is known at run time only.

Partial sums of subtrees travel as bit patterns, and nothing is added on the way: an all-reduce
of integers, of which all but one are zero, is exact in any order. (As floats, -0.0 + 0.0 would
become 0.0.) docs/explanation/virtual-replicas.md has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.training.exchange import join
from collective.training.virtual.pieces import Node, VirtualReplicas

#: Integers with the bits of floats, by size.
BITS = {4: tf.int32, 8: tf.int64}
# Elements: for fewer, one message costs less than two.
_SHARDED_FROM = 4096
#: By level, the vectors of a subtree; of length 0 where there is none.
Slots = list[list[tf.Tensor]]


class Piece(NamedTuple):
    """What a piece has."""

    vectors: list[tf.Tensor]  # to be summed over the pieces
    mark: tf.Tensor  # float32 scalar, 0 where all is well
    # Tensors ``[n, ...]``, any n: wanted of all pieces one after the other.
    rows: Sequence[tf.Tensor] = ()


#: Computes the piece of a number.
Leaf = Callable[[tf.Tensor], Piece]


def finish(
    virtual: VirtualReplicas,
    sums: Mapping[Node, list[tf.Tensor]],
    always: tf.Tensor,
) -> list[tf.Tensor]:
    """The sum of all pieces, from those of subtrees that cover them.

    Args:
        sums: Vectors by node; the nodes together cover each piece once.
        always: True, but the graph must not know it: computed from an input.
    """

    def of(node: Node) -> list[tf.Tensor]:
        if node in sums:
            return sums[node]
        first, second = virtual.children(node)
        if second is None:
            return of(first)
        return _add_if(always, of(first), of(second))

    return of(virtual.root)


def sum_subtrees(
    leaf: Leaf,
    pieces: range,
    subtrees: list[Node],
    specs: list[tf.TensorSpec],
    kept: Sequence[tf.TensorSpec] = (),
) -> tuple[dict[Node, list[tf.Tensor]], tf.Tensor, list[tf.Tensor]]:
    """Computes pieces one after the other, and sums each subtree as it is completed.

    A binary counter: ``pending[l]`` is a complete left half of level l whose right half
    is still computed. So about ``log2(len(pieces))`` sums are in memory, beside the
    activations of one piece.

    Args:
        pieces: Consecutive, at least one.
        specs: Of the vectors that a piece has, ``[length]`` each.
        kept: Of its ``rows``, with an open first dimension.

    Returns:
        For each subtree its vectors; the maximum of the pieces' marks; their rows.
    """
    start = tf.constant(pieces.start, tf.int64)
    if len(pieces) == 1:
        vectors, mark, rows = _one_piece(leaf, start, specs, kept)
        return {subtrees[0]: vectors}, mark, rows
    levels = len(pieces).bit_length()
    empty = [tf.zeros([0], spec.dtype) for spec in specs]

    def body(
        number: tf.Tensor, mark: tf.Tensor, pending: Slots, closed: Slots, arrays: Any
    ) -> tuple[tf.Tensor, tf.Tensor, Slots, Slots, Any]:
        sums, own_mark, rows = leaf(number)
        place = tf.cast(number - start, tf.int32)
        arrays = [a.write(place, r) for a, r in zip(arrays, rows, strict=True)]
        pending, closed = list(pending), list(closed)
        carried = tf.constant(True)
        for level in range(levels):
            place = tf.bitwise.right_shift(number, level)
            is_right = carried & (place % 2 == 1)
            has_left = (place - 1) * (1 << level) >= start
            adds, closes = is_right & has_left, is_right & ~has_left
            keeps = carried & ~is_right
            left = pending[level]
            pending[level] = _choose(keeps, sums, _choose(adds, empty, left))
            # The other half is another process': nothing here is added to this one.
            closed[level] = _choose(closes, sums, closed[level])
            sums, carried = _add_if(adds, left, sums), adds
        return number + 1, tf.maximum(mark, own_mark), pending, closed, arrays

    slots: Slots = [list(empty) for _ in range(levels)]
    shapes = [[tf.TensorShape([None]) for _ in specs] for _ in range(levels)]
    scalar = tf.TensorShape([])
    arrays = [
        tf.TensorArray(
            *(spec.dtype, len(pieces)), infer_shape=False, element_shape=spec.shape
        )
        for spec in kept
    ]
    _, mark, pending, closed, arrays = tf.while_loop(
        lambda number, *_: number < pieces.stop,
        body,
        (start, tf.zeros([]), slots, slots, arrays),
        shape_invariants=(scalar, scalar, shapes, shapes, [scalar for _ in arrays]),
        parallel_iterations=1,
    )
    found = {}
    for node in subtrees:
        is_right = (node.start >> node.level) % 2 == 1
        vectors = (closed if is_right else pending)[node.level]
        found[node] = _shaped(vectors, specs)
    return found, mark, _shaped([array.concat() for array in arrays], kept)


def _one_piece(
    leaf: Leaf,
    piece: tf.Tensor,
    specs: list[tf.TensorSpec],
    kept: Sequence[tf.TensorSpec],
) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
    """A piece, in a loop as several are: TensorFlow optimizes the body of both alike."""

    def body(number: tf.Tensor, *_: Any) -> tuple[Any, ...]:
        vectors, mark, rows = leaf(number)
        return number + 1, vectors, mark, list(rows)

    none = [tf.zeros([0], spec.dtype) for spec in specs]
    no_rows = [tf.zeros([n or 0 for n in spec.shape], spec.dtype) for spec in kept]
    open_shapes = [tf.TensorShape([None]) for _ in specs]
    scalar = tf.TensorShape([])
    _, vectors, mark, rows = tf.while_loop(
        lambda number, *_: number <= piece,
        body,
        (piece, none, tf.zeros([]), no_rows),
        shape_invariants=(scalar, open_shapes, scalar, [spec.shape for spec in kept]),
    )
    return _shaped(vectors, specs), mark, _shaped(rows, kept)


def _shaped(
    vectors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Tensors whose shapes a loop has forgotten."""
    return [
        tf.ensure_shape(vector, spec.shape)
        for vector, spec in zip(vectors, specs, strict=True)
    ]


def _choose(
    condition: tf.Tensor, one: list[tf.Tensor], other: list[tf.Tensor]
) -> list[tf.Tensor]:
    """``one`` or ``other``, without a copy."""
    return tf.cond(condition, lambda: list(one), lambda: list(other))


def _add_if(
    condition: tf.Tensor, left: list[tf.Tensor], right: list[tf.Tensor]
) -> list[tf.Tensor]:
    """``left + right``; where the condition is false, ``right``."""
    add = lambda: [a + b for a, b in zip(left, right, strict=True)]  # noqa: E731
    return tf.cond(condition, add, lambda: list(right))


def total(
    virtual: VirtualReplicas,
    backend: Backend,
    replica: int,
    sums: dict[Node, list[tf.Tensor]],
    always: tf.Tensor,
) -> list[tf.Tensor]:
    """The sums over all pieces, inside ``Backend.run``; the same bits on every replica.

    Args:
        sums: Of this replica's subtrees: float32 and float64 vectors, of equal
            lengths on every replica.
        always: As for ``tree.finish``.
    """
    if backend.replicas == 1:
        return finish(virtual, sums, always)
    by_replica = virtual.all_subtrees(backend.replicas)
    exchange = _Exchange(virtual, backend, replica, by_replica, always)
    lists = [sums[node] for node in by_replica[replica]]
    one_of_two = [len(nodes) for nodes in by_replica] == [1, 1]
    found: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(vector.dtype for vector in lists[0]):
        places = [i for i, vector in enumerate(lists[0]) if vector.dtype == dtype]
        with tf.control_dependencies(list(found.values())):  # one after the other
            own = [[tf.identity(vectors[i]) for i in places] for vectors in lists]
        if one_of_two:
            totals = backend.all_reduce(own[0])
        else:
            joined = exchange.total([join(vectors) for vectors in own])
            totals = cut(joined, [vector.shape[0] for vector in own[0]])
        found.update(zip(places, totals, strict=True))
    return [found[i] for i in range(len(found))]


def cut(vector: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """What ``join`` joined."""
    return [vector] if len(lengths) == 1 else tf.split(vector, lengths)


class _Exchange(NamedTuple):
    """Sums one vector over all pieces, from one for each subtree of this replica."""

    virtual: VirtualReplicas
    backend: Backend
    replica: int
    by_replica: list[list[Node]]
    always: tf.Tensor

    def total(self, own: list[tf.Tensor]) -> tf.Tensor:
        """The sum; the vectors are of one length and dtype."""
        rows = own[0][None] if len(own) == 1 else tf.stack(own)  # one: without a copy
        backend = self.backend
        shards = isinstance(backend, ShardCollectives) and backend.exchanges
        if shards and rows.shape[1] >= _SHARDED_FROM:
            return self._by_shards(rows)
        return self._by_slots(rows)

    def _by_slots(self, rows: tf.Tensor) -> tf.Tensor:
        """Every subtree's sum on every replica, and then the tree."""
        before = sum(map(len, self.by_replica[: self.replica]))
        after = sum(map(len, self.by_replica[self.replica + 1 :]))
        bits = tf.bitcast(rows, BITS[rows.dtype.size])
        slots = tf.pad(bits, [[before, after], [0, 0]])
        (gathered,) = self.backend.all_reduce([slots])
        return self._finish(tf.bitcast(gathered, rows.dtype))

    def _by_shards(self, rows: tf.Tensor) -> tf.Tensor:
        """Of every subtree a shard on each replica; the tree; the shards together."""
        backend = cast("ShardCollectives", self.backend)
        count, length = rows.shape
        size = -(-length // backend.replicas)
        missing = backend.replicas * size - length
        if missing:
            rows = tf.pad(rows, [[0, 0], [0, missing]])
        if count == 1:  # without a copy
            by_shard = tf.reshape(rows, [backend.replicas, 1, size])
        else:
            by_shard = tf.reshape(rows, [count, backend.replicas, size])
            by_shard = tf.transpose(by_shard, [1, 0, 2])
        counts = [len(nodes) for nodes in self.by_replica]
        shard = self._finish(backend.all_to_all(by_shard, counts))
        return tf.reshape(backend.all_gather(shard), [-1])[:length]

    def _finish(self, rows: tf.Tensor) -> tf.Tensor:
        """The tree over rows, one for each subtree of each replica, in order."""
        nodes = [node for nodes in self.by_replica for node in nodes]
        sums = {node: [row] for node, row in zip(nodes, tf.unstack(rows), strict=True)}
        return finish(self.virtual, sums, self.always)[0]
