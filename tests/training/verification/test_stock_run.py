"""``verify``: the first steps of a training compared with Keras' own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import UsageError
from collective.fit_options import Setting
from collective.training.verification import stock_run
from tests import launch
from tests.training.small import NAMES

ROWS, FEATURES = 23, 6
pytestmark = pytest.mark.usefixtures("clean_keras")
on_ranks = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")
alone = pytest.mark.skipif(launch.launched(), reason="of one process")


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(3)


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAMES[0])


@pytest.fixture
def recorded(monkeypatch):
    """Return the ``Step``s of the last report, on rank 0."""
    found = []
    show = stock_run.stock_run_table.show

    def recording(steps, *rest, **more):
        found[:] = steps
        show(steps, *rest, **more)

    monkeypatch.setattr(stock_run.stock_run_table, "show", recording)
    return found


def network(*more, optimizer="adam"):
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), *more]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, x[:, :1] ** 2


def trained(model, backend="single", verify="run:4", x=None, y=None, **more):
    if x is None:
        x, y = data()
    if y is not None:
        more.setdefault("batch_size", 8)
    fitted = dict(verbose=0, backend=backend, verify=verify, epochs=2, check_every=0)
    return collective.fit(model, x, y, **fitted | more)


class Clips(keras.callbacks.Callback):
    """Changes weights and the learning rate between steps."""

    def on_train_batch_end(self, batch, logs=None):
        for weight in self.model.trainable_weights:
            weight.assign(keras.ops.clip(weight, -0.2, 0.2))
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)


@alone
def test_one_process_equals_keras(recorded, capsys):
    model = network(keras.layers.Dropout(0.3), keras.layers.BatchNormalization())
    trained(model, callbacks=[Clips()])
    assert [step.rows for step in recorded] == [8, 8, 7, 8]
    assert max(step.weights for step in recorded) < 1e-5
    assert {step.loss <= 1e-5 for step in recorded} == {True}
    printed = capsys.readouterr().err
    assert "equal to rounding" in printed and "dense/kernel" in printed


@alone
def test_it_leaves_the_training_as_it_is():
    weights = []
    for verify in (False, "run"):
        keras.utils.set_random_seed(3)
        model = network(keras.layers.Dropout(0.3))
        trained(model, verify=verify)
        drawn = tf.random.uniform([2]).numpy(), np.random.rand(), model.get_weights()
        weights.append(drawn)
    tf.nest.map_structure(np.testing.assert_array_equal, *weights)


@alone
def test_a_shorter_training_is_shown(recorded):
    trained(network(), verify="run", epochs=1)
    assert len(recorded) == 3


@alone
def test_words():
    single = collective.backends.get("single")
    assert stock_run.steps_beside("run", single) == stock_run.STEPS
    assert stock_run.steps_beside("run:7", single) == 7
    assert stock_run.steps_beside(True, single) == stock_run.STEPS
    assert stock_run.steps_beside(False, single) == 0
    for wrong in ("runs", "run:0", "run:x"):
        with pytest.raises(UsageError, match="neither"):
            stock_run.steps_beside(wrong, single)
    given = map(Setting.of, ["verify=run", "accumulate=4"])
    assert [(each.name, each.value) for each in given] == [
        ("verify", "run"),
        ("accumulate", 4),
    ]
    with pytest.raises(UsageError, match="not a value"):
        Setting.of("accumulate=four")


@alone
def test_the_environment_asks_for_it(recorded, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_VERIFY", "run:2")
    trained(network(), verify=True)
    assert len(recorded) == 2


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@on_ranks
@pytest.mark.parametrize("kind", ["arrays", "data set", "own step"])
def test_replicas_equal_keras(backend, recorded, kind):
    model = network(keras.layers.Dropout(0.3))
    x, y = data()
    if kind == "own step":
        model = OwnStep(model.inputs, model.outputs)
        model.compile("adam", "mse")
    elif kind == "data set":
        x, y = tf.data.Dataset.from_tensor_slices((x, y)).batch(8), None
    trained(model, backend, x=x, y=y)
    if backend.rank == 0:
        assert [step.rows for step in recorded] == [8, 8, 7, 8]
        assert max(step.weights for step in recorded) < 1e-5
        assert max(step.loss for step in recorded) < 1e-5


@on_ranks
def test_what_differs_is_shown(backend, recorded):
    model = network(keras.layers.BatchNormalization())
    trained(model, backend, per_replica=True)
    if backend.rank == 0:
        assert recorded[0].weights > 1e-4
        assert any(v > 1e-3 for v in recorded[0].tensors.values())
