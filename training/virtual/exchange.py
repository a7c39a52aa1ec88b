"""Partial sums of subtrees from every process to every process, bit for bit.

What travels is not added on its way, so no backend's order of summation matters. The
parts are laid out in one buffer with a slot for each subtree of the job, which only one
process fills. An all-reduce of their bit patterns as integers is then exact: one number
and zeros. (As floats, -0.0 + 0.0 would become 0.0.)

Where the backend has an all-to-all exchange, each process adds up its share of the
elements of all subtrees, and the totals are gathered. With as many processes as virtual
replicas this sends the bytes of one all-reduce; the buffer of slots, those of one for
each process.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.training.virtual.pieces import Node, VirtualReplicas
from collective.training.virtual.tree import finish

_BITS = {4: tf.int32, 8: tf.int64}
# Elements: for fewer, one message costs less than two.
_SHARDED_FROM = 4096


def total(
    virtual: VirtualReplicas,
    backend: Backend,
    replica: int,
    sums: dict[Node, list[tf.Tensor]],
    always: tf.Tensor,
) -> list[tf.Tensor]:
    """The sums over all pieces, inside ``Backend.run``; the same bits on every replica.

    Args:
        virtual: The pieces.
        backend: Connects the replicas.
        replica: This replica's number.
        sums: Of this replica's subtrees: float32 or float64 vectors, of equal lengths
            on every replica.
        always: As for ``tree.finish``.
    """
    if backend.replicas == 1:
        return finish(virtual, sums, always)
    by_replica = virtual.all_subtrees(backend.replicas)
    own = [_stack(v) for v in zip(*(sums[n] for n in by_replica[replica]), strict=True)]
    sharded = isinstance(backend, ShardCollectives) and backend.exchanges
    totals = []
    for rows in own:
        if sharded and rows.shape[1] >= _SHARDED_FROM:
            assert isinstance(backend, ShardCollectives)
            totals.append(_by_shards(virtual, backend, by_replica, rows, always))
        else:
            totals.append(
                _by_slots(virtual, backend, by_replica, replica, rows, always)
            )
    return totals


def _by_slots(
    virtual: VirtualReplicas,
    backend: Backend,
    by_replica: list[list[Node]],
    replica: int,
    rows: tf.Tensor,
    always: tf.Tensor,
) -> tf.Tensor:
    """Every subtree's sum on every replica, and then the tree."""
    before = sum(map(len, by_replica[:replica]))
    after = sum(map(len, by_replica[replica + 1 :]))
    bits = tf.bitcast(rows, _BITS[rows.dtype.size])
    slots = tf.pad(bits, [[before, after], [0, 0]])
    (gathered,) = backend.all_reduce([slots])
    return _finish(virtual, by_replica, tf.bitcast(gathered, rows.dtype), always)


def _by_shards(
    virtual: VirtualReplicas,
    backend: ShardCollectives,
    by_replica: list[list[Node]],
    rows: tf.Tensor,
    always: tf.Tensor,
) -> tf.Tensor:
    """Of every subtree a shard on each replica; the tree; and the shards together."""
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
    received = backend.all_to_all(by_shard, [len(nodes) for nodes in by_replica])
    shard = _finish(virtual, by_replica, received, always)
    return tf.reshape(backend.all_gather(shard), [-1])[:length]


def _finish(
    virtual: VirtualReplicas,
    by_replica: list[list[Node]],
    rows: tf.Tensor,
    always: tf.Tensor,
) -> tf.Tensor:
    """The tree over rows, one for each subtree of each replica, in order."""
    nodes = [node for nodes in by_replica for node in nodes]
    sums = {node: [row] for node, row in zip(nodes, tf.unstack(rows), strict=True)}
    return finish(virtual, sums, always)[0]


def _stack(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """``[len(vectors), length]``; a single vector is not copied."""
    return vectors[0][None] if len(vectors) == 1 else tf.stack(vectors)
