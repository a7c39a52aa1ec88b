"""One update: its order, its refusals, and its equality with Keras on one replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.errors import CollectiveError
from collective.fit_options import FitOptions
from collective.training.input.pipeline import Batch
from tests.training import cases
from tests.training.by_hand import Steps
from tests.training.cases import built, own_part, spec_of

pytestmark = pytest.mark.usefixtures("clean_keras")


class Counting(SingleBackend):
    """Has one replica; counts the calls in the graph as they happen."""

    def __init__(self):
        super().__init__(Options(), Environment())
        self.calls: list[int] = []

    def _all_reduce(self, tensors):
        def count(*arrays):
            self.calls.append(len(arrays))
            return arrays

        out = tf.numpy_function(count, tensors, [t.dtype for t in tensors])
        for tensor, result in zip(tensors, out, strict=True):
            result.set_shape(tensor.shape)
        return list(out)


class Twin(SingleBackend):
    """Is replica 0 of two; the other one holds the same rows."""

    def __init__(self):
        super().__init__(Options(), Environment())
        self.replicas, self.local_replicas = 2, range(1)

    def _all_reduce(self, tensors):
        return [2 * t for t in tensors]


@pytest.fixture
def single():
    return SingleBackend(Options(), Environment())


def make(model, backend, rows, **options):
    """Return a model and its step for batches like these rows."""
    spec = spec_of(rows)
    model = built(model, backend, spec)
    return model, Steps(model, backend, FitOptions(**options))


def rows_of(count, seed=0, data=cases.labelled):
    return data(np.random.default_rng(seed), count, 0)


def values(variables):
    return [np.array(v) for v in variables]


# --- sums of an update --------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    "model, data, sums",
    [
        (cases.mlp(cases.adam), cases.labelled, 1),
        (cases.masked, cases.sentences, 2),  # first the number of words without mask
    ],
)
def test_sums_of_an_update(model, data, sums, accumulate):
    backend = Counting()
    rows = rows_of(9, data=data)
    _, step = make(model, backend, rows, accumulate=accumulate)
    for _ in range(5):
        step(own_part(rows, backend))
    assert len(backend.calls) == 5 * sums


def wide():
    """Return a model with gradients of many sizes, and a metric of large ones."""
    layers = [
        keras.Input((cases.FEATURES,)),
        keras.layers.Dense(100),
        *[keras.layers.Dense(2) for _ in range(3)],
        keras.layers.Dense(cases.CLASSES),
    ]
    counts = keras.metrics.MeanIoU(40, sparse_y_true=True, sparse_y_pred=False)
    return cases.compiled(keras.Sequential(layers), "sgd", metrics=[counts])


def test_nothing_but_large_gradients_may_travel_in_16_bits():
    class Counted(SingleBackend):
        rounded, sizes = [], []

        def all_reduce(self, tensors, rounded=()):
            self.rounded += [tuple(tensors[i].shape) for i in rounded]
            return list(tensors)

    backend = Counted(Options(), Environment())
    rows = rows_of(9)
    _, step = make(wide, backend, rows)
    step(own_part(rows, backend))
    assert backend.rounded == [(cases.FEATURES, 100), (100,), (100, 2)]


# --- refusing values that are not finite ----------------------------------------------


def decaying():
    """Return a model whose state moves without gradients, such as decay and statistics."""
    layers = [
        keras.Input((cases.FEATURES,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(cases.CLASSES),
    ]
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True)
    return cases.compiled(keras.Sequential(layers), optimizer)


@pytest.mark.parametrize("name", ["single", "tf-mirrored:2"])
def test_not_finite_names_the_variable_and_applies_nothing(name, backends_by_name):
    backend = backends_by_name(name)
    model, step = make(decaying, backend, rows_of(6))
    step(own_part(rows_of(6), backend))
    before = values(model.variables + model.optimizer.variables)
    bad = rows_of(6)
    bad[0][2] = np.nan
    with pytest.raises(CollectiveError) as caught:
        step(own_part(bad, backend))
    assert "step 1:" in caught.value.message and "replica 0" in caught.value.message
    assert model.trainable_variables[0].path in caught.value.message
    assert "HINT: " in str(caught.value) and caught.value.exit_code == 1
    after = values(model.variables + model.optimizer.variables)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    step(own_part(rows_of(6), backend))  # and training can continue


def test_not_finite_names_the_first_bad_variable_only(single):
    """The gradient of a square root at 0 is infinite; the loss is not."""

    class Root(keras.layers.Layer):
        def build(self, shape):
            self.fine = self.add_weight(shape=(), initializer="ones", name="fine")
            self.bad = self.add_weight(shape=(), initializer="zeros", name="bad")

        def call(self, x):
            return x * self.fine + keras.ops.sqrt(self.bad * x)

    def model():
        net = keras.Sequential([keras.Input((2,)), Root()])
        return cases.compiled(net, cases.sgd(), loss="mse", metrics=[])

    rows = (np.ones((4, 2), "float32"), np.zeros((4, 2), "float32"), None)
    _, step = make(model, single, rows)
    with pytest.raises(CollectiveError, match=r"that of '.*bad'"):
        step(own_part(rows, single))


@pytest.mark.parametrize("replica", [0, 2, 3])
def test_not_finite_names_the_replica_that_has_it(replica, backends_by_name):
    backend = backends_by_name("tf-mirrored:4")
    rows = rows_of(8)
    model, step = make(cases.mlp(cases.sgd), backend, rows)
    before = values(model.trainable_variables)
    rows[0][2 * replica + 1, 0] = np.nan
    with pytest.raises(CollectiveError, match=f"step 0: .* replica {replica};"):
        step(own_part(rows, backend))
    for old, new in zip(before, values(model.trainable_variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_loss_scaling_skips_an_overflow_and_halves_the_scale(single):
    model, step = make(cases.mlp(cases.loss_scaled), single, rows_of(6))
    step(own_part(rows_of(6), single))
    before = values(model.trainable_variables)
    bad = rows_of(6)
    bad[0][5, 0] = np.inf
    step(own_part(bad, single))
    for old, new in zip(before, values(model.trainable_variables), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(model.optimizer.dynamic_scale) == 512
    assert int(model.optimizer.inner_optimizer.iterations) == 1


# --- the order ---------------------------------------------------------------------


def gradients(model, rows):
    x, y, _ = rows
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
        )
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.parametrize(
    "clip, clipped",
    [
        ({}, lambda gs: gs),
        ({"clipnorm": 0.1}, lambda gs: [tf.clip_by_norm(g, 0.1) for g in gs]),
        (
            {"clipvalue": 0.02},
            lambda gs: [tf.clip_by_value(g, -0.02, 0.02) for g in gs],
        ),
        ({"global_clipnorm": 0.1}, lambda gs: tf.clip_by_global_norm(gs, 0.1)[0]),
    ],
    ids=["no clip", "clipnorm", "clipvalue", "global_clipnorm"],
)
def test_clips_the_sum_not_its_parts(clip, clipped):
    backend, rows = Twin(), rows_of(5)
    model, step = make(cases.clipped(**clip), backend, rows)
    before = values(model.trainable_variables)
    wanted = clipped(gradients(model, rows))
    x, y, weight, *_ = own_part(rows, SingleBackend(Options(), Environment()))
    step(Batch(x, y, weight, tf.constant(10, tf.int64)))
    after = values(model.trainable_variables)
    for old, new, gradient in zip(before, after, wanted, strict=True):
        np.testing.assert_allclose(old - new, 0.1 * gradient, rtol=1e-4, atol=1e-7)


def test_decay_and_constraint_come_after_the_update():
    """AdamW decays by lr x decay x weight with any clip; then norms are bounded."""

    def model():
        constraint = keras.constraints.MaxNorm(0.5)
        layers = [
            keras.Input((cases.FEATURES,)),
            keras.layers.Dense(cases.CLASSES, kernel_constraint=constraint),
        ]
        optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5, clipvalue=0.01)
        return cases.compiled(keras.Sequential(layers), optimizer)

    backend, rows = Twin(), rows_of(5)
    net, step = make(model, backend, rows)
    kernel = np.array(net.trainable_variables[0])
    clipped = np.clip(gradients(net, rows)[0], -0.01, 0.01)
    x, y, weight, *_ = own_part(rows, SingleBackend(Options(), Environment()))
    step(Batch(x, y, weight, tf.constant(10, tf.int64)))
    wanted = kernel * (1 - 0.1 * 0.5) - 0.1 * clipped
    norms = np.sqrt((wanted**2).sum(0))
    assert (norms > 0.5).any()
    wanted *= np.clip(norms, 0, 0.5) / (1e-7 + norms)
    np.testing.assert_allclose(net.trainable_variables[0], wanted, rtol=1e-5)


def test_regulariser_counts_once(backends_by_name):
    """The data's gradient is 0, so only the regulariser's gradient remains."""

    def model():
        dense = keras.layers.Dense(
            cases.CLASSES, kernel_regularizer=keras.regularizers.L2(0.1)
        )
        net = keras.Sequential([keras.Input((cases.FEATURES,)), dense])
        return cases.compiled(net, keras.optimizers.SGD(1.0))

    x, y, _ = rows_of(9)
    rows = (np.zeros_like(x), y, None)
    for name, parts in (("single", 1), ("single", 4), ("tf-mirrored:4", 2)):
        backend = backends_by_name(name)
        net, step = make(model, backend, rows, accumulate=parts)
        before = np.array(net.trainable_variables[0])
        step(own_part(rows, backend))
        np.testing.assert_allclose(net.trainable_variables[0], 0.8 * before, rtol=1e-5)


# --- Keras' own fit ----------------------------------------------------------------


def fitted(make_model, batches):
    """Return losses and weights of ``keras.Model.fit``, with one batch in an epoch."""
    keras.utils.set_random_seed(0)
    model = make_model()
    signature = tuple(p for p in spec_of(batches[0])[:3] if p is not None)
    data = tf.data.Dataset.from_generator(
        lambda: (tuple(p for p in rows if p is not None) for rows in batches),
        output_signature=signature,
    )
    history = model.fit(data, steps_per_epoch=1, epochs=len(batches), verbose=0)
    return history.history["loss"], values(model.trainable_variables)


MODELS = {
    "sgd": (cases.mlp(cases.sgd), cases.labelled),
    "sum": (cases.mlp(cases.sgd, "sum"), cases.weighted),
    "mask": (cases.masked, cases.sentences),
    "functional": (cases.functional, cases.two_and_two),
    "batchnorm": (cases.normalised, cases.labelled),
}
# test_equivalence trains similar cases on ranks.
MORE = {
    "adam": (cases.mlp(cases.adam), cases.labelled),
    "sample weights": (cases.mlp(cases.sgd), cases.weighted),
    "mean_with_sample_weight": (
        cases.mlp(cases.sgd, "mean_with_sample_weight"),
        cases.weighted,
    ),
    "regularised": (cases.regularised, cases.labelled),
    "subclassed": (cases.subclassed, cases.labelled),
}


@pytest.mark.parametrize(
    ("model", "data"),
    [
        *(pytest.param(*one, id=name) for name, one in MODELS.items()),
        *(
            pytest.param(*one, id=name, marks=pytest.mark.matrix)
            for name, one in MORE.items()
        ),
    ],
)
def test_one_replica_is_keras_fit(model, data, single):
    keras.config.set_floatx("float64")
    batches = [data(np.random.default_rng(i), 7 + i % 3, i) for i in range(12)]
    losses, weights = fitted(model, batches)
    net, step = make(model, single, batches[0])
    ours = [step(own_part(b, single)) for b in batches]
    np.testing.assert_allclose(ours, losses, rtol=1e-12)
    for got, wanted in zip(values(net.trainable_variables), weights, strict=True):
        assert np.abs(got - wanted).max() <= 1e-12 * np.abs(wanted).max()
