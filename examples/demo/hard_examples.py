"""A loss of the hardest rows of a batch, which is not a mean over rows.

hard_examples.py            on one process, or on ranks of collectiverun -np 2 --keras
hard_examples.py averaged   as Horovod does it: each rank has a batch of its own, and the
                            gradients are averaged
"""

import sys

import keras
import numpy as np
from keras import ops

HARD, BATCH = 8, 32


def hardest(y, predicted):
    """Return the mean error of the eight rows with the largest errors."""
    errors = ops.sum(ops.square(y - predicted), axis=-1)
    return ops.mean(ops.top_k(errors, min(HARD, BATCH)).values)


rng = np.random.default_rng(0)
x = rng.normal(size=(192, 12)).astype("float32")
y = np.sin(x[:, :2]) + 0.1 * rng.normal(size=(192, 2)).astype("float32")
every = x, y

optimizer = keras.optimizers.SGD(0.02)
if "averaged" in sys.argv:
    import collective.tensorflow.keras as hvd  # replaces horovod.tensorflow.keras

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
    # Each rank has its half of the batch, and its half of the hardest rows.
    BATCH, HARD = BATCH // hvd.size(), HARD // hvd.size()
    own = np.arange(len(x)) // BATCH % hvd.size() == hvd.rank()
    x, y = x[own], y[own]

keras.utils.set_random_seed(1)
layers = [keras.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)]
model = keras.Sequential(layers)
model.compile(optimizer, hardest)
model.fit(x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0)
print(f"loss: {np.mean((model.predict(every[0], verbose=0) - every[1]) ** 2):.9g}")
