"""Rows of a ``tf.data.Dataset``: any pipeline with a known length.

A data set has no row numbers. Every process runs the whole pipeline, in its order, and
keeps its own share of each global batch. Of arrays a process reads only what it needs:
prefer them where possible.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.leaves import checksum
from collective.training.input.source import Row, Source, explain, row_spec

_FIRST_ROWS = 32


class Stream(Source):
    """The elements of a data set, one row each, in its order.

    The user must take care of three things:

    - Elements are rows, not batches. A batched data set looks like rows with one more
      dimension; the model then does not fit the data.
    - The order must be the same on every rank: shuffle with a seed. ``fingerprint``
      detects some differences.
    - Each epoch is one more pass over the data set. To resume exactly within an epoch,
      shuffle with ``reshuffle_each_iteration=False``.

    Args:
        dataset: Finite, of known cardinality, elements ``(x, y)`` or
            ``(x, y, sample_weight)`` of static shapes.

    Raises:
        UsageError: The length is unknown or infinite, or elements are not rows.
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
        # Computed here, on every rank: each pass advances a seeded shuffle, so all ranks
        # must make the same number of passes.
        try:
            for batch in dataset.take(_FIRST_ROWS).batch(_FIRST_ROWS):
                self.preview = _as_row(batch)
        except tf.errors.OpError as error:
            raise explain(error) or error from error
        self._fingerprint = int(checksum(self.preview))

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one element."""
        return self._spec

    def read(self, rows: tf.Tensor) -> Row:
        """Raise NotImplementedError: a data set has no random access."""
        raise NotImplementedError("a tf.data.Dataset has no row numbers; use in_order")

    def in_order(
        self, batch_size: int, first_step: int, last_step: int
    ) -> tf.data.Dataset:
        """Return global batches in the data set's order, each epoch a new pass."""
        epoch = self._dataset.batch(batch_size)
        skipped = first_step % -(-self._rows // batch_size)
        batches = epoch.skip(skipped).concatenate(epoch.repeat())
        return batches.take(last_step - first_step).map(_as_row)

    def fingerprint(self) -> int:
        """Return a checksum of the first rows; must be equal on all ranks."""
        return self._fingerprint


@tf.autograph.experimental.do_not_convert
def _as_row(*element: Any) -> Row:
    """Return ``(x, y, sample_weight)`` of the elements of a batched data set."""
    # tf.data unpacks a tuple into arguments, but passes a NamedTuple as one argument.
    x, y, *weight = element if len(element) > 1 else element[0]
    return x, y, weight[0] if weight else None
