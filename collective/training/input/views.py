"""Sources made of other sources, by a function of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.training.input.leaves import open_rows
from collective.training.input.source import Row, Source


class View(Source):
    """The rows of a source with random access, for subclasses to change."""

    def __init__(self, source: Source):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    @property
    def spec(self) -> Row:
        """``batch_spec`` without the axis of rows."""
        return tf.nest.map_structure(
            lambda s: None if s is None else s._unbatch(), self.batch_spec
        )

    @property
    def batch_spec(self) -> Row:
        """See ``Source``."""
        return self.source.batch_spec

    def read(self, rows: tf.Tensor) -> Row:
        """See ``Source``."""
        return self.source.read(rows)

    def label_range(self) -> tuple[int, int] | None:
        """See ``Source``."""
        return self.source.label_range()


class CastFloats(View):
    """A source with all floats in one dtype, as Keras gives arrays to a model.

    They are cast as they are read: an array on disk stays there.
    """

    def __init__(self, source: Source, dtype: str):
        super().__init__(source)
        self.dtype = tf.as_dtype(dtype)

    @property
    def is_needed(self) -> bool:
        """Return whether any part of a row has floats of another dtype."""
        return self.batch_spec != self.source.batch_spec

    @property
    def batch_spec(self) -> Row:
        """Return the source's, with the dtype."""

        def spec(leaf: Any) -> Any:
            if leaf is None or not leaf.dtype.is_floating:
                return leaf
            if isinstance(leaf, tf.RaggedTensorSpec):
                return tf.RaggedTensorSpec(
                    leaf.shape, self.dtype, leaf.ragged_rank, leaf.row_splits_dtype
                )
            return type(leaf)(leaf.shape, self.dtype)

        return tf.nest.map_structure(spec, self.source.batch_spec)

    def read(self, rows: tf.Tensor) -> Row:
        """Read rows, and cast them."""

        def cast(leaf: Any) -> Any:
            floats = leaf is not None and leaf.dtype.is_floating
            return tf.cast(leaf, self.dtype) if floats else leaf

        return tf.nest.map_structure(cast, self.source.read(rows))


class MappedX(View):
    """Applies a TensorFlow function to x ``[n, ...]``, row by row, as it is read.

    Images stay one byte per pixel in memory and become floats batch by batch.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any]):
        super().__init__(source)
        self.function = function

    @property
    def batch_spec(self) -> Row:
        """Return the source's, with the function's x."""
        x, y, weight = self.source.batch_spec
        traced = tf.function(self.function).get_concrete_function(x)
        return tf.nest.map_structure(open_rows, traced.structured_outputs), y, weight

    def read(self, rows: tf.Tensor) -> Row:
        """Read rows and change x."""
        x, y, weight = self.source.read(rows)
        return self.function(x), y, weight
