"""Partial sums of subtrees from every process to every process, bit for bit.

What travels is not added on its way, so no backend's order of summation matters. The
parts are laid out in one buffer with a slot for each subtree of the job, which only one
process fills. An all-reduce of their bit patterns as integers is then exact: one number
and zeros. (As floats, -0.0 + 0.0 would become 0.0.)

Where the backend has an all-to-all exchange, each process adds up its share of the
elements of all subtrees, and the totals are gathered. With as many processes as virtual
replicas this sends the bytes of one all-reduce; the buffer of slots, those of one for
each process.

Two subtrees on two replicas need none of this: a + b is b + a, so an ordinary all-reduce
has the bits of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.training.exchange import join
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
        sums: Of this replica's subtrees: float32 and float64 vectors, of equal
            lengths on every replica.
    """
    if backend.replicas == 1:
        return finish(virtual, sums, always)
    by_replica = virtual.all_subtrees(backend.replicas)
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
            rows = _stack([join(vectors) for vectors in own])
            total = _total_of_rows(virtual, backend, by_replica, replica, rows, always)
            totals = cut(total, [vector.shape[0] for vector in own[0]])
        found.update(zip(places, totals, strict=True))
    return [found[i] for i in range(len(found))]


def cut(vector: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """What ``join`` joined."""
    return [vector] if len(lengths) == 1 else tf.split(vector, lengths)


def _total_of_rows(
    virtual: VirtualReplicas,
    backend: Backend,
    by_replica: list[list[Node]],
    replica: int,
    rows: tf.Tensor,
    always: tf.Tensor,
) -> tf.Tensor:
    """The sum over all pieces of one vector, from a row for each own subtree."""
    if (
        isinstance(backend, ShardCollectives)
        and backend.exchanges
        and rows.shape[1] >= _SHARDED_FROM
    ):
        return _by_shards(virtual, backend, by_replica, rows, always)
    return _by_slots(virtual, backend, by_replica, replica, rows, always)


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
