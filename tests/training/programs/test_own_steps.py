"""Models with their own ``train_step`` equal Keras' ``fit``, on any number of processes.

Plain, this file trains in one process, and starts itself on 2 and 3 ranks. The last batch has
two rows, so that one of three ranks has none.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.environment import detect
from collective.errors import CollectiveError
from collective.training import Checkpoint, fit
from collective.training.input.plan import share
from tests import launch
from tests.training.programs import own_steps
from tests.training.programs.own_steps import FEATURES, PROGRAMS, ROWS
from tests.training.programs.plain_steps import Regression, regression
from tests.training.small import assert_ranks_agree
from tests.training.test_equivalence import together

NAME = os.environ.get(launch.BACKEND, "single")
BATCH, EPOCHS = 10, 2
PLAIN = pytest.mark.skipif(launch.launched(), reason="one process shows it")
MATRIX = pytest.mark.matrix
RANKS = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAME)


def made(make, floatx="float64"):
    """Return a new model of the program, with equal weights each time, and its rows."""
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(7)
    return make()


def train(backend, make, floatx="float64", **settings):
    model, data = made(make, floatx)
    defaults = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, "check_every": 1}
    return together(
        backend,
        lambda: fit(
            model,
            data,
            backend=backend,
            global_batch_size=BATCH,
            **(defaults | settings),
        ),
    )


def by_keras(make, floatx="float64", **settings):
    """Return the model after Keras' own training on the same batches, and the history.

    It runs on rank 0 only, because all ranks are compared with each other.
    """
    if detect().rank:
        return None, {}
    model, (x, y, *weight) = made(make, floatx)
    history = model.fit(
        x,
        y,
        sample_weight=weight[0] if weight else None,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        **settings,
    )
    return model, history.history


def assert_as_keras(result, wanted, history, rtol=1e-10):
    assert_ranks_agree(result.backend, result)
    if wanted is None:
        return
    for got, variable in zip(result.model.weights, wanted.weights, strict=True):
        scale = np.abs(variable.numpy()).max() + 1e-30
        np.testing.assert_allclose(
            got.numpy() / scale, variable.numpy() / scale, rtol=0, atol=rtol
        )
    assert set(result.history) == set(history)
    for name, values in history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=rtol, atol=1e-30)


def in_scope(backend, make):
    """Train as ``train`` does, with a model made in the scope of the backend."""
    _, data = made(make)
    keras.utils.clear_session(free_memory=False)

    def model():
        keras.utils.set_random_seed(7)
        return make()[0]

    return fit(
        model,
        data,
        backend=backend,
        global_batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        check_every=1,
    )


def test_in_float32(backend):
    make = PROGRAMS["wgan_gp"]
    wanted, history = by_keras(make, "float32")
    result = train(backend, make, "float32")
    assert_as_keras(result, wanted, history, rtol=2e-4)


@pytest.mark.on_ranks
@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_sees_each_look_up(clips, backend):
    """It is like Keras' own, even if the step changes the gradients first."""

    class Step(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            if clips:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    class Positions(keras.layers.Layer):
        """Makes the same look-ups for every batch."""

        def build(self, shape):
            self.table = keras.layers.Embedding(shape[1], shape[2])

        def call(self, x):
            return x + self.table(tf.range(x.shape[1]))

    def make():
        inputs = keras.Input((FEATURES,), dtype="int32")
        x = Positions()(keras.layers.Embedding(5, 3)(inputs))
        model = Step(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        rng = np.random.default_rng(3)
        words = rng.integers(0, 5, (ROWS, FEATURES)).astype("int32")
        return model, (words, rng.normal(size=(ROWS, 1)))

    wanted, history = by_keras(make)
    result = train(backend, make)
    assert_as_keras(result, wanted, history)


@pytest.mark.on_ranks
def test_its_own_test_step_validates(backend):
    make = PROGRAMS["own_metrics"]
    x, _, y = own_steps.rows(5)
    validation = x[:12], y[:12]
    wanted, history = by_keras(make, validation_data=validation)
    result = train(backend, make, validation_data=validation)
    assert {"val_loss", "val_hits", "val_mae"} < set(result.history)
    assert_as_keras(result, wanted, history)


def test_eagerly(backend):
    """The same step runs without a graph."""

    def make():
        model, data = PROGRAMS["own_metrics"]()
        model.run_eagerly = True
        return model, data

    wanted, history = by_keras(make)
    assert_as_keras(train(backend, make), wanted, history)


def test_noise_leaves_ranks_alike(backend):
    """All ranks end with the same weights; one process ends with Keras' weights."""
    make = PROGRAMS["noise_and_dropout"]
    first = train(backend, make)
    if backend.replicas == 1:
        wanted, history = by_keras(make)
        assert_as_keras(first, wanted, history)
    assert_ranks_agree(backend, first)


@pytest.mark.on_ranks
def test_not_finite_is_reported_on_every_rank(backend):
    """The value is of the last replica; the discriminator keeps its last step."""
    model, ((x, noise), y) = made(PROGRAMS["gan"])
    last = backend.replicas - 1
    start, _ = share(BATCH, last, backend.replicas)
    noise[BATCH + start, 0] = np.nan  # in the second step
    data = (x, noise), y
    where = f"step 1: .* not finite on (rank|replica) {last}"
    with pytest.raises(CollectiveError, match=where) as caught:
        fit(
            model,
            data,
            backend=backend,
            global_batch_size=BATCH,
            shuffle=False,
            verbose=0,
            terminate_on_nan=True,
        )
    assert "discriminator/dense/kernel" in caught.value.message
    assert np.all(np.isfinite(model.discriminator.get_weights()[0]))


@pytest.mark.on_ranks
def test_resumed_within_an_epoch_it_is_the_uninterrupted_run(backend, tmp_path):
    """The metrics of the epoch continue from their state after its first steps."""
    make = PROGRAMS["own_metrics"]
    folder = tmp_path / "checkpoint"
    wanted = train(backend, make)
    train(backend, make, steps=4, checkpoint=Checkpoint(folder))
    got = train(backend, make, checkpoint=Checkpoint(folder, resume=True))
    assert got.losses == wanted.losses
    assert got.history == wanted.history
    for value, other in zip(got.model.weights, wanted.model.weights, strict=True):
        np.testing.assert_array_equal(value, other)


@PLAIN
def test_all_optimizers_are_part_of_the_state():
    """Broadcasts, files and comparisons include the second optimizer."""
    from collective.training.model.variables import all_variables

    model, _ = made(PROGRAMS["two_frequencies"])
    slots = {id(v) for v in model.g_optimizer.variables}
    assert len(slots) > 2
    assert slots < {id(v) for v in all_variables(model)}


@PLAIN
@pytest.mark.parametrize(
    "backend",
    ["tf-mirrored:2", pytest.param("tf-mirrored:3", marks=MATRIX)],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("gan", "of_keras_guide") else [MATRIX])
        for n in PROGRAMS
        if n != "noise_and_dropout"  # it draws by the numbers of operations in a graph
    ],
)
def test_replicas_of_one_process_train_what_keras_trains(
    name, backend, backends_by_name
):
    result = in_scope(backends_by_name(backend), PROGRAMS[name])
    assert_as_keras(result, *by_keras(PROGRAMS[name]))


@PLAIN
def test_a_step_that_does_not_fit_the_data_raises_its_own_error(backend):
    model, _ = made(PROGRAMS["gan"])
    data = np.zeros((ROWS, FEATURES)), np.zeros(ROWS)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        fit(model, data, backend=backend)


@PLAIN
def test_a_step_that_returns_no_dict_ends_as_in_keras(backend):
    class Bare(Regression):
        def returned(self, loss, y):
            return loss

    with pytest.raises(AttributeError, match="has no attribute 'items'"):
        train(backend, lambda: regression(Bare))
