"""Arrays that differ between ranks, and NumPy's results from all of them."""

import os
import time

import numpy as np
from hypothesis import Phase, settings

from collective.operations.kinds import Op

try:
    from ml_dtypes import bfloat16
except ImportError:  # TensorFlow installs it
    bfloat16 = None

DTYPES = [
    "float32",
    "float64",
    "float16",
    *(["bfloat16"] if bfloat16 else []),
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
]

# Every rank must draw the same examples, and must not search for a smaller one if it
# alone has failed: the others would wait for it.
same_everywhere = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("COLLECTIVE_TEST_EXAMPLES", "40")),
    phases=[Phase.explicit, Phase.generate],
)


def numpy_dtype(name):
    return np.dtype(bfloat16 if name == "bfloat16" else name)


def values(rank, shape, dtype, seed=0):
    """Return this rank's array of small numbers of both signs, exact in every dtype."""
    generator = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    low = 0 if dtype == "uint8" else -6
    numbers = generator.integers(low, 7, shape)
    if dtype.startswith(("float", "bfloat")):
        numbers = numbers + generator.integers(0, 4, shape) / 4
    return np.asarray(numbers, numpy_dtype(dtype))


def unaligned(array, skip):
    """Return the array in memory that is aligned to its elements only."""
    whole = np.empty(array.size + skip, array.dtype)
    moved = whole[skip:].reshape(array.shape)
    moved[...] = array
    return moved


def reduced(arrays, op):
    """Return the right result of the collective, in the arrays' dtype."""
    dtype = arrays[0].dtype
    stack = np.stack(arrays)
    if dtype.kind == "b":
        return stack.any(0) if op in (Op.Sum, Op.Max) else stack.all(0)
    whole = dtype.kind in "iu"
    stack = stack.astype(np.int64 if whole else np.float64)
    if op == Op.Sum:
        result = stack.sum(0)
    elif op == Op.Average:
        result = np.trunc(stack.sum(0) / len(arrays)) if whole else stack.mean(0)
    elif op == Op.Product:
        result = stack.prod(0)
    else:
        result = stack.min(0) if op == Op.Min else stack.max(0)
    return result.astype(dtype)


def assert_close(actual, wanted):
    """Check equality, except for the last bits if the dtype has to round."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    if wanted.dtype.kind in "iub":
        np.testing.assert_array_equal(actual, wanted)
        return
    relative = {"float32": 1e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}
    np.testing.assert_allclose(
        actual.astype(np.float64),
        wanted.astype(np.float64),
        rtol=relative[wanted.dtype.name],
        atol=relative[wanted.dtype.name],
    )


def same_bits(collective, array):
    """Return whether all ranks hold the same bytes."""
    mine = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    everyone = collective.allgather(mine.reshape(1, -1))
    return bool((everyone == everyone[0]).all())


def assert_rests():
    """Check that this process comes to rest, and uses almost no time of a processor.

    This takes a while, because TensorFlow's own threads search for work first. The time
    counts that has really passed, which is long if others have the processor.
    """
    end = time.monotonic() + 60
    while True:
        began, used = time.monotonic(), time.process_time()
        time.sleep(0.5)
        used, passed = time.process_time() - used, time.monotonic() - began
        if used < 0.2 * passed:
            return
        assert time.monotonic() < end, f"{used:.2f} s of {passed:.2f} s"
