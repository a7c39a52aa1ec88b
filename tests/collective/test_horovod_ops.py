"""Horovod's collectives on data that differ between ranks, against NumPy."""

import json

import numpy as np
import pytest
from rank_data import assert_close, reduced, values

from collective import timeline

tf = pytest.importorskip("tensorflow")

SHAPE = (5, 3)
OPS = ["Average", "Sum", "Min", "Max", "Product"]


def everyone(size, shape=SHAPE, dtype="float32", seed=0):
    return [values(rank, shape, dtype, seed) for rank in range(size)]


def in_both_modes(function):
    """Return the results in eager mode, and inside a tf.function."""
    return function(), tf.function(function)()


def test_place(hvd, rank, size):
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    ops = [hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op]
    for found in in_both_modes(lambda: [op() for op in ops]):
        assert [int(value) for value in found] == [rank, size, rank, size]
    assert int(hvd.process_set_included_op(0)) == 1
    built = [hvd.gloo_built(), hvd.gloo_enabled(), hvd.nccl_built(), hvd.ddl_built()]
    built += [hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.mpi_enabled()]
    assert not any(built) and hvd.mpi_built() in (True, False)
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()
    hvd.init(comm=range(size))
    hvd.barrier()


def test_timeline_of_rank_0(hvd, rank, tmp_path):
    file = tmp_path / f"{rank}.json"
    hvd.start_timeline(str(file))
    # As a training's own timeline does; the file continues.
    timeline.record_in_memory(True)
    hvd.allreduce(tf.fill([3], float(rank)), name="recorded")
    kept = [size for _, _, size in timeline.take()]
    timeline.record_in_memory(False)
    hvd.stop_timeline()
    assert kept == [12]
    assert file.exists() == (rank == 0)
    if rank == 0:
        assert [event["name"] for event in json.loads(file.read_text())][
            -1
        ] == "recorded"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int16", "uint16"])
def test_allreduce(hvd, rank, size, op, dtype):
    arrays = everyone(size, dtype="float32" if dtype[0] == "f" else "uint8")
    arrays = [array.astype(dtype) for array in arrays]
    wanted = reduced(arrays, getattr(hvd, op)) if op != "Average" else None
    if op == "Average":  # whole numbers are rounded towards zero
        wanted = np.stack(arrays).astype("float64").mean(0).astype(dtype)
    for result in in_both_modes(
        lambda: hvd.allreduce(tf.constant(arrays[rank]), op=getattr(hvd, op))
    ):
        assert result.dtype == dtype
        np.testing.assert_allclose(result.numpy(), wanted, rtol=2e-3)


@pytest.mark.parametrize("number", range(6))
def test_reductions_by_horovods_numbers(hvd, rank, size, number):
    """``op=1`` means Sum in Horovod, and scripts pass the number."""
    array = everyone(size)[rank]
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    if names[number] == "Adasum" and size & (size - 1):
        pytest.skip("Adasum needs a power of two")
    by_name = getattr(hvd, names[number])
    np.testing.assert_array_equal(
        hvd.allreduce(array, op=number), hvd.allreduce(array, op=by_name)
    )


def test_allreduce_of_variables_with_factors_and_the_old_average(hvd, rank, size):
    import keras

    arrays = everyone(size)
    total = np.sum(arrays, 0)
    for variable in tf.Variable(arrays[rank]), keras.Variable(arrays[rank]):
        result = hvd.allreduce(
            variable, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
        )
        np.testing.assert_allclose(result, total * 1.5, rtol=1e-6)
    with pytest.deprecated_call():
        np.testing.assert_allclose(
            hvd.allreduce(arrays[rank], average=False), total, rtol=1e-6
        )
    np.testing.assert_allclose(hvd.allreduce(arrays[rank]), total / size, rtol=1e-6)
    whole = hvd.allreduce(tf.constant([7, -7]), op=hvd.Sum, postscale_factor=0.5)
    np.testing.assert_array_equal(whole, [int(3.5 * size), -int(3.5 * size)])
    with pytest.raises(ValueError, match="only one of them"):
        hvd.allreduce(arrays[rank], average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="is not a reduction"):
        hvd.allreduce(arrays[rank], op="sum")


def test_compression(hvd, rank, size):
    from collective.tensorflow.compression import Compressor

    class Halves(Compressor):
        @staticmethod
        def compress(tensor):
            return tf.cast(tensor / 2, tf.float64), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tf.cast(tensor * 2, ctx)

    arrays = [array / 3 for array in everyone(size)]
    exact = np.sum(arrays, 0)
    for compression, tolerance in (
        (hvd.Compression.none, 1e-6),
        (hvd.Compression.fp16, 2e-3),
        (hvd.Compression.bf16, 2e-2),
        (Halves, 1e-6),
    ):
        result, whole = hvd.grouped_allreduce(
            [tf.constant(arrays[rank]), tf.constant(rank)],
            op=hvd.Sum,
            compression=compression,
        )
        assert result.dtype == tf.float32
        np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)
        if compression is not Halves:
            assert int(whole) == size * (size - 1) // 2


def test_groups_of_dense_and_sparse_tensors(hvd, rank, size):
    # Rows overlap between ranks, and row `rank` occurs twice.
    rows = [[other, other + 1, other] for other in range(size)]
    dense = np.zeros([size + 1, 2], "float32")
    for other in range(size):
        np.add.at(dense, rows[other], values(other, (3, 2), "float32", 5))
    slices = tf.IndexedSlices(
        tf.constant(values(rank, (3, 2), "float32", 5)),
        tf.constant(rows[rank]),
        tf.constant([size + 1, 2]),
    )
    array = values(rank, SHAPE, "float32")
    for op, divisor in (hvd.Sum, 1), (hvd.Average, size):
        for first, sparse, last in in_both_modes(
            lambda op=op: hvd.grouped_allreduce(
                [tf.constant(array), slices, tf.constant(array) * 2.0], op=op
            )
        ):
            total = np.sum(everyone(size), 0) / divisor
            np.testing.assert_allclose(first, total, rtol=1e-6)
            np.testing.assert_allclose(last, 2 * total, rtol=1e-6)
            # Each row occurs once, because optimizers square them.
            np.testing.assert_array_equal(sparse.indices, range(size + 1))
            np.testing.assert_allclose(
                tf.convert_to_tensor(sparse), dense / divisor, rtol=1e-6, atol=1e-6
            )
    assert hvd.grouped_allreduce([]) == []
    for op in hvd.Max, hvd.Adasum:
        with pytest.raises(NotImplementedError, match="sparse"):
            hvd.allreduce(slices, op=op)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float64"])
def test_average_of_slices_of_any_dtype(hvd, rank, size, dtype):
    # Row 0 of every rank, and row 1 of the last, twice.
    rows = [0, 1, 1] if rank == size - 1 else [0]
    numbers = np.array([[4 * (rank + 1)], [7], [7]], dtype)[: len(rows)]
    slices = tf.IndexedSlices(tf.constant(numbers), tf.constant(rows))
    total = np.array([[2 * size * (size + 1)], [14]])
    floats, rtol = ("float32", 1e-6) if dtype == "uint8" else ("float64", 1e-14)
    for result in in_both_modes(lambda: hvd.allreduce(slices)):
        assert result.dtype == floats  # Horovod's dtype for integers
        np.testing.assert_array_equal(result.indices, [0, 1])
        np.testing.assert_allclose(result.values, total / size, rtol=rtol)
    half = hvd.allreduce(slices, op=hvd.Sum, postscale_factor=0.5)
    np.testing.assert_array_equal(half.values, (total / 2).astype(dtype))


def test_adasum(hvd, rank, size):
    if size == 3:
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(tf.ones([2]), op=hvd.Adasum)
        return

    def pair(a, b):
        dot = (a * b).sum()
        return a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum()))

    left = everyone(size, dtype="float64")
    while len(left) > 1:
        left = [pair(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
    mine = tf.constant(values(rank, SHAPE, "float64"))
    for result in in_both_modes(lambda: hvd.allreduce(mine, op=hvd.Adasum)):
        np.testing.assert_allclose(result, left[0], rtol=1e-12)
    same = hvd.allreduce(tf.constant([3.0, 4.0]), op=hvd.Adasum)
    np.testing.assert_allclose(same, [3.0, 4.0])


@pytest.mark.parametrize("dtype", ["float32", "bool", "int16", "uint32", "complex64"])
def test_moving_rows_of_any_dtype(hvd, rank, size, dtype):
    rows = [values(r, (r + 1, 2), "uint8", 3).astype(dtype) for r in range(size)]
    mine, root = tf.constant(rows[rank]), size - 1
    for gathered, twice in in_both_modes(
        lambda: hvd.grouped_allgather([mine, tf.concat([mine, mine], 0)])
    ):
        np.testing.assert_array_equal(gathered, np.concatenate(rows))
        assert twice.shape == (2 * gathered.shape[0], 2)
    square = [values(r, (size, 2), "uint8", 4).astype(dtype) for r in range(size)]
    sent = tf.constant(square[rank])
    for theirs in in_both_modes(lambda: hvd.broadcast(sent, root)):
        np.testing.assert_array_equal(theirs, square[root])
    wanted = np.stack([array[rank] for array in square])
    for moved in in_both_modes(lambda: hvd.alltoall(sent)):
        np.testing.assert_array_equal(moved, wanted)
    with pytest.raises(ValueError, match="must be a member"):
        hvd.broadcast(sent, size)


def test_alltoall_returns_what_came_from_whom(hvd, rank, size):
    splits = [[(a + 2 * b) % 3 for b in range(size)] for a in range(size)]
    arrays = [values(r, (sum(splits[r]), 2), "float32") for r in range(size)]
    parts = [np.split(arrays[r], np.cumsum(splits[r])[:-1])[rank] for r in range(size)]
    for rows, received in in_both_modes(
        lambda: hvd.alltoall(tf.constant(arrays[rank]), splits=splits[rank])
    ):
        np.testing.assert_array_equal(rows, np.concatenate(parts))
        np.testing.assert_array_equal(received, [len(part) for part in parts])
        assert received.dtype == tf.int32


@pytest.mark.parametrize("op", OPS)
def test_reducescatter(hvd, rank, size, op):
    rows = 2 * size + 1  # the first rank has one more
    arrays = everyone(size, (rows, 2))
    wanted = np.array_split(reduced(arrays, getattr(hvd, op)), size)[rank]
    for first, second in in_both_modes(
        lambda: hvd.grouped_reducescatter(
            [tf.constant(arrays[rank]), tf.constant(arrays[rank]) * 0],
            op=getattr(hvd, op),
            prescale_factor=2.0,
            postscale_factor=0.5,
        )
    ):
        scale = 2 ** (size - 1) if op == "Product" else 1
        assert_close(first.numpy(), wanted * np.float32(scale))
        assert not second.numpy().any()
    half = hvd.reducescatter(arrays[rank], compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.reducescatter(arrays[rank], op=hvd.Adasum)


def test_gradients_are_horovods(hvd, rank, size):
    x = tf.constant(values(rank, (size, 2), "float32"))
    weights = [np.float32(r + 1) for r in range(size)]  # weight of each rank's loss
    total = sum(weights)
    cases = {
        "allreduce": (lambda: hvd.allreduce(x, op=hvd.Sum), total),
        "mean": (lambda: hvd.allreduce(x), total / size),
        "allgather": (lambda: hvd.allgather(x), total / size),
        "broadcast": (lambda: hvd.broadcast(x, 0), total / size * (rank == 0)),
        "alltoall": (lambda: hvd.alltoall(x), np.array(weights)[:, None]),
        "scatter": (
            lambda: hvd.reducescatter(x, op=hvd.Sum),
            size * np.array(weights)[:, None],
        ),
        "scattered mean": (
            lambda: hvd.reducescatter(x, op=hvd.Average),
            np.array(weights)[:, None],
        ),
    }
    for name, (function, wanted) in cases.items():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function()) * weights[rank]
        np.testing.assert_allclose(
            tape.gradient(loss, x), np.broadcast_to(wanted, x.shape), err_msg=name
        )


def test_ranks_that_do_not_agree_all_get_an_error(hvd, rank, size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")
    shape = [2 + min(rank, 1)]
    with pytest.raises(tf.errors.FailedPreconditionError, match="do not agree"):
        hvd.allreduce(tf.ones(shape))
    with pytest.raises(tf.errors.FailedPreconditionError, match="do not agree"):
        hvd.broadcast(tf.ones([2], tf.float32 if rank else tf.int32), 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="do not agree"):
        hvd.broadcast(tf.ones([2]), root_rank=min(rank, 1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits do not fit"):
        hvd.alltoall(tf.ones([4]), splits=[1] * (size + 1))
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == size


def refuses_a_rank_outside(hvd, process_set):
    among, mine = {"process_set": process_set}, tf.ones([2])
    for call in (
        lambda: hvd.allreduce(mine, **among),
        lambda: hvd.allgather(mine, **among),
        lambda: hvd.broadcast(mine, process_set.ranks[0], **among),
        lambda: hvd.alltoall(mine, **among),
        lambda: hvd.reducescatter(mine, **among),
    ):
        for run in call, tf.function(call):
            with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
                run()


def test_process_sets(hvd, rank, size):
    last = hvd.ProcessSet([size - 1])
    assert last.process_set_id is None and last.size() is None
    with pytest.raises(ValueError, match="not added"):
        hvd.allreduce(tf.ones([1]), process_set=last)
    if size == 1:
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set(last)
        return
    ends = hvd.add_process_set([size - 1, 0] if size > 2 else [0])
    others = hvd.add_process_set(hvd.ProcessSet(range(1, size)))
    made = [ends, others] + ([hvd.add_process_set([0])] if size > 2 else [])
    numbers = [process_set.process_set_id for process_set in made]
    assert len(set(numbers)) == len(made)
    assert hvd.allgather_object(numbers) == [numbers] * size
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set(range(1, size))
    for process_set in made:
        members = process_set.ranks
        assert process_set.included() == (rank in members)
        included = hvd.process_set_included_op(process_set.process_set_id)
        assert int(included) == process_set.included()
        assert int(hvd.size_op(process_set.process_set_id)) == len(members)
        if not process_set.included():
            with pytest.raises(ValueError, match="not part of"):
                process_set.rank()
            refuses_a_rank_outside(hvd, process_set)
            continue
        assert process_set.rank() == members.index(rank)
        mine, arrays = values(rank, (4, 2), "float32"), everyone(size, (4, 2))
        theirs = np.stack([arrays[member] for member in members])
        result = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set)
        np.testing.assert_allclose(result, theirs.sum(0), rtol=1e-6)
        np.testing.assert_array_equal(
            hvd.allgather(mine, process_set=process_set), np.concatenate(theirs)
        )
        np.testing.assert_array_equal(
            hvd.broadcast(mine, members[-1], process_set=process_set), theirs[-1]
        )
        objects = hvd.allgather_object(rank, process_set=process_set)
        assert objects == members
        root = members[0]
        assert hvd.broadcast_object(rank, root, process_set=process_set) == root
        hvd.barrier(process_set=process_set)
    number = ends.process_set_id
    assert hvd.remove_process_set(ends) and not hvd.remove_process_set(ends)
    assert ends.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="does not exist"):
        hvd.size_op(number)
    again = hvd.add_process_set(ends)
    assert again.size() == len(again.ranks) and again.process_set_id is not None
    assert all([hvd.remove_process_set(process_set) for process_set in made])


def test_what_a_process_set_and_a_job_cannot_be(hvd, size):
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 1000
    with pytest.raises(ValueError, match="was not added"):
        hvd.allreduce(tf.ones([1]), process_set=unknown)
    with pytest.raises(ValueError, match="made of ranks"):
        hvd.ProcessSet(["0"])


def test_objects(hvd, rank, size):
    mine = {"rank": rank, "values": list(range(rank)), "call": lambda: rank}
    for root in {0, size - 1}:
        theirs = hvd.broadcast_object(mine if rank == root else None, root)
        assert theirs["rank"] == root and theirs["call"]() == root
        assert hvd.broadcast_object_fn(root)(rank) == root
    found = hvd.allgather_object(("x" * rank, rank))
    assert found == [("x" * other, other) for other in range(size)]


def test_variables(hvd, rank, size):
    import keras

    root = size - 1

    def made(kind, dtype="float32"):
        return kind(values(rank, SHAPE, "uint8", 7).astype(dtype))

    wanted = values(root, SHAPE, "uint8", 7)
    variables = [made(tf.Variable), made(keras.Variable), made(tf.Variable, "int16")]
    hvd.broadcast_variables(variables, root_rank=root)
    for variable in variables:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), wanted)
    variables = [made(tf.Variable), made(keras.Variable)]

    @tf.function
    def step():
        hvd.broadcast_variables(variables[:1], root, inplace=True)
        return hvd.broadcast_(variables[1:], root)

    np.testing.assert_array_equal(step()[0], wanted)
    np.testing.assert_array_equal(variables[0], wanted)
    with pytest.raises(RuntimeError, match="does not support eager"):
        hvd.broadcast_global_variables(0)


def test_a_session_of_tensorflow_1(hvd, rank, size):
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable(
            "v", initializer=tf.constant([float(rank), 1.0])
        )
        (gradient, _), *_ = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0)
        ).compute_gradients(tf.reduce_sum(variable) * float(rank))
        hook = hvd.BroadcastGlobalVariablesHook(size - 1)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable).tolist() == [size - 1, 1]
            mean = session.run(gradient)
    np.testing.assert_allclose(mean, [(size - 1) / 2] * 2)


def test_gradients_in_a_session_of_tensorflow_1(hvd, rank, size):
    """Every rank runs a collective even if it does not need the result."""
    root, weights = size - 1, [float(r + 1) for r in range(size)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(values(rank, (size, 2), "float32"))
        results = {
            "broadcast": hvd.broadcast(x, root),
            "allgather": hvd.allgather(x),
            "reducescatter": hvd.reducescatter(x, op=hvd.Sum),
        }
        for name, result in results.items():
            (gradient,) = tf.gradients(tf.reduce_sum(result) * weights[rank], x)
            wanted = {
                "broadcast": sum(weights) / size * (rank == root),
                "allgather": sum(weights) / size,
                "reducescatter": size * np.array(weights)[:, None],
            }[name]
            np.testing.assert_allclose(
                session.run(gradient), np.broadcast_to(wanted, (size, 2)), err_msg=name
            )
        total = session.run(hvd.allreduce(tf.constant(float(rank)), op=hvd.Sum))
    assert total == size * (size - 1) / 2
