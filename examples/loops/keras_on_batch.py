"""train_on_batch, test_on_batch and predict_on_batch in a loop, with class weights."""

import sys

import keras
import numpy as np


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(4)
    random = np.random.default_rng(7)
    x = random.normal(size=(90, 6)).astype(keras.config.floatx())
    y = (x[:, 0] > 0.3).astype("int64")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(2, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    for _ in range(3):
        order = random.permutation(80)
        for first in range(0, 80, 19):
            rows = order[first : first + 19]
            logs = model.train_on_batch(
                x[rows], y[rows], class_weight={0: 1.0, 1: 2.0}, return_dict=True
            )
        print("train:", *logs.values())
        print("test:", *model.test_on_batch(x[80:], y[80:]))
    print("predicted:", *model.predict_on_batch(x[80:]).sum(axis=0))
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
