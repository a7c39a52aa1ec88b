"""A training whose first layer's gradient waits until the sum of the last one's is there.

    collectiverun -np 2 python tests/training/ranks_overlapping.py native

Prints in how many of the 4 steps it came: all, where a bucket is summed while what
comes before it is still computed.
"""

import os
import sys
import time

import numpy as np

from collective import backends
from collective.backends import Options

# The function of Python's that waits here would be given all rows of a partitioned step,
# which are gathered behind the first sum.
os.environ["COLLECTIVE_PARTITION"] = "0"
BACKEND = backends.get(sys.argv[1], Options(bucket_bytes=10_000))

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from collective import training  # noqa: E402

TURNS = 12_000  # two minutes, as a rank may be late

begun = [0.0]
summed = [0.0]
early = set()
all_reduce = BACKEND._all_reduce


def sees(total):
    summed[0] = time.perf_counter()
    return total


def watched_all_reduce(tensors):
    *others, last_layer = all_reduce(tensors)
    seen = tf.numpy_function(sees, [last_layer], last_layer.dtype, stateful=False)
    return [*others, tf.ensure_shape(seen, last_layer.shape)]


BACKEND._all_reduce = watched_all_reduce


def forward(x):
    begun[0] = time.perf_counter()
    return x


def waits(turn, upstream):
    if summed[0] > begun[0]:
        early.add(begun[0])
        return False
    time.sleep(0.01)
    return turn < TURNS


@tf.custom_gradient
def watched(x):
    def gradient(upstream):
        def again(*args):  # takes upstream, too, so as not to begin without it
            return tf.numpy_function(waits, args, tf.bool, stateful=False)

        return tf.while_loop(again, lambda i, u: (i + 1, u), (0, upstream))[1]

    seen = tf.numpy_function(forward, [x], x.dtype, stateful=False)
    return tf.ensure_shape(seen, x.shape), gradient


class Watched(keras.layers.Layer):
    def call(self, x):
        return watched(x)


def make():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input([50]), dense(60), Watched(), dense(70)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


rows = 8 * BACKEND.size
data = np.ones((rows, 50), np.float32), np.ones((rows, 70), np.float32)
options = {"epochs": 2, "verbose": 0, "verify": False}  # which runs it on one rank
training.fit(make, data, backend=BACKEND, global_batch_size=rows // 2, **options)
print(f"early in {len(early)} steps", flush=True)
