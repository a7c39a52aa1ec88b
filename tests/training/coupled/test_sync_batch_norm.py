"""Batch normalization over the rows of all replicas: what one process trains.

Plain, this file runs on one replica. Then it starts itself on ranks of ``native`` and
``mpi``. Each rank trains by stock ``keras.Model.fit`` alone what all ranks train together.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.step.plan import StepPlan
from tests import launch
from tests.training.coupled.compared import NAMES, assert_same, planned, stock

HERE = "tests/training/coupled/test_sync_batch_norm.py"
SIZE = 6
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}

MATRIX = pytest.mark.matrix
pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.on_ranks]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


@pytest.fixture(params=["float64", "float32"])
def precision(request):
    keras.config.set_floatx(request.param)
    return request.param


def images(count, seed=3):
    """Far from zero: a mean of squares less a squared mean would lose all digits."""
    rng = np.random.default_rng(seed)
    x = 50 + rng.normal(size=(count, SIZE, SIZE, 2)).astype(keras.config.floatx())
    return x, rng.integers(0, 3, count).astype("int32")


def centred(count, seed=3):
    x, y = images(count, seed)
    return x - 50, y


def compiled(inputs, hidden, **settings):
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        **({"loss": loss, "metrics": ["accuracy"]} | settings),
    )
    return model


def convolutional(**options):
    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input([SIZE, SIZE, 2])
        hidden = keras.layers.BatchNormalization(**options)(inputs)
        hidden = keras.layers.Conv2D(4, 3, use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization(momentum=0.8, **options)(hidden)
        hidden = keras.layers.ReLU()(hidden)
        hidden = keras.layers.BatchNormalization(axis=1, **options)(hidden)
        return compiled(inputs, keras.layers.GlobalAveragePooling2D()(hidden))

    return make


def renormalized():
    return convolutional(renorm=True)()


def nested():
    """A model within a model, and a layer that is called twice."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([SIZE, SIZE, 2])
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
    flat = layers.Flatten()(inputs)
    again = layers.BatchNormalization()
    return compiled(inputs, inner(again(again(flat))))


def masked():
    """Positions with token 0 count in no statistic."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([4], dtype="int32")
    vectors = keras.layers.Embedding(6, 5, mask_zero=True)(inputs)
    hidden = keras.layers.BatchNormalization()(vectors)
    return compiled(inputs, keras.layers.GlobalAveragePooling1D()(hidden))


def tokens(count, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, (count, 4)).astype("int32")
    x[:, 0] = 1
    return x, rng.integers(0, 3, count).astype("int32")


def correlated(y, predicted):
    y = keras.ops.one_hot(keras.ops.cast(keras.ops.ravel(y), "int32"), 3)
    y = keras.ops.cast(y, predicted.dtype)
    mean = keras.ops.mean(predicted * y, axis=0)
    return keras.ops.sum(keras.ops.square(mean)) - keras.ops.mean(predicted * y)


def coupling_loss():
    """Statistics and loss of the whole batch, together."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([SIZE, SIZE, 2])
    hidden = keras.layers.BatchNormalization()(keras.layers.Flatten()(inputs))
    return compiled(inputs, hidden, loss=correlated, metrics=[])


CASES = {
    "convolutional": (lambda: convolutional(), images, StepPlan()),
    "renormalized": (lambda: renormalized, centred, StepPlan()),
    "nested": (lambda: nested, images, StepPlan()),
    "masked": (lambda: masked, tokens, StepPlan()),
    "coupling-loss": (lambda: coupling_loss, images, StepPlan(gather_loss=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_what_stock_keras_trains(name, precision, backend):
    """31 rows in batches of ten: the last has one row, so ranks are without rows."""
    make, data, plan = CASES[name]
    arguments = make(), data(31), data(17, 9)
    got = planned(*arguments, backend, plan, sync_batch_norm=True)
    assert_same(got, stock(*arguments, backend), TOLERANCE[precision])


def test_layers_that_ask_for_it_need_no_option(backend):
    """And the others keep the statistics of their replica."""
    if backend.replicas == 1:
        pytest.skip("Keras' own formula, which loses digits far from zero")
    arguments = images(31), images(17, 9)
    wanted = stock(convolutional(), *arguments, backend)
    asked = planned(convolutional(synchronized=True), *arguments, backend, StepPlan())
    assert_same(asked, wanted, TOLERANCE["float32"])
    own = planned(convolutional(), *arguments, backend, StepPlan())
    with pytest.raises(AssertionError):
        assert_same(own, wanted, TOLERANCE["float32"])


def test_keras_own_statistics_are_back_after_the_trace(backend):
    before = keras.layers.BatchNormalization._moments
    planned(nested, images(20), None, backend, StepPlan(), sync_batch_norm=True)
    assert keras.layers.BatchNormalization._moments is before


@pytest.mark.parametrize("option", [{"accumulate": 2}])
def test_what_does_not_work_together_is_refused(option, backend):
    if backend.replicas == 1:
        pytest.skip("one replica has the whole batch")
    with pytest.raises(UsageError, match="synchronized batch normalization"):
        planned(
            nested,
            images(20),
            None,
            backend,
            StepPlan(),
            sync_batch_norm=True,
            **option,
        )


def test_a_gradient_of_a_gradient(backend):
    """As a gradient penalty takes it, against moments of the whole batch."""
    from collective.training.variants.coupled.batch_norm import moments
    from collective.training.variants.coupled.replica import ReplicaContext

    rng = np.random.default_rng(2)
    whole = rng.normal(3, 2, (7, 4))
    bounds = [7 * r // backend.size for r in range(backend.size + 1)]
    start, stop = bounds[backend.rank : backend.rank + 2]

    def penalty(x, statistics, total):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance = statistics(x)
            loss = tf.reduce_sum(((x - mean) / tf.sqrt(variance)) ** 3)
        return total(tf.reduce_sum(tape.gradient(loss, x) ** 2))

    def gradient(x, statistics, total):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = penalty(x, statistics, total)
        return tape.gradient(value, x)

    @tf.function(autograph=False)
    def on_ranks(own):
        def replica(own):
            context = ReplicaContext(
                backend,
                tf.cast(backend.replica(), tf.int64),
                tf.constant(stop - start, tf.int64),
                tf.constant(7, tf.int64),
                False,
            )
            return gradient(
                own, lambda x: moments(x, None, [0], context)[1:], lambda value: value
            )

        return backend.run(replica, (own,))

    wanted = gradient(
        tf.constant(whole), lambda x: tf.nn.moments(x, [0]), lambda value: value
    )
    got = on_ranks(tf.constant(whole[start:stop]))
    np.testing.assert_allclose(got, wanted[start:stop], rtol=1e-9, atol=1e-10)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks, chosen",
    [
        ("native", 3, "float64 and (nested or coupling) or gradient"),
        pytest.param("native", 3, "float64", marks=MATRIX),
        pytest.param(
            "native", 2, "float64 or convolutional or not trains", marks=MATRIX
        ),
        pytest.param(
            "mpi", 2, "float64 and not convolutional or gradient", marks=MATRIX
        ),
        pytest.param(
            "tf-multiworker", 2, "float64 and (nested or coupling)", marks=MATRIX
        ),
    ],
)
def test_on_ranks(name, ranks, chosen, tmp_path):
    pytest.importorskip("mpi4py")
    ended = launch.launch(name, ranks, [HERE, "-k", chosen], tmp_path, seconds=300)
    assert ended.passed()
