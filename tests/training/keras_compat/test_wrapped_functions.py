"""Functions that TensorFlow wraps and that read variables: keras.remat, tf.function, ..."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective import backends, training
from collective.errors import UsageError

pytestmark = pytest.mark.usefixtures("clean_keras")
ROWS = 40


class Remat(keras.layers.Layer):
    """One layer's activations are computed again."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(6, "tanh")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return x + keras.remat(self.inner)(x)


class Half(keras.layers.Layer):
    """Its gradient is half of the true one; it reads its weight outside of that, too."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(6, 6), initializer="orthogonal")

    def call(self, x):
        @tf.custom_gradient
        def function(x):
            def gradient(upstream, variables=None):
                with tf.GradientTape() as tape:
                    tape.watch([x, *variables])
                    again = tf.tanh(x @ self.kernel)
                sources = [x, *variables]
                found = tape.gradient(again, sources, output_gradients=upstream / 2)
                return found[0], found[1:]

            return tf.tanh(x @ self.kernel), gradient

        return function(x) + 0.1 * x @ self.kernel


class Wrapped(keras.Model):
    """Traces a part of itself, which a comparison and a step then share."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)

    def build(self, shape):
        self.inner.build(shape)
        self.last.build(shape)

    @tf.function
    def traced(self, x):
        return x + self.inner(x)

    def call(self, x):
        return self.last(self.traced(x))


class WrappedCall(Remat):
    """Is traced while the functional model is made."""

    @tf.function
    def call(self, x):
        return x + self.inner(x)


class Assigned(Half):
    """Assigns the weight first, as SpectralNormalization does."""

    def call(self, x):
        self.kernel.assign(self.kernel * 0.9)
        return super().call(x)


def make(layer, loss="mse"):
    keras.utils.set_random_seed(1)
    keras.config.set_floatx("float64")
    inputs = keras.Input((6,))
    if layer is Wrapped:
        model = Wrapped()
        model.build((None, 6))
        model.compile(keras.optimizers.Adam(0.01), loss)
        return model
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(layer()(inputs)))
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def data():
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(ROWS, 6)), numbers.random((ROWS, 1))


@pytest.mark.trains
@pytest.mark.parametrize("loss", ["mse", "dice"])
@pytest.mark.parametrize("layer", [Remat, Half, Wrapped, WrappedCall])
@pytest.mark.parametrize("backend", ["single", "tf-mirrored:2"])
def test_all_weights_have_their_gradients(backend, layer, loss, backends_by_name):
    stock = make(layer, loss)
    before = stock.get_weights()
    stock.fit(*data(), batch_size=9, epochs=2, verbose=0, shuffle=False)
    chosen = backends_by_name(backend)
    with chosen.scope():
        model = make(layer, loss)
    found = training.fit(
        model, data(), backend=chosen, global_batch_size=9,
        epochs=2, shuffle=False, verbose=0,
    )  # fmt: skip
    assert found.history["loss"]
    for old, wanted, got in zip(
        before, stock.get_weights(), model.get_weights(), strict=True
    ):
        assert not np.array_equal(old, wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "options", "why"),
    [(Assigned, {}, "has assigned it")],
)
def test_what_would_lose_a_gradient_is_refused(layer, options, why):
    with pytest.raises(UsageError, match=why):
        training.fit(
            make(layer), data(), backend=backends.get("single"),
            global_batch_size=9, epochs=1, verbose=0, **options,
        )  # fmt: skip
