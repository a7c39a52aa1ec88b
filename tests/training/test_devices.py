"""Several replicas in one process train as stock Keras, and leave Keras unchanged."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops_v2

from collective import fit
from tests.training import pairs

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]

#: Objects of which a training replaces attributes.
REPLACED = (
    keras.layers.Layer,
    keras.layers.BatchNormalization,
    keras.metrics.Mean,
    keras.optimizers.LossScaleOptimizer,
    keras.Variable,
    BaseOptimizer,
    keras_loss,
    seed_generator,
    tf.GradientTape,
    tf.distribute.ReplicaContext,
    polymorphic_function.Function,
    gen_random_ops,
    gen_stateless_random_ops_v2,
)
QUICK = ("coupled normalized", "own_step normalized")
OTHERS = (
    "coupled",
    "look_ups",
    "normalized",
    "own_step",
    "coupled accumulate",
    "coupled look_ups",
    "coupled loss_scale",
    "coupled checkpoint",
    "look_ups accumulate",
    "own_step look_ups",
    "own_step accumulate",
    "own_step loss_scale",
    "own_step checkpoint",
    "own_step batches",
    "own_step ledger",
)


def attributes() -> list[dict[str, object]]:
    """Return all attributes except those that Python makes at their first use."""
    return [
        {name: value for name, value in vars(owner).items() if name[:2] != "__"}
        | {"__call__": vars(owner).get("__call__")}
        for owner in REPLACED
    ]


@pytest.mark.parametrize(
    "name", ["tf-mirrored:2", pytest.param("tf-mirrored:3", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(
    "features",
    [*QUICK, *(pytest.param(f, marks=pytest.mark.matrix) for f in OTHERS)],
)
def test_trains_what_keras_trains_and_leaves_it_alone(
    features, name, backends_by_name, tmp_path
):
    keras.config.set_floatx("float64")
    backend, before = backends_by_name(name), attributes()
    assert pairs.differences(set(features.split()), backend, tmp_path) == []
    for owner, was, now in zip(REPLACED, before, attributes(), strict=True):
        changed = [n for n in {*was, *now} if was.get(n) is not now.get(n)]
        assert changed == [], owner
    assert pairs.differences(set(), backend, tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize("features", ["coupled", "look_ups", "normalized"])
def test_one_copy_of_the_variables(features, backends_by_name, tmp_path):
    keras.config.set_floatx("float64")
    backend = backends_by_name("tf-central-storage:2")
    assert pairs.differences({features}, backend, tmp_path) == []


class AddsMean(keras.layers.Layer):
    """Adds a loss that Keras divides by the replicas of a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = keras.losses.MeanSquaredError()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(self.loss(tf.zeros_like(x), x))
        return x


def test_layers_keep_the_losses_of_each_replica(backends_by_name):
    """Replicas meet in the batch normalization, after a layer that adds a loss."""
    keras.config.set_floatx("float64")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 5)), rng.normal(size=(23, 2))

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [
            keras.Input((5,)),
            keras.layers.Dense(4, activity_regularizer="l2"),
            keras.layers.BatchNormalization(),
            AddsMean(),
            keras.layers.Dense(2, kernel_regularizer="l2"),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    stock = make()
    wanted = stock.fit(x, y, **settings).history["loss"]
    backend = backends_by_name("tf-mirrored:2")
    with backend.scope():
        ours = make()
    settings |= {"backend": backend}
    got = fit(ours, x, y, **settings).history["loss"]
    np.testing.assert_allclose(got, wanted, rtol=1e-10)
    for mine, theirs in zip(ours.weights, stock.weights, strict=True):
        np.testing.assert_allclose(_array(mine), _array(theirs), rtol=1e-9, atol=1e-12)


def test_callbacks_read_predict_and_evaluate_as_on_one_device(backends_by_name):
    x = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    y = x[:, :2]
    seen: list[list[Any]] = [[], []]

    def train(seen: list[Any], **settings: object) -> None:
        def look(epoch: int, logs: dict[str, float]) -> None:
            seen.append(model.predict(x[:1], verbose=0))
            seen.append(model.evaluate(x[:1], y[:1], verbose=0))
            seen.append(float(model.optimizer.learning_rate))

        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        callback = keras.callbacks.LambdaCallback(on_epoch_end=look)
        settings |= {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        run = keras.Model.fit if "backend" not in settings else fit
        run(model, x, y, callbacks=[callback], **settings)

    train(seen[0])
    backend = backends_by_name("tf-mirrored:2")
    with backend.scope():
        train(seen[1], backend=backend)
    for mine, theirs in zip(*seen, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def _array(variable: keras.Variable) -> np.ndarray:
    return tf.convert_to_tensor(variable.value).numpy()
