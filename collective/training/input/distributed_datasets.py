"""Whole batches of the distributed data sets that our strategies have made."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from collective.errors import UsageError

# For each distributed data set, the data set of whole batches from which it was made.
_originals: weakref.WeakKeyDictionary[Any, tf.data.Dataset] = (
    weakref.WeakKeyDictionary()
)


def note_original(distributed: Any, dataset: tf.data.Dataset) -> None:
    """Remember the data set of whole batches from which a distributed one was made."""
    _originals[distributed] = dataset


def original(data: Any) -> Any:
    """Return the whole batches of a distributed data set of ours; else the data.

    Raises:
        UsageError: A function made it: each rank has batches of its own.
    """
    if not isinstance(data, tf.distribute.DistributedDataset):
        return data
    if data in _originals:
        return _originals[data]
    raise UsageError(
        "fit, evaluate and predict take the batches of all replicas, and this "
        "distributed data set has the batches of one rank: it was made by "
        "distribute_datasets_from_function, or by another strategy",
        hint="pass the tf.data.Dataset itself, batched by the global batch size",
    )
