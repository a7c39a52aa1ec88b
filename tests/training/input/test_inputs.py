"""The input plan: every row once in an epoch, equal batches for all, resumable."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.errors import UsageError
from collective.training.input import arrays, pipeline
from collective.training.input.pipeline import Batch, Input, share
from collective.training.input.plan import RowPlan
from collective.training.input.source import Source


def numbered(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return data in which x and y hold the row number."""
    return np.arange(rows, dtype=np.float32)[:, None] * [1, -1], np.arange(rows)


def gathered(plan: Input, first: int, last: int, processes: list[range]) -> list:
    """Return the row numbers of each step that all processes together read."""
    replicas = processes[-1].stop
    parts = [
        [
            batch.y
            for batch in plan.dataset(first, last, p, replicas).as_numpy_iterator()
        ]
        for p in processes
    ]
    return [np.concatenate(step).tolist() for step in zip(*parts, strict=True)]


@settings(deadline=None)
@given(rows=st.integers(0, 10_000), replicas=st.integers(1, 64))
def test_shares_are_contiguous_and_even(rows, replicas):
    shares = [share(rows, replica, replicas) for replica in range(replicas)]
    assert shares[0][0] == 0 and shares[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1
    as_tensors = share(tf.constant(rows), tf.constant(replicas - 1), replicas)
    assert tuple(int(t) for t in as_tensors) == shares[-1]


@settings(deadline=None)
@given(
    rows=st.integers(1, 500),
    size=st.integers(1, 600),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 5),
    workers=st.integers(1, 8),
)
def test_every_row_comes_once_an_epoch(rows, size, seed, epoch, workers):
    plan = Input(numbered(rows), size, seed=seed)
    seen: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        batch = plan.plan.row_numbers(step, step + 1)
        start = step % plan.steps_per_epoch * size
        assert len(batch) == min(size, rows - start)
        for worker in range(workers):
            start, stop = share(len(batch), worker, workers)
            seen.extend(batch[start:stop])
    assert sorted(seen) == list(range(rows))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 70),
    seed=st.integers(0, 2**64),
    workers=st.integers(1, 8),
    shuffle=st.booleans(),
    block=st.sampled_from([1, 7, 20, 1 << 16]),
    data=st.data(),
)
def test_workers_together_read_the_global_batches(
    rows, size, seed, workers, shuffle, block, data
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_BLOCK_ROWS", block)
        plan = Input(numbered(rows), size, seed=seed, shuffle=shuffle)
        first = data.draw(st.integers(0, 2 * plan.steps_per_epoch))
        last = first + min(2 * plan.steps_per_epoch + 1, 40)
        processes = [range(w, w + 1) for w in range(workers)]
        expected = [
            plan.plan.row_numbers(step, step + 1).tolist()
            for step in range(first, last)
        ]
        assert gathered(plan, first, last, processes) == expected
        if not shuffle:
            assert expected[0][0] == first % plan.steps_per_epoch * size


def test_processes_with_several_replicas_read_the_same():
    plan = Input(numbered(23), 10)
    expected = [plan.plan.row_numbers(step, step + 1).tolist() for step in range(5)]
    for processes in [[range(4)], [range(1), range(1, 4)], [range(2), range(2, 4)]]:
        assert gathered(plan, 0, 5, processes) == expected


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_resuming_at_any_step_equals_going_on(kind):
    data = numbered(11)
    source = data if kind == "arrays" else tf.data.Dataset.from_tensor_slices(data)
    plan = Input(source, 4, seed=3)
    whole = gathered(plan, 0, 10, [range(2)])
    for step in range(10):
        assert gathered(plan, step, 10, [range(2)]) == whole[step:]


def test_a_stream_keeps_its_order_and_shares_it():
    plan = Input(tf.data.Dataset.from_tensor_slices(numbered(11)), 4)
    steps = gathered(plan, 1, 7, [range(1), range(1, 3)])
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert steps == (3 * epoch)[1:7]
    assert plan.plan.row_numbers(5, 6).tolist() == [8, 9, 10]


def test_a_batch_says_what_it_is():
    x = {"a": np.zeros((5, 3), np.float32), "b": (np.arange(5), np.ones((5, 2)))}
    plan = Input((x, np.arange(5), np.ones(5, np.float32)), 2)
    dataset = plan.dataset(0, 3, range(1), 2)
    spec = dataset.element_spec
    assert isinstance(spec, Batch)
    assert spec.x["a"] == tf.TensorSpec([None, 3], tf.float32)
    assert spec.x["b"][1] == tf.TensorSpec([None, 2], tf.float64)
    assert spec.sample_weight == tf.TensorSpec([None], tf.float32)
    assert [int(batch.global_rows) for batch in dataset] == [2, 2, 1]
    assert next(iter(Input(numbered(3), 2).dataset(0, 1, range(1), 1)))[2] is None


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_a_function_traces_once_also_for_no_rows(kind):
    data = numbered(5)
    source = data if kind == "arrays" else tf.data.Dataset.from_tensor_slices(data)
    dataset = Input(source, 4).dataset(0, 4, range(1), 3)
    traces = []

    @tf.function(input_signature=[dataset.element_spec])
    def count(batch):
        traces.append(batch)
        return tf.shape(batch.x)[0]

    assert [int(count(batch)) for batch in dataset] == [1, 0, 1, 0]
    assert len(traces) == 1


def test_what_reads_ahead_ends_before_the_interpreter_does():
    """A thread that waits for the lock of an interpreter that ends would wait for ever."""

    def refuse(batch):
        raise ValueError("of the step")

    reads = Input(numbered(9), 2).read_ahead(0, 40, range(1), 1)
    iterator = weakref.ref(reads._batches)
    try:
        refuse(next(reads))
    except ValueError as error:
        kept = error  # as the traceback of a script's end does, with all of its frames
    pipeline._close_all()
    assert iterator() is None and kept
    assert next(reads, None) is None


def test_an_error_of_the_data_keeps_nothing_open():
    class Bad(Source):
        spec = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64), None)

        def __len__(self):
            return 9

        def read(self, rows):
            with tf.control_dependencies([tf.debugging.assert_less(rows, np.int64(5))]):
                return tf.identity(rows), tf.identity(rows), None

    reads = Input(Bad(), 2, shuffle=False).read_ahead(0, 40, range(1), 1)
    iterator = weakref.ref(reads._batches)
    with pytest.raises(tf.errors.InvalidArgumentError) as kept:
        list(reads)
    assert iterator() is None and kept.value.__traceback__ is not None


@pytest.mark.parametrize("movable", [False, True])
def test_large_arrays_are_dropped_with_their_training(monkeypatch, movable):
    """TensorFlow keeps the functions of data sets, so 200 trainings would keep 200 arrays."""
    monkeypatch.setattr(arrays, "_RESIDENT_BYTES", 0)
    inputs = Input(numbered(9), 2, shuffle=False)
    source, plan = weakref.ref(inputs.source), weakref.ref(inputs.plan)
    make = inputs.movable() if movable else inputs.read_ahead
    reads = make(0, 10, range(1), 1)
    del inputs, make
    gc.collect()
    rows = [row for batch in reads for row in batch.y.numpy()]
    assert rows == 2 * [*range(9)]
    del reads
    gc.collect()
    assert source() is None and plan() is None


def test_no_steps_give_no_batches():
    assert not list(Input(numbered(5), 2).dataset(4, 4, range(1), 1))


def test_a_data_set_knows_its_length():
    assert len(Input(numbered(5), 2).dataset(1, 9, range(1), 1)) == 8


def test_an_empty_plan_is_refused():
    with pytest.raises(UsageError, match=r"no rows\nHINT: "):
        Input(numbered(0), 2)
    with pytest.raises(UsageError, match=r"batch of 0 rows.*\nHINT: "):
        Input(numbered(2), 0)


def test_each_epoch_has_an_order_of_its_own():
    plan = RowPlan(rows=50, global_batch_size=10, seed=3, shuffle=True)
    orders = [tuple(plan.row_numbers(5 * e, 5 * e + 5)) for e in range(4)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
