"""Calls of ``fit``, ``evaluate`` and ``predict`` that once differed from Keras'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

ROWS, BATCH, FEATURES, CLASSES = 44, 16, 5, 3


def numbers(labels: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, FEATURES))
    y = rng.integers(0, CLASSES, ROWS)
    return x, y if labels else np.eye(CLASSES)[y]


def network(
    *more, loss="mse", optimizer=None, kind=keras.Sequential, last="sigmoid", **settings
):
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), *more]
    net = keras.Sequential([*layers, keras.layers.Dense(CLASSES, last)])
    model = net if kind is keras.Sequential else kind(net.inputs, net.outputs)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **settings)
    return model


# --- values that are not sums over rows -----------------------------------------------


class Correlation(keras.metrics.Metric):
    """The mean over batches of a coefficient of all rows of a batch."""

    def __init__(self):
        super().__init__(name="correlation")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y, p, sample_weight=None):
        a, b = y[:, 0] - ops.mean(y[:, 0]), p[:, 0] - ops.mean(p[:, 0])
        size = ops.sqrt(ops.sum(a**2) * ops.sum(b**2)) + 1e-9
        self.total.assign_add(ops.sum(a * b) / size)
        self.batches.assign_add(1)

    def result(self):
        return self.total / self.batches


class Pairs(keras.metrics.Metric):
    """Compares ``(n,)`` with ``(n, 1)``, so every row with all, as in Keras' guide."""

    def __init__(self):
        super().__init__(name="pairs")
        self.hits = self.add_variable((), "zeros", name="hits")

    def update_state(self, y, p, sample_weight=None):
        chosen = ops.reshape(ops.argmax(p, axis=1), (-1, 1))
        same = ops.cast(y, "int32") == ops.cast(chosen, "int32")
        self.hits.assign_add(ops.sum(ops.cast(same, "float64")))

    def result(self):
        return self.hits


class Largest(Pairs):
    def update_state(self, y, p, sample_weight=None):
        self.hits.assign(ops.maximum(self.hits, ops.max(p)))


class Center(keras.layers.Layer):
    """Centers by the whole batch, also in prediction, as some models normalize."""

    def call(self, x, training=False):
        return x if training else x - ops.mean(x, axis=0, keepdims=True)


class Table(keras.layers.Layer):
    """Looks rows up with ``ops.take``."""

    def build(self, shape):
        self.table = self.add_weight((4, FEATURES), name="table")

    def call(self, x):
        number = ops.cast(ops.clip(x[:, 0] + 2, 0, 3), "int32")
        return x + ops.take(self.table, number, axis=0)


class Augmented(keras.Model):
    """Is built at its first call, and so is a part that is not an attribute of it.

    Its ``call`` has no ``training``, so the layers of the part get none, and draw.
    """

    def __init__(self):
        super().__init__()
        noise = keras.Sequential([keras.layers.RandomContrast(0.5), Center()])
        self.augment = lambda x: noise(x)

    def build(self, shape):
        self.last = keras.layers.Dense(CLASSES)
        super().build(shape)

    def call(self, x):
        return self.last(self.augment(x[:, None, :, None])[:, 0, :, 0])


class AugmentedInTraining(Augmented):
    """Is the same, but its part gets ``training=True``."""

    def call(self, x, training=None):
        return super().call(x)


class LargestError(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"largest": ops.max(ops.abs(y - self(x, training=False)))}


class WithoutCall(keras.Model):
    """Consists of other models; only its steps are called."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]

    def test_step(self, data):
        x, y = data
        first, second = self.parts
        return {"error": ops.mean((first(x)[:, :2] * second(x) - y[:, :2]) ** 2)}


def without_call():
    model = WithoutCall()
    model.compile()
    return model


def over_positives(y, p):
    """Return a loss that is divided by the number of valid labels; others are ignored."""
    counts = ops.cast(y != -100, p.dtype)
    of_rows = keras.losses.sparse_categorical_crossentropy(ops.where(y < 0, 0, y), p)
    return ops.sum(of_rows * counts) / (ops.sum(counts) + 1e-9)


def annealed(weight):
    return lambda y, p: ops.mean((y - p) ** 2, axis=-1) + weight * ops.std(p)


def ignoring():
    x, y = numbers(labels=True)
    y[: ROWS // 2 : 2] = -100
    return x, y


def batches():
    x, y = numbers()
    words = np.array(["a", "b", "c", "d"])[np.arange(ROWS) % 4][:, None]
    return tf.data.Dataset.from_tensor_slices(({"x": x, "word": words}, y)).batch(BATCH)


def generator():
    x, y = ignoring()
    while True:
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def filtered():
    """Return a data set whose length only a pass over the data shows."""
    rows = tf.data.Dataset.from_tensor_slices(numbers())
    return (rows.filter(lambda x, y: x[0] > -1).batch(BATCH),)


def with_masks():
    return network(keras.layers.Dropout(0.4), optimizer=keras.optimizers.Adam(0.01))


def of_words():
    x = keras.Input((FEATURES,), name="x")
    word = keras.Input((1,), name="word", dtype="string")
    look = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    both = keras.layers.Concatenate()([x, look(word)])
    out = keras.layers.Dense(CLASSES, "sigmoid")(both)
    model = keras.Model([x, word], out)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.Dice())
    return model


def of_table():
    x = keras.Input((FEATURES,))
    model = keras.Model(x, keras.layers.Dense(CLASSES)(Table()(x)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def normalized():
    """Return a model with batch statistics, and with look-ups that Adam squares singly."""
    x = keras.Input((FEATURES,))
    words = ops.cast(ops.clip(x + 2, 0, 3), "int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(4, 3)(words))
    hidden = keras.layers.BatchNormalization()(hidden)
    model = keras.Model(x, keras.layers.Dense(CLASSES, "softmax")(hidden))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def with_annealed():
    weight = keras.Variable(0.0, dtype="float64")
    model = network(loss=annealed(weight))
    model.raise_weight = lambda: weight.assign(1.0)
    return model


def augmented(kind):
    model = kind()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def with_step_of_its_own():
    """Return a model whose step is not in a class, but an attribute, with twice the loss."""
    model = network(kind=keras.Model)

    def train_step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = 2 * ops.mean((y - model(x, training=True)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"twice": loss}

    model.train_step = train_step
    return model


@dataclass(frozen=True)
class Program:
    """A program: its model, its data, and the call that is compared.

    Attributes:
        raises: Whether a callback raises a weight after the first epoch.
    """

    make: Callable[[], keras.Model]
    data: Callable[[], Any] = numbers
    call: str = "fit"
    words: dict[str, Any] = field(default_factory=dict)
    raises: bool = False


PROGRAMS = {
    "BatchNorm, Embedding and Adam": Program(normalized, lambda: numbers(labels=True)),
    "strings and Dice": Program(of_words, lambda: (batches(),)),
    "labels to ignore, by a generator": Program(
        lambda: network(loss=over_positives, last="softmax"),
        lambda: (generator(),),
        words={"steps_per_epoch": 3},
    ),
    "data of unknown length": Program(with_masks, filtered),
    "fewer data than steps": Program(
        with_masks, filtered, words={"steps_per_epoch": 5}
    ),
    "labels to ignore": Program(
        lambda: network(loss=over_positives, last="softmax"), ignoring
    ),
    "pairs": Program(
        lambda: network(loss="sparse_categorical_crossentropy", metrics=[Pairs()]),
        lambda: numbers(labels=True),
    ),
    "a weight that starts at zero": Program(with_annealed, raises=True),
    "a table of its own": Program(of_table),
    "a train_step of the model itself": Program(
        with_step_of_its_own, lambda: [part[:32] for part in numbers()]
    ),
    "a part built in the step": Program(lambda: augmented(Augmented)),
    "a part built in training": Program(lambda: augmented(AugmentedInTraining)),
    "a part built, evaluated": Program(
        lambda: augmented(AugmentedInTraining), call="evaluate"
    ),
    "Dice": Program(lambda: network(loss=keras.losses.Dice()), call="evaluate"),
    "correlation": Program(lambda: network(metrics=[Correlation()]), call="evaluate"),
    "a maximum": Program(lambda: network(metrics=[Largest()]), call="evaluate"),
    "strings, evaluated": Program(of_words, lambda: (batches(),), "evaluate"),
    "centred predictions": Program(lambda: network(Center()), call="predict"),
    "centred evaluation": Program(lambda: network(Center()), call="evaluate"),
    "an own test_step": Program(lambda: network(kind=LargestError), call="evaluate"),
    "an own test_step and no call": Program(without_call, call="evaluate"),
    "centred, batches": Program(
        lambda: network(Center()),
        lambda: (tf.data.Dataset.from_tensor_slices(numbers()[0]).batch(BATCH),),
        "predict",
    ),
}
