"""Every draw of some rows is those rows of the draw for all, bit for bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.keras_compat import NOT_ROWS, Place, draw_rows
from collective.training.keras_compat.row_draws import _advanced

ROWS, PIECES = 13, [(0, 5), (5, 6), (6, 13)]
SEED = [5, 9]
WIDE = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")
pytestmark = pytest.mark.usefixtures("clean_keras")


def draws(x):
    """By name, draws for the rows of x, ``[n, 6]``."""
    n, random = tf.shape(x)[0], tf.random
    found = {}
    for shape in [(n,), (n, 3), (n, 4), (n, 5, 7), (n * 2, 3)]:
        name = f"{shape[1:]}{len(found)}"
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            for kind in ("uniform", "normal", "truncated_normal"):
                draw = getattr(random, f"stateless_{kind}")
                found[f"{kind} {dtype} {name}"] = draw(shape, SEED, dtype=dtype)
        for dtype in ("int32", "int64"):
            draw = random.stateless_uniform(shape, SEED, 0, 1000, dtype=dtype)
            found[f"{dtype} {name}"] = draw
        bits = random.stateless_uniform(shape, SEED, None, None, dtype="uint64")
        found[f"bits {name}"] = bits
    kr, positive = keras.random, x[:, :3] ** 2 + 0.1
    found |= {
        "dropout": kr.dropout(x, 0.4, seed=3),
        "spatial dropout": kr.dropout(x, 0.4, noise_shape=(None, 1), seed=3),
        "gamma": kr.gamma((n, 3), 2.0, seed=4),
        "gamma by row": kr.gamma((n, 3), positive, seed=4),
        "gamma by column": kr.gamma((n, 3), tf.constant([0.5, 1, 2]), seed=4),
        "beta by row": kr.beta((n, 3), positive, 0.3, seed=4),
        "binomial": kr.binomial((n, 3), 10.0, 0.3, seed=4),
        "binomial by row": kr.binomial((n, 3), 10.0, tf.sigmoid(x[:, :3]), seed=4),
        "categorical": kr.categorical(x, 2, seed=4),
        "not of rows": random.stateless_normal((ROWS, 3), SEED),
    }
    return found


def draws_that_keep_a_state(x):
    n, random = tf.shape(x)[0], tf.random
    return {
        "normal": random.normal((n, 3)),
        "uniform": random.uniform((n, 3)),
        "int": random.uniform((n, 3), 0, 100, dtype="int32"),
        "truncated": random.truncated_normal((n, 3)),
        "dropout": tf.nn.dropout(x, 0.3),
        "categorical": random.categorical(x, 2),
    }


def traced(function):
    """A function of rows and their place, as a graph."""
    number = tf.TensorSpec([], tf.int64)
    signature = [tf.TensorSpec([None, 6]), number, number]

    def call(x, first, total):
        with draw_rows(Place(first, tf.shape(x)[0], total)) as others:
            return function(x), others

    others = []

    def graph(x, first, total):
        result, more = call(x, first, total)
        others[:] = more
        return result

    keras.utils.set_random_seed(1)
    return tf.function(graph, input_signature=signature), others


@pytest.mark.parametrize("made", [draws, draws_that_keep_a_state])
def test_pieces_are_rows_of_the_whole(made):
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    keras.utils.set_random_seed(1)
    plain = tf.function(made, input_signature=[tf.TensorSpec([None, 6])])
    whole = {name: value.numpy() for name, value in plain(x).items()}
    function, others = traced(made)
    for start, stop in PIECES:
        if made is draws_that_keep_a_state:  # the first call: traced again
            function, others = traced(made)
        for name, value in function(x[start:stop], start, ROWS).items():
            wanted, fold = whole[name], len(whole[name]) // ROWS
            if name != "not of rows":
                wanted = wanted[start * fold : stop * fold]
            np.testing.assert_array_equal(value.numpy(), wanted, err_msg=name)
    named = {"draws of tf.random that keep a state of their own"}
    assert set(others) == (named if made is draws_that_keep_a_state else set())


def test_a_counter_carries():
    for low, high, counts in [(2**64 - 3, 7, 5), (2**63 - 1, 0, 1), (4, 2**64 - 1, 9)]:
        after = _advanced(
            tf.constant([low, high], tf.uint64), tf.constant(counts, tf.int64)
        )
        whole = (low + (high << 64) + counts) % 2**128
        assert after.numpy().tolist() == [whole % 2**64, whole >> 64]


def test_what_is_drawn_otherwise_is_named():
    def mixed(x):
        time_first = tf.random.stateless_normal((4, tf.shape(x)[0]), SEED)
        return tf.random.shuffle(x), time_first

    function, others = traced(mixed)
    function.get_concrete_function()
    assert set(others) == {
        "a shuffle of the rows of a batch",
        "a draw of shape (4, None), whose rows are not first",
    }


def test_a_draw_over_some_of_the_rows_is_an_error():
    def some(x):
        chosen = tf.boolean_mask(x, x[:, 0] > 0)
        return tf.random.stateless_normal(tf.shape(chosen), SEED)

    function, _ = traced(some)
    x = np.ones((3, 6), "float32") * [[1], [-1], [1]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=NOT_ROWS):
        function(x, 3, 9)


def test_batches_one_behind_the_other_have_their_rows_of_each():
    def joined(x):
        both, stacked = tf.concat([x, -x], 0), tf.reshape(tf.stack([x, x, -x]), [-1, 6])
        apart = tf.split(both, 2)[1]  # as many rows as the batch again
        return {
            "concat": tf.random.stateless_normal(tf.shape(both), SEED),
            "dropout": keras.random.dropout(tf.nn.relu(both @ WIDE), 0.4, seed=3),
            "stack": tf.random.stateless_uniform((tf.shape(stacked)[0], 3), SEED),
            "tile": keras.random.binomial(
                tf.shape(tf.tile(x, [2, 1])), 9.0, 0.3, seed=4
            ),
            "apart": tf.random.stateless_normal(tf.shape(apart), SEED),
            "fold": tf.random.stateless_normal(tf.shape(tf.repeat(x, 3, 0)), SEED),
        }

    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    graph, _ = traced(joined)
    whole = {k: v.numpy() for k, v in graph(x, 0, ROWS).items()}
    blocks = {"concat": 2, "dropout": 2, "stack": 3, "tile": 2}
    for begin, end in PIECES:
        for name, got in graph(x[begin:end], begin, ROWS).items():
            parts = whole[name].reshape(blocks.get(name, 1), ROWS, -1)
            wanted = parts[:, begin:end].reshape(got.shape)
            np.testing.assert_array_equal(got, wanted, name)
