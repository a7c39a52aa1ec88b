"""Models that couple the rows of a batch: rank 0 computes whole batches, by option."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import collective
from collective.errors import UsageError
from collective.training.whole_batch import run
from tests import launch
from tests.training.small import NAMES, on_rank_zero

HERE = "tests/training/test_whole_batch.py"
ROWS, FEATURES = 23, 5
pytestmark = pytest.mark.usefixtures("clean_keras")
on_ranks = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")


class Center(keras.layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Graph(keras.layers.Layer):
    """Passes messages between the rows of a batch."""

    def call(self, x):
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


class Raises(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("of the callback")


def made(*layers):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Dense(4), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def data():
    x = np.random.default_rng(3).normal(size=(ROWS, FEATURES)).astype("float32")
    return x, x[:, :1]


def outcome(model, backend=None):
    stops = keras.callbacks.EarlyStopping("loss", patience=1)
    words = dict(batch_size=8, verbose=0)
    ours = dict(backend=backend, whole_batch=True) if backend else {}
    source = collective if backend else keras.Model
    x, y = data()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    found = [
        source.fit(model, x, y, epochs=3, callbacks=[stops], **words, **ours).history,
        model.history.epoch,
        source.evaluate(model, batches, verbose=0, **ours),
        source.predict(model, x, **words, **ours),
        stops.best_epoch,
        np.random.rand(),
        keras.random.uniform((2,)),
    ]
    variables = [*model.variables, *model.optimizer.variables]
    return [*found, *map(np.asarray, variables)]


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAMES[0])


@on_ranks
@pytest.mark.parametrize("layer", [Center, Graph, keras.layers.Dropout])
def test_it_is_one_process(backend, layer):
    def layers():
        return [layer(0.3)] if layer is keras.layers.Dropout else [layer()]

    wanted = on_rank_zero(backend, lambda: outcome(made(*layers())))
    got = outcome(made(*layers()), backend)
    tf.nest.map_structure(np.testing.assert_array_equal, got, wanted)


@on_ranks
def test_an_exception_is_raised_everywhere(backend):
    x, y = data()
    words = dict(verbose=0, backend=backend, whole_batch=True)
    with pytest.raises(KeyError, match="of the callback"):
        collective.fit(made(), x, y, 8, callbacks=[Raises()], **words)


@launch.NOT_ON_RANKS
def test_what_it_does_not_work_with():
    single = collective.backends.get("single")
    x, y = data()
    words = dict(backend=single, whole_batch=True, verbose=0)
    with pytest.raises(UsageError, match="does not work with accumulate, seed"):
        collective.fit(made(), x, y, 8, accumulate=2, seed=1, **words)
    with pytest.raises(UsageError, match="takes a model"):
        run("fit", made, single, {})
    assert collective.fit(made(Center()), x, y, 8, **words).history["loss"]


@pytest.mark.launches
@launch.NOT_ON_RANKS
@launch.NEEDS_CORE
def test_whole_batches_on_two_ranks(tmp_path):
    assert launch.launch("native", 2, [HERE], tmp_path, seconds=240).passed(skips=True)
