"""Synthetic images, a function of the row number alone.

For benchmarks without a disk, and for trials. Only eight patterns are in memory, and a
batch costs three passes over its pixels. The classes can be learned.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from collective.training.input.permutation import derive, hash64
from collective.training.input.source import Row, Source, numpy_rows

_PATTERNS = 8
# Standard deviation of a pixel's offset; well below the distance of two patterns.
_NOISE = 0.1


class Synthetic(Source):
    """Rows of floats around 0, with labels.

    Args:
        classes: Number of classes, int32 labels from 0 up.
        seed: Each seed has its own data.
        first: Number of the first row: test rows continue where training rows end.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        rows: int,
        *,
        seed: int = 0,
        first: int = 0,
    ):
        self.shape = shape
        self.classes = classes
        self.first = first
        self.key = derive(seed)
        self._rows = rows
        count = _PATTERNS * int(np.prod(shape))
        numbers = np.arange(count, dtype=np.uint64) + np.uint64(derive(self.key, 1))
        self._patterns = (2 * _uniform(numbers) - 1).reshape(_PATTERNS, *shape)

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """Float32 rows, int32 labels, no weights."""
        return tf.TensorSpec(self.shape, tf.float32), tf.TensorSpec([], tf.int32), None

    def read(self, rows: tf.Tensor) -> Row:
        """Compute rows: a pattern times the class' level, plus the row's offset.

        The arithmetic is element-wise only, so a row has the same bits whichever rows
        are read with it; a matrix product does not guarantee that.
        """
        whole, real = (tf.TensorSpec([], t) for t in (tf.int32, tf.float32))
        label, pattern, level, offset = numpy_rows(
            self._parameters, rows, [whole, whole, real, real]
        )
        ones = [1] * len(self.shape)
        x = tf.gather(self._patterns, pattern)
        x = x * tf.reshape(level, [-1, *ones]) + tf.reshape(offset, [-1, *ones])
        return x, label, None

    def label_range(self) -> tuple[int, int] | None:
        """Return bounds that labels have by construction."""
        return 0, self.classes - 1

    def _parameters(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return label, pattern, level and offset of each row."""
        numbers = rows.astype(np.uint64) + np.uint64(self.first)
        draws = [
            hash64(hash64(numbers) + np.uint64(derive(self.key, 2, i)))
            for i in range(3)
        ]
        label = (draws[0] % np.uint64(self.classes)).astype(np.int32)
        levels = -(-self.classes // _PATTERNS)
        # Levels from 1/2 to 3/2, each row a little off its own.
        level = 0.5 + (label // _PATTERNS + 0.3 + 0.4 * _uniform(draws[1])) / levels
        offset = _NOISE * np.sqrt(12) * (_uniform(draws[2]) - 0.5)
        return [
            label,
            label % _PATTERNS,
            level.astype(np.float32),
            offset.astype(np.float32),
        ]


def _uniform(numbers: np.ndarray) -> np.ndarray:
    """Return float32 in [0, 1) with 24 random bits, of uint64."""
    return (hash64(numbers) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
