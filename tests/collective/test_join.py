"""Ranks with fewer batches than others join, and do not change results."""

import random

import numpy as np
import pytest
from rank_data import assert_close, numpy_dtype, reduced, values

import collective
from collective import Disagreement
from collective.operations.call import Call
from collective.operations.kinds import Kind, Op

# The number of batches of a rank. The first rank chooses the order of calls by name.
BATCHES = {
    "the last rank joins first": lambda rank, size: size - rank,
    "the first rank joins first": lambda rank, size: 1 + rank,
    "one rank has more": lambda rank, size: 3 if rank == min(1, size - 1) else 1,
    "some have none": lambda rank, size: 2 * (rank % 2),
    "all have as many": lambda rank, size: 2,
}


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batches(request, size):
    """Return the number of batches of each rank."""
    return [request.param(rank, size) for rank in range(size)]


def last_of(batches):
    return max(range(len(batches)), key=lambda rank: (batches[rank], rank))


def those_with(batches, step):
    return [rank for rank, number in enumerate(batches) if step < number]


def average(arrays, size):
    """Return the sum divided by the number of all ranks."""
    return (np.sum(arrays, 0, dtype="float64") / size).astype(arrays[0].dtype)


@pytest.mark.parametrize("count", [3, 200_000])
def test_in_program_order(rank, size, batches, count):
    for step in range(batches[rank]):
        callers = those_with(batches, step)
        arrays = [values(r, count, "float32", step) for r in callers]
        mine = values(rank, count, "float32", step)
        assert_close(collective.allreduce(mine), average(arrays, size))
        rows = [np.full((r + 1, 2), r) for r in callers]
        np.testing.assert_array_equal(
            collective.allgather(rows[callers.index(rank)]), np.concatenate(rows)
        )
    assert collective.join() == last_of(batches)
    np.testing.assert_array_equal(collective.allgather(np.array([rank])), range(size))


def test_what_is_reduced_with_neutral_values(rank, size):
    """All ranks reduce except one, which joins at once."""
    away, callers = size - 1, range(size - 1)
    if rank != away:
        for dtype in ("float32", "float16", "bfloat16", "int8", "int64", "uint8"):
            for op in (Op.Sum, Op.Min, Op.Max, Op.Product):
                arrays = [values(r, 5, dtype, int(op)) for r in callers]
                assert_close(
                    collective.allreduce(arrays[rank], op), reduced(arrays, op)
                )
        for op in (Op.Min, Op.Max):
            arrays = [values(r, 9, "bool") for r in callers]
            assert_close(collective.allreduce(arrays[rank], op), reduced(arrays, op))
        mixed = [
            [values(r, shape, dtype) for r in callers]
            for shape, dtype in [
                ((2, 3), "float32"),
                (70_000, "int32"),
                ((), "float64"),
            ]
        ]
        results = collective.grouped_allreduce(
            [arrays[rank] for arrays in mixed],
            Op.Sum,
            name="mixed",
            transport_dtype="bfloat16",
        )
        for result, arrays in zip(results, mixed, strict=True):
            assert_close(
                result.astype(numpy_dtype(arrays[0].dtype.name)),
                reduced(arrays, Op.Sum),
            )
        for algorithm in ("one-shot", "direct", "halving-doubling"):
            array = values(rank, 999, "float64")
            result = collective.allreduce(array, Op.Sum, algorithm=algorithm)
            assert_close(
                result, reduced([values(r, 999, "float64") for r in callers], Op.Sum)
            )
    assert collective.join() == max(size - 2, 0)


def test_by_name_in_any_order(rank, size, batches):
    """Each rank calls in an order of its own, as functions do, and also in program order."""

    def start(step, number):
        array = values(rank, 10 + number, "float64", number)
        out = np.empty_like(array)
        name = f"tensor {number} of {step}"
        return Call(Kind.ALL_REDUCE, [(array, out)], out, name=name, order=1).start()

    for step in range(batches[rank]):
        callers = those_with(batches, step)
        order = random.Random(10 * step + rank).sample(range(4), 4)
        handles = {number: start(step, number) for number in order}
        total = collective.allreduce(np.array(2**rank), Op.Sum)
        assert total == sum(2**r for r in callers)
        for number, handle in handles.items():
            arrays = [values(r, 10 + number, "float64", number) for r in callers]
            assert_close(handle.wait(), reduced(arrays, Op.Sum))
    assert collective.join() == last_of(batches)


def test_twice(rank, size):
    """In each epoch another rank is the last."""
    for epoch in range(2 * size):
        if epoch % size == rank:
            collective.allreduce(np.ones(3))
        assert collective.join() == epoch % size


def test_what_a_joined_rank_cannot_take_part_in(rank, size):
    if size == 1:
        pytest.skip("there is nobody who could have joined")
    rows = np.ones((size, 2))
    if rank:
        for refused in (
            lambda: collective.broadcast(rows, size - 1),
            lambda: collective.alltoall(rows),
            lambda: collective.reducescatter(rows),
            lambda: collective.barrier(),
            lambda: collective.ProcessSet([1]),
        ):
            with pytest.raises(Disagreement, match=r"rank 0 has called join\(\)"):
                refused()
        assert (collective.allreduce(rows, Op.Sum) == size - 1).all()
    assert collective.join() == size - 1


def test_a_mistake_beside_a_rank_that_has_joined(rank, size):
    if size < 3:
        pytest.skip("needs two ranks beside the one that has joined")
    if rank != 1:
        with pytest.raises(Disagreement, match=r"\[3\].*\[4\]"):
            collective.allreduce(np.ones(3 if rank == 0 else 4))
        assert (collective.allreduce(np.ones(5), Op.Sum) == size - 1).all()
    assert collective.join() == size - 1


def test_uneven_batches_in_a_function(hvd, rank, size, batches):
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")

    @tf.function(reduce_retracing=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * tf.reduce_sum(x, 0))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, [weights]), [weights])
        return hvd.allreduce(loss, op=hvd.Sum)

    weights = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([weights])
    wanted, trained = np.zeros(3), []
    for number in range(max(batches)):
        rows = [values(r, (2, 3), "float32", number) for r in range(size)]
        callers = those_with(batches, number)
        losses = sum((wanted * rows[r].sum(0)).sum() for r in callers)
        wanted = wanted - 0.5 * sum(rows[r].sum(0) for r in callers) / size
        if number < batches[rank]:
            assert float(step(tf.constant(rows[rank]))) == pytest.approx(losses)
            trained.append(weights.numpy())
            np.testing.assert_allclose(trained[-1], wanted, rtol=1e-5, atol=1e-6)
    assert hvd.join() == last_of(batches)
    hvd.broadcast_variables([weights], last_of(batches))
    np.testing.assert_allclose(weights.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_gathered_beside_a_rank_that_has_joined(hvd, rank, size):
    """Ranks gather objects, sparse rows, and the gradient of rows."""
    tf = pytest.importorskip("tensorflow")
    if size == 1:
        assert hvd.join() == 0
        return
    if rank:
        assert hvd.allgather_object(f"rank {rank}") == [
            f"rank {r}" for r in range(1, size)
        ]
        slices = tf.IndexedSlices(
            tf.fill([1, 2], float(rank)), tf.constant([rank]), tf.constant([size, 2])
        )
        total = tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum))
        np.testing.assert_array_equal(
            total, np.repeat(np.arange(size)[:, None], 2, 1).astype("float32")
        )
        x = tf.Variable(tf.ones([rank + 1]))
        with tf.GradientTape() as tape:
            everyone = hvd.allgather(x)
            loss = tf.reduce_sum(everyone * tf.range(1.0, len(everyone) + 1))
        before = sum(r + 1 for r in range(1, rank))
        np.testing.assert_allclose(
            tape.gradient(loss, x),
            (before + 1 + np.arange(rank + 1)) * (size - 1) / size,
            rtol=1e-6,
        )
    assert hvd.join() == size - 1
    with pytest.raises(NotImplementedError, match=r"inside a tf\.function"):
        tf.function(hvd.join)()
