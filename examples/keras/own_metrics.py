"""Metrics of the user's own: a class with variables, one inside a layer, a function."""

import sys

import keras
import numpy as np
from keras import layers, ops


class Hits(keras.metrics.Metric):
    """Counts rows whose prediction is within a tolerance of the target."""

    def __init__(self, tolerance, name="hits", **kwargs):
        super().__init__(name=name, **kwargs)
        self.tolerance = tolerance
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        near = ops.abs(y_true - y_pred) < self.tolerance
        self.count.assign_add(ops.sum(ops.cast(near, self.dtype)))

    def result(self):
        return self.count


class Explained(keras.metrics.Metric):
    """The share of the variance of the target that the model explains."""

    def __init__(self, name="explained", **kwargs):
        super().__init__(name=name, **kwargs)
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.squares = self.add_weight(name="squares", initializer="zeros")
        self.errors = self.add_weight(name="errors", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, self.dtype)
        self.rows.assign_add(ops.cast(ops.shape(y_true)[0], self.dtype))
        self.total.assign_add(ops.sum(y_true))
        self.squares.assign_add(ops.sum(ops.square(y_true)))
        self.errors.assign_add(ops.sum(ops.square(y_true - y_pred)))

    def result(self):
        variance = self.squares - ops.square(self.total) / self.rows
        return 1 - self.errors / variance


@keras.saving.register_keras_serializable("examples")
class Watched(layers.Layer):
    """Returns its input, and keeps the mean share of zeros in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sparsity = keras.metrics.Mean(name="sparsity")

    def call(self, inputs):
        self.sparsity.update_state(ops.cast(inputs == 0, "float32"))
        return inputs


def largest_error(y_true, y_pred):
    """Return the largest error of the outputs of each row."""
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(379, 7)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(7, 2))).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((7,)),
            layers.Dense(20, activation="relu"),
            Watched(),
            layers.Dense(2),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        "mse",
        metrics=[Hits(0.3), Explained(), largest_error],
    )
    history = model.fit(
        x[:310],
        y[:310],
        batch_size=28,
        epochs=4,
        shuffle=False,
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    results = model.evaluate(x[310:], y[310:], verbose=0, return_dict=True)
    for name, value in results.items():
        print(f"test_{name}: {value:.9g}")
    if len(sys.argv) > 1:
        model.save_weights(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
