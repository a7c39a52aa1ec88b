"""Models with their own ``train_step``, in the style of the Keras guides.

Each program is a function that returns a compiled model and its rows ``(x, y)``. Noise is part
of the rows, so that every way to train has the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, FEATURES, LATENT = 22, 4, 3
Program = tuple[keras.Model, tuple[Any, Any]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def rows(seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, noise and targets; all rows differ, and widely in size."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.3, 2, ROWS)[:, None]
    x = scale * rng.normal(size=(ROWS, FEATURES))
    return x, rng.normal(size=(ROWS, LATENT)), np.sin(x[:, :1]) + 0.1 * x[:, 1:2]


def mlp(inputs: int, outputs: int, name: str | None = None) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(6, activation="tanh"),
            layers.Dense(outputs),
        ],
        name=name,
    )


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = mlp(FEATURES, 1, "discriminator")
        self.generator = mlp(LATENT, FEATURES, "generator")
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, data):
        (real, noise), _ = data
        batch_size = ops.shape(real)[0]
        fake = self.generator(noise)
        combined = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate(
            [ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0
        )
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        grads = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))

        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), predictions)
        weights = self.generator.trainable_weights
        grads = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {
            "d_loss": self.d_loss_tracker.result(),
            "g_loss": self.g_loss_tracker.result(),
        }


@program
def gan() -> Program:
    model = GAN()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    x, noise, y = rows()
    return model, ((x, noise), y)


@program
def vae() -> Program:
    class VAE(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = mlp(FEATURES, 2 * LATENT)
            self.decoder = mlp(LATENT, FEATURES)
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.kl_loss_tracker]

        def train_step(self, data):
            (x, noise), _ = data
            with tf.GradientTape() as tape:
                z_mean, z_log_var = ops.split(self.encoder(x), 2, axis=1)
                z = z_mean + ops.exp(0.5 * z_log_var) * noise
                reconstruction = self.decoder(z)
                fit = ops.mean(ops.sum(ops.square(x - reconstruction), axis=1))
                kl = 1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var)
                kl = ops.mean(ops.sum(-0.5 * kl, axis=1))
                total = fit + kl
            grads = tape.gradient(total, self.trainable_weights)
            self.optimizer.apply_gradients(
                zip(grads, self.trainable_weights, strict=True)
            )
            self.total_loss_tracker.update_state(total)
            self.kl_loss_tracker.update_state(kl)
            # These are not the metrics' names: Keras shows the result of the last step.
            return {
                "loss": self.total_loss_tracker.result(),
                "kl_loss": self.kl_loss_tracker.result(),
                "fit": fit,
            }

    model = VAE()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    x, noise, y = rows()
    return model, ((x, noise), y)


@program
def distillation() -> Program:
    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.teacher = mlp(FEATURES, 1, "teacher")
            self.student = mlp(FEATURES, 1, "student")
            self.teacher.trainable = False
            self.distillation = keras.losses.MeanSquaredError()

        def call(self, x):
            return self.student(x)

        def train_step(self, data):
            x, y = data
            taught = self.teacher(x, training=False)
            with tf.GradientTape() as tape:
                predictions = self.student(x, training=True)
                loss = 0.3 * self.compute_loss(x=x, y=y, y_pred=predictions)
                loss += 0.7 * self.distillation(taught, predictions)
            weights = self.student.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"distilled": loss, **self.compute_metrics(x, y, predictions)}

    model = Distiller()
    model.compile(keras.optimizers.RMSprop(0.01), loss="mae", metrics=["mse"])
    x, _, y = rows()
    return model, (x, y)


class WGANGP(keras.Model):
    def __init__(self, critic_steps=3):
        super().__init__()
        self.critic, self.generator = mlp(FEATURES, 1), mlp(LATENT, FEATURES)
        self.critic_steps = critic_steps

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, real, fake, alpha):
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            predictions = self.critic(interpolated, training=True)
        gradients = tape.gradient(predictions, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data):
        (real, noise), _ = data
        for step in range(self.critic_steps):
            alpha = 0.5 + 0.4 * ops.sin(noise[:, :1] + step)
            with tf.GradientTape() as tape:
                fake = self.generator(noise + 0.1 * step, training=True)
                d_cost = ops.mean(self.critic(fake)) - ops.mean(self.critic(real))
                penalty = self.gradient_penalty(real, fake, alpha)
                d_loss = d_cost + 10.0 * penalty
            weights = self.critic.trainable_variables
            grads = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.critic(self.generator(noise, training=True)))
        weights = self.generator.trainable_variables
        grads = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


@program
def wgan_gp() -> Program:
    model = WGANGP()
    model.compile(keras.optimizers.Adam(0.005, beta_1=0.5), keras.optimizers.Adam(0.01))
    x, noise, y = rows()
    return model, ((x, noise), y)


@program
def two_frequencies() -> Program:
    """Return a program whose second optimizer takes part in every third step."""

    class Alternating(GAN):
        def __init__(self):
            super().__init__()
            self.done = self.add_weight(
                shape=(), dtype="int64", initializer="zeros", trainable=False
            )

        def train_step(self, data):
            (real, noise), _ = data
            with tf.GradientTape() as tape:
                d_loss = ops.mean(ops.square(self.discriminator(real) - 1.0))
                fake = self.discriminator(self.generator(noise))
                d_loss += ops.mean(ops.square(fake))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

            def train_generator():
                with tf.GradientTape() as tape:
                    fake = self.discriminator(self.generator(noise))
                    g_loss = ops.mean(ops.square(fake - 1.0))
                weights = self.generator.trainable_weights
                self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
                return g_loss

            zero = ops.zeros((), real.dtype)
            g_loss = tf.cond(self.done.value % 3 == 1, train_generator, lambda: zero)
            self.done.assign_add(1)
            self.d_loss_tracker.update_state(d_loss)
            self.g_loss_tracker.update_state(g_loss)
            return {m.name: m.result() for m in self.metrics}

    model = Alternating()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), None)
    model.g_optimizer.build(model.generator.trainable_weights)
    x, noise, y = rows()
    return model, ((x, noise), y)


@program
def own_metrics() -> Program:
    """Return a program with metrics of rows, of numbers, the user's, and a gradient norm."""

    class Hits(keras.metrics.Metric):
        def __init__(self, name="hits"):
            super().__init__(name=name)
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y, y_pred, sample_weight=None):
            close = ops.cast(ops.abs(y - y_pred) < 0.5, self.dtype)
            self.total.assign_add(ops.sum(close))

        def result(self):
            return ops.multiply(self.total, 1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = mlp(FEATURES, 1)
            self.hits = Hits()
            self.mae = keras.metrics.MeanAbsoluteError(name="mae")
            self.norm = keras.metrics.Mean(name="norm")

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred, weight)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(grads, self.trainable_variables, strict=True)
            )
            self.hits.update_state(y, y_pred)
            self.mae.update_state(y, y_pred, sample_weight=weight)
            self.norm.update_state(tf.linalg.global_norm(grads))
            self._loss_tracker.update_state(loss)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            self._loss_tracker.update_state(self.compute_loss(x, y, y_pred))
            self.hits.update_state(y, y_pred)
            self.mae.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics if m.name != "norm"}

    model = Model()
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    x, _, y = rows()
    return model, (x, y, 0.5 + np.arange(ROWS) % 3)
