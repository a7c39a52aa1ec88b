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
