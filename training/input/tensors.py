"""Rows of tensors in memory, among them ragged and sparse ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, open_rows
from collective.training.input.source import Row, Source


class Tensors(Source):
    """Ragged and sparse tensors, and arrays beside them, of equal numbers of rows.

    Args:
        x, y, sample_weight: Trees (dicts and tuples) of ``tf.RaggedTensor``,
            ``tf.SparseTensor`` and arrays; None for what is absent.

    Raises:
        UsageError: The numbers of rows differ.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None):
        with tf.device("CPU:0"):
            self._tree = tf.nest.map_structure(_tensor, (x, y, sample_weight))
        leaves = [leaf for leaf in tf.nest.flatten(self._tree) if leaf is not None]
        lengths = {int(count_rows(leaf)) for leaf in leaves}
        if len(lengths) != 1:
            raise UsageError(
                f"the tensors of x, y and sample_weight have {sorted(lengths)} rows",
                hint="give all the same number: one entry for each row",
            )
        self._rows = lengths.pop()
        # What reads sparse rows by number, outside of the graph that will use it.
        self._by_rows = [
            keras_compat.sparse_by_rows(leaf)
            if isinstance(leaf, tf.SparseTensor)
            else leaf
            for leaf in tf.nest.flatten(self._tree)
        ]

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one row, as far as it has a fixed shape."""
        return tf.nest.map_structure(
            lambda s: None if s is None else s._unbatch(), self.batch_spec
        )

    @property
    def batch_spec(self) -> Row:
        """As ``Source.batch_spec``, with specifications of ragged and sparse tensors."""
        return tf.nest.map_structure(
            lambda t: None if t is None else open_rows(tf.type_spec_from_value(t)),
            self._tree,
        )

    def read(self, rows: tf.Tensor) -> Row:
        """Gathers the rows."""

        def gather(leaf: Any, by_rows: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, tf.SparseTensor):
                return keras_compat.sparse_rows(by_rows, rows)
            return tf.gather(leaf, rows)

        leaves = tf.nest.flatten(self._tree)
        read = [gather(*both) for both in zip(leaves, self._by_rows, strict=True)]
        return tf.nest.pack_sequence_as(self._tree, read)


def _tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)
