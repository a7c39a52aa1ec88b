"""``run_eagerly=True``: every rank computes the result of one process on whole batches."""

from __future__ import annotations

import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import CollectiveError, UsageError
from tests import launch
from tests.training.small import assert_ranks_agree, gather, on_rank_zero

HERE = "tests/training/test_eager.py"
BATCH = 8  # 21 rows make two batches, and one of five

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture
def backend(backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(os.environ.get(launch.BACKEND, "single"))


def rows():
    rng = np.random.default_rng(3)
    return rng.normal(size=(21, 4)), rng.normal(size=(21, 1))


class Sees(keras.layers.Layer):
    """Python code that a graph cannot have: it sees the numbers of all rows."""

    def call(self, x):
        if not tf.executing_eagerly():
            return x
        order = np.argsort(x.numpy()[:, 0])  # of all rows of the batch
        return x + 0.01 * tf.constant(order[:, None], x.dtype)


class OwnStep(keras.Model):
    """Has a loss of pairs of rows, a draw of NumPy, and a draw without a seed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean("loss")

    def train_step(self, data):
        x, y = data
        noise = np.random.normal() + tf.random.normal([], dtype="float64")
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            pairs = predicted - keras.ops.transpose(predicted)
            loss = keras.ops.mean((predicted - y) ** 2) + 0.1 * keras.ops.mean(pairs**2)
            loss *= 1 + 0.1 * float(noise.numpy())
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "noise": noise}

    def test_step(self, data):
        x, y = data
        self.loss_tracker.update_state(keras.ops.max(self(x) - y))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def layers():
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization()(Sees()(inputs))
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(5, "tanh")(x))
    return inputs, keras.layers.Dense(1)(x)


def made(kind):
    keras.utils.set_random_seed(5)
    model = kind(*layers())
    words = {} if kind is OwnStep else {"loss": "mse", "metrics": ["mae"]}
    model.compile(keras.optimizers.Adam(0.05), run_eagerly=True, **words)
    return model


def trained(kind, fit, evaluate, predict):
    model = made(kind)
    x, y = rows()
    words = {"batch_size": BATCH, "verbose": 0}
    history = fit(
        model, x, y, epochs=2, shuffle=False, validation_data=(x[:5], y[:5]), **words
    )
    found = [np.array(value) for value in history.history.values()]
    found.append(np.array(evaluate(model, x, y, **words)))
    found.append(predict(model, x, **words))
    return sorted(history.history), [*found, *map(np.array, model.weights)]


@pytest.mark.on_ranks
@pytest.mark.parametrize("kind", [keras.Model, OwnStep])
def test_trains_what_keras_trains(kind, backend, caplog):
    stock = keras.Model.fit, keras.Model.evaluate, keras.Model.predict
    names, wanted = on_rank_zero(backend, lambda: trained(kind, *stock))
    ours = [
        lambda *args, call=call, **more: call(*args, backend=backend, **more)
        for call in (collective.fit, collective.evaluate, collective.predict)
    ]
    with caplog.at_level(logging.WARNING):
        known, found = trained(kind, *ours)
    assert known == names
    for got, value in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13)
    said = sum("each of 2 ranks computes whole" in m for m in caplog.messages)
    assert said <= 1 and (backend.size != 2 or said == (backend.rank == 0))


@pytest.mark.on_ranks
def test_all_draw_what_rank_zero_draws(backend):
    """The generators of each rank are in another state."""
    model = made(OwnStep)
    np.random.seed(backend.rank)
    tf.random.set_seed(backend.rank)
    words = {"backend": backend, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    result = collective.fit(model, *rows(), **words)
    assert_ranks_agree(backend, result)
    assert len({noise for noise, *_ in gather(backend, result.history["noise"])}) == 1


@pytest.mark.on_ranks
def test_what_is_not_finite_is_not_applied(backend):
    model = made(keras.Model)
    x, y = rows()
    y[20] = np.nan  # a row of the last rank
    words = {"backend": backend, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    with pytest.raises(CollectiveError, match="step 2: the loss or its gradient"):
        collective.fit(model, x, y, terminate_on_nan=True, **words)
    assert all(np.isfinite(np.array(w)).all() for w in model.trainable_variables)


@pytest.mark.on_ranks
def test_ranks_with_gpus_apply_the_gradients_of_rank_zero(backend, pretended_gpu):
    """Each rank has a pretended GPU that rounds differently."""

    class Rounds(keras.layers.Layer):
        @tf.custom_gradient
        def call(self, x):
            return x, lambda upstream: upstream * (1 + 1e-9 * backend.rank)

    model = keras.Sequential([keras.layers.Dense(3), Rounds(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    words = {"backend": backend, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    assert_ranks_agree(backend, collective.fit(model, *rows(), **words))
    kernel = np.array(model.layers[0].kernel)
    for other in gather(backend, kernel):
        np.testing.assert_array_equal(other, kernel)


@pytest.mark.on_ranks
def test_what_needs_a_sum_is_refused(backend, tmp_path):
    words = {"backend": backend, "verbose": 0}
    with pytest.raises(UsageError, match="no sum, which a ledger needs"):
        collective.fit(made(keras.Model), *rows(), ledger=tmp_path / "rows", **words)
    if backend.size > 1:
        with pytest.raises(UsageError, match="per_replica or a communication hook"):
            collective.fit(made(keras.Model), *rows(), per_replica=True, **words)


@pytest.mark.launches
@pytest.mark.matrix
def test_on_three_ranks(tmp_path):
    ended = launch.launch("native", 3, [HERE], tmp_path, seconds=300)
    assert ended.passed(skips=True) == 6
