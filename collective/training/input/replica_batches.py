"""Whole batches for each replica: N successive ones are the global batch of N replicas.

Stacked, ``[N, rows, ...]``, they are shared like rows: each replica has one, and none at
the end of the data where fewer are left. For code that knows the rows of its batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input import leaves
from collective.training.input.data import is_array_data
from collective.training.input.distributed_datasets import original
from collective.training.input.source import Source


class Stack(NamedTuple):
    """What a step reads in place of a batch: several batches, one for each replica."""

    batches: Any


def stack_arguments(
    arguments: dict[str, Any], replicas: int
) -> list[keras.callbacks.Callback]:
    """Have a method of Keras read stacks of batches.

    Args:
        arguments: Of ``fit`` or ``evaluate``; changed.

    Returns:
        More callbacks for the call: they tell a ``PyDataset`` of epochs.

    Raises:
        UsageError: The data are rows.
    """
    data = keras_compat.data.adapter(
        _batches(arguments["x"]),
        arguments.get("class_weight"),
        bool(arguments.get("shuffle")),
    )
    arguments["x"] = stacked(data, replicas)
    if arguments.get("class_weight") is not None:
        arguments["class_weight"] = None
    validation = arguments.get("validation_data")
    if validation is not None and not isinstance(validation, tuple | list):
        read = keras_compat.data.adapter(_batches(validation))
        arguments["validation_data"] = stacked(read, replicas)
    return [
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: data.on_epoch_begin(),
            on_epoch_end=lambda epoch, logs: data.on_epoch_end(),
        )
    ]


def _batches(x: Any) -> Any:
    """Return data that are batches.

    Raises:
        UsageError: They are rows.
    """
    x = original(x)
    if is_array_data(x) or isinstance(x, Source):
        raise UsageError(
            "per_replica='batch' takes data that are batches, and these are rows",
            hint="x=tf.data.Dataset.from_tensor_slices((x, y)).batch(64, "
            "drop_remainder=True); or per_replica=True with arrays",
        )
    return x


def stacked(data: keras_compat.data.DataAdapter, replicas: int) -> tf.data.Dataset:
    """Return a data set of ``Stack``; batches of fewer rows than the first are left out.

    Args:
        data: Batches ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        replicas: How many make a stack; the last one may have fewer.
    """
    sized = data.get_tf_dataset().scan(tf.constant(-1, tf.int64), _is_whole)
    whole = sized.filter(lambda batch, is_whole: is_whole)
    stacks = whole.map(lambda batch, is_whole: Stack(batch)).batch(replicas)
    is_partial = data.has_partial_batch
    if data.num_batches is None or is_partial is None:
        return stacks
    count = data.num_batches - bool(is_partial)
    return stacks.apply(tf.data.experimental.assert_cardinality(-(-count // replicas)))


@tf.autograph.experimental.do_not_convert
def _is_whole(rows_of_first: Any, *batch: Any) -> Any:
    """Make a step of ``scan``: keep the first batch's rows, say if this one has as many."""
    element = batch[0] if len(batch) == 1 else batch
    rows = leaves.count_rows(leaves.first_leaf(keras_compat.data.unpack(element)[0]))
    rows = tf.cast(rows, tf.int64)
    first = tf.where(rows_of_first < 0, rows, rows_of_first)
    return first, (element, rows == first)


def first_of(stack: Any) -> Any:
    """Return the one batch of a replica: a tree of ``[1, ...]``, tensors or their specs."""

    def first(leaf: Any) -> Any:
        if isinstance(leaf, tf.TypeSpec):
            return tf.TensorSpec(leaf.shape[1:], leaf.dtype)
        return leaf[0]

    return tf.nest.map_structure(lambda t: None if t is None else first(t), stack)
