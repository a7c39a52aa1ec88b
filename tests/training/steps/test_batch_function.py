"""The function of a batch in one process: the emitted step is as Keras' own."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.fit_options import FitOptions
from collective.training.steps.batch_function import BatchFunction
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings

pytestmark = pytest.mark.usefixtures("clean_keras")
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(21, 4)), RNG.normal(size=(21, 1))


@pytest.fixture
def in_pieces(backends_by_name):
    """Settings by which a batch is computed in two pieces, so a step is emitted."""
    return StepSettings(backends_by_name("single"), FitOptions(accumulate=2))


def model(**more) -> keras.Model:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.3)]
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile("adam", "mse", **more)
    return made


def outcome(made: keras.Model, data, **words):
    history = made.fit(data, epochs=2, verbose=0, **words).history["loss"]
    return history, [np.array(v) for v in (*made.weights, *made.optimizer.variables)]


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    for one, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def batches(*sizes: int):
    """Batches of these sizes, whose number nobody knows beforehand."""

    def read():
        starts = itertools.accumulate(sizes, initial=0)
        for start, size in zip(starts, sizes, strict=False):
            yield X[start : start + size], Y[start : start + size]

    spec = tf.TensorSpec((None, 4), "float64"), tf.TensorSpec((None, 1), "float64")
    return tf.data.Dataset.from_generator(read, output_signature=spec)


@pytest.mark.parametrize("sizes", [(8, 8, 5), (5, 0, 8), (1, 1)])
def test_data_of_unknown_length_count_a_step_as_in_keras(in_pieces, sizes):
    """Keras asks for a batch within its step: the last call counts, and draws seeds."""
    wanted = outcome(model(), batches(*sizes))
    made = model()
    with distributed(in_pieces):
        found = outcome(made, batches(*sizes))
    assert isinstance(made.train_function, BatchFunction)
    assert len(made.train_function.programs) == 1
    assert_same(found, wanted)


def test_several_steps_are_one_execution(in_pieces):
    wanted = model(steps_per_execution=2)
    expected = outcome(wanted, batches(8, 8, 5)), wanted.predict(X, 5, verbose=0)
    made = model(steps_per_execution=2)
    with distributed(in_pieces):
        assert_same(outcome(made, batches(8, 8, 5)), expected[0])
        np.testing.assert_allclose(made.predict(X, 5, verbose=0), expected[1], 1e-12)


def test_a_step_that_needs_its_rows_is_traced_for_them(in_pieces):
    class Fixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            weights = tf.constant(np.arange(data[0].shape[0]), "float64")  # not of None
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights[:, None] * (self(data[0]) - data[1]) ** 2)
            found = self.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, found), found, strict=True)
            )
            return {"loss": loss}

    def trained():
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(2)
        made = Fixed()
        made.compile("sgd")
        return made, outcome(
            made, tf.data.Dataset.from_tensor_slices((X, Y)).batch(7, True)
        )

    _, wanted = trained()
    with distributed(in_pieces):
        made, found = trained()
    assert [p.kind.rows for p in made.train_function.programs] == [7]
    assert_same(found, wanted)


def test_what_a_step_raises_is_raised_as_keras_raises_it(in_pieces):
    class Fails(keras.Model):
        def train_step(self, data):
            raise KeyError("of the step")

    made = Fails()
    made.compile("sgd")
    with distributed(in_pieces), pytest.raises(KeyError, match="of the step"):
        made.fit(X, Y, verbose=0)
    made.compile("sgd")
    with pytest.raises(KeyError, match="of the step"):
        made.fit(X, Y, verbose=0)


def test_one_process_without_options_keeps_the_functions_of_keras(backends_by_name):
    made = model()
    with distributed(StepSettings(backends_by_name("single"))):
        made.fit(X, Y, verbose=0)
    assert not isinstance(made.train_function, BatchFunction)


def test_what_another_library_has_replaced_on_the_class_does_not_hide_the_step(
    in_pieces, monkeypatch
):
    """As the Horovod drop-in does while a distributed optimizer is alive."""
    stock = keras.Model.make_train_function
    wrapped = lambda self, force=False: stock(self, force)  # noqa: E731
    monkeypatch.setattr(keras.Model, "make_train_function", wrapped, raising=False)
    made = model()
    with distributed(in_pieces):
        made.fit(X, Y, verbose=0)
    assert isinstance(made.train_function, BatchFunction)
    assert keras.Model.make_train_function is wrapped
