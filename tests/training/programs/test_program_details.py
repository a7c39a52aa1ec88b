"""Details of a training that are as in Keras, or are reported by name."""

from __future__ import annotations

import dataclasses
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.errors import CollectiveError, UsageError
from collective.training import fit
from tests import launch
from tests.training.programs.hard import PROGRAMS, dense
from tests.training.programs.program import CLASSES, FEATURES, numbers

HERE = "tests/training/programs/test_program_details.py"

pytestmark = pytest.mark.usefixtures("clean_keras")


class InFloat16(SingleBackend):
    """A backend whose gradients travel in float16."""

    rounds_to = "float16"

    def all_reduce(self, tensors, rounded=()):
        return [
            tf.cast(tf.cast(t, tf.float16), t.dtype) if i in rounded else t
            for i, t in enumerate(tensors)
        ]


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(os.environ.get(launch.BACKEND, "single"))


def train(make, backend, **more):
    settings = {"global_batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False}
    return fit(make, numbers(8, 1), backend=backend, **(settings | more))


def test_an_overflow_in_transport_is_named(backend, monkeypatch):
    """Each rank's own gradient is finite, which is allowed: float32 can hold their sum."""
    if launch.launched():
        options = dataclasses.replace(backend.options, transport_dtype="float16")
        monkeypatch.setattr(backend, "options", options)
        monkeypatch.setattr(backend, "rounds_to", "float16")
    else:
        backend = InFloat16(Options(), Environment())

    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(512, name="wide")]
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(1e-9), lambda y, p: 1e9 * (y - p) ** 2)
        return model

    model = make()
    before = model.get_weights()
    with pytest.raises(
        CollectiveError, match=r"step 0: .*float16.*'.*kernel'"
    ) as caught:
        train(model, backend)
    assert "bfloat16" in caught.value.hint
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_on_train_begin_may_not_freeze_layers(backend):
    class Freezes(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.layers[0].trainable = False

    if launch.launched():
        pytest.skip("the error is rank 0's, and ends the job")
    with pytest.raises(UsageError, match=r"on_train_begin.*layer.trainable"):
        train(dense(), backend, callbacks=[Freezes()])


def test_a_late_freeze_is_warned_of_once(backend, capfd):
    if launch.launched():
        pytest.skip("rank 0 alone warns")

    def freeze(epoch, logs):
        model.layers[0].trainable = False

    model = dense()()
    train(
        model, backend, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=freeze)]
    )
    assert capfd.readouterr().err.count("on_epoch_end has made") == 1


# --- random numbers, and untracked variables ----------------------------------------


def noisy(generator):
    """Return a model whose loss is the mean square of noise, and which learns nothing."""

    class Noise(keras.layers.Layer):
        def call(self, x):
            noise = keras.random.normal(keras.ops.shape(x), seed=generator[0])
            return noise + 0 * x

    layers = [keras.Input((FEATURES,)), keras.layers.Dense(CLASSES), Noise()]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.0), lambda y, p: keras.ops.mean(p**2, axis=-1))
    return model


def test_an_untracked_generator_draws_anew_in_each_step(backend):
    def losses(seed):
        generator = [keras.random.SeedGenerator(backend.rank)]  # in a list of a closure
        model = noisy(tuple(generator))
        return train(model, backend, seed=seed).losses

    first = losses(5)
    assert len(set(first)) == len(first) == 4
    assert losses(5) == first != losses(6)


def assigning(variable, make=dense):
    class Assigns(keras.layers.Layer):
        def call(self, x):
            variable().assign_add(1.0)
            return x

    return make(Assigns)()


def test_a_variable_of_no_layer_counts_the_steps(backend):
    outside = keras.Variable(0.0, name="counted")
    train(assigning(lambda: outside), backend)
    assert float(outside) == 4


def test_a_loss_without_reduction_beside_others_is_added_to_each_row(backend):
    def make():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((FEATURES,))
        outputs = [keras.layers.Dense(CLASSES, name=name)(inputs) for name in "ab"]
        model = keras.Model(inputs, outputs)
        model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction=None)])
        return model

    (x, y), model, alone = numbers(8, 1), make(), make()
    settings = dict(batch_size=4, verbose=0, shuffle=False)
    alone.fit(x, (y, y), **settings)
    fit(model, x, (y, y), backend=backend, **settings)
    for value, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="of newer Keras only"
)
@pytest.mark.parametrize("name", ["single", "tf-mirrored:2"])
def test_several_optimizers_train_what_keras_trains(name, backends_by_name):
    if launch.launched():
        pytest.skip("of one process")

    def make():
        keras.utils.set_random_seed(4)
        kinds = keras.optimizers
        choice = kinds.OptimizerMap(
            kinds.SGD(0.1, momentum=0.5), {".*bias": kinds.Adam(0.01)}
        )
        return dense(optimizer=kinds.MultiOptimizer(choice))()

    alone = make()
    alone.fit(*numbers(8, 1), batch_size=4, epochs=2, verbose=0, shuffle=False)
    result = train(make, backends_by_name(name))
    for got, wanted in zip(
        result.model.get_weights(), alone.get_weights(), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_weights_set_by_layers_beside_a_sharded_optimizer(backend):
    keras.config.set_floatx("float32")

    def make():
        keras.utils.set_random_seed(2)
        return PROGRAMS["float8"].make()

    wanted, got = (
        train(make, backend, shard_optimizer=shard).model for shard in (False, True)
    )
    for one, other in zip(got.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_look_ups_of_the_same_row_are_seen_one_by_one(kind):
    """Keras' Adam squares the gradient of each look-up; for SGD both are equal."""
    program = PROGRAMS["flattened"]

    def make():
        keras.utils.set_random_seed(2)
        model = program.make()
        model.compile(getattr(keras.optimizers, kind)(0.01), program.make().loss)
        return model

    model, alone = make(), make()
    rows = program.data(8, 1)
    alone.fit(*rows, batch_size=4, verbose=0, shuffle=False)
    single = SingleBackend(Options(), Environment())
    fit(model, rows, backend=single, global_batch_size=4, verbose=0, shuffle=False)
    tables = [np.array(m.layers[0].embeddings) for m in (model, alone)]
    np.testing.assert_allclose(*tables, rtol=1e-4, atol=1e-6)


@pytest.mark.launches
@pytest.mark.matrix
def test_on_two_ranks(tmp_path):
    ended = launch.launch("native", 2, [HERE], tmp_path, seconds=420)
    assert ended.passed(skips=True) and len(ended.outcomes[0]) > 5
