"""A user's own models and data, as ``--model`` and ``--data tests.own:NAME``."""

from __future__ import annotations

import os
import sys

import keras
import numpy as np
import tensorflow as tf

from collective.environment import detect
from collective.errors import UsageError
from collective.training.input.arrays import Arrays
from collective.training.input.source import numpy_rows

POISONED = 37  # index of the row, of 64, that is not finite
UNREADABLE = 18  # index of the row, of 24, that cannot be read


def few_outputs(input_shape):
    """Return a model of three outputs for any number of classes."""
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential(layers, name="few_outputs")


def other_shape(classes):
    """Return a model that expects rows of five numbers."""
    layers = [keras.Input((5,)), keras.layers.Dense(classes)]
    return keras.Sequential(layers, name="other_shape")


def no_model():
    return "a string"


def poisoned():
    """Return rows of which one holds an Inf, so only one rank has it."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 6)).astype("float32")
    x[POISONED, 2] = np.inf
    return x, rng.integers(0, 3, 64).astype("int32")


class Unreadable(Arrays):
    """Rows, one of which cannot be read."""

    def read(self, rows):
        (rows,) = numpy_rows(self._read_all, rows, [tf.TensorSpec([], tf.int64)])
        return super().read(rows)

    def _read_all(self, rows):
        if UNREADABLE in rows:
            what = f"row {UNREADABLE} cannot be read"
            raise UsageError(what, hint="replace it", everywhere=False)
        return [rows]


def unreadable():
    """Return rows, one of which cannot be read; only one rank reads that."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(24, 4, 4, 3)).astype("float32")
    return Unreadable(x, rng.integers(0, 3, 24).astype("int32"))


def two_layers(input_shape, classes):
    """Return a model with variables ``hidden/...`` and ``out/...``."""
    layers = [
        keras.Input(input_shape),
        keras.layers.Dense(4, activation="tanh", name="hidden"),
        keras.layers.Dense(classes, name="out"),
    ]
    return keras.Sequential(layers, name="two_layers")


def dies_under_native(input_shape, classes):
    """Return a model that silently ends its process under one backend."""
    if "native" in sys.argv:
        print("about to die", flush=True)
        os._exit(7)
    layers = [keras.Input(input_shape), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(classes)], name="dies")


class Drifting(keras.optimizers.SGD):
    """Moves one weight too far in step 4, on the last of several ranks."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        place = detect()
        if place.rank == place.size - 1:
            wrong = keras.ops.cast(keras.ops.equal(self.iterations, 5), "float32")
            trainable_variables[-1].assign_add(wrong * [1e-3, 0, 0])


def drifting(input_shape, classes):
    """Return ``two_layers``, compiled with an optimizer that makes ranks differ."""
    model = two_layers(input_shape, classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Drifting(0.01), loss)
    return model


def finite():
    """Return rows as in ``poisoned``, all of them finite."""
    x, y = poisoned()
    return np.nan_to_num(x, posinf=0), y
