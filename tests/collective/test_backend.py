"""The native backend, on all ranks of this launch."""

import numpy as np
import pytest
from rank_data import values

from collective import library
from collective.environment import Environment

tf = pytest.importorskip("tensorflow")
pytest.importorskip("collective.backends.devices")

from collective.backends import Options  # noqa: E402
from collective.backends.native import NativeBackend  # noqa: E402


@pytest.fixture(scope="module")
def backend(needs_core):
    return NativeBackend(Options())


def test_sums_within_a_function(backend, rank, size):
    @tf.function
    def step(x, y):
        return backend.all_reduce([x, y])

    x, y = step(values(rank, (5, 7), "float32"), values(rank, (), "float64"))
    wanted = sum(values(other, (5, 7), "float32") for other in range(size))
    np.testing.assert_array_equal(x, wanted)
    assert y.numpy() == sum(values(other, (), "float64") for other in range(size))


def test_narrows_gradients_but_no_counts(backend, rank, size):
    """The backend has a 16-bit transport, an algorithm and buckets."""
    options = Options(
        transport_dtype="bfloat16", algorithm="hierarchical", bucket_bytes=5000
    )
    narrowing = NativeBackend(options)
    sizes = (1, 3000, 7, 3000, 3000)  # the last is like the counts of a large metric
    pieces = [np.full(n, 257.0 + rank, np.float32) for n in sizes]

    @tf.function
    def step(*arrays):
        return narrowing.all_reduce(arrays, rounded=[1, 2, 3])

    total = sum(257.0 + other for other in range(size))
    for place, (one, two) in enumerate(zip(pieces, step(*pieces), strict=True)):
        assert two.shape == one.shape
        if size == 1 or place not in (1, 3):
            np.testing.assert_array_equal(two, total)
        else:
            np.testing.assert_allclose(two, total, rtol=2**-6)
            assert (two.numpy().view(np.uint32) & 0xFFFF == 0).all()


def test_a_rank_that_traces_more_often_is_no_matter(backend, rank, size):
    """Shards have unequal lengths, and each new length is traced."""

    @tf.function
    def step(rows):
        return backend.all_reduce([tf.reduce_sum(rows)])[0]

    for turn in range(4):
        rows = 3 if rank == 0 else 3 + turn
        wanted = 3 + (3 + turn) * (size - 1)
        assert step(tf.ones([rows])).numpy() == wanted


def test_broadcasts_arrays_of_any_dtype(backend, rank):
    for dtype in ("float32", "uint32", "int16", "complex64", "bool"):
        array = np.array([[rank, 1], [2, 3]]).astype(dtype)
        wanted = np.array([[0, 1], [2, 3]]).astype(dtype)
        np.testing.assert_array_equal(backend.broadcast_array(array), wanted)
    assert backend.broadcast_array(np.array(7 + rank)).shape == ()
    backend.barrier()


def test_variables_become_those_of_rank_zero(backend, rank):
    variables = [tf.Variable([1.0 * rank, 2.0]), tf.Variable(rank, dtype=tf.int64)]
    backend.broadcast(variables)
    np.testing.assert_array_equal(variables[0], [0.0, 2.0])
    assert variables[1].numpy() == 0


def test_says_why_it_cannot_be_used(monkeypatch, tmp_path):
    # Set by the mpirun of this test.
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    two_hosts = Environment("collectiverun", 0, 4, 0, 2)
    refused = NativeBackend.availability(two_hosts)
    assert not refused.usable and "mpirun" in refused.hint
    monkeypatch.setenv("COLLECTIVE_LIBRARY", str(tmp_path / "nothing.so"))
    missing = NativeBackend.availability(Environment())
    assert NativeBackend.availability(two_hosts) == missing
    assert not missing.usable and missing.hint == library.HINT
