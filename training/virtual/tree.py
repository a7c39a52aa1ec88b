"""Sums along the tree over pieces, whose shape depends on their number alone.

Floating-point addition is not associative: the sum of eight numbers has other bits in
another order. Here piece 2k is added to piece 2k+1, the pair to the next pair, and so on,
whichever process computes them. A process adds up the subtrees that lie in its own
range, as it computes their pieces; ``finish`` adds the rest.

TensorFlow's graph optimizer rewrites ``(a + b) + (c + d)`` as one sum of four, from left
to right. So each addition here is a branch whose condition is known at run time only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from collective.training.virtual.pieces import Node, VirtualReplicas

#: Computes a piece: its vectors, and a float32 scalar that is 0 where all is well.
Leaf = Callable[[tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]]
#: By level, the vectors of a subtree; of length 0 where there is none.
Slots = list[list[tf.Tensor]]


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
    leaf: Leaf, pieces: range, subtrees: list[Node], specs: list[tf.TensorSpec]
) -> tuple[dict[Node, list[tf.Tensor]], tf.Tensor]:
    """Computes pieces one after the other, and sums each subtree as it is completed.

    A binary counter: ``pending[l]`` is a complete left half of level l whose right half
    is still computed. So about ``log2(len(pieces))`` sums are in memory, beside the
    activations of one piece.

    Args:
        pieces: Consecutive, at least one.
        specs: Of the vectors that a piece has, ``[length]`` each.

    Returns:
        For each subtree its vectors; and the maximum of the pieces' marks.
    """
    start = tf.constant(pieces.start, tf.int64)
    if len(pieces) == 1:
        vectors, mark = _one_piece(leaf, start, specs)
        return {subtrees[0]: vectors}, mark
    levels = len(pieces).bit_length()
    empty = [tf.zeros([0], spec.dtype) for spec in specs]

    def body(
        number: tf.Tensor, mark: tf.Tensor, pending: Slots, closed: Slots
    ) -> tuple[tf.Tensor, tf.Tensor, Slots, Slots]:
        sums, own_mark = leaf(number)
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
            # The other half is another process': nobody here adds to this one.
            closed[level] = _choose(closes, sums, closed[level])
            sums, carried = _add_if(adds, left, sums), adds
        return number + 1, tf.maximum(mark, own_mark), pending, closed

    slots: Slots = [list(empty) for _ in range(levels)]
    shapes = [[tf.TensorShape([None]) for _ in specs] for _ in range(levels)]
    scalar = tf.TensorShape([])
    _, mark, pending, closed = tf.while_loop(
        lambda number, *_: number < pieces.stop,
        body,
        (start, tf.zeros([]), slots, slots),
        shape_invariants=(scalar, scalar, shapes, shapes),
        parallel_iterations=1,
    )
    found = {}
    for node in subtrees:
        is_right = (node.start >> node.level) % 2 == 1
        vectors = (closed if is_right else pending)[node.level]
        found[node] = _shaped(vectors, specs)
    return found, mark


def _one_piece(
    leaf: Leaf, piece: tf.Tensor, specs: list[tf.TensorSpec]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """A piece, in a loop as several are: TensorFlow optimizes the body of both alike."""
    none = [tf.zeros([0], spec.dtype) for spec in specs]
    scalar = tf.TensorShape([])
    _, vectors, mark = tf.while_loop(
        lambda number, *_: number <= piece,
        lambda number, *_: (number + 1, *leaf(number)),
        (piece, none, tf.zeros([])),
        shape_invariants=(scalar, [tf.TensorShape([None]) for _ in specs], scalar),
    )
    return _shaped(vectors, specs), mark


def _shaped(vectors: list[tf.Tensor], specs: list[tf.TensorSpec]) -> list[tf.Tensor]:
    """Vectors whose length a loop has forgotten."""
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
