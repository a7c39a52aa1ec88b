"""Sources made of other sources: their first rows, or a function of x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.training.input.source import Row, Source


class First(Source):
    """The first rows of a source with random access; all rows if it has fewer."""

    def __init__(self, source: Source, rows: int):
        self.source = source
        self._rows = min(rows, len(source))

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """As the source's."""
        return self.source.spec

    def read(self, rows: tf.Tensor) -> Row:
        """As the source's."""
        return self.source.read(rows)

    def label_range(self) -> tuple[int, int] | None:
        """As the source's: labels of rows after the first ones count, too."""
        return self.source.label_range()


class CastFloats(Source):
    """A source with all floats in one dtype, as Keras gives arrays to a model.

    They are cast as they are read: an array on disk stays there.

    Args:
        source: A source with random access.
        dtype: Name of the dtype.
    """

    def __init__(self, source: Source, dtype: str):
        self.source = source
        self.dtype = tf.as_dtype(dtype)

    @staticmethod
    def is_needed(source: Source, dtype: str) -> bool:
        """Whether any part of a row has floats of another dtype."""
        leaves = tf.nest.flatten(source.batch_spec)
        return any(
            leaf is not None and leaf.dtype.is_floating and leaf.dtype != dtype
            for leaf in leaves
        )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def spec(self) -> Row:
        """The source's, with the dtype."""
        return tf.nest.map_structure(self._spec, self.source.spec)

    @property
    def batch_spec(self) -> Row:
        """The source's, with the dtype."""
        return tf.nest.map_structure(self._spec, self.source.batch_spec)

    def read(self, rows: tf.Tensor) -> Row:
        """Reads rows, and casts them."""

        def cast(leaf: Any) -> Any:
            floats = leaf is not None and leaf.dtype.is_floating
            return tf.cast(leaf, self.dtype) if floats else leaf

        return tf.nest.map_structure(cast, self.source.read(rows))

    def label_range(self) -> tuple[int, int] | None:
        """As the source's."""
        return self.source.label_range()

    def _spec(self, leaf: Any) -> Any:
        if leaf is None or not leaf.dtype.is_floating:
            return leaf
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                leaf.shape, self.dtype, leaf.ragged_rank, leaf.row_splits_dtype
            )
        return type(leaf)(leaf.shape, self.dtype)


class MappedX(Source):
    """Applies a TensorFlow function to x as it is read.

    Images stay one byte per pixel in memory and become floats batch by batch.

    Args:
        source: A source with random access.
        function: From x ``[n, ...]`` to the new x of the same rows, each row by itself.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any]):
        self.source = source
        self.function = function

    def __len__(self) -> int:
        return len(self.source)

    @property
    def spec(self) -> Row:
        """The source's, with the function's x."""
        x, y, weight = self.source.spec
        batched = tf.nest.map_structure(
            lambda s: tf.TensorSpec([1, *s.shape], s.dtype), x
        )
        changed = tf.function(self.function).get_concrete_function(batched)
        row = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape[1:], s.dtype), changed.structured_outputs
        )
        return row, y, weight

    def read(self, rows: tf.Tensor) -> Row:
        """Reads rows and changes x."""
        x, y, weight = self.source.read(rows)
        return self.function(x), y, weight

    def label_range(self) -> tuple[int, int] | None:
        """As the source's."""
        return self.source.label_range()
