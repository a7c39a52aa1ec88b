"""``collective.evaluate`` and ``collective.predict`` equal Keras' on every rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from tests.training import test_kinds as kinds
from tests.training.small import NAMES, gather, model, rows
from tests.training.test_fit_arguments import X, Y

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def made_in(backend, make=None):
    with backend.scope():
        return (make or model())()


def equal(backend, got, wanted):
    keras.tree.assert_same_structure(got, wanted)
    for mine, theirs in zip(
        keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype
    if isinstance(got, np.ndarray):
        assert got.flags.writeable
        results = gather(backend, got)
        assert all((other == results[0]).all() for other in results)


DATA = {
    "arrays": lambda: (X, Y),
    "few_rows": lambda: (X[:2], Y[:2]),
    "one_row": lambda: (X[:1], Y[:1]),
    "batches": lambda: (kinds.data_set().batch(10),),
    "unknown": lambda: (kinds.unknown(kinds.data_set().batch(10)),),
    "items": lambda: (kinds.Items(),),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("words", [{}, {"batch_size": 10, "steps": 1}])
def test_as_keras_on_all_data(backend, name, words):
    made, alone = made_in(backend), model()()
    for return_dict in (True, False):
        options = {"verbose": 0, "return_dict": return_dict} | words
        got = collective.evaluate(made, *DATA[name](), backend=backend, **options)
        wanted = alone.evaluate(*DATA[name](), **options)
        assert list(got) == list(wanted) if return_dict else type(got) is type(wanted)
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    x = DATA[name]()[0]
    got = collective.predict(made, x, backend=backend, verbose=0, **words)
    equal(backend, got, alone.predict(x, verbose=0, **words))


def test_sample_weights_of_an_evaluation(backend):
    weight = np.linspace(0, 1, len(X))
    options = {"sample_weight": weight, "verbose": 0}
    got = collective.evaluate(made_in(backend), X, Y, backend=backend, **options)
    assert got == pytest.approx(model()().evaluate(X, Y, **options), rel=1e-5)


def tree() -> keras.Model:
    keras.utils.set_random_seed(3)
    given = keras.Input((6,))
    one, other = keras.layers.Dense(2)(given), keras.layers.Dense(3)(given)
    return keras.Model(given, {"one": one, "both": [one, other]})


@pytest.mark.parametrize("count", [1, 2, 53])
def test_trees_of_outputs_of_a_model_that_is_not_compiled(backend, count):
    got = collective.predict(
        made_in(backend, tree), X[:count], 10, backend=backend, verbose=0
    )
    equal(backend, got, tree().predict(X[:count], verbose=0))


@pytest.mark.parametrize("name", ["text", "ragged", "sparse"])
def test_predictions_of_other_kinds_of_rows(backend, name):
    if hasattr(backend, "strategy"):
        pytest.skip("tf.distribute has no ragged or sparse values of replicas")
    data, make = kinds.ARRAYS[name]
    got = collective.predict(make(), data()[0], backend=backend, verbose=0)
    equal(backend, got, make().predict(data()[0], verbose=0))


def test_ragged_outputs(backend):
    class Cut(keras.Model):
        def call(self, x):
            return tf.RaggedTensor.from_tensor(x, tf.cast(x[:, 0] > 0, tf.int32) + 1)

    if hasattr(backend, "strategy"):
        pytest.skip("tf.distribute has no ragged values of replicas")
    got = collective.predict(Cut(), X, 10, backend=backend, verbose=0)
    assert got.to_list() == Cut().predict(X, verbose=0).to_list()


def test_the_weights_are_those_of_rank_zero(backend):
    made = made_in(backend)
    made.set_weights([w + backend.rank for w in made.get_weights()])
    wanted = model()()
    got = collective.predict(made, X, backend=backend, verbose=0)
    equal(backend, got, wanted.predict(X, verbose=0))
    made.set_weights([w + backend.rank for w in made.get_weights()])
    options = {"verbose": 0, "return_dict": True}
    loss = collective.evaluate(made, X, Y, backend=backend, **options)["loss"]
    assert loss == pytest.approx(wanted.evaluate(X, Y, **options)["loss"], rel=1e-5)


def test_a_callback_ends_a_pass(backend):
    class Stops(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            assert logs["outputs"].shape == (10, 3)
            self.model.stop_predicting = batch == 1

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

    made, alone = made_in(backend), model()()
    words = {"batch_size": 10, "verbose": 0, "callbacks": Stops()}
    got = collective.predict(made, X, backend=backend, **words)
    assert got.shape == (20, 3)
    equal(backend, got, alone.predict(X, **words))
    got = collective.evaluate(made, X, Y, backend=backend, **words)
    assert got == pytest.approx(alone.evaluate(X, Y, **words), rel=1e-5)


def test_rank_zero_alone_prints(backend, capfd):
    made, (x, y) = made_in(backend), rows()
    collective.evaluate(made, x, y, backend=backend, verbose=2)
    first, *others = gather(backend, capfd.readouterr().out)
    assert others == [""] * (backend.size - 1) and "accuracy" in first


class Counts(keras.layers.Layer):
    """Writes a count of its own, and optionally a value from the rows."""

    def __init__(self, by_rows):
        super().__init__()
        self.by_rows = by_rows

    def build(self, shape):
        words = {"shape": (), "initializer": "ones", "trainable": False}
        self.calls, self.mean = (self.add_weight(**words) for _ in range(2))

    def call(self, x):
        self.calls.assign(1.5 * self.calls + 1)
        if self.by_rows:
            self.mean.assign(0.5 * self.mean + keras.ops.mean(x))
        return x


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("count", [1, 7])
def test_what_predicting_writes(backend, by_rows, count):
    if hasattr(backend, "strategy"):
        pytest.skip("each device writes a copy")
    ours, alone = (keras.Sequential([Counts(by_rows)]) for _ in range(2))
    for _ in range(2):
        got = collective.predict(ours, X[:count], 4, backend=backend, verbose=0)
        equal(backend, got, alone.predict(X[:count], 4, verbose=0))
    wanted = [float(v) for v in alone.variables]
    for found in gather(backend, [float(v) for v in ours.variables]):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_batches_of_texts_of_other_lengths(backend):
    """Keras returns a ragged tensor of its batches, each of which has rows."""
    texts = [np.arange(n % 5 + 1) for n in range(11)]
    read = tf.data.Dataset.from_generator(
        lambda: iter(texts), output_signature=tf.TensorSpec([None], tf.int64)
    ).padded_batch(4)

    def of_texts():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(5, 3), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((None,), dtype="int64"), *layers])

    made = made_in(backend, of_texts)
    alone = of_texts()
    alone.set_weights(made.get_weights())
    for data in (read, read.take(1)):
        got = collective.predict(made, data, backend=backend, verbose=0)
        wanted = alone.predict(data, verbose=0)
        assert type(got) is type(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            both = np.asarray(mine), np.asarray(theirs)
            np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_is_evaluated_as_in_keras(backend):
    """Cases are a correlation of equal predictions, and a row that is not a number."""

    def of_zeros():
        layers = [keras.Input(X.shape[1:]), keras.layers.Dense(2)]
        made = keras.Sequential(layers)
        made.compile(loss="mse", metrics=[keras.metrics.PearsonCorrelation()])
        made.set_weights([np.zeros_like(w) for w in made.get_weights()])
        return made

    x, y = X.copy(), np.random.default_rng(3).normal(size=(len(X), 2))
    for _ in range(2):
        words = {"batch_size": 10, "verbose": 0, "return_dict": True}
        got = collective.evaluate(
            made_in(backend, of_zeros), x, y, backend=backend, **words
        )
        wanted = of_zeros().evaluate(x, y, **words)
        assert got == pytest.approx(wanted, rel=1e-5, nan_ok=True)
        x[3] = np.nan
