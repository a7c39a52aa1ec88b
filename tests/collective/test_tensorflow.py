"""The TensorFlow ops: every rank runs these on its own data."""

import threading

import numpy as np
import psutil
import pytest
from rank_data import assert_close, assert_rests, reduced, values

import collective

tf = pytest.importorskip("tensorflow")

from collective import tensorflow_ops  # noqa: E402
from collective.operations.kinds import Op  # noqa: E402

SHAPES = [(), (3,), (0, 4), (64, 65), (1000, 333)]
TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]


def arrays(rank):
    return [
        values(rank, shape, dtype, i)
        for i, (shape, dtype) in enumerate((s, t) for t in TYPES for s in SHAPES[:4])
    ] + [values(rank, SHAPES[4], "float32", 99)]


def all_reduce(tensors, **options):
    """Return the sum over all ranks."""
    return tensorflow_ops.all_reduce(tensors, collective.Sum, **options)


def test_the_default_is_the_average_as_for_arrays(rank, size):
    mine = np.repeat(np.float32(2 * rank), size)
    (mean,) = tensorflow_ops.all_reduce([mine])
    np.testing.assert_array_equal(mean, collective.allreduce(mine))
    np.testing.assert_array_equal(mean, [size - 1] * size)
    part = tensorflow_ops.reducescatter(mine)
    np.testing.assert_array_equal(part, collective.reducescatter(mine))


@pytest.mark.parametrize("op", [Op.Sum, Op.Average, Op.Max])
@pytest.mark.parametrize("compiled", [False, True])
def test_reduces_a_list_of_any_mixture(rank, size, op, compiled):
    def step(tensors):
        return tensorflow_ops.all_reduce(tensors, op)

    step = tf.function(step) if compiled else step
    for _ in range(3):
        results = step([tf.constant(array) for array in arrays(rank)])
    everyone = [arrays(other) for other in range(size)]
    for i, result in enumerate(results):
        assert_close(result.numpy(), reduced([theirs[i] for theirs in everyone], op))


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_buckets_leave_everything_in_place(rank, size, bucket_bytes):
    counts = [3, 1000, 0, 2000, 7, 700]

    @tf.function
    def step(tensors):
        return all_reduce(tensors, bucket_bytes=bucket_bytes)

    for _ in range(2):
        results = step([tf.fill([n], float(rank + i)) for i, n in enumerate(counts)])
        for i, (count, result) in enumerate(zip(counts, results, strict=True)):
            wanted = size * (size - 1) / 2 + size * i
            np.testing.assert_array_equal(result, np.full(count, wanted))


@pytest.mark.parametrize("count", [3, 50_000])
def test_subnormals_count_whichever_thread_adds_them(rank, size, count):
    """TensorFlow's own threads treat them as zero."""
    tiny = np.float32(1e-40)

    @tf.function
    def step(x):
        return all_reduce([x], bucket_bytes=1)[0]

    mine = tf.constant(np.full(count, tiny * (rank + 1), np.float32))
    for _ in range(20):
        total = step(mine).numpy()
        wanted = np.sum([np.float32(tiny * (r + 1)) for r in range(size)])
        np.testing.assert_allclose(total, np.full(count, wanted), rtol=1e-4)


def test_an_input_that_is_used_again_keeps_its_value(rank, size):
    @tf.function
    def step(x):
        y = x * 2.0
        (z,) = all_reduce([y])
        return y, z

    y, z = step(tf.fill([5000], float(rank)))
    assert (y.numpy() == 2 * rank).all()
    assert (z.numpy() == size * (size - 1)).all()


def test_a_variable_is_not_overwritten(rank, size):
    variable = tf.Variable(tf.fill([3000], float(rank + 1)))

    @tf.function
    def step():
        return all_reduce([variable])[0]

    step()
    assert (step().numpy() == size * (size + 1) / 2).all()
    assert (variable.numpy() == rank + 1).all()


def test_many_runs_at_once_end_each_with_its_own_sum(rank, size):
    """It crashes if the callback on TensorFlow's stack is kept instead of copied."""

    @tf.function
    def step(x):
        return [
            all_reduce([x * float(i), x + float(i)], name=f"bucket {i}")
            for i in range(20)
        ]

    for turn in range(5):
        results = step(tf.fill([100 + turn], float(rank)))
        total = size * (size - 1) / 2
        for i, (product, plus) in enumerate(results):
            assert (product.numpy() == total * i).all()
            assert (plus.numpy() == total + size * i).all()


def test_ranks_may_submit_in_different_orders(rank, size):
    results = {}

    @tf.function(reduce_retracing=True)
    def reduce_as(x, name):
        return all_reduce([x], name=name)[0]

    def run(name, value):
        results[name] = reduce_as(tf.fill([value], float(rank)), name).numpy()

    names = [f"tensor {i}" for i in range(6)]
    threads = [
        threading.Thread(target=run, args=(name, 10 + int(name[-1])))
        for name in (names if rank % 2 else reversed(names))
    ]
    for thread in threads:
        thread.start()
        thread.join(timeout=0.05)
    for thread in threads:
        thread.join()
    for name in names:
        assert results[name].shape == (10 + int(name[-1]),)
        assert (results[name] == size * (size - 1) / 2).all()


def test_only_ops_of_one_name_wait_for_each_other(rank):
    """If they had side effects, TensorFlow would run all of them one after another."""

    @tf.function
    def step(x):
        tf.print(end="")  # this op has side effects
        return [all_reduce([x], name=name) for name in ("one", "two", "one")]

    graph = step.get_concrete_function(tf.ones(3)).graph
    ops = [op for op in graph.get_operations() if op.type == "CollectiveAllReduce"]
    first, second, again = sorted(ops, key=graph.get_operations().index)
    assert first.control_inputs == second.control_inputs == []
    assert again.control_inputs == [first]
    assert {op.name for op in ops} <= {op.name for op in graph.control_outputs}


def test_names_that_are_new_at_every_call_take_no_memory(rank, size):
    """TensorFlow would keep a kernel of 40 KB for each."""
    process = psutil.Process()
    for calls in (100, 1000):
        before = process.memory_info().rss
        for number in range(calls):
            (total,) = all_reduce([tf.fill([3], float(rank))], name=f"{calls}.{number}")
            assert total.numpy().tolist() == [size * (size - 1) / 2] * 3
    assert process.memory_info().rss - before < 10e6


def test_the_gradient_of_an_eager_call_has_its_name(rank, size):
    x = tf.fill([2], float(rank))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        (first,) = all_reduce([x], name="größe")
        (second,) = all_reduce([x], name="second")
    if size > 1:
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="gradient of größe"
        ):
            tape.gradient(second if rank else first, x)
    np.testing.assert_array_equal(tape.gradient(first, x), [size, size])


def test_disagreement_reaches_every_rank(rank, size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")

    @tf.function
    def step(x):
        return all_reduce([x], name="weights")

    with pytest.raises(tf.errors.FailedPreconditionError, match=r"weights.*rank 1"):
        step(tf.ones([3 + min(rank, 1)]))
    assert (step(tf.ones([7]))[0].numpy() == size).all()
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"\[2,3\].*\[3,2\]"):
        all_reduce([tf.ones([3, 2] if rank else [2, 3])])


def test_an_idle_rank_burns_no_core(rank, size):
    step = tf.function(all_reduce)
    total = step([tf.fill([100_000], float(rank))])[0].numpy()
    assert (total == size * (size - 1) / 2).all()
    assert_rests()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_of_all_reduce_is_all_reduce(rank, size, compiled):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (total,) = all_reduce([x])
            loss = tf.reduce_sum(total * float(rank + 1))
        return tape.gradient(loss, x)

    step = tf.function(step) if compiled else step
    assert (step(tf.ones([4])).numpy() == size * (size + 1) / 2).all()


def test_broadcast_and_its_gradient(rank, size):
    root = size - 1

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (theirs,) = tensorflow_ops.broadcast([x], root)
            loss = tf.reduce_sum(theirs * float(rank + 1))
        return theirs, tape.gradient(loss, x)

    theirs, gradient = step(tf.fill([3], float(rank)))
    assert (theirs.numpy() == root).all()
    wanted = size * (size + 1) / 2 if rank == root else 0
    assert (gradient.numpy() == wanted).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_each_and_their_gradients(rank, size, compiled):
    rows = rank + 2

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            gathered = tensorflow_ops.allgather(x)
            weights = tf.range(tf.shape(gathered)[0], dtype=tf.float32)[:, None]
            gathered_loss = tf.reduce_sum(gathered * weights) * float(rank + 1)
            scattered = tensorflow_ops.reducescatter(y, collective.Average)
            scattered_loss = tf.reduce_sum(scattered) * float(rank + 1)
            moved, received = tensorflow_ops.alltoall(y)
            moved_loss = tf.reduce_sum(moved) * float(rank + 1)
        return (
            gathered,
            tape.gradient(gathered_loss, x),
            scattered,
            tape.gradient(scattered_loss, y),
            moved,
            received,
            tape.gradient(moved_loss, y),
        )

    step = tf.function(step) if compiled else step
    x, y = tf.fill([rows, 3], float(rank)), tf.fill([size, 2], float(rank))
    gathered, dx, scattered, dy, moved, received, dz = step(x, y)
    lengths = [other + 2 for other in range(size)]
    np.testing.assert_array_equal(gathered[:, 0], np.repeat(range(size), lengths))
    start = sum(lengths[:rank])
    wanted = np.arange(start, start + rows) * size * (size + 1) / 2
    np.testing.assert_allclose(dx[:, 0], wanted)
    np.testing.assert_allclose(scattered, np.full([1, 2], (size - 1) / 2))
    np.testing.assert_allclose(dy[:, 1], np.arange(1, size + 1) / size)
    np.testing.assert_array_equal(moved[:, 0], range(size))
    np.testing.assert_array_equal(received, 1)
    np.testing.assert_array_equal(dz[:, 0], range(1, size + 1))


def test_uneven_alltoall(rank, size):
    splits = [rank + other for other in range(size)]
    moved, received = tensorflow_ops.alltoall(
        tf.fill([sum(splits), 2], rank), tf.constant(splits)
    )
    np.testing.assert_array_equal(received, splits)
    np.testing.assert_array_equal(moved[:, 1], np.repeat(range(size), splits))
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits do not fit"):
        tensorflow_ops.alltoall(tf.ones([1]), [1] * (size + 1))


def test_numpy_and_tensorflow_calls_do_not_disturb_each_other(rank, size):
    @tf.function
    def step(x):
        return all_reduce([x])[0]

    for turn in range(10):
        handle = collective.allreduce_async(np.full(100_000, rank), collective.Sum)
        total = step(tf.fill([50_000], float(rank + turn)))
        assert (total.numpy() == size * (size - 1) / 2 + turn * size).all()
        assert (handle.wait() == size * (size - 1) // 2).all()


def test_functions_of_different_names_end_the_job_with_an_error(
    rank, size, monkeypatch
):
    if size == 1:
        pytest.skip("one rank always agrees with itself")

    @tf.function
    def step(x):
        x = all_reduce([x])[0]
        return all_reduce([x], name="biases" if rank else "weights")[0]

    collective.shutdown()
    monkeypatch.setenv("COLLECTIVE_STALL_SECONDS", "1")
    collective.init()
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="has all-reduce 'biases'"
    ) as raised:
        step(tf.ones([3]))
    assert "rank 0 has begun 'weights'" in str(raised.value)
    collective.shutdown()
    monkeypatch.undo()
    collective.init()
