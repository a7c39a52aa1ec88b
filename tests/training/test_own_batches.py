"""``per_replica``: each replica runs its own ``train_step`` on a batch of its own.

On two ranks the weights equal a loop by hand, in one process, over the batches of
both. Noise differs between ranks.
"""

from __future__ import annotations

import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from collective.errors import UsageError
from collective.training import evaluate, fit, keras_compat
from collective.training.input.plan import share
from collective.training.input.replica_batches import (
    first_of,
    stack_arguments,
    stacked,
)
from collective.training.steps import own_batches
from tests import launch
from tests.training.programs.own_steps import FEATURES, LATENT, mlp, rows
from tests.training.programs.plain_steps import Plain
from tests.training.small import assert_ranks_agree
from tests.training.test_equivalence import together

HERE = "tests/training/test_own_batches.py"
NAME = os.environ.get(launch.BACKEND, "single")
BATCH = 10  # 22 rows make two batches, and one of two rows
RANKS = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")
PLAIN = pytest.mark.skipif(launch.launched(), reason="one process shows it")

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture
def backend(backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(NAME)


class Contrastive(Plain):
    """A loss whose negatives are the other rows of the batch."""

    def loss_of(self, x, y):
        left, right = self(x, training=True), self(x + 0.1 * y, training=True)
        labels = ops.arange(ops.shape(x)[0])
        logits = ops.matmul(left, ops.transpose(right))
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"error": loss}

    def test_step(self, data):
        return {"error": self.loss_of(*data)}


class Fixed(Contrastive):
    """A model whose code has a fixed number of rows in a batch."""

    def loss_of(self, x, y):
        noise = keras.random.normal((BATCH, 1), seed=2)
        y_pred = ops.reshape(self(x, training=True), (BATCH, LATENT))
        return ops.mean(ops.square(y_pred - y) * (1 + 0 * noise))


def made(kind):
    keras.utils.set_random_seed(7)
    model = kind(mlp(FEATURES, LATENT))
    model.compile(keras.optimizers.SGD(0.1))
    return model


def data():
    x, _, y = rows()
    return x, y


def by_hand(kind, batches):
    """Return the weights after updates by weighted means of the gradients of parts.

    Args:
        batches: For each update, the rows of each replica; each replica has rows.
    """
    model = made(kind)
    for parts in batches:
        total = sum(len(x) for x, _ in parts)
        sums = 0
        for x, y in parts:
            grads = model.gradients(tf.constant(x), tf.constant(y))[1]
            sums = [
                s + len(x) / total * g
                for s, g in zip(sums or [0] * 4, grads, strict=True)
            ]
        model.optimizer.apply(sums, model.trainable_variables)
    return [np.array(w) for w in model.trainable_variables]


def shares(ranks):
    x, y = data()
    found = []
    for start in range(0, len(x), BATCH):
        bx, by = x[start : start + BATCH], y[start : start + BATCH]
        cuts = [share(len(bx), r, ranks) for r in range(ranks)]
        found.append([(bx[i:j], by[i:j]) for i, j in cuts if j > i])
    return found


def trained(backend, kind, x, y=None, **more):
    model = made(kind)
    run = lambda: fit(  # noqa: E731
        model, x, y, BATCH, backend=backend, shuffle=False, verbose=0, **more
    )
    return model, together(backend, run)


@RANKS
def test_shares_are_batches(backend, caplog):
    with caplog.at_level(logging.WARNING):
        model, result = trained(backend, Contrastive, *data(), per_replica=True)
    assert_ranks_agree(backend, result)
    wanted = by_hand(Contrastive, shares(backend.size))
    for got, value in zip(model.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13)
    assert result.per_replica is True
    said = [m for m in caplog.messages if "another model than that of one process" in m]
    assert len(said) == (backend.rank == 0)
    # Evaluated as it was trained; this is not compared, or refused.
    assert evaluate(model, *data(), backend=backend, verbose=0) > 0


@RANKS
def test_whole_batches(backend):
    """The last of three batches, which has two rows, is left out."""
    x, y = data()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model, result = trained(
        backend, Fixed, batches, per_replica="batch", validation_data=batches
    )
    assert_ranks_agree(backend, result)
    whole = [(x[i : i + BATCH], y[i : i + BATCH]) for i in (0, BATCH)]
    size = backend.size
    parts = [whole[i : i + size] for i in range(0, 2, size)]
    for got, value in zip(
        model.trainable_variables, by_hand(Fixed, parts), strict=True
    ):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13)
    assert result.per_replica == "batch" and "val_error" in result.history
    error = evaluate(model, batches, backend=backend, verbose=0)
    assert np.isclose(error, result.history["val_error"][0], rtol=1e-12)


@RANKS
def test_one_row_leaves_ranks_idle(backend, caplog):
    with caplog.at_level(logging.WARNING):
        model = made(Contrastive)
        x, y = data()
        fit(
            model,
            x,
            y,
            1,
            backend=backend,
            shuffle=False,
            verbose=0,
            per_replica=True,
        )
    one_by_one = [[(x[i : i + 1], y[i : i + 1])] for i in range(len(x))]
    wanted = by_hand(Contrastive, one_by_one)
    for got, value in zip(model.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13)
    idle = f"{backend.size - 1} of them idle in every step"
    assert sum(idle in m for m in caplog.messages) == (backend.rank == 0)


def test_one_process_trains_as_keras(backend):
    if backend.size > 1:
        return
    model, result = trained(backend, Contrastive, *data(), per_replica=True)
    stock = made(Contrastive)
    stock.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    for got, value in zip(model.weights, stock.weights, strict=True):
        np.testing.assert_array_equal(got, value)
    assert result.per_replica is False


def normalized():
    keras.utils.set_random_seed(7)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(4, use_bias=False),  # its gradient would be only rounding
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(LATENT),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.05, clipnorm=0.1), "mse", metrics=["mae"])
    return model


@RANKS
def test_statistics_of_a_replica(backend):
    """In Keras' own step each replica normalizes by its own rows; the rest is global."""
    model, (x, y) = normalized(), data()
    words = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2}
    ours = fit(model, x, y, backend=backend, per_replica=True, **words)
    assert_ranks_agree(backend, ours)
    alone, logs = normalized(), {"loss": [], "mae": []}
    variables, state = alone.trainable_variables, alone.non_trainable_variables
    for _ in range(2):
        found = {"loss": 0.0, "mae": 0.0}
        for parts in shares(backend.size):
            total = sum(len(x) for x, _ in parts)
            before = [np.array(v) for v in state]
            sums, after = [0.0] * len(variables), [0.0] * len(state)
            for px, py in parts:
                for variable, value in zip(state, before, strict=True):
                    variable.assign(value)
                with tf.GradientTape() as tape:
                    predicted = alone(px, training=True)
                    loss = keras.ops.mean((predicted - py) ** 2)
                share = len(px) / total
                gradients = tape.gradient(loss, [v.value for v in variables])
                sums = [s + share * g for s, g in zip(sums, gradients, strict=True)]
                after = [
                    s + share * np.array(v) for s, v in zip(after, state, strict=True)
                ]
                found["loss"] += float(loss) * len(px) / len(x)
                found["mae"] += float(np.abs(predicted - py).mean()) * len(px) / len(x)
            for variable, value in zip(state, after, strict=True):
                variable.assign(value)
            alone.optimizer.apply(sums, variables)
        for name, value in found.items():
            logs[name].append(value)
    for got, value in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-11, atol=1e-12)
    for name, values in logs.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=1e-6)


@PLAIN
def test_what_is_no_choice(backend):
    with pytest.raises(UsageError, match="per_replica='rows' is unknown"):
        own_batches.chosen("rows", backend)


@PLAIN
def test_arrays_are_no_batches():
    with pytest.raises(UsageError, match="these are rows"):
        stack_arguments({"x": np.zeros((4, 1))}, 2)


@PLAIN
def test_batches_are_stacked():
    batches = tf.data.Dataset.range(23).batch(4)
    found = stacked(keras_compat.data.adapter(batches), 2)
    stacks = [stack.batches.numpy() for stack in found]
    assert [s.shape for s in stacks] == [(2, 4), (2, 4), (1, 4)]
    assert np.concatenate(stacks).ravel().tolist() == [*range(20)]
    assert np.array_equal(first_of(tf.constant(stacks[0])), [0, 1, 2, 3])


@PLAIN
def test_replicas_draw_numbers_of_their_own():
    def drawn(replica):
        seed = [3, 4]
        draws = {
            "normal": lambda: tf.random.stateless_normal([5], seed),
            "uniform": lambda: tf.random.stateless_uniform([5], seed),
            "gamma": lambda: tf.random.stateless_gamma([5], seed, 2.0),
            "poisson": lambda: tf.random.stateless_poisson([9], seed, 9.0),
            "keras": lambda: keras.random.truncated_normal([5], seed=3),
            "shuffle": lambda: keras.random.shuffle(tf.range(50), seed=3),
            "stateful": lambda: tf.random.normal([5], seed=6),
            "categorical": lambda: tf.random.categorical(tf.zeros([1, 99]), 5, seed=6),
            "sampled": lambda: tf.random.uniform_candidate_sampler(
                [[1]], 1, 5, True, 99, seed=6
            )[0],
            "generator": lambda: tf.random.Generator.from_seed(3).normal([5]),
            "truncated": lambda: tf.random.Generator.from_seed(3).truncated_normal([5]),
        }
        tf.random.set_seed(1)
        if replica is None:
            return {name: draw().numpy() for name, draw in draws.items()}
        with keras_compat.replica_draws.draw_as_replica(replica):
            return {name: draw().numpy() for name, draw in draws.items()}

    plain, first, second = drawn(None), drawn(0), drawn(1)
    for name, numbers in plain.items():
        np.testing.assert_array_equal(first[name], numbers, err_msg=name)
        assert np.any(second[name] != numbers), name


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_on_ranks(ranks, tmp_path):
    ended = launch.launch("native", ranks, [HERE], tmp_path, seconds=300)
    assert ended.passed(skips=True) == 5
