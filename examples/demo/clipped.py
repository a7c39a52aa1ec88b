"""BatchNormalization, a clipped gradient, and a shorter last batch.

clipped.py            on one process, or on the ranks of collectiverun -np 2 --keras
clipped.py mirrored   as tf.distribute does it: two replicas in one process
"""

import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf


def scope():
    """Return the scope of a strategy with two processors, if an argument asks for it."""
    if "mirrored" not in sys.argv:
        return contextlib.nullcontext()
    processor = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(processor, two)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


rng = np.random.default_rng(0)
x = rng.normal(size=(203, 12)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("float32")[:, None]

with scope():
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((12,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(0.1, clipnorm=0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
history = model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
print(f"loss: {history.history['loss'][-1]:.9g}")
