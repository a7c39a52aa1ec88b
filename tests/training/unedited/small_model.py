"""The model of scripts that grow or are resumed, as text: a script imports no test."""

from __future__ import annotations

MAKE = """\
def make():
    layers = [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3)]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model
"""
