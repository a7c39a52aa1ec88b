"""More models with their own ``train_step``: one network with different steps."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs.own_steps import (
    FEATURES,
    ROWS,
    Program,
    mlp,
    program,
    rows,
)


class Plain(keras.Model):
    """A network with ``call``, to subclass."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or mlp(FEATURES, 1)

    def call(self, x, training=None):
        return self.net(x, training=training)


@program
def clips_itself() -> Program:
    """Return a program that clips the batch's gradients in its own ``tf.function``."""

    class Clipping(Plain):
        @tf.function
        def gradients(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            return loss, tf.clip_by_global_norm(grads, 0.5)[0]

        def train_step(self, data):
            x, y = data
            loss, grads = self.gradients(x, y)
            self.optimizer.apply_gradients(
                zip(grads, self.trainable_variables, strict=True)
            )
            return {"error": loss}

    model = Clipping()
    model.compile(keras.optimizers.SGD(0.3), loss="mse")
    x, _, y = rows()
    return model, (x, 3 * y)


@program
def of_keras_guide() -> Program:
    """Return the program of Keras' guide, whose metrics' results are a dict."""

    class Guide(Plain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data):
            x, y = data
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, self(x, training=False))
            return {m.name: m.result() for m in self.metrics}

    model = Guide()
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    x, _, y = rows()
    return model, (x, y)


@program
def extends_keras() -> Program:
    """Return a program with ``super().train_step``, and an average of the weights."""

    class Averaging(Plain):
        def __init__(self):
            super().__init__()
            self.average = keras.models.clone_model(self.net)
            self.average.trainable = False

        def train_step(self, data):
            logs = super().train_step(data)
            pairs = zip(self.average.weights, self.net.weights, strict=True)
            for average, weight in pairs:
                average.assign(0.9 * average + 0.1 * weight)
            return logs

    model = Averaging()
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    x, _, y = rows()
    return model, (x, y)


@program
def masks_and_weights() -> Program:
    """Return a program with masks, whose denominators differ between replicas."""

    class Masked(Plain):
        def train_step(self, data):
            return super().train_step(data)

    net = keras.Sequential(
        [
            keras.Input((5, 2)),
            layers.Masking(),
            layers.Dense(4, activation="tanh"),
            layers.Dense(1),
        ]
    )
    model = Masked(net)
    model.compile(keras.optimizers.Adam(0.01), loss="mse", weighted_metrics=["mae"])
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 5, 2))
    for row in range(ROWS):
        x[row, 1 + row % 5 :] = 0
    return model, (x, rng.normal(size=(ROWS, 5, 1)), rng.uniform(size=(ROWS, 5)))


@program
def sums_and_means() -> Program:
    """Return a program with a loss that is summed over rows, and one with weights."""

    class Summing(Plain):
        def train_step(self, data):
            x, y = data
            total = keras.losses.MeanSquaredError(reduction="sum")
            mean = keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = 0.1 * total(y, y_pred) + mean(y, y_pred, 0.1 + ops.abs(x[:, 0]))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(grads, self.trainable_variables, strict=True)
            )
            return {"error": loss}

    model = Summing()
    model.compile(keras.optimizers.SGD(0.02))
    x, _, y = rows()
    return model, (x, y)


@program
def loss_scaling() -> Program:
    class Scaled(Plain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"error": loss}

    model = Scaled()
    inner = keras.optimizers.Adam(0.01)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, 64.0, 3), loss="mse")
    x, _, y = rows()
    return model, (x, y)


@program
def accumulates_itself() -> Program:
    """Return a program that adds up gradients, and applies them in every second step."""

    class Accumulating(Plain):
        def __init__(self):
            super().__init__()
            self.sums = [
                tf.Variable(tf.zeros(w.shape, w.dtype), trainable=False)
                for w in self.net.trainable_weights
            ]
            self.done = tf.Variable(0, trainable=False, dtype=tf.int64)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.net.trainable_weights
            for total, g in zip(self.sums, tape.gradient(loss, weights), strict=True):
                total.assign_add(g)
            self.done.assign_add(1)

            def apply():
                self.optimizer.apply([s / 2 for s in self.sums], weights)
                for total in self.sums:
                    total.assign(tf.zeros_like(total))
                return 0

            tf.cond(self.done % 2 == 0, apply, lambda: 0)
            return {"error": loss}

    model = Accumulating()
    model.compile(keras.optimizers.Adam(0.02), loss="mse")
    model.optimizer.build(model.net.trainable_weights)
    x, _, y = rows()
    return model, (x, y)


@program
def gradients_of_rows() -> Program:
    """Return a program that clips each row's gradient, as private learning does."""

    class Private(Plain):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                losses = ops.mean(ops.square(self(x, training=True) - y), axis=1)
            of_rows = tape.jacobian(losses, weights)
            flat = [ops.reshape(g, (ops.shape(g)[0], -1)) for g in of_rows]
            norms = ops.sqrt(sum(ops.sum(g**2, axis=1) for g in flat) + 1e-12)
            scale = ops.minimum(1.0, 0.3 / norms)
            grads = [
                ops.mean(
                    g * ops.reshape(scale, (-1, *[1] * (len(g.shape) - 1))), axis=0
                )
                for g in of_rows
            ]
            self.optimizer.apply(grads, weights)
            return {"error": ops.mean(losses)}

    model = Private()
    model.compile(keras.optimizers.Adam(0.01))
    x, _, y = rows()
    return model, (x, y)


@program
def updates_by_hand() -> Program:
    """Return a program without an optimizer, with state that follows the rows' mean."""

    class ByHand(Plain):
        def __init__(self):
            super().__init__()
            self.center = tf.Variable(tf.zeros([FEATURES], "float64"), trainable=False)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x - self.center, training=True)
                loss = ops.mean(ops.square(y_pred - y))
            weights = self.trainable_variables
            for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
                w.assign_sub(0.1 * g)
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
            return {"error": loss}

    model = ByHand()
    model.compile()
    x, _, y = rows()
    return model, (x, y)


class Regression(Plain):
    """Has a step whose parts subclasses replace by wrong ones."""

    def loss_of(self, y, y_pred):
        return ops.mean(ops.square(y - y_pred))

    def returned(self, loss, y):
        return {"error": loss}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return self.returned(loss, y)


def regression(kind: type[Regression]) -> Program:
    model = kind()
    model.compile(keras.optimizers.Adam(0.01))
    x, _, y = rows()
    return model, (x, y)


@program
def sum_by_hand() -> Program:
    class Summing(Regression):
        def loss_of(self, y, y_pred):
            return 0.1 * ops.sum(ops.square(y - y_pred))

    return regression(Summing)


@program
def vector_of_losses() -> Program:
    """Return a program with a loss for each row, and a mean, as Siamese networks have."""

    class Vector(Plain):
        def __init__(self):
            super().__init__()
            self.tracker = keras.metrics.Mean(name="loss")
            self.summed = keras.metrics.Mean(name="summed")
            self.other = keras.optimizers.SGD(0.05)

        @property
        def metrics(self):
            return [self.tracker, self.summed]

        def train_step(self, data):
            x, y = data
            of_rows = keras.losses.MeanSquaredError(reduction=None)
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                losses = of_rows(y, self(x, training=True))
            grads = tape.gradient(losses, weights)
            self.optimizer.apply_gradients(zip(grads, weights, strict=True))
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.abs(y - self(x, training=True)))
            grads = tape.gradient(loss, weights)
            self.other.apply_gradients(zip(grads, weights, strict=True))
            self.tracker.update_state(losses)
            self.summed.update_state(ops.sum(losses))
            return {m.name: m.result() for m in self.metrics}

    model = Vector()
    model.compile(keras.optimizers.SGD(0.02))
    x, _, y = rows()
    return model, (x, y)


@program
def counts_rows() -> Program:
    class Counting(Regression):
        def __init__(self):
            super().__init__()
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def returned(self, loss, y):
            self.seen.assign_add(ops.cast(ops.shape(y)[0], self.seen.dtype))
            return {"error": loss, "rows": ops.cast(ops.shape(y)[0], "float32")}

    return regression(Counting)


@program
def noise_and_dropout() -> Program:
    """Return a random program, which only the check compares, not the training."""

    class Noisy(Regression):
        def __init__(self, net):
            super().__init__(net)
            self.generator = keras.random.SeedGenerator(4)

        def loss_of(self, y, y_pred):
            noise = keras.random.normal(ops.shape(y), seed=self.generator)
            uniform = tf.random.uniform((tf.shape(y)[0], 1), 0, 2, dtype=y.dtype)
            return ops.mean(ops.square(y + 0.1 * noise - uniform * y_pred))

    net = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.Dropout(0.4),
            layers.Dense(1),
        ]
    )
    model = Noisy(net)
    model.compile(keras.optimizers.Adam(0.01))
    x, _, y = rows()
    return model, (x, y)


@program
def moving_average() -> Program:
    """Return a program with a moving average of its weights, as diffusion models have.

    It also counts its steps, and sums rows after the update.
    """

    class Averaging(Plain):
        def __init__(self):
            super().__init__()
            self.average = mlp(FEATURES, 1)
            self.average.trainable = False
            self.steps = self.add_weight(name="steps", trainable=False)
            self.rows = self.add_weight(name="rows", trainable=False)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.net.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            for mean, weight in zip(
                self.average.weights, self.net.weights, strict=True
            ):
                mean.assign(0.7 * mean + 0.3 * weight)
            self.steps.assign_add(1.0)
            self.rows.assign(0.5 * self.rows + ops.mean(x))
            return {"loss": loss}

    model = Averaging()
    model.compile(keras.optimizers.SGD(0.3), loss="mse")
    x, _, y = rows()
    return model, (x, y)
