"""Text as the input of a model trains as in stock Keras, on any number of ranks."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from tests import launch
from tests.training.small import on_rank_zero

HERE = "tests/training/test_text_inputs.py"
BATCH = 8  # 21 rows make two batches, and one of five

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture
def backend(backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(os.environ.get(launch.BACKEND, "single"))


def rows():
    rng = np.random.default_rng(3)
    words = np.array(["good", "bad", "fine", "awful", "ok", "über"])
    text = [" ".join(rng.choice(words, rng.integers(0, 6))) for _ in range(21)]
    return np.array(text), rng.choice(["left", "right"], (21, 1)), rng.normal(size=21)


def vectorized():
    """Return a model that splits words and looks them up."""
    words = keras.layers.TextVectorization(output_sequence_length=4)
    words.adapt(rows()[0])
    inputs = keras.Input((), dtype="string")
    x = keras.layers.Embedding(words.vocabulary_size(), 3)(words(inputs))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def looked_up():
    """Return a model for one word in each row."""
    inputs = keras.Input((1,), dtype="string")
    look = keras.layers.StringLookup(vocabulary=["left"], output_mode="one_hot")
    x = keras.layers.Dense(3, "tanh")(look(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def trained(make, x, fit, evaluate, predict):
    keras.utils.set_random_seed(5)
    model = make()
    model.compile(keras.optimizers.Adam(0.05), "mse")
    y = rows()[2]
    history = fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    loss = evaluate(model, x, y, batch_size=BATCH, verbose=0)
    predicted = predict(model, x, batch_size=BATCH, verbose=0)
    weights = [np.array(w) for w in model.trainable_variables]
    return [np.array(history.history["loss"]), np.array(loss), predicted, *weights]


@pytest.mark.on_ranks
@pytest.mark.parametrize("kind", [vectorized, looked_up])
def test_trains_what_keras_trains(kind, backend):
    x = rows()[0 if kind is vectorized else 1]
    stock = keras.Model.fit, keras.Model.evaluate, keras.Model.predict
    wanted = on_rank_zero(backend, lambda: trained(kind, tf.constant(x), *stock))
    calls = collective.fit, collective.evaluate, collective.predict
    ours = [
        lambda *args, call=call, **more: call(*args, backend=backend, **more)
        for call in calls
    ]
    for got, value in zip(trained(kind, x, *ours), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13)


@pytest.mark.launches
@pytest.mark.matrix
def test_on_three_ranks(tmp_path):
    ended = launch.launch("native", 3, [HERE], tmp_path, seconds=300)
    assert ended.passed(skips=True) == 2
