"""A user's own models and data, as ``--model`` and ``--data tests.own:NAME``."""

from __future__ import annotations

import os
import sys

import keras
import numpy as np

POISONED = 37  # the row, of 64, that is not finite


def few_outputs(input_shape):
    """Three outputs, whatever the number of classes."""
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential(layers, name="few_outputs")


def other_shape(classes):
    """Wants rows of five numbers."""
    layers = [keras.Input((5,)), keras.layers.Dense(classes)]
    return keras.Sequential(layers, name="other_shape")


def no_model():
    return "a string"


def poisoned():
    """One row holds an Inf, so one rank alone meets it."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 6)).astype("float32")
    x[POISONED, 2] = np.inf
    return x, rng.integers(0, 3, 64).astype("int32")


def two_layers(input_shape, classes):
    """Variables ``hidden/...`` and ``out/...``."""
    layers = [
        keras.Input(input_shape),
        keras.layers.Dense(4, activation="tanh", name="hidden"),
        keras.layers.Dense(classes, name="out"),
    ]
    return keras.Sequential(layers, name="two_layers")


def dies_under_native(input_shape, classes):
    """A model that ends its process without a word under one backend."""
    if "native" in sys.argv:
        print("about to die", flush=True)
        os._exit(7)
    layers = [keras.Input(input_shape), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(classes)], name="dies")
