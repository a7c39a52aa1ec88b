"""What a checkpoint must know of data that come in batches, before Keras reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.input import leaves
from collective.training.input.pipeline import Batch
from collective.training.process import host_random


@dataclass(frozen=True)
class BatchesPlan:
    """What a checkpoint knows of such batches."""

    batches_per_epoch: int | None  # None: one pass over the data


@dataclass(frozen=True)
class ReadyBatches:
    """The batches of a data set, a ``PyDataset`` or a generator.

    Attributes:
        spec: ``Batch`` of type specs, with an open number of rows.
        plan: What a checkpoint compares.
    """

    spec: Batch
    plan: BatchesPlan

    @classmethod
    def of(cls, x: Any, steps_per_epoch: int | None) -> tuple[ReadyBatches, Any]:
        """Return the description of data, and the data to read in their place.

        Of a generator, whose first batch is read, these are the same batches.
        """
        with host_random.unchanged():
            data = keras_compat.data.adapter(x)
            element = data.get_tf_dataset().element_spec
        read = keras_compat.data.restored(data, x)
        return cls(spec_of(element), BatchesPlan(steps_per_epoch)), read


def spec_of(element: Any) -> Batch:
    """Return the specification of batches, with an open number of rows.

    Args:
        element: Type specs of what a data set yields.
    """
    x, y, weight = (
        None if part is None else keras.tree.map_structure(leaves.open_rows, part)
        for part in keras_compat.data.unpack(element)
    )
    return Batch(x, y, weight, tf.TensorSpec([], tf.int64))
