"""Sources: the read rows equal the written arrays; errors say what to do."""

from __future__ import annotations

import collections
import os

import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input import arrays as arrays_module
from collective.training.input.arrays import Arrays
from collective.training.input.conversion import as_source
from collective.training.input.npz import npz_sources, open_npz
from collective.training.input.pipeline import Input
from collective.training.input.source import explain
from collective.training.input.stream import Stream
from collective.training.input.synthetic import Synthetic
from collective.training.input.views import MappedX

ROWS = 29
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
Y = np.arange(ROWS, dtype=np.int32) % 5
W = np.linspace(0, 1, ROWS)


def rows_of(source, rows):
    """Read rows inside of tf.data, as the input plan does."""
    read = tf.data.Dataset.from_tensors(np.array(rows, np.int64)).map(source.read)
    return next(read.as_numpy_iterator())


def assert_reads(source, tree, rows=(4, 4, 28, 0)):
    """Check that the source gives just these rows of the arrays, with the promised shapes."""
    assert len(source) == ROWS
    for wanted in (list(rows), []):
        got = rows_of(source, wanted)
        expected = tf.nest.map_structure(
            lambda a, wanted=wanted: None if a is None else a[wanted], tree
        )
        tf.nest.assert_same_structure(got, expected)
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    spec = Input(source, 4).dataset(0, 1, range(1), 1).element_spec[:3]
    for row, batch in zip(
        tf.nest.flatten(source.spec), tf.nest.flatten(spec), strict=True
    ):
        if row is not None:
            assert batch == tf.TensorSpec([None, *row.shape], row.dtype)


def fails(message, build, *arguments, **keywords):
    with pytest.raises(UsageError, match=message) as caught:
        build(*arguments, **keywords)
    assert "\nHINT: " in str(caught.value)
    assert caught.value.exit_code == 2


# Arrays


@pytest.mark.parametrize("resident", [True, False])
def test_arrays_of_any_structure(monkeypatch, resident):
    if not resident:
        monkeypatch.setattr(arrays_module, "_RESIDENT_BYTES", 0)
    assert_reads(as_source((X, Y)), (X, Y, None))
    assert_reads(as_source((X, Y, W)), (X, Y, W))
    x = {"a": X, "b": (Y, X.astype(">f8"))}
    assert_reads(as_source((x, (Y, X), {"w": W})), (x, (Y, X), {"w": W}))
    assert_reads(as_source((X.tolist(), Y.tolist())), (X, Y.astype(np.int64), None))
    words = np.array([f"wörd {i}" for i in range(ROWS)])
    assert rows_of(Arrays(words, Y), [7])[0].tolist() == ["wörd 7".encode()]


def test_arrays_that_do_not_fit_together():
    fails("x has 29 rows, y has 28", Arrays, X, Y[1:])
    fails(r"x\['a'\] has 29 rows, sample_weight has 3", Arrays, {"a": X}, Y, W[:3])
    fails(r"y\[1\] is not an array.*object", Arrays, X, (Y, np.array([None] * ROWS)))
    fails("x is not an array", Arrays, [[1, 2], [3]], Y)
    fails("y is not an array", Arrays, X, 3)
    fails("a dict is not data", as_source, {"x": X})
    fails("a tuple of 1 is not data", as_source, (X,))


def test_label_range():
    assert Arrays(X, Y).label_range() == (0, 4)
    assert Arrays(X, Y - 1).label_range() == (-1, 3)
    assert Arrays(X, X).label_range() is None
    assert Arrays(X, {"a": Y}).label_range() is None


def test_fingerprints_distinguish_data():
    assert Arrays(X, Y).fingerprint() == Arrays(X.copy(), Y).fingerprint()
    assert Arrays(X, Y).fingerprint() != Arrays(X[::-1], Y).fingerprint()
    assert Arrays(X, Y).fingerprint() != Arrays(X, Y.astype(np.int64)).fingerprint()


# .npz


def test_npz_is_mapped_if_stored_and_loaded_if_compressed(tmp_path):
    fortran = np.asfortranarray(X)
    np.savez(tmp_path / "stored.npz", x=fortran, y=Y, sample_weight=W)
    np.savez_compressed(tmp_path / "packed.npz", x=X, y=Y, sample_weight=W)
    for name, mapped in (("stored.npz", True), ("packed.npz", False)):
        source, test = npz_sources(tmp_path / name)
        assert test is None
        assert all(
            isinstance(array, np.memmap) == mapped
            for array in open_npz(tmp_path / name).values()
        )
        assert_reads(source, (X, Y, W))


def test_npz_with_test_rows(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3])
    train, test = npz_sources(tmp_path / "a.npz")
    assert_reads(train, (X, Y, None))
    assert test is not None and len(test) == 3


def test_npz_that_cannot_be_read(tmp_path):
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "torn.npz").write_bytes(whole[:-9])
    (tmp_path / "foreign.npz").write_text("x,y\n1,2\n")
    np.savez(tmp_path / "keys.npz", images=X, labels=Y)
    np.savez(tmp_path / "pickled.npz", x=np.array([{}, {}]), y=Y[:2])
    fails("file .*none.npz does not exist", npz_sources, tmp_path / "none.npz")
    fails("torn.npz cannot be read", npz_sources, tmp_path / "torn.npz")
    fails("foreign.npz cannot be read", npz_sources, tmp_path / "foreign.npz")
    fails("keys images, labels", npz_sources, tmp_path / "keys.npz")
    fails("pickled.npz cannot be read", npz_sources, tmp_path / "pickled.npz")
    np.savez(tmp_path / "lengths.npz", x=X, y=Y[1:])
    fails("x has 29 rows, y has 28", npz_sources, tmp_path / "lengths.npz")


def test_a_mapped_array_is_larger_than_a_tensor_may_be(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(ROWS, 20_000_000))  # 2.3 GB
    x[3, 7] = 5
    source = Arrays(x, Y)
    assert source.spec[0].shape == [20_000_000]
    read, _, _ = rows_of(source, [3])
    assert read[0, 7] == 5


def test_npz_that_shrinks_while_it_is_read(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, x=np.zeros((ROWS, 10_000), np.float32), y=Y)
    source, _ = npz_sources(file)
    rows_of(source, [ROWS - 1])
    os.truncate(file, 5_000)  # reading a removed part would end the process by SIGBUS
    with pytest.raises(tf.errors.OpError) as caught:
        rows_of(source, [ROWS - 1])
    failure = explain(caught.value)
    assert failure is not None and not failure.everywhere
    assert f"{file} has become shorter while it is read" in failure.message
    assert "{{" not in failure.message and "[" not in failure.message
    assert failure.hint == "write data under another name, and rename it"
    assert explain(tf.errors.UnknownError(None, None, "else")) is None


# Data sets


def test_a_stream_has_its_elements_for_rows():
    source = as_source(tf.data.Dataset.from_tensor_slices(({"a": X}, Y, W)))
    assert isinstance(source, Stream) and len(source) == ROWS
    assert source.spec[0] == {"a": tf.TensorSpec([3], tf.float32)}
    batches = list(source.in_order(10, 1, 4).as_numpy_iterator())
    assert [len(batch[1]) for batch in batches] == [10, 9, 10]
    np.testing.assert_array_equal(batches[1][2], W[20:])


def test_a_stream_takes_named_tuples():
    row = collections.namedtuple("row", "image label")
    source = as_source(tf.data.Dataset.from_tensor_slices(row(X, Y)))
    (batch,) = source.in_order(ROWS, 0, 1).as_numpy_iterator()
    np.testing.assert_array_equal(batch[1], Y)
    assert batch[2] is None


def test_a_seeded_shuffle_is_the_same_on_every_rank_and_others_show():
    def rank(seed):
        dataset = tf.data.Dataset.from_tensor_slices((X, np.arange(ROWS)))
        source = Stream(dataset.shuffle(ROWS, seed=seed))
        steps = source.in_order(ROWS, 0, 3).as_numpy_iterator()
        return source.fingerprint(), [batch[1].tolist() for batch in steps]

    assert rank(1) == rank(1)
    assert rank(1)[0] != rank(2)[0]
    epochs = rank(1)[1]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)


def test_data_sets_that_cannot_be_shared():
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    fails("of infinite length", as_source, data.repeat())
    fails("of unknown length", as_source, data.filter(lambda x, y: y > 1))
    fails("gives a TensorSpec for a row", as_source, tf.data.Dataset.range(3))
    ragged = data.map(lambda x, y: (x[:y], y))
    fails("not fully known", as_source, ragged)


# Sources made of others


def test_changed_rows():
    mapped = MappedX(Arrays(X, Y, W), lambda x: tf.cast(x[:, :2], tf.float64) * 2)
    assert mapped.spec[0] == tf.TensorSpec([2], tf.float64)
    assert_reads(mapped, (X[:, :2].astype(np.float64) * 2, Y, W))


def test_synthetic_rows_depend_on_their_number_alone():
    source = Synthetic((4, 5, 3), 20, ROWS, seed=3)
    every, labels, _ = rows_of(source, range(ROWS))
    assert every.shape == (ROWS, 4, 5, 3) and every.dtype == np.float32
    assert len(np.unique(every.reshape(ROWS, -1), axis=0)) == ROWS
    assert_reads(source, (every, labels, None))
    assert labels.min() >= 0 and labels.max() < 20
    later = Synthetic((4, 5, 3), 20, 3, seed=3, first=10)
    np.testing.assert_array_equal(rows_of(later, [0, 2])[0], every[[10, 12]])
    other = Synthetic((4, 5, 3), 20, ROWS, seed=4)
    assert not np.array_equal(rows_of(other, range(ROWS))[0], every)
