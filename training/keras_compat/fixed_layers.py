"""Layers whose result depends on chance, or on which rows come together, made to rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf


@contextlib.contextmanager
def fixed_randomness() -> Iterator[list[Any]]:
    """Inside, ``keras.random`` gives the same number for every row and draws nothing.

    Dropout keeps all; a layer that adds noise adds a constant.

    Yields:
        The seeds that were asked for, a list that grows.
    """
    random = keras.src.backend.random
    seeds: list[Any] = []

    def fixed(value: Any) -> Any:
        def function(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
            seeds.append(seed)
            return value(*args, **kwargs)

        return function

    def full(shape: Any, value: Any, dtype: Any) -> tf.Tensor:
        return tf.fill(shape, tf.cast(value, dtype or keras.config.floatx()))

    def normal(
        shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None
    ) -> Any:
        return full(shape, mean + 0.5 * stddev, dtype)

    def uniform(
        shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None
    ) -> Any:
        return full(shape, minval + 0.4 * (maxval - minval), dtype)

    def beta(shape: Any, alpha: Any, beta: Any, dtype: Any = None) -> Any:
        return full(shape, 1.0, dtype) * tf.cast(
            alpha / (alpha + beta), dtype or keras.config.floatx()
        )

    values = {
        "normal": normal,
        "truncated_normal": normal,
        "uniform": uniform,
        "randint": lambda shape, minval, maxval, dtype="int32": full(
            shape, minval, dtype
        ),
        "categorical": lambda logits, num_samples, dtype="int64": tf.repeat(
            tf.argmax(logits, -1)[:, None], num_samples, 1
        ),
        "dropout": lambda inputs, rate, noise_shape=None: tf.convert_to_tensor(inputs),
        "shuffle": lambda x, axis=0: tf.convert_to_tensor(x),
        "gamma": lambda shape, alpha, dtype=None: full(shape, 1.0, dtype) * alpha,
        "binomial": lambda shape, counts, probabilities, dtype=None: (
            full(shape, 1.0, dtype) * tf.round(counts * probabilities)
        ),
        "beta": beta,
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(random, name, fixed(value)))
        yield seeds


@contextlib.contextmanager
def moving_statistics(active: bool) -> Iterator[list[str]]:
    """Inside, BatchNormalization uses its moving statistics in training, too.

    Args:
        active: Whether it does; otherwise nothing changes.

    Yields:
        The names of the layers that would have used those of their replica's rows, a
        list that grows.
    """
    layer = keras.layers.BatchNormalization
    plain = layer.call
    names: list[str] = []

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        synchronized = getattr(self, "synchronized", False)
        if training and self.trainable and active and not synchronized:
            names.append(self.name)
        training = training and not active
        return plain(self, inputs, training=training, mask=mask)

    with mock.patch.object(layer, "call", call):
        yield names
