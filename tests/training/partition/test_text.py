"""Operations on text, and look-ups in tables, each on single strings."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.operands import Operands, check, generator, raw, unit

WORDS = ["", "a", "Bee", "über", "42", "two words", " three  more words ", "é\x00x"]


def words(rng, shape):
    return rng.choice(np.array([w.encode() for w in WORDS], object), shape)


def numerals(rng, shape):
    numbers = rng.integers(0, 99, shape)
    return np.vectorize(lambda n: str(n).encode(), otypes=[object])(numbers)


def table():
    pairs = tf.lookup.KeyValueTensorInitializer([b"a", b"Bee"], [3, 5])
    return tf.lookup.StaticHashTable(pairs, -1)


@pytest.mark.parametrize("seed", range(3))
def test_each_string(seed):
    operands = Operands(generator(seed), [(1,), (1, 1), (2,)][seed])
    operands.sharded([2], seed % 2, words)
    known = table()
    functions = {
        "length": lambda x: tf.strings.length(x),
        "lower": lambda x: tf.strings.lower(x),
        "upper": lambda x: tf.strings.upper(x),
        "strip": lambda x: tf.strings.strip(x),
        "substr": lambda x: tf.strings.substr(x, 0, 1),
        "join": lambda x: tf.strings.join(["<", x, x, ">"]),
        "bucket": lambda x: tf.strings.to_hash_bucket_fast(x, 11),
        "strong": lambda x: tf.strings.to_hash_bucket_strong(x, 11, [1, 2]),
        "old": lambda x: raw("StringToHashBucket", x, num_buckets=11),
        "replace": lambda x: tf.strings.regex_replace(x, "[a-e]", "-"),
        "match": lambda x: tf.strings.regex_full_match(x, ".*e"),
        "encode": lambda x: tf.io.decode_base64(tf.io.encode_base64(x)),
        "table": known.lookup,
        "equal": lambda x: tf.where(x == "a", "b", x),
    }
    assert not check(operands, functions).fallbacks
    operands = Operands(generator(seed)).sharded([2], seed % 2, numerals)
    functions = {
        "number": lambda x: tf.strings.to_number(x, tf.float64),
        "text": lambda x: tf.strings.as_string(tf.strings.to_number(x, tf.int32)),
    }
    assert not check(operands, functions).fallbacks


@pytest.mark.parametrize("seed", range(4))
def test_words_of_rows(seed):
    """They are split whole; later operations on the padded tensor are by rows."""
    operands = Operands(generator(seed)).sharded([], 0, words)

    def padded(x):
        return tf.strings.split(x).to_tensor(shape=[None, 3], default_value="-")

    functions = {
        "padded": padded,
        "long": lambda x: tf.strings.split(x).to_tensor("-"),
        "hashed": lambda x: tf.strings.to_hash_bucket_fast(padded(x), 7) * 2,
        "ragged": lambda x: tf.strings.length(tf.strings.split(x).flat_values),
    }
    made = check(operands, functions)
    assert "RaggedTensorToTensor" not in made.fallbacks


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_crossed_numbers_lie_by_rows(dtype):
    """They depend on single rows, so that all later operations are by rows."""

    def crossed(x, y):
        x, y = (tf.cast(tf.math.floor(n * 5), tf.int64) for n in (x, y))
        dense = tf.sparse.to_dense(tf.sparse.cross_hashed([x, y], 11))
        return tf.cast(tf.ensure_shape(dense, [None, 6]), dtype)

    functions = {
        "crossed": lambda x, y: crossed(x, y),
        "summed": lambda x, y: crossed(x, y)[:, :2] * tf.cast(x, dtype),
    }
    operands = Operands(generator(2)).sharded([2], 0, unit).sharded([3], 0, unit)
    assert check(operands, functions).fallbacks == ["SparseCross"]


def test_strings_are_gathered():
    """This is only for an operation that needs all of them."""
    operands = Operands(generator(0)).sharded([2], 0, words)
    made = check(operands, {"unique": lambda x: tf.unique(tf.reshape(x, [-1]))[0]})
    assert made.fallbacks == ["Unique"]
