"""Operations on text, and look-ups in tables, each on single strings."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.layouts import ROWS
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


def characters(x: tf.Tensor) -> tf.RaggedTensor:
    return tf.strings.unicode_decode(x, "UTF-8", "ignore")


def test_characters_and_words_of_any_number():
    """They are split whole; what is padded to the rows again is by rows."""

    def kinds(x):
        return tf.reduce_sum(tf.one_hot(characters(x).to_tensor() % 11, 11), 1) * 2

    ragged = {
        "words": lambda x: tf.strings.split(x),
        "words of pairs": lambda x: tf.strings.split(tf.stack([x, x], 1)),
        "characters": characters,
        "characters of pairs": lambda x: characters(tf.stack([x, x], 1)),
        "starts": lambda x: tf.strings.unicode_decode_with_offsets(x, "UTF-8")[1],
    }

    def parts(make):
        def of(x):
            made = make(x)
            padded = made.to_tensor()
            return made.flat_values, *made.nested_row_splits, padded, made.nrows()

        return of

    def cut_off(make):
        def of(x):
            few = tf.reduce_sum(tf.strings.length(x)) % 3 + 1
            return make(x).to_tensor(shape=tf.stack([few, 2]))

        return of

    functions = {name: parts(make) for name, make in ragged.items()}
    functions |= {f"cut {n}": cut_off(ragged[n]) for n in ("words", "characters")}
    functions["kinds"] = kinds
    functions["raw"] = lambda x: raw("StringSplitV2", x, " ", maxsplit=1)[:3]
    functions["encoded"] = lambda x: tf.strings.unicode_encode(characters(x), "UTF-8")
    for seed, blocks in enumerate([(1,), (1, 2)]):
        made = check(Operands(generator(seed), blocks).sharded([], 0, words), functions)
    whole = {"StringSplitV2", "UnicodeDecode", "UnicodeDecodeWithOffsets"}
    assert set(made.fallbacks) == whole
    counts = check(Operands(generator(0)).sharded([], 0, words), {"kinds": kinds})
    nodes = [n for n in counts.partition.graph.nodes if n.type in ("OneHot", "Mul")]
    assert nodes and all(n.outputs[0].layout == ROWS for n in nodes)


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
