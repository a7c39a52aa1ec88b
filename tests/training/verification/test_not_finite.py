"""The check of the step: values that are not finite, and devices that round more."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective import backends
from collective.training.input.pipeline import Input
from collective.training.prepare import prepare
from collective.training.verification import differences, verify_step

pytestmark = pytest.mark.usefixtures("clean_keras", "own_cache")
ROWS, FEATURES = 24, 6


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(5)


@pytest.fixture
def logged(monkeypatch, caplog):
    monkeypatch.setattr(collective.log.log, "propagate", True)
    return caplog


def verified(*layers, y=None, validation=None):
    x = np.random.default_rng(3).normal(size=(ROWS, FEATURES)).astype("float32")
    y = x[:, :1] if y is None else y
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    backend = backends.get("single")
    inputs = Input((x, y), 16)
    tested = None if validation is None else Input((x, validation), 16)
    prepared = prepare(model, backend, inputs.spec, micro_batch_rows=8)
    return verify_step(prepared, backend, inputs, tested, pieces=3)


def test_a_loss_that_is_not_finite_is_named(logged):
    y = np.zeros((ROWS, 1), "float32")
    y[0] = np.nan
    verified(keras.layers.Dense(3), y=y)
    assert "rows of the first batches is nan" in logged.text
    assert "random" not in logged.text


def test_a_validation_that_is_not_finite_leaves_the_rest(logged):
    verified(keras.layers.Dense(3), validation=np.full((ROWS, 1), np.nan, "float32"))
    assert "equals Keras' own, verified" in logged.text


def test_some_gradients_that_are_not_finite_are_equal():
    pairs = [
        differences.Pair("gradient", "a", np.array([np.inf, 1.0]), [np.inf, 1.0]),
        differences.Pair("gradient", "b", np.array([1.0, 2.0]), [1.0, 2.0]),
        differences.Pair("gradient", "c", np.array([1.0, 2.0]), [1.0, 2.1]),
    ]
    assert [d.name for d in differences.differing(pairs, 1e-4)] == ["c"]


@keras.saving.register_keras_serializable()
class Rounds(keras.layers.Layer):
    """As a device that has another kernel for each size: rounds by the number of rows."""

    def call(self, x):
        off = tf.where(tf.shape(x)[0] % 2 == 0, 1e-3, 0.0)
        return x * (1 + off * tf.stop_gradient(tf.sign(tf.sin(1e3 * x))))


class RoundsAsGpus(keras.layers.Layer):
    """As a GPU rounds while TensorFloat-32 is allowed."""

    def call(self, x):
        if not tf.config.experimental.tensor_float_32_execution_enabled():
            return x
        return Rounds().call(x)


def test_gpus_compare_without_tensorfloat32():
    assert tf.config.experimental.tensor_float_32_execution_enabled()
    assert not verified(RoundsAsGpus(), keras.layers.Dense(3)).whole_layers
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def test_what_a_processor_computes_with_decides(monkeypatch):
    assert verified(Rounds(), keras.layers.Dense(3)).whole_layers
    monkeypatch.setenv("TF_SET_ONEDNN_FPMATH_MODE", "BF16")
    assert not verified(Rounds(), keras.layers.Dense(3)).whole_layers


def test_what_is_wrong_is_found_nevertheless(monkeypatch):
    class Center(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0, keepdims=True)

    monkeypatch.setenv("TF_SET_ONEDNN_FPMATH_MODE", "BF16")
    assert verified(Center()).whole_layers
