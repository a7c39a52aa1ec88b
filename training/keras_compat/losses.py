"""Keras' losses as a sum and a weight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

Reduce = Callable[[tf.Tensor, Any, Any, str], tf.Tensor]


@contextlib.contextmanager
def replace_reduction(reduce: Reduce) -> Iterator[None]:
    """Inside, replaces the mean at the end of every Keras loss.

    Args:
        reduce: Takes ``(values, sample_weight, mask, reduction)`` of one loss, with the
            values per row, and returns the scalar that Keras uses as its mean.
    """

    def patched(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> tf.Tensor:
        def to(value: Any) -> Any:
            return None if value is None else keras.ops.convert_to_tensor(value, dtype)

        return reduce(to(values), to(sample_weight), mask, reduction)

    with mock.patch.object(keras_loss, "reduce_weighted_values", patched):
        yield


def same_rank(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives values and weights the same rank, by Keras' own rule."""
    return keras_loss.squeeze_or_expand_to_same_rank(values, weight)


def compiled_loss(model: keras.Model, y: Any, y_pred: Any, weight: Any) -> Any:
    """The weighted sum of the compiled losses; None where none is compiled."""
    compiled = model._compile_loss
    return None if compiled is None else compiled(y, y_pred, weight)


def custom_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, weight: Any, added: list[Any]
) -> tf.Tensor:
    """The value of a user's own ``compute_loss``, given the added losses."""
    model._losses_override = added
    try:
        return model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
        )
    finally:
        model._losses_override = []


@contextlib.contextmanager
def whole_losses() -> Iterator[None]:
    """Inside, a loss is that of its rows also in the scope of a ``tf.distribute`` strategy.

    There, Keras divides a loss by the number of replicas, and multiplies what it shows.
    """

    def unchanged(value: Any) -> Any:
        return value

    with (
        mock.patch.object(keras_loss, "scale_loss_for_distribution", unchanged),
        mock.patch.object(keras_loss, "unscale_loss_for_distribution", unchanged),
    ):
        yield
