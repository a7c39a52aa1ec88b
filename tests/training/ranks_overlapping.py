"""A step in which the sum of the last layer's gradient does not wait for others.

    collectiverun -np 2 python tests/training/ranks_overlapping.py native

It prints how many sums are ready before the gradient of the first layer is computed: at least
one bucket, which travels while the backward pass continues.
"""

import sys

import numpy as np

from collective import backends
from collective.backends import Options

BACKEND = backends.get(sys.argv[1], Options(bucket_bytes=10_000))

import keras  # noqa: E402

from collective import training  # noqa: E402

FIRST, LAST = (50, 60), (60, 70)  # the shapes of the kernels
calls = []
all_reduce = BACKEND._all_reduce


def watched_all_reduce(tensors):
    results = all_reduce(tensors)
    calls.append((list(tensors), list(results)))
    return results


def made_before(operation):
    """Return all operations that an operation waits for."""
    found, waiting = set(), [operation]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [*(t.op for t in op.inputs), *op.control_inputs]
    return found


def make():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input(FIRST[:1]), dense(60, "tanh"), dense(70)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


BACKEND._all_reduce = watched_all_reduce
rows = 8 * BACKEND.size
data = np.ones((rows, 50), np.float32), np.ones((rows, 70), np.float32)
training.fit(make, data, backend=BACKEND, global_batch_size=rows // 2, verbose=0)
early = 0
for tensors, results in calls:
    shapes = [tuple(t.shape) for t in tensors]
    if FIRST in shapes and LAST in shapes:
        first = tensors[shapes.index(FIRST)].op
        early += first not in made_before(results[shapes.index(LAST)].op)
print(f"{early} sum leaves early", flush=True)
