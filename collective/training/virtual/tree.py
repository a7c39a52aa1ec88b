"""Sums along the tree over pieces, whose shape depends on their number alone.

Floating-point addition is not associative: the sum of eight numbers has other bits in
another order. Here piece 2k is added to piece 2k+1, the pair to the next pair, and so on,
whichever process computes them. A process adds up the subtrees that lie in its own range.

Partial sums of subtrees travel as they are, and nothing is added on the way: where a
backend can only sum, their bits travel as integers, of which all but one are zero. (As
floats, -0.0 + 0.0 would become 0.0.) docs/explanation/virtual-replicas.md has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import cast

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.training.input.plan import share
from collective.training.process.object_collectives import join
from collective.training.step.reduction import sum_tensors
from collective.training.virtual.pieces import Subtree, VirtualReplicas

#: Integers with the bits of floats, by size.
BITS = {4: tf.int32, 8: tf.int64}
# Elements: for fewer, one message costs less than two.
_SHARDED_FROM = 4096


class OneReplica:
    """Acts as a backend with one process that has all pieces."""

    replicas, local_replicas = 1, range(1)


class Tree:
    """Sums over the pieces of a job, inside ``Backend.run``."""

    def __init__(self, virtual: VirtualReplicas, backend: Backend | OneReplica):
        self._virtual, self._backend = virtual, cast("Backend", backend)
        self._replica = number = replica_number(self._backend)
        self._by_replica = virtual.all_subtrees(backend.replicas)
        self._pieces = virtual.pieces(range(number, number + 1), backend.replicas)

    def bounds(self, rows: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return where each piece of this replica begins and ends in a batch."""
        return [share(rows, piece, self._virtual.count) for piece in self._pieces]

    def total(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Return the sum of each value; the same bits on every rank and any number of them.

        Args:
            values: Of one dtype, float32 or float64; of each what ``of_subtrees`` made.
        """
        subtrees = list(values)
        if self._backend.replicas == 1:
            return [self.finish(sums) for sums in subtrees]
        if [len(nodes) for nodes in self._by_replica] == [1, 1]:
            # a + b is b + a.
            return sum_tensors(self._backend, [sums[0] for sums in subtrees], [])
        totals: dict[int, tf.Tensor] = {}
        known = [i for i, sums in enumerate(subtrees) if _has_length(sums[0])]
        if known:
            rows = zip(*(subtrees[i] for i in known), strict=True)
            joined = self._joined_total(
                [join([tf.reshape(t, [-1]) for t in row]) for row in rows]
            )
            firsts = [subtrees[i][0] for i in known]
            cut = tf.split(joined, [t.shape.num_elements() for t in firsts])
            shaped = (tf.reshape(c, t.shape) for c, t in zip(cut, firsts, strict=True))
            totals.update(zip(known, shaped, strict=True))
        for i, sums in enumerate(subtrees):
            if i not in totals:  # one collective after the other
                with tf.control_dependencies(list(totals.values())[-1:]):
                    totals[i] = self._gathered_total(tf.stack(sums))
        return [totals[i] for i in range(len(subtrees))]

    def of_subtrees(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of this replica's subtrees.

        Args:
            parts: A tensor for every piece of this replica, or for every micro-batch of
                them; or a single one that counts as the first piece's.
        """
        pieces = self._pieces
        if len(parts) == 1:
            parts = [*parts, *[tf.zeros_like(parts[0])] * (len(pieces) - 1)]
        cut = len(parts) // len(pieces)  # micro-batches of a piece
        sums = {
            Subtree(piece, 0): reduce(tf.add, parts[i * cut : (i + 1) * cut])
            for i, piece in enumerate(pieces)
        }
        return [self._sum_of(node, sums) for node in self._by_replica[self._replica]]

    def _sum_of(self, node: Subtree, sums: Mapping[Subtree, tf.Tensor]) -> tf.Tensor:
        """Return the sum of a node, from those of nodes below it."""
        if node in sums:
            return sums[node]
        first, second = self._virtual.children(node)
        if second is None:
            return self._sum_of(first, sums)
        return self._sum_of(first, sums) + self._sum_of(second, sums)

    def finish(self, sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the sum of all pieces, from those of each replica's subtrees in order."""
        nodes = [node for nodes in self._by_replica for node in nodes]
        return self._sum_of(self._virtual.root, dict(zip(nodes, sums, strict=True)))

    def _joined_total(self, own: list[tf.Tensor]) -> tf.Tensor:
        """Return the sum of vectors of one static length, one for each subtree."""
        rows = own[0][None] if len(own) == 1 else tf.stack(own)  # one: without a copy
        backend = self._backend
        shards = isinstance(backend, ShardCollectives) and backend.exchanges
        if shards and rows.shape[1] >= _SHARDED_FROM:
            return self._by_shards(rows)
        return self._by_slots(rows)

    def _by_slots(self, rows: tf.Tensor) -> tf.Tensor:
        """Give every replica each subtree's sum, and then add the tree up."""
        before = sum(map(len, self._by_replica[: self._replica]))
        after = sum(map(len, self._by_replica[self._replica + 1 :]))
        slots = tf.pad(as_bits(rows), [[before, after], [0, 0]])
        (gathered,) = self._backend.all_reduce([slots])
        return self.finish(tf.unstack(tf.bitcast(gathered, rows.dtype)))

    def _by_shards(self, rows: tf.Tensor) -> tf.Tensor:
        """Sum a shard of every subtree on each replica, and join the shards."""
        backend = cast("ShardCollectives", self._backend)
        count, length = rows.shape
        size = -(-length // backend.replicas)
        missing = backend.replicas * size - length
        if missing:
            rows = tf.pad(rows, [[0, 0], [0, missing]])
        by_shard = tf.reshape(rows, [count, backend.replicas, size])
        by_shard = tf.transpose(by_shard, [1, 0, 2])
        counts = [len(nodes) for nodes in self._by_replica]
        received = backend.all_to_all(by_shard, counts)
        shard = self.finish(tf.unstack(received, num=sum(counts)))
        return tf.reshape(backend.all_gather(shard), [-1])[:length]

    def _gathered_total(self, own: tf.Tensor) -> tf.Tensor:
        """Return the sum of tensors of no static length, one for each subtree."""
        backend = cast("ShardCollectives", self._backend)
        rows = backend.gather_rows(as_bits(own))
        count = sum(map(len, self._by_replica))
        return self.finish(tf.unstack(tf.bitcast(rows, own.dtype), num=count))


def as_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Return integers with the bits of a tensor of float32 or float64; others as they are."""
    if not tensor.dtype.is_floating:
        return tensor
    return tf.bitcast(tensor, BITS[tensor.dtype.size])


def replica_number(backend: Backend) -> int:
    """Return the number of this replica, known when it is traced; inside ``Backend.run``."""
    if len(backend.local_replicas) == 1:
        return backend.local_replicas[0]
    return int(tf.get_static_value(backend.replica()))


def _has_length(tensor: tf.Tensor) -> bool:
    return tensor.shape.num_elements() is not None
