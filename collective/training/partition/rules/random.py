"""Random numbers: those that one process draws, of which each replica draws its own.

TensorFlow's stateless generator, Philox, counts: number i of a draw follows from key,
counter and i alone. So a replica advances the counter past the rows before its own, and
draws bit-equal numbers for the price of its rows. Other draws are made whole on every
replica, and each takes its part.

Source: J. K. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.compiled import needs_xla
from collective.training.partition.graph import Node, sizes_in
from collective.training.partition.known import on_host
from collective.training.partition.layouts import WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.shares import pieces_of
from collective.training.partition.sizes import quotient
from collective.training.partition.stateful import may_differ
from collective.training.partition.values import alike

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

# Kernels that reject numbers keep so many 32-bit words of the stream for each of theirs,
# and Philox gives four words a count.
_RESERVED = 256 // 4
_COUNTED = {
    "StatelessRandomUniformV2": 1,
    "StatelessRandomUniformIntV2": 1,
    "StatelessRandomUniformFullIntV2": 1,
    "StatelessRandomNormalV2": 1,
    "StatelessTruncatedNormalV2": 4 * _RESERVED,
}
alike("RandomShuffle", "StatelessShuffle")
# Several batches in one draw follow each other, as in two views of the same rows.
_MOST_BATCHES = 8


@rule(*_COUNTED)
def counted(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Draw rows by an advanced counter."""
    if any(lay != WHOLE for lay in summed(layouts)):
        return None
    layout = _layout_of_draw(node, rows)
    if layout is None or needs_xla(node):  # which counts in another way
        return whole(node)
    counts = _COUNTED[node.type]

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return [_rows_of_draw(emission, node, inputs, layout, counts)]

    def redraw(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, inputs))

    return Plan([WHOLE] * len(layouts), [layout], emit, whole=redraw)


def _layout_of_draw(node: Node, rows: Rows) -> Sharded | None:
    """Shard draws whose first axis is the rows of one or a few batches."""
    sizes = sizes_in(node.inputs[0])
    if not rows.of_batch:
        return None  # whatever a weight's part meets takes its part of the whole draw
    if not isinstance(sizes, tuple) or not sizes:
        return None
    batches = quotient(sizes[0], rows.rows)
    if isinstance(batches, int) and 0 < batches <= _MOST_BATCHES:
        return Sharded(0, (1,) * batches)
    return Sharded(0, (batches,)) if batches and not isinstance(batches, int) else None


def _rows_of_draw(
    emission: Emission,
    node: Node,
    inputs: list[tf.Tensor],
    layout: Sharded,
    counts: int,
) -> tf.Tensor:
    shape, key, counter, *rest = inputs
    with on_host():
        sizes = tf.cast(shape, tf.int64)
        per_place = tf.reduce_prod(sizes[1:])
    parts = []
    for begin, count in pieces_of(emission, layout):
        with on_host():
            inner = tf.concat([emission.vector([count]), sizes[1:]], 0)
            first = emission.number(begin) * per_place
        parts.append(_numbers(emission, node, first, inner, key, counter, rest, counts))
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _numbers(
    emission: Emission,
    node: Node,
    first: tf.Tensor,
    shape: tf.Tensor,
    key: tf.Tensor,
    counter: tf.Tensor,
    rest: list[tf.Tensor],
    counts: int,
) -> tf.Tensor:
    """Return the numbers from ``first`` on of a draw, in this shape."""
    group = 4 if node.outputs[0].dtype.size <= 4 else 2  # numbers of one count
    with on_host():
        skipped = first // group * (counts * group // 4 if counts > 1 else 1)
        size = tf.reduce_prod(shape)[None]
        # A group begins with a number whose place is a multiple of its length.
        length = tf.cast(size + group - 1, node.inputs[0].dtype)
        begin = (first % group)[None]
        moved = advanced(counter, skipped)
    flat = emission.copy(node, [length, key, moved, *rest])[0]
    return tf.reshape(tf.slice(flat, begin, size), shape)


def advanced(counter: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return a Philox counter after so many counts: uint64 ``[2]``, the low word first."""
    low, high = tf.unstack(tf.bitcast(counter, tf.int64), num=2)
    after = low + counts
    lowest = tf.constant(tf.int64.min, tf.int64)  # of unsigned order
    carry = (after + lowest) < (low + lowest)
    words = tf.stack([after, high + tf.cast(carry, tf.int64)])
    return tf.bitcast(words, tf.uint64)


@rule(
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "Multinomial",
    "RandomGamma",
    "RandomPoissonV2",
    "ParameterizedTruncatedNormal",
    "StatefulStandardNormalV2",
    "StatefulUniform",
    "StatefulUniformInt",
)
def stateful(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Draw whole what follows from all that was drawn before.

    The state of a ``tf.random.Generator`` is a variable; that of others is hidden in each
    process, so all take what rank 0 draws.
    """
    return Plan(
        [WHOLE] * len(layouts),
        [WHOLE] * len(node.outputs),
        is_of_rank_zero=may_differ(node),
    )
