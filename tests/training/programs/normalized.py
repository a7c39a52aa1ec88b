"""Batch normalization with statistics over the rows of all replicas."""

from __future__ import annotations

import keras
import numpy as np

SIZE = 6


def images(count, seed=3):
    """Return images far from zero: mean square minus squared mean would lose all digits."""
    rng = np.random.default_rng(seed)
    x = 50 + rng.normal(size=(count, SIZE, SIZE, 2)).astype(keras.config.floatx())
    return x, rng.integers(0, 3, count).astype("int32")


def centred(count, seed=3):
    x, y = images(count, seed)
    return x - 50, y


def compiled(inputs, hidden, **settings):
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        **({"loss": loss, "metrics": ["accuracy"]} | settings),
    )
    return model


def convolutional(**options):
    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input([SIZE, SIZE, 2])
        hidden = keras.layers.BatchNormalization(**options)(inputs)
        hidden = keras.layers.Conv2D(4, 3, use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization(momentum=0.8, **options)(hidden)
        hidden = keras.layers.ReLU()(hidden)
        hidden = keras.layers.BatchNormalization(axis=1, **options)(hidden)
        return compiled(inputs, keras.layers.GlobalAveragePooling2D()(hidden))

    return make


def renormalized():
    return convolutional(renorm=True)()


def nested():
    """Return a model within a model, and a layer that is called twice."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([SIZE, SIZE, 2])
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
    flat = layers.Flatten()(inputs)
    again = layers.BatchNormalization()
    return compiled(inputs, inner(again(again(flat))))


def masked():
    """Return a model whose statistics do not count positions with token 0."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([4], dtype="int32")
    vectors = keras.layers.Embedding(6, 5, mask_zero=True)(inputs)
    hidden = keras.layers.BatchNormalization()(vectors)
    return compiled(inputs, keras.layers.GlobalAveragePooling1D()(hidden))


def tokens(count, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, (count, 4)).astype("int32")
    x[:, 0] = 1
    return x, rng.integers(0, 3, count).astype("int32")


def correlated(y, predicted):
    y = keras.ops.one_hot(keras.ops.cast(keras.ops.ravel(y), "int32"), 3)
    y = keras.ops.cast(y, predicted.dtype)
    mean = keras.ops.mean(predicted * y, axis=0)
    return keras.ops.sum(keras.ops.square(mean)) - keras.ops.mean(predicted * y)


def coupling_loss():
    """Return a model with statistics and a loss of the whole batch."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([SIZE, SIZE, 2])
    hidden = keras.layers.BatchNormalization()(keras.layers.Flatten()(inputs))
    return compiled(inputs, hidden, loss=correlated, metrics=[])


CASES = {
    "convolutional": (lambda: convolutional(), images),
    "renormalized": (lambda: renormalized, centred),
    "nested": (lambda: nested, images),
    "masked": (lambda: masked, tokens),
    "coupling-loss": (lambda: coupling_loss, images),
}
