"""Mixed precision: bfloat16 within the layers, float32 variables and loss."""

import sys

import keras
import numpy as np
from keras import layers


def main():
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_bfloat16")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(521, 16)).astype("float32")
    y = (x @ rng.normal(size=(16, 3))).argmax(axis=1)

    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(40, activation="relu"),
            layers.Dense(40, activation="relu"),
            layers.Dense(3),
            layers.Activation("softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(x, y, batch_size=48, epochs=4, shuffle=False, verbose=2)
    keras.config.set_dtype_policy("float32")
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    print(f"kernel: {model.layers[0].kernel.dtype}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
