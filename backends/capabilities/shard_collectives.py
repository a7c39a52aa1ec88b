"""Reduce-scatter and all-gather, for state of which each replica holds one shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from collective.backends.base import Backend


class ShardCollectives(Backend):
    """A backend with one replica in each process.

    The collectives here are made of an all-reduce, which sends more than is needed. A
    subclass overrides them where it has better ones.

    Attributes:
        exchanges: Whether it has ``all_to_all``, too.
    """

    exchanges: ClassVar[bool] = False

    def reduce_scatter(self, rows: Any) -> Any:
        """Inside ``run``: this replica's row of the sum over all replicas.

        Args:
            rows: ``[replicas, n]``, of equal shape and dtype on every replica.

        Returns:
            ``[n]``.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        return self._reduce_scatter(rows) if self.replicas > 1 else rows[0]

    def _reduce_scatter(self, rows: Any) -> Any:
        return self._all_reduce([rows])[0][self.replica()]

    def all_gather(self, row: Any) -> Any:
        """Inside ``run``: the rows of all replicas.

        Args:
            row: ``[n]``, of equal shape and dtype on every replica.

        Returns:
            ``[replicas, n]``.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        return self._all_gather(row) if self.replicas > 1 else row[None]

    def _all_gather(self, row: Any) -> Any:
        import tensorflow as tf

        shape = [self.replicas, *row.shape]
        rows = tf.scatter_nd([[self.replica()]], row[None], shape)
        return self._all_reduce([rows])[0]

    def all_to_all(self, rows: Any, counts: Sequence[int]) -> Any:
        """Inside ``run``: sends rows to each replica, and returns those sent to this one.

        Args:
            rows: ``[replicas, counts[replica], n]``: for each replica as many rows.
            counts: Of each replica; the same on all.

        Returns:
            ``[sum(counts), n]``, in the order of the replicas.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        import tensorflow as tf

        self.require_all_ranks()
        received = self._all_to_all(rows, counts)
        return tf.ensure_shape(received, [sum(counts), rows.shape[-1]])

    def _all_to_all(self, rows: Any, counts: Sequence[int]) -> Any:
        raise NotImplementedError
