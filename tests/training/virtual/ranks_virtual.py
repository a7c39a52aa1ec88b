"""A training with virtual replicas; rank 0 prints the SHA-256 of its state.

    collectiverun -np 3 python tests/training/virtual/ranks_virtual.py native cnn 5 10

Arguments: backend (``tf-mirrored:3`` for three devices), models (``cnn,lstm``), virtual
replicas, steps, and options of ``fit`` to switch on.
Every global batch has 22 rows, except the last of an epoch, which has 3: with more than three
virtual replicas, some pieces of it are empty. All rows differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from collective import backends, training

ROWS, BATCH = 91, 22


class OwnStep(keras.Model):
    """Clips and scales its gradients itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, y_pred := self(x, training=True))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        self.optimizer.apply([0.9 * g for g in gradients], variables)
        return self.compute_metrics(x, y, y_pred, None) | {"loss": loss}


class HardStep(keras.Model):
    """Learns only from the worse half of the rows, which needs the losses of all."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            worst = tf.math.top_k(losses, (tf.shape(losses)[0] + 1) // 2).values
            loss = tf.reduce_mean(worst)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        logs = {"loss": loss, "largest": tf.reduce_max(losses)}
        return self.compute_metrics(x, y, logits, None) | logs


class LoopStep(keras.Model):
    """Sums over the rows in a loop and in a branch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            near = tf.stop_gradient(logits)

            def towards(i: tf.Tensor, center: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                weights = tf.exp(-tf.reduce_sum((near - center) ** 2, 1, True))
                return i + 1, tf.reduce_sum(weights * near, 0) / tf.reduce_sum(weights)

            start = (tf.constant(0), tf.zeros([logits.shape[1]], logits.dtype))
            _, center = tf.while_loop(lambda i, _: i < 3, towards, start)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            loss = tf.reduce_mean(losses) + 0.1 * tf.reduce_mean((logits - center) ** 2)
        scale = tf.cond(
            loss > 1.5,
            lambda: tf.exp(-tf.math.reduce_std(near)),
            lambda: tf.reduce_mean(tf.sigmoid(near)),
        )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([scale * g for g in gradients], self.trainable_variables)
        logs = {"loss": loss, "scale": scale}
        return self.compute_metrics(x, y, logits, None) | logs


def compiled(
    inputs: keras.KerasTensor,
    features: keras.KerasTensor,
    kind: type[keras.Model] = keras.Model,
) -> keras.Model:
    model = kind(inputs, layers.Dense(4)(features))
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def cnn(kind: type[keras.Model] = keras.Model) -> keras.Model:
    """Return a model with batch statistics and masks, large enough to travel in shards."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3)(inputs)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, activation="relu")(layers.Dropout(0.3)(x))
    return compiled(inputs, layers.Dense(48, "relu")(layers.Flatten()(x)), kind)


def own_step() -> keras.Model:
    """Return a model with its own ``train_step``."""
    return cnn(OwnStep)


def hard() -> keras.Model:
    """Return a model with a ``train_step`` that gathers."""
    return cnn(HardStep)


def loop() -> keras.Model:
    """Return a model with a ``train_step`` that exchanges in a loop and in a branch."""
    return cnn(LoopStep)


def transformer() -> keras.Model:
    """Return a model with embeddings, whose rows a batch looks up several times."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    attended = layers.MultiHeadAttention(2, 8, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.2)(attended))
    x = layers.LayerNormalization()(x + layers.Dense(16, "gelu")(x))
    return compiled(inputs, layers.GlobalAveragePooling1D()(x))


def lstm() -> keras.Model:
    """Return a model with a mask, for sequences of different lengths."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(inputs)
    return compiled(inputs, layers.LSTM(16, dropout=0.2)(x))


def couples(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Return a loss of the whole batch, from the spread of its predictions."""
    loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
    return ops.mean(loss) + ops.mean(ops.square(ops.std(y_pred, axis=0) - 1.0))


def coupled() -> keras.Model:
    """Return a transformer with a loss of the whole batch; Adam gets single look-ups."""
    model = transformer()
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5), couples, metrics=["accuracy"]
    )
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "cnn": cnn,
    "transformer": transformer,
    "lstm": lstm,
    "own_step": own_step,
    "hard": hard,
    "loop": loop,
    "coupled": coupled,
}


def rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images, or sequences of tokens that zeros fill up; and labels."""
    rng = np.random.default_rng(3)
    if name in ("cnn", "own_step", "hard", "loop"):
        x = rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
        return x, np.argmax(x[:, 2, 3:7, 0], axis=1).astype("int32")
    lengths = rng.integers(1, 13, size=ROWS)
    tokens = rng.integers(1, 20, size=(ROWS, 12)).astype("int32")
    tokens[np.arange(12) >= lengths[:, None]] = 0
    return tokens, tokens[:, 0] % 4


def train(
    backend: str | backends.Backend, name: str, virtual: int, steps: int, **more: object
) -> training.Result:
    """Train a model of ``MODELS``."""
    keras.utils.set_random_seed(7)
    return training.fit(
        MODELS[name],
        *rows(name),
        backend=backend,
        batch_size=BATCH,
        steps=steps,
        seed=5,
        verbose=0,
        virtual_replicas=virtual,
        **more,
    )


def said(name: str, result: training.Result) -> str:
    """Return the line to compare."""
    return f"{name}: sha256 {result.state_sha256} loss {result.losses[-1]:.9g}"


def main(backend: str, names: str, virtual: str, steps: str) -> None:
    kind, _, devices = backend.partition(":")
    options = backends.Options(threads=1, devices=int(devices) if devices else None)
    made = backends.get(kind, options)
    for name in names.split(","):
        keras.utils.clear_session(free_memory=False)
        result = train(made, name, int(virtual), int(steps))
        if made.rank == 0:
            print(said(name, result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
