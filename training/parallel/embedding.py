"""An embedding whose rows are split over the ranks of a tensor group.

All ranks of the group have the same ids. Each looks up a share of them, with one
all-to-all of row numbers and one of rows; an all-gather gives every rank all results.
Backward, every rank has the gradient of all lookups and sums those of its own rows:
nothing is sent.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective.backends.tensor_group import TensorGroup
from collective.training.input.plan import share
from collective.training.parallel.layer import TensorParallelLayer


@keras.saving.register_keras_serializable("collective")
class ShardedEmbedding(TensorParallelLayer, keras.layers.Embedding):
    """``keras.layers.Embedding``, with its rows split over the ranks of a tensor group.

    Args:
        arguments: As of ``Embedding``. The group need not divide the rows.

    Raises:
        UsageError: In ``build``: an argument needs all rows.
    """

    axes = {"embeddings": 0}  # noqa: RUF012

    def call(self, inputs: Any) -> Any:
        """Ids ``[...]`` to vectors ``[..., output_dim]``."""
        if self.group is None:
            return super().call(inputs)
        ids = tf.cast(inputs, tf.int64)
        ids = tf.where(ids < 0, ids + self.input_dim, ids)  # as Keras counts
        table = tf.convert_to_tensor(self.embeddings)
        rows = _lookup(table, tf.reshape(ids, [-1]), self.input_dim, self.group)
        shape = tf.concat([tf.shape(ids), [self.output_dim]], axis=0)
        found = tf.reshape(rows, shape)
        found.set_shape([*ids.shape, self.output_dim])
        return tf.cast(found, self.compute_dtype)


def _lookup(
    table: tf.Tensor, ids: tf.Tensor, rows: int, group: TensorGroup
) -> tf.Tensor:
    """Rows of a table that is split over a group.

    Args:
        table: ``[own rows, n]``, this rank's shard.
        ids: int64 ``[k]``, the same on every rank of the group.
        rows: Over all ranks together.
        group: The ranks.

    Returns:
        ``[k, n]``, the same on every rank.
    """
    starts = [share(rows, part, group.parts)[0] for part in range(group.parts)]
    first = starts[group.part]

    @tf.custom_gradient
    def found(table: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
            own = tf.where((ids >= first) & (ids < first + table.shape[0]))[:, 0]
            return tf.IndexedSlices(
                tf.gather(upstream, own),
                tf.gather(ids, own) - first,
                tf.shape(table, tf.int64),
            )

        count = tf.shape(ids, tf.int64)[0]
        start, stop = share(count, group.part, group.parts)
        mine = ids[start:stop]
        # An id out of range goes to a rank whose gather then fails.
        owners = tf.searchsorted(tf.constant(starts[1:], tf.int64), mine, side="right")
        order = tf.argsort(owners, stable=True)
        asked, numbers = group.all_to_all(
            tf.gather(mine, order), tf.math.bincount(owners, minlength=group.parts)
        )
        answered, _ = group.all_to_all(tf.gather(table, asked - first), numbers)
        in_order = tf.gather(answered, tf.math.invert_permutation(order))
        return group.all_gather(in_order), gradient

    return found(table)
