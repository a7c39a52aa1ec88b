"""Partial sums of subtrees from every process to every process, bit for bit.

What travels is not added on its way, so no backend's order of summation matters. The
parts are laid out in one buffer with a slot for each subtree of the job, which only one
process fills. An all-reduce of their bit patterns as integers is then exact: one number
and zeros. (As floats, -0.0 + 0.0 would become 0.0.)

Between processes with an all-to-all exchange, each process adds up its share of the
elements of all subtrees, and the totals are gathered: the bytes of an all-reduce, instead
of those of one for each process.
"""

from __future__ import annotations

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.virtual.pieces import Node, VirtualReplicas
from collective.training.virtual.tree import finish

_BITS = {4: tf.int32, 8: tf.int64}


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
    nodes = [node for subtrees in by_replica for node in subtrees]
    before = sum(map(len, by_replica[:replica]))
    after = len(nodes) - before - len(by_replica[replica])
    buffers = []
    for vectors in zip(*(sums[node] for node in by_replica[replica]), strict=True):
        bits = tf.bitcast(tf.stack(vectors), _BITS[vectors[0].dtype.size])
        buffers.append(tf.pad(bits, [[before, after], [0, 0]]))
    gathered = [
        tf.unstack(tf.bitcast(bits, vector.dtype))
        for bits, vector in zip(
            backend.all_reduce(buffers), next(iter(sums.values())), strict=True
        )
    ]
    columns = [list(vectors) for vectors in zip(*gathered, strict=True)]
    return finish(virtual, dict(zip(nodes, columns, strict=True)), always)
