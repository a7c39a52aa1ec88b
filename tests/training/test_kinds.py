"""Every kind of data of Keras trains as in stock Keras, on any ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import UsageError
from tests.training.small import NAMES, gather, model, rows
from tests.training.test_fit_arguments import X2, Y2, X, Y, both

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(params=NAMES[:1])
def backend(request, backends_by_name):
    return backends_by_name(request.param)


@pytest.fixture(params=NAMES)
def any_backend(request, backends_by_name):
    return backends_by_name(request.param)


def sgd() -> keras.Model:
    """Return a model with SGD: on data of unknown length Keras miscounts steps for Adam."""
    return model(lambda: keras.optimizers.SGD(0.1))()


def data_set() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def unknown(data: tf.data.Dataset) -> tf.data.Dataset:
    return data.filter(lambda *row: True)


class Items(keras.utils.PyDataset):
    """Has six batches, and counts the requests."""

    def __init__(self, **words):
        super().__init__(**words)
        self.epochs = 0

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index * 10 :][:10], Y[index * 10 :][:10]

    def on_epoch_end(self):
        self.epochs += 1


def generator():
    while True:
        for start in range(0, len(X), 10):
            yield X[start : start + 10], Y[start : start + 10]


BATCHES = {
    "batches": (lambda: data_set().batch(10), {}),
    "drop_remainder": (lambda: data_set().batch(10, drop_remainder=True), {}),
    "size_is_ignored": (lambda: data_set().batch(10), {"batch_size": 3}),
    "small_batches": (lambda: data_set().batch(2), {}),
    "class_weight": (
        lambda: data_set().batch(10),
        {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}},
    ),
    "unknown": (lambda: unknown(data_set().batch(10)), {}),
    "unknown_with_steps": (
        lambda: unknown(data_set().batch(10)),
        {"steps_per_epoch": 4},
    ),
    "infinite": (lambda: data_set().batch(10).repeat(), {"steps_per_epoch": 4}),
    "shuffled": (
        lambda: data_set().shuffle(53, seed=3).batch(10).repeat(),
        {"steps_per_epoch": 4},
    ),
    "generator": (generator, {"steps_per_epoch": 4}),
    "items": (Items, {}),
    "items_by_workers": (lambda: Items(workers=3, max_queue_size=2), {}),
    "items_with_steps": (Items, {"steps_per_epoch": 4}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_ready_made_batches(backend, name):
    make, words = BATCHES[name]
    both(backend, lambda: (make(),), sgd, epochs=4, **words)


def test_batches_for_validation(backend):
    validation = tf.data.Dataset.from_tensor_slices((X2, Y2)).batch(4)
    words = {"validation_data": validation, "epochs": 2}
    both(backend, lambda: (data_set().batch(10),), sgd, **words)
    both(backend, (X, Y), sgd, validation_steps=3, **words)


def test_items_by_processes(backend):
    if backend.size > 1:
        pytest.skip("a fork of a rank is left to Keras")
    both(
        backend,
        lambda: (Items(workers=2, use_multiprocessing=True),),
        sgd,
        epochs=2,
    )


def test_items_come_in_the_order_of_the_seed_and_their_epochs_end(backend):
    first, again, other, plain = (
        collective.fit(
            sgd(),
            items,
            backend=backend,
            verbose=0,
            epochs=2,
            seed=seed,
            shuffle=shuffle,
        ).losses
        for items, seed, shuffle in (
            (Items(), 1, True),
            (Items(workers=2), 1, True),
            (Items(), 2, True),
            (Items(), 1, False),
        )
    )
    assert first == again != other
    assert len({tuple(losses) for losses in (first, other, plain)}) == 3
    alone, ours = Items(), Items()
    sgd().fit(alone, epochs=3, verbose=0)
    collective.fit(sgd(), ours, backend=backend, epochs=3, verbose=0)
    assert ours.epochs == alone.epochs


def test_a_generator_that_ends(backend):
    """As in Keras, an epoch is shorter, and the next begins again with peeked batches."""

    def twelve():
        for start in range(0, 48, 4):
            yield X[start : start + 4], Y[start : start + 4]

    both(backend, lambda: (twelve(),), sgd, steps_per_epoch=5, epochs=4)


def test_passes_over_a_generator_read_nothing_ahead(backend):
    """Batches read ahead would be lost for the next pass, others on each rank."""
    if backend.size == 1:
        pytest.skip("one process reads ahead as Keras does")

    def counting():
        for number in itertools.count():
            yield X[:6] + number, Y[:6]

    with backend.scope():
        model = sgd()
    words = {"backend": backend, "verbose": 0}
    batches = counting()
    collective.evaluate(model, batches, steps=3, **words)
    collective.predict(model, batches, steps=4, **words)
    assert next(batches)[0][0, 0] == X[0, 0] + 7
    validation = counting()
    words |= {"validation_data": validation, "validation_steps": 3}
    collective.fit(model, X, Y, batch_size=10, epochs=3, **words)
    # Keras begins each pass with the two batches that it has inspected.
    assert next(validation)[0][0, 0] == X[0, 0] + 5


def test_data_that_can_be_read_once_are_those_of_keras(backend):
    """Keras warns, and continues with epochs without steps."""

    def data():
        once = iter([(X[:10], Y[:10]), (X[10:20], Y[10:20])])
        return tf.data.Dataset.from_generator(
            lambda: once,
            output_signature=(
                tf.TensorSpec([None, 6], tf.float32),
                tf.TensorSpec([None], tf.int32),
            ),
        )

    wanted = sgd().fit(data(), epochs=3, verbose=0)
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        found = collective.fit(sgd(), data(), backend=backend, epochs=3, verbose=0)
    assert found.epoch == wanted.epoch
    np.testing.assert_allclose(found.history["loss"], wanted.history["loss"], rtol=1e-6)


def two_by_two() -> keras.Model:
    keras.utils.set_random_seed(11)
    one, other = keras.Input((6,), name="one"), keras.Input((6,), name="other")
    hidden = keras.layers.Dense(5, "tanh")(keras.layers.Concatenate()([one, other]))
    outputs = [keras.layers.Dense(n, name=f"out{n}")(hidden) for n in (3, 1)]
    made = keras.Model([one, other], outputs)
    made.compile(
        keras.optimizers.Adam(0.02),
        loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"],
        metrics=[["accuracy"], ["mae"]],
    )
    return made


def of(layers: Callable[[], Any], **words) -> keras.Model:
    keras.utils.set_random_seed(11)
    made = keras.Sequential(layers())
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(**({"optimizer": keras.optimizers.SGD(0.1), "loss": logits} | words))
    return made


def penalised() -> keras.Model:
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x**2))
            return x

    return of(lambda: [keras.Input((6,)), keras.layers.Dense(4), Penalty()], loss=None)


TEXT = np.array([f"w{i % 7} w{i % 3}" for i in range(len(X))])


def reader() -> keras.Model:
    words = keras.layers.TextVectorization(
        output_sequence_length=3, vocabulary=[f"w{i}" for i in range(7)]
    )
    return of(
        lambda: [
            keras.Input((), dtype="string"),
            words,
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


class RowMeans(keras.layers.Layer):
    """Returns mean and sum of a ragged row."""

    def call(self, x):
        return tf.stack([tf.reduce_mean(x, axis=1), tf.reduce_sum(x, axis=1)], axis=1)


def ragged_model() -> keras.Model:
    keras.utils.set_random_seed(11)
    given = keras.Input((None,), ragged=True)
    made = keras.Model(given, keras.layers.Dense(3)(RowMeans()(given)))
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.01), logits)
    return made


def sparse_model() -> keras.Model:
    keras.utils.set_random_seed(11)
    given = keras.Input((6,), sparse=True)
    made = keras.Model(given, keras.layers.Dense(3)(given))
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.1), logits)
    return made


# Made at use, because a tensor at import would start TensorFlow before its devices are set.
def ragged_rows() -> tf.RaggedTensor:
    lengths = [i % 5 + 1 for i in range(len(X))]
    return tf.ragged.constant([np.arange(n, dtype="float32") for n in lengths])


def sparse_rows() -> tf.SparseTensor:
    return tf.sparse.from_dense(np.where(X > 0.5, X, 0))


# Only whole batches, because Keras' losses of single outputs are means of means.
EVEN = slice(0, 50)
ARRAYS = {
    "float64": (lambda: (X.astype("float64"), Y), model()),
    "tensors": (lambda: (tf.constant(X), tf.constant(Y)), model()),
    "lists_of_arrays": (
        lambda: ([X[EVEN], X[EVEN] * 2], [Y[EVEN], X[EVEN, :1]]),
        two_by_two,
    ),
    "dicts": (
        lambda: ({"one": X[EVEN], "other": X[EVEN] * 2}, [Y[EVEN], X[EVEN, :1]]),
        two_by_two,
    ),
    "no_labels": (lambda: (X,), penalised),
    "text": (lambda: (TEXT.astype(object), Y), reader),
    "text_tensor": (lambda: (tf.constant(TEXT), Y), reader),
    "ragged": (lambda: (ragged_rows(), Y), ragged_model),
    "sparse": (lambda: (sparse_rows(), Y), sparse_model),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(backend, name):
    data, make = ARRAYS[name]
    both(backend, data, make, epochs=2, batch_size=10)


@pytest.mark.parametrize("name", ["text", "ragged", "sparse", "no_labels"])
def test_batches_of_such_rows(backend, name):
    data, make = ARRAYS[name]
    rows = data() if len(data()) > 1 else data()[0]
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(10)
    both(backend, lambda: (batches,), make, epochs=2)


@pytest.mark.parametrize("name", ["ragged", "sparse", "text"])
def test_a_part_of_such_rows_for_validation(backend, name):
    data, make = ARRAYS[name]
    both(backend, data, make, epochs=2, batch_size=10, validation_split=0.3)


def test_sequences_of_other_lengths_in_each_batch(backend):
    def batches():
        for length in (3, 5, 4):
            rng = np.random.default_rng(length)
            x = rng.normal(size=(length + 4, length, 6)).astype("float32")
            yield x, np.arange(length + 4) % 3

    def make():
        return of(
            lambda: [
                keras.Input((None, 6)),
                keras.layers.GRU(4),
                keras.layers.Dense(3),
            ]
        )

    both(backend, lambda: (batches(),), make, epochs=1)


def test_data_frames(backend):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abcdef"))
    table["label"] = Y
    both(
        backend,
        lambda: (table[list("abcdef")], table["label"]),
        epochs=2,
        validation_split=0.2,
    )


def test_a_data_loader(backend):
    torch = pytest.importorskip("torch")
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(pairs, batch_size=10)
    both(backend, lambda: (loader,), sgd, epochs=2)


def test_single_rows_need_the_size_of_a_batch(backend):
    words = {"backend": backend, "verbose": 0, "epochs": 2, "shuffle": False}
    wanted = collective.fit(sgd(), X, Y, batch_size=10, **words)
    got = collective.fit(sgd(), data_set(), global_batch_size=10, **words)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-6)
    with pytest.raises(ValueError, match=r"Expected shape \(None, 6\)"):  # Keras' own
        collective.fit(sgd(), data_set(), **words)
    with pytest.raises(UsageError, match="shape that is not fully known") as error:
        collective.fit(sgd(), data_set().batch(10), global_batch_size=10, **words)
    assert "global_batch_size" in str(error.value)
    assert "ensure_shape" not in str(error.value)


def test_ranks_with_other_batches_are_named(backend):
    if backend.size == 1:
        pytest.skip("one process")

    def ends(rank):
        for _ in range(3 + rank):
            yield X[:10], Y[:10]

    def longer(rank):
        yield X[: 10 + rank], Y[: 10 + rank]

    def others(rank):
        yield X[:10], Y[:10]
        yield X[:10] + rank, Y[:10]

    for make, message in (
        (ends, "the data of rank 0 have ended, those of rank 1 go on"),
        (longer, "rank 1 has a batch of 11 rows where rank 0 has 10"),
        (others, "rank 1 has other rows in this batch than rank 0"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            collective.fit(sgd(), make(backend.rank), backend=backend, verbose=0)
        assert error.value.everywhere and "shuffle needs a seed" in str(error.value)
    assert gather(backend, 1) == [1] * backend.size


def test_what_needs_the_numbers_of_rows_is_refused(backend, tmp_path):
    words = {"backend": backend, "verbose": 0}
    with pytest.raises(UsageError, match="rows of batches that are not known") as error:
        collective.fit(sgd(), data_set().batch(10), ledger=tmp_path / "l", **words)
    assert "drop ledger" in str(error.value)


def test_no_row_at_all(backend):
    with warnings.catch_warnings(), pytest.raises(UsageError, match="has no rows"):
        warnings.simplefilter("ignore")
        collective.fit(sgd(), unknown(data_set().batch(9)).take(0), backend=backend)


def test_rows_are_used_once_whatever_the_ranks(any_backend):
    """The gradient of a linear loss is the sum of all rows: it shows a row used twice."""
    x, _ = rows(31, seed=9)
    with any_backend.scope():
        made = of(
            lambda: [
                keras.Input((6,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ],
            loss=lambda y, p: p,
            optimizer=keras.optimizers.SGD(1.0),
        )
    batches = unknown(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4))
    collective.fit(made, batches, backend=any_backend, verbose=0)
    sizes = np.array([4] * 7 + [3])
    wanted = sum(part.mean(0) for part in np.split(x, np.cumsum(sizes)[:-1]))
    np.testing.assert_allclose(
        made.get_weights()[0][:, 0], -wanted, rtol=1e-4, atol=1e-5
    )
