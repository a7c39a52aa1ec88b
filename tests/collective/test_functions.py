"""The identity and the order of collectives in nested functions.

Every rank runs these on its own data, and each rank is slow at other places.
"""

import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import collective

tf = pytest.importorskip("tensorflow")

from random_functions import Program  # noqa: E402

from collective import tensorflow_ops  # noqa: E402


def all_reduce(tensors, **options):
    """Return the sum over all ranks."""
    return tensorflow_ops.all_reduce(tensors, collective.Sum, **options)


@pytest.fixture
def late(rank):
    """Return a function that delays even values on even ranks, odd ones on odd ranks."""

    def wait(value):
        if int(value.flat[0]) % 2 == rank % 2:
            time.sleep(0.1)
        return value

    @tf.custom_gradient
    def later(x):
        y = tf.numpy_function(wait, [x], x.dtype, stateful=False)
        y.set_shape(x.shape)
        return y, lambda dy: later(dy)

    return later


def total(size, number):
    """Return the sum over ranks of a number plus twice the rank."""
    return float(size * number + size * (size - 1))


@pytest.mark.parametrize("who", ["all", "one"])
def test_a_retraced_caller_of_a_cached_function(rank, size, who):
    """The outer function has a new trace on one rank only; the inner has none."""

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def inner(x):
        return all_reduce([tf.fill([3], tf.reduce_sum(x))])[0]

    @tf.function
    def outer(x):
        y = inner(x)
        return y, all_reduce([tf.fill([3], 100 * tf.size(x))])[0]

    def step(rows):
        y, z = outer(tf.fill([rows], rank + 1.0))
        return y.numpy()[0], z.numpy()[0]

    for turn in range(20):
        changed = turn >= 10 and (who == "all" or rank == size - 1)
        everyone = [8] * size
        if turn >= 10:
            everyone = [5] * size if who == "all" else [8] * (size - 1) + [5]
        y, z = step(5 if changed else 8)
        assert y == sum((r + 1) * rows for r, rows in enumerate(everyone))
        assert z == 100 * sum(everyone)


@pytest.mark.parametrize("with_variable", [False, True])
def test_two_calls_of_one_function(rank, size, late, with_variable):
    """TensorFlow orders calls with variables separately from calls without."""
    weight = tf.Variable(1.0)

    @tf.function
    def inner(x):
        x = late(x) * weight if with_variable else late(x)
        return all_reduce([x])[0]

    @tf.function
    def outer(a, b):
        before = all_reduce([late(a)], name="explicit")[0]
        results = inner(a), inner(b)
        after = all_reduce([late(b)], name="explicit")[0]
        return before, *results, after

    a, b = (tf.constant([n + 2.0 * rank]) for n in (10, 21))
    results = [float(result[0]) for result in outer(a, b)]
    assert results == [total(size, n) for n in (10, 10, 21, 21)]


def test_order_within_a_function_and_around_calls():
    @tf.function
    def inner(x):
        return all_reduce([x])[0]

    @tf.function
    def outer(x):
        all_reduce([x], name="unused")
        all_reduce([x])
        a, b = inner(x), inner(x)
        return a, b, all_reduce([x])[0]

    graph = outer.get_concrete_function(tf.ones(3)).graph
    ops = [
        op
        for op in graph.get_operations()
        if op.type in ("CollectiveAllReduce", "StatefulPartitionedCall")
    ]
    first, second, call, again, last = ops
    assert first.control_inputs == second.control_inputs == []
    assert set(call.control_inputs) == {first, second}
    assert again.control_inputs == [call]
    assert last.control_inputs == [again]
    names = [op.get_attr("tensor_name").decode() for op in (first, second, last)]
    assert names == ["unused", "all_reduce 2 of outer", "all_reduce 3 of outer"]
    assert {op.name for op in ops} <= {op.name for op in graph.control_outputs}


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_functions_within_functions(rank, size, late, compiled):
    @tf.function
    def inner(x):
        return all_reduce([late(x)])[0]

    @tf.function
    def middle(a, b):
        return inner(a), inner(b)

    def outer(a, b):
        with tf.GradientTape(persistent=True) as second:
            second.watch([a, b])
            with tf.GradientTape(persistent=True) as first:
                first.watch([a, b])
                p, q = middle(a, b)
                losses = [tf.reduce_sum(p**2 * (rank + 1)), tf.reduce_sum(q**3)]
            gradients = [first.gradient(loss, [a, b]) for loss in losses]
        zero = tf.UnconnectedGradients.ZERO
        return gradients, second.gradient(gradients[1][1], [a, b], None, zero)

    outer = tf.function(outer) if compiled else outer
    a, b = (tf.constant([n + 2.0 * rank]) for n in (1, 2))
    ranks = size * (size + 1) / 2
    gradients, seconds = outer(a, b)
    assert float(gradients[0][0][0]) == ranks * 2 * total(size, 1)
    assert gradients[0][1] is None or float(gradients[0][1][0]) == 0
    assert float(gradients[1][1][0]) == size * 3 * total(size, 2) ** 2
    assert float(seconds[1][0]) == size * size * 6 * total(size, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_that_a_custom_gradient_calls(rank, size, late, compiled):
    @tf.custom_gradient
    def copied(x):
        return tf.identity(x), lambda dy: all_reduce([late(dy)])[0]

    @tf.function
    def inner(x):
        return copied(x) * 1.0

    @tf.function
    def middle(a, b):
        return inner(a), inner(b)

    def outer(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            p, q = middle(a, b)
            loss = tf.reduce_sum(p) * (10.0 + 2 * rank)
            loss += tf.reduce_sum(q) * (21.0 + 2 * rank)
        return tape.gradient(loss, [a, b])

    outer = tf.function(outer) if compiled else outer
    for _ in range(3):
        a, b = outer(tf.ones([1]), tf.ones([1]))
        assert [float(a[0]), float(b[0])] == [total(size, 10), total(size, 21)]


def test_recomputed_functions(rank, size, late):
    @tf.function
    def inner(x):
        return all_reduce([late(x)])[0]

    @tf.function
    def outer(a, b):
        again = tf.recompute_grad(inner)
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            loss = tf.reduce_sum(again(a) ** 2) + tf.reduce_sum(again(b) ** 3)
        return tape.gradient(loss, [a, b])

    a, b = outer(*(tf.constant([n + 2.0 * rank]) for n in (1, 2)))
    assert float(a[0]) == size * 2 * total(size, 1)
    assert float(b[0]) == size * 3 * total(size, 2) ** 2


def test_iterations_of_loops(rank, size, late):
    count = tf.Variable(0)

    @tf.function
    def mapped(xs):
        return tf.map_fn(
            lambda x: all_reduce([late(x)])[0],
            xs,
            parallel_iterations=10,
        )

    @tf.function
    def counted(x):
        """Return a sum of iterations that are independent of each other."""
        results = tf.zeros([4])
        count.assign(0)
        while count < 4:
            i = count.assign_add(1)
            y = late(x + tf.cast(i, tf.float32))
            (y,) = all_reduce([y])
            results = tf.tensor_scatter_nd_update(results, [[i - 1]], [y])
        return results

    xs = np.arange(6, dtype=np.float32)
    wanted = [total(size, x) for x in xs]
    np.testing.assert_array_equal(mapped(tf.constant(xs + 2 * rank)), wanted)
    np.testing.assert_array_equal(counted(tf.constant(2.0 * rank)), wanted[1:5])


def test_saved_and_loaded_functions(rank, size, late, tmp_path):
    @tf.function
    def inner(x):
        return all_reduce([x])[0]

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([1])])
        def __call__(self, x):
            return inner(x), inner(x + 1.0), all_reduce([x])[0]

    tf.saved_model.save(Model(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))

    @tf.function
    def outer(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            results = [*loaded(late(a)), *loaded(late(b))]
            loss = tf.reduce_sum(results[1] ** 2) + tf.reduce_sum(results[3] ** 2)
        return results, tape.gradient(loss, [a, b])

    results, gradients = outer(*(tf.constant([n + 2.0 * rank]) for n in (10, 21)))
    assert [float(result[0]) for result in results] == [
        total(size, n) for n in (10, 11, 10, 21, 22, 21)
    ]
    assert [float(gradient[0]) for gradient in gradients] == [
        size * 2 * total(size, 11),
        size * 2 * total(size, 21),
    ]


@pytest.mark.parametrize("what", ["dtypes", "shapes", "dimensions"])
@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_rows_that_do_not_fit_together(rank, size, kind, mode, what):
    if size == 1:
        pytest.skip("one rank always agrees with itself")
    shape = [size, 2 + (rank if what == "shapes" else 0)]
    shape += [1] if what == "dimensions" and rank else []
    dtype = tf.float64 if what == "dtypes" and rank else tf.float32

    def call():
        return getattr(tensorflow_ops, kind)(tf.ones(shape, dtype), name="uneven")

    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        if mode == "graph":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(call())
        else:
            (tf.function(call) if mode == "function" else call)()
    text = str(raised.value)
    assert "rank 0: all-" in text and "rank 1" in text
    assert "'uneven' float32[?,2]" in text and "HINT: " in text


def test_splits_that_fit_on_some_ranks_only(rank, size):
    @tf.function
    def step():
        rows = size + (rank == 0)
        return tensorflow_ops.alltoall(tf.ones([rows]), [1] * size, name="split")

    with pytest.raises(tf.errors.InvalidArgumentError, match="splits do not fit") as e:
        step()
    assert "rank 0: all-to-all 'split' float32[?], whose splits" in str(e.value)


def test_one_function_in_two_threads_at_a_time(rank, size, monkeypatch):
    """The pairing of the two is random, so every rank gets an error."""
    if size == 1:
        pytest.skip("one rank has no other to meet")

    @tf.function
    def step(x):
        return all_reduce([x])[0]

    step(tf.ones([1]))
    errors = []

    def call():
        try:
            step(tf.ones([1]))
        except tf.errors.FailedPreconditionError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    of_rank_0 = int(collective.broadcast(np.array(os.getpid()), 0))
    refused = Path(tempfile.gettempdir(), f"refused-{of_rank_0}")
    if rank == 0:
        for thread in threads:
            thread.start()
        while not errors:
            time.sleep(0.01)
        refused.touch()
        for thread in threads:
            thread.join()
    else:  # the first call must not end before the second has begun
        while not refused.exists():
            time.sleep(0.01)
        call()
    collective.shutdown()
    collective.init()
    refused.unlink(missing_ok=True)
    assert errors
    assert "rank 0 has begun all-reduce 'all_reduce 1 of step'" in errors[0]
    assert "twice at the same time" in errors[0] and "HINT: give" in errors[0]


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.matrix)])
def test_random_nests_are_summed_as_numpy_does(rank, size, seconds):
    """Run as many of 20 programs as time allows, at least one."""
    start = time.monotonic()
    for seed in range(20):
        check_program(Program(seed, rank), seed, rank, size)
        passed = np.array(time.monotonic() - start)
        # All ranks end after the same program.
        if collective.allreduce(passed, collective.Max) > seconds:
            break


def check_program(program, seed, rank, size):
    random = np.random.default_rng([seed, 1])

    def gradients(x, turn):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(program.run(x, turn)) * (rank + 1)
        return tape.gradient(loss, x), tape.gradient(loss, x)

    compiled = tf.function(gradients)
    for turn in range(3):
        # Ranks trace again at different turns.
        rows = random.integers(1, 3, size)
        xs = [random.integers(1, 9, n).astype(float) for n in rows]
        x, number = tf.constant(xs[rank]), tf.constant(turn)
        wanted = program.wanted(xs, turn)[rank]
        np.testing.assert_allclose(program.run(x, number), wanted, rtol=1e-12)
        wanted = program.gradient_wanted(xs, turn, rank)
        for gradient in (compiled if turn else gradients)(x, number):
            np.testing.assert_allclose(gradient, wanted, rtol=1e-12)
