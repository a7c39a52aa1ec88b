"""What changes in a step that runs on one rank's rows of a batch.

Gradients are summed over ranks where ``tape.gradient`` returns them, as in a model's own
``train_step`` (``variants.custom_step.replica``). What differs here: gradients of tables,
``IndexedSlices``, keep the entry of each look-up, as optimizers see them in one process;
batch normalization has the statistics of the whole batch; and a step may divide its sums
by a number of its own, as by the size of the global batch (``sums_over_rows``): then
ranks' gradients are added, not averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.unedited.loops.rows import Piece
from collective.training.variants.coupled import batch_norm
from collective.training.variants.coupled.replica import entered
from collective.training.variants.custom_step.replica import (
    OrderedReplica,
    OrderedSums,
    ReplicaHooks,
)
from collective.training.variants.custom_step.share import Share


class LoopHooks(ReplicaHooks):
    """The intercepted calls of one step, on this rank's rows."""

    def __init__(self, sums: OrderedSums, share: Share, sums_over_rows: bool):
        super().__init__(sums, share)
        self.sums_over_rows = sums_over_rows
        self.summed: dict[int, Any] = {}  # gradients that are global already, by id

    def weighed(self, tensor: Any, dtype: tf.DType | None = None) -> tf.Tensor:
        """What this rank adds to a sum over ranks."""
        if self.sums_over_rows:
            return self.share.if_any(tf.cast(tensor, dtype or tensor.dtype))
        return self.share.of(tensor, dtype)

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Sums them over the ranks."""
        result = list(gradients)
        dense = [i for i, g in enumerate(result) if not _is_sparse(g)]
        wide = any(result[i].dtype == tf.float64 for i in dense)
        dtype = tf.float64 if wide else tf.float32
        local = [self.weighed(result[i], dtype) for i in dense]
        totals = self.sums(local, len(local)) if local else []
        for i, total in zip(dense, totals, strict=True):
            result[i] = tf.cast(total, result[i].dtype)
        for i in set(range(len(result))) - set(dense):
            result[i] = self._gathered(result[i])
        self.summed |= {id(total): total for total in result}
        return result

    def _gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The entries of all ranks, in the order of the rows."""
        some = tf.cast(self.share.rows > 0, tf.int64)
        count = tf.shape(slices.indices, tf.int64)[0] * some
        rank, size = self.backend.rank, self.backend.size
        place = tf.one_hot(rank, size, dtype=tf.float64)
        (counts,) = self.sums([place * tf.cast(count, tf.float64)])
        counts = tf.cast(counts, tf.int64)
        start, total = tf.reduce_sum(counts[:rank]), tf.reduce_sum(counts)
        values, indices = (
            gather_rows(self.sums, t[:count], start, total)
            for t in (self.weighed(slices.values), slices.indices)
        )
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def on_apply(
        self, optimizer: keras.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Notes what the optimizer writes: alike on every rank."""
        self.updated |= written_by(optimizer, variables)
        return gradients, []

    def on_loss(
        self, loss: Any, values: Any, weight: Any, mask: Any, reduction: str
    ) -> Any:
        """Scales a loss so that the sum over ranks is that of the whole batch."""
        scaled = super().on_loss(loss, values, weight, mask, reduction)
        return self.share.of(scaled) if self.sums_over_rows else scaled

    @contextlib.contextmanager
    def on_own_rows(self, piece: Piece) -> Iterator[list[str]]:
        """Inside, layers normalize over the whole batch, and draw its random numbers.

        Yields:
            What is drawn otherwise than in one process; it grows.
        """
        place = tf.constant(piece.rank, tf.int64), self.share.rows
        replica = LoopReplica(
            self.backend,
            *place,
            self.share.global_rows,
            maybe_empty=True,
            sums=self.sums,
            share=self.share,
            sums_over_rows=self.sums_over_rows,
        )
        drawn = keras_compat.Place(piece.start, max(piece.rows, 1), piece.total)
        with (
            entered(replica),
            batch_norm.synchronized(True),
            keras_compat.draw_rows(drawn, by_length=True) as others,
        ):
            yield others


@dataclass(eq=False)
class LoopReplica(OrderedReplica):
    """One rank in a step, for what layers sum over ranks."""

    # Whether its loss is a part of that of the whole batch.
    sums_over_rows: bool = False

    def of_whole(self, gradient: tf.Tensor) -> tf.Tensor:
        """What the loss of the whole batch owes to this rank's."""
        return gradient if self.sums_over_rows else super().of_whole(gradient)

    def of_part(self, gradient: tf.Tensor) -> tf.Tensor:
        """The reverse of ``of_whole``."""
        return gradient if self.sums_over_rows else super().of_part(gradient)


def written_by(optimizer: keras.Optimizer, variables: list[Any]) -> set[int]:
    """The variables, by id, that an optimizer writes when it updates some.

    Those of an optimizer around another one, too, as that of a loss scale.
    """
    if not optimizer.built:
        optimizer.build(variables)
    written = [*variables, *optimizer.variables]
    return {id(keras_compat.tf_variable(v)) for v in written}


def gather_rows(
    sums: OrderedSums, tensor: tf.Tensor, start: Any, total: Any
) -> tf.Tensor:
    """Every rank's rows of a tensor, as one: in the order of the batch.

    Args:
        tensor: ``[n, ...]``; the other dimensions are the same on every rank.
        start: Index of this rank's first row.
        total: Rows of all ranks.
    """
    travels = tensor.dtype if tensor.dtype.is_floating else tf.float64
    rows = tf.cast(tensor, travels)
    count = rows.shape[0]
    if count is None or tf.is_tensor(total):
        count, start, total = (
            tf.cast(n, tf.int64) for n in (tf.shape(rows)[0], start, total)
        )
    others: Any = rows.shape[1:]
    if tf.is_tensor(total):
        others = tf.shape(rows, tf.int64)[1:]
    before, behind = (
        tf.zeros(tf.concat([[n], others], axis=0), travels)
        for n in (start, total - start - count)
    )
    (whole,) = sums([tf.concat([before, rows, behind], axis=0)])
    whole = tf.cast(whole, tensor.dtype)
    return whole


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
