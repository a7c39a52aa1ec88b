"""Layers that couple rows."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

FEATURES, OUTPUTS = 5, 3


def rows(count, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, FEATURES)), rng.normal(size=(count, OUTPUTS))


class Experts(keras.layers.Layer):
    """A mixture with the Switch Transformer's balance term, which ``add_loss`` couples."""

    def build(self, shape):
        self.gate = keras.layers.Dense(4, activation="softmax")
        self.experts = [keras.layers.Dense(6) for _ in range(4)]
        for layer in (self.gate, *self.experts):
            layer.build(shape)

    def call(self, x):
        shares = self.gate(x)
        chosen = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
        self.add_loss(0.4 * ops.sum(ops.mean(shares, 0) * ops.mean(chosen, 0)))
        made = ops.stack([expert(x) for expert in self.experts], 1)
        return ops.sum(made * shares[:, :, None], 1)


class Renormalized(keras.layers.Layer):
    """Batch renormalization, coupled by its output and by its state."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")
        self.scale = self.add_weight(
            shape=shape[1:], initializer="ones", trainable=False, name="scale"
        )

    def call(self, x, training=False):
        if not training:
            return (x - self.mean) / self.scale
        mean, scale = ops.mean(x, 0), ops.sqrt(ops.var(x, 0) + 1e-3)
        r = ops.stop_gradient(ops.clip(scale / self.scale, 0.3, 3))
        d = ops.stop_gradient(ops.clip((mean - self.mean) / self.scale, -5, 5))
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.scale.assign(0.9 * self.scale + 0.1 * scale)
        return (x - mean) / scale * r + d


class Centres(keras.layers.Layer):
    """Center loss: its state counts the rows of each class."""

    def build(self, shape):
        shape = (OUTPUTS, shape[-1])
        self.centres = self.add_weight(shape=shape, trainable=False, name="centres")

    def call(self, x, training=False):
        of_class = ops.one_hot(ops.argmax(x[:, :OUTPUTS], -1), OUTPUTS, dtype=x.dtype)
        apart = x - ops.matmul(of_class, ops.stop_gradient(self.centres))
        self.add_loss(0.1 * ops.mean(ops.square(apart)))
        total = ops.matmul(ops.transpose(of_class), ops.stop_gradient(x))
        count = ops.sum(of_class, 0)[:, None]
        if training:
            moved = 0.5 * (total - count * self.centres) / (count + 1)
            self.centres.assign(self.centres + moved)
        return x


class Graph(keras.layers.Layer):
    """Attention over the rows of a batch, with weights."""

    def build(self, shape):
        self.dense = keras.layers.Dense(6)
        self.dense.build(shape)

    def call(self, x):
        near = ops.softmax(ops.matmul(x, ops.transpose(x)), -1)
        return ops.matmul(near, self.dense(x))


class Sums(keras.layers.Layer):
    """Adds a sum over rows to the loss."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Noise(Graph):
    def call(self, x):
        return super().call(x + keras.random.normal(ops.shape(x), dtype=x.dtype))


def network(kind):
    def make():
        keras.utils.set_random_seed(7)
        regularizer = keras.regularizers.L2(0.01)
        layers = [
            keras.Input([FEATURES]),
            keras.layers.Dense(6, "tanh", kernel_regularizer=regularizer),
            kind(name="coupled"),
            keras.layers.Dense(OUTPUTS),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        return model

    return make


CASES = {
    kind.__name__.lower(): (lambda kind=kind: network(kind), rows)
    for kind in (Experts, Renormalized, Centres, Graph, Sums, Noise)
}
