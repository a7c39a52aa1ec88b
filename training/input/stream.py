"""Rows of a ``tf.data.Dataset``: any pipeline with a known length.

A data set has no row numbers. Its rows come in its own order and every process runs
the whole pipeline, keeping its own share of each global batch. Arrays, TFRecords and
ImageFolder read only what a process needs: prefer them where they fit.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.source import Row, Source, checksum, row_spec

_FINGERPRINT_ROWS = 8


class Stream(Source):
    """The elements of a data set, one row each, in the order it gives them.

    What is yours to see to:

    - Elements are rows, not batches. A batched data set cannot be told from rows with
      one more dimension; it shows as a model that does not fit the data.
    - The order must be the same on every rank: seed your shuffle. ``fingerprint``
      tells when it is not.
    - Each epoch is one more pass over the data set. To resume in the middle of one
      exactly, shuffle with ``reshuffle_each_iteration=False``.

    Args:
        dataset: Finite, of known cardinality, elements ``(x, y)`` or
            ``(x, y, sample_weight)`` of static shapes.

    Raises:
        UsageError: If the length is unknown or infinite, or elements are not rows.
    """

    random_access = False

    def __init__(self, dataset: tf.data.Dataset):
        cardinality = int(dataset.cardinality())
        if cardinality < 0:
            unknown = cardinality == tf.data.UNKNOWN_CARDINALITY
            raise UsageError(
                f"the tf.data.Dataset is of {'unknown' if unknown else 'infinite'} "
                "length: epochs and shares cannot be counted",
                hint="apply tf.data.experimental.assert_cardinality(n), n being the "
                "number of rows"
                + ("" if unknown else "; and leave repeat() out, epochs repeat it"),
            )
        self._spec = row_spec(dataset.element_spec, "the tf.data.Dataset")
        self._rows = cardinality
        self._dataset = dataset
        # Here and not when asked: each pass moves a seeded shuffle on, so all ranks
        # must make the same number of passes, whether or not they compare.
        self._fingerprint = checksum(tuple(dataset.take(_FINGERPRINT_ROWS)))

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one element."""
        return self._spec

    def read(self, rows: tf.Tensor) -> Row:
        """Not possible: a data set cannot go to a row."""
        raise NotImplementedError("a tf.data.Dataset has no row numbers; use in_order")

    def in_order(
        self, batch_size: int, first_step: int, last_step: int
    ) -> tf.data.Dataset:
        """Global batches in the data set's order, each epoch a new pass."""
        epoch = self._dataset.batch(batch_size)
        skipped = first_step % -(-self._rows // batch_size)
        batches = epoch.skip(skipped).concatenate(epoch.repeat())
        return batches.take(last_step - first_step).map(_as_row)

    def fingerprint(self) -> int:
        """A 32-bit checksum of the first rows; equal on all ranks if all is well."""
        return self._fingerprint


@tf.autograph.experimental.do_not_convert
def _as_row(*element: Any) -> Row:
    """``(x, y, sample_weight)`` of the elements of a batched data set."""
    # tf.data spreads a tuple over the arguments, but hands over a named one as it is.
    x, y, *weight = element if len(element) > 1 else element[0]
    return x, y, weight[0] if weight else None
