"""Layers in parts over ranks, whose single look-ups and statistics are gathered: as Keras.

Plain, this file starts itself on four ranks, two to a replica.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

from collective import backends
from collective.training import fit
from collective.training.prepared import get_partition
from collective.training.parallel import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
)
from tests import launch

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/parallel/test_gathering_parts.py"
ROWS, BATCH, EPOCHS, WORDS = 23, 8, 3, 7


def model(optimizer, normalizes=False, table=ShardedEmbedding):
    keras.utils.set_random_seed(11)
    layers = [
        keras.Input((4,), dtype="int32"),
        table(WORDS, 3),
        keras.layers.Flatten(),
        ColumnParallelDense(8, activation="tanh", gather_output=False),
        RowParallelDense(6, input_is_parallel=True, use_bias=not normalizes),
    ]
    if normalizes:
        layers.append(keras.layers.BatchNormalization())
    layers += [keras.layers.Activation("tanh"), ColumnParallelDense(2)]
    made = keras.Sequential(layers)
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def adam(**more):
    return keras.optimizers.Adam(0.05, **more)


def scaled():
    return keras.optimizers.LossScaleOptimizer(adam(clipnorm=0.1), initial_scale=4.0)


CASES = {
    "look-ups": (lambda: model(adam()), {}),
    "whole-table": (lambda: model(adam(), table=keras.layers.Embedding), {}),
    "micro-batches": (lambda: model(adam()), {"accumulate": 2}),
    "clipnorm": (lambda: model(adam(clipnorm=0.01)), {}),
    "global": (lambda: model(adam(global_clipnorm=0.01)), {}),
    "scaled": (lambda: model(scaled()), {}),
    "sync": (lambda: model(adam(), normalizes=True), {"sync_batch_norm": True}),
}


def data():
    rng = np.random.default_rng(5)
    words = rng.integers(0, WORDS, (ROWS, 4)).astype("int32")
    return words, rng.normal(size=(ROWS, 2))


if launch.launched():

    @pytest.fixture(scope="module")
    def backend():
        made = backends.get("native", backends.Options(tensor_parallel=2))
        yield made
        made.barrier()

    @pytest.mark.parametrize("name", CASES)
    def test_trains_what_keras_trains(name, backend):
        keras.config.set_floatx("float64")
        make, options = CASES[name]
        keras.utils.clear_session(free_memory=False)
        wanted, (x, y) = make(), data()
        words = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        history = wanted.fit(x, y, **words).history
        keras.utils.clear_session(free_memory=False)
        options = {"embedding_gradients": "keras", **options}
        got = fit(make, x, y, backend=backend, **words, **options)
        assert sorted(got.history) == sorted(history)
        for key, values in history.items():
            np.testing.assert_allclose(got.history[key], values, rtol=1e-10)
        whole = get_partition(got.model).gather(everywhere=True)
        for one, other in zip(got.model.weights, wanted.weights, strict=True):
            value = whole.get(id(one), one)
            np.testing.assert_allclose(
                *(np.asarray(value), np.asarray(other)), rtol=1e-10, atol=1e-10
            )


@pytest.mark.launches
@pytest.mark.matrix
def test_on_ranks(tmp_path):
    ended = launch.launch("native", 4, [HERE], tmp_path, seconds=420)
    assert ended.passed() == len(CASES)
