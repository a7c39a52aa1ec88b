"""keras.distribution.DataParallel, in the form for JAX: with arrays, and with a data set."""

import sys

import keras
import numpy as np
import tensorflow as tf


def main():
    """Train, and return the model."""
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((len(devices),), ["batch"], devices)
    parallel = keras.distribution.DataParallel(device_mesh=mesh)
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(50, 4)).astype(keras.config.floatx())
    y = x[:, :1] * 2 - 1
    with parallel.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        print("arrays:", *history.history["loss"])
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
        history = model.fit(batches, epochs=2, verbose=0)
    print("batches:", *history.history["loss"], *history.history["mae"])
    keras.distribution.set_distribution(parallel)
    print("evaluated:", *model.evaluate(batches, verbose=0))
    print("predicted:", float(model.predict(x, verbose=0).sum()))
    keras.distribution.set_distribution(None)
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
